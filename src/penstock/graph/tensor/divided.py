"""Divided: a traced step as one rank of several computes it, with collects between its ops.

    before   y = x @ w            every rank: all of it
    after    y = x @ (w, slice)   each rank: some columns;   z = collect(y @ (v, slice), sum)

All ranks run the same ops on slices of one size.  Where they differ - which slice of a parameter is
theirs, which part of a whole value they take - is said by the rank's number (`Capture.rank`).

Keeps:   loss, gradients and buffers, to rounding: sums over a sliced dim are made in another order.
Gains:   the work, weights and activations of what is sliced, divided by the ranks.
Costs:   the collects.
Source:  Megatron-LM, arXiv:1909.08053; placements of a joint graph: meta-pytorch/autoparallel.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from penstock import _compat
from penstock.errors import GraphError
from penstock.graph.cut_points import find_cut_points, with_places
from penstock.graph.functional import custom, mutates, results_of
from penstock.graph.graph import Graph, Node, with_cut_points
from penstock.graph.parts import part_key
from penstock.graph.rows import Placeholder, rows_of
from penstock.graph.tensor import expert_rows, expert_slices, token_attention
from penstock.graph.tensor.collect_op import COLLECT, TAKE, WHOSE
from penstock.graph.tensor.cuts import collects_in, needed_cuts, places_of
from penstock.graph.tensor.placed import Held, Layout
from penstock.graph.tensor.slicing_rules import local_args
from penstock.graph.tensor.value_placement import (
    WHOLE,
    Filled,
    Partial,
    Placement,
    Slices,
    State,
    are_exchanged,
    local,
)
from penstock.graph.trace import Capture

aten = torch.ops.aten
_RANKED = *token_attention.RANKED, *expert_slices.RANKED, *expert_rows.RANKED


def divided(
    capture: Capture, layout: Layout, held: Held, ranks: int, *, sums_due: bool = False
) -> Capture:
    """Return the step of rank 0 of `ranks`, laid out so.

    held:     parameters of which each rank has a slice.
    sums_due: whether ranks make summands of gradients, which are summed at the end of the step.
    Raises:   GraphError: a collect would have no stage before it.
    """
    mode = _compat.mode_of(node.meta.get("val") for node in capture.fx_nodes)
    with _compat.shapes_in(mode), torch.no_grad():
        return _RankStep(capture, layout, held, ranks, sums_due=sums_due).capture()


class _RankStep:
    def __init__(
        self, capture: Capture, layout: Layout, held: Held, ranks: int, *, sums_due: bool
    ) -> None:
        self.sums_due = sums_due
        self.old, self.layout, self.held, self.ranks = capture, layout, held, ranks
        self.rows = dict(zip(capture.fx_nodes, capture.graph.nodes, strict=True))
        self.graph = fx.Graph()
        self.made: dict[tuple[fx.Node, Placement | None], fx.Node] = {}
        self.states: dict[fx.Node, State] = {}
        self.scattered = {pair for pair in layout.collects if isinstance(pair[1], Slices)}
        self.results: dict[fx.Node, Sequence[fx.Node]] = {}  # of ops that became several
        self.placeholders: list[Placeholder] = []

    def capture(self) -> Capture:
        old = self.old.graph
        told = {self.old.fx_nodes[at] for at in old.told}
        for node in self.old.fx_nodes:
            self._op(node)
            if node in told:  # collected where it is made, not behind the backward pass
                self._there(node, WHOLE, node)
        loss, *others = results_of(self.old.fx_nodes[0].graph)
        names = list(old.gradients)
        gradients: dict[str, fx.Node | None] = {}
        for name, node in zip(names, others, strict=False):
            gradients[self._key(name)] = None if node is None else self._gradient(name, node)
        figures = [self._there(node, WHOLE, node) for node in others[len(names) :]]
        results = [self._there(loss, WHOLE, loss), *gradients.values(), *figures]
        self.graph.output(results)
        return self._captured(results[0], gradients, figures)

    def _gradient(self, name: str, node: fx.Node) -> fx.Node:
        """Return a gradient as the rank gives it: its slice, or what it adds to the sum."""
        if not self.sums_due:
            return self._there(node, self.held.get(name, WHOLE), node)
        if isinstance(state := self.states[node], Partial):
            return self.made[node, state]
        return self.op_at(node, aten.div.Tensor, self._there(node, WHOLE, node), self.ranks)

    # -- ops --------------------------------------------------------------------------------------

    def _op(self, node: fx.Node) -> None:
        row = self.rows[node]
        if row.kind in ("parameter", "buffer", "input", "scale"):
            self._input(node, row)
        elif row.kind == "constant":
            made = self.graph.create_node("get_attr", node.target, (), {})
            self._keep(node, made, node.meta["val"], WHOLE)
        elif node.target is operator.getitem:
            source, at = node.args
            state = self.states[source]  # pyright: ignore[reportArgumentType]
            assert isinstance(state, tuple)
            if source in self.results:
                made = self.results[source][at]  # pyright: ignore
            else:
                made = self.op_at(node, node.target, self.made[source, None], at)  # pyright: ignore
            self._keep(node, made, made.meta["val"], state[at])  # pyright: ignore
        else:
            self._computed(node)

    def _input(self, node: fx.Node, row: Node) -> None:
        made = self.graph.placeholder(f"input{len(self.placeholders)}")
        place, value = self.held.get(row.name, WHOLE), node.meta["val"]
        if isinstance(value, Tensor) and place != WHOLE:
            value = value.new_empty(local(place, tuple(value.shape), self.ranks))
        name = self._key(row.name) if row.kind == "parameter" else row.name
        self.placeholders.append(Placeholder(name, row.kind))
        made.meta["custom"] = custom(node)
        self._keep(node, made, value, place)

    def _key(self, name: str) -> str:
        """Return the name of a parameter, of which rank 0 has its slice."""
        place = self.held.get(name)
        if place is None:
            return name
        shape = next(n.shape for n in self.rows.values() if (n.kind, n.name) == ("parameter", name))
        return part_key(name, 0, shape, (prod(shape[: place.dim]) * place.pieces, self.ranks))

    def _keep(self, node: fx.Node, made: fx.Node, value: Any, state: State) -> None:
        made.meta["val"] = value
        self.states[node] = state
        self.made[node, None if isinstance(state, tuple) else state] = made

    def _computed(self, node: fx.Node) -> None:
        choice = self.layout.choices[node]
        wanted = {s: self._there(s, place, node) for s, place in choice.wants.items()}
        wholes = _tensors_of(node)
        places = choice.out if isinstance(choice.out, tuple) else (choice.out,)
        has_first = bool(wholes) and isinstance(wholes[0], Tensor)  # nobody may want its gradient
        own = local(places[0], tuple(wholes[0].shape), self.ranks) if has_first else ()
        args: Any = local_args(node, own, self.ranks, choice.wants)
        if choice.several is not None:
            self._several(node, choice.several.build(_InPlace(self, node), wanted), choice.out)
            return
        args, kwargs = (map_arg(each, wanted.__getitem__) for each in (args, node.kwargs))
        made = self.op_at(node, node.target, *args, **kwargs)
        for whole, part, place in zip(wholes, _tensors_of(made), places, strict=True):
            if isinstance(whole, Tensor):
                shape = local(place, tuple(whole.shape), self.ranks)
                assert tuple(part.shape) == shape, f"{node.target}: {part.shape}, not {shape}"
        self._keep(node, made, made.meta["val"], choice.out)

    def _several(self, node: fx.Node, results: Sequence[fx.Node], state: State) -> None:
        """Keep the results of several ops as those of one."""
        if isinstance(state, tuple):
            self.states[node], self.results[node] = state, results
        else:
            (made,) = results
            self._keep(node, made, made.meta["val"], state)

    def op_at(self, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Return an op that stands where `node` stood."""
        notes = {**custom(node), "backward": self.rows[node].phase == "B"}
        given = map_arg((args, kwargs), lambda each: each.meta["val"])
        if target is aten.view.default:
            target, args = self._as_view(node, given[0], args)
            given = map_arg((args, kwargs), lambda each: each.meta["val"])
        value = target(*given[0], **given[1])
        made = self.graph.create_node("call_function", target, args, kwargs)
        if target in _RANKED:
            notes[WHOSE] = True
        made.meta["val"], made.meta["custom"] = value, notes
        return made

    def _as_view(self, node: fx.Node, given: Any, args: Any) -> tuple[Any, Any]:
        """Return the arguments of a view, of a copy where strides do not allow it."""
        try:  # dims of 1 aside: torch lets fake tensors be viewed past them that real ones cannot
            aten.view.default(given[0].squeeze(), *given[1:])
        except (RuntimeError, ValueError):
            layout = torch.contiguous_format
            copy = self.op_at(node, aten.clone.default, args[0], memory_format=layout)
            return aten.view.default, (copy, *args[1:])
        return aten.view.default, args

    # -- changes of placement ---------------------------------------------------------------------

    def _there(self, node: fx.Node, place: Placement, reader: fx.Node) -> fx.Node:
        """Return a value as `place` has it, for an op that stands for `reader`."""
        state = self.states[node]
        if isinstance(state, tuple):
            return self.made[node, None]
        if (node, place) not in self.made:
            if place == WHOLE:
                self.made[node, WHOLE] = self._whole(node, state, reader)
            elif isinstance(state, Partial) and (node, place) in self.scattered:
                assert isinstance(place, Slices), "it becomes a slice"
                self.made[node, place] = self.scatter_at(reader, self.made[node, state], place)
                self.states[node] = place
            elif are_exchanged(state, place) and (node, place) in self.scattered:
                self.made[node, place] = self.exchange_at(reader, node, state, place)
            else:
                assert isinstance(place, Slices), "no value becomes a summand"
                whole = self._there(node, WHOLE, reader)
                self.made[node, place] = self.part_at(whole, place, reader)
        return self.made[node, place]

    def _whole(self, node: fx.Node, state: Placement, reader: fx.Node) -> fx.Node:
        own = self.made[node, state]
        if node in self.layout.viewed:
            args = map_arg(node.args, lambda each: self._there(each, WHOLE, reader))
            return self.op_at(node, node.target, *args, **node.kwargs)
        if isinstance(state, Partial):
            return self.op_at(reader, COLLECT, own, "sum", self.ranks)
        if isinstance(state, Filled):
            return self._rows_of_all(node, state, reader)
        assert isinstance(state, Slices), "it is not whole"
        every = self.op_at(reader, COLLECT, own, "gather", self.ranks)
        shape, dim = list(node.meta["val"].shape), state.dim
        if prod(shape[:dim]) * state.pieces > 1:
            outer = prod(shape[:dim]) * state.pieces
            apart = [self.ranks, outer, prod(shape) // (self.ranks * outer)]
            every = self.op_at(reader, aten.view.default, every, apart)
            every = self.op_at(reader, aten.transpose.int, every, 0, 1)
            every = self._folded(reader, every) if state.folded else every
        return self.op_at(reader, aten.view.default, every, shape)

    def _rows_of_all(self, node: fx.Node, state: Filled, reader: fx.Node) -> fx.Node:
        """Return a value of which each rank has rows: zeros in the others', and the sum of that."""
        own, dtype = self.made[node, state], node.meta["val"].dtype
        if dtype == torch.bool:
            own = self.op_at(reader, aten._to_copy.default, own, dtype=torch.uint8)
        ends = next(each for each in self.rows if each.name == state.rows)
        about = self._there(ends, WHOLE, reader), state.dim, self.ranks, 0
        rows = self.op_at(reader, expert_rows.OWN_ROWS_ONLY, own, *about)
        total = self.op_at(reader, COLLECT, rows, "sum", self.ranks)
        if dtype != torch.bool:
            return total
        return self.op_at(reader, aten._to_copy.default, total, dtype=dtype)

    def part_at(self, whole: fx.Node, place: Slices, reader: fx.Node) -> fx.Node:
        """Return the part of a whole value that is this rank's."""
        shape, dim, pieces = list(whole.meta["val"].shape), place.dim, place.pieces
        size = shape[dim] // (pieces * self.ranks)
        if place.folded:
            outer = prod(shape[:dim]) * pieces
            apart = [outer, self.ranks, prod(shape) // (self.ranks * outer)]
            runs = self._folded(reader, self.op_at(reader, aten.view.default, whole, apart))
            own = self.cut_at(reader, runs, 1, 1)
            part = list(local(place, tuple(shape), self.ranks))
            return self.op_at(reader, aten.view.default, own, part)
        if pieces == 1:
            return self.cut_at(reader, whole, dim, size)
        apart = [*shape[:dim], pieces, shape[dim] // pieces, *shape[dim + 1 :]]
        runs = self.op_at(reader, aten.view.default, whole, apart)
        own = self.cut_at(reader, runs, dim + 1, size)
        return self.op_at(
            reader, aten.view.default, own, list(local(place, tuple(shape), self.ranks))
        )

    def _folded(self, reader: fx.Node, runs: fx.Node) -> fx.Node:
        """Return runs, [outer, ranks, inner], the ranks of every second one in reverse order."""
        outer, ranks, inner = runs.meta["val"].shape
        pairs = self.op_at(reader, aten.reshape.default, runs, [outer // 2, 2, ranks, inner])
        first, second = (self.op_at(reader, aten.select.int, pairs, 1, at) for at in (0, 1))
        turned = self.op_at(reader, aten.flip.default, second, [1])
        both = self.op_at(reader, aten.stack.default, [first, turned], 1)
        return self.op_at(reader, aten.view.default, both, [outer, ranks, inner])

    def cut_at(self, reader: fx.Node, whole: fx.Node, dim: int, size: int) -> fx.Node:
        made = self.op_at(reader, aten.slice.Tensor, whole, dim, 0, size)
        made.meta["custom"] = {**made.meta["custom"], TAKE: size}
        return made

    def scatter_at(self, reader: fx.Node, own: fx.Node, place: Slices) -> fx.Node:
        """Return this rank's slice of the sum of what ranks have as summands."""
        shape = tuple(own.meta["val"].shape)
        outer = prod(shape[: place.dim]) * place.pieces
        apart = [outer, self.ranks, prod(shape) // (self.ranks * outer)]
        parts = self.op_at(reader, aten.view.default, own, apart)
        parts = self._folded(reader, parts) if place.folded else parts
        parts = self.op_at(reader, aten.transpose.int, parts, 0, 1)
        if outer > 1:
            layout = torch.contiguous_format
            parts = self.op_at(reader, aten.clone.default, parts, memory_format=layout)
        made = self.op_at(reader, COLLECT, parts, "scatter", self.ranks)
        return self.op_at(reader, aten.view.default, made, list(local(place, shape, self.ranks)))

    def exchange_at(
        self, reader: fx.Node, node: fx.Node, old: Placement, place: Placement
    ) -> fx.Node:
        """Return this rank's slices of a value along one dim, of those along another."""
        assert isinstance(old, Slices), "it has slices"
        assert isinstance(place, Slices), "and gets others"
        own, ranks = self.made[node, old], self.ranks
        shape = list(own.meta["val"].shape)
        size = shape[place.dim] // ranks
        apart = [*shape[: place.dim], ranks, size, *shape[place.dim + 1 :]]
        parts = self.op_at(reader, aten.view.default, own, apart)
        order = [place.dim, *(dim for dim in range(len(apart)) if dim != place.dim)]
        parts = self.op_at(reader, aten.permute.default, parts, order)
        layout = torch.contiguous_format
        parts = self.op_at(reader, aten.clone.default, parts, memory_format=layout)
        came = self.op_at(reader, COLLECT, parts, "exchange", ranks)
        shape[place.dim] = size
        came = self.op_at(reader, aten.view.default, came, [ranks, *shape])
        order = [*range(1, old.dim + 1), 0, *range(old.dim + 1, len(shape) + 1)]
        came = self.op_at(reader, aten.permute.default, came, order)
        came = self.op_at(reader, aten.clone.default, came, memory_format=layout)
        shape[old.dim] *= ranks
        return self.op_at(reader, aten.view.default, came, shape)

    # -- the new step -----------------------------------------------------------------------------

    def _captured(
        self, loss: Any, gradients: Mapping[str, fx.Node | None], figures: Sequence[fx.Node]
    ) -> Capture:
        capture, old = self.old, self.old.graph
        self.graph.eliminate_dead_code(_is_kept)
        self._apart()
        fx_nodes = tuple(node for node in self.graph.nodes if node.op != "output")
        index = {node: at for at, node in enumerate(fx_nodes)}
        bare = replace(
            old,
            nodes=rows_of(self.graph, self.placeholders),
            loss=index[loss],
            gradients={k: None if g is None else index[g] for k, g in gradients.items()},
            cut_points=(),
            figures=tuple((n, index[f]) for (n, _), f in zip(old.figures, figures, strict=True)),
            masters={self._key(name): self._part(name, size) for name, size in old.masters.items()},
        )
        graph = _with_origins(bare)
        points = with_places(graph, find_cut_points(graph), needed_cuts(graph))
        inputs = [at for at, node in enumerate(graph.nodes) if node.kind == "input"]
        held = {capture.fx_nodes[i].target: value for i, value in capture.constants.items()}
        return replace(
            capture,
            graph=with_cut_points(graph, points),
            fx_nodes=fx_nodes,
            inputs=dict(zip(inputs, capture.inputs.values(), strict=True)),
            constants={at: held[n.target] for n, at in index.items() if n.op == "get_attr"},
        )

    def _apart(self) -> None:
        """Let nothing but a collect read what it collects: others have it as it is."""
        for node in [each for each in self.graph.nodes if each.target is COLLECT]:
            (value,) = node.all_input_nodes
            if len(value.users) > 1:
                with self.graph.inserting_after(value):
                    own = self.graph.create_node("call_function", aten.alias.default, (value,))
                own.meta["val"] = aten.alias.default(value.meta["val"])
                own.meta["custom"] = value.meta["custom"]
                node.replace_input_with(value, own)

    def _part(self, name: str, size: int) -> int:
        return size // self.ranks if name in self.held else size


class _InPlace:
    """Writes ops in the place of one op of the whole step."""

    def __init__(self, step: _RankStep, node: fx.Node) -> None:
        self.step, self.node, self.ranks = step, node, step.ranks
        self.rank = 0

    def new(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        return self.step.op_at(self.node, target, *args, **kwargs)

    def taken(self, value: fx.Node, dim: int, size: int) -> Any:
        return self.step.cut_at(self.node, value, dim, size)

    def scattered(self, value: fx.Node, place: Slices) -> Any:
        return self.step.scatter_at(self.node, value, place)

    def part(self, value: fx.Node, place: Slices) -> Any:
        return self.step.part_at(value, place, self.node)


def _tensors_of(node: fx.Node) -> list[Any]:
    """Return the results of an op, one after the other."""
    value: Any = node.meta.get("val")
    return [*value] if isinstance(value, tuple | list) else [value]  # pyright: ignore


def _is_kept(node: fx.Node) -> bool:
    """Return whether an op is part of the step though nothing reads it."""
    if node.op in ("placeholder", "output"):
        return True
    return node.target is aten.copy_.default or mutates(node)


def _with_origins(graph: Graph) -> Graph:
    """Return a step in which each backward collect belongs to the op before what it reads.

    Raises:   GraphError: there is none.
    """
    nodes, free = list(graph.nodes), graph.free
    forward = [at for at, n in enumerate(nodes) if n.kind == "op" and n.phase == "F"]
    for at in collects_in(nodes):
        if nodes[at].phase == "F":
            continue
        place = places_of(nodes[:at], free)[nodes[at].inputs[0]]
        before = [op for op in forward if op < place and nodes[op].target != "getitem"]
        if not before:
            message = f"the gradient of the step's first op ({nodes[place].target}) would be summed"
            raise GraphError(message, hint="leave its weight whole")
        nodes[at] = replace(nodes[at], origin=before[-1])
    return replace(graph, nodes=tuple(nodes))
