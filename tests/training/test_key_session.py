"""A job whose steps have several shapes, from its examination to its end, and resumed."""

import copy
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import penstock as ps
from penstock.checkpoints import checkpoint
from penstock.choose import known_shapes
from penstock.choose.choose import Machines
from penstock.choose.settle import NoPlanError
from penstock.errors import PlanError, UnlikeShapesError
from penstock.examine.examine import Examined
from penstock.graph.trace import build_model
from penstock.search.shapes import Fixed
from penstock.training.begin import Begin
from penstock.training.key_session import _of_one_shape, check_whole, plans_keys
from penstock.training.session import Session
from tests.runtime.test_turns import STEPS as STEPS_OF_TURNS
from tests.runtime.test_turns import job_of as turns_job
from tests.runtime.test_turns import plain as plain_turns

STEPS = 8


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mid, self.out = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20)

    def forward(self, ids):
        return self.out(torch.relu(self.mid(self.embed(ids).cumsum(1))))


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten())


def job_of() -> ps.Job:
    drawn = torch.Generator().manual_seed(0)
    rows = [torch.randint(1, 20, (n,), generator=drawn) for n in (3, 4, 7, 8, 2, 6, 8, 4) * 6]
    samples = [{"x": row, "labels": row.roll(-1)} for row in rows]
    data = ps.bucketed(samples, (4, 8), (3, 2), micro_batches=2, seed=1)
    return ps.Job(
        model=Tokens,
        loss=loss_of,
        data=data,
        optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
        weight=lambda batch: (batch["labels"] != -100).sum(),
        num_steps=STEPS,
    )


def plain(job: ps.Job) -> dict[str, torch.Tensor]:
    """Return the weights of a loop whose steps are means over their tokens."""
    model, data = build_model(job), job.data.of
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        batches = [data.batch(2 * step), data.batch(2 * step + 1)]
        counts = [int((batch["labels"] != -100).sum()) for batch in batches]
        for batch, count in zip(batches, counts, strict=True):
            (loss_of(model, batch) * count / sum(counts)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


def test_turns_are_planned_proved_trained_and_gone_on_with(tmp_path):
    job, said = turns_job(num_steps=4), list[str]()
    listener = Saying(said)
    ps.train(job, out=tmp_path, ranks=2, trial=False, listener=listener)
    assert sum(line.startswith("equal to the plain loop") for line in said) == 2
    assert "planned 1 other turn alike" in " ".join(said)
    longer = replace(job, num_steps=STEPS_OF_TURNS)
    trained = ps.train(longer, out=tmp_path, ranks=2, resume=True, trial=False, listener=listener)
    state = checkpoint.load(checkpoint.latest(tmp_path / "checkpoints")).tensors
    losses, known = plain_turns(job)
    told = trained.summary
    assert told["train_judge_loss"] == pytest.approx(sum(losses[k] for k in (4, 6, 7, 9)) / 4, 1e-3)
    assert told["train_maker_loss"] == pytest.approx((losses[5] + losses[8]) / 2, 1e-3)
    for name, value in known.items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)


def test_steps_of_two_lengths_are_planned_and_proved_each_and_trained_as_by_a_loop(tmp_path):
    job, said = job_of(), list[str]()
    listener = Saying(said)
    ps.train(job, out=tmp_path, ranks=2, num_steps=3, trial=False, listener=listener)
    assert sum(line.startswith("equal to the plain loop") for line in said) == 2
    assert "planned 1 other shape alike" in " ".join(said)
    trained = ps.train(job, out=tmp_path, ranks=2, resume=True, trial=False, listener=listener)
    assert [each.what for each in trained.plan.decisions].count("shapes") == 1
    state = checkpoint.load(checkpoint.latest(tmp_path / "checkpoints")).tensors
    for name, value in plain(job).items():
        torch.testing.assert_close(state[f"weights/{name}"], value, rtol=1e-5, atol=1e-6)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    tokens = [row["tokens_per_second"] * row["seconds"] for row in rows]
    lengths = [job.data.of.key_of(2 * step) for step in range(STEPS)]
    assert tokens == pytest.approx([2 * key.samples * key.length for key in lengths])


def test_batches_padded_each_to_its_longest_are_shared_by_replicas_as_a_loop_makes_them(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(known_shapes, "LEAST_STEPS", 3)
    drawn = torch.Generator().manual_seed(0)
    rows = [torch.randint(1, 20, (n,), generator=drawn) for n in (3, 4, 2, 4, 7, 8, 5, 6) * 3]

    def padded(texts):
        x, labels = torch.zeros(4, max(map(len, texts)), dtype=torch.long), []
        for row, text in zip(x, texts, strict=True):
            row[: len(text)] = text
            labels.append(torch.full_like(row, -100))
            labels[-1][: len(text) - 1] = text[1:]
        return {"x": x, "labels": torch.stack(labels)}

    loader = DataLoader(rows, 4, collate_fn=padded)
    sgd = lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9)  # noqa: E731
    job, said = ps.Job(Tokens, loss_of, ps.from_loader(loader), sgd, num_steps=STEPS), list[str]()
    about = {"ranks": 2, "stages": 1, "trial": False, "audit": "0", "listener": Saying(said)}
    trained = ps.train(job, out=tmp_path, **about)
    assert "8 micro-batches have 2 shapes: a plan of each" in said
    assert trained.plan.replicas == 2
    assert_as_a_loop(trained, job)


