"""Complex numbers inside a step: spectra, complex weights, kernels of state spaces."""

from itertools import count

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.graph.trace import capture
from penstock.prove.prove import Planned, prove
from tests.parity.models import plan_of

D = 8


class Spectral(nn.Module):
    """Some frequencies are weighted, by real pairs, and written into a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.weight = nn.Linear(D, D), nn.Parameter(torch.randn(3, 2) / 3)

    def forward(self, x: Tensor) -> Tensor:
        modes = torch.fft.rfft(self.up(x))
        out = torch.zeros_like(modes)
        out[:, :3] = modes[:, :3] * torch.view_as_complex(self.weight)
        return x + torch.fft.irfft(out, n=D)


class Weighted(nn.Module):
    """A parameter that is complex."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(D, D)
        self.weight = nn.Parameter(torch.randn(D // 2 + 1, dtype=torch.cfloat) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(self.up(x)) * self.weight, n=D)


class Kernel(nn.Module):
    """A convolution by a sum of complex exponentials."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.rate = nn.Linear(D, D), nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        powers = torch.exp((-self.rate.exp() + 1j * torch.arange(4))[:, None] * torch.arange(D))
        kernel = torch.fft.rfft(2 * powers.sum(0).real, n=2 * D)
        return torch.fft.irfft(torch.fft.rfft(self.up(x), n=2 * D) * kernel, n=2 * D)[..., :D]


def job_of(model, loss=lambda net, x: net(x).square().mean()) -> ps.Job:
    def data(start: int):
        for number in count(start):
            yield torch.randn(4, D, generator=torch.Generator().manual_seed(number))

    return ps.Job(model, loss, data, lambda w: torch.optim.SGD(w, lr=0.1), micro_batches=4)


@pytest.mark.parametrize("block", [Spectral, Weighted, Kernel])
def test_complex_numbers_inside_a_step_are_proved(block):
    job = job_of(lambda: nn.Sequential(block(), nn.Tanh(), block(), nn.Linear(D, 2)))
    captured = capture(job)
    plan = plan_of(captured.graph, "one_f_one_b", 2, 2, replicas=2)
    assert prove(Planned(job, captured, plan), (0, 2)).problem == ""


def test_ctc_loss_of_constant_lengths_equals_the_plain_loop():
    def loss(net: nn.Module, x: Tensor) -> Tensor:
        rows = net(x)[:, None].log_softmax(-1)
        whole, most = torch.full((1,), 4), torch.full((1,), 2)
        return nn.functional.ctc_loss(rows, torch.ones(1, 2, dtype=torch.long), whole, most)

    job = job_of(lambda: nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 3)), loss)
    captured = capture(job)
    plan = plan_of(captured.graph, "one_f_one_b", 2, 2, replicas=2)
    assert prove(Planned(job, captured, plan), (0, 2)).problem == ""
