"""Routing: the rows that each expert of a mixture sees, measured on a job's first micro-batches.

What leads to them is computed, nothing else: the forward ops before the last router.  A step whose
ops are divided is computed for all of its ranks, one op after the other, so that what they collect
is there as in a run.  From this and from a rank's own seconds come those of the busiest rank.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, fx

from penstock import _compat
from penstock.batches.reads import started
from penstock.device import here
from penstock.errors import GraphError
from penstock.graph.code import callable_of, reseed
from penstock.graph.tensor.collect_op import COLLECT, rank_args
from penstock.graph.tensor.of_rank import of_rank
from penstock.graph.trace import Capture, on_device
from penstock.job import Job
from penstock.profile.expert_load import BY_EXPERTS, ExpertLoad, ends_by_product
from penstock.profile.marks import clock_of

MICRO_BATCHES = 4  # that are looked at
_RUNS, _WARM_UPS = 9, 2
Values = dict[int, Any]


def expert_loads(capture: Capture, job: Job) -> tuple[ExpertLoad, ...]:
    """Return the load of the experts of each layer, in the order of layers; of whole steps, and of
    those whose ops are divided.

    Ignores:  micro-batches of other shapes; steps whose tokens are divided.
    """
    graph = capture.graph
    wanted = sorted({ends for _, ends in ends_by_product(graph)})
    if not wanted or graph.context:
        return ()
    ranks = [of_rank(capture, rank) for rank in range(graph.tensor)]
    known = [_held(each) for each in ranks]
    rows: list[dict[int, tuple[int, ...]]] = []
    for batch in islice(started(job.data, 0), MICRO_BATCHES):
        try:
            leaves = capture.leaves(on_device(batch))
        except GraphError:
            continue
        given = {at: leaves[place] for at, place in capture.inputs.items()}
        ends = _computed(ranks, [{**own, **given} for own in known], wanted)
        rows.append({at: _counts(value) for at, value in ends.items()})
    return tuple(ExpertLoad(at, tuple(row[at] for row in rows)) for at in wanted if rows)


def _counts(ends: Tensor) -> tuple[int, ...]:
    places: list[int] = [int(each) for each in ends]
    return tuple(b - a for a, b in zip((0, *places), places, strict=False))


def _held(capture: Capture) -> Values:
    """Return a value for each node that is neither an op nor of the batch."""
    nodes, found = capture.graph.nodes, dict[int, Any](capture.constants)
    state = {**capture.parameters, **dict(capture.model.named_buffers())}
    dtype = getattr(torch, nodes[capture.graph.loss].dtype)
    for at, node in enumerate(nodes):
        if node.kind in ("parameter", "buffer"):
            found[at] = state[node.name].detach().to(getattr(torch, node.dtype)).contiguous()
        elif node.kind == "scale":
            found[at] = torch.tensor(1.0, dtype=dtype, device=here().place)
    return found


def _computed(
    ranks: Sequence[Capture], values: Sequence[Values], wanted: Iterable[int]
) -> dict[int, Tensor]:
    """Return these nodes' values on the first of some ranks; of one rank, as it is alone.

    values:   by rank, of each node that is no op.
    """
    first, ordinal = ranks[0], 0
    graph, index = first.graph, {node: at for at, node in enumerate(first.fx_nodes)}
    needed = _leading_to(graph.nodes, wanted)
    with torch.no_grad(), _compat.below_autograd():
        for at, node in enumerate(first.fx_nodes):
            is_random = graph.nodes[at].effect == "random"
            ordinal += is_random
            if at not in needed or graph.nodes[at].kind != "op":
                continue
            if node.target is COLLECT and len(ranks) > 1:
                _collect(node, [own[index[node.args[0]]] for own in values], values, at)  # pyright: ignore
                continue
            for rank, own in enumerate(values):
                args, kwargs = fx.map_arg(
                    (rank_args(node, rank), node.kwargs), lambda n, own=own: own[index[n]]
                )
                if is_random:
                    reseed(1, ordinal - 1)
                own[at] = callable_of(node.target)(*args, **kwargs)
    return {at: values[0][at] for at in wanted}


def _collect(node: fx.Node, given: list[Tensor], values: Sequence[Values], at: int) -> None:
    """Give each rank what it gets of what all have."""
    how = node.args[1]
    made = sum(given[1:], given[0]) if how in ("sum", "scatter") else torch.stack(given)
    for rank, own in enumerate(values):
        mine = made[rank] if how == "scatter" else made
        own[at] = mine[:, rank, None, None] if how == "exchange" else mine


def _leading_to(nodes: Sequence[Any], wanted: Iterable[int]) -> set[int]:
    """Return these nodes and all that they are computed of."""
    found, open_nodes = set[int](), [*wanted]
    while open_nodes:
        at = open_nodes.pop()
        if at not in found:
            found.add(at)
            open_nodes += nodes[at].inputs
    return found


# -- as the busiest rank --------------------------------------------------------------------------


def as_busiest(
    capture: Capture,
    op_s: Sequence[float],
    loads: Sequence[ExpertLoad],
    inputs: Mapping[int, Any],
) -> tuple[float, ...]:
    """Return the seconds of ops as the rank has them whose experts see most rows.

    op_s:     of the first rank, measured alone with these inputs.
    Ignores:  on a device that queues, all of it: there they stay the first rank's.
    """
    graph, by_ends = capture.graph, {load.ends: load for load in loads}
    products = dict(ends_by_product(graph))
    own = [
        at for at in products if graph.nodes[at].target in BY_EXPERTS and products[at] in by_ends
    ]
    if not own or here().is_queued:
        return tuple(op_s)
    alone = _computed([capture], [dict(inputs)], sorted({products[at] for at in own}))
    made, seconds = list(op_s), dict[Any, float]()
    for at in own:
        load, node = by_ends[products[at]], capture.fx_nodes[at]
        block, rows = load.busiest_block(graph.tensor), _counts(alone[products[at]])
        first = rows[: len(block)]
        if sum(first):
            pair = [_seconds(node, each, sum(rows), len(rows), seconds) for each in (block, first)]
            made[at] *= pair[0] / max(pair[1], 1e-9)
    return tuple(made)


def _seconds(
    node: fx.Node, own: Sequence[int], rows: int, experts: int, known: dict[Any, float]
) -> float:
    """Return the seconds of a product if the first rank's experts see so many of all rows."""
    values: list[Tensor] = [each.meta["val"] for each in node.args[:2]]  # pyright: ignore
    key = node.target, tuple(own), *((tuple(v.shape), v.stride()) for v in values)
    if key not in known:
        counts = [*own, rows - sum(own), *[0] * (experts - len(own) - 1)][:experts]
        ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
        given = [_drawn_as(value) for value in values]
        known[key] = _median_s(node.target, (*given, ends, *node.args[3:-1], 0))
    return known[key]


def _drawn_as(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).normal_()


def _median_s(call: Any, args: tuple[Any, ...]) -> float:
    clock, times = clock_of(here()), list[float]()
    for _ in range(_WARM_UPS + _RUNS):
        start = clock()
        call(*args)
        times.append(float(clock() - start))
    return statistics.median(times[_WARM_UPS:])
