"""A joined step is the mean of its micro-batches, whatever the loss does with the samples."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from penstock.errors import GraphError
from penstock.graph.joined.joined import joined
from penstock.graph.trace import capture
from tests.graph.joined.joining import apart, difference, in_64_bits, net
from tests.graph.joined.steps import (
    COUPLED,
    ENDS,
    MIDDLES,
    ORDINARY,
    any_step,
    labelled,
    of_classes,
    rows,
)
from tests.graph.zoo import JOBS, floats, job_of

EXACT = 1e-10  # in float64

WITH_EFFECTS = (
    "dropout",
    "attention_dropout",
    "noise",
    "batch_norm",
    "average",
)


@pytest.mark.parametrize(
    "name", sorted(set(JOBS) - set(WITH_EFFECTS) - {"autocast", "autocast_tied"})
)
@pytest.mark.sampled(3)
def test_joined_step_of_the_zoo_is_the_mean_of_its_parts(name):
    assert difference(JOBS[name], 2) < 1e-5


@pytest.mark.parametrize("name", WITH_EFFECTS)
def test_step_that_draws_or_changes_buffers_is_not_joined(name):
    with pytest.raises(GraphError, match="not the same function"):
        joined(capture(JOBS[name]), 2)


@pytest.mark.parametrize("name", COUPLED)
@pytest.mark.parametrize("count", [2, 3])
def test_whatever_couples_samples_does_so_in_its_own_micro_batch(name, count):
    job = in_64_bits(job_of(net, rows, COUPLED[name]))
    assert difference(job, count, first=6) < EXACT


def test_micro_batch_whose_labels_are_all_ignored_has_no_gradient_and_no_loss():
    def batch(generator):
        return {**rows(generator), "labels": torch.full((4,), -100)}

    job = in_64_bits(job_of(net, batch, COUPLED["ignored labels"]))
    assert difference(job, 2) < EXACT


# -- what is joined -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ORDINARY)
@pytest.mark.sampled(2)
def test_ordinary_models_are_joined_but_for_their_loss(name):
    model, batch, loss = ORDINARY[name]
    job = job_of(model, batch, loss)
    assert not apart(capture(job))
    assert difference(job, 2) < 1e-5


def test_model_that_insists_on_its_batch_is_joined_all_the_same():
    class Strict(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net(out=5)

        def forward(self, x):
            assert x.shape[0] == 4
            return self.net(x) / x.shape[0]

    assert difference(job_of(Strict, labelled(8), of_classes), 3) < 1e-5


def test_batch_whose_first_dim_is_no_batch_is_the_mean_of_its_parts():
    class Tables(nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(50, 16) for _ in range(3))
            self.top = nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 1))

        def forward(self, ids):
            if ids.shape[0] != 3:
                raise IndexError("one row for each table")
            rows = [self.tables[k](row) for k, row in enumerate(ids)]
            return self.top(torch.cat(rows, 1)).square().mean()

    def batch(generator):
        return torch.randint(50, (3, 8), generator=generator)

    assert difference(job_of(Tables, batch, lambda m, b: m(b)), 2) < 1e-5


def test_step_that_is_never_run_at_once_is_not_joined():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return (x @ x.T) @ (x @ x.T) * self.weight

    batch = floats(4, 8)

    def loss(m, b):
        return m(b).square().mean()

    with pytest.raises(GraphError, match="one micro-batch after the other"):
        joined(capture(job_of(Mixed, batch, loss)), 2)


def test_leaf_without_a_first_dim_is_not_joined():
    def batch(generator):
        return torch.randn(4, 8, generator=generator), torch.tensor(0.5)

    job = job_of(net, batch, lambda m, b: m(b[0]).square().mean() * b[1])
    with pytest.raises(GraphError, match="first dimension"):
        joined(capture(job), 2)


# -- any step of a grammar ------------------------------------------------------------------------


@settings(max_examples=20)
@given(
    st.lists(st.sampled_from(range(len(MIDDLES))), max_size=4),
    st.sampled_from(range(len(ENDS))),
    st.integers(2, 3),
    st.integers(0, 5),
)
def test_any_joined_step_is_the_mean_of_its_parts(middles, end, count, first):
    job = any_step(middles, end)
    try:
        step = joined(capture(job), count)
    except GraphError:  # nothing would be gained
        return
    assert step.graph.samples == 4 * count
    assert difference(job, count, first * count) < EXACT
