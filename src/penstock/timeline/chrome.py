"""Chrome trace-event JSON: the file form of a timeline, which Perfetto opens as it is.

docs/timeline.md has the schema.  Times are written in microseconds, as the decimal text of the
seconds with its point moved, and durations as exact decimal differences; so every float comes
back bit for bit.
"""

import json
from collections.abc import Iterator
from decimal import Context, Decimal
from typing import NamedTuple, TypeAlias

from penstock.errors import TimelineError
from penstock.timeline.spans import (
    LANES,
    SPAN_KINDS,
    Held,
    Lane,
    MemoryCurve,
    Span,
    SpanKind,
    Spans,
    Totals,
)

SCHEMA = "penstock timeline 1"
_MOST_S = 10**15
_SLACK = 1e-9  # of the differences of floats
_EXACT = Context(prec=2000)  # no sum or difference of two floats' texts needs more digits
_LANE_OF: dict[str, Lane] = {lane: lane for lane in LANES}
_KIND_OF: dict[str, SpanKind] = {kind: kind for kind in SPAN_KINDS}

Value: TypeAlias = "bool | int | Decimal | str | list[Value] | dict[str, Value] | None"


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
        document: Value = json.loads(content, parse_float=Decimal, parse_constant=_no_constant)
        return _parts(_Reader(document, "the file"))
    except (
        ValueError,
        ArithmeticError,
        RecursionError,
    ) as problem:  # arithmetic: exponents that no clock shows
        raise TimelineError(f"not readable JSON: {problem or type(problem).__name__}") from problem


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is no number")


class _Reader:
    """A JSON value and its place; each method takes it as one type or raises a TimelineError."""

    def __init__(self, value: Value, place: str) -> None:
        self.value, self.place = value, place

    def __getitem__(self, key: str) -> "_Reader":
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        if key not in self.value:
            raise TimelineError(f'{self.place} has no "{key}"')
        return _Reader(self.value[key], f'"{key}" of {self.place}')

    def items(self) -> "list[_Reader]":
        if not isinstance(self.value, list):
            raise self.wrong("a list")
        return [_Reader(item, f"item {at} of {self.place}") for at, item in enumerate(self.value)]

    def integer(self) -> int:
        if (
            not isinstance(self.value, int)
            or isinstance(self.value, bool)
            or abs(self.value) >= 2**63
        ):
            raise self.wrong("a whole number of at most 64 bits")
        return self.value

    def decimal(self) -> Decimal:
        if isinstance(self.value, bool) or not isinstance(self.value, int | Decimal):
            raise self.wrong("a number")
        return Decimal(self.value)

    def seconds(self, power: int = 0) -> Decimal:
        """Return a time, 10 ** `power` seconds being one, as decimal seconds."""
        found = self.decimal().scaleb(power, _EXACT)
        if not abs(found) < _MOST_S:
            raise self.wrong("a time with which one can reckon")
        return found

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.wrong("a text")
        return self.value

    def wrong(self, wanted: str) -> TimelineError:
        found = str(self.value)
        return TimelineError(
            f"{self.place} is {found if len(found) < 60 else found[:57] + '...'}, not {wanted}"
        )


def _parts(document: _Reader) -> Parts:
    about = document["otherData"]
    if about["schema"].text() != SCHEMA:
        raise TimelineError(f'its schema is "{about["schema"].text()}", not "{SCHEMA}"')
    spans, memory = list[Span](), list[Held]()
    for event in document["traceEvents"].items():
        match event["ph"].text():
            case "X":
                spans.append(_span(event))
            case "C":
                size_bytes = event["args"]["bytes"].integer()
                memory.append(Held(_rank(event["pid"]), float(event["ts"].seconds(-6)), size_bytes))
            case _:  # names of lanes, and whatever a tool has added
                pass
    meta = about["meta"].value
    if not isinstance(meta, dict):
        raise about["meta"].wrong("an object")
    pairs = tuple((key, about["meta"][key].text()) for key in meta)
    totals = about["totals"]
    busy_s = tuple(float(item.seconds()) for item in totals["busy_s"].items())
    peak_bytes = tuple(item.integer() for item in totals["peak_bytes"].items())
    summed = Totals(float(totals["step_s"].seconds()), busy_s, peak_bytes)
    first = min((span.start_s for span in spans), default=0.0)
    longest_s = max((span.end_s for span in spans), default=0.0) - first
    if summed.step_s < longest_s * (1 - _SLACK):
        raise totals["step_s"].wrong(f"the {longest_s:g} s of its spans, or more")
    return Parts(_rank(about["num_ranks"]), Spans.of(spans), MemoryCurve.of(memory), pairs, summed)


def _span(event: _Reader) -> Span:
    args = event["args"]
    lane, kind = _LANE_OF.get(event["cat"].text()), _KIND_OF.get(args["kind"].text())
    if lane is None:
        raise event["cat"].wrong(f"one of {' '.join(LANES)}")
    if kind is None:
        raise args["kind"].wrong(f"one of {' '.join(SPAN_KINDS)}")
    start_s = event["ts"].seconds(-6)
    end_s = _EXACT.add(start_s, event["dur"].seconds(-6))
    where = _rank(args["stage"]), _rank(args["micro_batch"])
    return Span(_rank(event["pid"]), lane, kind, *where, float(start_s), float(end_s))


def _rank(number: _Reader) -> int:
    """Return a number that fits the columns, which have 32 bits."""
    if abs(number.integer()) >= 2**31:
        raise number.wrong("a whole number of at most 32 bits")
    return number.integer()
