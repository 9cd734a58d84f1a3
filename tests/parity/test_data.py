"""Whatever a batch is made of, and in whatever memory it comes: a run reads what a loop reads."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import BatchEncoding

from penstock.checkpoints import checkpoint
from penstock.checkpoints.saver import SavePolicy
from penstock.errors import JobError
from penstock.graph.merge import merged
from penstock.graph.trace import capture
from penstock.job import Job
from penstock.plan import plan_by_hand
from penstock.runtime.eager import EagerTask, work_eagerly
from penstock.runtime.launch import run_processes, run_threads
from penstock.runtime.run import Steps
from penstock.schedule import find
from tests.parity.training import Run, train

MICRO_BATCHES, STEPS, WIDTH, SAMPLES = 4, 3, 12, 3
Data = Callable[[int], Iterator[Any]]


class Pair(NamedTuple):
    x: Any
    y: Any


def fresh(start: int) -> Iterator[Pair]:
    for index in itertools.count(start):
        source = torch.Generator().manual_seed(index)
        yield Pair(
            torch.randn(SAMPLES, WIDTH, generator=source),
            torch.randn(SAMPLES, WIDTH, generator=source),
        )


def one_buffer(start: int) -> Iterator[Pair]:
    x, y = torch.empty(SAMPLES, WIDTH), torch.empty(SAMPLES, WIDTH)
    for pair in fresh(start):
        yield Pair(x.copy_(pair.x), y.copy_(pair.y))


EVERYBODYS = Pair(*np.empty((2, SAMPLES, WIDTH), np.float32))


def one_buffer_of_everybody(start: int) -> Iterator[Pair]:
    for pair in fresh(start):
        EVERYBODYS.x[:], EVERYBODYS.y[:] = pair.x, pair.y
        yield EVERYBODYS


def ring_of_arrays(start: int) -> Iterator[Pair]:
    ring = [Pair(*np.empty((2, SAMPLES, WIDTH), np.float32)) for _ in range(3)]
    for at, pair in enumerate(fresh(start)):
        found = ring[at % 3]
        found.x[:], found.y[:] = pair.x, pair.y
        yield found


def cleared_afterwards(start: int) -> Iterator[Pair]:
    for pair in fresh(start):
        yield pair
        pair.x.zero_()
        pair.y.fill_(torch.nan)


SOURCES: list[Data] = [
    one_buffer,
    one_buffer_of_everybody,
    ring_of_arrays,
    cleared_afterwards,
]


def model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(torch.tanh(model(batch[0])), batch[1])


def job_of(data: Data, loss: Callable[..., torch.Tensor] = loss) -> Job:
    sgd = partial(torch.optim.SGD, lr=0.3, momentum=0.9)
    return Job(model, loss, data, sgd, micro_batches=MICRO_BATCHES)


def plain(data: Data = fresh) -> dict[str, torch.Tensor]:
    """Return the weights that a loop without any of this gives."""
    trained, batches = model(), data(0)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.3, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for batch in itertools.islice(batches, MICRO_BATCHES):
            (loss(trained, batch) / MICRO_BATCHES).backward()
        optimizer.step()
    return {f"weights/{name}": value for name, value in trained.named_parameters()}


def assert_trained(found: Any, expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=2e-6, atol=1e-7)


def run_of(job: Job, schedule: str, *, replicas: int = 1) -> Run:
    captured = capture(job)
    points, per_replica = len(captured.graph.cut_points), job.micro_batches // replicas
    plan = plan_by_hand(
        captured.graph,
        [points // 2],
        schedule,
        num_micro_batches=per_replica,
        num_ranks=find(schedule)(2, per_replica).num_ranks,
        replicas=replicas,
    )
    return Run(plan, job, captured)


@pytest.mark.parametrize("data", SOURCES)
@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "chimera"])
def test_memory_that_is_filled_again_is_no_matter(schedule, data, tmp_path):
    outcome = train(run_of(job_of(data), schedule), tmp_path, (STEPS,))
    assert_trained(outcome.weights, plain())


def test_memory_that_is_filled_again_is_no_matter_between_processes(tmp_path):
    run = run_of(job_of(one_buffer_of_everybody), "gpipe", replicas=2)
    outcome = train(run, tmp_path, (STEPS,), launcher=run_processes)
    assert_trained(outcome.weights, plain())


@pytest.mark.parametrize("data", SOURCES)
def test_joined_micro_batches_are_those_that_were_read(data, tmp_path):
    outcome = train(run_of(merged(job_of(data), 2), "gpipe"), tmp_path, (STEPS,))
    assert_trained(outcome.weights, plain())


def test_eager_ranks_read_what_a_plain_loop_reads(tmp_path):
    told = Steps(MICRO_BATCHES)
    task = EagerTask(job_of(one_buffer_of_everybody), 0, STEPS, policy=SavePolicy(tmp_path))
    run_processes(partial(work_eagerly, task), 2, told.add)
    assert_trained(checkpoint.load(checkpoint.latest(tmp_path)).tensors, plain())


def test_one_eager_rank_is_the_plain_loop_also_where_its_loss_writes_into_a_dataset(tmp_path):
    """Which it does again in the next epoch."""

    def rows() -> Data:
        held = [*itertools.islice(fresh(0), MICRO_BATCHES)]
        return lambda start: itertools.islice(itertools.cycle(held), start, None)

    def doubling(model: nn.Module, batch: Pair) -> torch.Tensor:
        batch.x.mul_(2)
        return loss(model, batch)

    told = Steps(MICRO_BATCHES)
    task = EagerTask(job_of(rows(), doubling), 0, STEPS, policy=SavePolicy(tmp_path))
    run_processes(partial(work_eagerly, task), 1, told.add)
    scaled = (Pair(p.x * 2 ** (1 + k // MICRO_BATCHES), p.y) for k, p in enumerate(rows()(0)))
    found = checkpoint.load(checkpoint.latest(tmp_path)).tensors
    assert_trained(found, plain(lambda start: scaled))


def test_first_batch_is_traced_before_it_is_filled_again():
    captured = capture(job_of(one_buffer_of_everybody))
    assert captured.graph.samples == SAMPLES


# -- containers ----------------------------------------------------------------------------------

CONTAINERS: dict[str, Callable[[Pair], Any]] = {
    "dict of arrays": lambda pair: {"x": pair.x.numpy(), "y": pair.y.numpy()},
    "BatchEncoding": lambda pair: BatchEncoding({"x": pair.x, "y": pair.y}),
    "BatchEncoding of arrays": lambda p: BatchEncoding({"x": p.x.numpy(), "y": p.y.numpy()}),
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_other_containers_and_arrays_train_the_same(container, tmp_path):
    change = CONTAINERS[container]

    def by_name(model: nn.Module, batch: Any) -> torch.Tensor:
        assert all(isinstance(batch[name], torch.Tensor) for name in "xy")
        return F.mse_loss(torch.tanh(model(batch["x"])), batch["y"])

    job = job_of(lambda start: map(change, fresh(start)), by_name)
    outcome = train(run_of(job, "one_f_one_b"), tmp_path, (STEPS,))
    assert_trained(outcome.weights, plain())


def test_data_that_is_nothing_to_read_from_is_refused():
    with pytest.raises(JobError, match=r"data\(0\) of the job is the int 3, not an iterator"):
        capture(job_of(lambda start: 3))


# -- who reads what, and when --------------------------------------------------------------------


def test_data_is_begun_once_where_one_rank_reads_all_of_it(tmp_path):
    starts: list[int] = []

    def data(start: int) -> Iterator[Pair]:
        starts.append(start)
        return fresh(start)

    run = run_of(job_of(data), "gpipe")
    starts.clear()
    train(run, tmp_path, (STEPS,))
    assert starts == [0, 0]  # the first stage reads inputs, the last one targets
    starts.clear()
    told = Steps(MICRO_BATCHES)
    run_threads(partial(work_eagerly, EagerTask(job_of(data), 0, STEPS)), 1, told.add)
    assert starts == [0]


def test_data_that_takes_a_list_of_numbers_is_asked_once_for_all(tmp_path):
    asked: list[list[int]] = []

    class Picking:
        def __call__(self, start):
            return fresh(start)

        def picked(self, reads):
            asked.append(list(itertools.islice(reads.numbers(), 8)))
            return (next(fresh(number)) for number in reads.numbers())

    outcome = train(run_of(job_of(Picking()), "gpipe", replicas=2), tmp_path, (STEPS,))
    assert_trained(outcome.weights, plain())
    assert sorted(asked) == [[0, 1, 4, 5, 8, 9, 12, 13]] * 2 + [[2, 3, 6, 7, 10, 11, 14, 15]] * 2
    run = run_of(merged(job_of(Picking()), 2), "gpipe")
    asked.clear()
    outcome = train(run, tmp_path, (STEPS,))
    assert_trained(outcome.weights, plain())
    assert asked == [list(range(8))] * 2
