"""A step that has no work for so many ranks is trained on as many as it can use."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from penstock.choose import usable_ranks
from penstock.choose.choose import Machines
from penstock.choose.usable_ranks import best_on_ranks
from penstock.cluster import Cluster
from penstock.errors import MemoryShortError, PlanError
from penstock.graph.trace import capture
from penstock.job import Job
from penstock.search import Fixed, JobNeeds


class Counted(nn.Module):
    """One layer, scaled by how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(x) * (self.calls / 20).clamp(max=1.0)


def job() -> Job:
    return Job(
        model=Counted,
        loss=lambda model, x: model(x).square().mean(),
        data=lambda start: iter([torch.ones(2, 4)] * 8),
        optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1),
        micro_batches=4,
    )


def test_one_copy_of_one_stage_is_on_one_of_two_ranks() -> None:
    fixed, made = Fixed(ranks=2, needs=JobNeeds(buffers="one copy")), job()
    searched, left, (decision,) = best_on_ranks(
        made, fixed, capture(made), Machines(Cluster.here(2))
    )
    assert searched.choice.plan.total_ranks == left.ranks == 1
    assert (decision.what, decision.value) == ("ranks", "1")
    assert "no plan fits ranks 2" in decision.why


@pytest.mark.parametrize(
    ("fixed", "problem", "found"),
    [
        (Fixed(ranks=2, stages=3), PlanError("no"), 1),
        (Fixed(ranks=2, replicas=2), PlanError("no"), 1),
        (Fixed(ranks=2, schedule="gpipe"), PlanError("no"), 1),
        (Fixed(), PlanError("no"), 1),
        (Fixed(ranks=2), MemoryShortError("no"), 1),
        (Fixed(ranks=2), PlanError("no"), 4),
    ],
)
def test_what_else_is_asked_for_or_is_short_stays_an_error(
    fixed, problem, found, monkeypatch
) -> None:
    def best(_: Job, own: Fixed, *__: object) -> object:
        if own == fixed:
            raise problem
        return SimpleNamespace(choice=SimpleNamespace(plan=SimpleNamespace(total_ranks=found)))

    monkeypatch.setattr(usable_ranks, "best", best)
    with pytest.raises(PlanError, match="no"):
        best_on_ranks(job(), fixed, None, Machines())
