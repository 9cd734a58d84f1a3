"""Micro-batches that count by their tokens: by every plan a step is that of one whole batch."""

from dataclasses import replace
from itertools import count

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.checkpoints import checkpoint
from penstock.plan import plan_by_hand
from tests.parity.training import Run, difference, listed, train, windows

WORDS, LENGTH, STEPS, MICRO_BATCHES = 11, 6, 4, 4


def model():
    return nn.Sequential(
        nn.Embedding(WORDS, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, WORDS)
    )


def data(start):
    memory = torch.empty(2, LENGTH, dtype=torch.long)  # filled again and again
    for number in count(start):
        drawn = torch.Generator().manual_seed(number)
        x = memory.copy_(torch.randint(WORDS, (2, LENGTH), generator=drawn))
        y = x.flip(1).clone()
        y[:, 1 + number % LENGTH :] = -100
        yield {"x": x, "y": y}


def loss(model, batch):
    said = model(batch["x"]).flatten(0, 1)
    right = (said.argmax(-1) == batch["y"].flatten()).sum() / tokens(batch)
    return nn.functional.cross_entropy(said, batch["y"].flatten()), {"right": right}


def tokens(batch):
    return (batch["y"] != -100).sum()


def sgd(weights):
    return torch.optim.SGD(weights, lr=0.5, momentum=0.9)


def job():
    return ps.Job(model, loss, data, sgd, micro_batches=MICRO_BATCHES, weight=tokens, clip_norm=1.0)


def whole_batches(num_steps):
    """Return losses and weights of a loop with one large batch a step."""
    torch.manual_seed(0)
    own, losses = model(), []
    optimizer = sgd(own.parameters())
    for step in range(num_steps):
        rows = []
        for _, batch in zip(range(MICRO_BATCHES), data(step * MICRO_BATCHES), strict=False):
            rows.append({name: value.clone() for name, value in batch.items()})
        large = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
        optimizer.zero_grad()
        value, _ = loss(own, large)
        value.backward()
        nn.utils.clip_grad_norm_(own.parameters(), 1.0)
        optimizer.step()
        losses.append(float(value.detach()))
    return losses, {f"weights/{n}": p.detach() for n, p in own.named_parameters()}


PLANS = {
    "stages": ("one_f_one_b", [0], {}),
    "replicas": ("gpipe", [], {"replicas": 2}),
    "both, zero bubble": ("zb_h1", [0], {"replicas": 2}),
    "both ways": ("chimera", [0], {}),
    "shards": (
        "breadth_first",
        [0],
        {"replicas": 2, "shard": ("shard", "shard_keep"), "num_ranks": 1},
    ),
}


@pytest.mark.parametrize("plan", PLANS)
def test_a_step_by_any_plan_resumed_once_is_that_of_one_whole_batch(plan, tmp_path):
    own = job()
    graph = ps.trace(own)
    schedule, cuts, words = PLANS[plan]
    each = MICRO_BATCHES // words.get("replicas", 1)
    made = plan_by_hand(graph, cuts, schedule, num_micro_batches=each, clip=True, **words)
    run = Run(made, own, graph.capture)
    first = train(run, tmp_path / "first", (2,))
    done = checkpoint.latest(tmp_path / "first")
    rest = listed(windows(run, (STEPS,))[2:])
    last = train(run, tmp_path / "rest", windows=rest, resume=done)
    losses, weights = whole_batches(STEPS)
    assert difference(last.weights, weights) < 1e-5
    found = [step.loss for step in (*first.steps, *last.steps)]
    assert found == pytest.approx(losses, rel=1e-5)


def test_without_a_weight_it_is_another_step(tmp_path):
    own = replace(job(), weight=None)
    graph = ps.trace(own)
    made = plan_by_hand(graph, [0], "gpipe", num_micro_batches=MICRO_BATCHES, clip=True)
    found = train(Run(made, own, graph.capture), tmp_path, (STEPS,))
    assert difference(found.weights, whole_batches(STEPS)[1]) > 1e-3
