"""What a step asks of the values of a batch is asked of every batch."""

from dataclasses import replace
from itertools import count

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.errors import GraphError
from penstock.graph.joined.joined import joined
from penstock.graph.trace import capture
from penstock.prove.prove import Planned, prove
from tests.parity.models import plan_of

D = 8


def lengths(number: int, most: int = 4) -> Tensor:
    found = torch.randint(1, most + 1, (4,), generator=torch.Generator().manual_seed(number))
    found[number % 4] = most
    return found


class Branching(nn.Module):
    """Branches on the longest of a batch, and takes so many columns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor, own: Tensor) -> Tensor:
        assert not torch.isnan(x).any()
        longest = own.max().item()
        if longest > 3:
            x = x * 2
        mask = torch.arange(longest) < own[:, None]
        return self.second(self.first(x).tanh()) * mask.sum(1, keepdim=True) / longest


class Logged(Branching):
    """Only tells a number: any will do."""

    def forward(self, x: Tensor, own: Tensor) -> Tensor:
        self.told = own.max().item()
        return self.second(self.first(x).tanh())


def job_of(model=Branching, most=lambda number: 4) -> ps.Job:
    def data(start: int):
        for number in count(start):
            source = torch.Generator().manual_seed(number)
            yield torch.randn(4, D, generator=source), lengths(number, most(number))

    return ps.Job(
        model,
        lambda model, batch: model(*batch).square().mean(),
        data,
        lambda weights: torch.optim.SGD(weights, lr=0.1),
        micro_batches=4,
    )


def test_a_step_that_branches_on_a_batch_is_proved():
    job = job_of()
    captured = capture(job)
    assert any("4" in key for key in captured.graph.key if key.startswith("asked"))
    plan = plan_of(captured.graph, "one_f_one_b", 2, 2)
    assert prove(Planned(job, captured, plan), (0, 2)).problem == ""


def test_a_batch_that_answers_otherwise_does_not_fit():
    captured = capture(job_of())
    with pytest.raises(GraphError, match=r"test_answers.py.*own.max.*gives 3, .* traced for 4"):
        captured.leaves((torch.ones(4, D), lengths(0, 3)))
    with pytest.raises(GraphError, match=r"isnan.*gives True, the step was traced for False"):
        captured.leaves((torch.full((4, D), torch.nan), lengths(0)))


def test_each_of_several_micro_batches_is_asked():
    captured = joined(capture(job_of()), 2)
    x = torch.ones(8, D)
    captured.leaves((x, torch.cat([lengths(0), lengths(1)])))
    for pair in [(3, 4), (4, 3)]:
        with pytest.raises(GraphError, match="gives 3"):
            captured.leaves((x, torch.cat([lengths(0, most) for most in pair])))


def test_a_number_without_dims_is_asked():
    def loss(model, batch):
        value = model(*batch[:2]).square().mean()
        return 2 * value if batch[2].item() else value

    def numbered(start: int):
        for number, batch in enumerate(job_of().data(start), start):
            yield *batch, torch.tensor(number // 64)

    captured = capture(replace(job_of(), loss=loss, data=numbered))
    assert captured.batch.answers is not None
    x, own = torch.ones(4, D), lengths(0)
    captured.leaves((x, own, torch.tensor(0)))
    with pytest.raises(GraphError, match=r"test_answers.py:\d+.*batch\[2\].item"):
        captured.leaves((x, own, torch.tensor(1)))


def test_answers_that_change_early_leave_the_step_untraced():
    with pytest.raises(GraphError, match=r"test_answers.py:\d+: "):
        capture(job_of(most=lambda number: 4 - (number == 31)))


def test_what_is_only_told_is_not_held():
    captured = capture(job_of(Logged))
    assert captured.batch.answers is None
    captured.leaves((torch.ones(4, D), lengths(0, 3)))


def test_an_answer_that_follows_weights_is_none():
    class Asking(Branching):
        def forward(self, x, own):
            y = super().forward(x, own)
            return y * 2 if y.mean() > 0 else y

    with pytest.raises(GraphError, match=r"y.mean\(\) > 0"):
        capture(job_of(Asking))


def test_an_answer_that_follows_a_buffer_is_none():
    class Waiting(Branching):
        def __init__(self):
            super().__init__()
            self.register_buffer("most", torch.zeros(1))

        def forward(self, x, own):
            if (own.max() > self.most).item():
                self.most.add_(1)
            return super().forward(x, own)

    with pytest.raises(GraphError, match=r"own.max\(\) > self.most"):
        capture(job_of(Waiting))
