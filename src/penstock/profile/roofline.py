"""Roofline: the least seconds that an op can take on a device, and the share of that it reaches.

    seconds = launch_s + max(FLOP / (peak * efficiency), bytes / (bandwidth * efficiency))

On a device that the host runs ahead of, as an accelerator is, FLOP and operands of a product are
paid one after the other, and the host's launches lie beside all: with D the sum over ops of what
the device takes, and H that of the host,

    device_s = FLOP / (peak * efficiency) + bytes / (bandwidth * efficiency)
    all ops  = (D^p + H^p)^(1/p), p = 2.5

which ops share by what they add to D and H.  These are the lanes of estimate/work_terms.py.

FLOP count only for products, convolutions and attention; everything else is as fast as memory.
The peak is the one that the device has for the dtype of the op's result: with "float32" that is
what float32 is computed with, so a job that allows TF32 wants the rate of TF32 there.

Ignores:  caches; the shapes of products (small and thin ones are slower); fused kernels.
Source:   "Roofline: an insightful visual performance model", CACM 2009.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from penstock.cluster.cluster import DeviceKind
from penstock.errors import ProfileError
from penstock.graph.graph import Graph, Node

POWER = 2.5  # of lanes that are busy at once: the longest, and more where two are alike
OpClass = Literal["product", "convolution", "attention", "reduction", "gather", "element-wise"]
CLASSES: tuple[OpClass, ...] = get_args(OpClass)
_COMPUTES = ("product", "convolution", "attention")
_GATHERS = ("embedding", "index", "gather", "scatter", "take")
_REDUCES = (
    "norm", "softmax", "logsumexp", "sum", "mean", "var", "std", "loss", "amax", "amin", "argmax",
    "argmin", "cumsum", "cumprod", "pool", "sort", "topk", "prod", "any", "all",
)  # fmt: skip


class Work(NamedTuple):
    """What an op does: its class, FLOP, bytes read and written."""

    of: OpClass
    flop: int
    moved_bytes: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The share of its roofline that a class of ops reaches, and the seconds of starting one op.

    share     by class, of the peak where FLOP bound it, else of the memory's bandwidth
    launch_s  of the device, for each op
    host_s    of the host, for each op, beside what the device computes; 0: it does not run ahead
    Raises:   ProfileError: a class is missing, a share is not above 0, a launch below 0.
    """

    share: tuple[tuple[OpClass, float], ...]
    launch_s: float
    host_s: float = 0.0

    def __post_init__(self) -> None:
        known = sorted(name for name, _ in self.share)
        if known != sorted(CLASSES):
            raise ProfileError(f"shares of {known}, not of {sorted(CLASSES)}")
        for name, value in self.share:
            if not 0 < value < math.inf:
                raise ProfileError(f"the share of {name} is {value}; it must be above 0")
        for name, value in (("launch_s", self.launch_s), ("host_s", self.host_s)):
            if not 0 <= value < math.inf:
                raise ProfileError(f"{name} is {value}; it must be 0 or more")


# Products: 271 of an A100's 312 TFLOP/s are reached at best, and 0.54 to 0.83 in whole steps of
# Transformers, attention 0.2 to 0.5, what memory bounds 0.65 to 0.95 (fitted: estimate.md).  The
# launch is what AutoParallel takes for the least that a kernel costs.  The others are guesses.
DEFAULT = Efficiency(
    (
        ("product", 0.7),
        ("convolution", 0.5),
        ("attention", 0.4),
        ("reduction", 0.5),
        ("gather", 0.5),
        ("element-wise", 0.7),
    ),
    launch_s=7e-6,
)


def op_seconds(graph: Graph, device: DeviceKind, efficiency: Efficiency) -> tuple[float, ...]:
    """Return the seconds of each node of `graph` on `device`; 0 for inputs and views.

    Raises:   ClusterError: the device has no FLOP/s for the dtype of a product.
    """
    share, works = dict(efficiency.share), works_of(graph)
    if efficiency.host_s:
        return _beside_host(works, device, efficiency)
    return tuple(
        0.0 if one is None else efficiency.launch_s + roofline_s(one, device) / share[one.of]
        for one in works
    )


