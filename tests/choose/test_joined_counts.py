"""How micro-batches may be joined or divided, and what a search makes of it."""

import itertools
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from penstock.choose.choose import Machines, SearchAim, best, for_plan, was_brief
from penstock.choose.joined_counts import in_words, ways_to_divide, ways_to_fit, ways_to_weave
from penstock.cluster import Cluster
from penstock.errors import MemoryShortError
from penstock.graph.merge import merged
from penstock.graph.trace import Capture, capture
from penstock.job import Job
from penstock.listener import SILENT
from penstock.plan import Plan, plan_by_hand
from penstock.profile.measure import measure
from penstock.prove.prove import Planned, prove
from penstock.search import Fixed, search

HALF, QUARTER = Fraction(1, 2), Fraction(1, 4)


def job_of(norm=nn.Identity, micro_batches=1, **more) -> Job:
    def model():
        hidden = nn.Sequential(nn.Linear(8, 32), norm(32), nn.ReLU(), nn.Dropout(0.3))
        return nn.Sequential(hidden, nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 5))

    def data(start):
        for number in itertools.count(start):
            generator = torch.Generator().manual_seed(number)
            labels = torch.randint(5, (8,), generator=generator)
            labels[torch.rand(8, generator=generator) < 0.4] = -100
            yield torch.randn(8, 8, generator=generator), labels

    return Job(
        model=model,
        loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]),
        data=data,
        optimizer=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        micro_batches=micro_batches,
        **more,
    )


def machines(ranks: int, memory: int | None = None) -> Machines:
    def profiled(captured, job, cluster, listener):
        return (replace(measure(captured, job), kind=""),)

    cluster = Cluster.here(ranks)
    return Machines(cluster if memory is None else cluster.within(memory), profiled)


def divided(job: Job, parts: int) -> tuple[Job, Capture]:
    from penstock.choose.prepare import joined_step

    return joined_step(job, capture(job), Fraction(1, parts), (), SILENT)


@pytest.mark.parametrize(
    ("micro_batches", "samples", "ranks", "ways"),
    [
        (1, 64, 2, [HALF, Fraction(1, 8)]),
        (1, 64, 4, [QUARTER, Fraction(1, 16)]),
        (2, 64, 2, [HALF, QUARTER]),
        (4, 64, 2, []),
        (8, 64, 3, []),
        (1, 60, 4, [QUARTER, Fraction(1, 20)]),
        (1, 6, 4, [Fraction(1, 6)]),
        (1, 7, 2, [Fraction(1, 7)]),
        (1, 17, 2, []),
        (1, 1, 8, []),
        (1, 64, 1, []),
    ],
)
def test_micro_batches_are_divided_where_there_are_few(micro_batches, samples, ranks, ways):
    assert ways_to_divide(job_of(micro_batches=micro_batches), Fixed(), samples, ranks) == ways


@pytest.mark.parametrize(
    ("micro_batches", "samples", "replicas", "ways"),
    [(1, 8, 1, [HALF]), (1, 7, 1, []), (2, 8, 1, []), (1, 8, 2, [QUARTER]), (3, 8, 2, [])],
)
def test_each_replica_gets_two_parts_to_weave(micro_batches, samples, replicas, ways):
    job = job_of(micro_batches=micro_batches)
    assert ways_to_weave(job, Fixed(tensor=2), samples, replicas) == ways
    late = Fixed(tensor=2, schedule="pipedream")
    assert ways_to_weave(job, late, samples, replicas) == []


def test_what_takes_whole_micro_batches_only_is_not_divided():
    for job, fixed in (
        (job_of(sums="bfloat16"), Fixed()),
        (job_of(batch_by_ranks=True), Fixed()),
        (job_of(), Fixed(schedule="double_buffered")),
    ):
        assert ways_to_divide(job, fixed, 64, 4) == ways_to_fit(job, fixed, 64) == []


def test_words_say_what_a_micro_batch_is():
    words = ["none joined", "3 of the job's joined", "each of the job's in 2 parts"]
    assert [*map(in_words, (1, 3, HALF))] == words


