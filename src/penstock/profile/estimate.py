"""Estimate: the profile of a graph on a device that is not here, from the peaks of the device.

Ops by their roofline (roofline.py).  Adding gradients, the optimizer and copies of weights by the
bytes that they move; an optimizer reads weight, gradient and state, and writes weight and state.
"""

from collections.abc import Sequence

from penstock.cluster.cluster import Cluster, DeviceKind
from penstock.graph.graph import Graph
from penstock.profile.profile import CopyCost, PackCost, Profile, ProfileBasis, UpdateCost
from penstock.profile.roofline import DEFAULT, Efficiency, op_seconds

CALL_S = 30e-6  # of Python, per segment: what measured profiles of CPU hosts have
_FAR_BYTES_PER_S = 12e9  # pinned host memory over PCIe 3 x16, as it is usually measured
_UPDATE_LAUNCHES = 12  # of an optimizer that takes all weights at once
_PACK_WHOLE = (7, 3), (8.0, 4.0)  # kernels of packing and unpacking; bytes moved of each byte
_PACK_PARTS = (13, 12), (10.0, 7.0)  # the same where codes share bytes
_UPDATE_WORKSPACE = 1.0  # bytes per byte: such an optimizer holds a temporary of every weight


def estimated(
    graph: Graph,
    device: DeviceKind,
    state_bytes_per_byte: float,
    efficiency: Efficiency = DEFAULT,
    *,
    wire: Sequence[int] = (),
) -> Profile:
    """Return the profile that `graph` would have on `device`.

    state_bytes_per_byte:  optimizer state held per byte of parameter.
    wire:     bits of a number in messages, for which to say what packing costs.
    Ignores:  what ops hold only while they run; what other ranks of the host take from it;
              clipping; all that roofline.py ignores.
    Raises:   ClusterError: the device has no FLOP/s for the dtype of a product.
    """
    share = dict(efficiency.share)["element-wise"]
    byte_s = 1 / (device.memory_bytes_per_s * share)
    started_s = efficiency.launch_s + efficiency.host_s
    return Profile(
        graph=graph.digest,
        basis=ProfileBasis(device.name, "", "estimated", 0),
        op_s=op_seconds(graph, device, efficiency),
        workspace_bytes=(0,) * len(graph.nodes),
        call_s=CALL_S,
        accumulate_s_per_byte=3 * byte_s,
        update=UpdateCost(
            (3 + 2 * state_bytes_per_byte) * byte_s,
            _UPDATE_LAUNCHES * started_s,
            state_bytes_per_byte,
            _UPDATE_WORKSPACE,
        ),
        copying=CopyCost(2 * byte_s, 1 / _FAR_BYTES_PER_S, started_s),
        kind=device.name,
        packing=_packing(wire, byte_s, started_s),
    )


def _packing(wire: Sequence[int], byte_s: float, launch_s: float) -> tuple[PackCost, ...]:
    """Return the cost of packing, from the tensors that it reads and writes."""
    return tuple(
        PackCost(
            bits,
            launches[0] * launch_s,
            passes[0] * byte_s,
            launches[1] * launch_s,
            passes[1] * byte_s,
        )
        for bits in wire
        for launches, passes in [_PACK_WHOLE if bits in (8, 16) else _PACK_PARTS]
    )


def kinds_of(cluster: Cluster) -> tuple[DeviceKind, ...]:
    """Return the kinds of device that the hosts of a cluster have, in the order of the hosts."""
    names = dict.fromkeys(name for host in cluster.hosts for name in host.kinds or (host.device,))
    by_name = {kind.name: kind for kind in cluster.devices}
    return tuple(by_name[name] for name in names)
