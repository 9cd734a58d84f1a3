"""A rank may read its data by processes of its own, and none of them outlives the job."""

import itertools
import multiprocessing.process
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from penstock import _compat
from penstock.batches import batches
from penstock.checkpoints import checkpoint
from penstock.checkpoints.saver import SavePolicy
from penstock.errors import RunError
from penstock.job import Job
from penstock.processes.lost_readers import LostReaders
from penstock.runtime.eager import EagerTask, work_eagerly
from penstock.runtime.launch import run_processes
from penstock.runtime.run import Steps
from tests.runtime.test_launch import children, has_ended

ROOT = Path(__file__).parents[2]


class Samples(Dataset):
    """Row i is known from i; from `stuck_at` on whoever asks for it never comes back."""

    def __init__(self, stuck_at: int = sys.maxsize) -> None:
        self.stuck_at = stuck_at

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= self.stuck_at:
            os.write(1, b"stuck\n")  # whole: others write too
            while True:
                signal.pause()
        return torch.randn(4, generator=torch.Generator().manual_seed(index))


def job_of(dataset: Samples) -> Job:
    def data(start: int) -> Iterator[torch.Tensor]:
        numbers = range(2 * start, len(dataset))
        return iter(DataLoader(dataset, 2, sampler=numbers, num_workers=2))

    return Job(
        lambda: nn.Linear(4, 1),
        lambda model, batch: model(batch).square().mean(),
        data,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        micro_batches=4,
    )


def run(job: Job, steps: int, folder: Path | None = None, ranks: int = 2) -> Steps:
    told = Steps(job.micro_batches)
    run_processes(
        partial(work_eagerly, EagerTask(job, 0, steps, policy=SavePolicy(folder))), ranks, told.add
    )
    return told


@pytest.fixture(autouse=True)
def _leaves_no_children() -> Iterator[None]:
    """Other tests of this process may keep some running."""
    before = children(os.getpid())
    yield
    assert children(os.getpid()) == before


def test_a_loader_with_workers_trains_what_a_plain_loop_does(tmp_path):
    told = run(job_of(Samples()), 3, tmp_path)
    torch.manual_seed(0)
    model, rows = nn.Linear(4, 1), Samples()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    numbers, losses = itertools.count(), []
    for _ in range(3):
        optimizer.zero_grad()
        batches = [torch.stack([rows[next(numbers)] for _ in range(2)]) for _ in range(4)]
        parts = [model(batch).square().mean() / 4 for batch in batches]
        sum(parts).backward()
        losses.append(float(sum(part.detach() for part in parts)))
        optimizer.step()
    assert [step.loss for step in told.finished] == pytest.approx(losses, rel=1e-5)
    found = checkpoint.load(checkpoint.latest(tmp_path)).tensors
    for name, value in model.named_parameters():
        torch.testing.assert_close(found[f"weights/{name}"], value)


def test_ranks_that_read_ahead_train_what_those_that_do_not_do(tmp_path):
    def losses(workers: int) -> list[float | None]:
        data = batches(Samples(), 2, workers=workers)
        told = run(replace(job_of(Samples()), data=data), 4)
        return [step.loss for step in told.finished]

    assert losses(1) == losses(0)


PROGRAM = """
    import sys, torch
    sys.path.insert(0, {root!r})
    torch.set_num_threads(1)
    from tests.runtime.test_data_workers import Samples, job_of, run

    run(job_of(Samples(stuck_at=12)), 1_000_000)
"""


@contextmanager
def started(folder: Path) -> Generator[subprocess.Popen[str], None, None]:
    """Start a program whose data workers are stuck in the job's own code."""
    program = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM).format(root=str(ROOT))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    try:
        assert program.stdout is not None
        for _ in range(2):
            assert program.stdout.readline() == "stuck\n"
        yield program
    finally:
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()


@pytest.fixture
def short() -> Generator[Path, None, None]:
    """A folder whose name has room for sockets in it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_no_worker_survives_the_program(short):
    with started(short) as program:
        ranks = children(program.pid)
        workers = set().union(*map(children, ranks))
        assert len(ranks) == 2
        assert len(workers) >= 2
        program.kill()
        program.communicate(timeout=300)
        assert program.returncode == -signal.SIGKILL
    assert all(map(has_ended, ranks | workers))


def test_no_worker_survives_its_rank(short):
    with started(short) as program:
        ranks = sorted(children(program.pid))
        workers = set().union(*map(children, ranks))
        os.kill(ranks[0], signal.SIGKILL)
        _, errors = program.communicate(timeout=300)
        assert program.returncode == 1
        assert "was killed by signal 9" in errors
    assert all(map(has_ended, workers))


def test_a_dataset_that_raises_in_a_worker_ends_the_run_with_its_error():
    class Broken(Samples):
        def __getitem__(self, index):
            raise ArithmeticError(f"sample {index} is broken")

    with pytest.raises(RunError, match="sample 0 is broken"):
        run(job_of(Broken()), 1, ranks=1)


class Deadly(Samples):
    """Whoever reads row `at` is killed, the first `times` times."""

    def __init__(self, folder: Path, at: int, times: int) -> None:
        super().__init__()
        self.folder, self.at, self.times = folder, at, times

    def __getitem__(self, index: int) -> torch.Tensor:
        died = len(list(self.folder.glob("died-*")))
        if index == self.at and died < self.times:
            (self.folder / f"died-{died}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


AT, STEPS = 41, 7  # a row that is read long after the rank has begun


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.sampled(2)
def test_processes_that_read_and_are_killed_are_begun_anew(
    times: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = run(job_of(Samples()), STEPS, ranks=1)
    told = run(job_of(Deadly(tmp_path, AT, times)), STEPS, ranks=1)
    assert [step.loss for step in told.finished] == [step.loss for step in whole.finished]
    assert capfd.readouterr().err.count("reading goes on by others") == times


def test_no_folder_is_made_for_processes_that_read_however_long_its_name_would_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So none is left of processes that are killed, whichever; and no socket's name is too long."""
    place = tmp_path / ("long" * 20)
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setitem(multiprocessing.process.current_process()._config, "tempdir", None)
    told = run(job_of(Deadly(tmp_path, AT, 1)), STEPS, ranks=1)
    assert len(told.finished) == STEPS
    named = [path.name for path in place.iterdir()]  # others of the process may make theirs here
    assert [name for name in named if name.startswith(("pymp-", "penstock-", "listener-"))] == []


def test_who_dies_while_reading_begins_is_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal of its death is not taken for one that comes between two micro-batches."""
    heard, lost = list[int](), LostReaders()
    lost._handler = lambda number, frame: heard.append(number)
    monkeypatch.setattr(_compat, "check_loader_workers", lambda: lost._hear(signal.SIGCHLD, None))
    with lost:
        assert heard == [signal.SIGCHLD]

    def died() -> None:
        raise RuntimeError("DataLoader worker (pid 1) is killed")

    monkeypatch.setattr(_compat, "check_loader_workers", died)
    with pytest.raises(RuntimeError, match="is killed"):
        lost.__enter__()
    lost._hear(signal.SIGCHLD, None)
    assert heard == [signal.SIGCHLD]  # no more: nobody reads
