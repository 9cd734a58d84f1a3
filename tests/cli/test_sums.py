"""Gradients summed in few numbers, on the command line: planned, checked, trained, resumed."""

from pathlib import Path

import pytest

from penstock.checkpoints import checkpoint
from penstock.plan import Plan
from tests.cli.conftest import MLP, Call

JOB = f"{MLP}:adam"


def test_a_run_is_planned_checked_and_goes_on(call: Call, tmp_path: Path) -> None:
    done = call("check", JOB, "--set", "stages=1", "--replicas", 2, "--set", "sums=top:0.1")
    assert done.code == 0, done.err
    out = tmp_path / "run"
    own = (
        "--ranks",
        2,
        "--set",
        "stages=1",
        "--set",
        "trial=false",
        "--set",
        "sums=int8",
        "--out",
        out,
    )
    for steps in (2, 4):
        done = call("train", JOB, "--steps", steps, *own, "--resume", "--set", "audit=50%")
        assert done.code == 0, done.err
        assert "what ranks hold back of sums as int8" in done.err
    plan = Plan.load(out / "plan.json")
    assert plan.agreement.sums == "int8"
    (why,) = (each.why for each in plan.decisions if each.what == "sums")
    assert "travel in 8 bits, 256 with one scale" in why
    assert "not those of a plain loop" in why
    kept = checkpoint.load(checkpoint.latest(out / "checkpoints"))
    assert any(key.startswith("held-back-1/") for key in kept.tensors)


def test_sums_go_along_what_is_asked_for(call: Call, tmp_path: Path) -> None:
    done = call("check", JOB, "--set", "stages=1", "--replicas", 2, "--set", "topology=tree")
    assert done.code == 0, done.err
    own = "--ranks", 2, "--set", "trial=false", "--out", tmp_path, "--resume"
    for word, steps in (("doubling", 2), (None, 3), ("server", 4)):
        asked = () if word is None else ("--set", f"topology={word}", "--set", "stages=1")
        done = call("train", JOB, "--steps", steps, *own, *asked)
        assert done.code == 0, done.err
        plan = Plan.load(tmp_path / "plan.json")
        assert plan.agreement.topology == (word or "doubling")  # goes on as it began
        (why,) = (each.why for each in plan.decisions if each.what == "topology")
        assert "2 rounds a sum" in why or "1 rounds a sum" in why


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--set", "topology=star"), "topology is not"),
        (("--set", "topology=ring", "--set", "eager=true"), "eager trains without a plan"),
        (("--set", "sums=int4"), "Job.sums is not"),
        (
            ("--set", "sums=sign", "--schedule", "pipedream", "--set", "stages=2"),
            "gradients of older weights",
        ),
    ],
)
def test_what_cannot_be_is_refused(call: Call, more: tuple[str, ...], said: str) -> None:
    error, _ = call("train", JOB, "--ranks", 2, *more).refusal(2)
    assert said in error
