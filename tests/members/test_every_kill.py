"""Every kill: ranks die before each call of a step, and at each point between two generations.

All of them in `make soak`; here as many as a test may draw, spread evenly.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.members import runs
from tests.members.test_kills import CASES, case_of, check

SOAK = 1000  # examples of a test from which on nothing is left out
MOST_POINTS = 120  # of re-forming; behind the last nobody dies


@pytest.fixture(autouse=True)
def mortal(monkeypatch: pytest.MonkeyPatch) -> None:
    runs.mortal(monkeypatch)


WAYS = [
    pytest.param(name, marks=[pytest.mark.long] if name in ("replicas", "updated", "away") else [])
    for name in CASES
]


def some(count: int, share: int, shift: int = 0) -> list[int]:
    """Return all numbers below `count` in a soak, else as many of them as is usual."""
    assert settings.default is not None
    most = settings.default.max_examples
    if most >= SOAK:
        return list(range(count))
    taken = min(count, max(1, most // share))
    return [((2 * k + 1) * count // (2 * taken) + shift) % count for k in range(taken)]


def calls_of(name: str, folder: Path) -> list[int]:
    """Return how many calls a step has, by rank."""
    _, count, ways, plans = case_of(name)
    found = [0] * count

    def noted(who: int, calls: int) -> None:
        found[who] = max(found[who], calls)

    runs.run(ways, plans, count, folder, runs.counting(noted))
    return found


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.sampled(2)
def test_a_rank_dies_before_any_call_of_a_step(name: str, tmp_path: Path) -> None:
    model, count, ways, plans = case_of(name)
    calls = calls_of(name, tmp_path / "whole")
    for who in range(count):
        for call in some(calls[who], 2 * count, 7 * who):
            told = runs.run(
                ways, plans, count, tmp_path / f"{who}.{call}", runs.doomed(who, 2, call)
            )
            check(told, model)


def pairs(name: str) -> Iterator[tuple[int, int]]:
    count = case_of(name)[1]
    yield from ((first, second) for first in range(count) for second in range(count))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", WAYS)
def test_another_rank_dies_while_the_others_re_form(name: str, tmp_path: Path) -> None:
    """Whatever it has said or not, and whoever decides; also the one that held the only copy."""
    model, count, ways, plans = case_of(name)
    plans = {**plans, **smaller(name)}
    chosen = [pair for pair in pairs(name) if pair[0] != pair[1]]
    chosen = [chosen[at] for at in some(len(chosen), 5)]
    for number, (first, second) in enumerate(chosen):
        for points in some(MOST_POINTS, 5, 7 * number):
            folder = tmp_path / f"{first}.{second}.{points}"
            at = first, 2, (7 * points + number) % 20
            told = runs.run(ways, plans, count, folder, runs.doomed_between(at, second, points))
            died = sum(isinstance(end.problem, runs.Killed) for end in told.ended.values())
            assert died in (1, 2)
            check(told, model, killed=died, may_repeat=died == 2)


def smaller(name: str) -> dict[int, runs.Plan]:
    _, count, ways, _ = case_of(name)
    shapes = {1: (1, 1), 2: (1, 2) if name in ("replicas", "grid", "divided") else (2, 1)}
    return {n: runs.plan_for(ways, *shapes[n]) for n in range(1, count - 1)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", WAYS)
def test_two_ranks_die_at_one_moment(name: str, tmp_path: Path) -> None:
    model, count, ways, plans = case_of(name)
    plans = {**plans, **smaller(name)}
    chosen = [pair for pair in pairs(name) if pair[0] < pair[1]]
    for first, second in (chosen[at] for at in some(len(chosen), 5)):
        for call in some(12, 5):
            folder, doom = tmp_path / f"{first}.{second}.{call}", (2, call)
            both = runs.doomed_all({first: doom, second: doom}, at_once=call < 3)
            told = runs.run(ways, plans, count, folder, both)
            died = sum(isinstance(end.problem, runs.Killed) for end in told.ended.values())
            check(told, model, killed=died, may_repeat=True)
