"""Packing: messages whose numbers go in a few bits each, on any transport (graph/codec.py)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.graph.codec import TensorForm, packed_kinds, packer, unpacker
from penstock.graph.graph import Graph
from penstock.graph.wire import is_packed
from penstock.transport.transport import Send, TensorSpec, Wait


@dataclass(frozen=True, slots=True)
class Packing:
    """How the messages of one edge are packed: bits of each of its tensors, 0 where it is not."""

    specs: tuple[TensorSpec, ...]
    bits: tuple[int, ...]

    @property
    def sent(self) -> tuple[TensorSpec, ...]:
        """Return what goes over the wire."""
        return tuple(part for parts in self._parts() for part in parts)

    def sender(self, send: Send) -> Send:
        """Return `send` of messages that are packed first."""
        if not any(self.bits):
            return send
        rows = zip(self.specs, self.bits, strict=True)
        packers = [packer(TensorForm(*spec), bits) if bits else _alone for spec, bits in rows]

        def packing(tensors: Sequence[Tensor]) -> None:
            each = zip(packers, tensors, strict=True)
            send([part for pack, tensor in each for part in pack(tensor)])

        return packing

    def receiver(self, wait: Wait) -> Wait:
        """Return `wait` for messages that are unpacked then."""
        if not any(self.bits):
            return wait
        rows = zip(self.specs, self.bits, strict=True)
        unpackers = [unpacker(TensorForm(*spec), bits) if bits else _only for spec, bits in rows]
        counts = list(map(len, self._parts()))

        def unpacking() -> list[Tensor]:
            parts = iter(wait())
            each = zip(unpackers, counts, strict=True)
            return [unpack([next(parts) for _ in range(count)]) for unpack, count in each]

        return unpacking

    def _parts(self) -> list[list[TensorSpec]]:
        rows = zip(self.specs, self.bits, strict=True)
        return [
            [TensorSpec(*part) for part in packed_kinds(TensorForm(*spec), bits)]
            if bits
            else [spec]
            for spec, bits in rows
        ]


def packing_of(graph: Graph, values: Sequence[int], bits: int) -> Packing:
    """Return how messages of these values are packed where a number has so many bits."""
    nodes = graph.nodes
    specs = tuple(TensorSpec(nodes[v].shape, getattr(torch, nodes[v].dtype)) for v in values)
    return Packing(specs, tuple(bits if is_packed(graph, v, bits) else 0 for v in values))


def _alone(tensor: Tensor) -> list[Tensor]:
    return [tensor]


def _only(parts: Sequence[Tensor]) -> Tensor:
    return parts[0]
