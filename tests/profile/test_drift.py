"""Drift: a move is told by its ranks alone, soon, once; noise of any shape is none."""

import random
from collections.abc import Callable
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.profile.drift import NEW, Drift, chance

Noise = Callable[[random.Random], float]

STEADY: dict[str, Noise] = {
    "normal": lambda rng: rng.gauss(1.0, 0.1),
    "long tail": lambda rng: rng.lognormvariate(0.0, 0.5),
    "outliers": lambda rng: 20.0 if rng.random() < 0.05 else rng.gauss(1.0, 0.02),
    "two levels": lambda rng: rng.choice([1.0, 1.5]),
    "equal": lambda rng: 1.0,
}


def drawn(rng: random.Random, noise: Noise, *runs: tuple[int, float]) -> list[float]:
    return [factor * noise(rng) for count, factor in runs for _ in range(count)]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.data())
def test_chance_is_the_share_of_all_ways_to_call_some_of_them_new(old, data):
    """Counted, pair by pair; of equal values no way is rarer than that of different ones."""
    new = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    values, places = [*old, *new], range(len(old) + len(new))

    def unevenness(news: tuple[int, ...]) -> float:
        olds = [at for at in places if at not in news]
        above = sum((at > other) for at in news for other in olds)
        return abs(above - len(old) * len(new) / 2)

    pairs = [(a, b) for a in old for b in new]
    above = sum((b > a) + (b == a) / 2 for a, b in pairs)
    least = int(abs(above - len(pairs) / 2) + (len(pairs) % 2) / 2) - (len(pairs) % 2) / 2
    ways = list(combinations(places, len(new)))
    share = sum(unevenness(way) >= max(least, 0.0) for way in ways) / len(ways)
    assert chance(old, new) == pytest.approx(min(1.0, share))
    assert len(values) == len(places)


@pytest.mark.parametrize("noise", STEADY.values(), ids=STEADY)
def test_noise_is_no_move(noise):
    for seed in range(3):
        drift = Drift()
        assert not any(map(drift.add, drawn(random.Random(seed), noise, (400, 0.02))))
        assert drift.factor == 1.0


@pytest.mark.parametrize("name", ["normal", "outliers"])
@pytest.mark.parametrize("factor", [0.5, 1.4, 3.0])
def test_move_is_told_once_and_soon_and_by_how_much(name, factor):
    for seed in range(3):
        drift = Drift()
        row = drawn(random.Random(seed), STEADY[name], (60, 0.3), (200, 0.3 * factor))
        moves = [at for at, value in enumerate(row) if drift.add(value)]
        assert len(moves) == 1
        assert 60 < moves[0] <= 60 + 4 * NEW
        assert drift.factor == pytest.approx(factor, rel=0.12)


def test_way_back_is_another_move_and_then_nothing_has_moved():
    drift, noise = Drift(), STEADY["normal"]
    row = drawn(random.Random(1), noise, (60, 1.0), (60, 2.0), (60, 1.0))
    moves = [at for at, value in enumerate(row) if drift.add(value)]
    assert len(moves) == drift.moves == 2
    assert drift.factor == pytest.approx(1.0, rel=0.1)


def test_less_than_a_tenth_is_no_move_however_clear():
    drift = Drift()
    assert not any(map(drift.add, [*[1.0] * 50, *[1.09] * 500]))
    assert any(map(drift.add, [1.2] * 50))
