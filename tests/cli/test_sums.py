"""Gradients summed in few numbers, on the command line: planned, checked, trained, resumed."""

from pathlib import Path

import pytest

from penstock.checkpoints import checkpoint
from penstock.plan import Plan
from tests.cli.conftest import MLP, Call

JOB = f"{MLP}:adam"


def test_a_run_is_planned_checked_and_goes_on(call: Call, tmp_path: Path) -> None:
    done = call("check", JOB, "--stages", 1, "--replicas", 2, "--sums", "top:0.1")
    assert done.code == 0, done.err
    out = tmp_path / "run"
    own = "--ranks", 2, "--stages", 1, "--no-trial", "--set", "sums=int8", "--out", out
    for steps in (2, 4):
        done = call("train", JOB, "--steps", steps, *own, "--resume", "--audit", "50%")
        assert done.code == 0, done.err
        assert "what ranks hold back of sums as int8" in done.err
    plan = Plan.load(out / "plan.json")
    assert plan.agreement.sums == "int8"
    (why,) = (each.why for each in plan.decisions if each.what == "sums")
    assert "travel in 8 bits, 256 with one scale" in why
    assert "not those of a plain loop" in why
    kept = checkpoint.load(checkpoint.latest(out / "checkpoints"))
    assert any(key.startswith("held-back-1/") for key in kept.tensors)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--sums", "int4"), "Job.sums is not"),
        (
            ("--sums", "sign", "--schedule", "pipedream", "--stages", 2),
            "gradients of older weights",
        ),
    ],
)
def test_what_cannot_be_is_refused(call: Call, more: tuple[str, ...], said: str) -> None:
    error, _ = call("train", JOB, "--ranks", 2, *more).refusal(2)
    assert said in error
