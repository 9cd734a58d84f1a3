"""Hosts: ranks of several hosts, through shared memory inside each and over a network between.

A message, and a sum or a gather whose ranks are all on one host, goes through its memory, and so
does what ranks of one host swap; everything else goes over the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import Tensor

from penstock.transport.shared_memory import SharedMemoryTransport
from penstock.transport.torch_distributed import TorchDistributedTransport
from penstock.transport.transport import Post, Send, TensorSpec, Transport, Wait, Waited


def spanning(groups: Sequence[tuple[int, ...]], here: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the sets of ranks that are not all `here`, those of one host."""
    return [ranks for ranks in groups if not {*ranks} <= {*here}]


@final
class HostsTransport:
    """One rank's end of two transports of the same ranks; `here` are those of its host."""

    def __init__(
        self,
        inside: SharedMemoryTransport,
        between: TorchDistributedTransport,
        here: Sequence[int],
    ) -> None:
        self._inside, self._between, self._here = inside, between, frozenset(here)

    @property
    def rank(self) -> int:
        return self._between.rank

    @property
    def num_ranks(self) -> int:
        return self._between.num_ranks

    @property
    def waited(self) -> Waited:
        one, other = self._inside.waited, self._between.waited
        receive_s, send_s = one.to_receive_s + other.to_receive_s, one.to_send_s + other.to_send_s
        return Waited(receive_s, send_s)

    def _to(self, *ranks: int) -> Transport:
        """Return what reaches these ranks."""
        return self._inside if self._here.issuperset(ranks) else self._between

    @property
    def is_queued(self) -> bool:
        return False

    @property
    def held_bytes(self) -> int:
        return 0

    def bind_send(
        self, edge: int, peer: int, specs: tuple[TensorSpec, ...], *, ahead: int = 0
    ) -> Send:
        return self._to(peer).bind_send(edge, peer, specs, ahead=ahead)

    def bind_receive(
        self, edge: int, peer: int, specs: tuple[TensorSpec, ...], *, ahead: int = 0
    ) -> tuple[Post | None, Wait]:
        return self._to(peer).bind_receive(edge, peer, specs, ahead=ahead)

    def bind_memory(self, edge: int, maker: int, reader: int, size_bytes: int) -> Tensor | None:
        return self._to(maker, reader).bind_memory(edge, maker, reader, size_bytes)

    def connect(self, groups: Sequence[tuple[int, ...]]) -> None:
        self._between.connect(spanning(groups, [*self._here]))

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> None:
        self._to(*ranks).all_reduce(tensor, ranks)

    def all_gather(self, whole: Tensor, cuts: Sequence[int], ranks: tuple[int, ...]) -> None:
        self._to(*ranks).all_gather(whole, cuts, ranks)

    def reduce_scatter(self, whole: Tensor, cuts: Sequence[int], ranks: tuple[int, ...]) -> None:
        self._to(*ranks).reduce_scatter(whole, cuts, ranks)

    def all_gather_bytes(self, payload: bytes, ranks: tuple[int, ...]) -> list[bytes]:
        return self._to(*ranks).all_gather_bytes(payload, ranks)

    def broadcast_bytes(self, payload: bytes, ranks: tuple[int, ...]) -> bytes:
        return self._to(*ranks).broadcast_bytes(payload, ranks)

    def swap(
        self, gives: Sequence[Tensor], takes: Sequence[Tensor], ranks: tuple[int, ...]
    ) -> None:
        """Give and take inside the host through its memory, all else over the network."""
        near = [place for place, rank in enumerate(ranks) if rank in self._here]
        if 1 < len(near) < len(ranks):
            inside = tuple(ranks[place] for place in near)
            self._inside.swap([gives[p] for p in near], [takes[p] for p in near], inside)
            gives, takes = (
                [row[:0] if place in near else row for place, row in enumerate(rows)]
                for rows in (gives, takes)
            )
        self._to(*ranks).swap(gives, takes, ranks)

    def barrier(self) -> None:
        self._between.barrier()

    def abort(self, reason: str) -> None:
        self._between.abort(reason)
        self._inside.abort(reason)

    def close(self) -> None:
        self._between.close()
        self._inside.close()
