"""Averages of weights, and an optimizer for each pattern of names, by plans and resumed once.

What they give is that of the loop that people write: torch's AveragedModel beside the model, two
optimizers, one of the matrices.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import penstock as ps
from penstock.checkpoints import checkpoint
from penstock.graph.composed import averaged
from penstock.plan import plan_by_hand
from tests.cli import mlp
from tests.parity.training import Run, difference, listed, train, windows

STEPS = 5


def adamw(weights):
    return torch.optim.AdamW(weights, lr=1e-2)


def muon(weights):
    return torch.optim.Muon(weights, lr=1e-2)


def lamb(weights):
    return ps.Lamb(weights, lr=1e-2, weight_decay=0.1)


def lars(weights):
    return ps.Lars(weights, lr=10.0, weight_decay=0.1)


def norms(weights):
    """An optimizer of somebody's own: no class of torch's."""
    return Signs(weights, lr=1e-3)


class Signs(torch.optim.Optimizer):
    def __init__(self, weights, lr):
        super().__init__(weights, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["slow"] = torch.zeros_like(p)
                    state["slow"].lerp_(p.grad, 0.5)
                    p.sub_(state["slow"].sign(), alpha=group["lr"])


KINDS = {
    "one": adamw,
    "lamb": lamb,
    "lars": lars,
    "muon": ps.by_name({"4.*": adamw, "*.weight": muon, "*": adamw}),
    "own": ps.by_name({"0.*": norms, "1.0.bias": None, "*": adamw}),
}


def parts_of(kind, named):
    """Return the optimizers of the plain loop, each made by hand."""
    named = dict(named)
    if kind in ("one", "lamb", "lars"):
        return [KINDS[kind](named.values())]
    if kind == "muon":
        matrices = [p for n, p in named.items() if n.endswith("weight") and not n.startswith("4.")]
        ids = {id(p) for p in matrices}
        return [muon(matrices), adamw([p for p in named.values() if id(p) not in ids])]
    first = [p for n, p in named.items() if n.startswith("0.")]
    rest = [p for n, p in named.items() if not n.startswith("0.") and n != "1.0.bias"]
    return [norms(first), adamw(rest)]


def plain_loop(job, kind, rate=None):
    """Return the weights and the averages of a loop that knows nothing of Penstock."""
    torch.manual_seed(job.seed)
    model = job.model()
    parts = parts_of(kind, model.named_parameters())
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    swa = AveragedModel(model)
    data = job.data(0)
    for step in range(STEPS):
        model.zero_grad()
        for part in parts:
            for group in part.param_groups:
                group["lr"] = group.setdefault("first", group["lr"]) * (rate(step) if rate else 1)
        for _ in range(job.micro_batches):
            (job.loss(model, next(data)) / job.micro_batches).backward()
        nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
        for part in parts:
            part.step()
        ema.update_parameters(model)
        if step + 1 >= 2 and (step + 1 - 2) % 2 == 0:
            swa.update_parameters(model)
    named = {f"weights/{n}": p.detach() for n, p in model.named_parameters()}
    by_kind = {"ema": ema.module, "swa": swa.module}
    return named, {
        kind: {f"weights/{n}": p.detach() for n, p in one.named_parameters()}
        for kind, one in by_kind.items()
    }


def job_of(kind, average=None, **more):
    made = replace(mlp.job(), optimizer=KINDS[kind], average=average, clip_norm=1.0)
    return replace(made, loss=mlp.mean_loss, **more)


AVERAGES = {"ema": ps.ema(0.9), "swa": ps.swa(start=2, every=2)}
PLANS = {
    "stages": ([1], {}),
    "replicas": ([], {"replicas": 2}),
    "both": ([2], {"replicas": 2}),
    "shards": ([2], {"replicas": 2, "shard": ("shard", "shard_keep"), "num_ranks": 1}),
}


CASES = [  # each kind by each plan, and each average by each
    ("one", "ema", "both"), ("one", "swa", "shards"), ("one", "ema", "stages"),
    ("muon", "ema", "stages"), ("muon", "swa", "both"),
    ("own", "swa", "replicas"), ("own", "ema", "both"),
    ("lamb", "ema", "both"), ("lars", "swa", "stages"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "average", "plan"), CASES)
@pytest.mark.sampled(3)
def test_averages_and_parts_resumed_once_are_those_of_the_plain_loop(kind, average, plan, tmp_path):
    rate = (lambda step: 1 / (1 + step)) if plan == "both" else None
    job = job_of(kind, AVERAGES[average], learning_rate=rate)
    graph = ps.trace(job)
    cuts, words = PLANS[plan]
    words = {"num_micro_batches": 4 // words.get("replicas", 1), "clip": True, **words}
    made = plan_by_hand(graph, cuts, "breadth_first", **words)
    run = Run(made, job, graph.capture)
    train(run, tmp_path / "first", (2,))
    done = checkpoint.latest(tmp_path / "first")
    rest = listed(windows(run, (STEPS,))[2:])
    found = train(run, tmp_path / "rest", windows=rest, resume=done).weights
    weights, averages = plain_loop(job, kind, rate)
    least = 1e-4 if kind == "muon" else 2e-5  # Muon's iteration has 16 bits
    assert difference(found, weights) < least
    assert difference(averaged(found), averages[average]) < least
    assert difference(averaged(found), weights) > 1e-3