def _beside_host(
    works: Sequence[Work | None], device: DeviceKind, efficiency: Efficiency
) -> tuple[float, ...]:
    """Return the seconds of ops that a host launches while the device computes those before."""
    share, bytes_s = dict(efficiency.share), 1 / device.memory_bytes_per_s
    rows = [
        None if work is None else efficiency.launch_s + _device_s(work, device, share, bytes_s)
        for work in works
    ]
    each = [seconds for seconds in rows if seconds is not None]
    on_device, on_host = sum(each), efficiency.host_s * len(each)
    longest = max(on_device, on_host)
    if not longest:
        return (0.0,) * len(rows)
    of_device, of_host = (on_device / longest) ** POWER, (on_host / longest) ** POWER
    whole = longest * (of_device + of_host) ** (1 / POWER)
    by_device = whole * of_device / (of_device + of_host) / on_device if on_device else 0.0
    for_one = whole * of_host / (of_device + of_host) / len(each)
    return tuple(0.0 if one is None else by_device * one + for_one for one in rows)


def _device_s(
    work: Work, device: DeviceKind, share: Mapping[OpClass, float], bytes_s: float
) -> float:
    if work.of not in _COMPUTES:
        return work.moved_bytes * bytes_s / share[work.of]
    seconds = work.flop / device.peak_flop_per_s(work.dtype) / share[work.of]
    if work.of == "attention":  # fused: what it reads is hidden
        return max(seconds, work.moved_bytes * bytes_s / share["element-wise"])
    return seconds + work.moved_bytes * bytes_s / share["element-wise"]


def roofline_s(work: Work, device: DeviceKind) -> float:
    """Return the least seconds of `work` on `device`.

    Raises:   ClusterError: the device has no FLOP/s for its dtype.
    """
    moved_s = work.moved_bytes / device.memory_bytes_per_s
    if work.of not in _COMPUTES:
        return moved_s
    return max(work.flop / device.peak_flop_per_s(work.dtype), moved_s)


def works_of(graph: Graph) -> tuple[Work | None, ...]:
    """Return the work of each node; None for inputs, views and parts of a result."""
    parts = Counter[int]()
    dtypes: dict[int, str] = {}
    for node in graph.nodes:
        if node.target == "getitem":
            parts[node.inputs[0]] += node.size_bytes
            dtypes.setdefault(node.inputs[0], node.dtype)
    return tuple(
        _work(graph, at, node, parts, dtypes) if _computes(at, node) else None
        for at, node in enumerate(graph.nodes)
    )


def _computes(at: int, node: Node) -> bool:
    is_view = node.storage != at and not node.flop
    return node.kind == "op" and node.target != "getitem" and not is_view


def _work(
    graph: Graph, at: int, node: Node, parts: Mapping[int, int], dtypes: Mapping[int, str]
) -> Work:
    of, written = class_of(node), node.size_bytes or parts.get(at, 0)
    read = sum(graph.nodes[source].size_bytes for source in set(node.inputs))
    if of == "gather" or "nll_loss" in node.target:  # of a table only what is taken from it
        read = min(read, 2 * written)
    return Work(of, node.flop, read + written, node.dtype or dtypes.get(at, ""))


def class_of(node: Node) -> OpClass:
    """Return the class of an op, by its name; what does more FLOP than it writes is a product."""
    name = node.target
    if "scaled_dot_product" in name or "flex_attention" in name:
        return "attention"
    if "convolution" in name or ".conv" in name:
        return "convolution"
    if any(word in name for word in _GATHERS):
        return "gather"
    if any(word in name for word in _REDUCES):
        return "reduction"
    return "product" if node.flop > math.prod(node.shape) else "element-wise"
