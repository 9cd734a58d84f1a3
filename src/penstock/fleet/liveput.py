"""Liveput: which of the planned numbers of machines does most steps over what may come next.

    liveput(k | c) = E[ integral of speed(what is left of k) over the horizon - pauses * speed ]

over the sampled futures at the moments at which c machines are offered.
"""

from collections.abc import Sequence

import numpy as np

from penstock.fleet import policies
from penstock.fleet.futures import in_slots
from penstock.fleet.job_work import FleetJob
from penstock.fleet.market import Market
from penstock.fleet.one_future import Floats
from penstock.fleet.replay import Ruler

_HORIZON_S = 1800.0
_SLOTS = 15


def liveput_of(futures: Sequence[Market], job: FleetJob) -> Ruler:
    """Return the policy `liveput` with the best number of machines for each number offered.

    A plan for k machines runs while k are offered; each time fewer are, it pauses - to re-form, or
    to restart where no copies are left - and what is left runs the next smaller plan.
    Ignores:  machines that come back within half an hour, the horizon.
    """
    speed, sizes = job.table(), np.array(job.sizes)
    pause_s = job.reform_s if job.has_copies else job.restart_s
    slot_s = _HORIZON_S / _SLOTS
    done = np.zeros((job.size + 1, len(sizes)))
    seen = np.zeros(job.size + 1)
    for future in futures:
        offered = np.minimum(in_slots(future, slot_s).machines.sum(axis=1), job.size).astype(int)
        if len(offered) <= _SLOTS:
            continue
        windows = np.lib.stride_tricks.sliding_window_view(offered, _SLOTS)
        lowest = np.minimum.accumulate(windows, axis=1)
        np.add.at(seen, lowest[:, 0], 1.0)
        for at, size in enumerate(sizes):
            left = np.minimum(lowest, size)
            drops = (left[:, 1:] < left[:, :-1]).sum(axis=1)
            steps = speed[left].sum(axis=1) * slot_s - drops * pause_s * speed[left[:, 0]]
            np.add.at(done[:, at], lowest[:, 0], steps)
    return Ruler("liveput", policies.liveput, tuple(_best(done, seen, sizes)))


def _best(done: Floats, seen: Floats, sizes: np.ndarray) -> list[float]:
    """Return the best planned number for each number offered; the largest that fits if unseen."""
    found: list[float] = []
    for offered in range(len(seen)):
        fit = sizes <= offered
        if not fit.any():
            found.append(0.0)
        elif not seen[offered]:
            found.append(float(sizes[fit].max()))
        else:
            found.append(float(sizes[np.argmax(np.where(fit, done[offered], -np.inf))]))
    return found
