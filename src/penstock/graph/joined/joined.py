"""Joined: the step of several micro-batches at once, made from that of one.

    before   one micro-batch: forward, loss, gradients
    after    several, joined along the first dim of their tensors: what works on each sample by
             itself works on all samples; all else on those of one micro-batch after the other;
             the loss is the mean of theirs, and so are the gradients

Keeps:   loss, figures and gradients: the mean over the micro-batches of what each has alone, to
         rounding (sums over samples are made in another order), whatever model, loss and data are:
         nothing of the job is called on a batch of another size than its author's.
Gains:   larger products, and fewer calls.
Costs:   cutting and joining where ops of both kinds meet.
Ignores: steps that draw random numbers or change a buffer: they are refused.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from penstock.errors import GraphError
from penstock.graph.batch import BatchKey, LeafKey, TensorKey, describe
from penstock.graph.cut_points import find_cut_points
from penstock.graph.gradient_hooks import refuse_hooks
from penstock.graph.graph import with_cut_points
from penstock.graph.joined.joiner import Apart, Joiner
from penstock.graph.joined.joining_rules import ruled
from penstock.graph.rows import Placeholder, rows_of
from penstock.graph.trace import Capture, is_output

_MOST_APART = 0.5  # of the FLOP: of a step of which more are not run at once nothing is gained


def joined(capture: Capture, count: int) -> Capture:
    """Return the step of `count` micro-batches of `capture` at once.

    Raises:   GraphError: it draws random numbers, changes a buffer, reads a value without a first
              dim, or works mostly on one micro-batch after the other anyway.
    """
    if count == 1:
        return capture
    graph = capture.graph
    _check(capture)
    made = Joiner(capture, count, ruled)
    if _apart(made) > _MOST_APART:
        raise GraphError(
            f"the step works on one micro-batch after the other, joined by {count} too"
        )
    key = _key(capture.batch, count)
    first = [Placeholder(n.name, n.kind) for n in graph.nodes if n.kind not in ("op", "constant")]
    new = replace(
        graph,
        key=(f"batch: {describe(key.leaves)}", *graph.key[1:], f"joined: {count}"),
        samples=graph.samples * count,
        tokens=graph.tokens * count,
    )
    found = rebuilt(replace(capture, graph=new, batch=key), made, first)
    inputs = [at for at, node in enumerate(found.graph.nodes) if node.kind == "input"]
    return replace(found, inputs=dict(zip(inputs, capture.inputs.values(), strict=True)))


def rebuilt(capture: Capture, made: Joiner, placeholders: Sequence[Placeholder]) -> Capture:
    """Return the capture with the ops of a joiner in place of its own; its inputs are none yet.

    capture:       with what else is new.
    placeholders:  what the inputs of the new step stand for.
    """
    graph, old = capture.graph, made.capture
    figures, loss = graph.figures, made.means[old.fx_nodes[graph.loss]]
    told = [made.means[old.fx_nodes[node]] for _, node in figures]
    made.graph.output([loss, *made.gradients, *told])
    made.graph.eliminate_dead_code()
    fx_nodes = tuple(node for node in made.graph.nodes if node.op != "output")
    index = {node: at for at, node in enumerate(fx_nodes)}
    gradients = zip(graph.gradients, made.gradients, strict=True)
    new = replace(
        graph,
        nodes=rows_of(made.graph, placeholders),
        loss=index[loss],
        gradients={name: None if g is None else index[g] for name, g in gradients},
        cut_points=(),
        figures=tuple((name, index[n]) for (name, _), n in zip(figures, told, strict=True)),
    )
    return replace(
        capture,
        graph=with_cut_points(new, find_cut_points(new)),
        fx_nodes=fx_nodes,
        inputs={},
        constants=_constants(old, fx_nodes),
    )


def _check(capture: Capture) -> None:
    """Raise where a step cannot be joined."""
    check_pure(capture)
    for node in capture.graph.nodes:
        if node.kind == "input" and (not node.shape or 0 in node.shape):
            raise GraphError("a batch holds values without a first dimension: it cannot be joined")


def check_pure(capture: Capture, *, may_draw: bool = False) -> None:
    """Raise where a step cannot be made of other samples than those that it was traced for."""
    graph = capture.graph
    if effects := [e for e in graph.effects() if not (may_draw and e[1] == "random")]:
        raise GraphError(f"a step that is not the same function of each micro-batch: {effects}")
    if any(is_output(name) for name, _ in graph.figures):
        raise GraphError("a step that returns what the model makes")
    refuse_hooks(capture.model)
    if capture.batch.written:  # joined, it is not seen which leaves of each share their memory
        raise GraphError("a step that writes into its batch")
    for node, fx_node in zip(graph.nodes, capture.fx_nodes, strict=True):
        if not _is_known(fx_node.meta.get("val")):
            raise GraphError(f"the size of what {node.target or node.name} makes depends on data")
        if node.target.startswith("aten.as_strided"):
            raise GraphError(f"{node.target}: what it reads is not known by its dims")


def _is_known(value: Any) -> bool:
    """Return whether a value is a tensor of known size, or several."""
    if isinstance(value, tuple | list):
        return all(each is None or _is_known(each) for each in value)  # pyright: ignore
    if isinstance(value, Tensor):
        return all(type(size) is int for size in value.shape)
    return type(value) is int or value is None


def _apart(made: Joiner) -> float:
    """Return the share of the FLOP that is spent on one micro-batch after the other."""
    rows = list(zip(made.capture.fx_nodes, made.capture.graph.nodes, strict=True))
    total = sum(row.flop for _, row in rows)
    apart = sum(row.flop for node, row in rows if isinstance(made.states[node], Apart))
    return apart / total if total else 1.0


def _key(batch: BatchKey, count: int) -> BatchKey:
    """Return the key that a batch of `count` micro-batches has to fit."""
    answers = batch.answers and replace(batch.answers, times=count)
    leaves = tuple(_wider(leaf, count) for leaf in batch.leaves)
    return BatchKey(batch.spec, leaves, answers=answers)


def _wider(leaf: LeafKey, count: int) -> LeafKey:
    if not isinstance(leaf, TensorKey):
        return leaf
    parts = [torch.empty_strided(leaf.shape, leaf.strides, dtype=leaf.dtype, device="meta")]
    whole = torch.cat(parts * count)
    return TensorKey(tuple(whole.shape), leaf.dtype, whole.stride())


def _constants(capture: Capture, fx_nodes: Sequence[fx.Node]) -> dict[int, Tensor]:
    held = {capture.fx_nodes[at].target: value for at, value in capture.constants.items()}
    return {at: held[n.target] for at, n in enumerate(fx_nodes) if n.op == "get_attr"}
