"""Collects: what ranks that divide the ops of a stage made in parts, put together for all."""

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from penstock.graph.graph import Graph
from penstock.graph.parts import part_in
from penstock.graph.stages import StageEdge, Stages
from penstock.graph.tensor.cuts import collects_in, how_of
from penstock.graph.tensor.of_rank import of_rank
from penstock.graph.trace import Capture
from penstock.program.instructions import Collect
from penstock.program.program import Program
from penstock.runtime.lane import SumCalls

if TYPE_CHECKING:
    from penstock.runtime.rank import Rank
    from penstock.state.weights import StageWeights


def own_capture(capture: Capture, program: Program, rank: int) -> Capture:
    """Return the step as a rank has it: of those that divide its ops, with its own slices."""
    return capture if program.tensor == 1 else of_rank(capture, program.grid.slice_of(rank))


def collect_calls(rank: "Rank", instruction: Collect) -> SumCalls:
    """Return the calls of one Collect: the last puts what came where its reader looks for it."""
    stages, graph = rank.stages, rank.capture.graph
    edge = stages.edges[instruction.edge]
    values = collected(rank.capture, edge, instruction.how)
    kind = instruction.of.kind
    segment = stages.stages[instruction.of.stage].segment("F" if kind == "F" else "B")
    lasting = {graph.nodes[value].storage for value in segment.keeps}
    lasting |= _several(stages, graph)
    copies = [value for value in values if graph.nodes[value].storage in lasting]
    frame = rank.frames[edge.target, instruction.of.micro_batch]
    way, transport, ranks = _WAYS[instruction.how], rank.transport, instruction.ranks
    place, rooms = ranks.index(transport.rank), list[tuple[int, CollectRoom]]()

    def make() -> None:
        rooms.clear()  # of a step that was left before it took them
        for value in values:
            rooms.append((value, way.make(frame[value], place, len(ranks), value in copies)))

    def send() -> None:
        for _, room in rooms:
            way.send(transport, ranks, *room)

    def take() -> None:
        for value, room in rooms:
            frame[value] = way.take(place, *room)
        rooms.clear()

    return SumCalls(send, make, take)


def _several(stages: Stages, graph: Graph) -> set[int]:
    """Return the storages in which several values lie that go from stage to stage.

    One of them collected in its place would be collected again with the next one.
    """
    counts = Counter(graph.nodes[value].storage for edge in stages.edges for value in edge.values)
    return {storage for storage, count in counts.items() if count > 1}


# -- what is collected, how -----------------------------------------------------------------------


class CollectRoom(NamedTuple):
    """A value as its rank has it, and room for what comes; the same, where it comes there."""

    own: Tensor
    came: Tensor


class _CollectWay(NamedTuple):
    """One kind of Collect.

    make:   (own, place among the ranks, how many, whether others read it) -> the room for it.
    send:   (transport, ranks, *room), maybe beside the computing thread.
    take:   (place, *room) -> the value that its reader gets.
    """

    make: Callable[[Tensor, int, int, bool], CollectRoom]
    send: Callable[..., None]
    take: Callable[[int, Tensor, Tensor], Tensor]


def _own(own: Tensor, place: int, count: int, copies: bool) -> CollectRoom:
    if copies or not own.is_contiguous():
        own = own.clone(memory_format=torch.contiguous_format)
    return CollectRoom(own, own)


def _room_of_all(own: Tensor, place: int, count: int, copies: bool) -> CollectRoom:
    """Return room for what all ranks have, along a new first dim."""
    whole = own.new_empty((count, *own.shape))
    whole[place].copy_(own)
    return CollectRoom(own, whole)


def _room_of_parts(own: Tensor, place: int, count: int, copies: bool) -> CollectRoom:
    """Return room for what each rank has for this one; its own part is there."""
    own = own.contiguous()
    made = torch.empty_like(own)
    made[place].copy_(own[place])
    return CollectRoom(own, made)


def _ends(total: Tensor, ranks: tuple[int, ...]) -> list[int]:
    size = total.numel() // len(ranks)
    return [at * size for at in range(len(ranks) + 1)]


def _sum(transport: Any, ranks: tuple[int, ...], own: Tensor, came: Tensor) -> None:
    transport.all_reduce(own, ranks)


def _gather(transport: Any, ranks: tuple[int, ...], own: Tensor, came: Tensor) -> None:
    transport.all_gather(came.view(-1), _ends(came, ranks), ranks)


def _scatter(transport: Any, ranks: tuple[int, ...], own: Tensor, came: Tensor) -> None:
    transport.reduce_scatter(own.view(-1), _ends(own, ranks), ranks)


def _exchange(transport: Any, ranks: tuple[int, ...], own: Tensor, came: Tensor) -> None:
    gives, takes = ([part.reshape(-1) for part in value] for value in (own, came))
    transport.swap(gives, takes, ranks)


def _as_it_came(place: int, own: Tensor, came: Tensor) -> Tensor:
    return came


def _part(place: int, own: Tensor, came: Tensor) -> Tensor:
    """Return this rank's part of a sum, whose parts lie along the first dim."""
    return own[place].clone()


def _parts(place: int, own: Tensor, came: Tensor) -> Tensor:
    return came.view(came.shape[0], 1, 1, *came.shape[1:])


_WAYS = {
    "sum": _CollectWay(_own, _sum, _as_it_came),
    "gather": _CollectWay(_room_of_all, _gather, _as_it_came),
    "scatter": _CollectWay(_own, _scatter, _part),
    "exchange": _CollectWay(_room_of_parts, _exchange, _parts),
}


def collected(capture: Capture, edge: StageEdge, how: str) -> list[int]:
    """Return the values of an edge that are collected so."""
    nodes = capture.graph.nodes
    read = {nodes[at].inputs[0] for at in collects_in(nodes) if how_of(nodes, at) == how}
    return [value for value in edge.values if value in read]


def told_slices(weights: "StageWeights", nodes: list[int]) -> list[int]:
    """Return those parameters of which each rank of a tensor axis has a slice of its own."""
    return [node for node in nodes if _is_slice(weights.names[node])]


def only_slices(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what of a rank's state no other rank of its tensor axis has, by name."""
    return {name: value for name, value in tensors.items() if _is_slice(name)}


def _is_slice(name: str) -> bool:
    part = part_in(name)
    return part is not None and part.order is not None
