"""Runs whose updates follow who comes first: written down, and made again."""

import json
from dataclasses import replace

import pytest
import torch

import penstock as ps
from penstock.checkpoints import checkpoint
from penstock.errors import JobError, PlanError, RunError
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


class Mixing(torch.optim.SGD):
    """An optimizer whose parameters look at each other, and so has to stay whole."""

    def __init__(self, weights):
        super().__init__(list(weights), lr=1e-2)

    @torch.no_grad()
    def step(self, closure=None):
        rows = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        size = sum(p.grad.square().sum() for p in rows) ** 0.5
        for p in rows:
            p -= 1e-2 * p.grad / (1 + size)


def trained(folder, **options):
    ps.train(job(), num_steps=6, ranks=2, out=folder, trial=False, listener=None, **options)
    return checkpoint.load(checkpoint.latest(folder / "checkpoints")).tensors


@pytest.mark.parametrize("sums", ["backup:1", "ssp:1:aware"])
@pytest.mark.sampled(2)
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


def test_two_servers_that_clip_make_the_decisions_of_one(tmp_path):
    about = {"num_steps": 6, "ranks": 2, "trial": False, "listener": None, "sums": "ssp:1"}
    clips, found = job(clip_norm=0.05), {}
    for name, topology in (("one", None), ("two", "server:2")):
        decisions = {} if topology is None else {"decisions": str(tmp_path / "one")}
        folder = tmp_path / name
        ps.train(clips, out=folder, topology=topology, **decisions, **about)
        found[name] = checkpoint.load(checkpoint.latest(folder / "checkpoints")).tensors
    assert differing(found["two"], found["one"]) == []
    plan = ps.Plan.load(tmp_path / "two" / "plan.json")
    assert plan.topology == "server:2"
    (reason,) = (row.why for row in plan.decisions if row.what == "topology")
    assert "servers beside ranks 0, 1 have 256 B, 32 B" in reason


def fails(*words):
    raise AssertionError("the job was looked at")


@pytest.mark.parametrize(
    ("words", "options", "error"),
    [
        ({}, {"sums": "ssp:3", "topology": "server:3"}, PlanError),
        ({}, {"sums": "ssp:3", "elastic": True}, PlanError),
        ({}, {"sums": "ssp:3", "decisions": "nowhere"}, RunError),
    ],
)
def test_what_does_not_go_with_a_server_is_refused_before_the_job_is_looked_at(
    words, options, error, tmp_path
):
    unlooked = replace(job(**words), model=fails, data=fails, loss=fails, optimizer=fails)
    with pytest.raises(error, match=r"server"):
        ps.train(unlooked, ranks=2, num_steps=2, out=tmp_path, listener=None, **options)


def test_what_does_not_go_with_a_server_is_refused_with_the_reason(tmp_path):
    about = {"num_steps": 2, "ranks": 2, "out": tmp_path, "listener": None, "sums": "async"}
    with pytest.raises(PlanError, match="rounds of a sum, and it has none"):
        ps.train(job(), topology="tree", **about)
    with pytest.raises(PlanError, match="3 servers beside 2 ranks"):
        ps.train(job(), topology="server:3", **about)
    mixing = replace(job(), optimizer=Mixing)
    with pytest.raises(JobError, match="cannot be divided among 2 servers"):
        ps.train(mixing, topology="server:2", **about)
    with pytest.raises(RunError, match="has no decisions of a server"):
        ps.train(job(), decisions=str(tmp_path / "nowhere"), **about)
    for other in ({"sums": "int8"}, {"ranks": 1}, {"sums": None, "eager": True}):
        with pytest.raises(PlanError, match="no server updates the weights"):
            ps.train(job(), decisions=str(tmp_path), **{**about, **other})
