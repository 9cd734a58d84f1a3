"""penstock train: what a plan would train to other weights is trained as its author's loop does."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from penstock.checkpoints import checkpoint
from penstock.job import Job, load_job
from tests.cli.conftest import Call

ODD = f"{Path(__file__).parent / 'odd.py'}"
SMALL = f"{Path(__file__).parent / 'training.py'}:small"


def plain(job: Job) -> dict[str, Tensor]:
    """Return the weights of the author's loop, written out."""
    torch.manual_seed(job.seed)
    model = job.model()
    optimizer, batches = job.optimizer(model.parameters()), job.data(0)
    for _ in range(job.num_steps):
        optimizer.zero_grad()
        for _ in range(job.micro_batches):
            (job.loss(model, next(batches)) / job.micro_batches).backward()
        clip_grad_norm_(model.parameters(), job.clip_norm)
        optimizer.step()
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: value.detach() for name, value in named}


def trained(folder: Path) -> dict[str, Tensor]:
    newest = checkpoint.latest(folder / "checkpoints")
    assert newest is not None
    tensors = checkpoint.load(newest).tensors
    named = ((k.partition("/"), v) for k, v in tensors.items())
    return {name: v for (kind, _, name), v in named if kind in ("weights", "buffers")}


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "said"),
    [("ignores_start", "micro-batch"), ("anneals", "calls"), ("drops", "random")],
)
def test_one_process_trains_what_no_plan_can(
    call: Call, tmp_path: Path, name: str, said: str
) -> None:
    done = call("train", f"{ODD}:{name}", "--out", str(tmp_path / "run"))
    assert done.code == 0, done.err
    assert "a plan would train something else" in done.err
    assert said in done.err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert said in summary["checked"]
    assert len(summary["peak_bytes_measured"]) == 1
    if name != "drops":
        assert_near(trained(tmp_path / "run"), plain(load_job(f"{ODD}:{name}")))


def test_what_only_one_process_can_read_goes_on_where_it_was(call: Call, tmp_path: Path) -> None:
    job, folder = f"{ODD}:ignores_start", str(tmp_path / "run")
    assert call("train", job, "--steps", "3", "--out", folder).code == 0
    assert call("train", job, "--resume", "--out", folder).code == 0
    assert_near(trained(tmp_path / "run"), plain(load_job(job)))


@pytest.mark.parametrize("name", ["ignores_start", "anneals"])
@pytest.mark.parametrize("flags", [("--set", "strict=true"), ("--schedule", "gpipe")])
def test_it_is_refused_where_that_is_not_wanted(
    call: Call, tmp_path: Path, name: str, flags: tuple[str, ...]
) -> None:
    done = call("train", f"{ODD}:{name}", "--out", str(tmp_path / "run"), *flags)
    message, _ = done.refusal(2)
    assert "a plan would train something else" in message
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("name", "holds"),
    [
        ("looks_across", lambda plan: len(plan["stages"]) == 1),
        ("reads_its_buffer", lambda plan: plan["place"]["replicas"] == 1),
    ],
)
def test_plans_are_bounded_by_what_was_found(
    call: Call, tmp_path: Path, name: str, holds: Callable[[dict], bool]
) -> None:
    done = call("train", f"{ODD}:{name}", "--ranks", "2", "--out", str(tmp_path / "run"))
    assert done.code == 0, done.err
    assert holds(json.loads((tmp_path / "run" / "plan.json").read_text()))
    assert_near(trained(tmp_path / "run"), plain(load_job(f"{ODD}:{name}")))
    assert "equal to the plain loop" in done.err


def test_proof_is_told_and_found_again(call: Call, tmp_path: Path) -> None:
    first = call("train", SMALL, "--out", str(tmp_path / "run"))
    assert "equal to the plain loop at step 1 and 5" in first.err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["checked"].startswith("equal to the plain loop at step 1 and 5: data equal")
    assert "Compared with the plain loop" in (tmp_path / "run" / "report.html").read_text()
    plan = str(tmp_path / "run" / "plan.json")
    second = call("train", SMALL, "--plan", plan, "--out", str(tmp_path / "again"))
    assert "as was found before" in second.err


def test_two_jobs_of_one_file_are_not_taken_for_each_other(call: Call, tmp_path: Path) -> None:
    """They have the same model and numbers; only what an optimizer does tells them apart."""
    fixed = "--set", "stages=2", "--schedule", "one_f_one_b"
    assert call("train", f"{ODD}:divides", "--out", str(tmp_path / "a"), *fixed).code == 0
    done = call("train", f"{ODD}:looks_across", "--out", str(tmp_path / "b"), *fixed)
    assert "the optimizer cannot be divided into 2 stages" in done.refusal(2)[0]


def test_what_is_not_checked_is_said(call: Call, tmp_path: Path) -> None:
    done = call("train", f"{ODD}:anneals", "--set", "check=false", "--out", str(tmp_path / "run"))
    assert done.code == 0, done.err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["checked"] == "left out, as asked"
    assert "left out, as asked" in (tmp_path / "run" / "report.html").read_text()


def test_eager_needs_no_plan(call: Call, tmp_path: Path) -> None:
    done = call(
        "train", SMALL, "--set", "eager=true", "--ranks", "2", "--out", str(tmp_path / "run")
    )
    assert done.code == 0, done.err
    assert not (tmp_path / "run" / "plan.json").exists()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "equal to the plain loop" in summary["checked"]
    assert len(summary["peak_bytes_measured"]) == 2
    assert_near(trained(tmp_path / "run"), plain(load_job(SMALL)))
