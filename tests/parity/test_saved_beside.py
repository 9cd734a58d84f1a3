"""What is written beside the steps is what is written at once, and is read at any other plan."""

from functools import cache

import pytest
import torch

from penstock.checkpoints import checkpoint
from penstock.runtime.launch import run_processes
from tests.parity.models import captured, job_of, plain_loop, plan_of
from tests.parity.training import Run, difference, train, windows

BEFORE, AFTER, MICRO_BATCHES = 2, 2, 4
FAR = ("all", "weights", "state", "all")


def run_of(schedule, stages, replicas=1, **options) -> Run:
    graph = captured("gpt", torch.float64).graph
    own = {key: options.pop(key) for key in ("num_ranks",) if key in options}
    plan = plan_of(graph, schedule, stages, MICRO_BATCHES // replicas, replicas=replicas, **own)
    plan = plan.changed(**options)
    return Run(plan, job_of("gpt", torch.float64, "adamw"), captured("gpt", torch.float64))


DIVIDED = {"num_ranks": 1, "shard": ("shard",) * 4}
RUNS = {
    "pipeline": (("one_f_one_b", 2), {}),
    "replicas": (("gpipe", 1, 2), {}),
    "shards": (("breadth_first", 4, 2), {**DIVIDED, "prefetch": 1}),
    "unequal parts": (("breadth_first", 4, 2), {**DIVIDED, "parts": (3, 1)}),
    "far weights": (("breadth_first", 4), {"num_ranks": 1, "offload": FAR, "prefetch": 1}),
    "older versions": (("pipedream", 2), {}),
}


@cache
def named(name) -> Run:
    sizes, options = RUNS[name]
    return run_of(*sizes, **options)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", RUNS)
def test_written_beside_the_steps_is_what_is_written_at_once(name, tmp_path):
    """And another plan, on another number of ranks, goes on from it as the plain loop does."""
    run = named(name)
    whole, once = tmp_path / "whole", tmp_path / "once"
    outcome = train(run, whole, (1, 1, AFTER), run_processes, every=BEFORE)
    train(run, once, (1, 1), run_processes)
    assert any(saves.blocked_s for saves in outcome.saves) == (name != "far weights")
    beside, at_once = (
        checkpoint.load(checkpoint.folder_of(folder, BEFORE)) for folder in (whole, once)
    )
    assert beside.plain == at_once.plain
    assert beside.tensors.keys() == at_once.tensors.keys()
    for key, value in at_once.tensors.items():
        assert torch.equal(beside.tensors[key], value), key
    others = ("pipeline", "replicas", "shards") if name != "older versions" else (name,)
    for other in others:
        rest = tuple((program, BEFORE + at) for program, at in windows(named(other), (AFTER,)))
        at = checkpoint.folder_of(whole, BEFORE)
        ended = train(named(other), tmp_path / other, windows=rest, resume=at).weights
        expected = outcome.weights
        if name != "older versions":
            expected = plain_loop(run.job, BEFORE + AFTER, MICRO_BATCHES).weights
        assert difference(ended, expected) < 1e-11
