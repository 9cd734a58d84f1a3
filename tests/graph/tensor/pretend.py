"""Pretend: a divided step on so many ranks of one process, op by op, its collects as sums of lists.

The oracle of tensor parallelism: it knows no stages, no programs, no messages.
"""

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import map_arg

from penstock import _compat
from penstock.graph.code import callable_of, micro_batch_seed, reseed
from penstock.graph.functional import results_of
from penstock.graph.parts import part_in
from penstock.graph.tensor.collect_op import COLLECT, rank_args
from penstock.graph.tensor.of_rank import of_rank
from penstock.graph.trace import Capture
from penstock.job import Job
from penstock.state.tensor_parts import whole


def run_pretend(job: Job, capture: Capture, ranks: int, micro_batches: int = 2) -> Any:
    """Return losses, whole gradients and buffers of a step, as tests/graph/executor.py does."""
    from tests.graph.executor import Step

    step, data = Step(), job.data(0)
    own = [of_rank(capture, rank) for rank in range(ranks)]
    sums: dict[str, Tensor] = {}
    buffers = [{n: b.detach().clone() for n, b in c.model.named_buffers()} for c in own]
    for number in range(micro_batches):
        leaves = capture.leaves(next(data))
        results = _run(own, leaves, buffers, micro_batch_seed(job.seed, number), 1 / micro_batches)
        step.losses.append(results[0][0])
        for other, _ in results[1:]:
            assert torch.equal(other, results[0][0])
        parts: dict[str, Tensor] = {}
        for _, gradients in results:
            for name, value in gradients.items():
                if name in parts and capture.graph.context:
                    value = parts[name] + value
                elif name in parts and part_in(name) is None:
                    assert torch.equal(value, parts[name]), name
                parts[name] = value
        for name, value in whole(parts).items():
            sums[name] = sums[name] + value if name in sums else value
    step.gradients, step.buffers = sums, buffers[0]
    return step


def _run(own: list[Capture], leaves: Any, buffers: Any, seed: int, scale: float) -> Any:
    first = own[0]
    values: list[dict[Any, Any]] = [{} for _ in own]
    parameters = [{k: p.detach().clone() for k, p in c.parameters.items()} for c in own]
    ordinal = 0
    for at, node in enumerate(first.fx_nodes):
        row = first.graph.nodes[at]
        if row.kind != "op":
            for rank, capture in enumerate(own):
                name = capture.graph.nodes[at].name
                match row.kind:
                    case "parameter":
                        values[rank][node] = parameters[rank][name]
                    case "buffer":
                        values[rank][node] = buffers[rank][name]
                    case "input":
                        values[rank][node] = leaves[first.inputs[at]]
                    case "scale":
                        dtype = getattr(torch, row.dtype)
                        values[rank][node] = torch.tensor(scale, dtype=dtype)
                    case _:
                        values[rank][node] = first.constants[at]
            continue
        if node.target is COLLECT:
            source, how, _ = node.args
            given = [known[source] for known in values]
            made = sum(given[1:], given[0]) if how in ("sum", "scatter") else torch.stack(given)
            for rank, known in enumerate(values):
                mine = made[rank] if how == "scatter" else made
                mine = mine[:, rank, None, None] if how == "exchange" else mine
                known[node] = mine.clone()
            continue
        for rank, known in enumerate(values):
            args, kwargs = map_arg((rank_args(node, rank), node.kwargs), known.__getitem__)
            with torch.no_grad(), _compat.GENERATOR:
                if row.effect == "random":
                    reseed(seed, ordinal)
                target = (
                    node.target if node.target is operator.getitem else callable_of(node.target)
                )
                known[node] = target(*args, **kwargs)
        ordinal += row.effect == "random"
    found = []
    for capture, known in zip(own, values, strict=True):
        loss, *others = results_of(first.fx_nodes[0].graph)
        names = list(capture.graph.gradients)
        rows = zip(names, others, strict=False)
        found.append((known[loss], {n: known[g] for n, g in rows if g is not None}))
    return found
