"""2BW is what it says: W(t+1) = update(W(t), gradient at W(t-1)), with two versions alive."""

from collections.abc import Callable
from functools import cache

import pytest
import torch

from penstock.runtime.launch import run_processes, run_threads
from penstock.runtime.run import Outcome
from tests.parity.models import OPTIMIZERS, captured, job_of, plan_of
from tests.parity.training import Run, delayed_loop, difference, differing, train

EXACT = torch.float64
TWENTY = 20


@cache
def expected(name: str, optimizer: str, num_steps: int, micro_batches: int):
    return delayed_loop(job_of(name, EXACT, optimizer), num_steps, micro_batches)


def run_of(optimizer: str, stages: int, micro_batches: int, *, name: str = "gpt", **options) -> Run:
    graph = captured(name, EXACT).graph
    plan = plan_of(graph, "double_buffered", stages, micro_batches, **options)
    clip_norm = 0.05 if options.get("clip") else None
    job = job_of(name, EXACT, optimizer, clip_norm=clip_norm)
    return Run(plan, job, captured(name, EXACT))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("launcher", "stages"), [(run_processes, 2), (run_threads, 4)])
@pytest.mark.sampled(2)
def test_twenty_steps_equal_the_ten_line_loop(launcher, stages, optimizer, tmp_path):
    run = run_of(optimizer, stages, 4)
    outcome = train(run, tmp_path, (TWENTY,), launcher)
    assert difference(outcome.weights, expected("gpt", optimizer, TWENTY, 4)) < 1e-12
    assert outcome.live_versions == (2,) * stages


def test_the_ten_line_loop_is_not_the_plain_one():
    synchronous = delayed_loop(job_of("gpt", EXACT, "sgd"), 1, 4)
    assert difference(expected("gpt", "sgd", TWENTY, 4), synchronous) > 0.1


@pytest.mark.parametrize(
    ("stages", "micro_batches"), [(s, m) for m in range(1, 7) for s in ((1, 4), (2, 8))[m % 2]]
)
@pytest.mark.sampled(3)
def test_thread_ranks_equal_the_ten_line_loop(stages, micro_batches, tmp_path):
    optimizer = tuple(OPTIMIZERS)[(stages + micro_batches) % len(OPTIMIZERS)]
    outcome = train(run_of(optimizer, stages, micro_batches), tmp_path, (6,))
    assert difference(outcome.weights, expected("gpt", optimizer, 6, micro_batches)) < 1e-12
    assert outcome.live_versions == (2,) * stages


@pytest.mark.parametrize(
    ("micro_batches", "optimizer"),
    [(m, tuple(OPTIMIZERS)[m % len(OPTIMIZERS)]) for m in range(1, 7)],
)
@pytest.mark.sampled(2)
def test_two_processes_equal_the_ten_line_loop(micro_batches, optimizer, tmp_path):
    outcome = train(run_of(optimizer, 2, micro_batches), tmp_path, (6,), run_processes)
    assert difference(outcome.weights, expected("gpt", optimizer, 6, micro_batches)) < 1e-12


@pytest.fixture(scope="module")
def whole_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Outcome]:
    """Return what gives the run of six steps in one window, with so many micro-batches."""
    return cache(lambda count: train(run_of("adamw", 4, count), tmp_path_factory.mktemp("w"), (6,)))


@pytest.mark.parametrize("micro_batches", [1, 2, 5])
@pytest.mark.parametrize("lengths", [(1, 1, 1, 1, 1, 1), (2, 4), (5, 1), (3, 3)])
@pytest.mark.sampled(3)
def test_windows_cut_anywhere_give_the_bits_of_one_window(
    lengths, micro_batches, whole_of, tmp_path
):
    whole = whole_of(micro_batches)
    parts = train(run_of("adamw", 4, micro_batches), tmp_path, lengths)
    assert differing(parts.weights, whole.weights) == []
    assert [s.loss for s in parts.steps] == [s.loss for s in whole.steps]
    assert parts.live_versions == (2,) * 4


@pytest.mark.parametrize("lengths", [(3, 3), (5, 1)])
def test_resuming_in_the_middle_gives_the_bits_of_one_run(lengths, whole_of, tmp_path):
    run, whole = run_of("adamw", 4, 2), whole_of(2)
    train(run, tmp_path / "parts", lengths[:1])
    rest = parts_from(run, lengths[0], lengths[1])
    done = tmp_path / "parts" / f"step-{lengths[0]:06d}"
    resumed = train(run, tmp_path / "rest", windows=rest, resume=done)
    assert differing(resumed.weights, whole.weights) == []
    assert [s.loss for s in resumed.steps] == [s.loss for s in whole.steps][lengths[0] :]


def parts_from(run: Run, first_step: int, num_steps: int):
    from tests.parity.training import windows

    return tuple((program, first_step + step) for program, step in windows(run, (num_steps,)))


def test_two_replicas_equal_the_ten_line_loop(tmp_path):
    outcome = train(run_of("adamw", 2, 2, replicas=2), tmp_path, (6,))
    assert difference(outcome.weights, expected("gpt", "adamw", 6, 4)) < 1e-12


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.sampled(2)
def test_tied_weights_and_clipping_work_without_a_flush(stages, tmp_path):
    from penstock.prove.prove import Planned, prove

    run = run_of("sgd", stages, 3, name="tied", clip=True)
    differences = prove(Planned(run.job, run.captured, run.plan)).differences
    assert {d.what for d in differences} == {"data", "weights"}
    assert max(d.value for d in differences) < 1e-12
