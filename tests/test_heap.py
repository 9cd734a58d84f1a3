"""Memory that is freed stays with the process: the same blocks again cost no page fault."""

import subprocess
import sys
import textwrap
from functools import partial

import pytest

from penstock.graph.trace import capture
from penstock.heap import _of_libc, give_back, keep_freed_memory
from penstock.plan import plan_by_hand
from penstock.profile import measure
from penstock.program.lower_plan import lower_plan, stages_of
from penstock.runtime import eager, worker
from penstock.runtime.launch import run_threads
from tests.cli import training

PROGRAM = """
    import resource
    import torch
    from penstock.heap import keep_freed_memory

    if {keeps}:
        assert keep_freed_memory()

    def step():  # as a training step: everything is taken, then everything is freed
        return [torch.ones(size) for size in (9_000_000, 40_000, 3_000_000, 500_000)]

    for _ in range(3):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        step()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 10)
"""


def page_faults(*, keeps: bool) -> float:
    program = textwrap.dedent(PROGRAM).format(keeps=keeps)
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return float(told.stdout)


GROWS = """
    import torch
    from penstock.heap import give_back, keep_freed_memory

    def resident():
        with open("/proc/self/statm") as file:
            return 4096 * int(file.read().split()[1]) / 2**20

    assert keep_freed_memory()
    before = resident()
    held = [torch.ones(250_000) for _ in range(100)]  # 95 MiB
    last = torch.ones(1000)
    del held
    kept = resident() - before
    give_back()
    print(kept, resident() - before)
"""


HUGE = """
    import ctypes
    import torch
    from penstock.heap import keep_freed_memory

    sbrk = ctypes.CDLL(None).sbrk
    sbrk.restype = ctypes.c_size_t
    assert keep_freed_memory()
    before = sbrk(0)
    held = [torch.empty(2**28 - 2**20) for _ in range(3)]  # 1 GiB each, which nobody touches
    grown = sbrk(0) - before
    del held
    print(grown / 2**30, (sbrk(0) - before) / 2**30)
"""
NEEDS_GLIBC = pytest.mark.skipif(_of_libc("mallopt") is None, reason="needs glibc")


@NEEDS_GLIBC
def test_kept_memory_costs_no_page_fault() -> None:
    assert page_faults(keeps=True) < 50
    assert page_faults(keeps=False) > 1000, "then there is nothing to gain"


@NEEDS_GLIBC
def test_any_amount_of_any_size_is_kept() -> None:
    command = [sys.executable, "-c", textwrap.dedent(HUGE)]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    grown, kept = map(float, told.stdout.split())
    assert grown > 2.9
    assert kept == grown


@NEEDS_GLIBC
def test_what_is_kept_can_be_given_back() -> None:
    command = [sys.executable, "-c", textwrap.dedent(GROWS)]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    kept, left = map(float, told.stdout.split())
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
    task = worker.Task(captured, stages, job, ((program, 0),))
    run_threads(partial(worker.work, task), 1, lambda step: None)
    assert called == ["keep_freed_memory"]


def _fail(*_: object) -> None:
    raise RuntimeError("no workspace")
