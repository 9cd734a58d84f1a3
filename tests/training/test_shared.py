"""Micro-batches move away from a slow rank between two steps, and back."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import penstock as ps
from penstock.plan import Plan
from penstock.runtime import checkpoint
from penstock.training import replan
from penstock.training.replans import replanned, replans_in, words_of
from tests.runtime.as_torchrun import as_torchrun
from tests.training import test_replan
from tests.training.test_replan import JOB, Paced, batches, model

MICRO_BATCHES = 8


def wide() -> torch.nn.Module:
    return model().double()


def doubles(start: int) -> Iterator[Tensor]:
    for batch in batches(start):
        yield batch.double()


WIDE = replace(JOB, micro_batches=MICRO_BATCHES, model=wide, data=doubles)


def slowed(since: int, until: int, rank: int, step: int) -> float:
    return 3.0 if rank == 1 and since <= step < until else 1.0


@pytest.fixture(autouse=True)
def _only_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(test_replan, "PRODUCT_S", 0.0004)
    monkeypatch.setattr(replan, "_DISK_BYTES_PER_S", 1.0)  # another plan never pays


def train(folder: Path, num_steps: int, **more) -> int:
    fixed = {"ranks": 2, "stages": 1, "check": False, "trial": False, "out": folder}
    ps.train(WIDE, num_steps=num_steps, **fixed | more)
    return 0


def plain(num_steps: int) -> dict[str, Tensor]:
    """Return what a loop over the micro-batches gives."""
    own, data = wide(), doubles(0)
    optimizer = torch.optim.AdamW(own.parameters(), 1e-2)
    for _ in range(num_steps):
        optimizer.zero_grad()
        for _ in range(MICRO_BATCHES):
            (own(next(data)).square().sum() / MICRO_BATCHES).backward()
        optimizer.step()
    found = {f"weights/{name}": value.detach() for name, value in own.named_parameters()}
    return found | {f"buffers/{name}": value for name, value in own.named_buffers()}


def check(folder: Path, num_steps: int) -> None:
    newest = checkpoint.latest(folder / "checkpoints")
    assert newest is not None
    state = checkpoint.load(newest)
    assert state.step == num_steps
    for key, value in plain(num_steps).items():
        torch.testing.assert_close(state.tensors[key], value, rtol=1e-5, atol=1e-7)


def test_micro_batches_move_away_and_are_taken_back(tmp_path, monkeypatch):
    """By ranks as torchrun starts them: weights, and buffers of a norm that copies carry."""
    Paced(partial(slowed, 40, 90)).install(monkeypatch)
    folder = tmp_path / "run"
    done = as_torchrun(partial(train, folder, 140), tmp_path, nodes=2)
    assert [code for code, _, _ in done] == [0, 0], done
    away, *between, back = replans_in(folder)
    assert all(made.is_shared for made in (away, *between, back))
    assert 40 + 8 < away.step < 90 < back.step < 140
    assert away.factors[1] / away.factors[0] == pytest.approx(3.0, rel=0.4)
    assert away.after_s < 0.8 * away.before_s
    assert "6 + 2" in away.changes
    plan = Plan.load(folder / "plan.json")
    assert max(plan.grid.shares) - min(plan.grid.shares) <= 2
    row = replanned(folder)[0]
    assert words_of(row)[0].startswith(f"micro-batches shared otherwise after {away.step} steps")
    check(folder, 140)


def test_shares_that_turn_out_slower_are_left_again(tmp_path, monkeypatch):
    """Whatever was predicted: with other shares this machine takes four times as long."""
    changed: list[int] = []
    shared = replan.Replanner.ready

    def ready(guide, rank):
        changed.append(rank)
        shared(guide, rank)

    monkeypatch.setattr(replan.Replanner, "ready", ready)
    Paced(
        lambda rank, step: slowed(40, 999, rank, step) * (4.0 if len(changed) == 1 else 1.0)
    ).install(monkeypatch)
    folder = tmp_path / "run"
    train(folder, 110)
    away, back, *_ = replans_in(folder)  # more of them where the machine is slow itself
    assert (away.is_back, back.is_back) == (False, True)
    assert away.is_shared
    assert back.is_shared
    assert "4 per replica" in back.changes
    check(folder, 110)
