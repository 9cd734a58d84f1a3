"""Small models and data that the scripts share, as a person's own files share theirs."""

import torch
from torch import nn

WIDTH = 8


def deep(depth: int = 4, inputs: int = WIDTH, outputs: int = 4) -> nn.Sequential:
    """A few linear layers, smooth, so that rounding stays rounding."""
    layers = [nn.Linear(inputs, WIDTH), nn.Tanh()]
    for _ in range(depth - 2):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, outputs))


class Heads(nn.Module):
    """Three heads, of which a number in the batch names one."""

    def __init__(self):
        super().__init__()
        self.body = deep(3, outputs=8)
        self.heads = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))

    def forward(self, x, task):
        return self.heads[task](self.body(x).tanh())


def pair(index: int, inputs: int = WIDTH, outputs: int = 4, rows: int = 4):
    """Inputs and targets that are a function of the index alone."""
    source = torch.Generator().manual_seed(index)
    x = torch.randn(rows, inputs, generator=source)
    return x, torch.randn(rows, outputs, generator=source) + x[:, :outputs]


def pairs(start: int):
    index = start
    while True:
        yield pair(index)
        index += 1


def classes(start: int):
    index = start
    while True:
        source = torch.Generator().manual_seed(index)
        yield torch.randn(4, WIDTH, generator=source), torch.randint(0, 4, (4,), generator=source)
        index += 1


def images(start: int):
    index = start
    while True:
        source = torch.Generator().manual_seed(index)
        x = torch.randn(4, 3, 8, 8, generator=source) + 0.5 * torch.randn(1, generator=source)
        yield x, torch.randint(0, 4, (4,), generator=source)
        index += 1


def tokens(start: int, vocabulary: int = 16, length: int = 6):
    index = start
    while True:
        source = torch.Generator().manual_seed(index)
        yield torch.randint(0, vocabulary, (2, length), generator=source)
        index += 1


def squares(model, batch):
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def entropy(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
