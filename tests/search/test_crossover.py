"""search.crossover: Pal's formula is a special case; equal to brute force; fits find the truth."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cluster import Link
from penstock.errors import PlanError
from penstock.search.choices.crossover import (
    BatchLaw,
    Fitted,
    Way,
    crossover,
    crossover_range,
    fit_batch_law,
    seconds_to_target,
    ways,
)
from penstock.search.choices.ring import alike

positive = st.floats(0.1, 100)
laws = st.builds(BatchLaw, positive, st.floats(1, 1000) | st.just(math.inf))


@st.composite
def candidates(draw):
    found = []
    for count in (1, 2, 4, 8, 16):
        for parts in draw(st.sets(st.sampled_from([1, 2, 4]))):
            if parts <= count:
                found.append(Way(count, parts, 8 * count // parts, draw(st.floats(0.5, 2))))
    return found


@given(positive, positive, positive, st.sampled_from([2, 4, 8]), st.sampled_from([1, 2]), laws)
def test_published_speedup_is_a_special_case(one_s, all_s, part_s, count, parts, law):
    """SU = SU^M * (N / M) * SE * E_1 / E, data parallel with M = 1; batch b per replica."""
    b, replicas = 8, count // parts
    one = Way(1, 1, b, one_s)
    way = Way(count, parts, b * replicas, all_s)
    model_parallel_speedup = one_s / part_s if parts > 1 else 1.0
    alone_s = part_s if parts > 1 else one_s
    scaling_efficiency = alone_s / all_s
    epochs = law.samples(b) / law.samples(b * replicas)
    published = model_parallel_speedup * replicas * scaling_efficiency * epochs
    ours = seconds_to_target(one, law.samples) / seconds_to_target(way, law.samples)
    assert ours == pytest.approx(published)


@given(candidates(), laws)
def test_fastest_equals_brute_force(found, law):
    if not found:
        with pytest.raises(PlanError, match="no ways"):
            crossover(found, law.samples)
        return
    result = crossover(found, law.samples)
    numbers = sorted({way.devices for way in found})
    assert [each.way.devices for each in result.fastest] == numbers
    is_hybrid = {}
    for each in result.fastest:
        times = {True: math.inf, False: math.inf}
        for way in found:
            if way.devices == each.way.devices:
                steps = law.samples(way.batch) / way.batch
                times[way.parts > 1] = min(times[way.parts > 1], steps * way.step_s)
        assert each.seconds == min(times.values())
        assert each.seconds == seconds_to_target(each.way, law.samples)
        is_hybrid[each.way.devices] = times[True] < times[False]
    since = [n for n in numbers if all(is_hybrid[m] for m in numbers if m >= n)]
    assert result.devices == min(since, default=None)


def test_crossover_is_where_the_formula_says():
    """Two devices speed a replica up 1.6 times, sums are free: hybrid where samples(N b) is more
    than 2 / 1.6 of samples(N b / 2): (1 + x) / (1 + x / 2) > 1.25, x > 2/3, x = N b / critical."""
    made = ways(
        [1, 2, 4, 8, 16, 32],
        {1: 1.6, 2: 1.0},
        batch=10,
        gradient_bytes=0,
        ring=lambda count: alike(count, Link(0, 1)),
    )
    law = BatchLaw(1000, 10 * 8 / (2 / 3) * 1.001)
    assert crossover(made, law.samples).devices == 16
    assert crossover(made, BatchLaw(1000, 10 * 8 / (2 / 3) * 0.999).samples).devices == 8
    assert crossover(made, BatchLaw(1000).samples).devices is None


def test_ways_have_the_seconds_of_a_part_and_of_the_sum_over_replicas():
    link = Link(1.0, 2.0)
    made = ways(
        [4],
        {1: 5.0, 2: 3.0, 3: 9.0},
        batch=8,
        gradient_bytes=16,
        ring=lambda n: alike(n, link),
    )
    plain, hybrid = made
    assert (plain.parts, plain.batch, hybrid.parts, hybrid.batch) == (1, 32, 2, 16)
    assert plain.step_s == 5 + 2 * 3 * (1 + 16 / 4 / 2)
    assert hybrid.step_s == 3 + 2 * 1 * (1 + 8 / 2 / 2)


@settings(deadline=None)
@given(candidates(), st.floats(1, 100), st.floats(1, 100))
def test_larger_critical_batch_puts_the_crossover_off(found, low, more):
    if not found:
        return
    first, last = crossover_range(found, Fitted(BatchLaw(1, low), low, low + more, 0))
    assert (first or 99) <= (last or 99)


@given(st.floats(10, 1e6), st.floats(1, 1e5))
def test_fit_finds_a_law_without_noise(least, critical):
    law = BatchLaw(least, critical)
    points = [(critical * k, law.samples(critical * k)) for k in (0.2, 0.5, 1, 2, 5)]
    fitted = fit_batch_law(points)
    assert fitted.law.least_samples == pytest.approx(least)
    assert fitted.law.critical_batch == pytest.approx(critical)
    assert fitted.low == pytest.approx(critical, rel=1e-3)
    assert fitted.high == pytest.approx(critical, rel=1e-3)
    assert fitted.error < 1e-9


def noisy(law, draw, error, batches):
    return [(batch, law.samples(batch) * draw.normal(1, error)) for batch in batches]


@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_interval_holds_the_truth_as_often_as_it_says(confidence):
    """Of 1,500 fits to six measurements each, 5 % off, within four standard deviations."""
    draw, law, trials = np.random.default_rng(1), BatchLaw(1e5, 300), 1500
    held = 0
    for _ in range(trials):
        points = noisy(law, draw, 0.05, (32, 64, 128, 256, 512, 1024))
        fitted = fit_batch_law(points, confidence=confidence)
        held += fitted.low <= law.critical_batch <= fitted.high
    slack = 4 * math.sqrt(confidence * (1 - confidence) / trials)
    assert held / trials == pytest.approx(confidence, abs=slack)


def test_interval_has_no_end_where_noise_hides_the_growth():
    draw = np.random.default_rng(3)
    points = noisy(BatchLaw(1e5, 1e6), draw, 0.05, (8, 16, 32, 64))
    fitted = fit_batch_law(points)
    assert fitted.high == math.inf
    assert 0 < fitted.low < 1e6


def test_interval_begins_at_nothing_where_noise_hides_the_least():
    """Batches far beyond the critical one: samples grow as the batch, within 3 %."""
    fitted = fit_batch_law([(500, 5300), (1000, 10100), (2000, 20900), (4000, 40500)])
    assert fitted.low == 0
    assert 0 < fitted.law.critical_batch < fitted.high < 500


def test_measurements_that_are_no_law_are_refused():
    with pytest.raises(PlanError, match="2 measurements of 2 different"):
        fit_batch_law([(1, 1), (2, 2)])
    with pytest.raises(PlanError, match="3 measurements of 1 different"):
        fit_batch_law([(1, 1), (1, 2), (1, 3)])
    with pytest.raises(PlanError, match="at a batch of 0"):
        fit_batch_law([(10, 10), (20, 30), (30, 50)])
    with pytest.raises(PlanError, match="the samples fall"):
        fit_batch_law([(10, 100), (20, 90), (30, 80), (40, 70.1)])
    flat = fit_batch_law([(10, 100), (20, 101), (30, 99), (40, 100)])
    assert flat.law.samples(10**9) == pytest.approx(100, rel=0.01)


def test_what_cannot_be_is_refused():
    for numbers in ((0, 1), (1, 0), (math.inf, 1)):
        with pytest.raises(PlanError, match="BatchLaw"):
            BatchLaw(*numbers)
    for numbers in ((3, 2, 1, 1), (2, 0, 1, 1), (2, 1, 0, 1), (2, 1, 1, 0)):
        with pytest.raises(PlanError, match="a way with"):
            Way(*numbers)


def test_crossover_prints_a_line_for_each_number():
    law = BatchLaw(100, 1)
    text = str(crossover([Way(1, 1, 1, 1.0), Way(2, 2, 1, 0.5), Way(2, 1, 2, 1.0)], law.samples))
    assert text == (
        "a hybrid is faster from 2 devices on\n"
        "  1 devices: 1 replicas x 1 devices, batch 1: 3.33 min to the target\n"
        "  2 devices: 1 replicas x 2 devices, batch 1: 100 s to the target"
    )
