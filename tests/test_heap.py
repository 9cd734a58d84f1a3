"""Memory that is freed stays with the process: the same blocks again cost no page fault."""

import subprocess
import sys
import textwrap

import pytest

from penstock.heap import keep_freed_memory

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


@pytest.mark.skipif(not keep_freed_memory(), reason="not known to work here: needs glibc")
def test_kept_memory_costs_no_page_fault() -> None:
    assert page_faults(keeps=True) < 50
    assert page_faults(keeps=False) > 1000, "then there is nothing to gain"
