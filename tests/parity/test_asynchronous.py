"""Every asynchronous schedule trains to what its weight rule says, without a pipeline."""

from dataclasses import replace

import pytest
import torch
from torch.func import functional_call

import penstock as ps
from penstock.errors import RunError
from penstock.graph.trace import build
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.prove.sequential import sequential
from penstock.runtime.launch import run_processes
from penstock.schedule import Schedule, find, versions
from penstock.schedule.asynchronous import ASYNCHRONOUS, round_robin
from tests.pairwise import pairwise
from tests.parity.models import captured, job_of, plan_of
from tests.parity.training import Run, difference, differing, train

EXACT = torch.float64
NAMES = [builder.__name__ for builder in ASYNCHRONOUS]


def run_of(schedule: str, optimizer: str, stages: int, micro_batches: int, **options) -> Run:
    plan = plan_of(captured("gpt", EXACT).graph, schedule, stages, micro_batches, **options)
    clip_norm = 0.05 if options.get("clip") else None
    job = job_of("gpt", EXACT, optimizer, clip_norm=clip_norm)
    return Run(plan, job, captured("gpt", EXACT))


def expected(run: Run, num_steps: int) -> dict[str, torch.Tensor]:
    program = lower_plan(run.plan, run.captured.graph, num_steps=num_steps)
    stages = stages_of(run.plan, run.captured.graph)
    return sequential(run.job, program, num_steps, stages, run.captured)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("schedule", "micro_batches", "optimizer"), pairwise(NAMES, (1, 3), ("sgd", "adamw"))
)
def test_thread_ranks_equal_the_sequential_definition(schedule, micro_batches, optimizer, tmp_path):
    run = run_of(schedule, optimizer, 4, micro_batches)
    outcome = train(run, tmp_path, (9,))
    assert difference(outcome.weights, expected(run, 9)) < 1e-12


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", NAMES)
def test_two_processes_equal_the_sequential_definition(schedule, tmp_path):
    stages = 1 if schedule == round_robin.__name__ else 2
    run = run_of(schedule, "sgd", stages, 2)
    outcome = train(run, tmp_path, (12,), run_processes)
    assert difference(outcome.weights, expected(run, 12)) < 1e-12


@pytest.mark.parametrize("lengths", [(3, 3), (1, 5)])
@pytest.mark.parametrize("schedule", ["pipedream", "vertical_sync", "delayed_gradients"])
@pytest.mark.sampled(2)
def test_windows_cut_anywhere_give_the_bits_of_one_window_with_stashing(
    schedule, lengths, tmp_path
):
    run = run_of(schedule, "adamw", 4, 1)
    whole = train(run, tmp_path / "whole", (6,))
    parts = train(run, tmp_path / "parts", lengths)
    assert differing(parts.weights, whole.weights) == []


@pytest.mark.parametrize("schedule", NAMES)
def test_live_versions_are_those_of_the_table(schedule, tmp_path):
    run = run_of(schedule, "sgd", 3, 2)
    made = find(schedule)(3, 2, num_steps=6)
    assert train(run, tmp_path, (6,)).live_versions == expected_alive(made)


def expected_alive(made: Schedule) -> tuple[int, ...]:
    """Return the versions alive, less those of which only a prediction is kept."""
    table = versions(made)
    return tuple(
        1 if table.forward_ahead[stage].any() else alive for stage, alive in enumerate(table.alive)
    )


@pytest.mark.parametrize("clip", [False, True])
def test_replicas_and_clipping_keep_the_definition(clip, tmp_path):
    run = run_of("pipedream", "adamw", 2, 2, replicas=2, clip=clip)
    outcome = train(run, tmp_path, (5,))
    assert difference(outcome.weights, expected(run, 5)) < 1e-12


