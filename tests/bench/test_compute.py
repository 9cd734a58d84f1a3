"""What the benches time as bare computes is the work of the step, no less and no more."""

import pytest
import torch

from bench.compute import Modules, Segments, bound_s, seconds_of, split_like
from bench.ours import lowered
from penstock.graph.trace import build, capture, loss_of
from penstock.program.lower import lower
from penstock.schedule import Schedule, gpipe, one_f_one_b, zb_h1
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


def test_modules_compute_every_action_and_give_every_parameter_a_gradient():
    modules = Modules(MINI, one_f_one_b(2, 3), rank=1)
    seconds = modules.step()
    assert len(seconds) == 6
    assert all(s > 0 for s in seconds)
    for module in modules.modules.values():
        assert all(parameter.grad is not None for parameter in module.parameters())


def test_modules_count_a_split_backward_in_its_first_half():
    modules = Modules(MINI, zb_h1(2, 3), rank=0)
    for action, seconds in zip(modules.order, modules.step(), strict=True):
        assert (seconds == 0.0) == (action.kind == "W")


def test_bound_is_the_computes_and_the_bubble():
    for make in (gpipe, one_f_one_b):
        schedule = make(2, 5)
        seconds = {a: {"F": 1.0, "B": 2.0}[a.kind] for order in schedule.orders for a in order}
        assert bound_s(lower(schedule), seconds) == 5 * 3 + 3


def test_seconds_are_medians_by_action():
    order = [Action("F", 0, 0), Action("B", 0, 0)]
    assert seconds_of(order, [[1.0, 2.0], [9.0, 4.0], [2.0, 3.0]]) == {order[0]: 2.0, order[1]: 3.0}


def test_whole_backward_is_split_as_ours_is():
    schedule = Schedule.parse("rank 0  F0.0 I0.0 W0.0\nrank 1  F1.0 I1.0 W1.0")
    order = [a for row in schedule.orders for a in row]
    ours = dict(zip(order, [1.0, 3.0, 1.0, 1.0, 2.0, 2.0], strict=True))  # I 5 of 8
    whole = dict(zip(order, [1.0, 8.0, 0.0, 2.0, 16.0, 0.0], strict=True))
    assert list(split_like(whole, ours).values()) == [1.0, 5.0, 3.0, 2.0, 10.0, 6.0]


def test_nothing_is_split_where_nothing_was_split():
    schedule = one_f_one_b(2, 2)
    seconds = {a: 1.5 for row in schedule.orders for a in row}
    assert split_like(seconds, seconds) == seconds
