"""Chrome trace-event JSON: the file form of a timeline, which Perfetto opens as it is.

docs/timeline.md has the schema.  Times are written in microseconds, as the decimal text of the
seconds with its point moved, and durations as exact decimal differences; so every float comes
back bit for bit.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from typing import Literal, NamedTuple

from penstock.errors import TimelineError
from penstock.timeline.spans import (
    LANES,
    Held,
    Lane,
    MemoryCurve,
    Span,
    SpanKind,
    Spans,
    Totals,
)
from penstock.typed import MisfitError, Number, typed

SCHEMA = "penstock timeline 1"
_MOST_S = 10**15
_SLACK = 1e-9  # of the differences of floats
_EXACT = Context(prec=2000)  # no sum or difference of two floats' texts needs more digits


class Parts(NamedTuple):
    """What a timeline consists of."""

    num_ranks: int
    spans: Spans
    memory: MemoryCurve
    meta: tuple[tuple[str, str], ...]
    totals: Totals


def to_text(parts: Parts) -> str:
    """Return the JSON text, one event a line."""
    totals = {
        "step_s": parts.totals.step_s,
        "busy_s": parts.totals.busy_s,
        "peak_bytes": parts.totals.peak_bytes,
    }
    about = {
        "schema": SCHEMA,
        "num_ranks": parts.num_ranks,
        "meta": dict(parts.meta),
        "totals": totals,
    }
    head = f'{{"displayTimeUnit": "ms",\n"otherData": {json.dumps(about)},\n"traceEvents": [\n'
    return head + ",\n".join(_events(parts)) + "\n]}\n"


def _events(parts: Parts) -> Iterator[str]:
    for rank in range(parts.num_ranks):
        name = f'"args": {{"name": "rank {rank}"}}'
        yield f'{{"ph": "M", "name": "process_name", "pid": {rank}, {name}}}'
        for tid, lane in enumerate(LANES):
            name = f'"args": {{"name": "{lane}"}}'
            yield f'{{"ph": "M", "name": "thread_name", "pid": {rank}, "tid": {tid}, {name}}}'
    tids = {lane: tid for tid, lane in enumerate(LANES)}
    for span in parts.spans:
        start_us, end_us = _microseconds(span.start_s), _microseconds(span.end_s)
        args = f'"kind": "{span.kind}", "stage": {span.stage}, "micro_batch": {span.micro_batch}'
        yield (
            f'{{"ph": "X", "name": "{span.name}", "cat": "{span.lane}",'
            f' "pid": {span.rank}, "tid": {tids[span.lane]},'
            f' "ts": {start_us:f}, "dur": {_EXACT.subtract(end_us, start_us):f},'
            f' "args": {{{args}}}}}'
        )
    for held in parts.memory:
        time = f'"ts": {_microseconds(held.time_s):f}'
        args = f'"args": {{"bytes": {held.size_bytes}}}'
        yield f'{{"ph": "C", "name": "memory", "pid": {held.rank}, {time}, {args}}}'


def _microseconds(seconds: float) -> Decimal:
    return Decimal(repr(seconds)).scaleb(6, _EXACT)


def from_text(content: bytes) -> Parts:
    """Return the parts of the timeline whose file has this content.

    Raises:   TimelineError: not UTF-8, not JSON, or not what `to_text` writes.
    """
    try:
        document = json.loads(content, parse_float=Decimal, parse_constant=_no_constant)
        return _parts(typed(_File, document, more=True), document["traceEvents"])
    except MisfitError as problem:
        raise TimelineError(str(problem)) from problem
    except (ValueError, ArithmeticError, RecursionError) as problem:  # exponents no clock shows
        raise TimelineError(f"not readable JSON: {problem or type(problem).__name__}") from problem


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is no number")


@dataclass(frozen=True, slots=True)
class _Event:
    """Any event; one of an unknown kind was added by a tool."""

    ph: str


@dataclass(frozen=True, slots=True)
class _Args:
    kind: SpanKind
    stage: Number
    micro_batch: Number


@dataclass(frozen=True, slots=True)
class _SpanEvent:
    """An event of kind X."""

    pid: Number
    cat: Lane
    ts: Decimal
    dur: Decimal
    args: _Args


@dataclass(frozen=True, slots=True)
class _Bytes:
    bytes: int


@dataclass(frozen=True, slots=True)
class _CounterEvent:
    """An event of kind C."""

    pid: Number
    ts: Decimal
    args: _Bytes


@dataclass(frozen=True, slots=True)
class _FileTotals:
    step_s: Decimal
    busy_s: tuple[Decimal, ...]
    peak_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _FileHeader:
    schema: Literal["penstock timeline 1"]
    num_ranks: Number
    meta: dict[str, str]
    totals: _FileTotals


@dataclass(frozen=True, slots=True)
class _File:
    otherData: _FileHeader  # noqa: N815 - as the format has it
    traceEvents: tuple[_Event, ...]  # noqa: N815


def _parts(file: _File, events: Sequence[object]) -> Parts:
    about, totals = file.otherData, file.otherData.totals
    kinds = [event.ph for event in file.traceEvents]

    def of(kind: str) -> dict[str, object]:
        return {f"traceEvents[{at}]": events[at] for at, own in enumerate(kinds) if own == kind}

    spans = [_span(*row) for row in typed(dict[str, _SpanEvent], of("X"), more=True).items()]
    memory = [
        Held(event.pid, float(_seconds(event.ts, f"{place}.ts", -6)), event.args.bytes)
        for place, event in typed(dict[str, _CounterEvent], of("C"), more=True).items()
    ]
    step_s = float(_seconds(totals.step_s, "otherData.totals.step_s"))
    first = min((span.start_s for span in spans), default=0.0)
    longest_s = max((span.end_s for span in spans), default=0.0) - first
    if step_s < longest_s * (1 - _SLACK):
        wanted = f"the {longest_s:g} s of its spans, or more"
        raise MisfitError.of(totals.step_s, wanted, "otherData.totals.step_s")
    busy_s = tuple(float(_seconds(each, "otherData.totals.busy_s")) for each in totals.busy_s)
    summed = Totals(step_s, busy_s, totals.peak_bytes)
    meta = tuple(about.meta.items())
    return Parts(about.num_ranks, Spans.of(spans), MemoryCurve.of(memory), meta, summed)


def _span(place: str, event: _SpanEvent) -> Span:
    start_s = _seconds(event.ts, f"{place}.ts", -6)
    end_s = _EXACT.add(start_s, _seconds(event.dur, f"{place}.dur", -6))
    of = event.args
    times = float(start_s), float(end_s)
    return Span(event.pid, event.cat, of.kind, of.stage, of.micro_batch, *times)


def _seconds(value: Decimal, place: str, power: int = 0) -> Decimal:
    """Return a time, 10 ** `power` seconds being one, as decimal seconds."""
    found = value.scaleb(power, _EXACT)
    if not abs(found) < _MOST_S:
        raise MisfitError.of(value, "a usable time", place)
    return found
