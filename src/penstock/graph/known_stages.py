"""Known: what the stages of one graph are, found once for all plans that cut it.

A stage is what lies between two cut points and what the others ask of it.  In a search most stages
stand in many plans, so each is made once, with the ops that its demands need.

The owner of an op follows from that in the finest cut: a stage is a run of its pieces, and what is
last or lowest of several stays so where numbers of pieces become those of stages.
"""

import bisect
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from penstock.graph.graph import Graph, Phase
from penstock.graph.owners import Owners, owners_of
from penstock.graph.segments import StageDemand, segments_of
from penstock.graph.stages import Recompute, Segment, Stage

Segments = tuple[Segment, Segment, Segment, Segment]
MakeSegments = Callable[[Owners, StageDemand, Recompute], Segments]
T = TypeVar("T")


class Need(NamedTuple):
    """The ops that a stage computes for what is asked of it, and the values from elsewhere."""

    ops: frozenset[int]
    outside: frozenset[int]


class KnownStages:
    """What is known of the stages of a graph.

    make:   what makes the segments of one: `segments_of`, or what returns the same.
    """

    def __init__(self, graph: Graph, make: MakeSegments | None = None) -> None:
        self.graph, self.make = graph, make or _segments
        self._needs: dict[Hashable, Need] = {}
        self._segments: dict[Hashable, Segments] = {}
        self._repeated: dict[tuple[int, int], frozenset[int]] = {}
        self._reads: dict[frozenset[int], frozenset[int]] = {}
        self._values: dict[Hashable, Any] = {}

    @cached_property
    def _finest(self) -> Owners:
        return owners_of(self.graph, [point.at for point in self.graph.cut_points])

    def owners(self, cuts: Sequence[int]) -> Owners:
        """Return the owners of the ops for these cut points, as `owners_of` does."""
        pieces = range(len(self.graph.cut_points) + 1)
        of_piece = [bisect.bisect_left(cuts, piece) for piece in pieces]
        stage_of = tuple(map(of_piece.__getitem__, self._finest.stage_of))
        repeated = tuple(map(self._repeated_in, range_of(cuts, len(pieces))))
        return replace(self._finest, num_stages=len(cuts) + 1, stage_of=stage_of, repeated=repeated)

    def _repeated_in(self, pieces: tuple[int, int]) -> frozenset[int]:
        if pieces not in self._repeated:
            rows = self._finest.repeated[slice(*pieces)]
            self._repeated[pieces] = frozenset[int]().union(*rows)
        return self._repeated[pieces]

    def needed(
        self, owners: Owners, wanted: Iterable[int], stage: int, phase: Phase, pieces: Hashable
    ) -> Need:
        """Return the need of the stage of these pieces, as `Owners.needed` does."""
        key = pieces, phase, frozenset(wanted)
        if key not in self._needs:
            found = owners.needed(key[2], stage, phase)
            self._needs[key] = Need(*map(frozenset, found))
        return self._needs[key]

    def reads(self, ops: frozenset[int]) -> frozenset[int]:
        """Return the parameters and buffers that some ops read."""
        if ops not in self._reads:
            nodes, state = self.graph.nodes, self.graph.state
            self._reads[ops] = frozenset(k for i in ops for k in nodes[i].inputs if k in state)
        return self._reads[ops]

    def segments(self, owners: Owners, asked: StageDemand, *, recompute: Recompute) -> Segments:
        """Return the segments of a stage, as `segments_of` does."""
        forward, backward = asked.forward_sends, asked.backward_sends
        sent = (tuple(values for _, values in sends) for sends in (forward, backward))
        key = (
            *(asked.forward_ops, asked.backward_ops, asked.reads, asked.received, asked.late),
            *(*sent, asked.gradients, recompute, owners.repeated[asked.stage]),
        )
        if key not in self._segments:
            self._segments[key] = self.make(owners, asked, recompute)
        first, whole, inner, outer = self._segments[key]
        if first.sends != forward:
            first = replace(first, sends=forward)
        if whole.sends != backward:
            whole = replace(whole, sends=backward)
        if inner.sends and inner.sends != backward:
            inner = replace(inner, sends=backward)
        return first, whole, inner, outer

    def token(self, stage: Stage) -> Hashable:
        """Return a mark of a stage that `cut` made by this, the same wherever it stands."""
        return id(stage.weight_gradient), stage.parameters, stage.buffers  # W sends nothing

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result of `make`, made at the first call with this key."""
        if key not in self._values:
            self._values[key] = make()
        return self._values[key]


def _segments(owners: Owners, asked: StageDemand, recompute: Recompute) -> Segments:
    return segments_of(owners, asked, recompute=recompute)


def range_of(cuts: Sequence[int], pieces: int) -> list[tuple[int, int]]:
    """Return for each stage its first piece and the one after its last."""
    ends = [0, *(cut + 1 for cut in cuts), pieces]
    return list(itertools.pairwise(ends))
