"""What a step makes of a buffer is read off its ops: linear whatever the batch, or by the order."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from penstock.graph.linear import crooked
from penstock.graph.trace import capture
from penstock.job import Job

WIDTH, CLASSES = 4, 3


class Writes(nn.Module):
    """A layer with some buffers, into which forward writes by `rule(self, y, labels)`."""

    def __init__(self, rule, **buffers: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.rule = rule
        for name, value in buffers.items():
            self.register_buffer(name, value.clone())

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        y = self.layer(x)
        with torch.no_grad():
            self.rule(self, y, labels)
        return y


def data(start: int):
    while True:
        source = torch.Generator().manual_seed(start)
        yield torch.randn(6, WIDTH, generator=source), torch.tensor([0, 1, 2, 2, 1, 0])
        start += 1


def found(rule, **buffers: Tensor) -> dict[str, str]:
    return found_in(lambda: Writes(rule, **buffers))


def found_in(make) -> dict[str, str]:
    loss = lambda model, batch: model(*batch).square().mean()  # noqa: E731
    return crooked(capture(Job(make, loss, data, lambda weights: torch.optim.SGD(weights, 0.1))))


MEANS, COUNTS, COUNT = torch.zeros(CLASSES, WIDTH), torch.zeros(CLASSES), torch.tensor(0)
ROW, FLAG, QUEUE = torch.zeros(WIDTH), torch.tensor(False), torch.zeros(12, WIDTH)


def sums_of(y: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    chosen = functional.one_hot(labels, CLASSES).to(y.dtype)
    return chosen.t() @ y, chosen.sum(0)


def many(m: Writes, y: Tensor, labels: Tensor) -> None:
    torch._foreach_mul_([m.b, m.other], [0.5, 0.25])
    torch._foreach_add_([m.b, m.other], [y.mean(0), y[0]])


LINEAR = {
    "average": (lambda m, y, _: m.b.mul_(0.9).add_(y.mean(0), alpha=0.1), {"b": ROW}),
    "lerp": (lambda m, y, _: m.b.lerp_(y.mean(0), 0.1), {"b": ROW}),
    "many": (many, {"b": ROW, "other": ROW}),
    "overwritten": (lambda m, y, _: m.b.copy_(y.amax(0)), {"b": ROW}),
    "by a mask, and anew": (lambda m, y, _: m.b.copy_((y > 0).float().mean(0)), {"b": ROW}),
    "overwritten flag": (lambda m, y, _: m.b.fill_(True), {"b": FLAG}),
    "count": (lambda m, y, _: m.b.add_(1), {"b": COUNT}),
    "counted where it holds": (lambda m, y, _: m.b.add_((y.mean() > 0).long()), {"b": COUNT}),
    "sums by class": (lambda m, y, k: m.b.index_add_(0, k, y), {"b": MEANS}),
    "counts by class": (lambda m, y, k: m.b.scatter_add_(0, k, torch.ones(6)), {"b": COUNTS}),
    "added at places": (lambda m, y, k: m.b.index_put_((k,), y, accumulate=True), {"b": MEANS}),
    "half of its rows": (lambda m, y, _: m.b[:2].mul_(0.5), {"b": MEANS}),
    "a constant row": (lambda m, y, _: m.b.index_fill_(0, m.row, 0.0), {"b": MEANS, "row": COUNT}),
    "by a buffer that stays": (
        lambda m, y, _: m.b.mul_(m.decay).add_((1 - m.decay) * y.mean(0)),
        {"b": ROW, "decay": torch.tensor(0.9)},
    ),
    "by a fixed mask": (
        lambda m, y, _: m.b.copy_(torch.where(m.mask, y.mean(0), m.b)),
        {"b": ROW, "mask": torch.tensor([True, False, True, False])},
    ),
}


@pytest.mark.parametrize("name", LINEAR)
def test_what_no_batch_can_change_is_linear(name):
    rule, buffers = LINEAR[name]
    laws = found(rule, **buffers)
    assert laws
    assert set(laws.values()) <= {""}


def class_means(m: Writes, y: Tensor, labels: Tensor) -> None:
    sums, counts = sums_of(y, labels)
    means = 0.9 * m.b + 0.1 * sums / counts.clamp(min=1)[:, None]
    m.b.copy_(torch.where(counts[:, None] > 0, means, m.b))


def by_counts(m: Writes, y: Tensor, labels: Tensor) -> None:
    sums, counts = sums_of(y, labels)
    m.b.lerp_(sums, (counts / (counts + 1))[:, None])


def reset(m: Writes, y: Tensor, labels: Tensor) -> None:
    m.b.mul_(0.99).add_(sums_of(y, labels)[1], alpha=0.01)
    m.codes.copy_(torch.where(m.b[:, None] < 0.1, y[:CLASSES], m.codes))


def queued(m: Writes, y: Tensor, _: Tensor) -> None:
    m.b.index_copy_(0, (m.place + torch.arange(6)) % 12, y)
    m.place.copy_((m.place + 6) % 12)


def every_second(m: Writes, y: Tensor, _: Tensor) -> None:
    m.tick.copy_((m.tick + 1) % 2)
    m.b.copy_(torch.where(m.tick == 0, 0.9 * m.b + y.mean(0), m.b))


def cumulative(m: Writes, y: Tensor, _: Tensor) -> None:
    m.tick.add_(1)
    m.b.add_((y.mean(0) - m.b) / m.tick)


ORDERED = {
    "means of the classes that are there": (class_means, {"b": MEANS}, "up to the data (where)"),
    "a share by counts": (by_counts, {"b": MEANS}, "up to the data (lerp)"),
    "places of the data": (
        lambda m, y, k: m.b.index_put_((k,), 0.9 * m.b[k] + 0.1 * y),
        {"b": MEANS},
        "up to the data (index)",
    ),
    "overwritten at places": (
        lambda m, y, k: m.b.index_put_((k,), y),
        {"b": MEANS},
        "up to the data (index_put)",
    ),
    "a mask of the data": (
        lambda m, y, _: m.b.copy_(m.b * (y.mean(0) > 0)),
        {"b": ROW},
        "up to the data (mul)",
    ),
    "by a weight": (lambda m, y, _: m.b.mul_(m.layer.bias), {"b": ROW}, "up to the data (mul)"),
    "a reset by the loss": (
        lambda m, y, _: m.b.add_(1).mul_((y.abs().mean() < 9).long()),
        {"b": COUNT},
        "up to the data (mul)",
    ),
    "masked": (lambda m, y, _: m.b.masked_fill_(y.mean(0) > 9, 0), {"b": ROW}, "(masked_fill)"),
    "random": (lambda m, y, _: m.b.mul_(torch.rand(WIDTH)), {"b": ROW}, "up to the data (mul)"),
    "greatest": (lambda m, y, _: m.b.copy_(torch.maximum(m.b, y.amax(0))), {"b": ROW}, "(maximum)"),
    "least": (lambda m, y, _: m.b.copy_(torch.minimum(m.b, y.amin(0))), {"b": ROW}, "(minimum)"),
    "a quantile": (lambda m, y, _: m.b.add_(torch.sign(y.mean(0) - m.b)), {"b": ROW}, "(sign)"),
    "any": (lambda m, y, _: m.b.logical_or_(y.mean() > 0), {"b": FLAG}, "(logical_or)"),
    "wraps": (lambda m, y, _: m.b.copy_((m.b + 1) % 7), {"b": COUNT}, "(remainder)"),
    "a whole number": (lambda m, y, _: m.b.copy_(m.b * 0.5), {"b": COUNT}, "rounded to int64"),
    "halves": (lambda m, y, _: m.b.div_(2, rounding_mode="floor"), {"b": COUNT}, "(div)"),
    "in bfloat16": (lambda m, y, _: m.b.copy_(m.b.bfloat16() + 1), {"b": ROW}, "to bfloat16"),
    "resets of a codebook": (reset, {"b": COUNTS, "codes": MEANS}, "codes depends on it"),
    "a queue": (queued, {"b": QUEUE, "place": COUNT}, "up to the data (index_copy)"),
    "every second": (every_second, {"b": ROW, "tick": COUNT}, "up to the data (where)"),
    "cumulative": (cumulative, {"b": ROW, "tick": torch.tensor(0.0)}, "(div)"),
}


@pytest.mark.parametrize("name", ORDERED)
def test_what_a_batch_can_change_is_left_to_the_order(name):
    rule, buffers, why = ORDERED[name]
    assert why in found(rule, **buffers)["b"]


def test_a_buffer_on_which_another_depends_is_left_to_the_order_too():
    laws = found(every_second, b=ROW, tick=COUNT)
    assert laws["tick"] == "its next value is not a constant * old + new (remainder)"
    laws = found(cumulative, b=ROW, tick=torch.tensor(0.0))
    assert laws["tick"] == "b depends on it"
    both = found(lambda m, y, _: m.b.add_(m.other.add_(1)), b=ROW, other=ROW)
    assert both == {"b": "it depends on other", "other": "b depends on it"}


def test_what_the_loss_or_a_gradient_reads_is_left_to_the_order():
    class Shifts(Writes):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return super().forward(x, labels) + self.b

    laws = found_in(lambda: Shifts(lambda m, y, _: m.b.add_(1), b=ROW))
    assert laws == {"b": "the loss depends on it"}


def test_norms_are_linear_and_what_looks_at_their_statistics_is_not():
    class Normed(nn.Module):
        def __init__(self, *, looks: bool) -> None:
            super().__init__()
            self.norm, self.each = (
                nn.BatchNorm1d(WIDTH),
                nn.InstanceNorm1d(WIDTH, track_running_stats=True),
            )
            self.looks = looks

        def forward(self, x: Tensor, _: Tensor) -> Tensor:
            y = self.norm(self.norm(x))
            y = self.each(y[:, :, None].expand(-1, -1, 3))
            return y * self.norm.running_var[:, None] if self.looks else y

    names = {f"norm.{n}" for n in ("running_mean", "running_var", "num_batches_tracked")}
    names |= {"each.running_mean", "each.running_var"}
    assert found_in(lambda: Normed(looks=False)) == dict.fromkeys(names, "")
    laws = found_in(lambda: Normed(looks=True))
    assert laws["norm.running_var"] == "the loss depends on it"
    assert laws["norm.running_mean"] == ""


@given(st.integers(1, 5), st.integers(0, 4))
def test_one_op_that_is_up_to_the_data_is_enough_wherever_it_is(count, at):
    """Of a chain of averages, one by a number of the batch."""

    def rule(m: Writes, y: Tensor, _: Tensor) -> None:
        for number in range(count):
            m.b.mul_(y.mean() if number == at else 0.5).add_(y[0])

    assert bool(found(rule, b=ROW)["b"]) == (at < count)
