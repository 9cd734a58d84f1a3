"""Ranks that divide the ops of stages make the plain loop's steps: on threads and in processes."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from penstock.choose.prepare import joined_step
from penstock.errors import PlanError
from penstock.graph.tensor import choose_slices
from penstock.graph.tensor.choose_slices import by_tensor, held_by
from penstock.graph.tensor.collect_op import COLLECT
from penstock.graph.tensor.cuts import apart_only, collect_points
from penstock.graph.tensor.placed import Placing, RankSpeed
from penstock.graph.trace import capture
from penstock.listener import SILENT
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.plan.plan import Plan, divided, plan_by_hand
from penstock.prove.prove import Planned, prove
from penstock.runtime.collects import own_capture
from penstock.runtime.launch import run_processes, run_threads
from penstock.runtime.rank import Rank
from penstock.schedule.recipe import is_woven
from penstock.search.balance import StageEnds, balanced_cuts
from tests.graph.zoo import JOBS, job_of

FREE = RankSpeed(latency_s=0.0, link_bytes_per_s=1e11)


def planned(name, tensor=2, **options):
    return planned_of(JOBS[name], tensor, FREE, **options)


def planned_of(  # noqa: PLR0913 - of a plan
    job,
    tensor,
    prices,
    *,
    stages=1,
    replicas=1,
    schedule="one_f_one_b",
    recompute=False,
    woven=False,
):
    job = replace(job, micro_batches=4, clip_norm=0.05, optimizer=adam)
    made = by_tensor(capture(job), tensor, prices)
    graph = made.graph
    flop = [float(node.flop) for node in graph.nodes]
    cuts = balanced_cuts(graph, flop, stages, StageEnds(frozenset(), apart_only(graph)))
    options = {"recompute": (recompute,) * stages, "clip": True, "replicas": replicas}
    plan = plan_by_hand(graph, cuts, schedule, num_micro_batches=4 // replicas, **options)
    plan = divided(plan, graph, collect_points(graph))
    return Planned(job, made, plan.refined(graph, "woven") if woven else plan)


def adam(weights):
    return torch.optim.AdamW(weights, lr=0.01)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("transformer", {}),
        ("dropout", {"tensor": 4, "replicas": 2}),
        ("tied", {"stages": 2}),
        ("embeddings", {"recompute": True}),
        ("blocks", {"stages": 2, "schedule": "zb_h1"}),
        ("batch_norm", {"replicas": 2}),
        ("transformer", {"schedule": "gpipe", "woven": True}),
        ("dropout", {"tensor": 4, "replicas": 2, "woven": True}),
        ("tied", {"schedule": "zb_h1", "woven": True}),
        ("embeddings", {"recompute": True, "woven": True}),
        ("batch_norm", {"replicas": 2, "woven": True}),
    ],
)
@pytest.mark.sampled(2)
def test_steps_of_ranks_that_divide_ops_are_those_of_the_plain_loop(name, options):
    proof = prove(planned(name, **options), (0, 5), launcher=run_threads)
    assert not proof.problem


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("blocks", {"stages": 2}),
        ("blocks", {"recompute": True}),
        ("tied", {"replicas": 2}),
        ("blocks", {"tensor": 4}),
    ],
)
@pytest.mark.sampled(2)
def test_steps_with_sums_by_tokens_are_those_of_the_plain_loop(monkeypatch, name, options):
    monkeypatch.setattr(choose_slices, "layouts_of", spread_only)
    made = planned(name, **options)
    hows = {node.args[1] for node in made.captured.fx_nodes if node.target is COLLECT}
    assert "scatter" in hows
    assert not prove(made, (0, 5), launcher=run_threads).problem


def spread_only(placing, groups, picked):
    other = Placing(placing.capture, placing.ranks, placing.prices, spread=True)
    return [other.layout(held_by(groups, picked))]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("transformer", {}),
        ("attention_dropout", {}),
        ("tied", {"replicas": 2}),
        ("rotary", {}),
    ],
)
@pytest.mark.sampled(2)
def test_halves_of_a_micro_batch_are_woven_too(name, options):
    parts, replicas = 2, options.get("replicas", 1)
    job = replace(JOBS[name], micro_batches=replicas, clip_norm=0.05, optimizer=adam)
    _, halved = joined_step(job, capture(job), Fraction(1, parts), (), SILENT)
    made = by_tensor(halved, 2, FREE)
    options = {"num_micro_batches": parts, "replicas": replicas, "clip": True}
    bare = plan_by_hand(made.graph, [], "gpipe", **options).changed(joined=Fraction(1, parts))
    plan = divided(bare, made.graph, collect_points(made.graph)).refined(made.graph, "woven")
    assert not prove(Planned(job, made, plan), (0, 5), launcher=run_threads).problem


def test_woven_units_collect_beside_computes():
    made = planned("transformer", schedule="gpipe", woven=True)
    program, waits = lower_plan(made.plan, made.captured.graph), Counter[str]()

    def work(end, tell):
        own = own_capture(made.captured, program, end.rank)
        rank = Rank(own, stages_of(made.plan, made.captured.graph), made.job, end)
        if end.rank == 0:
            waits.update(call.lane for call in rank.bind(program) if call.kind == "collect")

    run_threads(work, 2, lambda step: None)
    assert waits["begin"] == waits["collective"] > 0
    plain = planned("transformer", schedule="gpipe")
    assert not is_woven(plain.plan.schedule)
    with pytest.raises(PlanError, match="those of a replica are of 2 ranks"):
        planned("blocks", stages=2, woven=True)
    whole = capture(JOBS["blocks"]).graph
    with pytest.raises(PlanError, match="no ranks divide ops or tokens"):
        plan_by_hand(whole, [], "gpipe", num_micro_batches=2).refined(whole, "woven")


@pytest.mark.parametrize("spreads", [False, True])
def test_in_processes_too(monkeypatch, spreads):
    if spreads:
        monkeypatch.setattr(choose_slices, "layouts_of", spread_only)
    proof = prove(planned("blocks"), (0,), launcher=run_processes)
    assert not proof.problem


class Forked(nn.Module):
    """The gradient of what the head reads goes two ways on, as two views of it."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
        self.layer = nn.Linear(32, 32)

    def forward(self, words):
        x = self.table(words)
        return self.head(x + self.layer(x))


