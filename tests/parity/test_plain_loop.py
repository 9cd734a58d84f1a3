"""A cut, scheduled, distributed run gives the weights and losses of the plain loop.

Bit for bit in float32 where sums are made in the same order; where several ranks or stages add
to one gradient the order differs, and float64 shows that nothing else does.
"""

from functools import cache

import pytest
import torch

from penstock.runtime.launch import run_processes, run_threads
from penstock.schedule import find
from penstock.schedule.recipe import Recipe, has_window, name_of
from tests.pairwise import pairwise
from tests.parity.models import (
    MODELS,
    OPTIMIZERS,
    TRAINING,
    Trained,
    captured,
    job_of,
    plain_loop,
    plan_of,
)
from tests.parity.training import Run, difference, differing, train

STEPS = 3
SYNCHRONOUS = ("gpipe", "one_f_one_b", "interleaved", "zb_h1")
EXACT = torch.float64


@cache
def expected(
    name: str,
    dtype: torch.dtype,
    optimizer: str,
    micro_batches: int,
    clip_norm: float | None = None,
) -> Trained:
    return plain_loop(job_of(name, dtype, optimizer, clip_norm=clip_norm), STEPS, micro_batches)


def run_of(name, dtype, optimizer, schedule, stages, micro_batches, **options) -> Run:
    graph = captured(name, dtype).graph
    plan = plan_of(graph, schedule, stages, micro_batches, **options)
    return Run(plan, job_of(name, dtype, optimizer), captured(name, dtype))


def assert_equal_bits(run: Run, outcome, trained: Trained) -> None:
    assert differing(outcome.weights, trained.weights) == []
    assert [step.loss for step in outcome.steps] == trained.losses


@pytest.mark.parametrize(
    ("schedule", "stages", "micro_batches"), pairwise(SYNCHRONOUS, (1, 2, 4, 8), (1, 2, 3, 5))
)
@pytest.mark.sampled(3)
def test_thread_ranks_give_the_bits_of_the_plain_loop(schedule, stages, micro_batches, tmp_path):
    optimizer = tuple(OPTIMIZERS)[(stages + micro_batches) % len(OPTIMIZERS)]
    run = run_of("dropout", torch.float32, optimizer, schedule, stages, micro_batches)
    outcome = train(run, tmp_path)
    assert_equal_bits(run, outcome, expected("dropout", torch.float32, optimizer, micro_batches))


SIZES = (4, 1), (4, 5), (8, 3), (8, 8)  # stages, micro-batches: each schedule has two of them
OTHERS = tuple(n for n in TRAINING if n not in SYNCHRONOUS and not has_window(Recipe(n)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("schedule", "stages", "micro_batches"),
    [(s, *size) for k, s in enumerate(OTHERS) for size in (SIZES[k % 2], SIZES[2 + k % 2])],
)
def test_all_other_schedules_train_the_plain_loop(schedule, stages, micro_batches, tmp_path):
    run = run_of("tied", EXACT, "sgd", schedule, stages, micro_batches)
    outcome, trained = train(run, tmp_path), expected("tied", EXACT, "sgd", micro_batches)
    assert difference(outcome.weights, trained.weights) < 1e-12
    assert [step.loss for step in outcome.steps] == pytest.approx(trained.losses, rel=1e-14)


@pytest.mark.parametrize("schedule", ["found(limit=5)", "found(limit=6, objective=steady)"])
def test_found_one_gives_the_bits_of_the_plain_loop_from_four_stages_a_rank(schedule, tmp_path):
    run = run_of("dropout", torch.float32, "adamw", schedule, 8, 3, num_ranks=2)
    outcome = train(run, tmp_path)
    assert name_of(run.plan.schedule) == schedule
    assert_equal_bits(run, outcome, expected("dropout", torch.float32, "adamw", 3))


AGAIN = {"recompute": (True, True)}


@pytest.mark.parametrize(
    ("schedule", "stages", "name", "options"),
    [
        ("two_bp(batch=2)", 4, "tied", {}),
        ("two_bp(batch=4)", 2, "frozen_start", AGAIN),
        ("two_bp(batch=2) / units 2 1", 3, "dropout", {"num_ranks": 2}),
        ("two_bp(batch=2)", 2, "gpt", {"replicas": 2, "clip": True}),
        ("two_bp(batch=2)", 2, "gpt", {"clip": True, "post_validation": True}),
        ("two_bp(batch=2)", 2, "gpt", {"offload": ("both", "activations")}),
    ],
)
@pytest.mark.sampled(2)
def test_weights_of_several_micro_batches_at_once_train_the_plain_loop(
    schedule, stages, name, options, tmp_path
):
    """The sums of one long product are made in another order than those of several."""
    clip_norm = 0.05 if options.get("clip") else None
    run = run_of(name, EXACT, "sgd", schedule, stages, 4, **options)
    run = run._replace(job=job_of(name, EXACT, "sgd", clip_norm=clip_norm))
    outcome = train(run, tmp_path)
    trained = expected(name, EXACT, "sgd", 4 * run.plan.replicas, clip_norm)
    assert difference(outcome.weights, trained.weights) < 1e-12


@pytest.mark.parametrize(
    ("work", "processors", "name", "clip_norm"),
    [("4-1", 2, "tied", 0.05), ("1-5-2-1", 3, "dropout", None)],
)
def test_stages_divided_among_processors_train_the_plain_loop(
    work, processors, name, clip_norm, tmp_path
):
    schedule, clip = f"layer_pipe(processors={processors}, work={work})", clip_norm is not None
    run = run_of(name, EXACT, "sgd", schedule, len(work.split("-")), 5, clip=clip)
    run = run._replace(job=job_of(name, EXACT, "sgd", clip_norm=clip_norm))
    outcome, trained = train(run, tmp_path), expected(name, EXACT, "sgd", 5, clip_norm)
    assert run.plan.total_ranks == processors
    assert difference(outcome.weights, trained.weights) < 1e-12


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", OTHERS)
def test_all_other_schedules_train_the_plain_loop_in_two_processes(schedule, tmp_path):
    stages = 2 if find(schedule)(2, 4).num_ranks == 2 else 4
    run = run_of("dropout", EXACT, "adamw", schedule, stages, 4, clip=True)
    job = job_of("dropout", EXACT, "adamw", clip_norm=0.05)
    outcome = train(run._replace(job=job), tmp_path, launcher=run_processes)
    assert run.plan.total_ranks == 2
    assert difference(outcome.weights, expected("dropout", EXACT, "adamw", 4, 0.05).weights) < 1e-11


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "optimizer"),
    pairwise(SYNCHRONOUS, (1, 2, 5), tuple(OPTIMIZERS)),
)
@pytest.mark.sampled(3)
def test_two_processes_give_the_bits_of_the_plain_loop(
    schedule, micro_batches, optimizer, tmp_path
):
    stages = 4 if schedule == "interleaved" else 2
    run = run_of("dropout", torch.float32, optimizer, schedule, stages, micro_batches)
    outcome = train(run, tmp_path, launcher=run_processes)
    assert_equal_bits(run, outcome, expected("dropout", torch.float32, optimizer, micro_batches))


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "tied"])
@pytest.mark.sampled(3)
def test_every_model_gives_the_bits_of_the_plain_loop(name, schedule, tmp_path):
    run = run_of(name, torch.float32, "adamw", schedule, 4, 3)
    assert_equal_bits(run, train(run, tmp_path), expected(name, torch.float32, "adamw", 3))


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
@pytest.mark.parametrize("dtype", [torch.float32, EXACT])
@pytest.mark.sampled(2)
def test_tied_weights_differ_only_by_the_order_of_their_sum(dtype, schedule, tmp_path):
    run = run_of("tied", dtype, "sgd", schedule, 4, 3)
    outcome, trained = train(run, tmp_path), expected("tied", dtype, "sgd", 3)
    assert difference(outcome.weights, trained.weights) < (1e-12 if dtype is EXACT else 1e-6)


