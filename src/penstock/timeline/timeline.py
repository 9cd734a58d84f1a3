"""Timeline: who did what, from when to when, and the bytes held over time; simulated or measured.

Six lanes per rank:

    compute     F, B, I, W: the rank's own work
    update      U(stage, step); shares the computing thread with "compute"
    copy        offload and reload: to far memory and back; on the computing thread, or beside it
    send        from when a message has the wire until its last byte is on it
    receive     from when the first byte of a message is here until its last one is
    collective  reduce (stage -1; micro_batch = step) and unshard (micro_batch -1)

The file is Chrome trace-event JSON; Perfetto opens it as it is (docs/timeline.md has the schema).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from penstock.errors import TimelineError
from penstock.files import read_bytes, write_text
from penstock.timeline.chrome import Parts, from_text, to_text
from penstock.timeline.spans import (
    NOT_SUMMED,
    SPAN_KINDS,
    Held,
    MemoryCurve,
    Span,
    Spans,
    Totals,
)
from penstock.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans and held bytes of all ranks, with their totals (worked out when not given).

    `meta` is free text by key: where the timeline comes from.
    Raises:   TimelineError: a rank that is not there, a span that ends before it starts,
              columns of different lengths, a code without a name.
    """

    num_ranks: int
    spans: Spans
    memory: MemoryCurve = field(default_factory=MemoryCurve.of)
    meta: tuple[tuple[str, str], ...] = ()
    totals: Totals = NOT_SUMMED

    def __post_init__(self) -> None:
        for what, ranks in (("a span", self.spans.ranks), ("a memory entry", self.memory.ranks)):
            wrong = ranks[(ranks < 0) | (ranks >= self.num_ranks)]
            if len(wrong):
                raise TimelineError(
                    f"{what} of rank {wrong[0]} in a timeline of {self.num_ranks} ranks"
                )
        if self.totals == NOT_SUMMED:
            object.__setattr__(self, "totals", _totals(self.num_ranks, self.spans, self.memory))
        counts = len(self.totals.busy_s), len(self.totals.peak_bytes)
        if counts != (self.num_ranks, self.num_ranks):
            raise TimelineError(
                f"totals of {counts[0]} and {counts[1]} ranks in a timeline of {self.num_ranks}"
            )

    @classmethod
    def of(
        cls,
        num_ranks: int,
        spans: Iterable[Span],
        memory: Iterable[Held] = (),
        *,
        meta: tuple[tuple[str, str], ...] = (),
    ) -> "Timeline":
        """Return the timeline of a few spans given one by one."""
        return cls(num_ranks, Spans.of(spans), MemoryCurve.of(memory), meta)

    def __repr__(self) -> str:
        return f"<Timeline: {self}>"

    def _repr_html_(self) -> str:
        """Return the picture and the line for a notebook; the line alone of a very long one."""
        from penstock.timeline.svg import picture_of

        return picture_of(self, str(self))

    def __str__(self) -> str:
        """Return one line: "2 ranks, 12 spans, 9.00 s, bubble 33.3 %, peak 1.20 MiB"."""
        return (
            f"{self.num_ranks} ranks, {len(self.spans)} spans, {format_seconds(step_s(self))},"
            f" bubble {100 * bubble_fraction(self):.1f} %,"
            f" peak {format_bytes(max(peak_bytes(self), default=0))}"
        )

    def save(self, path: Path | str) -> None:
        """Write the timeline to `path` as Chrome trace-event JSON, whole or not at all."""
        write_text(
            path, to_text(Parts(self.num_ranks, self.spans, self.memory, self.meta, self.totals))
        )

    @classmethod
    def load(cls, path: Path | str) -> "Timeline":
        """Return the timeline that `save` wrote to `path`; equal to the saved one, bit for bit.

        Raises:   TimelineError: no such file, damaged, or not written by `save`.
        """
        content = read_bytes(path, TimelineError, "timeline")
        try:
            return cls(*from_text(content))
        except TimelineError as problem:
            hint = "the file is damaged or not a timeline; make it again"
            raise TimelineError(f"timeline {path}: {problem}", hint=hint) from problem


def step_s(timeline: Timeline) -> float:
    """Return the seconds from the first start to the last end on any lane of any rank.

    That is one step, or the whole window of an asynchronous schedule; 0.0 without spans.
    """
    return timeline.totals.step_s


def num_steps(timeline: Timeline) -> int:
    """Return the number of optimizer steps in a timeline: those of its updates, at least 1."""
    spans = timeline.spans
    updates = spans.micro_batches[spans.kinds == SPAN_KINDS.index("U")]
    return max(1, len(set(updates.tolist())))


def busy_s(timeline: Timeline, rank: int) -> float:
    """Return the seconds that `rank` spent in computes and updates.

    Ignores:  messages and collectives, also the time they cost the computing thread.
    """
    return timeline.totals.busy_s[rank]


def peak_bytes(timeline: Timeline) -> tuple[int, ...]:
    """Return for every rank the most bytes it held at once; 0 where nothing was recorded."""
    return timeline.totals.peak_bytes


def bubble_fraction(timeline: Timeline) -> float:
    """Return the part of all ranks' time in which they neither compute nor update.

    1 - sum of busy_s / (num_ranks * step_s); 0.0 for an empty timeline.
    """
    whole_s = timeline.num_ranks * timeline.totals.step_s
    return 1.0 - sum(timeline.totals.busy_s) / whole_s if whole_s > 0 else 0.0


def _totals(num_ranks: int, spans: Spans, memory: MemoryCurve) -> Totals:
    own = spans.working()
    busy = np.bincount(spans.ranks[own], (spans.ends_s - spans.starts_s)[own], num_ranks)
    peak = np.zeros(num_ranks, np.int64)
    np.maximum.at(peak, memory.ranks, memory.sizes_bytes)
    whole_s = float(spans.ends_s.max() - spans.starts_s.min()) if len(spans) else 0.0
    return Totals(whole_s, tuple(busy.tolist()), tuple(peak.tolist()))
