"""Memory that is freed stays with the process: the same blocks again cost no page fault."""

import subprocess
import sys
import textwrap

import pytest

from penstock.heap import give_back, keep_freed_memory

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


@pytest.mark.skipif(not keep_freed_memory(), reason="not known to work here: needs glibc")
def test_kept_memory_costs_no_page_fault() -> None:
    assert page_faults(keeps=True) < 50
    assert page_faults(keeps=False) > 1000, "then there is nothing to gain"


@pytest.mark.skipif(not keep_freed_memory(), reason="not known to work here: needs glibc")
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
