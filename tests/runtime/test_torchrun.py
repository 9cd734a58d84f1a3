"""Ranks that torchrun started train as the plain loop does, over shared memory and over gloo."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from penstock.runtime.launch import under_torchrun
from tests.parity.models import job_of, plain_loop

ROOT = Path(__file__).parents[2]
PROGRAM = """
    import json, os, sys, tempfile, torch
    sys.path.insert(0, {root!r})
    torch.set_num_threads(1)
    from functools import partial
    from penstock.program.lower_plan import lower_plan, stages_of
    from penstock.runtime import launch
    from penstock.runtime.windows import repeated
    from penstock.runtime.worker import Task, work
    from tests.parity.models import captured, job_of, plan_of

    assert launch.under_torchrun()
    store = launch.torchrun_store()
    made, job = captured("frozen", torch.float32), job_of("frozen", torch.float32, clip_norm=0.1)
    for number, (schedule, replicas) in enumerate([("zb_h1", 1), ("gpipe", 2)]):
        for shared in (True, False):
            plan = plan_of(made.graph, schedule, 2 // replicas, 2, replicas=replicas, clip=True)
            program = lower_plan(plan, made.graph)
            task = Task(made, stages_of(plan, made.graph), job, repeated(program, range(3)))
            launch.available = lambda: (shared, "")
            losses = []
            own = launch.under(store, f"{{schedule}} {{shared}}")
            seat = 1 - int(os.environ["RANK"])
            result = launch.run_torchrun(
                partial(work, task), own, lambda step: losses.append(step.loss),
                groups=[(0, 1)], rank=None if shared else seat,
            )
            assert result.rank == (int(os.environ["RANK"]) if shared else seat)
            if losses[0] is not None:
                line = json.dumps([schedule, shared, losses]) + chr(10)
                os.write(1, line.encode())  # in one piece: the other rank writes too
"""


def torchrun(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    file = folder / "program.py"
    file.write_text(textwrap.dedent(program).format(root=str(ROOT)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, str(file)], capture_output=True, text=True, env=environment, timeout=100
    )


def test_losses_are_those_of_the_plain_loop(tmp_path):
    done = torchrun(PROGRAM, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    told = {}
    for schedule, shared, losses in map(json.loads, done.stdout.splitlines()):
        told.setdefault((schedule, shared), []).append(losses)
    job = job_of("frozen", torch.float32, clip_norm=0.1)
    expected = plain_loop(job, 3, 2).losses
    assert told["zb_h1", True] == told["zb_h1", False] == [pytest.approx(expected, rel=1e-6)]
    both = plain_loop(job, 3, 4).losses
    for shared in (True, False):
        means = [sum(pair) / 2 for pair in zip(*told["gpipe", shared], strict=True)]
        assert means == pytest.approx(both, rel=1e-6)


def test_a_process_of_its_own_is_not_under_torchrun(monkeypatch):
    for name in ("RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    assert not under_torchrun()
    monkeypatch.setenv("RANK", "0")
    assert not under_torchrun()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert under_torchrun()
