"""What the benches time as bare computes is the work of the step, no less and no more."""

import pytest
import torch

from bench.compute import Segments, seconds_of
from bench.ours import lowered
from penstock.graph.trace import build, capture, loss_of
from penstock.schedule.schedule import Action
from tests.bench.test_models import MINI

JOB = MINI.job()


@pytest.fixture(scope="module")
def captured():
    return capture(JOB)


def eager_gradients(micro_batches: int):
    """Return the gradients of the plain model that sees its first micro-batch again and again."""
    model, batch = build(JOB)
    for _ in range(micro_batches):
        (loss_of(JOB, model, batch) / micro_batches).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "interleaved", "zb_h1"])
def test_segments_compute_the_gradients_of_the_step(captured, schedule, micro_batches):
    ours, found = lowered(captured, MINI, schedule, micro_batches), {}
    for rank in (0, 1):
        segments = Segments(ours, rank)
        for _ in range(2):  # the second step starts from nothing, too
            seconds = segments.step()
        assert len(seconds) == len(ours.orders()[rank])
        for weights in segments.weights.values():
            found |= {weights.names[node]: value for node, value in weights.gradients.items()}
    expected = eager_gradients(micro_batches)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


def test_seconds_are_medians_by_action():
    order = [Action("F", 0, 0), Action("B", 0, 0)]
    assert seconds_of(order, [[1.0, 2.0], [9.0, 4.0], [2.0, 3.0]]) == {order[0]: 2.0, order[1]: 3.0}
