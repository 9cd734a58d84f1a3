"""Every asynchronous schedule trains to what its paper says, written down without the product."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from penstock.choose.run_windows import windows_of
from penstock.graph.trace import Capture, capture
from penstock.job import Job
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.prove.sequential import sequential
from penstock.schedule import SCHEDULES
from tests.parity import papers
from tests.parity.models import plan_of
from tests.parity.papers import ADAM_RATE, MOMENTUM, PAPERS, RATE, WIDTH
from tests.parity.training import Run, difference, train

CASES = (  # stages, micro-batches a step, steps of each window
    (2, 2, (3, 3)),
    (3, 1, (7,)),
    (4, 1, (8, 4)),
    (4, 3, (6,)),
    (8, 1, (17,)),
)


def model_of(num_stages: int) -> nn.Module:
    layers = [(nn.Linear(WIDTH, WIDTH).double(), nn.Tanh()) for _ in range(num_stages)]
    with torch.no_grad():
        for k, (linear, _) in enumerate(layers):
            weights = torch.from_numpy(papers.start(k))
            linear.weight.copy_(weights[:, :-1])
            linear.bias.copy_(weights[:, -1])
    return nn.Sequential(*itertools.chain(*layers))


def batches(first: int) -> Iterator[tuple[Tensor, ...]]:
    return (tuple(map(torch.from_numpy, papers.batch(m))) for m in itertools.count(first))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def optimizer_of(schedule: str) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    match schedule:
        case "x_pipe":
            return lambda parameters: Adam(parameters, lr=ADAM_RATE)
        case "spec_train":
            return lambda p: SGD(p, lr=RATE, momentum=MOMENTUM, dampening=MOMENTUM)
        case _:
            return lambda parameters: SGD(parameters, lr=RATE, momentum=MOMENTUM)


def job_of(schedule: str, num_stages: int) -> Job:
    return Job(lambda: model_of(num_stages), loss, batches, optimizer_of(schedule), seed=3)


@cache
def captured(num_stages: int) -> Capture:
    return capture(job_of("pipedream", num_stages))


def run_of(schedule: str, num_stages: int, per_step: int) -> Run:
    graph = captured(num_stages).graph
    assert len(graph.cut_points) == num_stages - 1, "a stage is a layer"
    plan = plan_of(graph, schedule, num_stages, per_step)
    return Run(plan, job_of(schedule, num_stages), captured(num_stages))


def by_the_paper(
    schedule: str, stages: int, per_step: int, lengths: tuple[int, ...], warm_up: int = 0
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for k, w in enumerate(papers.trained(schedule, stages, per_step, lengths, warm_up)):
        found[f"weights/{2 * k}.weight"] = torch.from_numpy(w[:, :-1])
        found[f"weights/{2 * k}.bias"] = torch.from_numpy(w[:, -1])
    return found


def test_there_is_a_loop_for_every_schedule_whose_steps_overlap():
    made = (make(2, 1) for make in SCHEDULES)
    assert {each.name for each in made if each.has_updates} == {
        name.split("(")[0] for name in PAPERS
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("stages", "per_step", "lengths"), CASES)
@pytest.mark.parametrize("schedule", PAPERS)
def test_the_pipeline_trains_as_the_paper_says(schedule, stages, per_step, lengths, tmp_path):
    outcome = train(run_of(schedule, stages, per_step), tmp_path, lengths)
    expected = by_the_paper(schedule, stages, per_step, lengths)
    assert difference(outcome.weights, expected) < 1e-11


@pytest.mark.parametrize("lengths", [(1, 1, 4), (4, 2, 1)])
def test_ranks_that_a_short_window_leaves_without_work_update_too(lengths, tmp_path):
    """Stages on two and three ranks, one micro-batch a step: not all of them get one."""
    schedule = "round_robin(ranks=2-3)"
    outcome = train(run_of(schedule, 2, 1), tmp_path, lengths)
    assert difference(outcome.weights, by_the_paper(schedule, 2, 1, lengths)) < 1e-11


@pytest.mark.parametrize("schedule", PAPERS)
def test_the_sequential_definition_is_what_the_paper_says(schedule):
    run = run_of(schedule, 4, 1)
    graph = run.captured.graph
    program = lower_plan(run.plan, graph, num_steps=9)
    found = sequential(run.job, program, 9, stages_of(run.plan, graph), run.captured)
    assert difference(found, by_the_paper(schedule, 4, 1, (9,))) < 1e-11


def test_pipemare_begins_with_synchronous_steps_and_full_rates(tmp_path):
    run = run_of("pipemare", 3, 1)
    planned = windows_of(run.captured.graph, run.plan, range(15), (100,))
    assert [program.num_steps for program, _ in planned] == [1] * 8 + [4, 3]
    outcome = train(run, tmp_path, windows=planned)
    assert difference(outcome.weights, by_the_paper("pipemare", 3, 1, (4, 3), 8)) < 1e-11
