"""Terms: the work of a run on its devices, as seconds at their peak rates.

The step is a pipeline of stages.  A stage works on a micro-batch in three lanes at once,

    device   products, attention, other kernels, and messages that the device waits for
    host     launching kernels, one after the other
    wire     messages that are sent while the device computes

and takes (device^p + host^p + wire^p)^(1/p) seconds, p = 2.5: the longest lane, and a little
more where two are alike.  With t_s of stage s, M micro-batches, v chunks on a rank:

    step = M * max(t) + (sum(t) - max(t)) / v + what is done once a step

Every lane is a sum of terms, each times one constant that is fitted: 1 / efficiency for what is
in seconds at a peak, seconds for what is counted.  So the step is homogeneous of degree one in
the constants.

Ignores:  stragglers, congestion by others, input data, checkpoints, thermal throttling.
Source:   arXiv:2104.04473 (pipeline, tensor), arXiv:2205.05198 (sequence parallel, recompute).
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.estimate.either import Floats
from penstock.estimate.training_run import TrainingRun
from penstock.estimate.work import (
    LANES,
    TIME_TERMS,
    distinct_stages,
    once_a_step,
    stage_work,
    sums,
)
from penstock.profile.roofline import POWER

Ints: TypeAlias = NDArray[np.int64]


class Terms(NamedTuple):
    """Terms of many runs, stacked; like stages of a run are listed once.

    lanes    lanes x stages x constants
    alike    stages that each row stands for
    starts   row of `lanes` at which each run begins
    steady   times that its longest stage is passed, per run
    filling  what the sum of the other stages is divided by, per run; 0: they do not count
    once     runs x constants: once a step
    beside   runs x constants: once a step, hidden as far as `cover` of the longest stage's
             seconds of a micro-batch
    """

    names: tuple[str, ...]
    lanes: Floats
    alike: Floats
    starts: Ints
    steady: Floats
    filling: Floats
    once: Floats
    beside: Floats
    cover: Floats

    def of(self, constants: Floats) -> Floats:
        """Return the value of every run: seconds, or bytes."""
        return self.with_slopes(constants)[0]

    def stage_s(self, constants: Floats) -> Floats:
        """Return the seconds of one micro-batch on every row of stages."""
        return _p_norm(self.lanes @ constants)

    def once_s(self, constants: Floats) -> Floats:
        """Return the seconds once a step of every run, beside its micro-batches."""
        stage = self.stage_s(constants)
        hidden = self.cover * stage[self._longest(stage)]
        return self.once @ constants + np.maximum(self.beside @ constants - hidden, 0.0)

    def with_slopes(self, constants: Floats) -> tuple[Floats, Floats]:
        """Return the value of every run, and its derivative by every constant."""
        lanes = self.lanes @ constants  # lanes x stages
        stage = _p_norm(lanes)
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(stage > 0, (lanes / stage) ** (POWER - 1), 1.0)
        stage_slope = np.einsum("ls,lsk->sk", share, self.lanes)
        total = np.add.reduceat(stage * self.alike, self.starts)
        total_slope = np.add.reduceat(stage_slope * self.alike[:, None], self.starts)
        longest = self._longest(stage)
        most, most_slope = stage[longest], stage_slope[longest]
        value = self.steady * most + self.filling * (total - most) + self.once @ constants
        fill = self.filling[:, None] * (total_slope - most_slope)
        slope = self.steady[:, None] * most_slope + fill + self.once
        exposed = self.beside @ constants - self.cover * most
        is_seen = exposed > 0
        value += np.where(is_seen, exposed, 0.0)
        seen_slope = self.beside - self.cover[:, None] * most_slope
        return value, slope + np.where(is_seen[:, None], seen_slope, 0.0)

    def _longest(self, stage: Floats) -> Ints:
        """Return the row of the longest stage of every run."""
        ends = [*self.starts[1:], len(stage)]
        pairs = zip(self.starts, ends, strict=True)
        return np.array([a + int(np.argmax(stage[a:b])) for a, b in pairs], dtype=np.int64)

    def take(self, runs: Sequence[int] | Ints) -> "Terms":
        """Return the terms of some of the runs."""
        ends = [*map(int, self.starts[1:]), len(self.alike)]
        parts = [range(int(self.starts[run]), ends[run]) for run in runs]
        starts = np.cumsum([0, *(len(part) for part in parts[:-1])], dtype=np.int64)
        row = [at for part in parts for at in part]
        return Terms(
            self.names, self.lanes[:, row], self.alike[row], starts,
            self.steady[runs], self.filling[runs], self.once[runs],
            self.beside[runs], self.cover[runs],
        )  # fmt: skip


def _p_norm(lanes: Floats) -> Floats:
    highest = lanes.max(axis=0)
    scale = np.where(highest > 0, highest, 1.0)
    return scale * ((lanes / scale) ** POWER).sum(axis=0) ** (1 / POWER)


def time_terms(runs: Sequence[TrainingRun]) -> Terms:
    """Return the terms of step time, in seconds at peak rates or counts, of `runs`."""
    names = TIME_TERMS
    rows: list[list[list[float]]] = []
    alike: list[float] = []
    starts: list[int] = []
    for run in runs:
        starts.append(len(rows))
        for at, count in distinct_stages(run):
            work = stage_work(run, at)
            rows.append([[work.get((lane, name), 0.0) for name in names] for lane in LANES])
            alike.append(count)
    once = _rows(once_a_step(run) for run in runs)
    beside = _rows(sums(run) for run in runs)
    return Terms(
        names,
        np.array(rows, dtype=np.float64).transpose(1, 0, 2).copy(),
        np.array(alike, dtype=np.float64),
        np.array(starts, dtype=np.int64),
        np.array([float(run.num_micro_batches) for run in runs]),
        np.array([1.0 / run.interleave for run in runs]),
        once,
        beside,
        np.array([cover(run) for run in runs]),
    )


def cover(run: TrainingRun) -> float:
    """Return the part of a micro-batch's seconds that sums of gradients may be hidden in.

    The backward of the last one, where they are begun as soon as they are ready: 2 of 3.
    """
    return 2 / 3 if run.overlap.gradients else 0.0


def _rows(works: Iterable[dict[str, float]]) -> Floats:
    rows = [[work.get(name, 0.0) for name in TIME_TERMS] for work in works]
    return np.array(rows, dtype=np.float64).reshape(len(rows), len(TIME_TERMS))
