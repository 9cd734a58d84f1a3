"""What is learned of synthetic measurements whose law is known, and how intervals hold."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import EstimateError
from penstock.fleet.learn import Fitting, fitted, held_out, learn
from penstock.fleet.measurement import (
    Peaks,
    StepWork,
    of_placement,
    of_start,
    of_step,
    of_transfer,
    peaks_of,
)
from tests.draws import examples

MB = 10**6


def transfers(*, count=12, noise=0.0, seed=0, slope=20.0, campaigns=("",), factor=1.0):
    """Return models whose bytes take `slope` s a GB, and 2 s; of the last campaign, by a factor."""
    draw, found = np.random.default_rng(seed), []
    for at in range(count):
        size, tensors = float(draw.uniform(5, 300)) * MB, float(draw.integers(20, 400))
        campaign = campaigns[at % len(campaigns)]
        seconds = 2.0 + slope * size / 1e9 + 4e-3 * tensors
        seconds *= factor if campaign == campaigns[-1] else 1.0
        seconds *= math.exp(noise * draw.standard_normal())
        found.append(of_transfer(f"m{at}", size, tensors, campaign=campaign, seconds=seconds))
    return found


def test_constants_of_the_law_are_found():
    found = fitted(transfers(), Fitting(0.0, "none"))
    assert found.constants == pytest.approx({"start": 2.0, "bytes": 20.0, "tensors": 4.0})
    assert found.seconds(transfers(seed=1)) == pytest.approx(
        [row.seconds for row in transfers(seed=1)]
    )


@given(st.integers(0, 50), st.floats(0.0, 0.3))
@examples(6)
def test_no_constant_is_below_zero(seed, noise):
    found = fitted(transfers(noise=noise, seed=seed, count=6), Fitting(0.1, "none"))
    assert min(found.constants.values()) >= 0


def test_unit_of_seconds_does_not_matter():
    rows = transfers(noise=0.1)
    slower = [replace(row, seconds=1000 * row.seconds) for row in rows]
    one, other = (fitted(each, Fitting(0.1, "none")).seconds(rows) for each in (rows, slower))
    assert other == pytest.approx(1000 * one)


def test_ridge_draws_constants_to_zero():
    free, drawn = (fitted(transfers(), Fitting(ridge, "none")) for ridge in (0.0, 1.0))
    assert sum(drawn.constants.values()) < sum(free.constants.values())


def test_campaign_takes_its_factor():
    """Drawn to 1 by one model's worth: of six models that take 1.3 times as long, 6 / 7 of it."""
    rows = transfers(campaigns=("first", "later"), factor=1.3)
    found = fitted(rows, Fitting(0.0, "none")).campaigns
    assert found["later"] / found["first"] == pytest.approx(1.3 ** (6 / 7), rel=0.02)
    new = of_transfer("new", 50 * MB, 100, campaign="unknown")
    known = replace(new, campaign="later")
    learned = fitted(rows, Fitting(0.0, "none"))
    assert learned.seconds([known])[0] == pytest.approx(learned.seconds([new])[0] * found["later"])


def test_held_out_group_has_no_part_in_what_is_foreseen_of_it():
    rows = transfers(noise=0.05, count=5)
    wrong = [
        replace(row, seconds=100 * row.seconds) if at == 3 else row for at, row in enumerate(rows)
    ]
    assert held_out(wrong)[3] == held_out(rows)[3]
    alone = learn([row for at, row in enumerate(rows) if at != 3]).foresee([rows[3]])
    assert held_out(rows)[3] == alone[0]


def test_row_without_seconds_is_foreseen_by_all_that_were_measured():
    rows = transfers(noise=0.05, count=5)
    asked = replace(rows[0], seconds=None, group="new")
    assert held_out([*rows, asked])[-1] == learn(rows).foresee([asked])[0]


def test_interval_holds_what_it_promises():
    """Over ten sets with 8 % noise, 8 of 10 rows of new groups lie inside."""
    inside = []
    for seed in range(10):
        new = transfers(noise=0.08, seed=100 + seed, count=60)
        found = learn(transfers(noise=0.08, seed=seed, count=14)).foresee(new)
        for row, one in zip(new, found, strict=True):
            assert one.low <= one.seconds <= one.high
            if not one.outside:
                inside.append(one.low <= row.seconds <= one.high)
    assert 0.75 <= np.mean(inside) <= 0.92


