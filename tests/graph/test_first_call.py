"""What a job's code keeps of its first call - a table in a cache - is real after a trace too."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from penstock.graph.trace import build, capture
from penstock.job import Job


def by_a_cached_function() -> Callable[[], Tensor]:
    @functools.lru_cache
    def order() -> Tensor:
        return torch.tensor([3, 1, 0, 2])

    return order


def by_a_dict_beside_the_model() -> Callable[[], Tensor]:
    tables: dict[int, Tensor] = {}

    def order() -> Tensor:
        if 4 not in tables:
            tables[4] = torch.arange(4).flip(0)
        return tables[4]

    return order


def by_an_attribute_of_a_class() -> Callable[[], Tensor]:
    class Table:
        rows = None

        @classmethod
        def of(cls) -> Tensor:
            cls.rows = torch.arange(4) if cls.rows is None else cls.rows
            return cls.rows

    return Table.of


def by_a_default() -> Callable[[], Tensor]:
    def order(kept: list[Tensor] = []) -> Tensor:  # noqa: B006 - as people do
        if not kept:
            kept.append(torch.tensor([1, 0, 3, 2]))
        return kept[0]

    return order


def job_of(table: Callable[[], Tensor]) -> Job:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x[:, table()]).square().mean()

    return Job(
        model=lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)),
        loss=loss,
        data=lambda start: iter([torch.randn(3, 4)] * 4),
        optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1),
    )


@pytest.mark.parametrize(
    "kind",
    [by_a_cached_function, by_a_dict_beside_the_model, by_an_attribute_of_a_class, by_a_default],
)
def test_the_plain_loop_finds_the_table_that_it_would_have_made(kind) -> None:
    job, table = job_of(found := kind()), kind()()
    capture(job)
    assert type(found()) is Tensor
    assert torch.equal(found(), table)
    model, batch = build(job)
    job.loss(model, batch).backward()


def test_what_a_list_keeps_of_a_trace_is_real_and_nothing_that_is_trained_is_written() -> None:
    seen: list[Tensor] = []

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(1)
            seen.append(x.detach())
            return self.layer(x + torch.rand_like(x))

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x.mul_(2)).square().mean()

    job = job_of(lambda: torch.arange(4))
    job = Job(Noisy, loss, lambda start: iter([torch.ones(3, 4)] * 4), job.optimizer)
    captured = capture(job)
    assert torch.equal(captured.model.calls, torch.zeros(()))
    assert torch.equal(seen[0], torch.full((3, 4), 2.0))
