"""Sampled: the times that runs took for a step on this machine, kept beside its profiles.

A profile is measured op by op, alone or beside copies of itself.  A run has other caches, other
neighbours and a wall clock: what its sampled steps took, in the seconds that were predicted, is
kept for every op, and the next profile of the step is multiplied by it.

What identifies a step here are its ops and parameters and the samples of a whole step.  With its
micro-batches joined it often has some ops more, so each way of joining has ratios of its own; but
of all ways together the newest runs tell how fast the machine is.  Or the way that was run would
be compared, at the speed of a busy day, with others at that of the day they were measured:

    ratios = those of this way's runs, times one number, so that their mean is that of all runs

Ignores:  that joining changes what a busy machine costs.
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import exp, log
from pathlib import Path
from typing import NamedTuple

from penstock.errors import ProfileError
from penstock.files import read_json, write_text
from penstock.graph.graph import Graph
from penstock.profile.profile import Profile
from penstock.typed import damage, typed

_log = logging.getLogger(__name__)

_PRIOR = 2  # steps that the profile itself counts for
_MOST = 128  # steps that earlier runs count for: a machine changes
_RANGE = 0.01, 100.0  # of a ratio


@dataclass(frozen=True, slots=True)
class Sampled:
    """The times of sampled steps of runs, as ratios to the step's profile.

    device, versions:  that made it.
    ratios:   for each node of the graph; of all ways to join micro-batches together, one.
    update:   of the optimizer's.
    steps:    sampled, of so many runs.
    """

    device: str
    versions: str
    ratios: tuple[float, ...]
    update: float
    steps: int
    runs: int

    def __post_init__(self) -> None:
        low, high = _RANGE
        wrong = [each for each in (*self.ratios, self.update) if not low <= each <= high]
        if wrong or self.steps < 1 or self.runs < 1:
            what = f"a ratio of {wrong[0]}" if wrong else f"{self.steps} steps, {self.runs} runs"
            raise ProfileError(f"sampled steps say {what}", hint="delete the file")


@dataclass(frozen=True, slots=True)
class StepRatios:
    """The times of one run's sampled steps over the predicted ones: of some ops, and of updates.

    ops:      by node.
    update:   None: it was not sampled.
    """

    ops: Mapping[int, float]
    update: float | None
    steps: int


class StepFiles(NamedTuple):
    """The files of a step's samples: of one way to join its micro-batches, and of all of them."""

    own: Path
    every: Path


def step_files(
    folder: Path, graph: Graph, step_samples: int, optimizer: str, beside: int
) -> StepFiles:
    """Return the files of a step's samples.

    step_samples:  of all micro-batches of a step together.
    optimizer:     as in a ProfileKey.
    """
    parameters = [(n.name, n.shape) for n in graph.nodes if n.kind == "parameter"]
    rows = [
        (n.kind, n.target, n.origin, n.shape if n.kind == "parameter" else ()) for n in graph.nodes
    ]
    texts = repr((rows, step_samples, optimizer)), repr((parameters, step_samples, optimizer))
    own, every = (hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts)
    return StepFiles(folder / f"steps-{own}-{beside}.json", folder / f"speed-{every}-{beside}.json")


def sampled_in(files: StepFiles, profile: Profile) -> Sampled | None:
    """Return the samples that runs have told of a step; None: none of this device and version.

    profile:  as it was measured.
    """
    return _at_speed(*_told_in(files, profile), profile.op_s)


def _told_in(files: StepFiles, profile: Profile) -> tuple[Sampled | None, Sampled | None]:
    """Return the samples of this way to join, and those of all ways; without these none."""
    own, every = (_read(path, profile) for path in files)
    if every is None or len(every.ratios) != 1:
        return None, None
    return own if own is not None and len(own.ratios) == len(profile.op_s) else None, every


def _at_speed(own: Sampled | None, every: Sampled | None, op_s: Sequence[float]) -> Sampled | None:
    """Return the ratios of one way to join, at the speed that all ways have told, if any has."""
    if every is None:
        return None
    ratios = own.ratios if own else (1.0,) * len(op_s)
    scale = every.ratios[0] / _middle(op_s, ratios)
    return replace(every, ratios=tuple(_within(ratio * scale) for ratio in ratios))