@pytest.mark.parametrize(
    ("schedule", "stages", "parts", "replicas"),
    [
        ("one_f_one_b", 1, 2, 2),
        ("gpipe", 2, 4, 1),
        ("zb_h1", 2, 4, 1),
        ("one_f_one_b", 2, 4, 2),
        ("one_f_one_b", 1, 4, 1),
    ],
)
def test_plan_of_parts_makes_the_step_of_the_whole(schedule, stages, parts, replicas):
    job = job_of(micro_batches=2, clip_norm=0.5)
    _, made = divided(job, parts)
    count = 2 * parts // replicas
    plan = plan_by_hand(
        made.graph, [*range(stages - 1)], schedule, num_micro_batches=count, replicas=replicas
    )
    plan = plan.changed(joined=Fraction(1, parts), clip=True)
    proof = prove(Planned(job, made, plan), (0, 5))
    assert proof.problem == ""
    assert {d.what for d in proof.differences} >= {"data", "loss", "gradients", "update"}
    own, again = for_plan(job, Plan.from_text(json_of(plan)), capture(job), SILENT)
    assert (own.micro_batches, again.graph.digest) == (2 * parts, made.graph.digest)


def json_of(plan: Plan) -> str:
    import json

    return json.dumps(plan.to_json())


def test_part_with_other_seeds_than_its_micro_batch_is_noticed(monkeypatch):
    from penstock.runtime import rank

    job = job_of(micro_batches=2)
    _, made = divided(job, 2)
    plan = plan_by_hand(made.graph, [], "gpipe", num_micro_batches=4)
    monkeypatch.setattr(rank, "number_of", lambda job, index: index)
    assert "gradient" in prove(Planned(job, made, plan.changed(joined=HALF)), (0,)).problem


def test_replicas_share_the_one_micro_batch_of_a_loop_over_a_loader():
    job = job_of()
    found = best(job, Fixed(ranks=2, replicas=2), capture(job), machines(2))
    assert found.choice.plan.terms.joined < 1
    assert found.choice.plan.job_micro_batches == 1
    assert found.choice.job.data(0).__next__()[0].shape[0] < 8
    why = next(d for d in found.choice.plan.decisions if d.what == "micro-batches")
    assert "each of the job's in" in why.value


def test_reason_says_what_keeps_a_micro_batch_whole():
    job = job_of(nn.BatchNorm1d)
    found = best(job, Fixed(ranks=2), capture(job), machines(2))
    assert found.choice.plan.terms.joined == 1
    why = next(d for d in found.choice.plan.decisions if d.what == "micro-batches")
    assert "native_batch_norm" in why.why


def test_micro_batch_that_does_not_fit_is_divided_on_one_rank(monkeypatch):
    job = job_of()
    for other in ("with_far", "with_moves"):  # far memory would do, too
        monkeypatch.setitem(search.__globals__, other, lambda *_, **__: ())

    def peak(step):
        plan = plan_by_hand(step[1].graph, [], "gpipe", num_micro_batches=step[0].micro_batches)
        from penstock.search import evaluate

        there = machines(1)
        profiles = there.profile(step[1], step[0], there.cluster, SILENT)
        return max(evaluate(step[1].graph, profiles, there.cluster, plan)[0].peak_bytes)

    whole, parts = peak((job, capture(job))), peak(divided(job, 2))
    assert parts < whole
    fixed = Fixed(ranks=1, recompute=False)
    found = best(job, fixed, capture(job), machines(1, (whole + parts) // 2))
    assert found.choice.plan.terms.joined < 1
    with pytest.raises(MemoryShortError):
        best(job, fixed, capture(job), machines(1, parts // 4))


def test_merged_job_is_the_same_where_nothing_is_joined():
    job = job_of()
    assert merged(job, 1) is job


def test_of_a_run_that_is_short_micro_batches_stay_as_they_are():
    plain = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    job = replace(
        job_of(micro_batches=4), model=lambda: plain, loss=lambda m, b: m(b[0]).square().mean()
    )
    captured, there = capture(job), machines(2)
    ways, words, plans = [], [], []
    for num_steps in (5, 10**9):
        found = best(job, Fixed(ranks=2), captured, there, SearchAim(num_steps=num_steps))
        ways.append({option.way.joined for option in found.options})
        words.append({each.what: each.why for each in found.choice.plan.decisions})
        plans.append(found.choice.plan)
    assert ways == [{1}, {1, 2, 4}]
    assert words[0]["micro-batches"] == "the run is short"
    assert words[0]["search"].startswith("5 steps take")
    assert "search" not in words[1]
    assert [was_brief(plan, steps) for plan in plans for steps in (5, 10**9)] == [0, 1, 0, 0]
