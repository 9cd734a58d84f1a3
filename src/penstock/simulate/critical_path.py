"""Critical path: the chain of spans that explains the end of a step.

Walked from the last end back to the first start: a span began when the latest of what
it needs was over, and the walk goes on from there.

    compute     needs what its thread did before it, the messages that it reads, gathered weights
    update      needs what its thread did before it, and the sums that its rank has reached
    message     needs what its sender's thread did before it; handing over, way and copying are one
    collective  begins when the last member reaches it: needs what that member's thread did before
    copy        as a compute; one that was begun needs what its thread did before it was, and the
                copies in front of it.  The thread goes on from it only where it had to wait

Seconds in which the current thread did nothing, and waited for nothing that was under way, are
"idle": the runtime between two calls, another process on the core, a rank that began late.

In a measured timeline the arrival of a message is known as measured_seconds.py says; in a simulated
one it is the end of its receive.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from penstock.program.codes import (
    BEGIN_OFFLOAD,
    BEGIN_RELOAD,
    COMPUTE,
    JOINS,
    OFFLOAD,
    RECEIVE,
    RELOAD,
    RESHARD,
    SEND,
    SPAN_OF,
    UNSHARD,
    UPDATE,
    WAITS_FOR_SUMS,
    WORKS,
    begun,
)
from penstock.program.program import Program
from penstock.simulate.matched import Bools, Floats, Matched, match, members, sends_read
from penstock.simulate.measured_seconds import arrivals
from penstock.timeline.spans import SPAN_KINDS, SpanKind
from penstock.timeline.timeline import Timeline

Reason = Literal["compute", "update", "copy", "message", "collective", "idle"]
REASONS: tuple[Reason, ...] = ("compute", "update", "copy", "message", "collective", "idle")

_REASON_OF: dict[int, Reason] = {
    COMPUTE: "compute",
    UPDATE: "update",
    OFFLOAD: "copy",
    RELOAD: "copy",
}


class Hop(NamedTuple):
    """One piece of the path, in seconds from the first start of the timeline.

    rank:   on which it begins: for a collective, that of the member which came last.
    peer:   on which it ends: another one where a message or a collective leads there.  A message
            from a rank to itself is the work of handing one over, or of copying one out.
    kind, stage, micro_batch:  as in a Span; for an idle piece, those of what comes after it.
    """

    reason: Reason
    rank: int
    peer: int
    kind: SpanKind
    stage: int
    micro_batch: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Path:
    """The pieces of a critical path in order; each begins where the one before ends."""

    hops: tuple[Hop, ...]

    @property
    def step_s(self) -> float:
        """Return the seconds of all pieces together: those of the step."""
        return self.hops[-1].end_s - self.hops[0].start_s if self.hops else 0.0

    def seconds(self) -> dict[Reason, float]:
        """Return the seconds of every reason."""
        total: dict[Reason, float] = dict.fromkeys(REASONS, 0.0)
        for hop in self.hops:
            total[hop.reason] += hop.end_s - hop.start_s
        return total


def critical_path(program: Program, timeline: Timeline) -> Path:
    """Return the path that explains the end of `timeline`, simulated or measured.

    Raises:   TimelineError: it is not a timeline of this program.
    """
    walk = _Trail(program, match(program, timeline))
    ends_s = np.where(np.isnan(walk.ends_s), -1.0, walk.ends_s)
    at = _At(int(ends_s.argmax()), float(ends_s.max()))
    while at.row >= 0:
        at = walk.back(at)
    return Path(_joined(walk.hops[::-1]))


class _At(NamedTuple):
    """Where a walk stands: at a row, all of it after `now_s` explained; -1: at its end."""

    row: int
    now_s: float
    to: int = -1  # the rank to which a Send leads, if not back to its own


class _Trail:
    """What is needed to walk back, and the hops so far, the last one first."""

    def __init__(self, program: Program, matched: Matched) -> None:
        code = program.code
        self.code, self.matched = code, matched
        self.starts_s, self.ends_s = matched.starts_s, matched.ends_s
        self.ranks = np.repeat(np.arange(program.num_ranks), np.diff(code.offsets)).tolist()
        self.reads = sends_read(program)
        on_thread = WORKS[code.op]
        self.begins = _begins(program)
        on_thread[_unawaited(program, matched.ends_s)] = False
        if matched.is_measured:
            on_thread = on_thread | (code.op == SEND)
            self.there_s = arrivals(program, matched, self.reads).there_s
        else:
            self.there_s = _received_s(program, matched)
        self.threads = _before(program, on_thread)
        self.ahead = {} if matched.is_measured else _ahead(program)
        self.free_s = [self._over_s(row) for row in self.threads]
        if not matched.is_measured:
            self._hand_over()
        self.collectives = _before(program, JOINS[code.op])
        self.sends = _before(program, code.op == SEND)
        self.copies = [_before(program, begun(code) & (code.op == op)) for op in (OFFLOAD, RELOAD)]
        self.gathers, self.members = _gathers(program), members(program)
        self.hops = list[Hop]()

    def _hand_over(self) -> None:
        """Count threads as free only when they have handed over what they send.

        A simulated message has the wire from when it is handed over.  Where the wire was taken, it
        cost the thread as much as the cheapest earlier message of its edge.
        """
        cost_s: dict[tuple[int, int], float] = {}
        later_s = 0.0
        for row, thread in enumerate(self.threads):
            before = row - 1
            same = before >= 0 and self.ranks[before] == self.ranks[row]
            if not same or self.threads[before] != thread:
                later_s = self._over_s(thread)
            self.free_s[row] = later_s
            if self.code.op[row] == SEND and not np.isnan(self.starts_s[row]):
                way, start_s = (
                    (self.ranks[row], int(self.code.edge[row])),
                    float(self.starts_s[row]),
                )
                if self._behind(row) < 0:
                    cost_s[way] = min(start_s - later_s, cost_s.get(way, start_s))
                later_s = min(start_s, later_s + cost_s.get(way, 0.0))

    def _behind(self, row: int) -> int:
        """Return the Send for whose message that of another one had to wait on a wire, or -1.

        Messages without bytes between them waited for it too.
        """
        ahead, start_s = self.ahead.get(row, -1), self.starts_s[row]
        while ahead >= 0 and self.starts_s[ahead] == start_s:
            ahead = self.ahead.get(ahead, -1)
        return ahead if ahead >= 0 and self.ends_s[ahead] == start_s else -1

    def back(self, at: _At) -> _At:
        """Explain what is at hand; return what it needed last, and from when on it is explained."""
        match int(self.code.op[at.row]):
            case _ if at.row in self.begins:
                return self._copy(at)
            case op if op in _REASON_OF:
                return self._work(at, _REASON_OF[op])
            case op if op == SEND:
                return self._send(at)
            case _:
                return self._collective(at)

    def _work(self, at: _At, reason: Reason) -> _At:
        row = at.row
        start_s = self._add(reason, row, float(self.starts_s[row]), at.now_s)
        sends = self.reads.get(row, ())
        latest = max(sends, key=lambda send: self.there_s[send], default=-1)
        thread, collective = self.threads[row], -1
        if not self.matched.is_measured:
            collective = self.gathers.get(row, -1)
        if WAITS_FOR_SUMS[self.code.op[row], self.code.kind[row]]:
            collective = self.collectives[row]
        free_s, over_s, rank = self.free_s[row], self._over_s(collective), self.ranks[row]
        if latest >= 0 and self.there_s[latest] > max(free_s, over_s):
            now_s = self._add("message", latest, float(self.there_s[latest]), start_s, to=rank)
            return _At(latest, now_s, rank)
        if over_s > free_s:
            return _At(collective, self._add("collective", collective, over_s, start_s))
        if thread < 0:
            return self._begin(row, start_s)
        if latest >= 0:
            now_s = self._add("message", latest, free_s, start_s, rank=rank, to=rank)
        else:
            now_s = self._add("idle", row, free_s, start_s)
        return _At(thread, self._handing_over(row, now_s))

    def _copy(self, at: _At) -> _At:
        """A copy beside the thread began when it was begun, or the one in front of it was over."""
        row, first = at.row, self.begins[at.row]
        start_s = self._add("copy", row, float(self.starts_s[row]), at.now_s)
        ahead = self.copies[int(self.code.op[row] == RELOAD)][row]
        waits = WAITS_FOR_SUMS[self.code.op[first], self.code.kind[first]]
        summed = self.collectives[first] if waits else -1
        if self._over_s(summed) > max(self.free_s[first], self._over_s(ahead)):
            return _At(summed, self._add("collective", summed, self._over_s(summed), start_s))
        if self._over_s(ahead) > self.free_s[first]:
            return _At(ahead, self._add("idle", row, self._over_s(ahead), start_s))
        if self.threads[first] < 0:
            return self._begin(row, start_s)
        now_s = self._add("idle", row, self.free_s[first], start_s)
        return _At(self.threads[first], self._handing_over(first, now_s))

    def _handing_over(self, row: int, now_s: float) -> float:
        """Explain what a thread did from its last span to when it was free for a row."""
        over_s = self._over_s(self.threads[row])
        return self._add("message", self.sends[row], over_s, now_s) if over_s < now_s else now_s

    def _send(self, at: _At) -> _At:
        """Handing over: the Send itself, and what its thread did with other Sends before it.

        Or, on a simulated wire, the message before it on the same route.
        """
        row, thread, ahead = at.row, self.threads[at.row], self._behind(at.row)
        if ahead >= 0:
            start_s = float(self.starts_s[row])
            return _At(ahead, self._add("message", row, start_s, at.now_s, to=at.to))
        return _At(thread, self._add("message", row, self._over_s(thread), at.now_s, to=at.to))

    def _collective(self, at: _At) -> _At:
        """It began when the last member reached it, or was free of the collective before."""
        came = [
            (self.free_s[member], self.threads[member], member) for member in self.members[at.row]
        ]
        before = ((self.collectives[member], member) for member in self.members[at.row])
        came += [(self._over_s(row), row, member) for row, member in before]
        begun_s, row, member = max(came)
        to = self.ranks[at.row]
        if row < 0:
            return self._begin(member, self._add("collective", member, 0.0, at.now_s, to=to))
        now_s = self._add("collective", member, begun_s, at.now_s, to=to)
        is_thread = row == self.threads[member]
        return _At(row, self._handing_over(member, now_s) if is_thread else now_s)

    def _begin(self, row: int, now_s: float) -> _At:
        """The first thing of a rank: it began late."""
        return _At(-1, self._add("idle", row, 0.0, now_s))

    def _over_s(self, row: int) -> float:
        return float(self.ends_s[row]) if row >= 0 else -1.0

    def _add(
        self,
        reason: Reason,
        row: int,
        start_s: float,
        end_s: float,
        *,
        rank: int = -1,
        to: int = -1,
    ) -> float:
        """Add a hop up to `end_s`; return where it starts, which is not after its end.

        It is named after `row`, and begins and ends on its rank unless others are given.
        """
        start_s = max(0.0, min(start_s, end_s))
        code, own = self.code, self.ranks[row]
        kind = SPAN_KINDS[SPAN_OF[code.op[row], code.kind[row]]]
        where = int(code.stage[row]), int(code.micro_batch[row])
        ends = (own if rank < 0 else rank), (own if to < 0 else to)
        self.hops.append(Hop(reason, *ends, kind, *where, start_s, end_s))
        return start_s


def _before(program: Program, chosen: Bools) -> list[int]:
    """Return for every row the last chosen one before it on the same rank, or -1."""
    rows = np.where(chosen, np.arange(len(chosen)), -1)
    last = np.concatenate([[-1], np.maximum.accumulate(rows)[:-1]])
    first = np.repeat(program.code.offsets[:-1], np.diff(program.code.offsets))
    return np.where(last >= first, last, -1).tolist()


def _begins(program: Program) -> dict[int, int]:
    """Return for the row of each copy that was begun the row that begins it."""
    code, found, first = program.code, dict[int, int](), dict[tuple[int, ...], int]()
    waits = {OFFLOAD: BEGIN_OFFLOAD, RELOAD: BEGIN_RELOAD}
    for row in np.flatnonzero(np.isin(code.op, [*waits, *waits.values()])).tolist():
        op, where = int(code.op[row]), (int(code.kind[row]), int(code.stage[row]))
        key = code.rank_at(row), *where, int(code.micro_batch[row])
        if op not in waits:
            first[op, *key] = row
        elif (waits[op], *key) in first:
            found[row] = first[waits[op], *key]
    return found


def _unawaited(program: Program, ends_s: Floats) -> list[int]:
    """Return the rows of copies that were over when their thread came to wait for them."""
    code, beside, found = program.code, begun(program.code), list[int]()
    for rank in range(program.num_ranks if beside.any() else 0):
        part, now_s = code.slice_of(rank), 0.0
        for row in part.start + np.flatnonzero(WORKS[code.op[part]]):
            if beside[row] and ends_s[row] <= now_s:
                found.append(int(row))
            now_s = max(now_s, float(ends_s[row]))
    return found


def _ahead(program: Program) -> dict[int, int]:
    """Return by row of each Send the row of the one before it with the same sender and receiver."""
    code, found = program.code, dict[int, int]()
    last = dict[tuple[int, int], int]()
    for row in np.flatnonzero(code.op == SEND).tolist():
        way = code.rank_at(row), int(code.peer[row])
        if way in last:
            found[row] = last[way]
        last[way] = row
    return found


def _received_s(program: Program, matched: Matched) -> Floats:
    """Return by row of a Send when its message was there; without spans, when it was made."""
    code = program.code
    owners = np.repeat(np.arange(program.num_ranks), np.diff(code.offsets))
    replicas = program.grid.places()[0][owners].tolist()
    keys = list(zip(replicas, code.edge.tolist(), code.micro_batch.tolist(), strict=True))
    receives = {keys[row]: row for row in np.flatnonzero(code.op == RECEIVE).tolist()}
    made = _before(program, code.op == COMPUTE)
    there_s = np.full(len(code.op), np.nan)
    for row in np.flatnonzero(code.op == SEND).tolist():
        received_s = matched.ends_s[receives[keys[row]]]
        there_s[row] = matched.ends_s[made[row]] if np.isnan(received_s) else received_s
    return there_s


def _gathers(program: Program) -> dict[int, int]:
    """Return for each compute on gathered weights the row of the Unshard that gathered them."""
    code, found = program.code, dict[int, int]()
    for rank in range(program.num_ranks):
        gathered = dict[int, int]()
        part = code.slice_of(rank)
        for row in range(part.start, part.stop):
            op, stage = int(code.op[row]), int(code.stage[row])
            if op == UNSHARD:
                gathered[stage] = row
            elif op == RESHARD:
                gathered.pop(stage, None)
            elif op == COMPUTE and stage in gathered:
                found[row] = gathered[stage]
    return found


def _joined(hops: Sequence[Hop]) -> tuple[Hop, ...]:
    """Return the hops, with like neighbours joined; empty ones are kept only between ranks."""
    joined = list[Hop]()
    for hop in hops:
        if hop.end_s > hop.start_s or hop.rank != hop.peer:
            if joined and joined[-1][:-2] == hop[:-2]:
                hop = hop._replace(start_s=joined.pop().start_s)
            joined.append(hop)
    return tuple(joined)
