"""Critical path: the chain of spans that explains the end of a step.

Walked from the last end back to the first start: whatever is at hand began when the latest of what
it needs was over, and that is walked on from.

    compute     needs what its thread did before it, the messages that it reads, gathered weights
    update      needs what its thread did before it, and the sums that its rank has come to
    message     needs what its sender's thread did before it; handing over, way and copying are one
    collective  begins when the last member comes to it: needs what that member's thread did before

Seconds in which the thread at hand did nothing, and waited for nothing that was under way, are
"idle": the runtime between two calls, another process on the core, a rank that began late.

Of a measured timeline the arrival of a message is known as replay.py says; of a simulated one it is
the end of its receive.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from penstock.program.codes import COMPUTE, RECEIVE, REDUCE, RESHARD, SEND, UNSHARD, UPDATE
from penstock.program.program import Program
from penstock.simulate.matched import Bools, Floats, Matched, match, sends_read
from penstock.simulate.replay import arrivals
from penstock.timeline import SPAN_KINDS, SpanKind, Timeline

Reason = Literal["compute", "update", "message", "collective", "idle"]
REASONS: tuple[Reason, ...] = ("compute", "update", "message", "collective", "idle")

_KIND_OF: dict[int, SpanKind] = {UPDATE: "U", REDUCE: "reduce", UNSHARD: "unshard"}


class Hop(NamedTuple):
    """One piece of the path, in seconds from the first start of the timeline.

    rank:   who was at it: of a message its sender, of a collective the member that came last.
    peer:   of a message its reader; else `rank`.
    kind, stage, micro_batch:  as in a Span; of an idle piece those of what comes after it.
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
    walk = _Walk(program, match(program, timeline))
    ends_s = np.where(np.isnan(walk.ends_s), -1.0, walk.ends_s)
    at = _At(int(ends_s.argmax()), float(ends_s.max()))
    while at.row >= 0:
        at = walk.back(at)
    return Path(_joined(walk.hops[::-1]))


class _At(NamedTuple):
    """Where a walk stands: at a row, of which all after `now_s` is explained; -1: at its end."""

    row: int
    now_s: float


