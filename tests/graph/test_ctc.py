"""A CTC loss with lengths is planned, and its results have the shapes that the graph says."""

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock as ps
from penstock.graph.trace import build, capture, loss_of
from penstock.prove.prove import Planned, prove
from tests.graph.joined.joining import run
from tests.parity.models import plan_of

T, N, C, S = 12, 3, 5, 4


def of_lengths(x: Tensor, labels: Tensor, lengths: Tensor, widths: Tensor) -> Tensor:
    return F.ctc_loss(x, labels, lengths, widths)


def by_module(x: Tensor, labels: Tensor, lengths: Tensor, widths: Tensor) -> Tensor:
    loss = nn.CTCLoss(blank=C - 1, reduction="sum", zero_infinity=True)
    return loss(x, labels - 1, lengths, widths)


def of_whole_lengths(x: Tensor, labels: Tensor, lengths: Tensor, widths: Tensor) -> Tensor:
    return F.ctc_loss(x, labels, torch.full_like(lengths, T), torch.full_like(widths, S))


LOSSES = of_lengths, by_module, of_whole_lengths


def job_of(loss) -> ps.Job:
    def data(start: int):
        for number in itertools.count(start):
            drawn = torch.Generator().manual_seed(number)
            x = torch.randn(N, T, C, generator=drawn)
            labels = torch.randint(1, C, (N, S), generator=drawn)
            lengths = torch.randint(2 * S + 1, T + 1, (N,), generator=drawn)
            yield x, labels, lengths, torch.randint(1, S, (N,), generator=drawn)

    def computed(model: nn.Module, batch) -> Tensor:
        x, *others = batch
        return loss(model(x).log_softmax(-1).transpose(0, 1), *others)

    layers = nn.Linear(C, 8), nn.Tanh(), nn.Linear(8, C)
    return ps.Job(
        lambda: nn.Sequential(*layers),
        computed,
        data,
        lambda weights: torch.optim.SGD(weights, lr=0.01),
        micro_batches=4,
    )


@pytest.mark.parametrize("loss", LOSSES)
def test_traced_ctc_loss_is_that_of_torch_to_the_bit(loss):
    job = job_of(loss)
    model, batch = build(job)
    plain = loss_of(job, model, batch)
    plain.backward()
    found, gradients, _ = run(capture(job), batch)
    assert torch.equal(found, plain.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)


def test_plan_equals_the_plain_loop():
    job = job_of(of_lengths)
    captured = capture(job)
    plan = plan_of(captured.graph, "one_f_one_b", 2, 2, replicas=2)
    assert prove(Planned(job, captured, plan), (0, 2)).problem == ""