def _middle(op_s: Sequence[float], ratios: Sequence[float]) -> float:
    """Return the mean of ratios of ops, by their seconds; of their logarithms."""
    whole_s = sum(op_s)
    parts = (seconds * log(ratio) for seconds, ratio in zip(op_s, ratios, strict=True))
    return exp(sum(parts) / whole_s) if whole_s else 1.0


def _read(path: Path, profile: Profile) -> Sampled | None:
    try:
        if not path.exists():
            return None
        content = read_json(path, ProfileError, "sampled steps")
        with damage(f"sampled steps {path}", ProfileError, hint="delete it"):
            found = typed(Sampled, content.get("sampled"))
    except (ProfileError, OSError) as problem:
        _log.warning("what runs have told cannot be used: %s", problem)
        return None
    is_of_it = (found.device, found.versions) == (profile.basis.device, profile.basis.versions)
    return found if is_of_it else None


def keep_sampled(files: StepFiles, profile: Profile, told: StepRatios) -> None:
    """Add what a run tells, by `profile`, to what earlier ones have told; failing, only warn.

    profile:  that the run was predicted with, so what earlier runs told is in it.
    """
    own, every = _told_in(files, profile)
    before = own.ratios if own else (1.0,) * len(profile.op_s)
    alone_s = [seconds / ratio for seconds, ratio in zip(profile.op_s, before, strict=True)]
    found = with_run(_at_speed(own, every, alone_s), profile, told)
    speed = replace(found, ratios=(_within(_middle(alone_s, found.ratios)),))
    try:
        for path, row in zip(files, (found, speed), strict=True):
            write_text(path, json.dumps({"penstock": "sampled steps", "sampled": asdict(row)}))
    except OSError as problem:
        _log.warning("what the run told of its steps could not be kept: %s", problem)


def with_run(before: Sampled | None, profile: Profile, told: StepRatios) -> Sampled:
    """Return the samples with those of one more run: means of logarithms, weighted by steps.

    ratio = before * told ** (steps / (steps before + 2 + steps)), as `told` is by what the ratios
    before gave; at most 128 steps before count.  Ops that were not sampled take the mean of those
    that were, by their seconds.
    """
    steps = min(before.steps, _MOST) if before else 0
    weight = told.steps / (steps + _PRIOR + told.steps)
    others = _mean(profile, told)
    count = len(profile.op_s)
    own = before.ratios if before else (1.0,) * count
    ratios = tuple(_within(own[op] * told.ops.get(op, others) ** weight) for op in range(count))
    update = (before.update if before else 1.0) * (told.update or 1.0) ** weight
    runs = 1 + (before.runs if before else 0)
    total = told.steps + (before.steps if before else 0)
    return Sampled(
        profile.basis.device, profile.basis.versions, ratios, _within(update), total, runs
    )


def of_another_step(profile: Profile, told: StepRatios, other: Profile) -> StepRatios:
    """Return the ratios of a run by `profile` for the step of `other`, which has other ops.

    Every op of `other` takes the mean of the ops that were sampled.
    """
    ops = dict.fromkeys(range(len(other.op_s)), _mean(profile, told))
    return StepRatios(ops, told.update, told.steps)


def _mean(profile: Profile, told: StepRatios) -> float:
    """Return the mean of the ratios of ops, by their seconds; of their logarithms."""
    return _middle([profile.op_s[op] for op in told.ops], [*told.ops.values()])


def resting_on(profile: Profile, known: Sampled | None) -> Profile:
    """Return `profile` with its seconds as sampled steps have told."""
    if known is None:
        return profile
    rows = zip(profile.op_s, known.ratios, strict=True)
    return replace(
        profile,
        op_s=tuple(seconds * ratio for seconds, ratio in rows),
        update=profile.update.times(known.update),
        basis=replace(profile.basis, steps=known.steps, runs=known.runs),
    )


def _within(ratio: float) -> float:
    low, high = _RANGE
    return min(max(ratio, low), high)
