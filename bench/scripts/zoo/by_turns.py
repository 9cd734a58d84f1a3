"""Two networks that train by turns: GANs, actor and critic, a student and its assistant."""

import itertools

import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps


def g(k):
    return torch.Generator().manual_seed(k)


def points(start):
    for k in itertools.count(start):
        e = g(k)
        yield {"noise": torch.randn(8, 6, generator=e), "real": torch.randn(8, 4, generator=e) + 2}


def net(inside, outside, width=12):
    return nn.Sequential(nn.Linear(inside, width), nn.LeakyReLU(0.2), nn.Linear(width, outside))


class Pair(nn.Module):
    def __init__(self, maker=None, judge=None):
        super().__init__()
        self.maker, self.judge = maker or net(6, 4), judge or net(4, 1)


def says(score, wanted):
    return F.binary_cross_entropy_with_logits(score, torch.full_like(score, wanted))


def judged(model, batch):
    made = model.maker(batch["noise"]).detach()
    return says(model.judge(batch["real"]), 1.0) + says(model.judge(made), 0.0)


def fooled(model, batch):
    return says(model.judge(model.maker(batch["noise"])), 1.0)


def optimizers():
    return ps.by_name(
        {
            "judge.*": lambda w: torch.optim.SGD(w, lr=0.05, momentum=0.9),
            "maker.*": lambda w: torch.optim.AdamW(w, lr=1e-3),
        }
    )


def job(loss, model=Pair, data=points, optimizer=None, **more):
    return ps.Job(model, loss, data, optimizer or optimizers(), **{"micro_batches": 4, **more})


def both_on_one_batch() -> ps.Job:
    """A judge and a generator by turns on the same batch, as the tutorial has it."""
    turns = {
        "judge": ps.Turn(judged, "judge.*"),
        "maker": ps.Turn(fooled, "maker.*", again=True),
    }
    return job(ps.in_turn(turns))


def critic_with_a_penalty() -> ps.Job:
    """Three steps of a critic with a penalty on its gradient, then one of the generator."""

    def critic(model, batch):
        real, made = batch["real"], model.maker(batch["noise"]).detach()
        share = torch.rand(len(real), 1)
        mixed = (share * real + (1 - share) * made).requires_grad_()
        (slope,) = torch.autograd.grad(model.judge(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        return model.judge(made).mean() - model.judge(real).mean() + 10 * penalty

    def maker(model, batch):
        return -model.judge(model.maker(batch["noise"])).mean()

    turns = {"judge": ps.Turn(critic, "judge.*", steps=3), "maker": ps.Turn(maker, "maker.*")}
    return job(ps.in_turn(turns), clip_norm=1.0)


def with_norms_and_dropout() -> ps.Job:
    """Batch norms in the generator, spectral norm and dropout in the judge."""

    def model():
        maker = nn.Sequential(
            nn.Linear(6, 12, bias=False), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 4)
        )
        inner = nn.Sequential(nn.Linear(4, 12), nn.LayerNorm(12), nn.Tanh(), nn.Dropout(0.3))
        return Pair(maker, nn.Sequential(inner, nn.Linear(12, 1)))

    turns = {"judge": ps.Turn(judged, "judge.*", steps=2), "maker": ps.Turn(fooled, "maker.*")}
    return job(ps.in_turn(turns), model)


def actor_and_critic() -> ps.Job:
    """A critic learns values from returns, an actor its policy from the critic's advantage."""

    class Agent(nn.Module):
        def __init__(self):
            super().__init__()
            self.seen = net(4, 8)
            self.actor, self.critic = nn.Linear(8, 3), nn.Linear(8, 1)

    def played(start):
        for k in itertools.count(start):
            e = g(k)
            acts = torch.randint(0, 3, (8,), generator=e)
            yield torch.randn(8, 4, generator=e), acts, torch.randn(8, generator=e)

    def values(model, batch):
        return F.mse_loss(model.critic(model.seen(batch[0])).squeeze(1), batch[2])

    def policy(model, batch):
        seen = model.seen(batch[0]).detach()
        advantage = batch[2] - model.critic(seen).squeeze(1)
        chosen = model.actor(seen).log_softmax(1).gather(1, batch[1][:, None]).squeeze(1)
        return -(chosen * advantage.detach()).mean()

    turns = {
        "values": ps.Turn(values, ["seen.*", "critic.*"]),
        "policy": ps.Turn(policy, "actor.*", again=True),
    }
    return job(ps.in_turn(turns), Agent, played, lambda w: torch.optim.Adam(w, lr=1e-3))


def more_steps_of_the_generator() -> ps.Job:
    """Two steps of the generator for one of the judge, whose rates fall with the step."""
    turns = {"judge": ps.Turn(judged, "judge.*"), "maker": ps.Turn(fooled, "maker.*", steps=2)}
    return job(ps.in_turn(turns), learning_rate=lambda step: 1 / (1 + step))


def one_optimizer_of_its_own() -> ps.Job:
    """The author's own class of optimizer, for both, which counts the updates of each weight."""

    class Signs(torch.optim.Optimizer):
        def __init__(self, weights):
            super().__init__(weights, {"lr": 1e-3})

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for weight in group["params"]:
                    if weight.grad is None:
                        continue
                    state = self.state[weight]
                    state["seen"] = state.get("seen", 0) + 1
                    weight.sub_(weight.grad.sign() * group["lr"] / state["seen"])

    turns = {"judge": ps.Turn(judged, "judge.*"), "maker": ps.Turn(fooled, "maker.*")}
    return job(ps.in_turn(turns), optimizer=Signs)
