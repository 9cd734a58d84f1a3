"""torch.utils.checkpoint, of either kind and around random ops: a plan trains as the plain loop."""

from itertools import count

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock import _compat
from penstock.errors import GraphError
from penstock.graph.trace import capture
from penstock.job import Job
from penstock.plan import plan_by_hand
from penstock.prove.prove import Planned, prove


class Repeated(nn.Module):
    def __init__(self, dropout: float, **options) -> None:
        super().__init__()
        block = (nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(dropout)) for _ in range(2))
        self.first, self.blocks, self.options = nn.Linear(8, 8), nn.ModuleList(block), options

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, **self.options)
        return x


def data(start: int):
    for k in count(start):
        yield torch.randn(4, 8, generator=torch.Generator().manual_seed(k))


def job_of(dropout: float, **options) -> Job:
    return Job(
        lambda: Repeated(dropout, **options),
        lambda model, x: model(x).square().mean(),
        data,
        lambda weights: torch.optim.SGD(weights, lr=0.1),
        micro_batches=2,
    )


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_block_is_planned_and_proved(reentrant, dropout) -> None:
    job = job_of(dropout, use_reentrant=reentrant)
    captured = capture(job)
    plan = plan_by_hand(captured.graph, [0], "one_f_one_b", num_micro_batches=2)
    assert prove(Planned(job, captured, plan)).problem == ""


def test_what_a_block_computes_again_stays_so_where_nothing_is_drawn() -> None:
    flop = [capture(job_of(p, use_reentrant=False)).graph.flop for p in (0.0, 0.3)]
    assert flop[0] > flop[1]


def test_a_block_that_draws_anew_in_its_backward_is_refused() -> None:
    with pytest.raises(GraphError, match="draws random numbers"):
        capture(job_of(0.3, use_reentrant=False, preserve_rng_state=False))


class Buried(Repeated):
    """Nothing that the block is given learns: the old kind has no gradient for its weights."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.first(x)
        return x + self.blocks[0](x) + checkpoint(self.blocks[1], x, use_reentrant=True)


@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_a_block_without_gradients_has_none() -> None:
    job = job_of(0.0)
    made = Job(lambda: Buried(0.0), job.loss, data, job.optimizer, micro_batches=2)
    gradients = capture(made).graph.gradients
    assert gradients["blocks.1.0.weight"] is None
    assert gradients["blocks.0.0.weight"] is not None


def test_checkpoint_is_as_it_was_after_a_trace() -> None:
    module = torch.utils.checkpoint
    names = "CheckpointFunction", "_checkpoint_without_reentrant_generator"
    before = [getattr(module, name) for name in names]
    with _compat.checkpoints_traced(as_calls=True):
        assert all(getattr(module, n) is not b for n, b in zip(names, before, strict=True))
    assert [getattr(module, name) for name in names] == before
