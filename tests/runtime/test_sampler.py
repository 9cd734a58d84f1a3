"""A sampler compares what actions take, however many of them a step has."""

import itertools
from types import SimpleNamespace

import pytest

from penstock.runtime.sampler import Sampler


def calls_of(micro_batches: int) -> list:
    """Return the calls of a step: F and B of each micro-batch, and an update."""
    computes = [SimpleNamespace(lane="compute", kind=k, stage=0) for k in "FB"] * micro_batches
    return [*computes, SimpleNamespace(lane="update", kind="U", stage=0)]


def window(sampler: Sampler, calls: list, action_s: float, looks: list | None = None) -> None:
    """Take a step whose actions take so long, of a clock on which sampling takes no time."""
    marks = [at * action_s for at in range(len(calls) + 1)]
    sampler.window(calls, marks, 1, lambda: looks.append(1) if looks is not None else None)


def sampler_of() -> Sampler:
    ticks = itertools.count()
    return Sampler(lambda: float(next(ticks)), lambda: 0.0)


def test_rank_that_takes_fewer_micro_batches_has_not_moved():
    """Eight, then two: a step takes a quarter as long; then each action takes twice as long."""
    sampler, many, few = sampler_of(), calls_of(8), calls_of(2)
    for _ in range(50):
        window(sampler, many, 0.01)
    sampler.shared()
    assert sampler.step_s == 0.0
    for _ in range(50):
        window(sampler, few, 0.01)
    assert sampler.drift.moves == 0
    assert sampler.step_s == pytest.approx(5 * 0.01)
    assert sampler.since == 50
    for _ in range(50):
        window(sampler, few, 0.02)
    assert sampler.drift.moves == 1
    assert sampler.drift.factor == pytest.approx(2.0)
    sampler.shared()
    for _ in range(50):
        window(sampler, many, 0.01)
    assert sampler.drift.moves == 2
    assert sampler.drift.factor == pytest.approx(1.0)


def test_looking_for_another_plan_does_not_put_off_the_next_sample():
    """A look that takes a second of the processor: samples go on as if it had taken five times
    what a sample takes.
    """
    now, spent = [0.0], [0.0]
    sampler = Sampler(lambda: now[0], lambda: spent[0])
    take = sampler._take

    def taking(*about) -> None:
        spent[0] += 1e-4
        take(*about)

    sampler._take = taking  # type: ignore[method-assign]
    looks: list[float] = []

    def look() -> None:
        looks.append(now[0])
        spent[0] += 1.0

    for _ in range(1000):
        now[0] += 0.01
        sampler.window(calls_of(1), [0.0, 0.1, 0.2, 0.3], 1, look)
    gaps = [b - a for a, b in itertools.pairwise(looks)]
    assert max(gaps) == pytest.approx(5 * 1e-4 * 256, abs=0.02)
