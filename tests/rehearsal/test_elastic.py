"""An elastic run on rehearsal GPUs, one of which is lost."""

import json
from pathlib import Path

import pytest
import torch

from tests.rehearsal import large_job
from tests.rehearsal.command import rehearse

JOB = Path(large_job.__file__)
LOSS = "val_loss"


def plainly(steps: int) -> float:
    """Return the validation loss of the plain loop, on the CPU."""
    job = large_job.job()
    torch.manual_seed(job.seed)
    model = job.model()
    optimizer, data = job.optimizer(model.parameters()), large_job.data(0)
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(job.micro_batches):
            (job.loss(model, next(data)) / job.micro_batches).backward()
        optimizer.step()
    with torch.no_grad():
        return float(job.loss(model, next(large_job.data(1000))))


@pytest.mark.parametrize("stages", ["2", "1"])
@pytest.mark.sampled(2)
def test_run_goes_on_as_the_plain_loop_when_a_gpu_is_lost(tmp_path: Path, stages: str) -> None:
    """With one stage there are replicas; of two, each alone on its rank, the other has a copy."""
    arguments = ["train", f"{JOB}:deadly", "--elastic", "--set", f"stages={stages}", "--out", "run"]
    seen = rehearse(arguments, tmp_path, gpus=2)
    assert seen.code == 0, seen.text
    assert seen.races == []
    events = [json.loads(row) for row in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert [event["what"] for event in events] == ["begins", "lost"]
    assert 1 <= events[1]["step"] <= 2
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary[LOSS] == pytest.approx(plainly(6), rel=1e-5)
    last = next(row for row in reversed(seen.windows) if row["rank"] == 0)
    assert last["live"] <= 1.02 * last["held"]
    assert last["syncs"] <= 1  # the vote, with which norm and losses are seen
    assert last["pageable"] == 0
