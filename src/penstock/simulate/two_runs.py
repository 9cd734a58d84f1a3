"""Two runs: the simulated timelines of two jobs, played again on the same cores and links.

Each span waits for those that it waited for alone: the last ones of its ranks, and what ended when
it began; a step, for the one before.  Then it takes as long as there is of what it needs:

    a compute           its rank's core.  Where both runs want it, the first has it, by turns; with
                        nobody before, each half.  Sums of the other run take their part of it
    a sum, a message    the links, of which each run has half while both use them

Ignores:  that a compute is not stopped at once for the first run's; which links a message takes;
          disks, validations and all else that the timeline of a step does not show.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penstock.cluster.cluster import Cluster
from penstock.simulate.arrays import lost_s
from penstock.timeline.timeline import Timeline, step_s

_CLOSE = 1e-6  # of a step: moments that are the same
_ON_CORE = "compute", "update", "copy"
_ON_LINK = "collective", "receive"
_MOST = 24  # steps that are played; after these both go on as they did


class SpanWork(NamedTuple):
    """What a step does at once: on which ranks, behind which others of it, and how much later."""

    ranks: frozenset[int]
    on_core: bool
    seconds: float
    after: tuple[int, ...]
    lag_s: float


class SideBySide(NamedTuple):
    """A run beside another one.

    timeline:  of a step, or of what an asynchronous schedule does between two drains.
    steps:     that it has to do, or so many of these.
    share:     of a core, that its sums take while they last.
    """

    timeline: Timeline
    steps: int
    share: float

    @property
    def alone_s(self) -> float:
        """Return the seconds that it takes alone."""
        return self.steps * step_s(self.timeline)


def share_of(timeline: Timeline, cluster: Cluster) -> float:
    """Return the part of a core that the sums of a run take while they last, by its longest one.

    0.0 without sums.  Its bytes are those that the slowest link carries in its seconds.
    """
    sums = [span for span in timeline.spans if span.lane == "collective"]
    longest_s = max((span.end_s - span.start_s for span in sums), default=0.0)
    count = min(timeline.num_ranks, cluster.num_ranks)
    if count < 2 or longest_s <= 0:
        return 0.0
    link, host = cluster.slowest_link(range(count)), cluster.host_of(0)
    here = sum(cluster.host_of(rank) is host for rank in range(count))
    spare = min(1.0, max(0.0, host.cores / here - 1)) if host.cores else None
    sent_bytes = min(longest_s * link.bytes_per_s, longest_s * link.copy_bytes_per_s / 2)
    return min(1.0, lost_s(link, sent_bytes, 0.0, spare) / longest_s)


class Makespans(NamedTuple):
    """Seconds until two runs are over: by turns, both at once, and one after the other."""

    by_turns_s: float
    at_once_s: float
    one_by_one_s: float


def makespans(first: SideBySide, second: SideBySide) -> Makespans:
    """Return the seconds of two runs on the same ranks; the first one goes before, by turns."""
    both = first, second
    by_turns_s, at_once_s = (_together_s(both, by_turns=way) for way in (True, False))
    return Makespans(by_turns_s, at_once_s, first.alone_s + second.alone_s)


def _together_s(runs: tuple[SideBySide, SideBySide], *, by_turns: bool) -> float:
    players = [_Player(run) for run in runs]
    now_s = 0.0
    while not any(player.is_over for player in players):
        if any(player.step >= _MOST for player in players):
            return _as_before(players, now_s)
        now_s += _moved(players, by_turns=by_turns)
    for late in (player for player in players if not player.is_over):
        step = late.step
        while late.step == step:
            now_s += _moved(players, by_turns=by_turns)
        now_s += (late.run.steps - late.step) * late.step_s
    return now_s


def _as_before(players: Sequence["_Player"], now_s: float) -> float:
    """Return the end of both if they go on as they did so far, and the longer one then alone."""
    progress = [max(player.progress, _CLOSE) for player in players]  # one may have had no turn yet
    ends_s = [p.run.steps * now_s / made for p, made in zip(players, progress, strict=True)]
    late = players[ends_s.index(max(ends_s))]
    left = late.run.steps - late.progress * min(ends_s) / now_s
    return min(ends_s) + left * late.step_s


class _Player:
    """Where one of the runs stands: what is done of its step, and what is under way."""

    def __init__(self, run: SideBySide) -> None:
        self.run, self.works, self.step = run, works_of(run.timeline), 0
        self.total_s = sum(work.seconds for work in self.works) or 1.0
        self.step_s = step_s(run.timeline)
        self._begin()

    def _begin(self) -> None:
        self.done: set[int] = set()
        self.left_s = [work.seconds for work in self.works]
        self.lag_s = [work.lag_s for work in self.works]

    @property
    def is_over(self) -> bool:
        return self.step >= self.run.steps

    @property
    def progress(self) -> float:
        """Return the number of steps that are done, the one under way in part."""
        if self.is_over:
            return self.run.steps
        return self.step + 1 - sum(self.left_s) / self.total_s

    def active(self) -> Iterator[int]:
        """Yield what is under way, or would be but for its lag."""
        for at, work in enumerate(self.works):
            if at not in self.done and all(one in self.done for one in work.after):
                yield at

    def advance(self, at: int, seconds: float) -> None:
        """Let so much of a work be done, or of the lag before it."""
        left = self.lag_s if self.lag_s[at] > 0 else self.left_s
        left[at] = max(0.0, left[at] - seconds)
        if self.lag_s[at] <= 0 and self.left_s[at] <= _CLOSE * self.total_s / len(self.works):
            self.left_s[at] = 0.0
            self.done.add(at)

    def end_step(self) -> None:
        """Begin the next step if this one is over."""
        if len(self.done) == len(self.works):
            self.step += 1
            if not self.is_over:
                self._begin()


def _moved(players: Sequence[_Player], *, by_turns: bool) -> float:
    """Move both runs on to the next moment at which something ends; return how far that is."""
    active = [list(player.active()) for player in players]
    rates: list[tuple[_Player, int, float]] = []
    for number, player in enumerate(players):
        other = players[1 - number]
        busy = [other.works[at] for at in active[1 - number] if other.lag_s[at] <= 0]
        for at in active[number]:
            goes_before = by_turns and number == 0
            part = 0.0 if by_turns else 0.5
            rate = 1.0
            if player.lag_s[at] <= 0:
                rate = _rate(player.works[at], busy, 1.0 if goes_before else part, other.run.share)
            rates.append((player, at, rate))
    waits = [
        ((p.lag_s[at] if p.lag_s[at] > 0 else p.left_s[at]) / rate) for p, at, rate in rates if rate
    ]
    moved_s = min(waits)
    for player, at, rate in rates:
        player.advance(at, moved_s * rate)
    for player in players:
        player.end_step()
    return moved_s


def _rate(work: SpanWork, busy: Sequence[SpanWork], part: float, share: float) -> float:
    """Return the speed of a work beside those of the other run, 1.0 alone.

    part:   of a core, that is left beside a compute of the other run.
    share:  of a core, that a sum of the other run takes.
    """
    beside = [other for other in busy if other.ranks & work.ranks]
    if not work.on_core:
        return 0.5 if any(not other.on_core for other in beside) else 1.0
    taken = share if any(not other.on_core for other in beside) else 0.0
    return (part if any(other.on_core for other in beside) else 1.0) * (1.0 - min(0.99, taken))


def works_of(timeline: Timeline) -> list[SpanWork]:
    """Return the works of a step, by their start; a sum is one for all of its ranks."""
    merged: dict[tuple[object, ...], set[int]] = {}
    for span in timeline.spans:
        if span.lane not in (*_ON_CORE, *_ON_LINK):
            continue
        own = () if span.lane == "collective" else (span.rank,)
        what = span.lane, span.kind, span.stage, span.micro_batch, *own
        merged.setdefault((span.start_s, span.end_s, *what), set()).add(span.rank)
    rows = sorted(merged.items(), key=lambda row: (row[0][0], row[0][1]))  # type: ignore[type-var]
    near_s = _CLOSE * max(step_s(timeline), 1e-12)
    works: list[SpanWork] = []
    ends_s: list[float] = []
    begin_s = float(rows[0][0][0]) if rows else 0.0  # type: ignore[arg-type]
    for (start, end, lane, *_), ranks in rows:
        start_s, end_s = float(start), float(end)  # type: ignore[arg-type]
        past = [at for at, ended_s in enumerate(ends_s) if ended_s <= start_s + near_s]
        own = [
            max((at for at in past if rank in works[at].ranks), default=-1, key=ends_s.__getitem__)
            for rank in ranks
        ]
        exact = [at for at in past if ends_s[at] >= start_s - near_s]
        last = [max(past, key=ends_s.__getitem__)] if past else []
        after = tuple(sorted({at for at in (*own, *exact, *last) if at >= 0}))
        lag_s = start_s - max((ends_s[at] for at in after), default=begin_s)
        works.append(
            SpanWork(frozenset(ranks), lane in _ON_CORE, end_s - start_s, after, max(0.0, lag_s))
        )
        ends_s.append(end_s)
    return works
