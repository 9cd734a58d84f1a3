"""Plans of steps in slices train the plain loop, however they are placed, kept and summed."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from penstock.checkpoints import checkpoint
from penstock.checkpoints.checkpoint import latest
from penstock.errors import PlanError, RunError
from penstock.graph.split import split
from penstock.graph.trace import Capture
from penstock.job import Job
from penstock.plan import Plan, plan_by_hand
from penstock.prove.prove import Planned, prove
from penstock.schedule.recipe import any_schedule, built
from penstock.state.shards import updates_by_number
from tests.parity.models import captured, job_of, plain_loop
from tests.parity.training import Run, train

WIDE, STEPS = torch.float64, 3
SLICES = {"tied": {"embedding.weight": 3}, "gpt": {"embedding.weight": 2, "head.weight": 4}}
CLOSE = 1e-12  # in float64: sums over slices are made in another order


@cache
def sliced(name: str, dtype: torch.dtype = WIDE) -> Capture:
    made = captured(name, dtype)
    names = {n.name for n in made.graph.nodes if n.kind == "parameter"}
    known = {k: v for k, v in SLICES[name].items() if k in names}
    assert len(known) == len(SLICES[name]), sorted(names)
    return split(made, known)


def plan_of(made: Capture, schedule: str, cuts: list[int] | None = None, **more) -> Plan:
    cuts = list(range(len(made.graph.cut_points))) if cuts is None else cuts
    share = 4 // more.get("replicas", 1)
    ranks = (
        more.pop("num_ranks", None) or built(any_schedule(schedule), len(cuts) + 1, share).num_ranks
    )
    wide = {
        k: (v,) * (len(cuts) + 1) for k, v in more.items() if k in ("shard", "recompute", "offload")
    }
    return plan_by_hand(
        made.graph, cuts, schedule, num_micro_batches=share, num_ranks=ranks, **more | wide
    )


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    found = {k: v for k, v in found.items() if k.startswith(("weights/", "buffers/"))}
    assert found.keys() == expected.keys()
    return max(float((found[k] - v).abs().max()) for k, v in expected.items())


WAYS = [
    ("tied", "breadth_first", {"num_ranks": 1, "replicas": 2, "shard": "shard"}),
    ("tied", "breadth_first", {"num_ranks": 1, "replicas": 2, "shard": "shard_keep", "clip": True}),
    ("gpt", "breadth_first", {"num_ranks": 1, "replicas": 2, "recompute": True, "clip": True}),
    ("gpt", "breadth_first", {"num_ranks": 1, "offload": "weights"}),
    ("tied", "breadth_first", {"num_ranks": 1, "offload": "all", "recompute": True}),
    ("gpt", "one_f_one_b", {"cuts": [1, 4], "replicas": 2, "shard": "shard"}),  # inside the head
    ("tied", "zb_h1", {"cuts": [0, 3], "clip": True}),  # inside the embedding
    ("gpt", "gpipe", {"cuts": []}),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "schedule", "more"), WAYS)
def test_plans_in_slices_train_the_plain_loop(name, schedule, more, tmp_path):
    made, job = (
        sliced(name),
        job_of(name, WIDE, "adamw", clip_norm=0.05 if more.get("clip") else None),
    )
    job = replace(job, micro_batches=4)
    outcome = train(Run(plan_of(made, schedule, **more), job, made), tmp_path, (STEPS,))
    trained = plain_loop(job, STEPS, 4)
    assert apart(dict(outcome.weights), dict(trained.weights)) < CLOSE
    losses = [step.loss for step in outcome.steps]
    assert losses == pytest.approx(trained.losses, rel=CLOSE)


@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "NAdam"])
def test_gradients_updates_and_state_are_those_of_the_plain_loop(optimizer):
    kind = getattr(torch.optim, optimizer)
    more = {"initial_accumulator_value": 0.1} if optimizer == "Adagrad" else {}
    job = job_of("tied", WIDE, "sgd")
    job = replace(job, micro_batches=4, optimizer=lambda p: kind(p, lr=0.1, **more))
    plan = plan_of(sliced("tied"), "breadth_first", num_ranks=1, replicas=2, shard="shard")
    proof = prove(Planned(job, sliced("tied"), plan), (0, 2))
    assert not proof.problem
    assert max(row.value for row in proof.differences) < 1e-9


def test_what_slices_of_a_stage_keep_is_read_by_any_other_plan(tmp_path):
    """Weights and moments by name: of slices in shards on two replicas, then of one whole stage."""
    made, whole = sliced("tied"), captured("tied", WIDE)
    job = replace(job_of("tied", WIDE, "adamw"), micro_batches=4)
    shards = plan_of(made, "breadth_first", num_ranks=1, replicas=2, shard="shard")
    alone = plan_of(whole, "gpipe", [])
    train(Run(shards, job, made), tmp_path / "a", (2,))
    kept = checkpoint.load(latest(tmp_path / "a"))
    assert not [key for key in kept.tensors if "part " in key]
    assert kept.tensors["optimizer/embedding.weight/exp_avg"].shape == (
        kept.tensors["weights/embedding.weight"].shape
    )
    for run in (Run(alone, job, whole), Run(plan_of(made, "one_f_one_b", [0, 3]), job, made)):
        folder = tmp_path / f"b{run.plan.num_stages}"
        first = [(program, step + 2) for program, step in _windows(run, 1)]
        train(run, folder, (1,), windows=first, resume=latest(tmp_path / "a"))
        assert apart(dict(checkpoint.load(latest(folder)).tensors), _plain(job, 3)) < CLOSE


def _windows(run: Run, count: int):
    from tests.parity.training import windows

    return windows(run, (count,))


@cache
def _plain_of(job: Job, steps: int):
    return dict(plain_loop(job, steps, 4).weights)


def _plain(job: Job, steps: int) -> dict[str, Tensor]:
    return _plain_of(job, steps)


def test_numbers_that_are_rounded_on_their_way_are_those_of_the_sequential_definition():
    job = replace(job_of("gpt", torch.float32, "adamw"), micro_batches=4, wire_bits=8)
    made = sliced("gpt", torch.float32)
    plan = plan_of(made, "one_f_one_b", [1, 4]).changed(wire=job.fewest_bits)
    assert not prove(Planned(job, made, plan), (0,)).problem
    job = replace(job, wire_bits=None, sums="bfloat16")
    plan = plan_of(made, "breadth_first", num_ranks=1, replicas=2, shard="shard")
    assert not prove(Planned(job, made, plan.changed(sums="bfloat16")), (0,)).problem


def test_masters_of_slices_are_kept_in_float32():
    from penstock.graph.trace import capture

    job = replace(job_of("gpt", torch.float32, "adamw"), micro_batches=4, precision="bfloat16")
    made = split(capture(job), SLICES["gpt"])
    masters = [n for n in made.graph.masters if "head.weight" in n]
    assert len(masters) == 4
    plan = plan_of(made, "breadth_first", num_ranks=1, replicas=2, shard="shard")
    assert not prove(Planned(job, made, plan), (0, 2)).problem


def test_an_optimizer_that_looks_across_a_parameter_is_refused_by_name():
    job = replace(job_of("gpt", WIDE, "sgd"), micro_batches=4)
    job = replace(job, optimizer=lambda p: torch.optim.Adafactor(p, lr=0.1))
    made = sliced("gpt")
    message = "Adafactor, is not known to update each number by itself"
    with pytest.raises(RunError, match=message):
        train(Run(plan_of(made, "one_f_one_b", [1]), job, made), None, (1,))
    assert not updates_by_number(job, made.model)
    assert updates_by_number(job_of("gpt", WIDE, "adamw"), made.model)


def test_a_schedule_that_reads_older_weights_is_refused_slices():
    made = sliced("gpt")
    with pytest.raises(
        PlanError, match="pipedream reads older weights, of which there are no slic"
    ):
        plan_of(made, "pipedream", [1])


def test_a_plan_is_refused_for_a_graph_with_other_slices():
    from penstock.plan import check_fits

    plan = plan_of(sliced("gpt"), "gpipe", [])
    with pytest.raises(PlanError, match=r"'head.weight': 4} in slices, the graph nothing"):
        check_fits(plan, captured("gpt", WIDE).graph)
