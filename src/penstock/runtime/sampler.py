"""Sampler: what the actions of one window in k took on a rank, and whether that has moved.

Besides, whether the pace of its steps has moved, its data left out: where no rank's own actions
have, messages and sums take longer than they did, or less.

The clock is read between all calls anyway; here their differences are added up by kind and stage.
The next window that is sampled begins 256 times as long after the last one as sampling it took of
the processor, so sampling takes at most 0.4 % of it, whatever a step takes; steps that take longer
than that are all sampled.
"""

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.profile.drift import NEW, Drift
from penstock.runtime.calls import Bound

_SHARE = 256
_KEPT = 64  # samples of each action
_FIRST = 2  # windows that are unlike the others
_LOOKS = 5  # times what a sample takes, that looking at it usually takes at most

Action = tuple[str, int]  # kind, stage


@dataclass(frozen=True, slots=True)
class ActionSeconds:
    """The median seconds of an action of a kind of a stage, over sampled windows."""

    kind: str
    stage: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Samples:
    """What sampling told of a rank's actions, and what it took.

    actions:    as they were before anything moved.
    steps:      sampled before that; of `windows` windows in all, `sampled` were.
    took_s:     of sampling, of the processor.
    factor:     seconds of actions now, by those before anything moved.
    moves:      how often they have moved.
    step_s:     median of the newest sampled windows, a step.
    pace:       seconds of a step now, without those of reading data, by those before.
    paces:      how often that has moved.
    """

    actions: tuple[ActionSeconds, ...]
    steps: int
    sampled: int
    windows: int
    took_s: float
    factor: float
    moves: int
    step_s: float
    pace: float = 1.0
    paces: int = 0


class Sampler:
    """Samples windows of one rank under one plan.

    clock, own_clock:  of the wall, and of the processor's work for this thread.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        own_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.clock, self.own_clock = clock, own_clock
        self.drift, self.paces = Drift(), Drift()
        self.took_s, self.sampled, self.windows, self.steps = 0.0, 0, 0, 0
        self._due_s = clock()
        self.since = 0  # sampled since micro-batches were shared otherwise
        self._per_step: dict[Action, float] = {}  # of each action, when the first was sampled
        self._newest: deque[tuple[int, dict[Action, float]]] = deque()
        self._kept: defaultdict[Action, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))
        self._steps_s: deque[float] = deque(maxlen=NEW)
        self._places: dict[int, tuple[list[Action], NDArray[np.int64], NDArray[np.int64]]] = {}
        self._data: dict[int, NDArray[np.bool_]] = {}

    def window(
        self,
        calls: Sequence[Bound],
        marks: Sequence[float],
        num_steps: int,
        look: Callable[[], None],
    ) -> None:
        """Take a window, if one is due, and then call `look`, which counts as sampling.

        Where that looks for another plan, it has its own reasons to: the next sample need not wait.
        """
        self.windows += 1
        now = self.clock()
        if self.windows <= _FIRST or now < self._due_s:
            return
        start = self.own_clock()
        self._take(calls, marks, num_steps)
        taken_s = self.own_clock() - start
        look()
        took_s = self.own_clock() - start
        self.took_s += took_s
        self._due_s = now + min(took_s, _LOOKS * taken_s) * _SHARE

    def shared(self) -> None:
        """Note that the rank takes other micro-batches from now on.

        What its actions take is still compared with what they took before: by the number of them
        that a step had at first.
        """
        self.since = 0
        self._steps_s.clear()
        self.paces = Drift(moves=self.paces.moves)  # a step has another length

    def _take(self, calls: Sequence[Bound], marks: Sequence[float], num_steps: int) -> None:
        actions, places, counts = self._places_of(calls)
        sums_s = np.bincount(places, np.diff(marks), len(actions) + 1)[:-1]
        own = dict(zip(actions, (sums_s / counts).tolist(), strict=True))
        self.sampled, self.since = self.sampled + 1, self.since + 1
        self._steps_s.append((marks[-1] - marks[0]) / num_steps)
        if self._per_step.keys() != own.keys():
            per_step = zip(actions, (counts / num_steps).tolist(), strict=True)
            self._per_step = dict(per_step)
        self.drift.add(sum(count * own[action] for action, count in self._per_step.items()))
        data_s = float(np.diff(marks)[self._reads(calls)].sum())
        self.paces.add((marks[-1] - marks[0] - data_s) / num_steps)
        if self.drift.moves:  # what was not kept by now may be of after the move
            self._newest.clear()
            return
        self._newest.append((num_steps, own))
        if len(self._newest) > NEW:
            self._keep(*self._newest.popleft())

    def _keep(self, num_steps: int, own: dict[Action, float]) -> None:
        self.steps += num_steps
        for action, seconds in own.items():
            self._kept[action].append(seconds)

    def _places_of(
        self, calls: Sequence[Bound]
    ) -> tuple[list[Action], NDArray[np.int64], NDArray[np.int64]]:
        """Return actions, for each call the place of its own, one more where it has none, and
        how many calls each has.
        """
        if id(calls) not in self._places:
            own = [_action_of(bound) for bound in calls]
            actions = [action for action in dict.fromkeys(own) if action is not None]
            numbers = {action: at for at, action in enumerate(actions)}
            places = np.array([numbers.get(a, len(actions)) if a else len(actions) for a in own])
            counts = np.bincount(places, minlength=len(actions) + 1)[:-1]
            self._places[id(calls)] = actions, places, counts
        return self._places[id(calls)]

    def _reads(self, calls: Sequence[Bound]) -> NDArray[np.bool_]:
        """Return which calls read data."""
        if id(calls) not in self._data:
            self._data[id(calls)] = np.array([bound.lane == "data" for bound in calls], np.bool_)
        return self._data[id(calls)]

    def told(self, *, is_last: bool = False) -> Samples:
        """Return what is known by now; `is_last`: no window comes any more."""
        if is_last:
            while self._newest:
                self._keep(*self._newest.popleft())
        rows = (
            ActionSeconds(kind, stage, statistics.median(seconds))
            for (kind, stage), seconds in sorted(self._kept.items())
        )
        counts = self.steps, self.sampled, self.windows
        own, pace = self.drift, self.paces
        moved = own.factor, own.moves, self.step_s, pace.factor, pace.moves
        return Samples(tuple(rows), *counts, self.took_s, *moved)

    @property
    def step_s(self) -> float:
        """Return the median of the newest sampled windows, a step."""
        return statistics.median(self._steps_s) if self._steps_s else 0.0


def _action_of(bound: Bound) -> Action | None:
    """Return the action that a call is; None: it is none, or waits for others."""
    if bound.lane == "compute":
        return bound.kind, bound.stage
    return ("U", bound.stage) if bound.lane == "update" else None
