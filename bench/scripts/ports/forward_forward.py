"""pytorch/examples, mnist_forward_forward/main.py: each layer has a loss and an optimizer."""

import itertools

import torch
from drawn import pictures
from torch import nn
from torch.optim import Adam
from torch.utils.data import DataLoader

import penstock as ps


def get_y_neg(y):
    return (y + 1 + torch.arange(len(y)) % 3) % 4


def overlay_y_on_x(x, y):
    x_ = x.clone()
    x_[:, :4] = 0.0
    x_[range(x.shape[0]), y] = 2.0
    return x_


class Layer(nn.Linear):
    threshold = 1.0

    def forward(self, x):
        x_direction = x / (x.norm(2, 1, keepdim=True) + 1e-4)
        return torch.relu(torch.mm(x_direction, self.weight.T) + self.bias.unsqueeze(0))

    def loss(self, x_pos, x_neg):
        g_pos, g_neg = self.forward(x_pos).pow(2).mean(1), self.forward(x_neg).pow(2).mean(1)
        gap = torch.cat([self.threshold - g_pos, g_neg - self.threshold])
        return torch.nn.functional.softplus(gap).mean()


class Net(nn.Module):
    def __init__(self, dims=(64, 16, 16)):
        super().__init__()
        self.layers = nn.ModuleList(itertools.starmap(Layer, itertools.pairwise(dims)))


train_loader = DataLoader(
    pictures(64), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(1)
)


# -- the port --------------------------------------------------------------------------------------


def loss(model, batch):
    x, y = batch[0].flatten(1), batch[1]
    h_pos, h_neg, total = overlay_y_on_x(x, y), overlay_y_on_x(x, get_y_neg(y)), 0.0
    for layer in model.layers:
        total = total + layer.loss(h_pos, h_neg)
        h_pos, h_neg = layer(h_pos).detach(), layer(h_neg).detach()
    return total


def job() -> ps.Job:
    """The losses of all layers as one sum, each blind to the layers before it."""
    adam = lambda params: Adam(params, lr=0.03, eps=1e-3)  # noqa: E731
    return ps.Job(
        model=Net,
        loss=loss,
        data=ps.from_loader(train_loader),
        optimizer=ps.by_name({"layers.0.*": adam, "layers.1.*": adam}),
    )
