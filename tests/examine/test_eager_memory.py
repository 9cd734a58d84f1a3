"""What a whole replica holds is compared with what a rank may hold, before the first step."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from penstock.errors import PlanError
from penstock.examine.eager_memory import check_memory, parts_of_replica
from tests.cli import mlp
from tests.cli.training import untraceable

MIB = 2**20


@pytest.mark.parametrize(
    ("optimizer", "copies"),
    [
        (torch.optim.SGD, 0),
        (lambda w: torch.optim.SGD(w, lr=0.1, momentum=0.9), 1),
        (torch.optim.Adam, 2),
    ],
)
def test_parts_of_a_replica_are_those_of_its_step(optimizer, copies: int) -> None:
    own = replace(mlp.job(), optimizer=lambda weights: optimizer(weights))
    weights = sum(p.numel() * 4 for p in mlp.model().parameters())
    parts = parts_of_replica(own)
    assert parts["weights"] == parts["gradients"] == weights
    assert parts["optimizer state"] == pytest.approx(copies * weights, abs=64)
    assert parts["activations"] >= 4 * mlp.SAMPLES * mlp.WIDTH * 4  # of each tanh


def test_replica_that_does_not_fit_is_refused_with_the_figures() -> None:
    wide = replace(
        untraceable(), model=lambda: nn.Sequential(nn.Linear(mlp.WIDTH, 4096), nn.Linear(4096, 1))
    )
    with pytest.raises(PlanError, match=r"a rank may hold 1\.00 MiB") as caught:
        check_memory(wide, MIB, 2, "file.py:3: control flow on values")
    assert "gradients" in caught.value.message
    assert "file.py:3" in caught.value.message
    check_memory(wide, 64 * MIB, 2, "")
    check_memory(wide, None, 2, "")


@pytest.mark.parametrize(("caps", "ranks", "fits"), [((64, 1), 1, True), ((64, 1), 2, False)])
def test_each_rank_that_runs_has_its_own_bound(caps, ranks: int, fits: bool) -> None:
    own = replace(
        untraceable(),
        model=lambda: nn.Linear(mlp.WIDTH, 1 << 14),
        loss=lambda m, b: m(b["x"]).mean(),
    )
    bound = tuple(cap * MIB for cap in caps)
    if fits:
        check_memory(own, bound, ranks, "")
        return
    with pytest.raises(PlanError):
        check_memory(own, bound, ranks, "")
