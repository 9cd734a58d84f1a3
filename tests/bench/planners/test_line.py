"""planners.line: the best stages on devices in a line are those of trying everything."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.planners.line import front_on_line, on_line
from bench.planners.line_kernel import Rules
from tests.bench.planners.problems import problems
from tests.bench.planners.test_simulated import message, price, ring
from tests.draws import examples

parts = st.sampled_from([0.0, 0.5, 1.0, 2.0])


@st.composite
def rules(draw):
    numbers = draw(st.sampled_from([(1, 2, 3, 4), (1,), (1, 2, 4), (2,)]))
    given_ = [draw(parts) for _ in range(6)]
    return Rules(*given_, draw(st.integers(1, 4)), np.array(numbers))


def windows(count, stages, numbers):
    for bounds in itertools.combinations(range(count + 1), stages + 1):
        found = list(itertools.pairwise(bounds))
        if all(to - start in numbers for start, to in found):
            yield found


def values(problem, order, rules, ends, spans):
    """Return the slowest stage or message, and the sum of all; None where it does not fit."""
    slowest, total = 0.0, 0.0
    groups = [tuple(sorted(order[start:to])) for start, to in spans]
    chain = problem.chain
    for at, (group, end) in enumerate(zip(groups, ends, strict=True)):
        first, r = (0, *ends)[at], len(group)
        own = price(problem, group, (first, end))
        own += (rules.every / r + rules.once) * ring(problem, group, (first, end))
        held = rules.states * sum(chain.state_bytes[first:end])
        kept = min(len(ends) - at, rules.in_flight) * sum(chain.kept_bytes[first:end]) / r
        room = min(problem.kinds[problem.kind_of[device]].memory_bytes for device in group)
        if held + rules.kept * kept > room:
            return None
        wire = 2 * message(problem, group, groups[at + 1], end) if at + 1 < len(ends) else 0.0
        slowest = max(slowest, own + rules.added * wire, rules.beside * wire)
        total += own + (rules.added + rules.beside) * wire
    return slowest, total


def brute_force(problem, order, rules, stages):
    layers, count = len(problem.chain), len(order)
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        for spans in windows(count, stages, rules.replicas):
            found = values(problem, order, rules, (*cuts, layers), spans)
            if found is not None:
                yield found


@examples(20)
@given(problems(), rules(), st.randoms(use_true_random=False), st.booleans(), st.data())
def test_line_equals_brute_force(problem, rules, random, by_sum, data):
    order = list(range(problem.num_devices))
    random.shuffle(order)
    limit_s = data.draw(st.sampled_from([math.inf, 20.5, 7.25]))
    found = on_line(problem.arrays(), tuple(order), rules, limit_s=limit_s, by_sum=by_sum)
    by_stages = {len(one.ends): one for one in found}
    for stages in range(1, min(len(problem.chain), len(order)) + 1):
        allowed = [v for v in brute_force(problem, order, rules, stages) if v[0] <= limit_s]
        one = by_stages.get(stages)
        assert (one is None) == (not allowed)
        if one is None:
            continue
        own = one.sum_s if by_sum else one.slowest_s
        assert own == pytest.approx(min(each[by_sum] for each in allowed), rel=1e-9, abs=1e-12)
        starts = [order.index(group[0]) for group in one.groups]
        spans = [(at, at + len(group)) for at, group in zip(starts, one.groups, strict=True)]
        assert [tuple(order[a:b]) for a, b in spans] == list(one.groups)
        again = values(problem, order, rules, one.ends, spans)
        assert again == pytest.approx((one.slowest_s, one.sum_s), rel=1e-9, abs=1e-12)


@examples(12)
@given(problems(), st.integers(1, 9))
def test_front_has_the_least_of_every_weighing(problem, rounds):
    rules = Rules(0.0, 0.5, 1.0, 0.0, 1.0, 1.0, 3, np.arange(1, 5))
    order = tuple(range(problem.num_devices))
    front = [one for found in front_on_line(problem.arrays(), order, rules) for one in found]
    all_values = [
        slowest * rounds + total
        for stages in range(1, min(len(problem.chain), len(order)) + 1)
        for slowest, total in brute_force(problem, order, rules, stages)
    ]
    assert (not front) == (not all_values)
    if front:
        least = min(rounds * one.slowest_s + one.sum_s for one in front)
        assert least == pytest.approx(min(all_values), rel=1e-9)