@pytest.mark.parametrize("schedule", ["pipemare", "weight_prediction", "pipedream"])
def test_resuming_gives_the_bits_of_one_run(schedule, tmp_path):
    run = run_of(schedule, "sgd", 3, 1)
    whole = train(run, tmp_path / "whole", (4, 4))
    train(run, tmp_path / "parts", (4,))
    rest = ((lower_plan(run.plan, run.captured.graph, num_steps=4), 4),)
    done = tmp_path / "parts" / "step-000004"
    resumed = train(run, tmp_path / "rest", windows=rest, resume=done)
    assert differing(resumed.weights, whole.weights) == []


@pytest.mark.parametrize("schedule", ["spec_train", "spike_compensation"])
def test_an_optimizer_that_cannot_be_foreseen_is_refused(schedule, tmp_path):
    run = run_of(schedule, "sgd", 2, 1)
    job = replace(run.job, optimizer=lambda parameters: torch.optim.RMSprop(parameters, lr=0.01))
    with pytest.raises(RunError, match="cannot foresee what a RMSprop does"):
        train(run._replace(job=job), tmp_path, (4,))


@pytest.mark.parametrize(
    ("schedule", "options", "why"),
    [
        ("spec_train", {}, "predicts by the momentum, and SGD has momentum 0"),
        ("x_pipe", {"momentum": 0.9, "nesterov": True}, "cannot foresee .* with nesterov"),
        ("spike_compensation", {"momentum": 0.9, "dampening": 0.9}, "foresee .* with dampening"),
    ],
)
def test_sgd_without_what_is_predicted_by_is_refused(schedule, options, why, tmp_path):
    run = run_of(schedule, "sgd", 2, 1)
    job = replace(run.job, optimizer=lambda weights: torch.optim.SGD(weights, lr=0.01, **options))
    with pytest.raises(RunError, match=why):
        train(run._replace(job=job), tmp_path, (4,))


def test_pipedream_equals_the_loop_written_by_hand(tmp_path):
    """Three stages, one micro-batch a step: stage s reads the weights of 2 - s updates ago."""
    run = run_of("pipedream", "sgd", 3, 1)
    stages = stages_of(run.plan, run.captured.graph).stages
    nodes = run.captured.graph.nodes
    delay = {nodes[p].name: 2 - stage.index for stage in stages for p in stage.parameters}
    model, _ = build(run.job)
    optimizer, batches = run.job.optimizer(model.parameters()), run.job.data(0)
    past = [{name: p.detach().clone() for name, p in model.named_parameters()}]
    for step in range(8):
        stale = {
            name: past[max(0, step - delay[name])][name].clone().requires_grad_()
            for name in past[0]
        }
        batch = next(batches)
        found = functional_call(model, stale, (batch["tokens"],)).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(found, batch["next"].flatten())
        gradients = torch.autograd.grad(loss, list(stale.values()))
        for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
            assert name in stale
            parameter.grad = gradient
        optimizer.step()
        past.append({name: p.detach().clone() for name, p in model.named_parameters()})
    by_hand = {f"weights/{name}": p.detach() for name, p in model.named_parameters()}
    outcome = train(run, tmp_path, (8,))
    assert difference(outcome.weights, by_hand) < 1e-12


def test_processes_make_room_for_as_many_messages_as_a_program_has_under_way(tmp_path):
    """TiMePReSt runs two steps of forwards ahead: more messages than a ring has by itself."""
    run = run_of("timeprest", "sgd", 2, 9)
    outcome = train(run, tmp_path, (1, 3), run_processes)
    assert len(outcome.steps) == 4


@pytest.mark.parametrize("schedule", ["spec_train", "weight_prediction"])
def test_an_average_of_the_weights_leaves_them_as_they_are(schedule, tmp_path):
    """Rules that foresee an update look through it at the optimizer."""
    run = run_of(schedule, "adamw", 2, 2)
    plain = train(run, tmp_path / "plain", (5,)).weights
    averaging = run._replace(job=replace(run.job, average=ps.ema(0.5)))
    found = train(averaging, tmp_path / "averaged", (5,)).weights
    named = [key for key in plain if key.startswith("weights/")]
    assert differing(found, {key: plain[key] for key in named}) == []
    assert any(key.endswith("/average") for key in found)
