"""Degrees: a search rewrites a step for several ranks where that pays, and nowhere else."""

from dataclasses import replace
from functools import cache
from itertools import count

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from penstock.choose import degrees
from penstock.choose.choose import FASTEST, Machines, SearchAim, best, best_like
from penstock.cluster.cluster import Cluster, DeviceKind, Host, Link
from penstock.errors import PlanError
from penstock.graph.tensor.choose_slices import division
from penstock.graph.tensor.least import least_s
from penstock.graph.tensor.placed import Placing, RankSpeed
from penstock.graph.trace import capture
from penstock.job import Job
from penstock.plan import Plan
from penstock.plan.of_plan import lower
from penstock.profile.estimate import estimated
from penstock.program.program import Program
from penstock.search import Fixed, JobNeeds
from penstock.search.whole import whole_cuts, whole_stages
from penstock.units import MiB
from tests.graph.zoo import JOBS

WIDTH = 1024
FAST, SLOW = Link(1e-6, 50e9), Link(1e-3, 1e8)


def wide_job(samples: int = 7, optimizer=torch.optim.AdamW, micro_batches: int = 1) -> Job:
    """Return a job of wide layers and few samples: nothing but its ops can be divided well."""

    def make() -> nn.Module:
        wide = (m for _ in range(3) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU()))
        return nn.Sequential(nn.Linear(32, WIDTH), nn.ReLU(), *wide, nn.Linear(WIDTH, 8))

    def data(start: int):
        for number in count(start):
            drawn = torch.Generator().manual_seed(number)
            yield torch.randn(samples, 32, generator=drawn), torch.arange(samples) % 8

    def loss(model: nn.Module, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    return Job(make, loss, data, lambda p: optimizer(p, 1e-3), micro_batches=micro_batches)


def devices(link: Link, memory: int = 1 << 30, ranks: int = 2) -> Machines:
    kind = DeviceKind("small", memory, (("float32", 1e11),), 2e10)
    cluster = Cluster((kind,), (Host("host", "small", ranks),), inside=link)

    def profiled(captured, job, cluster, listener):
        return (estimated(captured.graph, kind, 2.0),)

    return Machines(cluster, profiled)


@cache
def found_on(link: Link, ranks: int = 2, tensor: int | None = None):
    job, there = wide_job(), devices(link, ranks=ranks)
    return best(job, Fixed(tensor=tensor), capture(job), there)


def reason_of(plan: Plan, what: str = "tensor"):
    return next((each for each in plan.decisions if each.what == what), None)


def test_ops_are_divided_where_that_is_the_fastest_and_the_plan_says_so():
    found = found_on(FAST)
    plan, whole = found.choice.plan, found_on(FAST, tensor=1).choice.plan
    assert (plan.tensor, whole.tensor) == (2, 1)
    assert plan.predicted.step_s < 0.95 * whole.predicted.step_s
    reason = reason_of(plan)
    assert (reason.value, reason.by) == ("2 ranks", "search")
    assert "undivided" in reason.why
    assert "parameters in slices" in reason.why
    assert any("undivided" not in row.what and row.ranks == 1 for row in plan.predicted.tried)
    program = lower(plan, found.choice.captured.graph)
    assert isinstance(program, Program)
    assert program.tensor == 2


def test_a_step_is_not_rewritten_where_its_collects_cost_more_than_they_save(monkeypatch):
    def never(*args):
        raise AssertionError("the step was rewritten")

    monkeypatch.setattr(degrees, "divided_or_why", never)
    job, there = wide_job(samples=509, micro_batches=2), devices(Link(1e-5, 2e9))
    plan = best(job, Fixed(tensor=None), capture(job), there).choice.plan
    assert (plan.tensor, plan.replicas) == (1, 2)
    assert reason_of(plan) is None


def test_as_many_ranks_divide_ops_as_are_asked_for():
    plan = found_on(SLOW, tensor=2).choice.plan
    assert plan.tensor == 2
    assert (reason_of(plan).by, reason_of(plan).value) == ("user", "2 ranks")


def test_ranks_that_divide_ops_are_searched_beside_replicas_and_stages():
    job, there = wide_job(samples=61, micro_batches=2), devices(FAST, ranks=4)
    plan = best(job, Fixed(ranks=4, tensor=2), capture(job), there).choice.plan
    assert (plan.tensor, plan.total_ranks) == (2, 4)
    assert plan.replicas * plan.num_ranks == 2
    fixed = Fixed(ranks=4, tensor=2, stages=2)
    deep = best(job, fixed, capture(job), there).choice.plan
    assert (deep.num_ranks, whole_stages(deep), len(whole_cuts(deep))) == (2, 2, 1)


def test_a_model_that_no_device_holds_is_divided():
    job, fixed = wide_job(), Fixed(ranks=2, replicas=1, stages=1, tensor=None)
    with pytest.raises(PlanError):  # one stage of one replica is on one rank
        best(job, replace(fixed, tensor=1), capture(job), devices(SLOW))
    peak = max(
        best(job, Fixed(ranks=1), capture(job), devices(SLOW)).choice.plan.predicted.peak_bytes
    )
    there = devices(SLOW, memory=int(0.7 * peak))
    found = best(job, fixed, capture(job), there)
    assert found.choice.plan.tensor == 2
    assert max(found.choice.plan.predicted.peak_bytes) < 0.7 * peak
    assert "no plan fits" in reason_of(found.choice.plan).why


def test_other_plans_than_the_divided_one_are_tried_beside_it():
    found = found_on(FAST)
    plain = best_like(found, Fixed(stages=1, tensor=None), devices(FAST))
    assert plain.plan.tensor == 1
    assert found.profiles_of(found.choice)[0].graph == found.choice.captured.graph.digest


def test_what_updates_a_weight_as_a_whole_stays_whole():
    job, there = wide_job(optimizer=torch.optim.Adafactor), devices(FAST)
    assert best(job, Fixed(tensor=None), capture(job), there).choice.plan.tensor == 1
    with pytest.raises(PlanError, match="not known to update each number by itself"):
        best(job, Fixed(tensor=2), capture(job), there)


@pytest.mark.parametrize(
    "fixed",
    [
        Fixed(offload="state"),
        Fixed(needs=JobNeeds(whole=True)),
        Fixed(needs=JobNeeds(buffers="per replica")),
        Fixed(tensor=1),
    ],
)
def test_nothing_is_divided_together_with_what_no_divided_plan_has(fixed):
    job, tensor = wide_job(), 1 if fixed == Fixed() else None
    plan = best(job, replace(fixed, tensor=tensor), capture(job), devices(FAST)).choice.plan
    assert plan.tensor == 1


def test_the_objective_memory_is_searched_without():
    job = wide_job()
    aim = SearchAim("memory")
    plan = best(job, Fixed(tensor=None), capture(job), devices(FAST), aim).choice.plan
    assert (plan.tensor, FASTEST.objective) == (1, "time")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["blocks", "embeddings", "group_norm"])
