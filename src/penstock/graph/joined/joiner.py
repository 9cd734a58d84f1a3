"""Joiner: the ops of a traced step, one after the other, for several micro-batches at once.

Of every value of the traced step there is, in the joined one,

    Same     one: no sample is behind it, so it is that of every micro-batch
    Abreast  one: those of the micro-batches, beside one another along a dim
    Apart    one for each micro-batch
    SumOfAll one: the sum of those of all micro-batches; only where nothing but a gradient comes
             of it, by linear ops

A rule (joining_rules.py) says of an op what it makes of values that stand beside one another.  What
no rule knows runs once for each micro-batch, on its own rows, as it was traced: so whatever couples
samples - a mean over the labels that count, a norm over the batch, a sort - still does so among the
samples of its own micro-batch, and no others.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from penstock import _compat
from penstock.errors import GraphError
from penstock.graph.dims import aten, shape_of
from penstock.graph.functional import custom, results_of
from penstock.graph.graph import Node
from penstock.graph.joined.linear_values import lead_to_gradients
from penstock.graph.trace import Capture


@dataclass(frozen=True, slots=True, eq=False)
class Same:
    """A value that is the same for every micro-batch."""

    node: fx.Node


@dataclass(frozen=True, slots=True, eq=False)
class Abreast:
    """The values of all micro-batches, beside one another along `dim`.

    outer:    into how many pieces those of each are cut there: of each micro-batch the first ones
              stand beside one another, then the second ones, ...  More than 1 where a dim before
              that of the samples and that one are one now, as in steps x samples.
    """

    node: fx.Node
    dim: int
    outer: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Apart:
    """The values of the micro-batches, each by itself."""

    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class SumOfAll:
    """The sum of the values of all micro-batches."""

    node: fx.Node


@dataclass(frozen=True, slots=True, eq=False)
class Sealed:
    """What an op of all micro-batches keeps for its own gradient, and nobody else can read."""

    node: fx.Node


@dataclass(frozen=True, slots=True, eq=False)
class Several:
    """What an op with several results makes."""

    each: "tuple[State, ...]"


State = Same | Abreast | Apart | SumOfAll | Sealed | Several
Rule = Callable[["Joiner", fx.Node], State | None]
SUMMED = "summed"
Place = int | str | None
UNKNOWN = (
    RuntimeError,
    ValueError,
    TypeError,
    IndexError,
)  # of an op on shapes that it does not take


class Joiner:
    """The step of `capture` for `count` micro-batches at once.

    graph:      the new one, without its output.
    states:     by node of the traced step, what stands for its value.
    placed_for: by input and constant of the new one, that of the traced one.
    means:      by node of the loss, and of each figure, the mean of those of the micro-batches.
    gradients:  in the order of the traced step.
    to_sum:     nodes of which nothing but gradients come, by linear ops.
    Raises:     GraphError: an op cannot be run of any micro-batch by itself.
    """

    def __init__(self, capture: Capture, count: int, rule: Rule) -> None:
        self.capture, self.count, self.rule = capture, count, rule
        self.graph = fx.Graph()
        self.states: dict[fx.Node, State] = {}
        self.placed_for: dict[fx.Node, fx.Node] = {}
        self.totals: dict[fx.Node, fx.Node] = {}  # by loss: what each micro-batch divides it by
        rows = list(zip(capture.fx_nodes, capture.graph.nodes, strict=True))
        self.scale = next(node for node, row in rows if row.kind == "scale")
        loss, *others = results_of(capture.fx_nodes[0].graph)
        gradients, figures = (
            others[: len(capture.graph.gradients)],
            others[len(capture.graph.gradients) :],
        )
        asked, self._is_late = {loss, *figures}, False
        self.means: dict[fx.Node, fx.Node] = {}
        self.to_sum = self.summed(capture)
        self._apart: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self._beside: dict[tuple[fx.Node, int, int], fx.Node] = {}
        with _compat.mode_of(node.meta.get("val") for node in capture.fx_nodes), torch.no_grad():
            for node, row in rows:
                self._is_late = row.phase == "B"
                if node.op == "call_function":
                    self.states[node] = self._state(node)
                else:
                    self.states[node] = self.given(node, row)
                if node in asked:
                    self.means[node] = self.mean(node)
            self.gradients = [self._gradient(node) for node in gradients]

    def summed(self, capture: Capture) -> set[fx.Node]:
        """Return the nodes of which the sum over all micro-batches may be made at once."""
        rows = zip(capture.fx_nodes, capture.graph.nodes, strict=True)
        return lead_to_gradients(capture, {node for node, row in rows if row.kind == "input"})

    def given(self, node: fx.Node, row: Node) -> State:
        """Return an input of the step, or a constant."""
        value = node.meta.get("val")
        if row.kind != "input":
            return Same(self.placed(node, value))
        return Abreast(self.placed(node, torch.cat([value] * self.count)), 0)  # pyright: ignore

    def placed(self, node: fx.Node, value: Any) -> fx.Node:
        """Return a new input or constant of the step, in place of one."""
        target = node.target if node.op == "get_attr" else f"input{len(self.graph.nodes)}"
        made = self.graph.create_node(node.op, target)
        made.meta["custom"], made.meta["val"] = {**custom(node)}, value
        self.placed_for[made] = node
        return made

    def _state(self, node: fx.Node) -> State:
        if self.scale in node.all_input_nodes:
            self._scale_down(node)
        sources = [self.states[source] for source in node.all_input_nodes]
        if node.target is operator.getitem and isinstance(sources[0], Several):
            return sources[0].each[_number(node)]
        if all(isinstance(state, Same) for state in sources):
            return Same(self.copied(node, self.same))
        if any(isinstance(state, SumOfAll) for state in sources):
            return self.linear(node)
        try:
            made = self.rule(self, node)
        except UNKNOWN:
            made = None
        return self.coupling(node) if made is None else made

    def linear(self, node: fx.Node) -> State:
        """Return the result of a linear op on a sum: the sum of its results."""
        return SumOfAll(self.copied(node, lambda source: self._summand(source, node)))

    def coupling(self, node: fx.Node) -> State:
        """Return the result of an op that may couple samples: it runs once for each micro-batch."""
        return self._one_by_one(node)

    def _scale_down(self, reader: fx.Node) -> None:
        """Let each micro-batch have its part of the scale of the gradients of the joined one."""
        state = self.states[self.scale]
        assert isinstance(state, Same), "the scale is no sample's"
        if state.node.op == "placeholder":
            part = self.op(reader, aten.mul.Tensor, state.node, 1.0 / self.times)
            self.states[self.scale] = Same(part)

    def _summand(self, source: fx.Node, reader: fx.Node) -> fx.Node:
        """Return the operand of a linear op: the sum, or a factor that all have in common."""
        is_term = reader.target in (aten.add.Tensor, aten.sub.Tensor)
        if is_term or isinstance(self.states[source], SumOfAll):
            return self.total(source, reader)
        return self.same(source)

    def _gradient(self, node: fx.Node | None) -> fx.Node | None:
        return None if node is None else self.total(node, node)

    def _one_by_one(self, node: fx.Node) -> Apart:
        """Return an op that is run for each micro-batch."""
        made: list[fx.Node] = []
        for part in range(self.count):
            try:
                one = self.copied(node, lambda source, k=part: self.apart(source, node)[k], part)
            except UNKNOWN as problem:
                message = f"{node.target} cannot be run of one joined micro-batch: {problem}"
                raise GraphError(message) from problem
            made.append(one)
        return Apart(tuple(made))

    # -- values of the new step -------------------------------------------------------------------

    def same(self, source: fx.Node) -> fx.Node:
        """Return a value that is the same for every micro-batch."""
        state = self.states[source]
        assert isinstance(state, Same), "the caller has looked"
        return state.node

    def is_same(self, *sources: object) -> bool:
        """Return whether some arguments are the same for every micro-batch."""
        nodes = (source for source in sources if isinstance(source, fx.Node))
        return all(isinstance(self.states[node], Same) for node in nodes)

    def dim_of(self, source: object) -> int | None:
        """Return along which dim the values of micro-batches stand beside one another, if any."""
        state = self.states[source] if isinstance(source, fx.Node) else None
        return state.dim if isinstance(state, Abreast) else None

    def outer_of(self, sources: Iterable[fx.Node]) -> int:
        """Return into how many pieces they are cut in the first of some values."""
        states = (self.states[source] for source in sources)
        return next((state.outer for state in states if isinstance(state, Abreast)), 1)

    def apart(self, source: fx.Node, reader: fx.Node) -> tuple[fx.Node, ...]:
        """Return the value of each micro-batch, for the op `reader`."""
        match self.states[source]:
            case Same(node):
                return (node,) * self.count
            case Apart(nodes):
                return nodes
            case Abreast() as state:
                if source not in self._apart:
                    self._apart[source] = tuple(self._cut(source, state, reader))
                return self._apart[source]
            case SumOfAll() | Sealed() | Several():
                raise GraphError(f"{reader.target} reads what is of all of them")

    def _cut(self, source: fx.Node, state: Abreast, reader: fx.Node) -> Iterable[fx.Node]:
        value, shape, dim = source.meta["val"], shape_of(source), state.dim
        whole, size = state.node, shape[dim]
        if state.outer > 1:
            sizes = [*shape[:dim], state.outer, self.count, size // state.outer, *shape[dim + 1 :]]
            whole = self.op(reader, aten.view.default, self._dense(whole, reader), sizes)
        for number in range(self.count):
            if state.outer > 1:
                part = self.op(reader, aten.select.int, whole, dim + 1, number)
                part = self.op(reader, aten.reshape.default, part, list(shape))
            else:
                place = number * size, (number + 1) * size
                part = self.op(reader, aten.slice.Tensor, whole, dim, *place)
            yield self._dense(part, reader) if value.is_contiguous() else part

    def _dense(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        if node.meta["val"].is_contiguous():
            return node
        return self.op(reader, aten.clone.default, node, memory_format=torch.contiguous_format)

    def beside(self, source: fx.Node, dim: int, reader: fx.Node, outer: int = 1) -> fx.Node | None:
        """Return the values of all micro-batches beside one another along `dim`.

        None where they stand otherwise, or are no tensors.
        """
        state, shape = self.states[source], shape_of(source)
        if isinstance(state, Abreast):
            return state.node if (state.dim, state.outer) == (dim, outer) else None
        if not isinstance(state, Same | Apart) or not -1 < dim < len(shape) or shape[dim] % outer:
            return None
        key = source, dim, outer
        if key not in self._beside:
            wider = self.expanded(source, dim, reader)
            if wider is None:
                wider = self._put_beside(source, dim, reader, outer)
            self._beside[key] = wider
        return self._beside[key]

    def _put_beside(self, source: fx.Node, dim: int, reader: fx.Node, outer: int) -> fx.Node:
        parts, shape = list(self.apart(source, reader)), shape_of(source)
        if outer == 1:
            made = self.op(reader, aten.cat.default, parts, dim)
            return self._dense(made, reader) if source.meta["val"].is_contiguous() else made
        sizes = [*shape[:dim], outer, 1, shape[dim] // outer, *shape[dim + 1 :]]
        parts = [self.op(reader, aten.reshape.default, part, sizes) for part in parts]
        made = self.op(reader, aten.cat.default, parts, dim + 1)
        return self.op(reader, aten.reshape.default, made, self.wide(shape, dim))

    def expanded(self, source: fx.Node, dim: int, reader: fx.Node) -> fx.Node | None:
        """Return a value that repeats one number along a dim, which it repeats more often then."""
        state, value = self.states[source], source.meta["val"]
        is_repeated = source.target is aten.expand.default and value.stride()[dim] == 0
        if not isinstance(state, Same) or not is_repeated:
            return None
        one = self.op(reader, aten.slice.Tensor, state.node, dim, 0, 1)
        return self.op(reader, aten.expand.default, one, self.wide(tuple(value.shape), dim))

    def spread(
        self, source: fx.Node, at: tuple[int, int], shape: Sequence[int], reader: fx.Node
    ) -> fx.Node:
        """Return values of micro-batches for an op that repeats each along a dim of its result.

        at:       the dim, and in how many pieces.
        shape:    of the result, for one micro-batch.
        """
        dim, outer = at
        own, missing = shape_of(source), len(shape) - len(shape_of(source))
        sizes = [1] * missing + list(own)
        sizes[dim] = shape[dim] // outer
        parts: list[Any] = []
        for node in self.apart(source, reader):
            part = node
            if missing > 0:
                part = self.op(reader, aten.view.default, part, [1] * missing + list(own))
            parts.append(self.op(reader, aten.expand.default, part, sizes))
        return self.op(reader, aten.cat.default, parts * outer, dim)

    def total(self, source: fx.Node, reader: fx.Node) -> fx.Node:
        """Return the sum of the values of all micro-batches."""
        state = self.states[source]
        if isinstance(state, SumOfAll):
            return state.node
        if isinstance(state, Same):
            return self.op(reader, aten.mul.Tensor, state.node, self.times)
        first, *others = self.apart(source, reader)
        for other in others:
            first = self.op(reader, aten.add.Tensor, first, other)
        return first

    def mean(self, source: fx.Node) -> fx.Node:
        """Return the mean of the values of all micro-batches."""
        state = self.states[source]
        if isinstance(state, Same):
            return state.node
        return self.op(source, aten.mul.Tensor, self.total(source, source), 1.0 / self.times)

    @property
    def times(self) -> float:
        """Return the number of micro-batches that are joined."""
        return self.count

    def sized(self, size: int) -> int:
        """Return the size of a dim over all micro-batches, where one micro-batch has `size`."""
        return size * self.count

    def any_of(self, source: fx.Node, reader: fx.Node) -> fx.Node:
        """Return any value with the dtype and device of `source`."""
        return self.apart(source, reader)[0]

    def wide(self, shape: Sequence[int], dim: int) -> list[int]:
        """Return the shape of values of all micro-batches, beside one another along `dim`."""
        return [self.sized(size) if d == dim else size for d, size in enumerate(shape)]

    # -- ops of the new step ----------------------------------------------------------------------

    def op(self, reader: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Return a new op, which belongs where `reader` is."""
        return self._made(target, args, kwargs, self._notes(reader))

    def copied(
        self, node: fx.Node, of: Callable[[fx.Node], fx.Node], part: int | None = None
    ) -> fx.Node:
        """Return a copy of an op that reads `of(value)` in place of each value.

        part:     number of its micro-batch; None: it is of all.
        """
        args, kwargs = map_aggregate((node.args, dict(node.kwargs)), _each(of))  # pyright: ignore
        return self._made(node.target, args, kwargs, self._notes(node, part))

    def beside_op(
        self, node: fx.Node, at: tuple[int, int], args: Any, kwargs: Any = None
    ) -> Abreast | None:
        """Return an op whose results stand side by side; None: its shape does not fit.

        at:       along which dim, and in how many pieces.
        """
        given, dim = dict(node.kwargs) if kwargs is None else kwargs, at[0]
        value = self._value(node.target, args, given)
        if list(value.shape) != self.wide(shape_of(node), dim) or not value.numel():
            return None
        return Abreast(self._made(node.target, args, given, self._notes(node), value), *at)

    def sum_op(self, node: fx.Node, args: Any, kwargs: Any = None) -> SumOfAll | None:
        """Return an op whose result is the sum over all samples; None: its shape does not fit."""
        given = dict(node.kwargs) if kwargs is None else kwargs
        value = self._value(node.target, args, given)
        if tuple(value.shape) != shape_of(node):
            return None
        return SumOfAll(self._made(node.target, args, given, self._notes(node), value))

    def several(
        self, node: fx.Node, dims: Sequence[Place], args: Any, kwargs: Any, outer: int = 1
    ) -> Several | None:
        """Return an op with several results; None: one has not the shape that it should have.

        dims:     of each result: along which dim the samples are; SUMMED; None: nobody's.
        """
        value = self._value(node.target, args, kwargs)
        if len(value) != len(dims):
            return None
        rows = list(zip(value, node.meta["val"], dims, strict=True))
        for new, old, dim in rows:
            if old is None or dim is None:
                continue
            wanted = self.wide(old.shape, dim) if isinstance(dim, int) else list(old.shape)
            if list(new.shape) != wanted:
                return None
        whole = self._made(node.target, args, kwargs, self._notes(node), value)
        each: list[State] = []
        for number, (_, _, dim) in enumerate(rows):
            one = self.op(node, operator.getitem, whole, number)
            if isinstance(dim, int):
                each.append(Abreast(one, dim, outer))
            else:
                each.append(SumOfAll(one) if dim == SUMMED else Sealed(one))
        return Several(tuple(each))

    def is_summed(self, node: fx.Node, numbers: Iterable[int]) -> bool:
        """Return whether nothing but gradients come of some results of an op, by linear ops."""
        wanted = set(numbers)
        return all(user in self.to_sum for user in node.users if user.args[1] in wanted)

    def _made(self, target: Any, args: Any, kwargs: Any, notes: Any, value: Any = None) -> fx.Node:
        value = self._value(target, args, kwargs) if value is None else value
        made = self.graph.call_function(target, args, kwargs)
        made.meta["val"], made.meta["custom"] = value, notes
        return made

    def _value(self, target: Any, args: Any, kwargs: Any) -> Any:
        given: Any = map_aggregate((args, dict(kwargs)), _each(lambda node: node.meta["val"]))
        return target(*given[0], **given[1])

    def _notes(self, node: fx.Node, part: int | None = None) -> dict[str, Any]:
        """Return the notes of an op: a gradient goes to the op of the same micro-batch."""
        notes = {**custom(node), "backward": self._is_late}
        if part is not None and notes.get("sequence") is not None:
            notes["sequence"] += (part + 1) / (self.count + 1)
        return notes


def _number(node: fx.Node) -> int:
    number: Any = node.args[1]
    return number


def replaced(node: fx.Node, given: Mapping[fx.Node, Any]) -> Any:
    """Return the arguments of an op, positional and named, with other values."""
    return map_aggregate((node.args, dict(node.kwargs)), _each(lambda value: given[value]))  # pyright: ignore


def _each(of: Callable[[fx.Node], Any]) -> Callable[[Any], Any]:
    return lambda given: of(given) if isinstance(given, fx.Node) else given


def is_tensor(node: fx.Node) -> bool:
    """Return whether the value of a node is one tensor."""
    return isinstance(node.meta.get("val"), Tensor)
