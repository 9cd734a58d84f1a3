"""A plan whose stages are cut into units trains to the bits of the plan that it is made of."""

import itertools
from collections.abc import Iterator

import pytest
import torch

from penstock.plan import Plan
from penstock.runtime.launch import run_processes
from penstock.runtime.run import Outcome
from penstock.schedule import Schedule, refine
from penstock.schedule.asynchronous import ASYNCHRONOUS
from tests.parity.models import TRAINING, captured, job_of, plain_loop, plan_of
from tests.parity.training import Run, difference, differing, train

FLOAT = torch.float32
LATE = {builder.__name__ for builder in ASYNCHRONOUS} | {"double_buffered"}
IN_A_V = "interleaved", "zb_v", "dual_pipe_v", "v_half", "v_min", "found"
MODELS = "gpt", "dropout", "tied", "batch_norm", "frozen", "frozen_start"
OPTIONS = ({}, {"recompute": True}, {"clip": True}, {"replicas": 2}, {"post_validation": True})


def cases() -> Iterator[tuple[str, str, dict[str, object]]]:
    """Yield every schedule, every model and every option, with many pairs of them."""
    rows = zip(TRAINING, itertools.cycle(MODELS), itertools.cycle(OPTIONS), strict=False)
    for schedule, model, options in rows:
        late = schedule in LATE
        if "post_validation" in options or (late and "recompute" in options):
            options = {"clip": True, "post_validation": not late}
        yield schedule, model, options


def trained(plan: Plan, model: str, folder, launcher=None) -> Outcome:
    job = job_of(model, FLOAT, "adamw", clip_norm=0.3 if plan.agreement.clip else None)
    how = {} if launcher is None else {"launcher": launcher}
    return train(Run(plan, job, captured(model, FLOAT)), folder, (3,), **how)


def losses(outcome: Outcome) -> list[float | None]:
    return [step.loss for step in outcome.steps]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("schedule", "model", "options"), [*cases()])
def test_units_train_to_the_bits_of_the_stages(schedule, model, options, tmp_path):
    stages = 4 if schedule in IN_A_V else 2
    options = {**options, "recompute": (True,) * stages} if "recompute" in options else options
    plan = plan_of(captured(model, FLOAT).graph, schedule, stages, 3, **options)
    cut = plan.refined(captured(model, FLOAT).graph)
    assert cut.num_stages > plan.num_stages
    assert cut.num_ranks == plan.num_ranks
    own, found = trained(plan, model, tmp_path / "own"), trained(cut, model, tmp_path / "cut")
    assert losses(found) == losses(own)
    assert differing(found.weights, own.weights) == []


def test_blocks_on_one_rank_train_the_plain_loop(tmp_path):
    """The chain that fully sharded data parallelism needs, its blocks in processes, too."""
    graph = captured("dropout", FLOAT).graph
    cut = plan_of(graph, "gpipe", 1, 3, replicas=1).refined(graph)
    assert cut.cut_names == (*(f"after blocks.{k}" for k in range(7)), "after blocks")
    assert cut.num_ranks == 1
    outcome = trained(cut, "dropout", tmp_path / "one")
    expected = plain_loop(job_of("dropout", FLOAT, "adamw"), 3, 3)
    assert differing(outcome.weights, expected.weights) == []
    assert losses(outcome) == expected.losses
    copies = plan_of(graph, "gpipe", 1, 3, replicas=2)
    pair = [copies, copies.refined(graph, 3)]
    first, second = (
        trained(plan, "dropout", tmp_path / str(plan.num_stages), run_processes) for plan in pair
    )
    assert differing(second.weights, first.weights) == []


def test_written_schedule_is_refined_in_its_plan(tmp_path):
    graph = captured("gpt", FLOAT).graph
    mine = Schedule.parse("rank 0  F0.1 F0.0 B0.1 B0.0\nrank 1  F1.1 B1.1 F1.0 B1.0")
    plan = plan_of(graph, mine, 2, 2)
    cut = plan.refined(graph)
    units = [sum(cut <= plan.cuts[0] for cut in cut.cuts)]
    assert cut.schedule == refine(mine, [*units, cut.num_stages - sum(units)])
    own, found = trained(plan, "gpt", tmp_path / "own"), trained(cut, "gpt", tmp_path / "cut")
    assert differing(found.weights, own.weights) == []


@pytest.mark.parametrize(("schedule", "same"), [("pipedream", True), ("timeprest", False)])
def test_unit_repeats_forward_from_what_it_was_handed(schedule, same, tmp_path):
    """A stage repeats all of it with the weights that B reads: not those of F by every rule."""
    graph = captured("gpt", FLOAT).graph
    plan = plan_of(graph, schedule, 2, 1, recompute=(True, True))
    runs = [(plan, "own"), (plan.refined(graph), "cut")]
    own, found = (trained(each, "gpt", tmp_path / name) for each, name in runs)
    assert (differing(found.weights, own.weights) == []) == same
    assert losses(found)[0] == losses(own)[0]


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_tied_matrix_used_in_two_units_of_a_stage_is_summed_by_unit(micro_batches, tmp_path):
    """A stage adds up both uses of each micro-batch; units add up all of one, then of the other."""
    graph = captured("tied", FLOAT).graph
    plan = plan_of(graph, "gpipe", 1, micro_batches)
    own = trained(plan, "tied", tmp_path / "own")
    found = trained(plan.refined(graph), "tied", tmp_path / "cut")
    if micro_batches == 1:
        assert differing(found.weights, own.weights) == []
    else:
        assert losses(found)[0] == losses(own)[0]
        assert difference(found.weights, own.weights) < 1e-5
