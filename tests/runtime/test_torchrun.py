"""Ranks that torchrun started train as the plain loop does, over shared memory and over gloo."""

import json
import os
from functools import partial

import pytest
import torch

from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.processes.started import under_torchrun
from penstock.runtime import launch
from penstock.runtime.windows import repeated
from penstock.runtime.worker import Task, work
from tests.parity.models import captured, job_of, plain_loop, plan_of
from tests.runtime.as_torchrun import as_torchrun


def trains() -> None:
    """Train as a rank of a torchrun job, in both ways, and print the losses that were told."""
    assert under_torchrun()
    store = launch.torchrun_store()
    made, job = captured("frozen", torch.float32), job_of("frozen", torch.float32, clip_norm=0.1)
    rank = int(os.environ["RANK"])
    for schedule, replicas in ("zb_h1", 1), ("gpipe", 2):
        for shared in (True, False):
            plan = plan_of(made.graph, schedule, 2 // replicas, 2, replicas=replicas, clip=True)
            program = lower_plan(plan, made.graph)
            task = Task(made, stages_of(plan, made.graph), job, repeated(program, range(3)))
            launch.available = lambda shared=shared: (shared, "")
            losses: list[float | None] = []
            result = launch.run_torchrun(
                partial(work, task),
                launch.under(store, f"{schedule} {shared}"),
                lambda step, losses=losses: losses.append(step.loss),
                groups=[(0, 1)],
                rank=None if shared else 1 - rank,
            )
            assert result.rank == (rank if shared else 1 - rank)
            if losses[0] is not None:
                print(json.dumps([schedule, shared, losses]))


def test_losses_are_those_of_the_plain_loop(tmp_path):
    captured("frozen", torch.float32)
    told = {}
    for code, out, err in as_torchrun(trains, tmp_path, ranks=2):
        assert code == 0, err
        for schedule, shared, losses in map(json.loads, out.splitlines()):
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
