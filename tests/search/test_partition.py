"""transformer.partition: equal to trying everything."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.search.transformer.partition import Chain, Kind, partition
from tests.draws import examples

small = st.integers(0, 9)
links = st.sampled_from([1, 2, 5, math.inf])


@st.composite
def chains(draw, most=7):
    count = draw(st.integers(1, most))
    layers = st.tuples(*[small] * count)
    return Chain(draw(layers), draw(layers), draw(layers), draw(layers))


@st.composite
def cases(draw, layers=7, kinds=(1, 2, 3), devices=5):
    """Return a chain, kinds and links; memory is sometimes short."""
    chain = draw(chains(layers))
    counts = draw(st.lists(st.integers(1, 5), min_size=kinds[0], max_size=kinds[-1]))
    while sum(counts) > devices:
        counts[counts.index(max(counts))] -= 1
    found = []
    for count in filter(None, counts):
        seconds = draw(st.tuples(*[small] * len(chain)))
        found.append(Kind(count, seconds, draw(st.sampled_from([math.inf, 25, 50]))))
    row = st.lists(links, min_size=len(found), max_size=len(found))
    return chain, found, draw(st.lists(row, min_size=len(found), max_size=len(found)))


def compositions(total, most):
    """Yield every way to cut `total` layers into at most `most` parts."""
    for parts in range(1, min(total, most) + 1):
        for cuts in itertools.combinations(range(1, total), parts - 1):
            yield list(itertools.pairwise((0, *cuts, total)))


def stage_s(chain, kind, link, ends, replicas, *, out, m):  # noqa: PLR0913 - all it depends on
    """Return the seconds of a stage from its definition."""
    first, end = ends
    weights = sum(chain.weight_bytes[first:end])
    every = 4 / replicas if m is None else 2 / m
    ring = every * (replicas - 1) / replicas * weights / link
    message = 2 * chain.sent_bytes[end - 1] / out / replicas if out else 0
    return max(sum(kind.layer_s[first:end]) / replicas + ring, message)


def holds(chain, kind, ends, replicas, devices, m):
    first, end = ends
    in_flight = math.ceil(devices / replicas)
    if m is not None:
        in_flight = min(in_flight, m)
    held = sum(chain.state_bytes[first:end]) + in_flight * sum(chain.kept_bytes[first:end])
    return held <= kind.memory_bytes


def assignments(stages, kinds, numbers):
    """Yield kinds and replicas for so many stages, on no more devices than there are."""
    options = [(k, r) for k in range(len(kinds)) for r in numbers if r <= kinds[k].count]
    for chosen in itertools.product(options, repeat=stages):
        used = [sum(r for k, r in chosen if k == kind) for kind in range(len(kinds))]
        if all(u <= kind.count for u, kind in zip(used, kinds, strict=True)):
            yield chosen


def brute_force(chain, kinds, link, m=None, numbers=(1, 2, 3, 4, 5)):
    best = math.inf
    for parts in compositions(len(chain), sum(kind.count for kind in kinds)):
        for chosen in assignments(len(parts), kinds, numbers):
            best = min(best, value_of(chain, kinds, link, parts, chosen, m=m))
    return best


def value_of(chain, kinds, link, parts, chosen, *, m):
    found = []
    for at, (ends, (kind, r)) in enumerate(zip(parts, chosen, strict=True)):
        if not holds(chain, kinds[kind], ends, r, sum(r for _, r in chosen[at:]), m):
            return math.inf
        out = link[kind][chosen[at + 1][0]] if at + 1 < len(chosen) else None
        own = link[kind][kind]
        found.append(stage_s(chain, kinds[kind], own, ends, r, out=out, m=m))
    return max(found) if m is None else (m - 1) * max(found) + sum(found)


def check(case, m=None, numbers=(1, 2, 3, 4, 5)):
    chain, kinds, link = case
    expected = brute_force(chain, kinds, link, m, numbers)
    if expected == math.inf:
        with pytest.raises(PlanError, match="fit the memory"):
            partition(chain, kinds, link, num_micro_batches=m, replicas=numbers)
        return
    found = partition(chain, kinds, link, num_micro_batches=m, replicas=numbers)
    assert found.value_s == pytest.approx(expected, rel=1e-9)
    parts = [(stage.first, stage.end) for stage in found.stages]
    chosen = [(stage.kind, stage.replicas) for stage in found.stages]
    assert parts in list(compositions(len(chain), len(chain)))
    assert tuple(chosen) in set(assignments(len(parts), kinds, numbers))
    assert value_of(chain, kinds, link, parts, chosen, m=m) == pytest.approx(found.value_s)


@examples(15)
@given(cases(kinds=(1,)))
def test_slowest_stage_equals_brute_force_on_equal_devices(case):
    check(case)


@examples(15)
@given(cases(kinds=(1,)), st.integers(1, 9))
def test_step_equals_brute_force_on_equal_devices(case, m):
    check(case, m)


@examples(15)
@given(cases(layers=5, kinds=(2, 3), devices=4))
def test_slowest_stage_equals_brute_force_on_several_kinds(case):
    check(case)


@examples(15)
@given(cases(layers=5, kinds=(2, 3), devices=4), st.integers(1, 9))
def test_step_equals_brute_force_on_several_kinds(case, m):
    check(case, m)


@examples(12)
@given(cases(kinds=(1, 2)), st.sampled_from([(1,), (1, 2, 4), (2,)]))
def test_powers_of_two_equal_brute_force(case, numbers):
    check(case, None, numbers)
    check(case, 3, numbers)


@pytest.mark.parametrize("seed", range(12))
def test_step_of_longer_chains_equals_brute_force(seed):
    """So many stages and values that the slowest and the sum pull apart."""
    draw = random.Random(seed)
    layers = [draw.uniform(1, 100) for _ in range(11)]
    chain = Chain((1,) * 11, tuple(draw.uniform(0, 60) for _ in range(11)), (1,) * 11)
    check((chain, [Kind(5, tuple(layers))], [[1.0]]), draw.choice((1, 2, 3)), (1,))


def test_slowest_stage_is_exact_to_the_last_bit():
    """Bisection alone would end near 1/3, not on it."""
    found = partition(Chain((0,), (0,)), [Kind(3, (1.0,))], math.inf)
    assert found.value_s == 1 / 3


def test_order_of_kinds_is_searched():
    chain = Chain((0, 0), (1, 1), kept_bytes=(5, 5))
    quick, slow = Kind(1, (9, 1)), Kind(1, (9, 9))
    found = partition(chain, [slow, quick], math.inf)
    assert [stage.kind for stage in found.stages] == [0, 1]


@pytest.mark.parametrize(
    ("kinds", "link", "words"),
    [
        ([], 1, "kinds do not have"),
        ([Kind(1, (1,))], 1, "kinds do not have"),
        ([Kind(1, (1, 1))], 0, "links of 0"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(kinds, link, words):
    with pytest.raises(PlanError, match=words):
        partition(Chain((1, 1), (1, 1)), kinds, link)


def test_layers_that_cannot_be_are_refused():
    with pytest.raises(PlanError, match="sent_bytes of layer 1 is -1"):
        Chain((1, 1), (1, -1))
    with pytest.raises(PlanError, match="0 devices"):
        Kind(0, (1,))
