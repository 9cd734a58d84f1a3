"""Runs whose updates follow who comes first: written down, and made again."""

import json

import pytest
import torch

import penstock as ps
from penstock.checkpoints import checkpoint
from penstock.errors import PlanError, RunError
from tests.parity.training import differing


def data(start):
    while True:
        yield torch.randn(4, 8, generator=torch.Generator().manual_seed(start))
        start += 1


def job(**words):
    return ps.Job(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()),
        loss=lambda model, x: (model(x) - x).square().mean(),
        data=data,
        optimizer=lambda weights: torch.optim.AdamW(weights, lr=1e-2),
        micro_batches=2,
        **words,
    )


def trained(folder, **options):
    ps.train(job(), num_steps=6, ranks=2, out=folder, trial=False, listener=None, **options)
    return checkpoint.load(checkpoint.latest(folder / "checkpoints")).tensors


@pytest.mark.parametrize("sums", ["backup:1", "ssp:1:aware"])
def test_a_run_makes_the_decisions_of_another_one_again(sums, tmp_path):
    first = trained(tmp_path / "first", sums=sums)
    again = trained(tmp_path / "again", sums=sums, decisions=str(tmp_path / "first"))
    assert differing(again, first) == []
    files = [tmp_path / name / "decisions.jsonl" for name in ("first", "again")]
    assert files[0].read_text() == files[1].read_text()
    rows = [json.loads(line) for line in files[0].read_text().splitlines()]
    assert len(rows) == (6 if sums == "backup:1" else 12)
    plan = ps.Plan.load(tmp_path / "first" / "plan.json")
    assert (plan.served, plan.replicas, plan.num_ranks) == (sums, 2, 1)
    (reason,) = (row.why for row in plan.decisions if row.what == "sums")
    assert "a server" in reason
    summary = json.loads((tmp_path / "first" / "summary.json").read_text())
    assert "follows who comes first" in summary["audited"]


def test_what_does_not_go_with_a_server_is_refused_with_the_reason(tmp_path):
    about = {"num_steps": 2, "ranks": 2, "out": tmp_path, "listener": None, "sums": "async"}
    with pytest.raises(PlanError, match="a norm of all gradients, of which it has one rank's"):
        ps.train(job(clip_norm=1.0), **about)
    with pytest.raises(RunError, match="has no decisions of a server"):
        ps.train(job(), decisions=str(tmp_path / "nowhere"), **about)
