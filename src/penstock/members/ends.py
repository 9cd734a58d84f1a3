"""Ends: how a member gets its end of the transport of a generation, wherever the others are.

Members of one host share memory; between hosts they connect anew for every generation.  They find
each other by the mesh's own lines, so no member keeps anything for the others, and a member that
is lost meanwhile ends the waiting of all.
"""

from collections.abc import Callable
from typing import final

import torch

from penstock.device import here, of
from penstock.members.mesh import Mesh
from penstock.members.words import View
from penstock.transport.groups import Prefixed, world_of
from penstock.transport.several_hosts import HostsTransport
from penstock.transport.shared_memory import SharedMemoryTransport
from penstock.transport.torch_distributed import TorchDistributedTransport
from penstock.transport.transport import Store, Transport

JOIN_S = 30.0  # for which members of a view may take to be ready

News = Callable[[], None]
Join = Callable[[View, int, News], Transport]


def joined(mesh: Mesh, view: View, position: int, news: News) -> Transport:
    """Return a member's end of a view: memory inside a host, gloo between; NCCL between GPUs.

    Raises:   TransportError: another one does not come, or as `news` does.
    """
    store, device = GenerationStore(mesh, view.generation), here().place
    keys = [mesh.where[member].key for member in view.members]
    at_home = tuple(rank for rank, key in enumerate(keys) if key == keys[position])
    count = len(keys)
    if of(device).is_cpu and len(at_home) == count:
        return _inside(store, position, at_home, count, news)
    between = _between(mesh, store, (position, count), device, news)
    if not of(device).is_cpu or len(at_home) == 1:
        return between
    home = Prefixed(store, f"host of {at_home[0]}")
    return HostsTransport(_inside(home, position, at_home, count, news), between, at_home)


def _inside(
    store: Store, rank: int, here: tuple[int, ...], num_ranks: int, news: News
) -> SharedMemoryTransport:
    return SharedMemoryTransport(rank, num_ranks, store, here=here, limit_s=JOIN_S, news=news)


def _between(
    mesh: Mesh, store: Store, place: tuple[int, int], device: torch.device, news: News
) -> TorchDistributedTransport:
    """Return an end among all ranks of a view; `place` is this one, of how many."""
    address = mesh.where[mesh.own].host
    own = Prefixed(store, "world")
    world = world_of(place, own, address=address, device=device, limit_s=JOIN_S, news=news)
    return TorchDistributedTransport(device, Prefixed(store, "watch"), world=world)


@final
class GenerationStore:
    """What members of a generation let each other see, as transports want it, without a server."""

    def __init__(self, mesh: Mesh, generation: int) -> None:
        self._mesh, self._generation = mesh, generation

    def set(self, key: str, value: str, /) -> None:
        """Let all members see a value."""
        self._mesh.put(self._generation, key, value)

    def get(self, key: str, /) -> bytes:
        """Return a value, once it is there."""
        self._mesh.wait(lambda: self.check([key]))
        found = self._mesh.found(self._generation, key)
        assert found is not None, "it was waited for"
        return found.encode()

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys are there."""
        return all(self._mesh.found(self._generation, key) is not None for key in keys)
