"""Placed: where every value of a step is, once it is said which parameters are held in slices.

One pass over the step, op by op: of the ways to compute an op, the cheapest one, with the changes
of placement that its inputs need.  What was changed once is there for all who read it later.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from types import MappingProxyType
from typing import NamedTuple, TypeAlias, final

from torch import fx

from penstock.graph.dims import shape_of
from penstock.graph.graph import Phase
from penstock.graph.tensor.op_choice import OpChoice
from penstock.graph.tensor.slicing_rules import RESHAPED, choices, count_of, work_of
from penstock.graph.tensor.token_slices import input_place, token_choices
from penstock.graph.tensor.value_placement import (
    PARTIAL,
    WHOLE,
    Partial,
    Placement,
    Slices,
    State,
    Whole,
    are_exchanged,
    fits,
)
from penstock.graph.trace import Capture

States = Mapping[fx.Node, State]
There: TypeAlias = "set[tuple[fx.Node, Placement]]"
Held = Mapping[str, Slices]  # by name, the parameters of which each rank has a slice


class RankSpeed(NamedTuple):
    """What a rank does in a second, as far as placements are chosen by it.

    latency_s:  of one collect, whatever its bytes.
    op_s:       seconds of each node, where they are known; in place of FLOP and bytes.
    busiest:    by product of rows with their experts' matrices, the part of the rows that the
                busiest rank has, where it is known; else each has as many.
    """

    flop_per_s: float = 4e10
    memory_bytes_per_s: float = 3e10
    link_bytes_per_s: float = 2e9
    latency_s: float = 1e-4
    op_s: Sequence[float] = ()
    busiest: Mapping[int, float] = MappingProxyType({})


@dataclass(slots=True)
class Layout:
    """Where every value of a step is, and what it is expected to cost.

    choices:    how each op is computed.
    states:     by node.
    seconds:    of a micro-batch on each rank, as `RankSpeed` has it.
    collects:   (value, to what it is changed) in their order, those that send something.
    wanted:     of each parameter, what its readers want of it.
    held:       the parameters of which each rank has a slice.
    spread:     sums that were due may have become slices of tokens.
    viewed:     sliced views that are made again of what they look at, gathered.
    """

    held: Held
    choices: dict[fx.Node, OpChoice] = field(default_factory=dict[fx.Node, OpChoice])
    states: dict[fx.Node, State] = field(default_factory=dict[fx.Node, State])
    seconds: float = 0.0
    collects: list[tuple[fx.Node, Placement]] = field(
        default_factory=list[tuple[fx.Node, Placement]]
    )
    viewed: set[fx.Node] = field(default_factory=set[fx.Node])
    spread: bool = False
    wanted: dict[fx.Node, set[Placement]] = field(default_factory=dict[fx.Node, set[Placement]])


@final
class _SeenStates(Mapping[fx.Node, State]):
    """Where values are, and which of them somebody has asked for; None: it was nowhere yet."""

    def __init__(self, states: States) -> None:
        self._states = states
        self.seen: dict[fx.Node, State | None] = {}

    def __getitem__(self, node: fx.Node) -> State:
        state = self.seen[node] = self._states.get(node)
        if state is None:
            raise KeyError(node)
        return state

    def __iter__(self) -> Iterator[fx.Node]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)


class _PricedChoice(NamedTuple):
    """A way to compute an op, with the seconds of the op and of what is collected within."""

    choice: OpChoice
    op_s: float
    collects_s: float


class _KnownChoices(NamedTuple):
    """The choices of an op where the values that they depend on are so."""

    seen: tuple[tuple[fx.Node, State | None], ...]
    choices: list[_PricedChoice]

    def hold(self, states: States) -> bool:
        """Return whether they are those for these states, too."""
        return all(states.get(node) == state for node, state in self.seen)


class Placing:
    """The pass over one step; it is used for many choices of what is held in slices.

    results:  nodes that must be whole at the end: the loss, the figures.
    spread:   sums that are due become slices, of tokens, where that is cheaper for their reader.
    tokens:   each rank has some tokens of every sequence, and all weights (token_slices.py).
    """

    def __init__(
        self,
        capture: Capture,
        ranks: int,
        prices: RankSpeed,
        *,
        spread: bool = False,
        tokens: bool = False,
    ) -> None:
        self.capture, self.ranks, self.prices = capture, ranks, prices
        self.spread, self.tokens = spread or tokens, tokens
        graph, nodes = capture.graph, capture.fx_nodes
        self.rows = dict(zip(nodes, graph.nodes, strict=True))
        self.free = dict(zip(nodes, graph.free, strict=True))
        self.results = [nodes[at] for at in sorted(graph.told)]
        made = graph.gradients.items()
        self.gradients = {name: nodes[at] for name, at in made if at is not None}
        self.bytes = {node: float(row.size_bytes) for node, row in self.rows.items()}
        self.memory_s = {n: work_of(n) * 4 / prices.memory_bytes_per_s for n in nodes}
        self.flop_s = {n: row.flop / prices.flop_per_s for n, row in self.rows.items()}
        if prices.op_s:
            self.flop_s = dict(zip(nodes, prices.op_s, strict=True))
            self.memory_s = dict.fromkeys(nodes, 0.0)
        self.busiest = {nodes[at]: part for at, part in prices.busiest.items()}
        read = {k for n in graph.nodes if n.phase == "F" and n.kind == "op" for k in n.inputs}
        self._used = {n.name for at, n in enumerate(graph.nodes) if at in read}
        self.shapes = {node: shape_of(node) for node in nodes}
        self._known: dict[fx.Node, list[_KnownChoices]] = {}
        self._whole: dict[fx.Node, _PricedChoice] = {}

    def is_used(self, name: str) -> bool:
        """Return whether an op of the forward pass reads a parameter."""
        return name in self._used

    def layout(self, held: Held) -> Layout:
        """Return the cheapest layout with these parameters held in slices, and those that go with
        them: of which all readers want the same slice.
        """
        known = dict(held)
        while True:
            found = self._pass(known)
            more = {
                self.rows[node].name: place
                for node, places in found.wanted.items()
                if self.rows[node].name not in known and len(places) == 1
                for place in places
                if isinstance(place, Slices)
            }
            if not more:
                return found
            known = {**known, **more}

    def _pass(self, held: Held) -> Layout:
        made, there = Layout(held, spread=self.spread), set[tuple[fx.Node, Placement]]()
        for node in self.capture.fx_nodes:
            row = self.rows[node]
            if row.kind == "parameter":
                made.states[node] = held.get(row.name, WHOLE)
            elif row.kind != "op":
                made.states[node] = self._begin(node)
            elif node.target is operator.getitem:
                self._item(made, node)
            else:
                choice = self._cheapest(made, there, node)
                for source, place in choice.wants.items():
                    self._change(made, there, source, place)
                made.choices[node], made.states[node] = choice, choice.out
        ends: list[tuple[fx.Node, Placement]] = [(node, WHOLE) for node in self.results]
        for name, node in self.gradients.items():
            if not (self.tokens and made.states[node] == PARTIAL):
                ends.append((node, held.get(name, WHOLE)))
        for node, place in ends:
            if (node, place) not in there:
                phase = self.rows[node].phase
                made.seconds += self._change_s(made.states, there, node, place, phase)
            self._change(made, there, node, place)
        return made

    def _item(self, made: Layout, node: fx.Node) -> None:
        source, at = node.args
        state = made.states[source]  # pyright: ignore[reportArgumentType]
        made.states[node] = state[at] if isinstance(state, tuple) else state  # pyright: ignore

    def _cheapest(self, made: Layout, there: There, node: fx.Node) -> OpChoice:
        whole = self._whole.get(node)
        if whole is None:
            wants = dict.fromkeys(node.all_input_nodes, WHOLE)
            whole = self._whole[node] = self._priced(node, OpChoice(wants, self._whole_state(node)))
        best, least = whole, self._cost(made, there, node, whole)
        for choice in self._choices(made, node):
            if (cost := self._cost(made, there, node, choice)) < least:
                best, least = choice, cost
        made.seconds += least
        return best.choice

    def _choices(self, made: Layout, node: fx.Node) -> list[_PricedChoice]:
        """Return the choices of an op; one pass differs from the next in a few values only."""
        rows = self._known.setdefault(node, [])
        for row in rows:
            if row.hold(made.states):
                return row.choices
        states = _SeenStates(made.states)
        every = choices(node, states, self.ranks)
        if self.tokens:
            every += token_choices(node, states, self.ranks)
        able = [each for each in every if not each.spreads or (self.spread and not self.tokens)]
        priced = [self._priced(node, each) for each in able]
        rows.append(_KnownChoices((*states.seen.items(),), priced))
        return priced

    def _begin(self, node: fx.Node) -> Placement:
        is_input = self.tokens and self.rows[node].kind == "input"
        return input_place(node, self.ranks) if is_input else WHOLE

    def _whole_state(self, node: fx.Node) -> State:
        count = count_of(node)
        return (WHOLE,) * count if count else WHOLE

    def _priced(self, node: fx.Node, choice: OpChoice) -> _PricedChoice:
        outs = choice.out if isinstance(choice.out, tuple) else (choice.out,)
        shares = any(isinstance(place, Slices) for place in (*choice.wants.values(), *outs))
        part, collects_s = 1 / self.ranks if shares else 1.0, 0.0
        if choice.several is not None:  # of products of rows, those by experts alone
            part = self.busiest.get(node, part)
            _, summed, gathered, scattered = choice.several
            sent = 2 * summed, gathered, scattered
            collects_s = sum(self._collect_s(each) for each in sent if each)
        return _PricedChoice(choice, (self.flop_s[node] + self.memory_s[node]) * part, collects_s)

    def _cost(self, made: Layout, there: There, node: fx.Node, priced: _PricedChoice) -> float:
        """Return the seconds of an op as chosen, with what has to be changed for it."""
        states, phase, cost = made.states, self.rows[node].phase, 0.0
        for source, place in priced.choice.wants.items():
            if (source, place) not in there:
                cost += self._change_s(states, there, source, place, phase)
        return cost + priced.op_s + priced.collects_s

    def _collect_s(self, size_bytes: float) -> float:
        share = (self.ranks - 1) / self.ranks
        return self.prices.latency_s + size_bytes * share / self.prices.link_bytes_per_s

    def _change_s(
        self, states: States, there: There, node: fx.Node, to: Placement, phase: Phase
    ) -> float:
        """Return the seconds of a change of placement, for a reader of this phase; infinite where
        there is none.
        """
        state, row = states[node], self.rows[node]
        if isinstance(state, tuple):
            return 0.0 if to == WHOLE and set(state) <= {WHOLE} else inf
        if state == to:
            return 0.0
        if not fits(to, self.shapes[node], self.ranks):
            return inf
        if self._is_exchanged(there, node, state, to):
            return self._collect_s(self.bytes[node] / self.ranks) if row.phase == phase else inf
        if isinstance(state, Slices) and (source := self._looked_at(node)) is not None:
            seen = (source, WHOLE) in there
            return 0.0 if seen else self._change_s(states, there, source, WHOLE, phase)
        size = self.bytes[node]
        match state, to:
            case _, Partial():
                return inf
            case Whole(), Slices():
                is_state = row.kind == "parameter"
                return 0.0 if is_state else size / self.ranks / self.prices.memory_bytes_per_s
            case _ if row.kind != "op" or self.free[node] or row.phase != phase:
                return inf  # every stage makes it again, or nobody sends it any more
            case Slices(), _:
                return self._collect_s(size)
            case Partial(), Slices() if self.spread and (node, WHOLE) not in there:
                return self._collect_s(size)
            case _:
                return self._collect_s(2 * size)

    def _is_exchanged(self, there: There, node: fx.Node, state: State, to: Placement) -> bool:
        """Return whether slices become others by an exchange: all of it is nowhere yet."""
        if self.rows[node].kind != "op" or self.free[node] or not are_exchanged(state, to):
            return False
        source = self._looked_at(node)
        return (node, WHOLE) not in there and (source is None or (source, WHOLE) not in there)

    def _looked_at(self, node: fx.Node) -> fx.Node | None:
        """Return the value of which a view shows all: it is gathered once for all of its views."""
        if node.target not in RESHAPED or len(node.all_input_nodes) != 1:
            return None
        (source,) = node.all_input_nodes
        alike = self.rows[source].kind == "op" and self.bytes[source] == self.bytes[node]
        return source if alike and self.rows[source].phase == self.rows[node].phase else None

    def _change(self, made: Layout, there: There, node: fx.Node, to: Placement) -> None:
        """Note that a value is there as `to`, too; a sum that was made is no summand any more."""
        state = made.states[node]
        if self.rows[node].kind == "parameter":
            made.wanted.setdefault(node, set()).add(to)
        if isinstance(state, tuple) or state == to or (node, to) in there:
            return
        exchanged = self._is_exchanged(there, node, state, to)
        there.add((node, to))
        if state == WHOLE:
            return
        if (
            isinstance(state, Partial)
            and to != WHOLE
            and self.spread
            and (node, WHOLE) not in there
        ):
            made.collects.append((node, to))
            made.states[node] = to
            return
        if exchanged:
            made.collects.append((node, to))
            return
        if isinstance(state, Slices) and (source := self._looked_at(node)) is not None:
            made.viewed.add(node)
            self._change(made, there, source, WHOLE)
        elif to == WHOLE or (node, WHOLE) not in there:
            made.collects.append((node, to))
        there.add((node, WHOLE))
        if isinstance(state, Partial):
            made.states[node] = WHOLE
