"""Routing: the rows that experts see, and the seconds of the rank that has most of them."""

from dataclasses import replace
from itertools import islice
from math import inf

import pytest
import torch
from torch import nn

from penstock.choose.choose import Joining
from penstock.choose.degrees import division_in_words, expected_s
from penstock.graph.tensor.choose_slices import division
from penstock.graph.tensor.cuts import OWN_ROWS
from penstock.graph.tensor.expert_slices import OWN_ROWS_MM
from penstock.graph.tensor.placed import Placing, RankSpeed
from penstock.graph.trace import build_model, capture
from penstock.profile import Profile, measure, routing
from penstock.profile.expert_load import BY_EXPERTS, ends_by_product
from tests.graph.tensor.test_expert_slices import FAST, D, Experts, Net
from tests.graph.zoo import floats, job_of


class Skewed(Net):
    """Whose routers like the first experts."""

    def __init__(self, liked: float = 0.4) -> None:
        super().__init__()
        for layer in self.layers:
            layer.router = nn.Linear(D, 4)
            with torch.no_grad():
                layer.router.bias.copy_(torch.tensor([liked, liked, -liked, -liked]))


def seen_by_hand(job, micro_batches: int) -> list[list[list[int]]]:
    """Return the rows of each expert, by layer and micro-batch, one token after the other."""
    model, found = build_model(job), []

    def look(layer, given):
        chosen = layer.router(given[0]).topk(layer.top, -1).indices.flatten().tolist()
        found[-1].append([chosen.count(k) for k in range(layer.count)])

    for layer in model.modules():
        if isinstance(layer, Experts):
            layer.register_forward_pre_hook(look)
    with torch.no_grad():
        for batch in islice(job.data(0), micro_batches):
            found.append([])
            job.loss(model, batch)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rows_of_experts_are_those_of_the_model_as_it_is(ranks):
    """Also behind the first layer of ranks that divide its experts: there they have collected."""
    job = job_of(Skewed, floats(12, D))
    step = capture(job)
    made = step if ranks == 1 else division(step, ranks, FAST).capture
    targets = {node.target for node in made.fx_nodes}
    assert (OWN_ROWS_MM in targets) == (ranks > 1)
    found = routing.expert_loads(made, job)
    by_hand = seen_by_hand(job, routing.MICRO_BATCHES)
    assert len(found) == 2
    for number, load in enumerate(found):
        assert [list(row) for row in load.rows] == [row[number] for row in by_hand]


def test_step_without_experts_has_no_loads():
    job = job_of(lambda: nn.Linear(D, D), floats(12, D))
    assert routing.expert_loads(capture(job), job) == ()


def test_micro_batches_of_other_shapes_are_left_out():
    job = job_of(Net, floats(12, D))
    plain = job.data

    def data(start):
        batches = plain(start)
        yield next(batches)
        yield torch.zeros(5, D)
        yield from batches

    other = replace(job, data=data)
    (first, _) = routing.expert_loads(capture(other), other)
    assert len(first.rows) == routing.MICRO_BATCHES - 1
    assert {sum(row) for row in first.rows} == {24}


def by_rows(monkeypatch) -> None:
    """Let a product take as many seconds as its own experts see rows."""
    monkeypatch.setattr(routing, "_median_s", lambda call, args: float(args[2][len_of(args) - 1]))


def len_of(args) -> int:
    """Return the number of a rank's own experts."""
    return len(args[1]) if args[1].dim() == 3 else len(args[2]) // args[3]


@pytest.mark.parametrize("ranks", [2, 4])
def test_seconds_are_those_of_the_rank_whose_experts_see_most_rows(monkeypatch, ranks):
    by_rows(monkeypatch)
    job = job_of(lambda: Skewed(-0.4), floats(12, D))  # the last rank has most of them
    made = division(capture(job), ranks, FAST).capture
    loads = routing.expert_loads(made, job)
    inputs = measure.inputs_of(made, job)
    ones = [1.0] * len(made.fx_nodes)
    found = routing.as_busiest(made, ones, loads, inputs)
    by_ends, changed = {load.ends: load for load in loads}, 0
    for at, seconds in enumerate(found):
        if made.graph.nodes[at].target not in BY_EXPERTS:
            assert seconds == 1.0
    alone = routing._computed([made], [dict(inputs)], sorted(by_ends))
    for at, ends in ends_by_product(made.graph):
        own = int(alone[ends][4 // ranks - 1])
        if made.graph.nodes[at].target in BY_EXPERTS:
            block = sum(by_ends[ends].busiest_block(ranks)) if own else 1
            assert found[at] == pytest.approx(block / max(1, own))
            changed += block > own
    assert changed


def test_seconds_of_undivided_steps_stay(monkeypatch):
    by_rows(monkeypatch)
    job = job_of(Skewed, floats(12, D))
    step = capture(job)
    loads, inputs = routing.expert_loads(step, job), measure.inputs_of(step, job)
    ones = [1.0] * len(step.fx_nodes)
    assert routing.as_busiest(step, ones, loads, inputs) == tuple(ones)


def profile_of(job, made) -> Profile:
    return measure.measure(made, job)


def test_profile_has_the_loads_and_keeps_them(tmp_path):
    job = job_of(Skewed, floats(12, D))
    made = division(capture(job), 2, FAST).capture
    profile = profile_of(job, made)
    assert profile.loads == routing.expert_loads(made, job) != ()
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile


def test_division_is_expected_to_take_what_the_busiest_rank_takes():
    """Products by groups alone take time, a second each: by experts, the part of the busiest."""
    job = job_of(Skewed, floats(12, D))
    step = capture(job)
    made = division(step, 2, FAST)
    products = dict(ends_by_product(step.graph))
    op_s = [float(at in products) for at in range(len(step.fx_nodes))]
    loads = routing.expert_loads(step, job)
    by_ends = {load.ends: load for load in loads}
    speed = RankSpeed(link_bytes_per_s=inf, latency_s=0.0, op_s=op_s)
    layout = Placing(step, 2, speed, spread=made.spread).layout(made.held)
    expected, alike = 0.0, 0.0
    for at, ends in products.items():
        is_divided = layout.choices[step.fx_nodes[at]].several is not None
        expected += by_ends[ends].busiest_part(2) if is_divided else 1.0
        alike += 0.5 if is_divided else 1.0
    assert alike < expected < len(products)
    known = expected_s(step, made, op_s, lambda size: 0.0, ranks=2, loads=loads)
    assert known == pytest.approx(expected, rel=1e-6)
    unknown = expected_s(step, made, op_s, lambda size: 0.0, ranks=2)
    assert unknown == pytest.approx(alike, rel=1e-6)


def test_words_say_how_unlike_ranks_are():
    job = job_of(lambda: Skewed(9.0), floats(12, D))
    made = division(capture(job), 2, FAST).capture
    assert OWN_ROWS in {node.target for node in made.graph.nodes}
    words = division_in_words(Joining(1, job, made, (profile_of(job, made),)))
    told = "the rank whose experts see most has 24 rows of a layer where the mean is 12"
    assert f"{told} (up to 2.00 times; 4 micro-batches)" in words