@pytest.mark.parametrize("launcher", [run_threads, run_processes])
@pytest.mark.parametrize("name", ["dropout", "tied", "batch_norm", "frozen"])
@pytest.mark.sampled(2)
def test_two_replicas_differ_only_by_the_order_of_their_sum(name, launcher, tmp_path):
    run = run_of(name, EXACT, "sgd", "one_f_one_b", 1, 2, replicas=2)
    outcome, trained = train(run, tmp_path, launcher=launcher), expected(name, EXACT, "sgd", 4)
    assert difference(outcome.weights, trained.weights) < 1e-12
    losses = [step.loss for step in outcome.steps]
    assert losses == pytest.approx(trained.losses, rel=1e-14)


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_two_replicas_of_a_pipeline_differ_only_by_the_order_of_their_sum(schedule, tmp_path):
    run = run_of("tied", EXACT, "adamw", schedule, 4, 2, replicas=2)
    outcome, trained = train(run, tmp_path), expected("tied", EXACT, "adamw", 4)
    assert difference(outcome.weights, trained.weights) < 1e-11  # AdamW divides by the sum


# -- what the optimizer is given -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "stages", "replicas"), pairwise(("dropout", "tied", "frozen"), (1, 2, 4), (1, 2))
)
@pytest.mark.sampled(2)
def test_clipping_counts_every_gradient_once(name, stages, replicas, tmp_path):
    job = job_of(name, EXACT, "sgd", clip_norm=0.05)
    options = {"clip": True, "replicas": replicas}
    plan = plan_of(captured(name, EXACT).graph, "one_f_one_b", stages, 4 // replicas, **options)
    run = Run(plan, job, captured(name, EXACT))
    outcome, trained = train(run, tmp_path), expected(name, EXACT, "sgd", 4, 0.05)
    assert difference(outcome.weights, trained.weights) < 1e-12
    unclipped = expected(name, EXACT, "sgd", 4)
    assert difference(trained.weights, unclipped.weights) > 1e-3


def test_a_norm_below_the_limit_changes_no_bit(tmp_path):
    job = job_of("dropout", torch.float32, "adam", clip_norm=1e6)
    graph = captured("dropout", torch.float32).graph
    run = Run(plan_of(graph, "zb_h1", 4, 3, clip=True), job, captured("dropout", torch.float32))
    trained = expected("dropout", torch.float32, "adam", 3)
    assert differing(train(run, tmp_path).weights, trained.weights) == []


@pytest.mark.parametrize("launcher", [run_threads, run_processes])
def test_learning_rate_factor_is_that_of_the_step(launcher, tmp_path):
    job = job_of("dropout", torch.float32, "adamw", learning_rate=lambda step: 1 / (1 + step))
    graph = captured("dropout", torch.float32).graph
    run = Run(plan_of(graph, "one_f_one_b", 2, 2), job, captured("dropout", torch.float32))
    outcome = train(run, tmp_path, launcher=launcher)
    assert_equal_bits(run, outcome, plain_loop(job, STEPS, 2))


def test_frozen_and_unused_parameters_stay_as_they_were(tmp_path):
    run = run_of("frozen", torch.float32, "adamw", "one_f_one_b", 4, 2)
    weights = train(run, tmp_path).weights
    first = dict(run.captured.model.named_parameters())
    still = [name for name in first if name.startswith(("layers.3.", "layers.4.", "unused."))]
    assert len(still) == 6
    moved = {name for name in first if not torch.equal(weights[f"weights/{name}"], first[name])}
    assert moved == first.keys() - still
