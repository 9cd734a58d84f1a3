"""The parts of a micro-batch add up to it, whatever the loss divides by; or it is not divided."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from penstock.errors import GraphError
from penstock.graph.joined.divided_batch import divided
from penstock.graph.joined.divider import CouplesError
from penstock.graph.trace import capture
from tests.graph.joined.joining import difference_of_parts, in_64_bits, net
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
from tests.graph.zoo import JOBS, job_of

EXACT = 1e-10  # in float64
TOGETHER = {
    "clamped",
    "huber by the batch",
    "skipped",
    "contrast",
    "norm over the batch",
    "mixed",
    "sorted",
    "running sum",
    "greatest two",
    "flipped",
    "rolled",
    "in another order",
    "scattered",
    "figures",  # one is the greatest error
}
OF_BUFFERS = {"batch_norm", "average"}
OF_SEVERAL = {"dict_inputs", "embeddings"}  # a power of the mean; bags


@pytest.mark.parametrize(
    "name", sorted(set(JOBS) - OF_BUFFERS - OF_SEVERAL - {"autocast", "autocast_tied"})
)
@pytest.mark.sampled(3)
def test_parts_of_the_zoo_add_up_to_the_micro_batch(name):
    assert difference_of_parts(JOBS[name], 2) < 1e-5


@pytest.mark.parametrize("name", sorted(OF_BUFFERS))
def test_step_that_changes_buffers_is_not_divided(name):
    with pytest.raises(GraphError, match="changes a buffer by a whole micro-batch"):
        divided(capture(JOBS[name]), 2)


@pytest.mark.parametrize("name", sorted(set(COUPLED) - TOGETHER))
@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.sampled(3)
def test_what_a_loss_divides_by_is_that_of_the_whole_batch(name, parts):
    job = in_64_bits(job_of(net, rows, COUPLED[name]))
    assert difference_of_parts(job, parts, first=6) < EXACT


@pytest.mark.parametrize("name", sorted(TOGETHER))
def test_step_that_works_on_samples_together_is_not_divided(name):
    with pytest.raises(CouplesError, match="several samples together"):
        divided(capture(job_of(net, rows, COUPLED[name])), 2)


@pytest.mark.parametrize("name", ORDINARY)
@pytest.mark.sampled(2)
def test_ordinary_models_are_divided(name):
    model, batch, loss = ORDINARY[name]
    assert difference_of_parts(job_of(model, batch, loss), 2) < 1e-5


def test_micro_batch_whose_labels_are_all_ignored_has_no_gradient_and_no_loss():
    def batch(generator):
        return {**rows(generator), "labels": torch.full((4,), -100)}

    job = in_64_bits(job_of(net, batch, COUPLED["ignored labels"]))
    assert difference_of_parts(job, 2) < EXACT


@pytest.mark.parametrize(
    "loss",
    [
        lambda m, b: F.binary_cross_entropy(
            m(b["x"]).sigmoid(), b["y"].sigmoid(), b["x"][:, :4].abs()
        ),
        lambda m, b: F.mse_loss(m(b["x"]), b["y"], reduction="sum"),
        lambda m, b: F.smooth_l1_loss(m(b["x"]), b["y"], reduction="none").mean(1).mean(),
        lambda m, b: F.huber_loss(m(b["x"]), b["y"]) + F.l1_loss(m(b["x"]), b["y"]),
        lambda m, b: F.nll_loss(m(b["x"]).log_softmax(1), b["labels"], b["y"][0].abs() + 0.1),
        lambda m, b: F.binary_cross_entropy_with_logits(
            m(b["x"]), b["y"].sigmoid(), pos_weight=b["y"][0].abs()
        ),
        lambda m, b: (
            F.cross_entropy(m(b["x"]), b["labels"].abs() % 4),
            {"right": (m(b["x"]).argmax(1) == b["labels"]).sum(), "mean": m(b["x"]).mean()},
        ),
        lambda m, b: (m(b["x"]).mean(0) - b["y"].mean(0)).mean(),
        lambda m, b: ((m(b["x"]) - b["y"].mean(0)) / b["y"].std(0)).square().mean(),
        lambda m, b: (
            (m(b["x"]) * torch.linspace(0, 1, 4, dtype=b["x"].dtype)[:, None]).abs().mean()
        ),
        lambda m, b: (m(b["x"])[:, None] * b["y"].softmax(0)[None]).square().sum() / len(b["x"]),
    ],
)
def test_losses_whose_divisor_or_weights_are_of_the_batch(loss):
    job = in_64_bits(job_of(net, rows, loss))
    assert difference_of_parts(job, 2) < EXACT


def test_gradient_of_a_gradient_adds_up():
    def loss(m, b):
        x = b["x"].clone().requires_grad_()
        (slope,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean() + m(b["x"]).mean()

    assert difference_of_parts(in_64_bits(job_of(net, rows, loss)), 2) < EXACT


def test_norm_of_a_gradient_that_is_a_sum_is_not_divided():
    def loss(m, b):
        own = torch.autograd.grad(m(b["x"]).square().mean(), m[0].weight, create_graph=True)[0]
        return own.square().sum()

    with pytest.raises(CouplesError):
        divided(capture(job_of(net, rows, loss)), 2)


def test_batch_with_leaves_that_are_no_samples_is_divided():
    def batch(generator):
        x, labels = labelled(8)(generator)
        return x, labels, torch.tensor(0.5), torch.rand(5, generator=generator), "words"

    def loss(m, b):
        return F.cross_entropy(m(b[0]) * b[3], b[1]) * b[2]

    assert difference_of_parts(job_of(lambda: net(out=5), batch, loss), 2) < 1e-5


def test_samples_that_cannot_be_shared_are_not_divided():
    model, batch, loss = ORDINARY["mlp"]
    with pytest.raises(GraphError, match="4 samples cannot be divided by 3"):
        divided(capture(job_of(model, batch, loss)), 3)


def test_part_holds_no_leaf_that_its_step_does_not_read():
    job = job_of(lambda: net(out=5), labelled(8), of_classes)
    division = divided(capture(job), 2).batch.division
    assert division is not None
    assert (division.rows, division.whole) == ((0, 1), (1,))  # the labels that count are counted


@settings(max_examples=20)
@given(
    st.lists(st.sampled_from(range(len(MIDDLES))), max_size=4),
    st.sampled_from(range(len(ENDS))),
    st.sampled_from([2, 4]),
    st.integers(0, 5),
)
def test_parts_of_any_step_add_up_to_it(middles, end, parts, first):
    try:
        assert difference_of_parts(any_step(middles, end), parts, first) < EXACT
    except CouplesError:
        return
