"""A generator and its judge in one job: two losses added, each half with its optimizer.

Both move at once, as in a plain loop that takes both gradients at the same weights.
"""

from itertools import count

import pytest
import torch
from torch import nn
from torch.func import functional_call

import penstock as ps
from penstock.checkpoints import checkpoint
from penstock.plan import plan_by_hand
from tests.parity.training import Run, difference, listed, train, windows

STEPS, MICRO_BATCHES = 4, 4


def network(inside, outside):
    return nn.Sequential(nn.Linear(inside, 16), nn.Tanh(), nn.Linear(16, outside))


def model():
    return nn.ModuleDict({"maker": network(4, 2), "judge": network(2, 1)})


def says(score, is_real):
    wanted = torch.ones_like(score) if is_real else torch.zeros_like(score)
    return nn.functional.binary_cross_entropy_with_logits(score, wanted)


def loss(model, batch):
    made = model["maker"](batch["noise"])
    judge = model["judge"]
    judged = says(judge(batch["real"]), True) + says(judge(made.detach()), False)
    still = {name: p.detach() for name, p in judge.named_parameters()}
    fooled = says(functional_call(judge, still, (made,)), True)
    return judged + fooled, {"judged": judged, "fooled": fooled}


def data(start):
    for number in count(start):
        drawn = torch.Generator().manual_seed(number)
        noise = torch.randn(8, 4, generator=drawn)
        yield {"noise": noise, "real": torch.randn(8, 2, generator=drawn) + 2}


def maker(weights):
    return torch.optim.Adam(weights, lr=1e-2, betas=(0.5, 0.9))


def judge(weights):
    return torch.optim.SGD(weights, lr=0.1, momentum=0.5)


def job():
    optimizer = ps.by_name({"maker.*": maker, "judge.*": judge})
    return ps.Job(model, loss, data, optimizer, micro_batches=MICRO_BATCHES)


def plain_loop():
    """Return the weights of a loop with two losses and two optimizers."""
    torch.manual_seed(0)
    own = model()
    optimizers = [maker(own["maker"].parameters()), judge(own["judge"].parameters())]
    batches = data(0)
    for _ in range(STEPS):
        rows = [next(batches) for _ in range(MICRO_BATCHES)]
        gradients = []
        for part, value in (("judge", 0), ("maker", 1)):
            total = 0
            for row in rows:
                made = own["maker"](row["noise"])
                losses = (
                    says(own["judge"](row["real"]), True) + says(own["judge"](made), False),
                    says(own["judge"](made), True),
                )
                total = total + losses[value] / MICRO_BATCHES
            weights = list(own[part].parameters())
            gradients += zip(weights, torch.autograd.grad(total, weights), strict=True)
        for weight, gradient in gradients:
            weight.grad = gradient
        for optimizer in optimizers:
            optimizer.step()
    return {f"weights/{name}": p.detach() for name, p in own.named_parameters()}


@pytest.mark.parametrize(("cuts", "replicas"), [([0], 1), ([], 2), ([0], 2)])
def test_two_losses_and_two_optimizers_resumed_once_are_the_plain_loop(cuts, replicas, tmp_path):
    own = job()
    graph = ps.trace(own)
    words = {"num_micro_batches": MICRO_BATCHES // replicas, "replicas": replicas}
    run = Run(plan_by_hand(graph, cuts, "one_f_one_b", **words), own, graph.capture)
    train(run, tmp_path / "first", (2,))
    rest = listed(windows(run, (STEPS,))[2:])
    done = checkpoint.latest(tmp_path / "first")
    found = train(run, tmp_path / "rest", windows=rest, resume=done)
    assert difference(found.weights, plain_loop()) < 1e-5
    assert set(found.steps[-1].figures) == {"judged", "fooled"}


def sloped(model, batch):
    """Return a loss with a penalty on the slope of the judge: a gradient of a gradient."""
    real = batch["real"].detach().requires_grad_(True)
    score = model["judge"](real)
    (slope,) = torch.autograd.grad(score.sum(), real, create_graph=True)
    return score.mean() + (slope.norm(dim=1) - 1).square().mean()


def test_a_penalty_on_a_gradient_by_stages_and_replicas_is_the_plain_loop(tmp_path):
    own = ps.Job(model, sloped, data, lambda weights: maker(weights), micro_batches=MICRO_BATCHES)
    graph = ps.trace(own)
    plan = plan_by_hand(graph, [0], "one_f_one_b", num_micro_batches=2, replicas=2)
    found = train(Run(plan, own, graph.capture), tmp_path, (STEPS,))
    torch.manual_seed(0)
    plain, batches = model(), data(0)
    optimizer = maker(plain.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(MICRO_BATCHES):
            (sloped(plain, next(batches)) / MICRO_BATCHES).backward()
        optimizer.step()
    weights = {f"weights/{name}": p.detach() for name, p in plain.named_parameters()}
    assert difference(found.weights, weights) < 1e-5
