"""Micro-batches move away from a slow rank between two steps, and back.

What samples tell is made up here, so it does not depend on the machine.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import penstock as ps
from penstock.checkpoints import checkpoint
from penstock.pilot import replan
from penstock.pilot.replan import Replanner
from penstock.pilot.replan_log import Replan, replanned, replans_in, words_of
from penstock.plan import Plan
from penstock.runtime import sampler
from penstock.runtime.rank import Rank
from penstock.runtime.sampler import Sampler
from tests.pilot.test_replan import JOB, batches, model

MICRO_BATCHES, STEPS = 8, 140


def wide() -> torch.nn.Module:
    return model().double()


def doubles(start: int) -> Iterator[Tensor]:
    for batch in batches(start):
        yield batch.double()


WIDE = replace(JOB, micro_batches=MICRO_BATCHES, model=wide, data=doubles)
Factor = Callable[[int, int], float]


def tell(patched: pytest.MonkeyPatch, factor: Factor, waits: Callable[[], float]) -> None:
    """Let samples tell that an action takes 1 ms, times factor(rank, step), and sums `waits()`."""
    now, run, window = [0, 0], Rank.run, Sampler.window

    def noting(rank: Rank, calls, first_step: int):
        now[:] = rank.rank, first_step
        return run(rank, calls, first_step)

    def made_up(own: Sampler, calls, marks, num_steps: int, look) -> None:
        marks = [0.0]
        for each in calls:
            computes = each.lane in ("compute", "update")
            took = 1e-3 * factor(*now) if computes else waits() if each.lane == "collective" else 0
            marks.append(marks[-1] + took)
        window(own, calls, marks, num_steps, look)

    patched.setattr(Rank, "run", noting)
    patched.setattr(Sampler, "window", made_up)
    patched.setattr(sampler, "_SHARE", 0)


@pytest.fixture(autouse=True)
def _only_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(replan, "_DISK_BYTES_PER_S", 1e-9)  # another plan never pays
    monkeypatch.setattr(replan, "_BIND_S", 0.0)
    ready = Replanner.ready

    def cheap(guide: Replanner, rank: int) -> None:
        ready(guide, rank)
        guide._share_s = 0.0

    monkeypatch.setattr(Replanner, "ready", cheap)


def train(folder: Path) -> list[Replan]:
    fixed = {"ranks": 2, "stages": 1, "check": False, "trial": False, "out": folder}
    ps.train(WIDE, num_steps=STEPS, **fixed)
    return replans_in(folder)


def check(folder: Path) -> None:
    """Compare weights and buffers with those of a plain loop."""
    own, data = wide(), doubles(0)
    optimizer = torch.optim.AdamW(own.parameters(), 1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(MICRO_BATCHES):
            (own(next(data)).square().sum() / MICRO_BATCHES).backward()
        optimizer.step()
    newest = checkpoint.latest(folder / "checkpoints")
    assert newest is not None
    state = checkpoint.load(newest)
    assert state.step == STEPS
    held = {"weights": own.named_parameters(), "buffers": own.named_buffers()}
    for kind, pairs in held.items():
        for name, value in pairs:
            found = state.tensors[f"{kind}/{name}"]
            torch.testing.assert_close(found, value.detach(), rtol=1e-5, atol=1e-7)


def test_micro_batches_move_away_and_are_taken_back(tmp_path, monkeypatch):
    tell(monkeypatch, lambda rank, step: 3.0 if rank == 1 and 40 <= step < 90 else 1.0, lambda: 0)
    monkeypatch.setattr(Replanner, "_judge", lambda *about: None)
    away, back = train(tmp_path / "run")
    assert away.is_shared
    assert back.is_shared
    assert 40 + 8 < away.step < 70 < 90 + 8 < back.step < 130
    assert away.factors == pytest.approx((1.0, 3.0))
    assert back.factors == pytest.approx((1.0, 1.0))
    assert away.after_s < away.before_s
    assert re.search("one_f_one_b, [67] [+] [12] in place of .*, 4 per replica", away.changes)
    assert Plan.load(tmp_path / "run" / "plan.json").grid.shares == (4, 4)
    row = replanned(tmp_path / "run")[0]
    assert words_of(row)[0].startswith(f"micro-batches shared otherwise after {away.step} steps")
    check(tmp_path / "run")


def test_shares_that_turn_out_slower_are_left_again(tmp_path, monkeypatch):
    """Whatever was predicted: with other shares this machine waits for a second a step."""
    changed: list[int] = []
    ready = Replanner.ready

    def noting(guide: Replanner, rank: int) -> None:
        changed.append(rank)
        ready(guide, rank)

    monkeypatch.setattr(Replanner, "ready", noting)
    tell(
        monkeypatch,
        lambda rank, step: 3.0 if rank == 1 and step >= 40 else 1.0,
        lambda: 1.0 if len(changed) == 1 else 0.0,
    )
    away, back = train(tmp_path / "run")
    assert (away.is_shared, away.is_back) == (True, False)
    assert (back.is_shared, back.is_back) == (True, True)
    assert away.step + 16 <= back.step <= away.step + 40
    assert Plan.load(tmp_path / "run" / "plan.json").grid.shares == (4, 4)
    check(tmp_path / "run")


def test_noise_moves_nothing(tmp_path, monkeypatch):
    tell(monkeypatch, lambda rank, step: 1.0 + 0.3 * ((step * 7919) % 13) / 13, lambda: 0)
    assert train(tmp_path / "run") == []
