"""planners.device_order: min-cuts equal brute force; slow links end up between parts."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.planners.device_order import by_min_cut, listed, many, scattered
from bench.planners.problem import Problem
from penstock.cluster.order import min_cut, min_cut_order
from penstock.search.transformer.partition import Chain, Kind
from tests.bench.planners.problems import alike, problems
from tests.draws import examples


@st.composite
def matrices(draw, most=7):
    count = draw(st.integers(2, most))
    links = np.zeros((count, count))
    for a, b in itertools.combinations(range(count), 2):
        links[a, b] = links[b, a] = draw(st.integers(0, 9))
    return links


def over(links, part):
    others = [at for at in range(len(links)) if at not in part]
    return links[np.ix_(part, others)].sum()


@given(matrices())
def test_min_cut_equals_brute_force(links):
    count = len(links)
    parts = [
        list(part)
        for size in range(1, count)
        for part in itertools.combinations(range(count), size)
    ]
    found = min_cut(links)
    assert found in parts
    assert over(links, found) == min(over(links, part) for part in parts)


@given(matrices())
def test_order_is_cut_in_two_again_and_again(links):
    order = min_cut_order(links, range(len(links)))
    assert sorted(order) == list(range(len(links)))
    assert order[0] == 0

    def check(part):
        if len(part) < 2:
            return
        own = links[np.ix_(part, part)]
        least = over(own, min_cut(own))
        places = range(1, len(part))
        cuts = [at for at in places if over(own, list(range(at))) == least]
        assert cuts  # a cut of the line is a min-cut

    check(order)


@pytest.mark.parametrize("seed", range(8))
def test_regions_and_hosts_stay_together_whatever_the_numbers(seed):
    draw = random.Random(seed)
    place = [(region, host) for region in range(2) for host in range(3) for _ in range(2)]
    draw.shuffle(place)

    def link(a, b):
        return 1.0 if a[0] != b[0] else 100.0 if a[1] != b[1] else 10_000.0

    links = tuple(tuple(link(a, b) for b in place) for a in place)
    layers = (0,) * 2
    problem = Problem(Chain(layers, layers), (Kind(12, (1, 1)),), links, 1)
    (order,) = by_min_cut(problem)
    changes = [
        sum(place[a][:k] != place[b][:k] for a, b in itertools.pairwise(order)) for k in (1, 2)
    ]
    assert changes == [1, 5]


def test_endless_links_are_cut_last():
    links = ((1, np.inf, 1), (np.inf, 1, 1), (1, 1, 1))
    problem = Problem(Chain((0,), (0,)), (Kind(3, (1,)),), links, 1)
    assert list(by_min_cut(problem)) == [(0, 1, 2)]
    assert min_cut_order(np.zeros((0, 0)), []) == ()


def test_listed_is_host_by_host_and_scattered_is_not():
    problem = Problem(
        Chain((0,), (0,)), (Kind(5, (1,)),), ((1.0,) * 5,) * 5, 1, hosts=(7, 3, 7, 3, 3)
    )
    assert list(listed(problem)) == [(1, 3, 4, 0, 2)]
    assert list(scattered(problem)) == [(1, 0, 3, 2, 4)]


@examples(12)
@given(problems(devices=(1, 7)))
def test_many_are_orders_of_all_devices_each_once(problem):
    found = list(many(problem))
    assert len(set(found)) == len(found)
    assert all(sorted(order) == list(range(problem.num_devices)) for order in found)


def test_one_order_of_alike_devices_is_enough():
    assert len(list(many(alike((1,), 4)))) == 1
    assert len(list(many(alike((1,), 9)))) == 1


def test_all_orders_of_few_devices_are_tried():
    links = tuple(tuple(float(2 ** (a * 3 + b)) for b in range(3)) for a in range(3))
    problem = Problem(Chain((0,), (0,)), (Kind(3, (1,)),), links, 1)
    assert sorted(many(problem)) == list(itertools.permutations(range(3)))


def test_orders_by_kind_are_tried():
    """Seven devices, in hosts of both kinds."""
    kinds = (Kind(4, (1,)), Kind(3, (2,)))
    hosts = (0, 0, 1, 1, 0, 1, 1)
    links = tuple(tuple(9.0 if hosts[a] == hosts[b] else 1.0 for b in range(7)) for a in range(7))
    problem = Problem(Chain((0,), (0,)), kinds, links, 1, hosts)
    orders = [[problem.kind_of[device] for device in order] for order in many(problem)]
    assert [0, 0, 0, 0, 1, 1, 1] in orders
    assert [1, 1, 1, 0, 0, 0, 0] in orders
    assert [0, 0, 1, 0, 0, 1, 1] in orders  # as listed
