"""A newcomer does what those do that began the run: the same job, the same task, to the letter."""

from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import penstock as ps
from penstock.listener import SILENT
from penstock.runtime.worker import Task
from penstock.training import elastic_driver, joining, until_loss
from penstock.training.addresses import addresses_in, write_addresses
from penstock.training.begin import Begin
from penstock.training.elastic_run import ElasticRun
from penstock.training.saved import kept_job
from tests.cli import mlp

JOB = """
from dataclasses import replace

import torch

from tests.cli import mlp

def losses(module, batch):
    return mlp.mean_loss(module, batch)

def job():
    return replace(mlp.job(), loss=losses, num_steps=60, {more})
"""
OTHER = """
from torch import nn

class Other(nn.Module):
    def forward(self, x):
        return 2 * (2 * x).sigmoid() - 1

def other(module):
    return Other()
"""
RULES = '[[rule]]\nreplace = "0.1"\nby = "other.py:other"\n'
VALIDATED = "validation=lambda: [next(mlp.data(9))]"


class SeenError(Exception):
    """The run is about to begin."""


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Return what begins an elastic run as far as its first rank, and its terms in the folder."""

    def begin(more: str, **asked) -> ElasticRun:
        (tmp_path / "job.py").write_text(JOB.format(more=more))
        seen: list[ElasticRun] = []

        def lived(session, choice, run, *_):
            write_addresses(run.addresses, {})
            seen.append(run)
            raise SeenError

        monkeypatch.setattr(elastic_driver, "_lived_here", lived)
        about = {"ranks": 2, "check": False, "trial": False, "out": tmp_path / "run"}
        with pytest.raises(SeenError):
            ps.train(f"{tmp_path / 'job.py'}:job", elastic=True, **about, **asked)
        return seen[0]

    return begin


def newcomer(folder: Path) -> ElasticRun:
    return joining._made(addresses_in(folder), kept_job(folder), SILENT).run


def weights_of(job: ps.Job) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return dict(job.model().state_dict())


def differences(one: Task, other: Task) -> list[str]:
    """Return the names of the fields in which two tasks differ; the board is one's own."""
    by_hand = {
        "board": True,
        "capture": one.capture.graph.digest == other.capture.graph.digest,
        "stages": one.stages.stages == other.stages.stages,
        "windows": [str(p) for p in one.windows.programs]
        == [str(p) for p in other.windows.programs],
        "functions": one.functions.keys() == other.functions.keys(),
        "carries": one.carries.keys() == other.carries.keys(),
        "audits": (one.audits is None) == (other.audits is None),
        "job": all(
            getattr(one.job, name) == getattr(other.job, name)
            for name in ("micro_batches", "validate_every", "num_steps", "buffers", "sums")
        ),
    }
    same = {
        field.name: by_hand.get(field.name)
        if field.name in by_hand
        else getattr(one, field.name) == getattr(other, field.name)
        for field in fields(Task)
    }
    return [name for name, is_same in same.items() if not is_same]


@pytest.mark.parametrize(
    ("more", "asked"),
    [
        ("", {}),
        ("", {"checkpoint_every": "30s", "keep": "3,every=20", "audit": "0", "forget_state": True}),
        ("", {"rules": "rules.toml"}),
        ("", {"weights": "weights.safetensors"}),
        ("batch_by_ranks=True", {}),
        (f"{VALIDATED}, validate_every=7", {}),
    ],
    ids=["nothing", "figures", "replaced modules", "weights", "batch by ranks", "validated"],
)
@pytest.mark.sampled(2)
def test_newcomer_has_the_task_of_those_that_began(
    more: str, asked: dict, begun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rules.toml").write_text(RULES)
    (tmp_path / "other.py").write_text(OTHER)
    torch.manual_seed(5)
    save_file(dict(mlp.model().state_dict()), tmp_path / "weights.safetensors")
    monkeypatch.chdir(tmp_path)  # where the flags name files
    run = begun(more, **asked)
    monkeypatch.chdir("/")
    joined = newcomer(tmp_path / "run")
    for count, plan in run.plans.items():
        tasks = [each.task(each.ways.choice_of(plan), Begin(3)) for each in (run, joined)]
        assert differences(*tasks) == [], count
        own, other = (weights_of(task.job) for task in tasks)
        assert all(torch.equal(own[name], other[name]) for name in own)
        first, second = (next(iter(task.job.data(5))) for task in tasks)
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_newcomer_of_a_run_to_a_loss_trains_its_last_phase(
    begun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("_FEWEST", 3), ("_MOST", 3), ("_SEARCH_S", 0.2)):
        monkeypatch.setattr(until_loss, name, value)
    run = begun(VALIDATED, until_loss=1e-9)
    joined = newcomer(tmp_path / "run")
    plan = run.plans[max(run.plans)]
    tasks = [each.task(each.ways.choice_of(plan), run.begin) for each in (run, joined)]
    assert differences(*tasks) == []
    assert tasks[0].policy.validate_every > 0  # which the author did not ask for
    first, second = (next(iter(task.job.data(0))) for task in tasks)
    assert all(torch.equal(first[name], second[name]) for name in first)
