"""Divider: the ops of a traced step, one after the other, for some of the samples of a micro-batch.

It is the joiner with fewer samples in place of more: of every value of the traced step there is

    Same     the very value: no sample is behind it; or it was made of the whole batch
    Abreast  its rows: what belongs to the samples of this part
    SumOfAll what this part adds to it: that of the micro-batch is the sum over the parts

The rules are the joiner's, and over_samples.py says what becomes of sums, means and losses.  What
no rule knows of the batch alone - how many labels count, the weight of them all - is made of the
whole batch in each part.  What no rule knows of what the model has made couples samples: then the
step is not divided.
"""

from collections.abc import Sequence
from typing import Any

from torch import fx

from penstock.errors import GraphError
from penstock.graph.dims import aten, shape_of
from penstock.graph.functional import custom
from penstock.graph.graph import Node
from penstock.graph.joined.joiner import Abreast, Joiner, Rule, Same, State, SumOfAll
from penstock.graph.joined.linear_values import carries
from penstock.graph.trace import Capture

ALIKE = (  # what they make depends on the shape alone
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
)


class CouplesError(GraphError):
    """An op works on several samples of a micro-batch together."""


class Divider(Joiner):
    """The step of one of `parts` parts of the samples of a micro-batch of `capture`.

    cut:       the nodes of the batch of which a part has its rows; the others it has whole.
    rows:      by such a node, the input that has the rows of the part.
    wholes:    likewise, the one that has it whole.
    part:      the input with the number of the part: a vector of one.
    Raises:    CouplesError: an op works on several samples together.
    """

    def __init__(self, capture: Capture, parts: int, cut: Sequence[fx.Node], rule: Rule) -> None:
        self.parts, self.cut = parts, set(cut)
        self.rows: dict[fx.Node, fx.Node] = {}
        self.wholes: dict[fx.Node, fx.Node] = {}
        self.of_batch = _of_batch(capture)
        self._whole: dict[fx.Node, fx.Node] = {}
        super().__init__(capture, 1, rule)

    def summed(self, capture: Capture) -> set[fx.Node]:
        """Return the nodes that read more than the batch; a part may add its share to these."""
        return {node for node in capture.fx_nodes if node not in self.of_batch}

    def given(self, node: fx.Node, row: Node) -> State:
        """Return an input of the step, or a constant."""
        value = node.meta.get("val")
        if row.kind == "scale":
            one = aten.arange.default(1, device=value.device)  # pyright: ignore[reportOptionalMemberAccess]
            self.part = self.placed(node, one)
        if node not in self.cut:
            return Same(self.placed(node, value))
        self.rows[node] = self.placed(node, value[: len(value) // self.parts])  # pyright: ignore
        self.wholes[node] = self.placed(node, value)
        return Abreast(self.rows[node], 0)

    @property
    def times(self) -> float:
        """Return the share of a micro-batch that one part is."""
        return 1.0 / self.parts

    def sized(self, size: int) -> int:
        """Return the size of a dim in a part, where a whole micro-batch has `size`."""
        if size % self.parts:
            raise ValueError(f"{size} cannot be divided by {self.parts}")
        return size // self.parts

    def linear(self, node: fx.Node) -> State:
        """Return the result of a linear op on the share that a part adds to a value.

        Raises:   CouplesError: the op is not linear.
        """
        if node.target in ALIKE:
            return Same(self.copied(node, lambda source: self.any_of(source, node)))
        varying = {n for n in node.all_input_nodes if not isinstance(self.states[n], Same)}
        sums = [n for n in node.all_input_nodes if isinstance(self.states[n], SumOfAll)]
        is_float = node.target is aten._to_copy.default and node.meta["val"].is_floating_point()
        if not is_float and not all(carries(node, source, varying) for source in sums):
            raise self._couples(node)
        return super().linear(node)

    def coupling(self, node: fx.Node) -> State:
        """Return the result of an op that reads nothing but the batch: made of the whole batch.

        Raises:   CouplesError: it reads what the model has made.
        """
        if node not in self.of_batch:
            raise self._couples(node)
        return Same(self.whole(node))

    def whole(self, node: fx.Node) -> fx.Node:
        """Return a value of the batch alone, as a micro-batch has it."""
        if node not in self._whole:
            state = self.states.get(node)
            if isinstance(state, Same):
                return state.node
            made = self.wholes.get(node) or self.copied(node, self.whole)
            self._whole[node] = made
        return self._whole[node]

    def apart(self, source: fx.Node, reader: fx.Node) -> tuple[fx.Node, ...]:
        """Return the value as every part has it.

        Raises:   CouplesError: each has its own.
        """
        state = self.states[source]
        if isinstance(state, Same):
            return (state.node,)
        raise self._couples(reader)

    def any_of(self, source: fx.Node, reader: fx.Node) -> fx.Node:
        """Return any value with the dtype and device of `source`."""
        state = self.states[source]
        return (
            state.node if isinstance(state, Abreast | SumOfAll) else super().any_of(source, reader)
        )

    def beside(self, source: fx.Node, dim: int, reader: fx.Node, outer: int = 1) -> fx.Node | None:
        """Return the rows of this part of a value along `dim`; None where it has none there."""
        state, shape = self.states[source], shape_of(source)
        if isinstance(state, Abreast):
            return state.node if (state.dim, state.outer) == (dim, outer) else None
        if not isinstance(state, Same) or not -1 < dim < len(shape):
            return None
        if shape[dim] % (outer * self.parts):
            return None
        key = source, dim, outer
        if key not in self._beside:
            repeated = self.expanded(source, dim, reader)
            if repeated is None:
                repeated = self._rows(source, state.node, (dim, outer), reader)
            self._beside[key] = repeated
        return self._beside[key]

    def _rows(
        self, source: fx.Node, node: fx.Node, at: tuple[int, int], reader: fx.Node
    ) -> fx.Node:
        """Return the rows of this part, by its number."""
        (dim, outer), shape = at, shape_of(source)
        size = shape[dim] // (outer * self.parts)
        apart = [*shape[:dim], outer, self.parts, size, *shape[dim + 1 :]]
        made = self.op(reader, aten.reshape.default, node, apart)
        made = self.op(reader, aten.index_select.default, made, dim + 1, self.part)
        return self.op(reader, aten.reshape.default, made, self.wide(shape, dim))

    def blank(self, reader: fx.Node, like: fx.Node) -> fx.Node:
        """Return memory of the shape and the layout that a value of a micro-batch has."""
        value = like.meta["val"]
        kind = {"dtype": value.dtype, "device": value.device}
        sizes, strides = list(value.shape), list(value.stride())
        return self.op(reader, aten.empty_strided.default, sizes, strides, **kind)

    def beside_op(
        self, node: fx.Node, at: tuple[int, int], args: Any, kwargs: Any = None
    ) -> Abreast | None:
        """Return an op whose result has the rows of this part; None: its shape does not fit."""
        if shape_of(node)[at[0]] % (at[1] * self.parts):
            return None
        return super().beside_op(node, at, args, kwargs)

    def _couples(self, node: fx.Node) -> CouplesError:
        where = custom(node).get("module") or "the loss"
        return CouplesError(f"{node.target} in {where} works on several samples together")


def _of_batch(capture: Capture) -> set[fx.Node]:
    """Return the nodes that the batch is behind, and no parameter and no gradient."""
    found = set[fx.Node]()
    rows = list(zip(capture.fx_nodes, capture.graph.nodes, strict=True))
    learned = {node for node, row in rows if row.kind in ("parameter", "scale")}
    for node, row in rows:
        if row.kind == "input" or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
        if not learned.isdisjoint(node.all_input_nodes):
            learned.add(node)
    return found - learned
