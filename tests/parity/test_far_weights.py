"""Weights that wait in far memory, stage by stage, train the plain loop within predicted bytes."""

from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import nn

from penstock.checkpoints.checkpoint import latest
from penstock.graph.trace import Capture, capture
from penstock.job import Job
from penstock.plan import plan_by_hand
from penstock.plan.lower_plan import lower_plan
from penstock.plan.of_plan import lower as lowered
from penstock.profile import Profile, measure
from penstock.runtime.launch import run_processes
from penstock.simulate import critical_path
from penstock.simulate.of_program import simulate
from penstock.simulate.what_if import measured_run
from penstock.timeline import peak_bytes
from tests.parity.models import captured, job_of, plain_loop, plan_of
from tests.parity.training import Run, differing, train, windows
from tests.search.chains import with_costs

FLOAT, STEPS, UNITS = torch.float32, 3, 5
ALL = ("all", "weights", "weights", "all", "weights")
MIXED = ("weights", "state", "none", "all", "activations")
AGAIN = (True,) * UNITS


def run_of(name, schedule, micro_batches, clip_norm=None, **options) -> Run:
    graph, clip = captured(name, FLOAT).graph, clip_norm is not None
    ranks = {key: options.pop(key) for key in ("num_ranks", "replicas") if key in options}
    plan = plan_of(graph, schedule, UNITS, micro_batches, clip=clip, **ranks)
    job = job_of(name, FLOAT, "adamw", clip_norm=clip_norm)
    return Run(plan.changed(**options), job, captured(name, FLOAT))


ALONE = [
    ("gpt", "breadth_first", None, {"offload": ALL, "num_ranks": 1, "prefetch": 1}),
    ("dropout", "breadth_first", 0.05, {"offload": ALL, "num_ranks": 1, "beside": True}),
    (
        "batch_norm",
        "breadth_first",
        None,
        {"offload": MIXED, "num_ranks": 1, "prefetch": (2, 0, 1, 2, 1)},
    ),
    ("frozen", "breadth_first", 0.05, {"offload": ALL, "num_ranks": 1, "prefetch": 1}),
    ("frozen_start", "gpipe", None, {"offload": ALL}),
    ("dropout", "one_f_one_b", 0.05, {"offload": MIXED, "beside": True}),
    ("gpt", "zb_h1", None, {"offload": ALL, "prefetch": 1, "recompute": AGAIN}),
    ("gpt", "one_f_one_b / units 2 3", None, {"offload": ALL, "num_ranks": 2, "prefetch": 1}),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "schedule", "clip_norm", "options"), ALONE)
def test_far_weights_train_the_plain_loop_to_the_bit(name, schedule, clip_norm, options, tmp_path):
    run = run_of(name, schedule, 3, clip_norm, **options)
    outcome, trained = train(run, tmp_path, (STEPS,)), plain_loop(run.job, STEPS, 3)
    assert differing(outcome.weights, trained.weights) == []
    assert [step.loss for step in outcome.steps] == trained.losses


@pytest.mark.parametrize(
    ("name", "clip_norm", "more"),
    [("tied", None, {"beside": True}), ("dropout", 0.05, {"recompute": AGAIN})],
)
def test_parts_in_far_memory_train_as_whole_replicas(name, clip_norm, more, tmp_path):
    far = {"offload": ALL, "shard": ("shard", "shard_keep", *["shard"] * 3), "prefetch": 1, **more}
    sizes = {"num_ranks": 1, "replicas": 2}
    ends = [
        train(run_of(name, "breadth_first", 2, clip_norm, **sizes, **own), tmp_path / word).weights
        for word, own in (("near", {}), ("far", far))
    ]
    for key, value in ends[0].items():
        close = {"rtol": 1e-5, "atol": 1e-7} if clip_norm else {"rtol": 0.0, "atol": 0.0}
        torch.testing.assert_close(value, ends[1][key], **close)


