"""What micro-batches hand on to the next step: by every plan as in a loop with a dict a place."""

from itertools import count

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.checkpoints import checkpoint
from penstock.errors import PlanError
from penstock.plan import plan_by_hand
from penstock.state.laws.buffers import buffer_laws, laws_in
from tests.parity.training import Run, difference, listed, train, windows

WORDS, WIDTH, ROWS, LENGTH, STEPS, PLACES = 11, 8, 2, 3, 5, 4


class Net(nn.Module):
    """Two recurrent layers, whose state goes on where the sequence does; and a count of all."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.low, self.high = nn.GRUCell(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x, carry):
        self.seen += x.shape[1]
        rows, h = [], carry["low"]
        for at in range(x.shape[1]):
            h = self.low(self.embedding(x[:, at]), h)
            rows.append(h)
        carry["low"] = h
        h = carry["high"]
        for row in rows:
            h = self.high(row, h)
        carry["high"] = h
        carry["steps"] = carry["steps"] + 1
        return self.head(h)


def data(start):
    for number in count(start):
        drawn = torch.Generator().manual_seed(number)
        yield torch.randint(WORDS, (ROWS, LENGTH + 1), generator=drawn)


def loss(model, x, carry):
    return nn.functional.cross_entropy(model(x[:, :-1], carry), x[:, -1])


def start():
    state = {name: torch.full((ROWS, WIDTH), 0.1) for name in ("low", "high")}
    return {**state, "steps": torch.tensor(7)}


def sgd(weights):
    return torch.optim.SGD(weights, lr=0.5, momentum=0.9)


def job(**more):
    return ps.Job(Net, loss, data, sgd, micro_batches=PLACES, carry=start(), clip_norm=1.0, **more)


def plain_loop(num_steps):
    """Return losses, weights, and what each place holds at the end."""
    torch.manual_seed(0)
    own, losses, places = Net(), [], [start() for _ in range(PLACES)]
    optimizer = sgd(own.parameters())
    for step in range(num_steps):
        optimizer.zero_grad()
        told = 0.0
        for place, batch in zip(places, data(step * PLACES), strict=False):
            value = loss(own, batch, place) / PLACES
            value.backward()
            place |= {name: tensor.detach() for name, tensor in place.items()}
            told += float(value.detach())
        nn.utils.clip_grad_norm_(own.parameters(), 1.0)
        optimizer.step()
        losses.append(told)
    return losses, {f"weights/{n}": p.detach() for n, p in own.named_parameters()}, places


PLANS = {
    "stages": ("one_f_one_b", [0], {}),
    "replicas": ("gpipe", [], {"replicas": 2}),
    "unlike shares": ("gpipe", [], {"replicas": 2, "shares": (3, 1)}),
    "both, zero bubble": ("zb_h1", [0], {"replicas": 2}),
    "both ways": ("chimera", [0], {}),
    "recomputed": ("one_f_one_b", [0], {"recompute": (True, False)}),
}


def cuts_of(graph, count):
    """Return the cut with some of the work on either side; none for one stage."""
    return [len(graph.cut_points) // 2] if count else []


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.sampled(2)
def test_a_run_by_any_plan_resumed_once_is_that_of_the_loop(plan, tmp_path):
    own = job()
    graph = ps.trace(own)
    schedule, cuts, words = PLANS[plan]
    each = PLACES if "shares" in words else PLACES // words.get("replicas", 1)
    words = {"num_micro_batches": max(words.get("shares", (each,))), **words}
    made = plan_by_hand(graph, cuts_of(graph, len(cuts)), schedule, clip=True, **words)
    run = Run(made, own, graph.capture)
    first = train(run, tmp_path / "first", (2,))
    done = checkpoint.latest(tmp_path / "first")
    rest = listed(windows(run, (STEPS,))[2:])
    last = train(run, tmp_path / "rest", windows=rest, resume=done)
    losses, weights, places = plain_loop(STEPS)
    assert difference(last.weights, weights) < 1e-5
    found = [step.loss for step in (*first.steps, *last.steps)]
    assert found == pytest.approx(losses, rel=1e-5)
    kept = checkpoint.load(checkpoint.latest(tmp_path / "rest")).tensors
    for name in ("low", "high", "steps"):
        whole = torch.stack([place[name] for place in places])
        torch.testing.assert_close(kept[f"buffers/carry.{name}"], whole, rtol=1e-4, atol=1e-5)
    assert float(kept["buffers/seen"]) == STEPS * PLACES * LENGTH


def test_laws_say_that_each_place_has_a_row():
    own = job()
    capture = ps.trace(own).capture
    laws = buffer_laws(own, capture)
    assert {name: law.places for name, law in laws.items()} == {
        **dict.fromkeys(("carry.high", "carry.low", "carry.steps"), PLACES),
        "seen": 0,
    }
    assert str(laws["carry.low"]) == "a row for each of the 4 places of a step"
    assert not any(law.is_ordered for law in (*laws.values(), *laws_in(capture).values()))


def reads_all(model, x, carry):
    return loss(model, x, carry) + model.carry.low.mean()


def writes_all(model, x, carry):
    told = loss(model, x, carry)
    model.carry.low.mul_(0.5)
    return told


def reads_another(model, x, carry):
    return loss(model, x, carry) + model.carry.low.index_select(0, x[0, :1] % PLACES).mean()


def goes_by_batch(model, x, carry):
    low, at = model.carry.low, x[0, :1] % PLACES
    own = {"low": low.index_select(0, at)[0], "high": carry["high"], "steps": carry["steps"]}
    told = loss(model, x, own)
    low.index_copy_(0, at, own["low"].detach()[None])
    return told


@pytest.mark.parametrize("other", [reads_all, writes_all, reads_another, goes_by_batch])
@pytest.mark.sampled(2)
def test_who_looks_at_rows_of_other_places_has_to_see_all_in_order(other, tmp_path):
    own = ps.Job(Net, other, data, sgd, micro_batches=PLACES, carry=start())
    graph = ps.trace(own)
    law = buffer_laws(own, graph.capture)["carry.low"]
    assert law.is_ordered
    made = plan_by_hand(graph, [], "gpipe", num_micro_batches=PLACES // 2, replicas=2)
    with pytest.raises(PlanError, match=r"carry\.low has to see every micro-batch in order"):
        train(Run(made, own, graph.capture), tmp_path, (1,))
