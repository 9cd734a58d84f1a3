"""Replicas that take unlike numbers of micro-batches train the plain loop."""

import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.plan import plan_by_hand
from penstock.plan.lower_plan import lower_plan
from penstock.runtime.launch import run_processes
from penstock.schedule import one_f_one_b
from penstock.schedule.dapple import turns_of
from tests.draws import examples
from tests.parity.models import captured, job_of, plain_loop, plan_of
from tests.parity.training import Run, difference, train

EXACT = torch.float64


def run_of(name: str, schedule: str, stages: int, shares: tuple[int, ...], **options) -> Run:
    made = captured(name, EXACT)
    more = {"replicas": len(shares), "shares": shares, **options}
    plan = plan_of(made.graph, schedule, stages, max(shares), **more)
    return Run(plan, job_of(name, EXACT, "adamw", clip_norm=0.05), made)


@pytest.mark.parametrize(
    ("name", "schedule", "stages", "shares"),
    [
        ("dropout", "one_f_one_b", 2, (3, 1)),
        ("tied", "zb_h1", 2, (1, 3)),
        ("batch_norm", "gpipe", 1, (1, 3, 2)),
        ("dropout", "interleaved", 4, (4, 2)),
        ("tied", "chimera", 2, (2, 4)),
    ],
)
@pytest.mark.sampled(2)
def test_unlike_shares_train_the_plain_loop(name, schedule, stages, shares, tmp_path):
    run = run_of(name, schedule, stages, shares, clip=True)
    outcome, trained = train(run, tmp_path), plain_loop(run.job, 3, sum(shares))
    assert difference(outcome.weights, trained.weights) < 1e-11
    assert [step.loss for step in outcome.steps] == pytest.approx(trained.losses, rel=1e-14)
    places = [
        row.micro_batch for row in outcome.timeline.spans if row.kind == "F" and not row.stage
    ]
    assert len(places) % sum(shares) == 0


@pytest.mark.parametrize(
    ("name", "ranks", "shares"),
    [("tied", "2+1-1", (5,)), ("batch_norm", "1-3", (4,)), ("dropout", "2-1-1", (4, 2))],
)
def test_stages_on_unlike_numbers_of_ranks_train_the_plain_loop(name, ranks, shares, tmp_path):
    turns = turns_of(ranks)
    own = {"num_ranks": sum(map(len, turns)), "clip": True}
    run = run_of(name, f"dapple(ranks={ranks})", len(turns), shares, **own)
    outcome, trained = train(run, tmp_path), plain_loop(run.job, 3, sum(shares))
    assert difference(outcome.weights, trained.weights) < 1e-11
    assert [step.loss for step in outcome.steps] == pytest.approx(trained.losses, rel=1e-14)


@st.composite
def divisions(draw):
    """Return shares and parts of two or three replicas, and how their stages follow each other."""
    shares = tuple(draw(st.lists(st.integers(1, 3), min_size=2, max_size=3)))
    parts = st.lists(st.integers(0, 4), min_size=len(shares), max_size=len(shares))
    way = draw(st.sampled_from(["one_f_one_b", "gpipe / units 3", "one_f_one_b / units 3"]))
    return shares, tuple(draw(parts.filter(any))), way, draw(st.sampled_from([0, 1]))


@examples(4)
@given(divisions())
@example(((3, 1), (1, 3), "one_f_one_b / units 3", 0))  # gathers along, and has most
def test_any_shares_and_any_parts_train_the_plain_loop(division):
    shares, parts, way, prefetch = division
    stages = 3 if "units" in way else 1
    run = run_of("tied", way, stages, shares, clip=True, num_ranks=1)
    plan = run.plan.changed(shard=("shard",) * stages, parts=parts, prefetch=prefetch)
    with tempfile.TemporaryDirectory() as folder:
        outcome = train(run._replace(plan=plan), Path(folder))
    trained = plain(sum(shares))
    assert difference(outcome.weights, trained.weights) < 1e-11
    assert [step.loss for step in outcome.steps] == pytest.approx(trained.losses, rel=1e-14)


@cache
def plain(micro_batches):
    return plain_loop(job_of("tied", EXACT, "adamw", clip_norm=0.05), 3, micro_batches)


def test_processes_with_unlike_shares_train_the_plain_loop(tmp_path):
    run = run_of("batch_norm", "one_f_one_b", 1, (1, 3), clip=True)
    outcome = train(run, tmp_path, launcher=run_processes)
    assert difference(outcome.weights, plain_loop(run.job, 3, 4).weights) < 1e-11


def test_program_runs_what_the_shares_say():
    made = captured("dropout", EXACT)
    program = lower_plan(run_of("dropout", "one_f_one_b", 2, (3, 1)).plan, made.graph)
    assert (program.shares, program.grid.step_micro_batches, program.replicas) == ((3, 1), 4, 2)
    ran = [
        sum(str(one).startswith("F") and "r" not in str(one) for one in code)
        for code in program.code
    ]
    assert ran == [3, 3, 1, 1]


@pytest.mark.parametrize(
    ("schedule", "more", "words"),
    [
        ("one_f_one_b", {"shares": (3, 0)}, "shares are 3 [+] 0, for 2 replicas"),
        ("one_f_one_b", {"shares": (3,)}, "shares are 3, for 2 replicas"),
        ("one_f_one_b", {"shares": (2, 1)}, "shares are 2 [+] 1, not 3"),
        ("double_buffered", {"shares": (3, 1)}, "shares are 3 [+] 1, by double_buffered"),
        (one_f_one_b(2, 3), {"shares": (3, 1)}, "shares are 3 [+] 1, by one_f_one_b"),
    ],
)
def test_shares_that_cannot_be_are_refused(schedule, more, words):
    graph = captured("dropout", EXACT).graph
    plan = plan_by_hand(graph, [1], schedule, num_micro_batches=3, replicas=2)
    with pytest.raises(PlanError, match=words):
        plan.changed(**more)
    assert plan.changed(shares=(3, 3)) == plan
