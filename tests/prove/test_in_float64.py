"""What differs by rounding is told, in 64 bits, from what is wrong."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from penstock.prove.in_float64 import _exact, judged_finely
from penstock.prove.plain import Plain
from tests.graph.zoo import job_of


def _net():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten())


def _images(generator):
    return torch.randn(4, 3, 12, 12, generator=generator)


JOB = job_of(_net, _images, lambda m, x: F.softplus(m(x)).mean(), micro_batches=2)


def _step(job):
    plain = Plain(job)
    state = {**plain.weights(), **plain.buffers()}
    return plain, state, plain.gradients(0).gradients


def _rows(job, change):
    plain, state, expected = _step(job)
    exact = _exact(plain, job, 0, state, list(plain.parameters.values()))
    found = {name: change(name, value, exact) for name, value in expected.items()}
    return {row.what: row for row in judged_finely(plain, job, 0, state, (found, expected))}


def test_gradient_as_near_to_64_bits_as_the_plain_one_is_rounding():
    rows = _rows(JOB, lambda name, g, exact: (g + 20 * (g - exact[name])).float())
    assert rows["rounding"].value < 1e-4
    assert rows["gradients"].value < 1e-5 if "gradients" in rows else True


@pytest.mark.parametrize("size", [1e-3, 0.1])
def test_wrong_gradient_is_none(size):
    rows = _rows(JOB, lambda name, g, exact: g * (1 + size) if name == "2.bias" else g)
    assert rows["gradients"].where == "2.bias"
    assert rows["gradients"].value == pytest.approx(size, rel=0.01)


def test_what_cannot_be_in_64_bits_is_judged_as_it_stands():
    def loss(m, x):
        return (m(x.float()) @ torch.ones(256)).mean()

    plain, state, expected = _step(replace(JOB, loss=loss))
    assert _exact(plain, replace(JOB, loss=loss), 0, state, list(plain.parameters.values())) is None
    rows = judged_finely(plain, replace(JOB, loss=loss), 0, state, (expected, expected))
    assert [(row.what, row.bitwise) for row in rows] == [("gradients", True)]


def test_weights_of_the_plain_loop_stay_as_they_are():
    plain, state, expected = _step(JOB)
    judged_finely(plain, JOB, 0, state, (expected, expected))
    assert all(torch.equal(value, state[name]) for name, value in plain.weights().items())


def _ranked(m, x):
    """Pairs of samples: what is added to all outputs alike changes nothing, but for rounding."""
    y = m(x)
    return F.softplus(y[:, None] - y[None] - 0.3).mean()


RANKED = job_of(
    lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)),
    lambda generator: torch.randn(7, 6, generator=generator),
    _ranked,
    micro_batches=2,
)


def test_gradient_whose_terms_cancel_out_is_rounding_as_the_plain_one_is():
    def farther(name, g, exact):
        return (g + 20 * (g - exact[name])).float() if name == "2.bias" else g

    _, _, expected = _step(RANKED)
    assert 0 < expected["2.bias"].abs().max() < 1e-6 * expected["2.weight"].abs().max()
    rows = _rows(RANKED, farther)
    assert rows["rounding"].where == "2.bias"
    assert "gradients" not in rows or rows["gradients"].value < 1e-5


def test_gradient_that_should_cancel_out_and_does_not_is_wrong():
    rows = _rows(RANKED, lambda name, g, _: g + 1e-6 if name == "2.bias" else g)
    assert rows["gradients"].where == "2.bias"
    assert rows["gradients"].value > 1e-3
