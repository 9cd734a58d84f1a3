"""search.shares: equal to trying every split; weights that make the mean of the whole batch."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from penstock.cluster import Link
from penstock.errors import PlanError
from penstock.search.choices.ring import alike
from penstock.search.choices.shares import (
    Load,
    Worker,
    affine_s,
    best_shares,
    even_shares,
    shares_of,
)

LINK = Link(0.5, 4.0)
rises = st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=7, max_size=7)


@st.composite
def workers(draw, most=3):
    found = []
    for at in range(draw(st.integers(1, most))):
        seconds = tuple(itertools.accumulate(draw(rises), initial=0.0))
        memory = draw(st.sampled_from([6, 12, 20, 1000]))
        sample, fixed = draw(st.sampled_from([0, 1, 3])), draw(st.sampled_from([0, 2]))
        found.append(Worker(f"w{at}", seconds, memory, sample, fixed))
    return found


loads = st.builds(
    Load, st.integers(1, 6), st.integers(0, 40), st.integers(0, 40), st.sampled_from([0, 15, 30])
)


def splits(total, count):
    for cuts in itertools.combinations(range(total + count - 1), count - 1):
        ends = (-1, *cuts, total + count - 1)
        yield [b - a - 1 for a, b in itertools.pairwise(ends)]


def least_part(workers, samples, state_bytes):
    """Return the least largest part of the state beside these samples, by linear programming."""
    rooms = []
    for worker, count in zip(workers, samples, strict=True):
        left = worker.memory_bytes - worker.fixed_bytes - count * worker.sample_bytes
        if left < 0:
            return None
        rooms.append(left / state_bytes if state_bytes else 1.0)
    n = len(rooms)
    solved = linprog(
        [0.0] * n + [1.0],
        A_ub=[[float(k == at) for k in range(n)] + [-1.0] for at in range(n)],
        b_ub=[0.0] * n,
        A_eq=[[1.0] * n + [0.0]],
        b_eq=[1.0],
        bounds=[(0, min(room, 1.0)) for room in rooms] + [(0, 1)],
    )
    return solved.x[-1] if solved.status == 0 else None


def gather_s(load, count, part):
    """2 all-gathers of W and a reduce-scatter of G, from the formula of a ring."""
    if count == 1:
        return 0.0
    each = [LINK.latency_s + part * size / LINK.bytes_per_s for size in sizes_of(load)]
    return (count - 1) * sum(each)


def sizes_of(load):
    return (load.weight_bytes, load.weight_bytes, load.gradient_bytes)


def brute_force(workers, load):
    best = math.inf
    for samples in splits(load.batch, len(workers)):
        part = least_part(workers, samples, load.state_bytes)
        if part is not None:
            compute = max(w.batch_s[k] for w, k in zip(workers, samples, strict=True))
            best = min(best, compute + gather_s(load, len(workers), part))
    return best


@settings(max_examples=150, deadline=None)
@given(workers(), loads)
def test_shares_equal_brute_force(workers, load):
    ring = alike(len(workers), LINK)
    expected = brute_force(workers, load)
    if expected == math.inf:
        with pytest.raises(PlanError, match="do not fit"):
            best_shares(workers, load, ring)
        return
    found = best_shares(workers, load, ring)
    assert found.step_s == pytest.approx(expected, rel=1e-7)
    check(found, workers, load)


def check(found, workers, load):
    assert sum(found.samples) == load.batch
    assert sum(found.parts) == pytest.approx(1)
    assert min(found.parts) >= 0
    rows = list(zip(workers, found.samples, found.parts, found.peak_bytes, strict=True))
    for worker, count, part, peak in rows:
        held = worker.fixed_bytes + count * worker.sample_bytes + part * load.state_bytes
        assert peak == pytest.approx(held)
        assert peak <= worker.memory_bytes * (1 + 1e-9)
    assert found.compute_s == max(worker.batch_s[count] for worker, count, *_ in rows)
    assert found.gather_s == pytest.approx(gather_s(load, len(workers), max(found.parts)))


@given(st.integers(1, 6), st.integers(1, 40), st.floats(0, 2), st.floats(0.1, 2))
def test_split_is_even_where_devices_are_alike(count, batch, call_s, sample_s):
    one = Worker("d", affine_s(batch, call_s, sample_s), 1000, 1, 1)
    load = Load(batch, 100, 100, 400)
    found = best_shares([one] * count, load, alike(count, LINK))
    assert max(found.samples) - min(found.samples) <= 1
    assert found.parts == (1 / count,) * count
    assert found == even_shares([one] * count, load, alike(count, LINK))


def test_slow_device_takes_fewer_samples_and_still_its_part_of_the_state():
    fast, slow = (Worker(str(s), affine_s(12, 0.0, s), 10**6) for s in (1.0, 2.0))
    load = Load(12, 10, 10, 40)
    found = best_shares([fast, slow], load, alike(2, LINK))
    even = even_shares([fast, slow], load, alike(2, LINK))
    assert found.samples == (8, 4)
    assert found.parts == (0.5, 0.5)
    assert (found.compute_s, even.compute_s) == (8, 12)


def test_device_with_little_memory_takes_less_state_and_no_fewer_samples():
    large, small = Worker("l", affine_s(8, 0, 1), 100), Worker("s", affine_s(8, 0, 1), 10)
    found = best_shares([large, small], Load(8, 1, 1, 40), alike(2, Link(0, 1e9)))
    assert found.samples == (4, 4)
    assert found.parts == pytest.approx((0.75, 0.25))
    assert even_shares([large, small], Load(8, 1, 1, 40), alike(2, LINK)) is None


def test_samples_give_way_to_the_state_where_the_link_is_slow():
    """On a slow link the small device rather has half of the state than half of the samples."""
    large, small = Worker("l", affine_s(8, 0, 1), 100), Worker("s", affine_s(8, 0, 1), 20, 5)
    load, slow, quick = Load(8, 40, 40, 40), Link(0, 0.1), Link(0, 1e9)
    assert best_shares([large, small], load, alike(2, slow)).samples == (8, 0)
    assert best_shares([large, small], load, alike(2, quick)).samples == (4, 4)


def test_weights_make_the_gradient_of_the_whole_batch():
    """d mean((x w - y)^2) / dw is the weighted mean of the devices' own means."""
    draw = np.random.default_rng(0)
    x, y, w = draw.normal(size=(12, 3)), draw.normal(size=12), draw.normal(size=3)
    pair = [Worker("a", affine_s(12, 0, 1), 1e6), Worker("b", affine_s(12, 0, 2), 1e6)]
    found = best_shares(pair, Load(12, 1, 1, 1), alike(2, LINK))

    def gradient(rows):
        return 2 * x[rows].T @ (x[rows] @ w - y[rows]) / len(x[rows])

    first = found.samples[0]
    parts = gradient(slice(first)), gradient(slice(first, None))
    both = sum(weight * part for weight, part in zip(found.weights, parts, strict=True))
    assert found.samples == (8, 4)
    np.testing.assert_allclose(both, gradient(slice(None)), rtol=1e-12)


