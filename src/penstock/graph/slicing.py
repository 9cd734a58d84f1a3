"""Slicing: the ops of a traced step, one after the other, where some values are in slices.

Every value is whole, or in slices along one of its dims.  A rule (sliced_ops.py and its like) says
what an op makes of slices; what has none takes whole values, for which slices are put together
again.  Not so the parameters themselves: they are refused by name.

The ops of a slice stand together, slice after slice, backward in reverse: where a run of sliced ops
begins, each of its ops has a turn for every slice.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from penstock import _compat
from penstock.errors import GraphError
from penstock.graph.functional import custom
from penstock.graph.graph import Node, Phase
from penstock.graph.parts import slice_path
from penstock.graph.trace import Capture

aten = torch.ops.aten
Ends = tuple[int, ...]  # where each slice of a dim ends
Place = tuple[int, int, int, int, int]  # phase, where its run begins, turn of the slice, op, number


@dataclass(slots=True, eq=False)
class NewNode:
    """One node of the new step, before it has its place there.

    value:  what the trace saw of it: a tensor without data.
    place:  by which items are ordered; None: it stands before the first that reads it.
    notes:  as those of the recorded step (functional.py).
    name:   of a parameter, buffer or input.
    copied: the number of the recorded op that it is; -1: it does a part of one.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    value: Any
    place: Place | None
    notes: dict[str, Any]
    kind: str = "call_function"
    name: str = ""
    copied: int = -1


