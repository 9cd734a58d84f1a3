"""Whatever fails on one rank ends all of them with its error, and nothing is left behind."""

import ctypes
import gc
import itertools
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

import pytest
import torch

from penstock.errors import JobError, RunError
from penstock.graph.code import Function, function_of
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.runtime.calls import StepResult
from penstock.runtime.launch import as_json, from_json, run_processes, run_threads
from penstock.runtime.worker import RankResult, Task, work
from penstock.timeline import Held, Span
from tests.parity.models import captured, data, job_of, plan_of
from tests.parity.training import listed
from tests.runtime.left import SHARED, names_in, stays_in

LAUNCHERS = [run_threads, run_processes]
ROOT = Path(__file__).parents[2]


def open_files() -> set[str]:
    links = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            links.add(f"{link.name} {os.readlink(link)}")
        except FileNotFoundError:  # the one that lists them
            continue
    return links


def children(pid: int) -> set[int]:
    """Return the processes whose parent is `pid`."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(after_name[1]) == pid and after_name[0] != "Z":
            found.add(int(stat.parent.name))
    return found


def traces() -> tuple[object, ...]:
    """Return what a run could leave behind: processes, threads, files."""
    temporary = {p.name for p in Path(tempfile.gettempdir()).glob("penstock*")}
    ranks = {t.name for t in threading.enumerate()}
    return children(os.getpid()), temporary, ranks, open_files()


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    captured("frozen", torch.float32)  # tracing opens files of its own
    gc.collect()  # what other tests left open would be closed at any time
    for thread in threading.enumerate():
        if (
            thread.name == "penstock connects"
        ):  # of an earlier test: it ends by itself, late or soon
            thread.join(60.0)
    before, shared = traces(), names_in(SHARED)
    yield
    assert traces() == before
    assert stays_in(SHARED, shared) == set()


def result(rank: int) -> RankResult:
    return RankResult(rank, (), (), 0, (0.0,), 0.0, {})


def task_of(job=None, *, schedule="one_f_one_b", stages=2, replicas=1, steps=3, **options) -> Task:
    made = captured("frozen", torch.float32)
    plan = plan_of(made.graph, schedule, stages, 2, replicas=replicas)
    program = lower_plan(plan, made.graph)
    job = job or job_of("frozen", torch.float32)
    windows = tuple((program, step) for step in range(steps))
    return Task(made, stages_of(plan, made.graph), job, listed(windows), **options)


def run(task: Task, launcher, report=lambda step: None):
    return launcher(partial(work, task), task.windows.programs[0].num_ranks, report)


def at_call(number: int, happens, *, of: str, where: int):
    """Return a maker of functions; the `number`-th call of the segment does `happens` instead.

    The segment is of kind `of`; `where` is 0 for the first stage, -1 for the last.
    """

    def make(segment, capture, **options) -> Function:
        function = function_of(segment, capture, **options)
        last = capture.graph.loss in segment.ops or not segment.sends
        if segment.kind != of or last != (where == -1):
            return function
        calls = itertools.count()

        def once(arguments, seed):
            if next(calls) == number:
                happens()
            return function.run(arguments, seed)

        return replace(function, run=once)

    return make


def stumbles() -> None:
    raise ArithmeticError("the stage stumbles")


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_ranks_go_on_with_the_random_numbers_of_python_where_their_parent_is():
    random.seed(3)
    expected = random.random()
    random.seed(3)

    def work(transport, report) -> RankResult:
        return replace(result(transport.rank), typical_s=random.random())

    found = run_processes(work, 2, lambda step: None)
    assert [each.typical_s for each in found] == [expected, expected]


def test_no_thread_of_a_rank_is_still_ending_afterwards():
    """What a library gives back when a thread ends, a fork must not find half done."""
    libc, key = ctypes.CDLL(None), ctypes.c_uint()
    libc.pthread_key_create(ctypes.byref(key), libc.usleep)  # called with the value, at the end
    ids = []

    def work(transport, report) -> RankResult:
        ids.append(threading.get_native_id())
        libc.pthread_setspecific(key, ctypes.c_void_p(100_000))
        return result(transport.rank)

    run_threads(work, 3, lambda step: None)
    libc.pthread_key_delete(key)
    assert len(ids) == 3
    assert not {str(each) for each in ids} & set(os.listdir("/proc/self/task"))


# -- what a rank raises --------------------------------------------------------------------------


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(("kind", "where", "rank"), [("F", -1, 1), ("F", 0, 0), ("B", -1, 0)])
@pytest.mark.sampled(2)
def test_a_stage_that_raises_ends_the_run_with_its_error(kind, where, rank, launcher):
    task = task_of(function_of=at_call(3, stumbles, of=kind, where=where))
    with pytest.raises(RunError) as caught:
        run(task, launcher)
    assert f"rank {rank} failed: ArithmeticError: the stage stumbles" in str(caught.value)
    assert "in stumbles" in str(caught.value)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_data_that_ends_is_told_with_its_micro_batch(launcher):
    job = replace(
        job_of("frozen", torch.float32), data=lambda start: itertools.islice(data(start), 5)
    )
    with pytest.raises(RunError, match="the job's data ended at micro-batch 5") as caught:
        run(task_of(job), launcher)
    assert caught.value.hint


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_later_batch_of_another_shape_is_refused(launcher):
    def shorter(start):
        for index, batch in zip(itertools.count(start), data(start), strict=False):
            yield {k: v[:2] for k, v in batch.items()} if index == 3 else batch

    job = replace(job_of("frozen", torch.float32), data=shorter)
    with pytest.raises(
        RunError, match=r"this batch holds int64\[2, 6\].* traced for int64\[3, 6\]"
    ):
        run(task_of(job), launcher)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_an_optimizer_that_is_none_is_refused(launcher):
    job = replace(job_of("frozen", torch.float32), optimizer=lambda parameters: list(parameters))
    with pytest.raises(RunError, match="the job's optimizer is a list") as caught:
        run(task_of(job), launcher)
    assert caught.value.hint == "return a torch optimizer"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_that_traced_different_graphs_are_told(launcher):
    ours = task_of()
    graph = replace(ours.capture.graph, key=("another",))
    theirs = replace(ours, capture=replace(ours.capture, graph=graph))

    def different(transport, report):
        return work(ours if transport.rank else theirs, transport, report)

    with pytest.raises(RunError, match=r"traced different graphs: rank 0: .*, rank 1: "):
        launcher(different, 2, lambda step: None)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_report_that_raises_ends_the_run(launcher):
    def full(step):
        raise OSError(28, "No space left on device")

    with pytest.raises((RunError, OSError), match="No space left on device"):
        run(task_of(steps=1000), launcher, full)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_what_a_rank_raises_before_it_joins_is_told(launcher):
    def work(transport, report):
        if transport.rank == 1:
            raise JobError("not today", hint="tomorrow")
        transport.barrier()
        return result(transport.rank)

    with pytest.raises(RunError, match="rank 1 failed: not today") as caught:
        launcher(work, 3, lambda step: None)
    assert caught.value.hint == "tomorrow"


# -- processes that die --------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "where", "rank"), [("F", -1, 1), ("F", 0, 0), ("B", -1, 0)])
def test_a_killed_rank_ends_the_run(kind, where, rank):
    task = task_of(function_of=at_call(3, dies, of=kind, where=where))
    with pytest.raises(RunError, match=f"rank {rank} was killed by signal 9") as caught:
        run(task, run_processes)
    assert "memory" in caught.value.hint


def test_a_rank_killed_while_others_wait_in_a_sum_ends_the_run():
    def work(transport, report):
        transport.barrier()
        if transport.rank == 1:
            dies()
        transport.all_reduce(torch.zeros(1000), (0, 1, 2))
        return result(transport.rank)

    with pytest.raises(RunError, match="rank 1 was killed by signal 9"):
        run_processes(work, 3, lambda step: None)


def test_a_replica_killed_in_its_step_ends_the_run():
    mortal = task_of(stages=1, replicas=2, function_of=at_call(2, dies, of="B", where=-1))

    def work_of(transport, report):
        task = mortal if transport.rank == 1 else task_of(stages=1, replicas=2)
        return work(task, transport, report)

    with pytest.raises(RunError, match="rank 1 was killed by signal 9"):
        run_processes(work_of, 2, lambda step: None)


def test_a_rank_that_leaves_without_a_word_ends_the_run():
    def work(transport, report):
        if transport.rank == 1:
            os._exit(3)
        transport.barrier()
        return result(transport.rank)

    with pytest.raises(RunError, match=r"rank 1 left \(3\)"):
        run_processes(work, 2, lambda step: None)


def test_sys_exit_on_a_rank_ends_the_run():
    def work(transport, report):
        if transport.rank == 1:
            sys.exit("that was it")
        transport.barrier()
        return result(transport.rank)

    for launcher in LAUNCHERS:
        with pytest.raises(RunError, match=r"rank 1 failed: .*sys.exit\('that was it'\) ends"):
            launcher(work, 2, lambda step: None)


# -- programs that are interrupted ---------------------------------------------------------------

PROGRAM = """
    import json, os, sys, tempfile, torch
    sys.path.insert(0, {root!r})
    torch.set_num_threads(1)
    from penstock.runtime.launch import run_processes, run_threads
    from tests.runtime.test_launch import run, task_of

    def report(step):
        if step.loss is not None and step.step == 1:
            print("under way", flush=True)

    task_of()
    for asked in sys.stdin:
        launcher, stages, folder, errors = json.loads(asked)
        forked = os.fork()
        if not forked:
            break
        print(forked, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]), flush=True)
    else:
        sys.exit()
    os.setsid()
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    tempfile.tempdir = folder
    run(task_of(steps=100_000, stages=stages), globals()[launcher], report)
