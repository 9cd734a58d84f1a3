"""pytorch/examples, vae/main.py: a loss that is a sum over the batch."""

import torch
from drawn import pictures
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader

import penstock as ps


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(64, 20), nn.Linear(20, 4), nn.Linear(20, 4)
        self.fc3, self.fc4 = nn.Linear(4, 20), nn.Linear(20, 64)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def forward(self, x):
        h1 = F.relu(self.fc1(x))
        mu, logvar = self.fc21(h1), self.fc22(h1)
        h3 = F.relu(self.fc3(self.reparameterize(mu, logvar)))
        return torch.sigmoid(self.fc4(h3)), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    BCE = F.binary_cross_entropy(recon_x, x.view(-1, 64), reduction="sum")
    return BCE - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


train_loader = DataLoader(
    pictures(64), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(1)
)


# -- the port --------------------------------------------------------------------------------------


def loss(model, batch):
    data = batch[0].sigmoid().view(-1, 64)
    recon_batch, mu, logvar = model(data)
    return loss_function(recon_batch, data, mu, logvar)


def job() -> ps.Job:
    """Noise in forward; the sum over the batch is the script's loss of a step."""
    return ps.Job(
        model=VAE,
        loss=loss,
        data=ps.from_loader(train_loader),
        optimizer=lambda params: optim.Adam(params, lr=1e-3, eps=1e-4),
    )
