"""facebookresearch/dlrm, dlrm_s_pytorch.py: bags of embeddings with offsets, and interactions."""

import itertools

import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps


class DLRM_Net(nn.Module):  # noqa: N801 - the script's own name
    def __init__(self, m_spa=4, ln_emb=(20, 10, 6)):
        super().__init__()
        self.emb_l = nn.ModuleList(nn.EmbeddingBag(n, m_spa, mode="sum") for n in ln_emb)
        self.bot_l = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, m_spa), nn.ReLU())
        self.top_l = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 1), nn.Sigmoid())

    def apply_emb(self, lS_o, lS_i):
        return [bag(lS_i[k], lS_o[k]) for k, bag in enumerate(self.emb_l)]

    def interact_features(self, x, ly):
        batch_size, d = x.shape
        T = torch.cat([x, *ly], dim=1).view((batch_size, -1, d))
        Z = torch.bmm(T, torch.transpose(T, 1, 2))
        _, ni, nj = Z.shape
        li = torch.tensor([i for i in range(ni) for j in range(i)])
        lj = torch.tensor([j for i in range(nj) for j in range(i)])
        return torch.cat([x, Z[:, li, lj]], dim=1)

    def forward(self, dense_x, lS_o, lS_i):
        x = self.bot_l(dense_x)
        return self.top_l(self.interact_features(x, self.apply_emb(lS_o, lS_i)))


def click(number):
    source = torch.Generator().manual_seed(number)
    X = torch.rand(8, 5, generator=source).log1p()
    lS_o = torch.arange(8).mul(2).repeat(3, 1)
    lS_i = torch.stack([torch.randint(n, (16,), generator=source) for n in (20, 10, 6)])
    return X, lS_o, lS_i, torch.rand(8, 1, generator=source).round()


# -- the port --------------------------------------------------------------------------------------


def loss(model, batch):
    X, lS_o, lS_i, T = batch
    return F.binary_cross_entropy(model(X, lS_o, lS_i), T)


def job() -> ps.Job:
    """Tables of three sizes; samples are the second dimension of their indices."""
    return ps.Job(
        model=DLRM_Net,
        loss=loss,
        data=lambda start: map(click, itertools.count(start)),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        micro_batches=4,
    )