"""


class Program(NamedTuple):
    """A program that trains for ever: what it says, and the file of its errors."""

    pid: int
    said: IO[str]
    errors: Path

    def ended(self) -> tuple[int, str]:
        """Return its exit code and errors, once it has ended."""
        return int(self.said.readline()), self.errors.read_text()


Start = Callable[..., AbstractContextManager[Program]]


@pytest.fixture(scope="module")
def started() -> Iterator[Start]:
    """Return what starts a program, waits until it trains, and kills it at the end.

    Each is forked by one that has loaded and traced what it needs, and ends as any program does.
    """
    source = textwrap.dedent(PROGRAM).format(root=str(ROOT))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", source], **pipes) as forks:

        @contextmanager
        def start(launcher: str, folder: Path, stages: int = 2) -> Generator[Program]:
            left, errors = folder / "left", folder / "errors"
            left.mkdir()
            print(json.dumps([launcher, stages, str(left), str(errors)]), file=forks.stdin)
            forks.stdin.flush()
            program = Program(int(forks.stdout.readline()), forks.stdout, errors)
            try:
                assert program.said.readline() == "under way\n"
                yield program
            finally:
                with suppress(ProcessLookupError):  # it has ended, as it should
                    os.kill(program.pid, signal.SIGKILL)
            # A program that is killed cannot take away the empty folder of its data processes.
            full = [path for path in left.iterdir() if not path.is_dir() or any(path.iterdir())]
            assert full == []

        yield start


def has_ended(pid: int) -> bool:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ended, _, _ = select.select([handle], [], [], 20)
    os.close(handle)
    return bool(ended)


@pytest.mark.parametrize(
    ("launcher", "stages"), [("run_processes", 2), ("run_threads", 2), ("run_threads", 1)]
)
@pytest.mark.sampled(2)
def test_ctrl_c_ends_program_and_ranks(launcher, stages, tmp_path, started):
    with started(launcher, tmp_path, stages) as program:
        ranks = children(program.pid)
        assert len(ranks) == (2 if launcher == "run_processes" else 0)
        os.killpg(program.pid, signal.SIGINT)
        code, errors = program.ended()
        assert code == -signal.SIGINT
        assert errors.rstrip().endswith("KeyboardInterrupt")
        assert all(has_ended(rank) for rank in ranks)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_no_rank_survives_the_program(signum, tmp_path, started):
    with started("run_processes", tmp_path) as program:
        ranks = children(program.pid)
        assert len(ranks) == 2
        os.kill(program.pid, signum)
        assert program.ended()[0] == -signum
        assert all(has_ended(rank) for rank in ranks)


# -- what runs give ------------------------------------------------------------------------------


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_results_stand_in_the_order_of_the_ranks(launcher):
    def work(transport, report):
        transport.barrier()
        return result(transport.rank)

    assert [r.rank for r in launcher(work, 5, lambda step: None)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_report_arrives_one_at_a_time(launcher):
    told, inside = [], threading.Lock()

    def report(step):
        assert inside.acquire(blocking=False)
        told.append((step.step, step.loss))
        inside.release()

    def work(transport, tell):
        for step in range(200):
            tell(StepResult(step, float(transport.rank), 0.0))
        return result(transport.rank)

    launcher(work, 3, report)
    for rank in range(3):
        assert [step for step, loss in told if loss == rank] == list(range(200))


def test_a_result_crosses_the_pipe_as_it_is():
    span = Span(1, "compute", "F", 2, 3, 0.25, 0.5)
    whole = RankResult(1, (span,), (Held(1, 0.0, 7),), 7, (0.5, 1.5), 0.75, {2: 1, 0: 2})
    assert from_json(json.loads(json.dumps(as_json(whole)))) == whole


def test_what_a_rank_prints_is_not_lost(capfd):
    def work(transport, report):
        print(f"rank {transport.rank} is here\n", end="")  # in one piece
        return result(transport.rank)

    run_processes(work, 2, lambda step: None)
    assert sorted(capfd.readouterr().out.splitlines()) == ["rank 0 is here", "rank 1 is here"]


def test_ranks_compute_on_one_thread_each_and_leave_the_caller_alone():
    before = torch.get_num_threads()
    counts = []

    def work(transport, report):
        counts.append(torch.get_num_threads())
        return result(transport.rank)

    run_threads(work, 3, lambda step: None)
    assert counts == [1, 1, 1]
    assert torch.get_num_threads() == before
