"""Tensors that share memory without being one parameter are refused; tied and flat ones are not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from penstock import _compat
from penstock.errors import GraphError
from penstock.graph.cut import cut
from penstock.graph.trace import capture
from tests.graph.executor import run_cut, run_eager
from tests.graph.zoo import D, job_of, vectors


class Net(nn.Module):
    """Two layers, a buffer, and whatever `change` makes of them."""

    def __init__(
        self,
        change: Callable[["Net"], object],
        then: Callable[["Net", Tensor], Tensor] = lambda net, x: net.b(torch.tanh(net.a(x))),
    ) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)
        self.register_buffer("mean", torch.zeros(D))
        self.then = then
        change(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self, x)


def transposes(net: Net) -> None:
    net.b.weight.data = net.a.weight.data.t()


def wraps_again(net: Net) -> None:
    net.b.weight = nn.Parameter(net.a.weight.data)


def overlaps_in_one_flat_tensor(net: Net) -> None:
    flat = torch.randn(D * D + D)
    net.a.weight, net.a.bias = (
        nn.Parameter(flat[: D * D].view(D, D)),
        nn.Parameter(flat[-D - 1 : -1]),
    )


def keeps_a_row_as_buffer(net: Net) -> None:
    net.register_buffer("row", net.a.weight.data[0])


def registers_a_parameter_twice(net: Net) -> None:
    net.register_buffer("same", net.a.weight)


def expands(net: Net) -> None:
    net.a.bias = nn.Parameter(torch.randn(1).expand(D))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (transposes, "parameter a.weight and parameter b.weight share memory and are not one"),
        (wraps_again, "parameter a.weight and parameter b.weight share memory and are not one"),
        (overlaps_in_one_flat_tensor, "parameter a.weight and parameter a.bias share memory"),
        (keeps_a_row_as_buffer, "parameter a.weight and buffer row share memory"),
        (registers_a_parameter_twice, "parameter a.weight and buffer same are one tensor"),
        (expands, "parameter a.bias repeats its elements"),
    ],
)
def test_parameter_that_shares_memory_is_refused_with_both_names(change, message: str) -> None:
    with pytest.raises(GraphError, match=message) as caught:
        capture(job_of(lambda: Net(change), vectors))
    assert "register" in caught.value.hint


def adds_to_its_mean(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return net.a(x) - net.part


def keeps_half_of_its_mean(net: Net) -> None:
    net.register_buffer("part", net.mean[:1])


def keeps_its_mean_as_an_attribute(net: Net) -> None:
    net.part = net.mean[:1]


def test_buffer_that_is_written_and_shares_memory_with_another_is_refused() -> None:
    with pytest.raises(GraphError, match="buffer mean and buffer part share memory"):
        capture(job_of(lambda: Net(keeps_half_of_its_mean, adds_to_its_mean), vectors))


def test_buffer_that_is_written_and_read_through_an_attribute_is_refused() -> None:
    with pytest.raises(GraphError, match="reads buffer mean through the attribute part"):
        capture(job_of(lambda: Net(keeps_its_mean_as_an_attribute, adds_to_its_mean), vectors))


def keeps_its_weight(net: Net) -> None:
    net.kept = net.a.weight.data.t()


def keeps_a_list_of_views(net: Net) -> None:
    net.kept = [net.a.weight.data]


@pytest.mark.parametrize(
    ("change", "then", "through"),
    [
        (keeps_its_weight, lambda net, x: net.b(net.a(x) @ net.kept), "the attribute kept"),
        (
            keeps_a_list_of_views,
            lambda net, x: net.b(net.a(x) @ net.kept[0]),
            "a list, a dict or a global",
        ),
    ],
)
def test_parameter_that_is_read_past_its_module_is_refused(change, then, through: str) -> None:
    with pytest.raises(GraphError, match=rf"reads parameter a\.weight through {through}"):
        capture(job_of(lambda: Net(change, then), vectors))


# -- what is not ----------------------------------------------------------------------------------


def ties(net: Net) -> None:
    net.b.weight = net.a.weight


def flattens(net: Net) -> None:
    flat = torch.randn(2 * D * D) * 0.2
    net.a.weight = nn.Parameter(flat[: D * D].view(D, D))
    net.b.weight = nn.Parameter(flat[D * D :].view(D, D))


def takes_columns_by_turns(net: Net) -> None:
    flat = torch.randn(D, 2 * D) * 0.2
    net.a.weight, net.b.weight = nn.Parameter(flat[:, ::2]), nn.Parameter(flat[:, 1::2])


def keeps_what_it_never_reads(net: Net) -> None:
    net.kept = net.a.weight.data.t()


def keeps_a_part_of_a_buffer_that_nobody_writes(net: Net) -> None:
    net.kept = net.mean[:1]
    net.register_buffer("part", net.mean[1:])


def freezes_and_keeps(net: Net) -> None:
    net.a.weight.requires_grad_(False)
    net.kept = net.a.weight.data


@pytest.mark.parametrize(
    ("change", "then"),
    [
        (ties, None),
        (flattens, None),
        (takes_columns_by_turns, None),
        (keeps_what_it_never_reads, None),
        (
            keeps_a_part_of_a_buffer_that_nobody_writes,
            lambda net, x: net.a(x) + net.kept + net.part.sum(),
        ),
        (freezes_and_keeps, lambda net, x: net.b(net.a(x) @ net.kept)),
    ],
)
def test_step_equals_eager_where_a_model(change, then) -> None:
    model = (lambda: Net(change)) if then is None else (lambda: Net(change, then))
    job = job_of(model, vectors)
    captured = capture(job)
    found, expected = run_cut(job, captured, cut(captured.graph), split=False), run_eager(job)
    assert [loss.item() for loss in found.losses] == [loss.item() for loss in expected.losses]
    for name, gradient in expected.gradients.items():
        assert torch.equal(found.gradients[name], gradient), name


def test_only_fake_tensors_are_fake() -> None:
    mode = _compat.fake_mode()
    assert _compat.is_fake(_compat.as_fake(mode, torch.ones(2)))
    assert not _compat.is_fake(torch.ones(2))