def test_more_promised_is_wider():
    learned, rows = learn(transfers(noise=0.1)), transfers(seed=5)
    narrow, wide = (learned.foresee(rows, share=share) for share in (0.5, 0.9))
    assert all(w.low <= n.low and n.high <= w.high for n, w in zip(narrow, wide, strict=True))


def test_what_is_outside_is_said_and_doubles_the_interval():
    learned = learn(transfers(noise=0.1, count=14))
    inside, far, elsewhere = (
        of_transfer("new", 100 * MB, 100),
        of_transfer("new", 5000 * MB, 100),
        of_transfer("new", 100 * MB, 100, to="other bucket"),
    )
    usual, beyond, other = learned.foresee([inside, far, elsewhere])
    assert (usual.outside, beyond.outside, other.outside) == ((), ("bytes",), ("device",))
    assert other.seconds == usual.seconds
    assert other.high / other.seconds == pytest.approx((usual.high / usual.seconds) ** 2)


def test_what_physics_leaves_over_is_learned_by_a_gaussian_process():
    """Seconds bend with the bytes by 60 %: constants alone are off by more than with the rest."""
    rows = [
        replace(row, seconds=row.seconds * math.exp(0.3 * math.sin(2 * row.features["bytes"])))
        for row in transfers(count=36)
    ]
    learned = learn(rows)
    assert learned.choice.rest == "gaussian process"
    plain = fitted(rows, Fitting(learned.choice.ridge, "none"))
    new = transfers(seed=9, count=20)
    truth = [r.seconds * math.exp(0.3 * math.sin(2 * r.features["bytes"])) for r in new]
    assert (
        np.abs(learned.whole.seconds(new) / truth - 1).mean()
        < 0.5 * np.abs(plain.seconds(new) / truth - 1).mean()
    )


def test_nothing_is_added_where_physics_is_all():
    assert learn(transfers(count=12)).error < 0.05


def test_trees_tell_the_rest_of_many_placements():
    rows = [
        of_placement("a", hosts, batch, seconds=0.1 + 1e-3 * batch + jump * 0.3)
        for first in range(1, 5)
        for second in range(1, 5)
        for third in range(1, 5)
        for hosts, jump in [((first, second, third), float(third == 3))]
        for batch in (8, 16, 32)
    ]
    learned = learn(rows)
    assert learned.choice.rest == "trees"
    assert learned.error < 0.1


def test_device_never_measured_is_foreseen_by_its_peaks():
    """Seconds are 3 times work / peak, and a launch for each tensor, on every device."""
    works = [
        StepWork(flop * 1e9, 1e6 * flop, 20 * at + 30) for at, flop in enumerate((1, 9, 3, 30, 7))
    ]

    def took(work: StepWork, peaks: Peaks) -> float:
        return 3 * work.flop / peaks.flop_per_s + 1e-4 * work.tensors

    rows = [
        of_step(f"m{at}", name, peaks_of(name), work, seconds=took(work, peaks_of(name)))
        for at, work in enumerate(works)
        for name in ("k80", "p100")
    ]
    new = StepWork(5e9, 5e6, 80)
    (found,) = learn(rows).foresee([of_step("new", "v100", peaks_of("v100"), new)])
    assert found.seconds == pytest.approx(took(new, peaks_of("v100")), rel=0.15)
    assert "device" in found.outside


def test_starts_of_each_kind_have_a_constant():
    rows = [
        of_start(f"m{n}", kind, n, seconds=base + 0.1 * n)
        for n in (40, 90, 150, 220, 300)
        for kind, base in (("cold", 70.0), ("warm", 10.0))
    ]
    cold, warm = learn(rows).foresee([of_start("new", kind, 120) for kind in ("cold", "warm")])
    assert (cold.seconds, warm.seconds) == pytest.approx((82.0, 22.0), rel=0.05)


def test_too_few_groups_are_refused_with_their_names():
    with pytest.raises(EstimateError, match="2 groups are measured: m0, m1"):
        learn(transfers(count=2))


def test_column_that_only_some_rows_have_is_refused():
    rows = [
        of_step(f"m{at}", "k80", peaks_of("k80"), StepWork(1e9, 1e6, 50, moved), seconds=1.0)
        for at, moved in enumerate((1e9, None, 1e9))
    ]
    with pytest.raises(EstimateError, match="bytes moved is known of some rows"):
        learn(rows)


def test_nothing_asked_is_nothing_foreseen():
    assert learn(transfers()).foresee([]) == []
