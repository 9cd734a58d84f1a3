"""planners.published: each takes what its formula says is best, and nothing else."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.formulas import Pipeline, dapple
from bench.planners.line_kernel import UNFIT, pivot_s, stage_prices
from bench.planners.problem import Assignment, Problem
from bench.planners.published import (
    PLANNERS,
    double_buffered,
    plan_as,
    rules_of,
    shallowest,
)
from bench.planners.simulated import simulated
from penstock.errors import PlanError
from penstock.search.transformer.partition import Chain, Kind, partition
from tests.bench.planners.problems import alike, problems
from tests.bench.planners.test_simulated import message, price, ring
from tests.draws import examples

NAMED = {planner.name: planner for planner in PLANNERS}
layers = st.lists(st.integers(1, 9), min_size=1, max_size=6)
counts = st.integers(1, 4)


def found_by(name, problem):
    """Return all that a planner weighs, by its own value, the least first."""
    planner = NAMED[name]
    return sorted(planner.goal(problem, planner), key=lambda one: one.value)


@given(layers, counts, st.integers(0, 40), st.sampled_from([1.0, 7.0]))
def test_pipedream_is_partition_where_messages_are_free(layer_s, count, weight, link):
    problem = alike(layer_s, count, weights=(weight,) * len(layer_s), bytes_per_s=link)
    expected = partition(problem.chain, problem.kinds, link)
    assert found_by("PipeDream", problem)[0].value == pytest.approx(expected.value_s)
    stages = plan_as(NAMED["PipeDream"], problem).assignment
    assert stages.ends[-1] == len(layer_s)


@given(layers, counts, st.integers(0, 40), st.integers(1, 9))
def test_alpa_is_the_step_of_partition_where_messages_are_free(layer_s, count, weight, m):
    problem = alike(layer_s, count, weights=(weight,) * len(layer_s), m=m)
    expected = partition(problem.chain, problem.kinds, 1.0, num_micro_batches=m)
    assert found_by("Alpa", problem)[0].value == pytest.approx(expected.value_s)


@examples(12)
@given(problems(memory=(math.inf,), kinds=1))
def test_spp_weighs_a_stage_with_its_sum_beside_its_messages(problem):
    count, chain = problem.num_micro_batches, problem.chain
    for one in found_by("SPP", problem):
        slowest = 0.0
        bounds = (0, *one.ends)
        for at, group in enumerate(one.groups):
            span = bounds[at], bounds[at + 1]
            stage_s = price(problem, group, span) + ring(problem, group, span) / count
            slowest = max(slowest, stage_s)
            if span[1] < len(chain):
                slowest = max(slowest, 2 * message(problem, group, one.groups[at + 1], span[1]))
        assert one.value == pytest.approx(slowest)


@examples(5)
@given(problems(kinds=1))
def test_spp_runs_what_it_simulates_to_be_fastest(problem):
    planner = NAMED["SPP"]
    found = found_by("SPP", problem)
    options = [Assignment(one.ends, one.groups, planner.schedule) for one in found]
    least = min(one.step_s for one in simulated(problem, options))
    assert plan_as(planner, problem).step_s == least


@given(layers, counts, st.integers(0, 9))
def test_bapipe_has_a_stage_on_every_device_and_the_slowest_is_fastest(layer_s, count, sent):
    problem = alike(layer_s, count, sent=(sent,) * len(layer_s))
    found = plan_as(NAMED["BaPipe"], problem).assignment
    stages = min(count, len(layer_s))
    assert [len(group) for group in found.groups] == [1] * stages
    bounds = [
        (0, *cuts, len(layer_s))
        for cuts in itertools.combinations(range(1, len(layer_s)), stages - 1)
    ]
    least = min(max(sum(layer_s[a:b]) for a, b in itertools.pairwise(each)) for each in bounds)
    wire = 2 * sent if stages > 1 else 0
    assert found_by("BaPipe", problem)[0].value == pytest.approx(max(least, wire))


@examples(15)
@given(problems(memory=(math.inf, 20)))
def test_edgepipe_has_devices_of_the_kinds_that_partition_finds(problem):
    try:
        found = plan_as(NAMED["EdgePipe"], problem).assignment
    except PlanError:
        return
    assert [len(group) for group in found.groups] == [1] * len(found.ends)
    for first, end, group in zip((0, *found.ends), found.ends, found.groups, strict=False):
        room = problem.kinds[problem.kind_of[group[0]]].memory_bytes
        assert sum(problem.chain.weight_bytes[first:end]) <= room  # weights alone


def test_edgepipe_holds_no_activations():
    chain = Chain((9, 9), (0, 0), kept_bytes=(100, 100))
    problem = Problem(chain, (Kind(2, (1, 1), 10),), ((1.0,) * 2,) * 2, 4)
    found = plan_as(NAMED["EdgePipe"], problem)
    assert found.assignment.ends == (1, 2)
    assert not found.fits


def test_edgepipe_finds_the_order_of_kinds():
    kinds = (Kind(1, (9, 1)), Kind(1, (5, 9)))
    problem = Problem(Chain((0, 0), (0, 0)), kinds, ((1.0,) * 2,) * 2, 1)
    assert plan_as(NAMED["EdgePipe"], problem).assignment.groups == ((1,), (0,))


def test_2bw_is_the_slowest_stage_with_its_messages_or_its_sum():
    prices = np.array([[3.0, 4.0, 2.0], [1.0, 2.0, 0.0], [10.0, 0.0, 90.0]])
    assert double_buffered(prices, 90) == 4 + 1 + 2
    assert double_buffered(prices, 9) == 10


def test_2bw_and_megatron_have_equal_stages_on_equal_groups():
    layers = (1,) * 8
    problem = alike(layers, 6, weights=(4,) * 8, sent=(1,) * 8, memory=25, m=2)
    for name in ("2BW", "Megatron"):
        sizes = [(one.ends, [len(g) for g in one.groups]) for one in found_by(name, problem)]
        assert ((4, 8), [3, 3]) in sizes
        assert ((2, 5, 8), [2, 2, 2]) in sizes
        assert ((8,), [6]) not in sizes  # 32 bytes do not fit 25
    assert plan_as(NAMED["Megatron"], problem).assignment.ends == (4, 8)
    assert shallowest(np.zeros((3, 5)), 1) == 5


@given(st.lists(st.floats(0.1, 9), min_size=1, max_size=6), st.floats(0, 9), st.integers(1, 20))
def test_pivot_is_dapples_formula_where_sums_are_free(forward_s, message_s, m):
    f = np.array(forward_s)
    prices = np.zeros((2 * len(f) - 1, 3))
    prices[::2, 0], prices[::2, 1] = f, 2 * f
    prices[1::2, :2] = message_s
    expected = dapple(Pipeline(f, 2 * f, np.full(len(f) - 1, message_s), m))
    assert pivot_s(prices, len(prices), m) == pytest.approx(expected)


def test_pivot_waits_for_the_sum_that_ends_last():
    """Three stages, the second is the pivot: 1 + 2 + 4 * 6, then the longest way to an end."""
    prices = np.array([[1.0, 2, 0], [0, 0, 0], [2.0, 4, 0], [0, 0, 0], [1.0, 2, 0]])
    assert pivot_s(prices, 5, 5) == 1 + 2 + 4 * 6 + (4 + 2)
    prices[0, 2] = 3
    assert pivot_s(prices, 5, 5) == 1 + 2 + 4 * 6 + (4 + 2) + 3
    prices[0, 2], prices[2, 2] = 0, 7
    assert pivot_s(prices, 5, 5) == 1 + 2 + 4 * 6 + 4 + 7
    prices[2, 2], prices[4, 2] = 0, 11  # behind the pivot: its backwards are over before
    assert pivot_s(prices, 5, 5) == 1 + 2 + 4 * 6 + 11
    prices[3, 1] = 1  # a message back that the pivot waits for, and that sum does not
    assert pivot_s(prices, 5, 5) == 1 + 2 + 4 * 6 + 11 - 1


def latency(problem, ends, groups):
    """Return DAPPLE's latency of stages, by the formula of the bench and the kernel's pivot."""
    (outcome,) = simulated(problem, [Assignment(ends, groups)])
    assert outcome.fits
    arrays = problem.arrays()
    offsets = np.array([0, *np.cumsum([len(group) for group in groups])])
    devices = np.array([device for group in groups for device in group])
    own = stage_prices(arrays, np.array(ends), np.arange(len(ends)), (offsets, devices))
    prices = np.zeros((2 * len(ends) - 1, 3))
    prices[::2] = np.stack([own[0] / 3, own[0] * 2 / 3, own[2]], axis=1)
    prices[1::2, :2] = own[1, :-1, None]
    return pivot_s(prices, len(prices), problem.num_micro_batches)


def windows(order, bounds):
    return tuple(tuple(order[a:b]) for a, b in itertools.pairwise((0, *bounds)))


def grown(problem, order):
    """Return the least latency when plans grow by a stage, one kept for layers and devices."""
    length, count = len(problem.chain), len(order)
    kept, best = {(0, 0): (math.inf, (), ())}, math.inf
    for first, start in itertools.product(range(length), range(count)):
        _, ends, bounds = kept.get((first, start), (0, (), None))
        if bounds is None:
            continue
        for to, end in itertools.product(range(start + 1, count + 1), range(first + 1, length + 1)):
            if end < length and to == count:
                continue
            grown_ends, grown_bounds = (*ends, end), (*bounds, to)
            rest = ((length,), (count,)) if end < length else ((), ())
            own = windows(order, (*grown_bounds, *rest[1]))
            value = latency(problem, (*grown_ends, *rest[0]), own)
            best = min(best, value)
            if value < kept.get((end, to), (math.inf,))[0]:
                kept[end, to] = value, grown_ends, grown_bounds
    return best


@examples(12)
@given(problems(layers=(1, 5), memory=(math.inf,)))
def test_dapples_plan_has_the_latency_it_says_and_is_near_the_least(problem):
    """Its dynamic program keeps one plan a state: 1.3 times the least at most, mostly the least."""
    value, ends, groups = found_by("DAPPLE", problem)[0]
    assert value == pytest.approx(latency(problem, ends, groups))
    orders = list(NAMED["DAPPLE"].orders(problem))
    assert value == pytest.approx(min(grown(problem, order) for order in orders))
    least = math.inf
    count, length = problem.num_devices, len(problem.chain)
    for order, stages in itertools.product(orders, range(1, min(length, count) + 1)):
        for cuts in itertools.combinations(range(1, length), stages - 1):
            for bounds in itertools.combinations(range(1, count + 1), stages):
                own = windows(order, bounds)
                least = min(least, latency(problem, (*cuts, length), own))
    assert least * (1 - 1e-9) <= value <= 1.3 * least


@given(st.lists(st.integers(1, 9), min_size=2, max_size=8), st.data())
def test_dawnpiper_cuts_between_the_two_balances_where_it_fits(layer_s, data):
    length = len(layer_s)
    states = data.draw(st.tuples(*[st.integers(1, 9)] * length))
    room = data.draw(st.sampled_from([9, 18, 27, 99]))
    chain = Chain((0,) * length, (0,) * length, states, (0,) * length)
    problem = Problem(chain, (Kind(2, tuple(layer_s), room),), ((1.0,) * 2,) * 2, 4)
    places = [
        int(np.abs(np.cumsum([0, *each]) - sum(each) / 2).argmin()) for each in (layer_s, states)
    ]
    low, high = (min(max(place, 1), length - 1) for place in sorted(places))
    allowed = [
        max(sum(layer_s[:cut]), sum(layer_s[cut:]))
        for cut in range(low, high + 1)
        if max(sum(states[:cut]), sum(states[cut:])) <= room
    ]
    if not allowed:
        assert found_by("DawnPiper", problem) == []
        return
    (found,) = found_by("DawnPiper", problem)
    assert found.value == min(allowed)
    assert low <= found.ends[0] <= high


def test_dawnpiper_halves_until_every_device_has_a_stage():
    for count in range(1, 8):
        found = plan_as(NAMED["DawnPiper"], alike((2,) * 14, count, m=1)).assignment
        assert [len(group) for group in found.groups] == [1] * count
        assert max(np.diff([0, *found.ends])) <= -(-14 // count) + 1


@examples(15)
@given(problems(), st.sampled_from(PLANNERS))
def test_who_looks_at_memory_fits_alike_devices(problem, planner):
    """By 1F1B, with the memory that they count; others may be out of it."""
    first = problem.kinds[0]
    kinds = (Kind(problem.num_devices, first.layer_s, first.memory_bytes),)
    problem = Problem(problem.chain, kinds, problem.bytes_per_s, problem.num_micro_batches)
    try:
        found = plan_as(planner, problem)
    except PlanError:
        assert planner.memory != (0.0, 0.0)
        return
    if planner.memory != (0.0, 0.0) and planner.name != "EdgePipe":
        assert found.fits


@examples(8)
@given(problems(), st.sampled_from([one for one in PLANNERS if one.alike]))
def test_planner_that_takes_devices_for_alike_does_not_see_their_speeds(problem, planner):
    numbers = [kind.count for kind in problem.kinds]
    columns = zip(*(kind.layer_s for kind in problem.kinds), strict=True)
    mean = tuple(float(np.dot(numbers, each)) / sum(numbers) for each in columns)
    least = min(kind.memory_bytes for kind in problem.kinds)
    one_kind = replace(problem, kinds=(Kind(sum(numbers), mean, least),))
    try:
        expected = plan_as(planner, one_kind).assignment
    except PlanError:
        with pytest.raises(PlanError):
            plan_as(planner, problem)
        return
    assert plan_as(planner, problem).assignment == expected


def test_nothing_found_names_the_planner():
    problem = alike((1, 1), 2, weights=(60, 60), memory=50)
    with pytest.raises(PlanError, match="BaPipe finds no stages of 2 layers on 2 devices"):
        plan_as(NAMED["BaPipe"], problem)


def test_rules_are_the_settings():
    rules = rules_of(NAMED["PipeDream"], alike((1,), 3, m=8))
    assert rules[:7] == (2.0, 0.0, 0.0, 1.0, 0.0, 0.0, 8)
    assert rules.replicas.tolist() == [1, 2, 3]
    assert rules_of(NAMED["SPP"], alike((1,), 3, m=8)).once == 1 / 8
    assert UNFIT > 1e50
