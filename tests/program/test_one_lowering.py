"""What is simulated and what runs are the same instructions, to the letter."""

from functools import partial

import pytest
import torch

from penstock.choose.run_windows import windows_of
from penstock.cluster import Cluster
from penstock.plan.lower_plan import stages_of
from penstock.runtime import bind, launch
from penstock.runtime.launch import run_processes, run_threads
from penstock.runtime.worker import Task, work
from penstock.search import judge
from tests.parity.models import captured, job_of, plan_of
from tests.runtime.test_memory import profile_of

FLOAT = torch.float32
PLANS = [
    ("gpipe", 2, {}),
    ("gpipe", 2, {"early": 2}),
    ("one_f_one_b", 2, {"replicas": 2, "clip": True}),
    ("zb_h2", 2, {"clip": True, "post_validation": True, "early": 4}),
    ("interleaved", 4, {"recompute": (True, False, True, False)}),
    ("chimera", 2, {}),
    ("pipedream", 2, {"early": 1}),
]


def words(program):
    return "\n".join(" ".join(map(str, code)) for code in program.code)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("transport", ["threads", "shared memory", "gloo"])
@pytest.mark.parametrize(("schedule", "stages", "options"), PLANS)
def test_ranks_run_what_is_simulated(schedule, stages, options, transport, monkeypatch, tmp_path):
    options = dict(options)
    early, clip = options.pop("early", 0), {"clip_norm": 1.0} if "clip" in options else {}
    made, job = captured("tied", FLOAT), job_of("tied", FLOAT, "adamw", **clip)
    plan = plan_of(made.graph, schedule, stages, 4, **options).changed(early=early)
    simulated = _simulated(plan, made.graph, monkeypatch)
    _run(plan, made, job, transport, monkeypatch, tmp_path)
    texts = {(tmp_path / str(rank)).read_text() for rank in range(plan.total_ranks)}
    assert texts == {simulated}


def _simulated(plan, graph, monkeypatch):
    found, right = [], judge.Simulator

    def remembers(program, *rest, **more):
        found.append(program)
        return right(program, *rest, **more)

    monkeypatch.setattr(judge, "Simulator", remembers)
    own = judge.Judge(graph, profile_of("tied"), Cluster.here(plan.total_ranks))
    own.simulated(plan, spans=False)
    return words(found[-1])  # of an asynchronous plan the shorter window, which ranks run first


def _run(plan, made, job, transport, monkeypatch, folder):
    """Run the plan; each rank writes down the program that it binds."""
    right = bind.bind

    def remembers(rank, program):
        (folder / str(rank.rank)).write_text(words(program))
        return right(rank, program)

    monkeypatch.setattr(bind, "bind", remembers)
    if transport == "gloo":
        monkeypatch.setattr(launch, "available", lambda: (False, "as between hosts"))
    windows = windows_of(made.graph, plan, range(8), (4,))
    task = Task(made, stages_of(plan, made.graph), job, windows, memory_window=-1)
    run = run_threads if transport == "threads" else run_processes
    run(partial(work, task), plan.total_ranks, lambda step: None, groups=task.groups)