@pytest.mark.parametrize("latency_s", [0.0, 1e-6, 1e-3])
def test_no_division_takes_less_than_the_bound(name, latency_s):
    captured = capture(JOBS[name])
    op_s = tuple(
        1e-9 * node.size_bytes + 1e-10 * node.flop if node.kind == "op" else 0.0
        for node in captured.graph.nodes
    )
    rate = 1e9
    speed = RankSpeed(link_bytes_per_s=rate, latency_s=latency_s, op_s=op_s)
    held = division(captured, 2).held
    taken = Placing(captured, 2, speed).layout(held).seconds
    assert least_s(captured.graph, op_s, 2, lambda size: latency_s + size / rate) <= taken


def test_of_asked_flags_only_the_search_leaves_ops_whole():
    assert degrees.degree_asked(None, {"units": True}) == 1
    assert degrees.degree_asked(None, {"units": False}) is None
    assert degrees.degree_asked(2, {"units": None}) == 2
    with pytest.raises(PlanError, match="2 ranks are to divide the ops of stages"):
        degrees.degree_asked(2, {"units": True})


def test_a_model_within_little_memory_is_not_rewritten_for_ranks_that_are_not_there():
    job = wide_job()
    found = best(job, Fixed(ranks=1, tensor=None), capture(job), devices(FAST, memory=64 * MiB))
    assert found.choice.plan.total_ranks == 1
