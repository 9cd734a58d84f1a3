"""Drawn slices: each rank draws for all, as the plain loop does, and keeps its part.

An op that draws looks at its tensor for the shape alone.  Where ranks have slices of that, each
draws into memory of the whole shape, all by the same seed, so all the same numbers:

    x            slices of tokens            x            slices of tokens
    whole x      a gather                    draw         bernoulli of the whole shape
    draw         bernoulli of whole x        part         this rank's slices of it
    whole x * draw                           x * part     slices of tokens

Keeps:    every number of the plain loop.
Costs:    each rank draws all; nothing is sent.
Holds:    a draw for all tokens until its part is taken.
Ignores:  attention that draws inside of itself, as fused kernels of GPUs do: it stays whole.
"""

import operator
from collections.abc import Iterator, Mapping
from typing import Any

from torch import fx

from penstock.graph.dims import aten
from penstock.graph.tensor.op_choice import OpChoice, OpSeries, OpWriter, States, given, single
from penstock.graph.tensor.value_placement import Slices

Given = Mapping[fx.Node, fx.Node]

OF_A_SHAPE = (  # what they draw depends on shape, dtype and layout of their tensor
    aten.bernoulli.p,
    aten.uniform.default,
    aten.normal_functional.default,
    aten.exponential.default,
    aten.geometric.default,
    aten.cauchy.default,
    aten.log_normal.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
)


def _blank(write: OpWriter, like: fx.Node) -> Any:
    """Return memory of the shape and the layout that a whole value has."""
    value = like.meta["val"]
    kind = {"dtype": value.dtype, "device": value.device}
    return write.new(aten.empty_strided.default, [*value.shape], [*value.stride()], **kind)


def drawn(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    """Numbers drawn in the shape of a value in slices."""
    source, *more = given(node)
    place = single(states, source)
    if not isinstance(place, Slices):
        return

    def build(write: OpWriter, own: Given) -> tuple[Any, ...]:
        every = write.new(node.target, _blank(write, source), *more, **node.kwargs)
        return (write.part(every, place),)

    yield OpChoice({source: place}, place, OpSeries(build))


def dropped(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    """Dropout as one op, which makes a value and a mask: that of ones, times a rank's slices."""
    source, *more = given(node)
    place = single(states, source)
    if not isinstance(place, Slices):
        return

    def build(write: OpWriter, own: Given) -> tuple[Any, ...]:
        ones = write.new(aten.full_like.default, _blank(write, source), 1.0)
        both = write.new(node.target, ones, *more)
        noise, mask = (write.new(operator.getitem, both, at) for at in (0, 1))
        dropped_x = write.new(aten.mul.Tensor, own[source], write.part(noise, place))
        return dropped_x, write.part(mask, place)

    yield OpChoice({source: place}, (place, place), OpSeries(build))
