"""Ops of a stage divided among ranks, on the command line: checked, trained, resumed, refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.choose.choose import Choice
from penstock.choose.settle import Checked
from penstock.cluster.cluster import Cluster, DeviceKind, Host, Link
from penstock.plan import Plan
from penstock.schedule.recipe import is_woven
from penstock.training.session import Session
from tests.cli.conftest import MLP, Call
from tests.cli.goes_on import ALL, check_goes_on

JOB = f"{MLP}:adam"
TOLD = "loss", "acc", "size", "square", "val_acc", "val_square"
FIGURES = """
import itertools
import torch
from torch import nn
import penstock as ps


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def data(start):
    for k in itertools.count(start):
        drawn = torch.Generator().manual_seed(k)
        yield torch.randn(16, 64, generator=drawn), torch.randint(10, (16,), generator=drawn)


def loss(model, batch):
    wide, out = model[0].up(batch[0]), model(batch[0])
    value = nn.functional.cross_entropy(out, batch[1])
    sizes = {"size": wide.abs().mean(), "square": wide.square().mean()}
    return value, {"acc": (out.argmax(-1) == batch[1]).float().mean(), **sizes}


def job():
    model = lambda: nn.Sequential(Block(), Block(), Block(), nn.Linear(64, 10))
    optimizer = lambda weights: torch.optim.AdamW(weights, lr=1e-3)
    validation = lambda: itertools.islice(data(1000), 2)
    more = {"validation": validation, "validate_every": 1}
    return ps.Job(model, loss, data, optimizer, micro_batches=4, **more)
"""
WIDE = """
import torch
from torch import nn
import penstock as ps


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


def data(start):
    while True:
        yield torch.randn(64, 256, generator=torch.Generator().manual_seed(start))
        start += 1


def loss(model, batch):
    return model(batch).square().mean()


def job():
    optimizer = torch.optim.AdamW
    return ps.Job(lambda: nn.Sequential(Block(), Block()), loss, data, optimizer, micro_batches=4)