def test_views_of_one_value_are_summed_once_each():
    job = job_of(Forked, lambda drawn: torch.randint(64, (2, 8), generator=drawn), of_words)
    job = replace(job, micro_batches=2, optimizer=adam)
    made = by_tensor(capture(job), 2, RankSpeed(latency_s=3e-5, link_bytes_per_s=1e9))
    plan = plan_by_hand(made.graph, [], "one_f_one_b", num_micro_batches=2)
    plan = divided(plan, made.graph, collect_points(made.graph))
    proof = prove(Planned(job, made, plan), (0,), launcher=run_threads)
    assert not proof.problem


def of_words(model, words):
    return cross_entropy(model(words).flatten(0, 1), words.flatten())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shard": ("shard",) * 21, "replicas": 2}, "with stages in shards"),
        ({"offload": ("state",) * 21}, "with far memory"),
        ({"compiled": True}, "with compiled ops"),
        ({"commits": True}, "with steps that ranks commit"),
        ({"post_validation": True}, "with updates that may be undone"),
        ({"sums": "bfloat16"}, "with sums in fewer bits"),
    ],
)
@pytest.mark.sampled(2)
def test_what_goes_with_no_divided_ops_is_refused(change, words):
    plan = planned("blocks").plan
    assert plan.num_stages == 21
    with pytest.raises(PlanError, match=f"ops divided among 2 ranks, {words}"):
        plan.changed(**change)


def test_a_plan_says_how_many_ranks_divide_ops(tmp_path):
    found = planned("blocks")
    found.plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == found.plan
    assert found.plan.total_ranks == 2
    assert "ops of each stage divided among 2" in str(found.plan)
    with pytest.raises(PlanError, match="divides ops among 2 ranks, the graph 1"):
        divided(found.plan, capture(found.job).graph, ())
    whole = plan_by_hand(found.captured.graph, [], "gpipe", num_micro_batches=4)
    with pytest.raises(PlanError, match=r"does not cut .*, where ranks collect"):
        lower_plan(whole, found.captured.graph)