def test_a_tied_weight_in_two_units_is_that_of_both(tmp_path):
    """Each has it, and adds up its own gradients: to rounding."""
    run = run_of("tied", "breadth_first", 3, num_ranks=1, offload=ALL, prefetch=1)
    outcome, trained = train(run, tmp_path), plain_loop(run.job, STEPS, 3)
    for key, value in trained.weights.items():
        torch.testing.assert_close(value, outcome.weights[key], rtol=1e-4, atol=1e-6)


def test_a_checkpoint_of_far_weights_is_read_near_and_the_other_way(tmp_path):
    runs = [run_of(*ALONE[1][:2], 3, 0.05, **own) for own in (ALONE[1][3], {"num_ranks": 1})]
    ends = []
    for first, second in (runs, runs[::-1], runs[:1] * 2):
        folder = tmp_path / f"{len(ends)}"
        train(first, folder / "first", windows=windows(first, (2,)))
        rest, at = windows(second, (STEPS,))[2:], latest(folder / "first")
        ends.append(train(second, folder / "second", windows=rest, resume=at).weights)
    trained = plain_loop(runs[0].job, STEPS, 3)
    assert [differing(end, trained.weights) for end in ends] == [[]] * 3


def test_a_run_is_replayed_and_its_longest_path_is_whole(tmp_path):
    run = run_of("gpt", "breadth_first", 3, 0.05, offload=ALL, num_ranks=1, beside=True, prefetch=1)
    timeline = train(run, tmp_path, (STEPS,), launcher=run_processes).timeline
    graph, profile = run.captured.graph, profile_of("gpt")
    again = measured_run(run.plan, graph, timeline, profile)
    assert again.replayed_s == pytest.approx(timeline.totals.step_s, rel=1e-9)
    slow = with_costs(profile, far_s_per_byte=1e-6)
    for clock in (timeline, simulate(lowered(run.plan, graph), slow)):
        hops = critical_path(lower_plan(run.plan, graph), clock).hops
        assert hops[-1].end_s == pytest.approx(clock.totals.step_s)
        assert all(a.end_s == pytest.approx(b.start_s) for a, b in pairwise(hops))


WIDTH = 128  # much more than what is rounded up


def wide_job() -> Job:
    def data(start):
        while True:
            yield torch.linspace(-1, 1, 16 * WIDTH).view(16, WIDTH) + start / 7

    def layers():
        return [part for _ in range(6) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]

    return Job(
        model=lambda: nn.Sequential(*layers()),
        loss=lambda model, x: model(x).square().mean(),
        data=data,
        optimizer=lambda weights: torch.optim.AdamW(weights, lr=1e-3),
        micro_batches=4,
    )


@cache
def wide() -> Capture:
    return capture(wide_job())


@cache
def profile_of(name: str) -> Profile:
    made, job = (
        (wide(), wide_job()) if name == "wide" else (captured(name, FLOAT), job_of(name, FLOAT))
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(measure, "_BUDGET_S", 0.0)
        return measure.measure(made, job)


@pytest.mark.parametrize(
    "options",
    [
        {"offload": ("weights",) * 6},
        {"offload": ("all",) * 6, "beside": True, "prefetch": 1},
        {"offload": ("all",) * 6, "recompute": (True,) * 6, "prefetch": 2},
        {"offload": ("weights", "state", "none", "both", "all", "weights"), "prefetch": 1},
        {"recompute": (True,) * 6, "offload": ("state",) * 6},
    ],
)
def test_peak_is_the_predicted_one(options, tmp_path):
    graph = wide().graph
    plan = plan_by_hand(graph, range(5), "breadth_first", num_micro_batches=4, num_ranks=1)
    plan = plan.changed(**options)
    expected = peak_bytes(simulate(lowered(plan, graph), profile_of("wide")))
    run = Run(plan, wide_job(), wide())
    outcome = train(run, tmp_path, launcher=run_processes, memory_window=1)
    assert outcome.peak_bytes == pytest.approx(expected, rel=0.01)
