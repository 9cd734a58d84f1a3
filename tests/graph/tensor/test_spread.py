"""What is per token between two collects is divided by tokens, where that is the cheapest."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from penstock.choose.degrees import slices_in_words
from penstock.graph.cut import cut
from penstock.graph.tensor.choose_slices import by_tensor, chosen, groups_of, held_by, layouts_of
from penstock.graph.tensor.collect_op import COLLECT
from penstock.graph.tensor.cuts import collect_points
from penstock.graph.tensor.divided import divided
from penstock.graph.tensor.placed import Placing, RankSpeed
from penstock.graph.trace import capture
from tests.graph.tensor.test_choose_slices import Block
from tests.graph.tensor.test_divided import FREE, Net, assert_between_stages, assert_equal
from tests.graph.zoo import JOBS, floats, job_of


@pytest.fixture(autouse=True)
def _in_64_bits():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def spread_of(job, ranks=2, prices=FREE):
    captured = capture(job)
    placing = Placing(captured, ranks, prices)
    groups = groups_of(placing)
    other = Placing(captured, ranks, prices, spread=True)
    layout = other.layout(held_by(groups, chosen(placing, groups)))
    made = divided(captured, layout, layout.held, ranks)
    cut(made.graph, collect_points(made.graph))
    return made


def hows(made):
    return [node.args[1] for node in made.fx_nodes if node.target is COLLECT]


@pytest.mark.parametrize("shape", [(4, 8, 16), (1, 8, 16), (3, 8, 16)])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.sampled(2)
def test_blocks_with_spread_sums_make_the_step_of_the_plain_model(shape, ranks):
    job = job_of(lambda: nn.Sequential(Block(16, 4), Block(16, 4)), floats(*shape))
    made = spread_of(job, ranks)
    assert hows(made).count("scatter") >= 4
    assert_equal(job, made, ranks)
    assert_between_stages(made.graph)


@pytest.mark.parametrize("name", ["blocks", "tied", "transformer", "rotary", "embeddings"])
@pytest.mark.sampled(2)
def test_models_with_spread_sums_make_the_step_of_the_plain_model(name):
    made = spread_of(JOBS[name])
    assert_equal(JOBS[name], made, 2)


@settings(max_examples=10)
@given(
    st.lists(st.sampled_from([4, 8, 12]), min_size=1, max_size=3),
    st.booleans(),
    st.integers(1, 3),
    st.sampled_from([2, 4]),
    st.sampled_from([(8,), (4, 3), (1, 4), (3, 4)]),
)
def test_random_nets_are_spread_as_they_are_computed(widths, adds, runs, ranks, shape):
    job = job_of(lambda: Net(widths, adds=adds, runs=runs), floats(*shape, 8))
    assert_equal(job, spread_of(job, ranks), ranks)


def net(*widths):
    pairs = itertools.pairwise(widths)
    rows = [each for a, b in pairs for each in (nn.LayerNorm(a), nn.Linear(a, b), nn.ReLU())]
    return lambda: nn.Sequential(*rows[:-1])


@pytest.mark.parametrize(
    "job",
    [
        job_of(net(64, 128, 64), floats(16, 64)),
        job_of(net(32, 8, 64, 32), floats(2, 64, 32)),
        JOBS["blocks"],
        job_of(lambda: Block(16, 4), floats(1, 256, 16)),
    ],
)
@pytest.mark.parametrize("latency_s", [0.0, 1e-6, 1e-4])
@pytest.mark.sampled(3)
def test_whether_sums_are_spread_is_chosen_as_trying_all_does(job, latency_s):
    prices = RankSpeed(latency_s=latency_s)
    placing = Placing(capture(job), 2, prices)
    other = Placing(placing.capture, 2, prices, spread=True)
    groups = groups_of(placing)
    ways = [w for w in itertools.product(*(g.options for g in groups)) if any(w)]
    best = min(each.layout(held_by(groups, w)).seconds for w in ways for each in (placing, other))
    found = layouts_of(placing, groups, chosen(placing, groups))
    assert found[0].seconds == pytest.approx(best)


@pytest.mark.parametrize(("latency_s", "spreads"), [(0.0, True), (1.0, False)])
def test_sums_are_spread_where_the_collects_more_cost_less_than_what_is_divided(latency_s, spreads):
    job = job_of(lambda: nn.Sequential(Block(32, 4), Block(32, 4)), floats(1, 64, 32))
    made = by_tensor(capture(job), 2, RankSpeed(latency_s=latency_s))
    assert ("scatter" in hows(made)) is spreads
    assert ("by tokens" in slices_in_words(made.graph)) is spreads
