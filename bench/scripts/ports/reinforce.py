"""pytorch/examples, reinforcement_learning/reinforce.py: episodes that the policy itself plays."""

import itertools

import torch
from torch import nn, optim
from torch.distributions import Categorical
from torch.nn import functional as F

import penstock as ps


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1, self.dropout, self.affine2 = (
            nn.Linear(4, 16),
            nn.Dropout(p=0.6),
            nn.Linear(16, 2),
        )

    def forward(self, x):
        x = F.relu(self.dropout(self.affine1(x)))
        return F.softmax(self.affine2(x), dim=1)


class Pole:
    """A pole on a cart, as gym's CartPole-v1 moves it."""

    def reset(self, source):
        self.state = (torch.rand(4, generator=source) - 0.5) / 10
        return self.state

    def step(self, action):
        x, v, angle, turn = self.state.tolist()
        force = 10.0 if action else -10.0
        push = (force + 0.05 * turn**2 * angle) / 1.1
        spin = (9.8 * angle - push) / (0.5 * (4 / 3 - 0.1 / 1.1))
        speed = push - 0.05 * spin * angle / 1.1
        self.state = torch.tensor(
            [x + 0.02 * v, v + 0.02 * speed, angle + 0.02 * turn, turn + 0.02 * spin]
        )
        return self.state, 1.0, abs(self.state[2]) > 0.2


# -- the port --------------------------------------------------------------------------------------

policies = []


def model():
    policies.append(Policy())
    return policies[-1]


def episodes(start):
    for number in itertools.count(start):
        source, env, states, actions = torch.Generator().manual_seed(number), Pole(), [], []
        state = env.reset(source)
        for _ in range(30):
            probs = policies[-1](state.unsqueeze(0))
            action = int(torch.multinomial(probs, 1, generator=source))
            states, actions = [*states, state], [*actions, action]
            state, _, done = env.step(action)
            if done:
                break
        rewards = torch.tensor([sum(0.99**k for k in range(n)) for n in range(len(states), 0, -1)])
        returns = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        yield torch.stack(states), torch.tensor(actions), returns


def loss(model, batch):
    states, actions, returns = batch
    return -(Categorical(model(states)).log_prob(actions) * returns).sum()


def job() -> ps.Job:
    """The data asks the policy that is trained: an episode is a function of the weights."""
    return ps.Job(
        model=model,
        loss=loss,
        data=episodes,
        optimizer=lambda params: optim.Adam(params, lr=1e-2, eps=1e-4),
        micro_batches=1,
    )