"""


def test_a_divided_step_equals_the_plain_one(call: Call) -> None:
    done = call("check", JOB, "--set", "stages=1", "--set", "tensor=2")
    assert done.code == 0
    assert "ok" in done.out


def test_a_divided_run_goes_on_whole_and_a_whole_one_divided(call: Call, tmp_path: Path) -> None:
    check_goes_on(call, JOB, "tensor=2", tmp_path)


def test_a_plan_for_machines_of_a_file_divides_ops_as_asked_and_is_explained(
    call: Call, tmp_path: Path
) -> None:
    machines, file = tmp_path / "two.toml", tmp_path / "plan.json"
    kind = DeviceKind("small", 1 << 30, (("float32", 1e11),), 2e10)
    Cluster((kind,), (Host("host", "small", 2),), inside=Link(1e-6, 50e9)).save(machines)
    done = call("plan", JOB, "--cluster", machines, "--set", "tensor=2", "--out", file)
    assert done.code == 0, done.err
    assert "tensor: 2 ranks (user): requested: " in done.out
    assert Plan.load(file).place.tensor == 2
    assert call("simulate", file).code == 0
    explained = call("explain", file)
    assert explained.code == 0
    assert "tensor: 2 ranks (user)" in explained.out


def test_units_are_woven_where_that_hides_collects_or_is_asked_for(
    call: Call, tmp_path: Path
) -> None:
    machines, file, wide = (tmp_path / name for name in ("two.toml", "plan.json", "wide.py"))
    kind = DeviceKind("small", 1 << 30, (("float32", 1e10),), 2e9)
    Cluster((kind,), (Host("host", "small", 2),), inside=Link(1e-6, 3e7)).save(machines)
    wide.write_text(WIDE)
    done = call("plan", wide, "--cluster", machines, "--set", "tensor=2", "--out", file)
    assert done.code == 0, done.err
    assert "units: woven (search): best alternative" in done.out
    assert is_woven(Plan.load(file).schedule)
    assert "those of one micro-batch after the other" in call("explain", file).out
    asked = "--set", "tensor=2", "--set", "units=woven"
    run = tmp_path / "run"
    done = call("train", wide, "--ranks", "2", *asked, "--steps", "3", "--out", run)
    assert done.code == 0, done.err
    told = json.loads((run / "summary.json").read_text())
    assert told["checked"].startswith("equal to the plain loop")
    pairs = zip(told["peak_bytes_predicted"], told["peak_bytes_measured"], strict=True)
    assert all(measured == pytest.approx(predicted, rel=0.01) for predicted, measured in pairs)
    assert "units: woven (user)" in call("explain", run / "plan.json").out
    done = call("check", JOB, "--set", "stages=1", *asked)
    assert done.code == 0, done.err
    assert "woven" in done.out
    one = tmp_path / "one.py"
    one.write_text(WIDE.replace("micro_batches=4", "micro_batches=1"))
    done = call("plan", one, "--cluster", machines, *asked)
    assert done.code == 0, done.err
    assert "2 per replica, each of the job's in 2 parts" in done.out
    one.write_text(one.read_text().replace("randn(64", "randn(63"))
    done = call("plan", one, "--cluster", machines, *asked)
    assert done.code == 2
    assert "units are to be woven, and a replica has one micro-batch a step" in done.err
    done = call("plan", wide, "--cluster", machines, *asked, "--set", "context=1", "--out", file)
    assert done.code == 0, done.err
    assert is_woven(Plan.load(file).schedule)
    done = call("train", JOB, "--ranks", "2", "--set", "units=woven", "--set", "tensor=1")
    assert done.code == 2
    assert "no ranks divide ops or tokens" in done.err


def test_figures_are_told_wherever_units_are_cut(call: Call, tmp_path: Path) -> None:
    """A loss that is divided by classes is cut from the figures behind it."""
    file, found = tmp_path / "figures.py", list[list[dict[str, float]]]()
    file.write_text(FIGURES)
    for more in ("tensor=1",), ("tensor=2",), ("tensor=2", "units=woven"):
        asked = [word for each in more for word in ("--set", each)]
        out = tmp_path / "-".join(more)
        done = call("train", file, "--ranks", "2", *asked, "--steps", "3", "--out", out)
        assert done.code == 0, done.err
        rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        found.append([{name: row[name] for name in TOLD} for row in rows])
    plain, *divided = found
    assert all(0 < row["acc"] < 1 for row in plain)
    for rows in divided:
        assert rows == [pytest.approx(row, rel=1e-5) for row in plain]


def test_a_divided_plan_that_nobody_asked_for_and_that_differs_is_put_aside(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose, prove = Session.choose, Session.prove
    proved: list[int] = []

    def divided(self: Session, *about: Any) -> Choice:
        open_to_all, self.fixed = self.fixed, replace(self.fixed, tensor=self.fixed.tensor or 2)
        choice = choose(self, *about)
        self.fixed = open_to_all
        return choice

    def differs(self: Session, choice: Choice, *about: Any) -> Checked:
        proved.append(choice.plan.tensor)
        checked = prove(self, choice, *about)
        return checked._replace(problem="the loss differs") if choice.plan.tensor > 1 else checked

    monkeypatch.setattr(Session, "choose", divided)
    monkeypatch.setattr(Session, "prove", differs)
    more = "--ranks", 2, "--steps", 2, "--set", "strict=true", *ALL
    done = call("train", JOB, *more, "--out", tmp_path / "run")
    assert done.code == 0, done.err
    assert "training by a plan that divides no ops: the loss differs" in done.err
    assert proved == [2, 1]
    assert Plan.load(tmp_path / "run/plan.json").place.tensor == 1


@pytest.mark.parametrize(
    "more", [("--set", "offload=all"), ("--elastic",), ("--set", "units=block")]
)
def test_what_no_divided_plan_has_is_refused_at_once(call: Call, more: tuple[str, ...]) -> None:
    error, hint = call("train", JOB, "--ranks", 2, "--set", "tensor=2", *more).refusal(2)
    name = more[-1].removeprefix("--").partition("=")[0]
    assert error == f"2 ranks are to divide the ops of stages, and no such plan has {name}"
    assert hint == f"leave out tensor, or {name}"
