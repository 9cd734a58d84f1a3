"""Spans and held bytes: the columns of a timeline, from outside sequences of records."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import TimelineError
from penstock.program.instructions import LANES as LANES
from penstock.program.instructions import SPAN_KINDS as SPAN_KINDS
from penstock.program.instructions import Lane as Lane
from penstock.program.instructions import SpanKind as SpanKind

SPAN_COLUMNS = ("ranks", "lanes", "kinds", "stages", "micro_batches", "starts_s", "ends_s")
MEMORY_COLUMNS = ("ranks", "times_s", "sizes_bytes")


class Span(NamedTuple):
    """One thing that one lane of one rank did, in seconds from the start of the step."""

    rank: int
    lane: Lane
    kind: SpanKind
    stage: int
    micro_batch: int  # of a U or a reduce: the step
    start_s: float
    end_s: float

    @property
    def name(self) -> str:
        """Return the short text of a span: "F2.5", "U2.1", "reduce 0", "offload 2"."""
        if self.lane in ("collective", "copy"):
            return f"{self.kind} {self.micro_batch if self.stage < 0 else self.stage}"
        return f"{self.kind}{self.stage}.{self.micro_batch}"


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """A sequence of `Span`, kept as columns of equal length; in any order."""

    ranks: NDArray[np.int32]
    lanes: NDArray[np.uint8]  # index into LANES
    kinds: NDArray[np.uint8]  # index into SPAN_KINDS
    stages: NDArray[np.int32]
    micro_batches: NDArray[np.int32]
    starts_s: NDArray[np.float64]
    ends_s: NDArray[np.float64]

    def __post_init__(self) -> None:
        _check_columns("span", [(name, getattr(self, name)) for name in SPAN_COLUMNS])
        if len(self) == 0:
            return
        for name, codes, words in (("lane", self.lanes, LANES), ("kind", self.kinds, SPAN_KINDS)):
            worst = int(codes.max())
            if worst >= len(words):
                raise TimelineError(f"a span has {name} {worst} of 0 to {len(words) - 1}")
        wrong = ~(
            (self.starts_s <= self.ends_s) & np.isfinite(self.starts_s) & np.isfinite(self.ends_s)
        )
        if wrong.any():
            at = int(np.argmax(wrong))
            span = self[at]
            runs = f"runs from {span.start_s} s to {span.end_s} s"
            raise TimelineError(f"span {at}, {span.name} of rank {span.rank}, {runs}")

    @classmethod
    def of(cls, spans: Iterable[Span]) -> "Spans":
        """Return the columns of `spans`."""
        columns = list(zip(*spans, strict=True)) or [()] * 7
        ranks, lanes, kinds, stages, micro_batches, starts_s, ends_s = columns
        return cls(
            np.array(ranks, np.int32),
            np.array([LANES.index(lane) for lane in lanes], np.uint8),
            np.array([SPAN_KINDS.index(kind) for kind in kinds], np.uint8),
            np.array(stages, np.int32),
            np.array(micro_batches, np.int32),
            np.array(starts_s, np.float64),
            np.array(ends_s, np.float64),
        )

    def __len__(self) -> int:
        return len(self.ranks)

    def __getitem__(self, at: int) -> Span:
        lane, kind = LANES[int(self.lanes[at])], SPAN_KINDS[int(self.kinds[at])]
        where = int(self.stages[at]), int(self.micro_batches[at])
        return Span(
            int(self.ranks[at]),
            lane,
            kind,
            *where,
            float(self.starts_s[at]),
            float(self.ends_s[at]),
        )

    def where(self, chosen: NDArray[np.bool_]) -> "Spans":
        """Return the spans where `chosen` is true."""
        return Spans(*(getattr(self, name)[chosen] for name in SPAN_COLUMNS))

    def working(self) -> NDArray[np.bool_]:
        """Return for each span whether the computing thread is at it.

        That is a compute, an update, or a copy that runs beside none of these.
        """
        own = np.isin(self.lanes, [LANES.index(lane) for lane in ("compute", "update")])
        copies = self.lanes == LANES.index("copy")
        for rank in np.unique(self.ranks[copies]).tolist():
            here = own & (self.ranks == rank)
            order = np.argsort(self.starts_s[here], kind="stable")
            starts_s, ends_s = (each[here][order] for each in (self.starts_s, self.ends_s))
            there = np.flatnonzero(copies & (self.ranks == rank))
            last = np.searchsorted(starts_s, self.ends_s[there], side="left") - 1
            ends_s = np.concatenate([ends_s, [-np.inf]])  # the last one stands for none
            own[there] = ends_s[last] <= self.starts_s[there]
        return own

    def __iter__(self) -> Iterator[Span]:
        lanes = list(map(LANES.__getitem__, self.lanes.tolist()))
        kinds = list(map(SPAN_KINDS.__getitem__, self.kinds.tolist()))
        rest = (
            self.stages.tolist(),
            self.micro_batches.tolist(),
            self.starts_s.tolist(),
            self.ends_s.tolist(),
        )
        return (Span(*row) for row in zip(self.ranks.tolist(), lanes, kinds, *rest, strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spans) and _same_columns(self, other, SPAN_COLUMNS)


class Held(NamedTuple):
    """The bytes a rank holds from `time_s` on, until its next entry."""

    rank: int
    time_s: float
    size_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class MemoryCurve:
    """The bytes that every rank holds over time: a sequence of `Held`, for each rank by time."""

    ranks: NDArray[np.int32]
    times_s: NDArray[np.float64]
    sizes_bytes: NDArray[np.int64]

    def __post_init__(self) -> None:
        _check_columns("memory", [(name, getattr(self, name)) for name in MEMORY_COLUMNS])
        if not bool(np.isfinite(self.times_s).all()):
            raise TimelineError("a memory entry has a time that is no number of seconds")

    @classmethod
    def of(cls, entries: Iterable[Held] = ()) -> "MemoryCurve":
        """Return the columns of `entries`."""
        ranks, times_s, sizes_bytes = list(zip(*entries, strict=True)) or [()] * 3
        return cls(
            np.array(ranks, np.int32),
            np.array(times_s, np.float64),
            np.array(sizes_bytes, np.int64),
        )

    def __len__(self) -> int:
        return len(self.ranks)

    def __getitem__(self, at: int) -> Held:
        return Held(int(self.ranks[at]), float(self.times_s[at]), int(self.sizes_bytes[at]))

    def __iter__(self) -> Iterator[Held]:
        return map(Held, self.ranks.tolist(), self.times_s.tolist(), self.sizes_bytes.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MemoryCurve) and _same_columns(self, other, MEMORY_COLUMNS)


class Totals(NamedTuple):
    """What a whole timeline comes to; all that is left of one simulated without spans."""

    step_s: float
    busy_s: tuple[float, ...]  # per rank: computes and updates
    peak_bytes: tuple[int, ...]  # per rank


NOT_SUMMED = Totals(-1.0, (), ())


def _check_columns(what: str, columns: Sequence[tuple[str, NDArray[np.generic]]]) -> None:
    lengths = {name: len(column) for name, column in columns}
    if len(set(lengths.values())) > 1:
        raise TimelineError(f"{what} columns of different lengths: {lengths}")
    for _, column in columns:
        column.flags.writeable = False


def _same_columns(a: object, b: object, names: Sequence[str]) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in names)