class _Walk:
    """What is needed to walk back, and the hops so far, the last one first."""

    def __init__(self, program: Program, matched: Matched) -> None:
        code = program.code
        self.code, self.matched = code, matched
        self.starts_s, self.ends_s = matched.starts_s, matched.ends_s
        self.ranks = np.repeat(np.arange(program.num_ranks), np.diff(code.offsets)).tolist()
        self.reads = sends_read(program)
        on_thread = [COMPUTE, UPDATE]
        if matched.is_measured:
            on_thread += [SEND, REDUCE]
            self.there_s = arrivals(program, matched, self.reads).there_s
        else:
            self.there_s = _received_s(program, matched)
        self.threads = _before(program, np.isin(code.op, on_thread))
        self.collectives = _before(program, np.isin(code.op, (REDUCE, UNSHARD)))
        self.sends = _before(program, code.op == SEND)
        self.gathers, self.members = _gathers(program), _members(program)
        self.hops = list[Hop]()

    def back(self, at: _At) -> _At:
        """Explain what is at hand; return what it needed last, and from when on it is explained."""
        match int(self.code.op[at.row]):
            case op if op in (COMPUTE, UPDATE):
                return self._work(at, "compute" if op == COMPUTE else "update")
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
            collective = self.collectives[row] if reason == "update" else collective
        over_s = self._over_s(thread)
        if latest >= 0 and self.there_s[latest] > max(over_s, self._over_s(collective)):
            now_s = self._add("message", latest, float(self.there_s[latest]), start_s, row)
            return _At(latest, now_s)
        if self._over_s(collective) > over_s:
            now_s = self._add("collective", collective, self._over_s(collective), start_s)
            return _At(collective, now_s)
        if thread < 0:
            return self._begin(row, start_s)
        sent = self.sends[row]
        if sends:
            return _At(thread, self._add("message", latest, over_s, start_s, row))
        if not self.matched.is_measured and sent > thread:
            return _At(thread, self._add("message", sent, over_s, start_s))
        return _At(thread, self._add("idle", row, over_s, start_s))

    def _send(self, at: _At) -> _At:
        """Handing over: the Send itself, and what its thread did with other Sends before it."""
        thread = self.threads[at.row]
        return _At(thread, self._add("message", at.row, self._over_s(thread), at.now_s))

    def _collective(self, at: _At) -> _At:
        """It began when the last member came to it, or was free of the collective before."""
        came: list[tuple[float, int, int]] = []
        for member in self.members[at.row]:
            before = [self.threads[member]]
            if not self.matched.is_measured:
                before.append(self.collectives[member])
            came += [(self._over_s(row), row, member) for row in before if row >= 0]
        if not came:
            return self._begin(at.row, at.now_s)
        over_s, row, member = max(came)
        return _At(row, self._add("collective", member, over_s, at.now_s, at.row))

    def _begin(self, row: int, now_s: float) -> _At:
        """The first thing of a rank: before it updates were validated, or the rank began late."""
        settled_s = self.matched.settled_s[self.ranks[row]]
        if not np.isnan(settled_s[0]):
            now_s = self._add("idle", row, float(settled_s[1]), now_s)
            now_s = self._add("collective", row, float(settled_s[0]), now_s)
        return _At(-1, self._add("idle", row, 0.0, now_s))

    def _over_s(self, row: int) -> float:
        return float(self.ends_s[row]) if row >= 0 else -1.0

    def _add(
        self, reason: Reason, row: int, start_s: float, end_s: float, reader: int = -1
    ) -> float:
        """Add a hop up to `end_s`; return where it starts, which is not after its end."""
        start_s = max(0.0, min(start_s, end_s)) if start_s == start_s else end_s
        code, rank = self.code, self.ranks[row]
        kind = _KIND_OF.get(int(code.op[row]), SPAN_KINDS[int(code.kind[row])])
        peer = self.ranks[reader] if reader >= 0 else rank
        if reason == "message":
            peer = int(code.peer[row])
        where = int(code.stage[row]), int(code.micro_batch[row])
        self.hops.append(Hop(reason, rank, peer, kind, *where, start_s, end_s))
        return start_s


def _before(program: Program, chosen: Bools) -> list[int]:
    """Return for every row the last chosen one before it on the same rank, or -1."""
    rows = np.where(chosen, np.arange(len(chosen)), -1)
    last = np.concatenate([[-1], np.maximum.accumulate(rows)[:-1]])
    first = np.repeat(program.code.offsets[:-1], np.diff(program.code.offsets))
    return np.where(last >= first, last, -1).tolist()


def _received_s(program: Program, matched: Matched) -> Floats:
    """Return by row of a Send when its message was there; without spans, when it was made."""
    code = program.code
    owners = np.repeat(np.arange(program.num_ranks), np.diff(code.offsets))
    replicas = (owners // program.pipeline_ranks).tolist()
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


def _members(program: Program) -> dict[int, list[int]]:
    """Return for each collective's row those of all its members."""
    code = program.code
    groups: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    counts: defaultdict[tuple[int, int], int] = defaultdict(int)
    for row in np.flatnonzero(np.isin(code.op, (REDUCE, UNSHARD))).tolist():
        if code.op[row] == REDUCE:
            groups[0, int(code.edge[row]), int(code.micro_batch[row])].append(row)
        else:
            rank, stage = code.rank_at(row), int(code.stage[row])
            counts[rank, stage] += 1
            groups[1, rank % program.pipeline_ranks, stage, counts[rank, stage]].append(row)
    return {row: rows for rows in groups.values() for row in rows}


def _joined(hops: Sequence[Hop]) -> tuple[Hop, ...]:
    """Return the hops without empty ones, and with those that follow their like as one."""
    joined = list[Hop]()
    for hop in hops:
        if hop.end_s > hop.start_s:
            if joined and joined[-1][:-2] == hop[:-2]:
                hop = hop._replace(start_s=joined.pop().start_s)
            joined.append(hop)
    return tuple(joined)
