"""Predictions beside measurements: which plans there are, what rows and figures say of them."""

from dataclasses import replace

import pytest

from bench.play import Block, Played, Rounds, Traced, play
from bench.predict import Case, Model, agreement, cases, plans, regret, rows_of, summary_of, table
from bench.zoo import JOBS
from penstock.cluster import Cluster
from penstock.graph.trace import capture
from penstock.plan import plan_by_hand
from penstock.profile import Profile
from penstock.program.passes.receive_early import EARLY
from penstock.transport.threads import thread_transports
from tests.search.chains import costless, with_costs


@pytest.fixture(scope="module")
def uneven() -> tuple[Traced, Profile]:
    job = JOBS["uneven"]
    captured = capture(job)
    nodes = captured.graph.nodes
    op_s = tuple(1e-4 if node.kind == "op" else 0.0 for node in nodes)
    rates = {
        "accumulate_s_per_byte": 1e-10,
        "update_s_per_byte": 1e-10,
        "state_bytes_per_byte": 2.0,
    }
    profile = with_costs(costless(captured.graph.digest, op_s, beside=1), **rates)
    return Traced(job, captured), profile


def test_there_are_twenty_plans_and_more_each_another(uneven):
    traced, profile = uneven
    found = dict(plans(traced, profile))
    assert len(found) >= 20
    assert len(set(found.values())) == len(found)
    assert {plan.total_ranks for plan in found.values()} == {2}
    shared = [plan for plan in found.values() if plan.num_stages > 2]
    assert len(shared) >= 3
    assert any(any(plan.recompute) for plan in found.values())
    assert any(plan.replicas == 2 for plan in found.values())
    assert dict(plans(traced, profile)) == found


def test_plan_that_is_searched_is_among_the_cases_and_predicted_best(uneven):
    traced, profile = uneven
    found = cases(Model({1: traced}, {1: profile}), Cluster.here(2))
    (searched,) = [case for case in found if case.searched]
    assert searched.predicted_s == min(case.predicted_s for case in found)


def test_plans_for_two_hosts_post_receives_early_as_those_of_a_run_do(uneven):
    """gloo moves a message only once its receive is posted: a step over a line is far longer."""
    traced, profile = uneven
    here = Cluster.here(2)
    hosts = tuple(replace(here.hosts[0], name=name, num_devices=1) for name in "ab")
    apart = replace(here, hosts=hosts, between=here.inside)
    model = Model({1: traced}, {1: profile})
    assert {case.plan.overlap.early for case in cases(model, apart)} == {EARLY}
    assert {case.plan.overlap.early for case in cases(model, here)} == {0}


def case(name: str, predicted_s: float, *, searched: bool = False) -> Case:
    plan = plan_by_hand(capture_once().graph, (), "one_f_one_b", num_micro_batches=8)
    return Case(name, plan, predicted_s, (100, 90), searched)


def capture_once():
    if not _KEPT:
        _KEPT.append(capture(JOBS["uneven"]))
    return _KEPT[0]


_KEPT: list = []


def test_rows_and_summary_say_by_how_much_predictions_are_off():
    found = [case("a", 1.1), case("b", 2.0, searched=True), case("c", 2.7)]
    blocks = [[(1.0, 0.0), (3.0, 0.5), (0.9, 0.1)], [(2.0, 0.0)], [(3.0, 0.0)]]
    played = [Played([Block(*each) for each in row], 80) for row in blocks]
    rows = rows_of("model", found, played)
    first = rows[0]
    assert (first["case"], first["measured_s"], first["low_s"], first["high_s"]) == (
        "model: a",
        1.0,
        0.9,
        3.0,
    )
    assert first["error"] == pytest.approx(0.1)
    assert (first["bytes_error"], first["other"]) == (0.25, 0.1)
    assert regret(rows) == 1.0
    assert agreement(rows) == 1.0
    rows[2]["predicted_s"] = 1.0
    assert agreement(rows) == pytest.approx(1 / 3)
    summary = summary_of(rows)
    assert summary["models"]["model"]["plans"] == 3
    assert summary["median_bytes_error"] == 0.25
    stars = [line[0] for line in table(rows).splitlines()]
    assert stars == [" ", "*", " "]


@pytest.mark.long
def test_plans_play_by_turns_and_every_block_has_a_time(uneven):
    traced, _ = uneven
    alone = plan_by_hand(traced.captured.graph, (), "one_f_one_b", num_micro_batches=8)
    ends = iter([thread_transports(1)[0], thread_transports(1)[0]])
    rounds = Rounds(turns=2, block_s=0.0, least=1)
    played = play({1: traced}, [alone, alone], lambda number: next(ends), rounds)
    assert [len(each.blocks) for each in played] == [2, 2]
    assert all(block.step_s > 0 for each in played for block in each.blocks)
    weights = sum(p.numel() * 4 for p in traced.captured.model.parameters())
    assert all(each.peak_bytes > 4 * weights for each in played)  # Adam's two, and the gradient
