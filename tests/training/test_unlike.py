"""Micro-batches that are not of one kind, or not dense: no plan trains them, replicas do."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence

from penstock.errors import GraphError
from penstock.examine.examine import examine
from penstock.graph.trace import capture
from penstock.job import Job
from penstock.prove.prove import prove_eager

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:.*nested tensors")
Make = Callable[[int, Generator], Any]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = nn.GRU(4, 8, dtype=torch.float64), nn.Linear(8, 6).double()

    def forward(self, x: Any) -> Tensor:
        return self.head(self.rows(x)[1][0])


def linear() -> nn.Module:
    return nn.Linear(4, 6).double()


def reals(g: Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def lengths(k: int, count: int = 3) -> list[int]:
    return [3 + (5 * k + 3 * at) % 7 for at in range(count)]


def packed(k: int, g: Generator) -> Any:
    return pack_sequence([reals(g, n, 4) for n in lengths(k)], enforce_sorted=False)


def ctc(kind: Callable[[list[int]], Any]) -> Make:
    def make(k: int, g: Generator) -> Any:
        labels = torch.randint(1, 6, (3, 3), generator=g)
        return reals(g, 12, 3, 4), labels, kind([3 + n for n in lengths(k)]), kind([3, 2, 1])

    return make


def ctc_loss(model: nn.Module, batch: Any) -> Tensor:
    x, *others = batch
    return F.ctc_loss(model(x).log_softmax(-1), *others)


def squares(model: nn.Module, x: Any) -> Tensor:
    return model(x).square().mean()


def scaled(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["x"]).square().mean() * batch["scale"]


def with_scale(x: Tensor, scale: float) -> Tensor:
    x.scale = scale  # pyright: ignore[reportAttributeAccessIssue]
    return x


def named(model: nn.Module, x: Any) -> Tensor:
    return model(x).square().mean() * x.scale


def sparse(to: Callable[[Tensor], Tensor]) -> Make:
    def make(_: int, g: Generator) -> Any:
        whole = reals(g, 5, 5)
        return to(whole.where(whole > 0, 0.0)), reals(g, 5, 4)

    return make


def neighbours(model: nn.Module, batch: Any) -> Tensor:
    return torch.mm(batch[0], model(batch[1])).square().mean()


CASES: dict[str, tuple[Callable[[], nn.Module], Any, Make]] = {
    "lengths": (Recurrent, squares, lambda k, g: reals(g, lengths(k)[0], 2, 4)),
    "packed": (Recurrent, squares, packed),
    "samples": (linear, squares, lambda k, g: reals(g, 1 + k % 3, 4)),
    "lengths of CTC as numbers": (linear, ctc_loss, ctc(tuple)),
    "numbers": (linear, scaled, lambda k, g: {"x": reals(g, 2, 4), "scale": 1.0 + k % 4}),
    "a shorter one later": (linear, squares, lambda k, g: reals(g, 2 + (k % 8 < 7), 4)),
    "attributes": (linear, named, lambda k, g: with_scale(reals(g, 2, 4), 1.0 + k % 3)),
    "sparse": (linear, neighbours, sparse(Tensor.to_sparse)),
    "sparse rows": (linear, neighbours, sparse(Tensor.to_sparse_csr)),
}


def job_of(name: str) -> Job:
    model, loss, make = CASES[name]

    def data(start: int) -> Iterator[Any]:
        return (make(k, Generator().manual_seed(k)) for k in itertools.count(start))

    return Job(model, loss, data, lambda w: torch.optim.SGD(w, lr=0.1), micro_batches=4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_replicas_train_what_no_plan_does(name: str) -> None:
    job = job_of(name)
    found = examine(job)
    assert (found.one_process, found.failed) == ("", "")
    if not found.no_plan:
        with pytest.raises(GraphError):
            capture(job)
    proof = prove_eager(job, 2, (0, 3), laws=found.laws)
    assert proof.problem == ""
    assert [d for d in proof.differences if d.value > 1e-11] == []


@pytest.mark.parametrize("name", ["lengths", "numbers"])
def test_what_is_unlike_is_named(name: str) -> None:
    assert (
        "micro-batches are unlike, and a plan is made for one kind" in examine(job_of(name)).no_plan
    )


def test_what_else_is_found_is_for_one_process() -> None:
    job, calls = job_of("lengths"), itertools.count(1)

    def counts(model: nn.Module, x: Tensor) -> Tensor:
        return squares(model, x) * next(calls)

    found = examine(Job(job.model, counts, job.data, job.optimizer, micro_batches=4))
    assert "what a traced step" not in found.one_process
    assert found.one_process
    assert not found.no_plan


@pytest.mark.parametrize("lengths_of", [lengths, lambda k: [2 + (k + at) % 3 for at in range(3)]])
def test_jagged_batch_is_trained_by_replicas(lengths_of: Callable[[int], list[int]]) -> None:
    def data(start: int) -> Iterator[Any]:
        for k in itertools.count(start):
            g = Generator().manual_seed(k)
            rows = [reals(g, n, 4) for n in lengths_of(k)]
            yield torch.nested.nested_tensor(rows, layout=torch.jagged)

    def loss(model: nn.Module, x: Any) -> Tensor:
        return model(x).values().square().mean()

    job = Job(linear, loss, data, lambda w: torch.optim.SGD(w, lr=0.1), micro_batches=2)
    found = examine(job)
    assert (found.failed, found.one_process) == ("", "")
    assert prove_eager(job, 2, (0, 3), laws=found.laws).problem == ""