@dataclass(frozen=True, slots=True, eq=False)
class Sliced:
    """A value in slices along `dim`.

    run:      phase, and the op at which the run of sliced ops begins; None: it is not of any.
    of_state: whether it is a parameter, or a view or cast of one.
    """

    dim: int
    ends: Ends
    parts: tuple[NewNode, ...]
    run: tuple[Phase, int] | None = None
    of_state: bool = False

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Return for each slice its first row and the row behind its last."""
        return list(pairwise((0, *self.ends)))


@dataclass(slots=True, eq=False)
class LogSoftmax:
    """Log-probabilities of the op `node` that are not computed yet.

    logits:  in slices, as they came.
    top, total:  the greatest of each row, and the sum of the exponentials of what is below it.
    picked:  by node of the targets and the class that is left out: those of the targets, and
             targets as a loss of one class has them.
    """

    node: fx.Node
    logits: Sliced
    top: NewNode
    total: NewNode
    picked: dict[tuple[fx.Node, Any], tuple[NewNode, NewNode]] = field(
        default_factory=dict["tuple[fx.Node, Any]", "tuple[NewNode, NewNode]"]
    )


class AtTargets(NamedTuple):
    """A gradient of log-probabilities that is nothing but at the targets: there, `at` each row."""

    at: NewNode
    targets: fx.Node
    of: LogSoftmax


State = NewNode | Sliced | LogSoftmax | AtTargets


class SliceTurn(NamedTuple):
    """The slice that an item belongs to: its number, the number of slices, and the run."""

    number: int
    among: int
    run: tuple[Phase, int]


Rule = Callable[["Slicing", fx.Node], State | None]
Wanted = Mapping[fx.Node, tuple[int, Ends]]


def ends_of(rows: int, count: int) -> Ends:
    """Return the end of each of `count` slices of `rows`; the last slice may be smaller.

    Raises:   GraphError: one would have no row.
    """
    size = -(-rows // count)
    if (count - 1) * size >= rows:
        raise GraphError(f"{rows} rows cannot be cut into {count} slices", hint="take fewer")
    return tuple(min(end, rows) for end in accumulate([size] * count))


def refusal(name: str, why: str) -> GraphError:
    """Return the error that a parameter cannot be cut."""
    return GraphError(f"{name} cannot be cut into slices: {why}", hint="leave it whole")


class Slicing:
    """The step of `capture` with some parameters in slices, item by item.

    ends:    by name of a parameter, where each of its slices ends.
    wanted:  nodes that lead to nothing but gradients of slices: along which dim, and where.
    states:  by node of the recorded step, what stands for its value.
    items:   of the new step, in no order; those without a place are not among them.
    Raises:  GraphError: an op reads all of such a parameter at once.
    """

    def __init__(
        self, capture: Capture, ends: Mapping[str, Ends], rule: Rule, wanted: Wanted
    ) -> None:
        self.capture, self.ends, self.wanted = capture, ends, wanted
        self.rows = dict(zip(capture.fx_nodes, capture.graph.nodes, strict=True))
        self.index = {node: i for i, node in enumerate(capture.fx_nodes)}
        self.states: dict[fx.Node, State] = {}
        self.items: list[NewNode] = []
        self._narrowed: dict[tuple[fx.Node, int, Ends, Phase], Sliced] = {}
        self._joined: dict[fx.Node, NewNode] = {}
        self._count = 0
        with _compat.mode_of(node.meta.get("val") for node in capture.fx_nodes), torch.no_grad():
            for node in capture.fx_nodes:
                self.states[node] = self._state(node, rule)

    def gradient(self, name: str, node: fx.Node) -> tuple[NewNode, ...]:
        """Return the gradients of the slices of a parameter.

        Raises:   GraphError: they are not made slice by slice.
        """
        state = self.states[node]
        if not isinstance(state, Sliced) or (state.dim, state.ends) != (0, self.ends[name]):
            raise refusal(name, f"its gradient is made by {node.target}, not row by row")
        return state.parts

    # -- nodes ------------------------------------------------------------------------------------

    def _state(self, node: fx.Node, rule: Rule) -> State:
        if node.op == "placeholder" and self.rows[node].name in self.ends:
            return self._parameter(node)
        is_cut = any(not isinstance(self.states[k], NewNode) for k in node.all_input_nodes)
        made = rule(self, node) if is_cut or node in self.wanted else None
        return self.copied(node) if made is None else made

    def _parameter(self, node: fx.Node) -> Sliced:
        name, value = self.rows[node].name, node.meta["val"]
        parts: list[NewNode] = []
        for start, end in pairwise((0, *self.ends[name])):
            part = value.new_empty((end - start, *value.shape[1:]))
            place = 0, self.index[node], 0, 0, len(parts)
            parts.append(NewNode(None, (), {}, part, place, {}, "placeholder", name))
        self.items += parts
        return Sliced(0, self.ends[name], tuple(parts), of_state=True)

    def copied(self, node: fx.Node) -> NewNode:
        """Return a copy of an op that reads whole values."""
        given = {source: self.whole(source, node) for source in node.all_input_nodes}
        args, kwargs = arguments(node, given)
        value, at = node.meta.get("val"), self.index[node]
        is_view = self.rows[node].storage != at and isinstance(value, Tensor)
        if is_view and any(given[k].value is not k.meta.get("val") for k in given):
            value = _run(node.target, args, kwargs)
        notes = {**custom(node)}
        item = NewNode(node.target, args, kwargs, value, self._place(node), notes, node.op)
        item.name = self.rows[node].name if node.op == "placeholder" else ""
        item.copied = at
        self.items.append(item)
        return item

    # -- whole and in slices ----------------------------------------------------------------------

    def whole(self, node: fx.Node, reader: fx.Node) -> NewNode:
        """Return a value whole, for the op `reader`.

        Raises:   GraphError: it is a parameter, which would be whole again.
        """
        state = self.states[node]
        if isinstance(state, NewNode):
            return state
        if node not in self._joined:
            self._joined[node] = self._put_together(node, state, reader)
        return self._joined[node]

    def _put_together(
        self, node: fx.Node, state: Sliced | LogSoftmax | AtTargets, reader: fx.Node
    ) -> NewNode:
        if isinstance(state, AtTargets):
            return self.copied(node)
        sliced = self.in_slices(state)
        if sliced.of_state:
            name = next(name for name in self.ends if leads_to(node, name, self.rows))
            raise refusal(name, f"{reader.target} reads all of it at once")
        made = self.new(reader, aten.cat.default, list(sliced.parts), sliced.dim)
        if node.meta["val"].is_contiguous() and not made.value.is_contiguous():  # what readers know
            layout = torch.contiguous_format
            made = self.new(reader, aten.clone.default, made, memory_format=layout)
        return made

    def in_slices(self, state: Sliced | LogSoftmax) -> Sliced:
        """Return a value in slices, computed where nobody has."""
        if isinstance(state, Sliced):
            return state
        parts: dict[SliceTurn, NewNode] = {}
        for turn, part in self.turns(state.logits, state.node):
            wide = self.cast(turn, state.node, part, wide_type(part.value.dtype))
            below = self.of(turn, state.node, aten.sub.Tensor, wide, state.top)
            log = self.of(turn, state.node, aten.log.default, state.total)
            made = self.of(turn, state.node, aten.sub.Tensor, below, log)
            parts[turn] = self.cast(turn, state.node, made, state.node.meta["val"].dtype)
        return sliced_of(state.logits.dim, state.logits.ends, parts)

    def cut_at(self, node: fx.Node, dim: int) -> Ends | None:
        """Return where a value is cut along `dim`; None: it is not."""
        state = self.states[node]
        sliced = state.logits if isinstance(state, LogSoftmax) else state
        return sliced.ends if isinstance(sliced, Sliced) and sliced.dim == dim else None

    def slices(self, node: fx.Node, dim: int, ends: Ends, reader: fx.Node) -> Sliced | None:
        """Return a value in slices along `dim`: it is, or parts of the whole are taken.

        None where it is in other slices.
        """
        state, phase = self.states[node], self.rows[reader].phase
        if isinstance(state, Sliced | LogSoftmax):
            return self.in_slices(state) if self.cut_at(node, dim) == ends else None
        key = node, dim, ends, phase
        if key not in self._narrowed:
            whole = self.whole(node, reader)
            at = self.index[node] if self.rows[node].phase == phase else self.index[reader]
            parts: dict[SliceTurn, NewNode] = {}
            for number, (start, end) in enumerate(pairwise((0, *ends))):
                turn = SliceTurn(number, len(ends), (phase, at))
                parts[turn] = self.of(turn, reader, aten.slice.Tensor, whole, dim, start, end)
            self._narrowed[key] = sliced_of(dim, ends, parts)
        return self._narrowed[key]

    def turns(self, sliced: Sliced, node: fx.Node) -> list[tuple[SliceTurn, NewNode]]:
        """Return the turn of each slice and its part, in the order in which `node` works on them.

        It begins a run where the slices are of none in its phase.
        """
        run, phase = sliced.run, self.rows[node].phase
        if run is None or run[0] != phase:
            run = phase, self.index[node]
        count = len(sliced.parts)
        rows = [(SliceTurn(k, count, run), part) for k, part in enumerate(sliced.parts)]
        return rows if phase == "F" else rows[::-1]

    # -- items ------------------------------------------------------------------------------------

    def _place(self, node: fx.Node, turn: SliceTurn | None = None) -> Place:
        at, late = self.index[node], int(self.rows[node].phase == "B")
        self._count += 1
        if turn is None:
            return (late, at, 0, at, self._count)
        number = turn.among - turn.number if late else turn.number + 1
        return (late, turn.run[1], number, at, self._count)

    def new(self, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> NewNode:
        """Return an op on whole values that stands with `node`."""
        notes = {**custom(node), "backward": self.rows[node].phase == "B"}
        value = _run(target, args, kwargs)
        item = NewNode(target, args, kwargs, value, self._place(node), notes)
        self.items.append(item)
        return item

    def of(self, turn: SliceTurn, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> NewNode:
        """Return an op that does the work of `node`, or a part of it, for one slice."""
        value, notes = _run(target, args, kwargs), self.notes(turn, node)
        item = NewNode(target, args, kwargs, value, self._place(node, turn), notes)
        self.items.append(item)
        return item

    def before(self, turn: SliceTurn, node: fx.Node, target: Any, *args: Any) -> NewNode:
        """Return an op on the batch that stands before its first use; no gradient comes back."""
        notes = {**self.notes(turn, node), "sequence": None}
        return NewNode(target, args, {}, _run(target, args, {}), None, notes)

    def of_state(self, turn: SliceTurn, node: fx.Node, args: Any, kwargs: Any) -> NewNode:
        """Return an op on a slice of a parameter alone: it stands before its first use."""
        value = _run(node.target, args, kwargs)
        return NewNode(node.target, args, kwargs, value, None, self.notes(turn, node))

    def cast(self, turn: SliceTurn, node: fx.Node, item: NewNode, dtype: torch.dtype) -> NewNode:
        """Return a part in another dtype; itself, if it has that."""
        if item.value.dtype == dtype:
            return item
        return self.of(turn, node, aten._to_copy.default, item, dtype=dtype)

    def notes(self, turn: SliceTurn, node: fx.Node) -> dict[str, Any]:
        """Return the notes of an op of one slice: a gradient goes to the op of the same slice."""
        notes = {**custom(node), "backward": self.rows[node].phase == "B"}
        if notes.get("sequence") is not None:
            notes["sequence"] += (turn.number + 1) / (turn.among + 1)
        if turn.run[0] == "F":
            module = str(custom(self.capture.fx_nodes[turn.run[1]]).get("module", ""))
            notes["module"] = slice_path(module, turn.number, turn.among)
        return notes


def sliced_of(dim: int, ends: Ends, parts: Mapping[SliceTurn, NewNode]) -> Sliced:
    """Return a value of these parts, by their turns."""
    turns = sorted(parts, key=lambda turn: turn.number)
    return Sliced(dim, ends, tuple(parts[turn] for turn in turns), turns[0].run)


def leads_to(node: fx.Node, name: str, rows: Mapping[fx.Node, Node]) -> bool:
    """Return whether a value is a parameter, or made of it alone."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return rows[node].name == name


def as_node(given: Any) -> fx.Node:
    """Return an argument that is a value."""
    assert isinstance(given, fx.Node), "an op is of values"
    return given


def arguments(node: fx.Node, given: Mapping[fx.Node, NewNode]) -> Any:
    """Return the arguments of a node, positional and named, with items for values."""

    def item(value: Any) -> Any:
        return given[value] if isinstance(value, fx.Node) else value

    return map_aggregate((node.args, dict(node.kwargs)), item)


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers of `dtype` are summed up."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _run(target: Any, args: Any, kwargs: Any) -> Any:
    given: Any = map_aggregate((args, dict(kwargs)), _value_of)
    return target(*given[0], **given[1])


def _value_of(given: Any) -> Any:
    return given.value if isinstance(given, NewNode) else given
