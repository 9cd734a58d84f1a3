"""davidmrau/mixture-of-experts: noisy top-k gates, tokens sent to few experts, a balance."""

import itertools

import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps


class MoE(nn.Module):
    def __init__(self, input_size=8, output_size=4, num_experts=4, k=2):
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(input_size, 16), nn.ReLU(), nn.Linear(16, output_size))
            for _ in range(num_experts)
        )
        self.w_gate = nn.Parameter(torch.randn(input_size, num_experts) / 4)
        self.w_noise = nn.Parameter(torch.zeros(input_size, num_experts))
        self.k = k

    def cv_squared(self, x):
        return x.float().var() / (x.float().mean() ** 2 + 1e-10)

    def noisy_top_k_gating(self, x):
        clean_logits = x @ self.w_gate
        noise_stddev = F.softplus(x @ self.w_noise) + 1e-2
        logits = clean_logits + torch.randn_like(clean_logits) * noise_stddev
        top_logits, top_indices = logits.topk(self.k, dim=1)
        return torch.zeros_like(logits).scatter(1, top_indices, top_logits.softmax(1))

    def forward(self, x):
        gates = self.noisy_top_k_gating(x)
        y = torch.zeros(len(x), 4)
        for number, expert in enumerate(self.experts):
            rows = gates[:, number].nonzero(as_tuple=True)[0]
            y = y.index_add(0, rows, expert(x[rows]) * gates[rows, number, None])
        return y, 1e-2 * self.cv_squared(gates.sum(0))


# -- the port --------------------------------------------------------------------------------------


def samples(start):
    for number in itertools.count(start):
        source = torch.Generator().manual_seed(number)
        x = torch.randn(16, 8, generator=source)
        yield x, x[:, :4].abs().argmax(1)


def loss(model, batch):
    y_hat, aux_loss = model(batch[0])
    return F.cross_entropy(y_hat, batch[1]) + aux_loss


def job() -> ps.Job:
    """How many rows an expert gets is known only when the gates have been drawn."""
    return ps.Job(
        model=MoE,
        loss=loss,
        data=samples,
        optimizer=lambda params: torch.optim.Adam(params, lr=3e-3, eps=1e-3),
        micro_batches=4,
    )
