"""Ops that write into what is their own are renamed: to the graph that a second recording gives."""

import pytest
import torch
from torch import Tensor, nn

from penstock.graph import functional
from penstock.graph.trace import capture
from penstock.job import Job
from tests.graph.test_trace import Model, assert_equals_eager, job_that
from tests.graph.zoo import JOBS, D, job_of, vectors


class Unrolled(nn.Module):
    """A recurrent cell in a loop."""

    def __init__(self, cell: type[nn.LSTMCell] | type[nn.GRUCell]) -> None:
        super().__init__()
        self.cell = cell(D, D)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for _ in range(3):
            state = self.cell(x, state)
        assert state is not None
        return state[0] if isinstance(state, tuple) else state


def adds_in_place(model: Model, x: Tensor) -> Tensor:
    y = x * 2
    y += x
    y.mul_(3).clamp_(max=4)
    return torch.relu_(y - 1)


RENAMED = {
    **{name: JOBS[name] for name in ("dropout", "attention_dropout", "noise", "group_norm")},
    "lstm": job_of(lambda: Unrolled(nn.LSTMCell), vectors),
    "gru": job_of(lambda: Unrolled(nn.GRUCell), vectors),
    "adds in place": job_that(adds_in_place),
}


@pytest.mark.parametrize("name", RENAMED)
@pytest.mark.sampled(2)
def test_graph_is_that_of_a_second_recording(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_again(*_: object) -> None:
        raise AssertionError("it is recorded a second time")

    with monkeypatch.context() as patched:
        patched.setattr(functional, "_without_writes", not_again)
        found = capture(RENAMED[name])
    monkeypatch.setattr(functional, "made_anew", lambda graph: False)
    again = capture(RENAMED[name])
    assert found.graph == again.graph
    assert [str(n.target) for n in found.fx_nodes] == [str(n.target) for n in again.fx_nodes]


def reads_a_view_that_is_older(model: Model, x: Tensor) -> Tensor:
    y = x * 2
    first = y[:1]
    y.add_(1)
    return y + first


def writes_through_a_view(model: Model, x: Tensor) -> Tensor:
    y = x * 2
    y[:, 1:].mul_(3)
    return y


def writes_into_a_part(model: Model, x: Tensor) -> Tensor:
    y = x * 2
    y.narrow(1, 0, D // 2).add_(x[:, D // 2 :])
    return y


def reads_it_under_its_old_name(model: Model, x: Tensor) -> Tensor:
    y = x * 2
    same = y.view(-1)
    y.add_(1)
    return y + same.view_as(y)


def writes_a_buffer(model: Model, x: Tensor) -> Tensor:
    model.state.add_(x.detach().mean(0))
    return x + model.state


def copies_into(model: Model, x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    y.copy_(x)
    return y.fill_(2) * x


@pytest.mark.parametrize(
    "forward",
    [
        reads_a_view_that_is_older,
        writes_through_a_view,
        writes_into_a_part,
        reads_it_under_its_old_name,
        writes_a_buffer,
        copies_into,
        adds_in_place,
    ],
)
def test_step_equals_eager_where_a_model(forward) -> None:
    job: Job = job_that(forward)
    assert_equals_eager(job)