def assert_as_a_loop(trained, job):
    """Compare the weights with those of a loop over the data as it was written."""
    model, batches = build_model(job), job.data(0)
    optimizer = job.optimizer(model.parameters())
    for _ in range(STEPS):
        job.loss(model, next(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.named_parameters():
        weight = trained.outcome.weights[f"weights/{name}"]
        torch.testing.assert_close(weight, value, rtol=1e-5, atol=1e-6)


def schedule(start):
    for number in range(start, 99):
        rows = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
        yield {"x": rows, "warmth": 1 / (2 + number)}


def test_numbers_of_a_batch_that_change_are_read_by_replicas_as_by_a_loop(tmp_path):
    loss = lambda model, batch: (model(batch["x"]) * batch["warmth"]).square().mean()  # noqa: E731
    sgd = lambda weights: torch.optim.SGD(weights, lr=0.1)  # noqa: E731
    layers = nn.Linear(3, 3), nn.Linear(3, 2)
    model = lambda: nn.Sequential(*copy.deepcopy(layers))  # noqa: E731
    job, said = ps.Job(model, loss, schedule, sgd, num_steps=STEPS, micro_batches=1), list[str]()
    about = {"ranks": 2, "stages": 1, "trial": False, "audit": "0", "listener": Saying(said)}
    trained = ps.train(job, out=tmp_path, **about)
    assert "numbers of the batch change: they are tensors of a plan" in said
    assert trained.plan.replicas == 2
    assert_as_a_loop(trained, job)


def test_without_a_plan_data_is_as_it_was_written(tmp_path):
    job, other = job_of(), replace(job_of(), data=schedule, weight=None)
    session = Session(job, job, tmp_path, STEPS, Fixed(), Machines(), elastic=True)
    session.tells_more(other)
    session.tells_more(replace(other, num_steps=3))
    assert session.job.data is session.author.data is other.data
    with pytest.raises(PlanError, match="ranks that come and go need a plan"):
        session.train_eagerly(Begin(), Examined())
    assert session.job is session.author is job


@pytest.mark.parametrize(("elastic", "strict"), [(True, False), (False, True), (False, False)])
def test_a_run_to_a_loss_has_no_plan_for_several_shapes(elastic, strict):
    said, asked = list[str](), SimpleNamespace(policy=None)
    own = {"job": job_of(), "goal": "a loss", "asked": asked, "elastic": elastic}
    session: Any = SimpleNamespace(**own, listener=Saying(said))
    assert not plans_keys(session)
    if elastic or strict:
        with pytest.raises(NoPlanError, match="several shapes, and a run to a loss finds") as told:
            _of_one_shape(session, Examined(), strict=strict)
        assert 'last="drop"' in told.value.hint
        return
    assert "several shapes" in _of_one_shape(session, Examined(), strict=False).no_plan
    assert "several shapes" in said[0]
    one = _of_one_shape(session, Examined(no_plan="it counts"), strict=True)
    assert one.no_plan == "it counts"
    session.job = replace(job_of(), data=ps.batches([{"x": 1}], 1), weight=None)
    assert not _of_one_shape(session, Examined(), strict=True).no_plan


@pytest.mark.parametrize("name", ["policy", "batch_by_ranks", ""])
def test_which_runs_have_plans_for_several_shapes(name):
    job = SimpleNamespace(data=job_of().data, batch_by_ranks=name == "batch_by_ranks")
    asked = SimpleNamespace(policy="wanted.toml" if name == "policy" else None)
    session: Any = SimpleNamespace(job=job, goal=None, asked=asked, elastic=True)
    assert plans_keys(session) == (not name)


@pytest.mark.parametrize(
    ("fixed", "is_alone"),
    [
        ({"stages": 2}, False),
        ({"schedule": "gpipe"}, False),
        ({"offload": "state"}, False),
        ({"stages": 1, "ranks": 3}, True),
    ],
)
def test_ranks_that_may_go_have_the_whole_model_where_steps_have_several_shapes(
    tmp_path, fixed, is_alone
):
    session = Session(job_of(), job_of(), tmp_path, STEPS, Fixed(**fixed), Machines(), elastic=True)
    if is_alone:
        check_whole(session)
        return
    with pytest.raises(UnlikeShapesError, match="several shapes: then each rank that may go has"):
        check_whole(session)
    session.stays_together()
    check_whole(session)


class Saying(ps.Listener):
    """Keeps what is said."""

    def __init__(self, said: list[str]) -> None:
        self.said = said

    def say(self, words: str) -> None:
        self.said.append(words)
