"""Memory that is freed stays with the process: the same blocks again cost no page fault."""

import subprocess
import sys
import textwrap
from functools import partial

import pytest

from penstock.graph.trace import capture
from penstock.heap import _of_libc, give_back, keep_freed_memory
from penstock.plan import plan_by_hand
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.profile import measure
from penstock.runtime import eager, worker
from penstock.runtime.launch import run_threads
from penstock.runtime.windows import repeated
from tests.cli import training

LIBC = """
    import ctypes
    import resource
    from penstock.heap import give_back, keep_freed_memory

    libc = ctypes.CDLL(None)
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_size_t
    libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_size_t]
    libc.memset.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_size_t]

    def resident():
        with open("/proc/self/statm") as file:
            return 4096 * int(file.read().split()[1]) / 2**20

    def write(size):
        block = libc.malloc(size)
        libc.memset(block, 1, size)
        return block

    def free(blocks):
        for block in blocks:
            libc.free(block)
"""
FAULTS = """
    def step():  # as a training step: everything is taken, then everything is freed
        free([write(size) for size in (36_000_000, 160_000, 12_000_000, 2_000_000)])

    for _ in range(3):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        step()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 10)
"""
KEEPS = """
    assert keep_freed_memory()
"""
GROWS = """
    before = resident()
    held = [write(1_000_000) for _ in range(100)]
    last = write(1000)
    free(held)
    kept = resident() - before
    give_back()
    print(kept, resident() - before)
"""
HUGE = """
    before = libc.sbrk(0)
    held = [libc.malloc(2**30 - 2**20) for _ in range(3)]  # which nobody touches
    grown = libc.sbrk(0) - before
    free(held)
    print(grown / 2**30, (libc.sbrk(0) - before) / 2**30)
"""
NEEDS_GLIBC = pytest.mark.skipif(_of_libc("mallopt") is None, reason="needs glibc")


def told(*parts: str) -> list[float]:
    """Return the numbers that a program prints."""
    program = "".join(map(textwrap.dedent, (LIBC, *parts)))
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [float(number) for number in done.stdout.split()]


@NEEDS_GLIBC
def test_kept_memory_costs_no_page_fault() -> None:
    (kept,), (given_back,) = told(KEEPS, FAULTS), told(FAULTS)
    assert kept < 50
    assert given_back > 1000, "then there is nothing to gain"


@NEEDS_GLIBC
def test_any_amount_of_any_size_is_kept() -> None:
    grown, kept = told(KEEPS, HUGE)
    assert grown > 2.9
    assert kept == grown


@NEEDS_GLIBC
def test_what_is_kept_can_be_given_back() -> None:
    kept, left = told(KEEPS, GROWS)
    assert kept > 90
    assert left < 10


def test_without_glibc_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.heap._of_libc", lambda name: None)
    assert not keep_freed_memory()
    give_back()
    monkeypatch.undo()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keep_freed_memory()


@pytest.mark.parametrize("name", ["worker", "eager", "measure"])
def test_ranks_and_profiles_keep_what_they_free(name: str, monkeypatch) -> None:
    """And profiles give it back, also where measuring fails."""
    called: list[str] = []
    module = {"worker": worker, "eager": eager, "measure": measure}[name]
    for function in {"keep_freed_memory", "give_back"} & set(vars(module)):
        monkeypatch.setattr(module, function, partial(called.append, function))
    job = training.small()
    if name == "eager":
        task = eager.EagerTask(job, 0, 1)
        run_threads(partial(eager.work_eagerly, task), 1, lambda step: None)
        assert called == ["keep_freed_memory"]
        return
    captured = capture(job)
    if name == "measure":
        measure.measure(captured, job)
        monkeypatch.setattr(measure, "workspaces", _fail)
        with pytest.raises(RuntimeError, match="no workspace"):
            measure.measure(captured, job)
        assert called == 2 * ["keep_freed_memory", "give_back"]
        return
    plan = plan_by_hand(captured.graph, [], "gpipe", num_micro_batches=job.micro_batches, clip=True)
    program, stages = lower_plan(plan, captured.graph), stages_of(plan, captured.graph)
    task = worker.Task(captured, stages, job, repeated(program, range(1)))
    run_threads(partial(worker.work, task), 1, lambda step: None)
    assert called == ["keep_freed_memory"]


def _fail(*_: object) -> None:
    raise RuntimeError("no workspace")
