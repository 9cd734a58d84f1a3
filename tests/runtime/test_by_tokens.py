"""Ranks that divide tokens make the plain loop's steps: on threads and in processes."""

from dataclasses import replace

import pytest
import torch

from penstock.errors import PlanError
from penstock.graph.tensor.by_tokens import by_tokens
from penstock.graph.tensor.cuts import apart_only, collect_points
from penstock.graph.trace import capture
from penstock.plan.lower_plan import lower_plan
from penstock.plan.plan import Plan, divided, plan_by_hand
from penstock.program.program import Program
from penstock.program.reductions import Sum
from penstock.prove.prove import Planned, prove
from penstock.runtime.launch import run_processes, run_threads
from penstock.search.balance import StageEnds, balanced_cuts
from tests.graph.tensor import test_by_tokens


def planned(ranks=2, *, how="causal", stages=1, replicas=1, schedule="one_f_one_b", **options):
    given = test_by_tokens.job(tokens=16, how=how, dropout=options.pop("dropout", 0.0))
    job = replace(given, micro_batches=4, clip_norm=0.05, optimizer=adam)
    made = by_tokens(capture(job), ranks)
    graph = made.graph
    flop = [float(node.flop) for node in graph.nodes]
    cuts = balanced_cuts(graph, flop, stages, StageEnds(frozenset(), apart_only(graph)))
    options |= {"clip": True, "replicas": replicas, "num_micro_batches": 4 // replicas}
    plan = plan_by_hand(graph, cuts, schedule, **options)
    return Planned(job, made, divided(plan, graph, collect_points(graph)))


def adam(weights):
    return torch.optim.AdamW(weights, lr=0.01)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"how": "eager"},
        {"how": "tied", "stages": 2},
        {"dropout": 0.2},
        {"ranks": 4},
        {"replicas": 2},
        {"stages": 2, "schedule": "zb_h1"},
        {"recompute": (True,)},
    ],
)
@pytest.mark.sampled(2)
def test_steps_of_ranks_that_divide_tokens_are_those_of_the_plain_loop(options):
    proof = prove(planned(**options), (0, 5), launcher=run_threads)
    assert not proof.problem


def test_in_processes_too():
    assert not prove(planned(), (0,), launcher=run_processes).problem


def test_gradients_are_summed_over_all_ranks_that_have_the_weights(tmp_path):
    made = planned(replicas=2, stages=2)
    program = lower_plan(made.plan, made.captured.graph)
    rows = [one for one in program.code.reductions if isinstance(one, Sum)]
    assert {one.ranks for one in rows if one.how == "replicas"} == {(0, 2, 4, 6), (1, 3, 5, 7)}
    for rank in range(8):
        words = [type(each).__name__ for each in program.code[rank]]
        assert "Sum" not in words[: len(words) - words[::-1].index("Collect")]
    assert "context 2" in str(program)
    program.save(tmp_path / "program.json")
    assert Program.load(tmp_path / "program.json") == program


def test_a_plan_says_that_tokens_are_divided(tmp_path):
    made = planned()
    made.plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made.plan
    assert "tokens of each sequence divided among 2" in str(made.plan)
    with pytest.raises(PlanError, match="divides tokens among 2 ranks, the graph 1"):
        divided(made.plan, capture(made.job).graph, ())
    with pytest.raises(PlanError, match="tokens divided among 2 ranks, with compiled ops"):
        made.plan.changed(compiled=True)
    with pytest.raises(PlanError, match="tokens are to be divided, among 1 rank"):
        made.plan.changed(tensor=1)
