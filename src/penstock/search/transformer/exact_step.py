"""Exact step: a configuration under the schedules that it can have, simulated action by action.

A stage takes the seconds of the closed form for a micro-batch, divided over its passes as their
products are: forward 1, gradient of the input 1, of the weights 1, and 1 more before the first
of these under full recompute.  Of v chunks on a rank each takes a part.  What is done once a
step is added.

Ignores:  that chunks with embedding and head take longer than others of their rank.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.estimate.constants import Constants
from penstock.estimate.training_run import TrainingRun
from penstock.estimate.work import stage_keys
from penstock.estimate.work_terms import Floats, time_terms
from penstock.schedule.interleaved import interleaved
from penstock.schedule.one_f_one_b import one_f_one_b
from penstock.schedule.orders import KINDS
from penstock.schedule.schedule import Schedule
from penstock.schedule.zero_bubble import zb_h1
from penstock.simulate.many_candidates import step_seconds
from penstock.simulate.wait_table import table_of


class BestStep(NamedTuple):
    """The seconds of a step under a schedule, which is named."""

    schedule: str
    seconds: float


def best_steps(
    runs: Sequence[TrainingRun],
    constants: Constants,
    message_s: Sequence[Floats] | None = None,
) -> list[BestStep]:
    """Return for every run its fastest schedule of those that it can have.

    message_s   for every run and stage: to the next one, beside what the closed form counts
    1F1B and ZB-H1 where a rank has one stage, else interleaved 1F1B; none of them holds more
    than the closed form of memory says.
    """
    jobs: defaultdict[tuple[str, int, int, int], list[int]] = defaultdict(list)
    for at, run in enumerate(runs):
        for name in _schedules(run):
            jobs[name, run.pipe, run.num_micro_batches, run.interleave].append(at)
    best = [BestStep("", np.inf)] * len(runs)
    split = [_split(run, constants) for run in runs]
    for (name, pipe, count, chunks), members in jobs.items():
        table = table_of(_schedule(name, pipe, count, chunks))
        seconds = np.stack([np.tile(split[at][0], (1, chunks)) / chunks for at in members])
        wire_s = np.zeros((len(members), pipe * chunks))
        if message_s is not None:
            wire_s[:, :pipe] = [message_s[at] for at in members]
        for at, found in zip(members, step_seconds(table, seconds, wire_s), strict=True):
            step = BestStep(name, float(found) + split[at][1])
            best[at] = min(best[at], step, key=lambda each: each.seconds)
    return best


def _schedules(run: TrainingRun) -> tuple[str, ...]:
    if run.interleave > 1:
        return ("interleaved",)
    return ("one_f_one_b", "zb_h1") if run.pipe > 1 else ("one_f_one_b",)


def _schedule(name: str, pipe: int, count: int, chunks: int) -> Schedule:
    if name == "interleaved":
        return interleaved(pipe * chunks, count, num_ranks=pipe)
    return zb_h1(pipe, count) if name == "zb_h1" else one_f_one_b(pipe, count)


def _split(run: TrainingRun, constants: Constants) -> tuple[Floats, float]:
    """Return seconds [kind, stage] of the actions, and those once a step."""
    terms = time_terms([run])
    keys = stage_keys(run)
    rows = {key: row for row, key in enumerate(dict.fromkeys(keys))}
    stage_s = terms.stage_s(constants.array)[[rows[key] for key in keys]]
    one = stage_s / (4 if run.recompute == "full" else 3)
    seconds = np.zeros((len(KINDS), run.pipe))
    parts = {"F": one, "B": stage_s - one, "I": stage_s - 2 * one, "W": one}
    for kind, part in parts.items():
        seconds[KINDS.index(kind)] = part
    return seconds, float(terms.once_s(constants.array)[0])
