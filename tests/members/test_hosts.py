"""Hosts: members that share no memory work together over gloo, and go on without a lost host."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from penstock.checkpoints import checkpoint
from penstock.members.launch_members import run_members
from penstock.members.words import Where
from tests.members import runs
from tests.members.test_processes import Signals, counting, events_in, start_of
from tests.parity.models import plain_loop


def two_hosts(where: Mapping[int, Where]) -> Mapping[int, Where]:
    """Let members 0 and 1 be of one host, and all others of another."""
    return {m: place._replace(key=f"host {min(m // 2, 1)}") for m, place in where.items()}


class Losses(Signals):
    """Kills several members at once: by step, whom."""

    def __init__(self, losses: dict[int, tuple[int, ...]]) -> None:
        super().__init__({})
        self.losses = losses

    def __call__(self, step) -> None:
        super().__call__(step)
        for member in self.losses.pop(step.step, ()):
            os.kill(self.pids[member], signal.SIGKILL)


@pytest.mark.parametrize("stages", [1, 2], ids=["replicas", "a pipeline of replicas"])
@pytest.mark.parametrize("host", [(0, 1), (2, 3)], ids=["the first host", "the other host"])
@pytest.mark.sampled(2)
def test_a_host_is_lost_and_the_other_goes_on(
    stages: int, host: tuple[int, int], tmp_path: Path
) -> None:
    ways = runs.ways_of("gpt", "adamw", 4)
    shapes = {4: (stages, 4 // stages), 2: (stages, 2 // stages), 1: (1, 1)}
    plans = {count: runs.plan_for(ways, *shape) for count, shape in shapes.items()}
    start = start_of(ways, plans, tmp_path)._replace(meet=two_hosts)
    losses = Losses({1: host})
    assert run_members(start, losses, counting(tmp_path))
    assert (tmp_path / "ended").read_text() == "2"
    assert [step.step for step in losses.steps] == list(range(runs.STEPS))
    gone = {k: v for event in events_in(tmp_path) for k, v in event["gone"].items()}
    assert gone == {str(member): "died" for member in host}
    newest = checkpoint.latest(tmp_path / "checkpoints")
    assert newest is not None
    kept = checkpoint.load(newest)
    expected = plain_loop(runs.job_of("gpt"), runs.STEPS, runs.MICRO_BATCHES)
    for key, value in expected.weights.items():
        torch.testing.assert_close(kept.tensors[key], value, rtol=1e-9, atol=1e-9)