@given(workers(), loads)
def test_more_memory_never_makes_the_step_longer(workers, load):
    ring = alike(len(workers), LINK)
    roomy = [replace(each, memory_bytes=each.memory_bytes + 5) for each in workers]
    try:
        before = best_shares(workers, load, ring).step_s
    except PlanError:
        return
    assert best_shares(roomy, load, ring).step_s <= before * (1 + 1e-9)


def test_many_devices_and_a_large_batch_are_shared():
    kinds = [(1.0, 40e9), (2.5, 16e9), (4.0, 24e9)]
    workers = [
        Worker(str(at), affine_s(1024, 0.5, kinds[at % 3][0] / 100), kinds[at % 3][1], 1e9, 2e9)
        for at in range(24)
    ]
    load, ring = Load(400, 2e9, 2e9, 16e9), alike(24, Link(1e-5, 1e10))
    found = best_shares(workers, load, ring)
    assert sum(found.samples) == 400
    assert sum(found.parts) == pytest.approx(1)
    assert all(p <= w.memory_bytes for p, w in zip(found.peak_bytes, workers, strict=True))


def test_given_shares_give_what_they_say_or_do_not_fit():
    pair = [Worker("a", affine_s(8, 0, 1), 40), Worker("b", affine_s(8, 0, 2), 40)]
    load, ring = Load(8, 8, 8, 40), alike(2, LINK)
    found = shares_of(pair, load, ring, samples=(6, 2), parts=(0.75, 0.25))
    check(found, pair, load)
    assert (found.compute_s, found.gather_s) == (6, 3 * (0.5 + 6 / 4))
    small = [pair[0], replace(pair[1], memory_bytes=9)]
    assert shares_of(small, load, ring, samples=(6, 2), parts=(0.75, 0.25)) is None
    for samples, parts in (((6, 1), (0.5, 0.5)), ((6, 2), (0.5, 0.4)), ((9, -1), (0.5, 0.5))):
        with pytest.raises(PlanError, match="of the state"):
            shares_of(pair, load, ring, samples=samples, parts=parts)


def test_what_cannot_be_is_refused():
    with pytest.raises(PlanError, match='memory_bytes of "w" is -1'):
        Worker("w", (0.0, 1.0), -1)
    for seconds in ((), (0.0, 2.0, 1.0), (0.0, math.inf), (-1.0,)):
        with pytest.raises(PlanError, match="never falls"):
            Worker("w", seconds, 1)
    with pytest.raises(PlanError, match="a batch of 0"):
        Load(0, 1, 1, 1)
    with pytest.raises(PlanError, match="1 workers on a ring of 2"):
        best_shares([Worker("w", (0.0, 1.0), 1)], Load(1, 1, 1, 1), alike(2, LINK))
    with pytest.raises(PlanError, match="a batch of 3 and 1 B of state do not fit 1 devices"):
        best_shares([Worker("w", (0.0, 1.0), 1)], Load(3, 1, 1, 1), alike(1, LINK))


def test_shares_print_a_line_for_each_device():
    pair = [Worker("a", affine_s(3, 0, 1), 2048), Worker("b", affine_s(3, 0, 2), 2048)]
    found = best_shares(pair, Load(3, 4, 4, 1024), alike(2, Link(0, 4.0)))
    assert str(found) == (
        "3.50 s per step: 2.00 s + 1.50 s of gathering\n"
        "  a: 2 samples, 50 % of the state, 512 B\n"
        "  b: 1 sample, 50 % of the state, 512 B"
    )
