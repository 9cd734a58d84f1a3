"""LARS and LAMB against their papers' algorithms, one number after another in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import JobError

SIZES = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=3)
RATES = st.floats(1e-3, 1.0)
SHARES = st.floats(0.0, 0.95)


def norm(values):
    return math.sqrt(sum(value * value for value in values))


def lars(weights, gradients, rate, momentum, decay, eta):
    """Algorithm 1: lambda = eta |w| / (|g| + decay |w|); v = m v + rate lambda (g + decay w)."""
    speed = [0.0] * len(weights)
    for step in gradients:
        size, slope = norm(weights), norm(step)
        ratio = eta * size / (slope + decay * size) if size > 0 and slope > 0 else 1.0
        speed = [
            momentum * v + rate * ratio * (g + decay * w)
            for v, g, w in zip(speed, step, weights, strict=True)
        ]
        weights = [w - v for w, v in zip(weights, speed, strict=True)]
    return weights


def lamb(weights, gradients, rate, betas, eps, decay):
    """Algorithm 2, with the moments' bias taken out."""
    first, second = betas
    mean, square = [0.0] * len(weights), [0.0] * len(weights)
    for number, step in enumerate(gradients, 1):
        mean = [first * m + (1 - first) * g for m, g in zip(mean, step, strict=True)]
        square = [second * v + (1 - second) * g * g for v, g in zip(square, step, strict=True)]
        change = [
            m / (1 - first**number) / (math.sqrt(v / (1 - second**number)) + eps) + decay * w
            for m, v, w in zip(mean, square, weights, strict=True)
        ]
        size, length = norm(weights), norm(change)
        ratio = size / length if size > 0 and length > 0 else 1.0
        weights = [w - rate * ratio * c for w, c in zip(weights, change, strict=True)]
    return weights


def trained(make, shapes, seed, steps=4):
    """Return tensors before, their gradients by step, and the tensors after."""
    source = torch.Generator().manual_seed(seed)
    before = [torch.randn(shape, generator=source, dtype=torch.float64) for shape in shapes]
    before[0].zero_()  # whose ratio is 1
    tensors = [torch.nn.Parameter(each.clone()) for each in before]
    optimizer = make(tensors)
    gradients = [
        [torch.randn(shape, generator=source, dtype=torch.float64) for shape in shapes]
        for _ in range(steps)
    ]
    for step in gradients:
        for tensor, gradient in zip(tensors, step, strict=True):
            tensor.grad = gradient.clone()
        optimizer.step()
    return before, gradients, tensors


def flat(tensor):
    return [float(value) for value in tensor.detach().flatten()]


@given(SIZES, st.integers(0, 99), RATES, SHARES, SHARES, RATES)
def test_lars_is_its_paper(shapes, seed, rate, momentum, decay, eta):
    before, gradients, after = trained(
        lambda tensors: ps.Lars(tensors, rate, momentum, decay, eta=eta), shapes, seed
    )
    for place, tensor in enumerate(after):
        own = [flat(step[place]) for step in gradients]
        wanted = lars(flat(before[place]), own, rate, momentum, decay, eta)
        assert flat(tensor) == pytest.approx(wanted, rel=1e-11, abs=1e-11)


@given(SIZES, st.integers(0, 99), RATES, st.tuples(SHARES, SHARES), SHARES)
def test_lamb_is_its_paper(shapes, seed, rate, betas, decay):
    before, gradients, after = trained(
        lambda tensors: ps.Lamb(tensors, rate, betas, 1e-6, decay), shapes, seed
    )
    for place, tensor in enumerate(after):
        own = [flat(step[place]) for step in gradients]
        wanted = lamb(flat(before[place]), own, rate, betas, 1e-6, decay)
        assert flat(tensor) == pytest.approx(wanted, rel=1e-11, abs=1e-11)


def test_a_group_that_does_not_adapt_is_adamw_without_its_own_decay():
    kept, other = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    pairs = (
        (ps.Lamb([{"params": [kept], "adapts": False}], 1e-2), kept),
        (
            torch.optim.Adam([other], 1e-2, eps=1e-6),
            other,
        ),
    )
    for step in range(3):
        for optimizer, weight in pairs:
            weight.grad = torch.tensor([1.0, -2.0, 0.5]) * (step + 1)
            optimizer.step()
    torch.testing.assert_close(kept, other)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda w: ps.Lars(w, -1.0), "lr is -1.0"),
        (lambda w: ps.Lars(w, momentum=1.0), "momentum is 1.0"),
        (lambda w: ps.Lamb(w, betas=(0.9, 1.5)), r"betas is \(0.9, 1.5\)"),
        (lambda w: ps.Lamb(w, adapts="yes"), "adapts is 'yes'"),
    ],
)
def test_numbers_that_cannot_be_are_refused(make, words):
    with pytest.raises(JobError, match=words):
        make([torch.nn.Parameter(torch.ones(2))])
