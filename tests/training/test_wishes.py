"""What trainers' users wish, in one run in processes: it equals the plain loop, resumed once."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import penstock as ps
from penstock.errors import PlanError
from tests.cli import mlp


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def adamw(weights):
    return torch.optim.AdamW(weights, lr=1e-2)


def sgd(weights):
    return torch.optim.SGD(weights, lr=1e-2, momentum=0.9)


def near():
    return [next(mlp.data(1000))]


def far():
    return [{name: value[:3] for name, value in next(mlp.data(2000)).items()}]


def job():
    return replace(
        mlp.job(),
        loss=mlp.mean_loss,
        optimizer=ps.by_name({"4.*": sgd, "*": adamw}),
        average=ps.ema(0.5, validates=True),
        validation={"near": near, "far": far},
        metrics=lambda model, batch: {"size": ((model(batch["x"])).abs().sum(), len(batch["x"]))},
        validate_every=1,
        best="lowest val_size",  # the size of what it says: it grows
        patience=2,
        num_steps=9,
    )


def plain_loop(own, num_steps):
    torch.manual_seed(own.seed)
    model = own.model()
    parts = [sgd(model[4].parameters()), adamw(model[:4].parameters())]
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    data, found = own.data(0), []
    for _ in range(num_steps):
        model.zero_grad()
        for _ in range(own.micro_batches):
            (own.loss(model, next(data)) / own.micro_batches).backward()
        for part in parts:
            part.step()
        average.update_parameters(model)
        found.append((copy.deepcopy(model), copy.deepcopy(average.module)))
    return found


def losses(model):
    with torch.no_grad():
        sets = {"near": near()[0], "far": far()[0]}
        return {name: float(mlp.mean_loss(model, batch)) for name, batch in sets.items()}


def test_all_of_it_on_two_ranks_resumed_once_is_the_plain_loop(tmp_path):
    out, own = tmp_path / "run", job()
    told, saved, steps = [], [], []
    asked = {"out": out, "on_validation": told.append, "on_step": steps.append, "listener": None}
    asked |= {"on_checkpoint": lambda step, folder: saved.append((step, folder.name))}
    more = {"ranks": 2, "stages": 2, "schedule": "one_f_one_b", "num_steps": 1}
    ps.train(own, **asked, **more)
    assert saved == [(1, "step-000001")]
    ps.train(own, resume=True, **asked)
    models = plain_loop(own, 9)
    sizes = [
        sum(float(average(s()[0]["x"]).detach().abs().sum()) for s in (near, far)) / 11
        for _, average in models
    ]
    ends = next(at for at in range(9) if at - sizes[: at + 1].index(min(sizes[: at + 1])) == 2)
    done = ends + 1
    assert [row["step"] for row in steps] == list(range(1, done + 1))
    assert told == steps
    assert [step for step, _ in saved] == list(range(1, done + 1))
    for row, (_, average) in zip(told, models, strict=False):
        expected = losses(average)
        assert row["val_near_loss"] == pytest.approx(expected["near"], rel=1e-4)
        assert row["val_far_loss"] == pytest.approx(expected["far"], rel=1e-4)
        whole = (8 * expected["near"] + 3 * expected["far"]) / 11
        assert row["val_loss"] == pytest.approx(whole, rel=1e-4)
        assert row["val_size"] == pytest.approx(sizes[row["step"] - 1], rel=1e-4)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["best_step"] == done - 2
    assert summary["best_val_size"] == pytest.approx(min(sizes[:done]), rel=1e-4)
    trained, average = models[done - 1]
    found = mlp.model()
    ps.load_weights(found, out)
    torch.testing.assert_close(found.state_dict(), trained.state_dict(), rtol=1e-4, atol=1e-5)
    ps.load_weights(found, out, average=True)
    torch.testing.assert_close(found.state_dict(), average.state_dict(), rtol=1e-4, atol=1e-5)
    with pytest.raises(PlanError, match="no better validation came in 2"):
        ps.train(own, resume=True, **asked)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"elastic": True}, "elastic"), ({"until_loss": 1.0}, "until"), ({"keep": "no-best"}, "keep")],
)
def test_patience_with_what_does_not_follow_it_is_refused(options, words, tmp_path):
    with pytest.raises(PlanError, match=f"Job.patience is 2, .*{words}"):
        ps.train(job(), out=tmp_path / "run", listener=None, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"elastic": True, "eager": True}, "trains without a plan, and ranks that come and go"),
        ({"tls": True}, "tls is of the lines between ranks of an elastic run"),
    ],
)
def test_what_does_not_go_with_ranks_that_come_and_go_is_refused(options, words, tmp_path):
    with pytest.raises(PlanError, match=words):
        ps.train(job(), out=tmp_path / "run", listener=None, **options)
    assert not (tmp_path / "run").exists()
