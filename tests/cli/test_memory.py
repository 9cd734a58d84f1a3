"""A rank never holds more than `memory` allows."""

import json
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import penstock as ps
from penstock.choose.flag_text import memory_asked, to_fill
from penstock.units import KiB
from tests.cli import mlp
from tests.cli.conftest import Call

WIDE = 192
JOBS = "tests/cli/test_memory.py"
CAP = 1500 * KiB  # of some 3 MiB: the state has to go, and what F keeps


def wide() -> ps.Job:
    """A job whose tensors are large beside what an allocator rounds up."""

    def model() -> nn.Module:
        first, last = nn.Linear(mlp.WIDTH, WIDE), nn.Linear(WIDE, 1)
        rows = [nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh()) for _ in range(4)]
        return nn.Sequential(first, *rows, last)

    def data(start: int):
        return (next(mlp.data(number)) for number in count(start))

    adam = torch.optim.Adam
    return replace(mlp.job(), model=model, data=data, optimizer=lambda weights: adam(weights))


def test_a_cap_is_kept_by_what_is_measured(call: Call, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    asked = [
        "--set",
        f"memory={CAP}",
        "--ranks",
        "1",
        "--set",
        "check=false",
        "--set",
        "trial=false",
    ]
    done = call("train", f"{JOBS}:wide", *asked, "--out", str(folder))
    assert done.code == 0, done.err
    told = json.loads((folder / "summary.json").read_text())
    (predicted,), (held,) = told["peak_bytes_predicted"], told["peak_bytes_measured"]
    assert told["cap_bytes"] == [CAP]
    assert predicted <= to_fill(CAP) < CAP
    assert held <= CAP
    assert held == pytest.approx(predicted, rel=0.001)


@given(st.integers(1, 2**40))
def test_a_plan_is_to_fill_all_but_a_thousandth(size: int) -> None:
    fills = to_fill(size)
    assert isinstance(fills, int)
    assert size * 15 // 16 <= fills <= size
    assert fills == size or size - fills <= size / 1024 + 4 * KiB
    if size >= 128 * KiB:
        assert size - fills >= size // 1024 + 4 * KiB
    assert to_fill((size, 2 * size)) == (fills, to_fill(2 * size))


def test_nothing_asked_is_nothing_filled() -> None:
    assert to_fill(memory_asked(None)) is None
