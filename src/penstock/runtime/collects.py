"""Collects: what ranks that divide the ops of a stage made in parts, put together for all."""

from collections import Counter
from typing import TYPE_CHECKING, Any

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
from penstock.runtime.calls import Call

if TYPE_CHECKING:
    from penstock.runtime.rank import Rank
    from penstock.state.weights import StageWeights


def own_capture(capture: Capture, program: Program, rank: int) -> Capture:
    """Return the step as a rank has it: of those that divide its ops, with its own slices."""
    return capture if program.tensor == 1 else of_rank(capture, program.grid.slice_of(rank))


def collect_call(rank: "Rank", instruction: Collect) -> Call:
    """Return the call of one Collect: it puts what is collected where its reader looks for it."""
    stages, graph = rank.stages, rank.capture.graph
    edge = stages.edges[instruction.edge]
    values = collected(rank.capture, edge, instruction.how)
    kind = instruction.of.kind
    segment = stages.stages[instruction.of.stage].segment("F" if kind == "F" else "B")
    lasting = {graph.nodes[value].storage for value in segment.keeps}
    lasting |= _several(stages, graph)
    copies = [value for value in values if graph.nodes[value].storage in lasting]
    frame = rank.frames[edge.target, instruction.of.micro_batch]
    transport, ranks = rank.transport, instruction.ranks

    def add() -> None:
        for value in values:
            own = frame[value]
            if value in copies or not own.is_contiguous():
                own = own.clone(memory_format=torch.contiguous_format)
            transport.all_reduce(own, ranks)
            frame[value] = own

    def gather() -> None:
        for value in values:
            frame[value] = _gathered(frame[value], transport, ranks)

    def scatter() -> None:
        for value in values:
            frame[value] = _scattered(frame[value], transport, ranks, copies=value in copies)

    def exchange() -> None:
        for value in values:
            frame[value] = _exchanged(frame[value], transport, ranks)

    calls = {"sum": add, "gather": gather, "scatter": scatter, "exchange": exchange}
    return calls[instruction.how]


def _several(stages: Stages, graph: Graph) -> set[int]:
    """Return the storages in which several values lie that go from stage to stage.

    One of them collected in its place would be collected again with the next one.
    """
    counts = Counter(graph.nodes[value].storage for edge in stages.edges for value in edge.values)
    return {storage for storage, count in counts.items() if count > 1}


def _gathered(own: Tensor, transport: Any, ranks: tuple[int, ...]) -> Tensor:
    """Return what all ranks have, along a new first dim."""
    size, place = own.numel(), ranks.index(transport.rank)
    whole = own.new_empty(len(ranks) * size)
    whole[place * size : (place + 1) * size].copy_(own.reshape(-1))
    transport.all_gather(whole, [at * size for at in range(len(ranks) + 1)], ranks)
    return whole.view(len(ranks), *own.shape)


def _scattered(own: Tensor, transport: Any, ranks: tuple[int, ...], *, copies: bool) -> Tensor:
    """Return this rank's part of a sum, whose parts lie along the first dim."""
    if copies or not own.is_contiguous():
        own = own.clone(memory_format=torch.contiguous_format)
    size, place = own.numel() // len(ranks), ranks.index(transport.rank)
    transport.reduce_scatter(own.view(-1), [at * size for at in range(len(ranks) + 1)], ranks)
    return own[place].clone()


def _exchanged(own: Tensor, transport: Any, ranks: tuple[int, ...]) -> Tensor:
    """Return what each rank has for this one, whose place is its own along the first dim."""
    own, place = own.contiguous(), ranks.index(transport.rank)
    made = torch.empty_like(own)
    made[place].copy_(own[place])
    gives, takes = ([part.reshape(-1) for part in value] for value in (own, made))
    transport.swap(gives, takes, ranks)
    return made.view(len(ranks), 1, 1, *own.shape[1:])


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
