"""Choice: one way to compute an op of which ranks have the inputs in slices, or as summands."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from torch import fx

from penstock.graph.tensor.value_placement import WHOLE, Placement, Slices, State

States = Mapping[fx.Node, State]


class OpWriter(Protocol):
    """What writes the ops of a divided step in the place of one op of the whole one."""

    def new(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Return a new op; its notes are those of the op in whose place it stands."""
        ...

    def taken(self, value: fx.Node, dim: int, size: int) -> Any:
        """Return a rank's part of a whole value: of so many places of a dim."""
        ...

    def scattered(self, value: fx.Node, place: Slices) -> Any:
        """Return a rank's slice of the sum of what ranks have as summands."""
        ...

    def part(self, value: fx.Node, place: Slices) -> Any:
        """Return a rank's part of a whole value, of which it has such slices."""
        ...

    @property
    def ranks(self) -> int: ...

    @property
    def rank(self) -> int:
        """The number of the rank that computes it: the last argument of an op that has it."""
        ...


Build = Callable[[OpWriter, Mapping[fx.Node, fx.Node]], tuple[Any, ...]]


class OpSeries(NamedTuple):
    """An op as several ops, collects among them.

    build:         writes them, of the op's inputs as they are wanted; returns the op's results.
    summed_bytes, ..., scattered_bytes:   of whole values that are collected in between.
    """

    build: Build
    summed_bytes: float = 0.0
    gathered_bytes: float = 0.0
    scattered_bytes: float = 0.0


class OpChoice(NamedTuple):
    """One way to compute an op: what it wants of its inputs, and what it makes.

    several:  the ops that it becomes; None: the op itself, on what a rank has.
    spreads:  a sum that is due becomes slices, of tokens.
    """

    wants: Mapping[fx.Node, Placement]
    out: State
    several: OpSeries | None = None
    spreads: bool = False


Rule = Callable[[fx.Node, States, int], Iterator[OpChoice]]


def given(node: fx.Node) -> Any:
    """Return the arguments of an op."""
    return node.args


def single(states: States, node: object) -> Placement:
    """Return where one value is; whole, if it is not one."""
    state = states.get(node, WHOLE) if isinstance(node, fx.Node) else WHOLE
    return WHOLE if isinstance(state, tuple) else state


def all_whole(node: fx.Node) -> dict[fx.Node, Placement]:
    return dict.fromkeys(node.all_input_nodes, WHOLE)
