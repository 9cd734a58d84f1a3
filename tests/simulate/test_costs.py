"""Costs and Memory: what they refuse, and that they cannot be written."""

import numpy as np
import pytest

from penstock.cluster import Cluster, DeviceKind, Host, Link
from penstock.program.edges import Edge
from penstock.program.lower import lower
from penstock.schedule import gpipe
from penstock.simulate import Costs, Memory, simulate
from penstock.timeline import step_s
from tests.program.lowering import lower_schedule

GOOD = np.ones((5, 3, 2))


def test_costs_are_kept_as_arrays_that_cannot_be_written():
    costs = Costs(GOOD.tolist(), ("c", "d"))  # pyright: ignore[reportArgumentType]
    assert costs.action_s.shape == (5, 3, 2)
    with pytest.raises(ValueError, match="read-only"):
        costs.action_s[0, 0, 0] = 2.0
    assert GOOD.flags.writeable


@pytest.mark.parametrize(
    ("action_s", "devices", "unshard_s", "says"),
    [
        (np.ones((4, 3, 1)), ("",), [], r"action_s has shape \(4, 3, 1\), not \(5, 3, 1\)"),
        (np.ones((5, 3)), ("",), [], r"action_s has shape \(5, 3\), not \(5, 0, 1\)"),
        (GOOD, ("d",), [], r"action_s has shape \(5, 3, 2\), not \(5, 3, 1\)"),
        (GOOD, ("c", "d"), [1.0], r"unshard_s has shape \(1,\), not \(3,\)"),
        (GOOD * -1, ("c", "d"), [], r"action_s\[0, 0, 0\] is -1\.0 s"),
        (GOOD * np.nan, ("c", "d"), [], "is nan s"),
        (GOOD, ("c", "d"), [1.0, 2.0, np.inf], r"unshard_s\[2\] is inf s"),
    ],
)
def test_impossible_costs_are_refused_with_the_value(action_s, devices, unshard_s, says: str):
    with pytest.raises(ValueError, match=says):
        Costs(action_s, devices, np.array(unshard_s))


def test_impossible_sizes_of_weights_to_gather_are_refused_with_the_value():
    with pytest.raises(ValueError, match=r"unshard_bytes has shape \(2,\), not \(3,\)"):
        Costs(GOOD, ("c", "d"), unshard_bytes=np.array([1, 2]))
    with pytest.raises(ValueError, match=r"unshard_bytes\[1\] is -2; it must be 0 or more"):
        Costs(GOOD, ("c", "d"), unshard_bytes=np.array([1, -2, 3]))


@pytest.mark.parametrize(
    ("start", "transient", "net", "unsharded", "says"),
    [
        ((2, 1), (5, 3), (5, 3), (0,), r"start_bytes has shape \(2, 1\), not \(2,\)"),
        ((2,), (5, 2), (5, 3), (0,), r"transient_bytes has shape \(5, 2\), not \(5, 3\)"),
        ((2,), (5, 3), (4, 3), (0,), r"net_bytes has shape \(4, 3\), not \(5, 3\)"),
        ((2,), (5, 3), (5, 3), (2,), r"unsharded_bytes has shape \(2,\), not \(3,\)"),
    ],
)
def test_memory_of_other_shapes_is_refused(start, transient, net, unsharded, says: str):
    with pytest.raises(ValueError, match=says):
        Memory(*(np.zeros(shape, np.int64) for shape in (start, transient, net, unsharded)))


def test_messages_of_memory_are_one_row_of_all_edges():
    sizes = (np.zeros(shape, np.int64) for shape in ((2,), (5, 3), (5, 3), (3,), (2, 2)))
    with pytest.raises(ValueError, match=r"message_bytes has shape \(2, 2\), not \(4,\)"):
        Memory(*sizes)
    memory = Memory(*(np.zeros(shape, np.int64) for shape in ((2,), (5, 2), (5, 2), (2,), (3,))))
    with pytest.raises(ValueError, match="memory of 3 edges for a program of 2"):
        simulate(lower(gpipe(2, 2)), lambda action: 1.0, memory=memory)


def test_packing_is_paid_by_both_ends_of_a_message_and_by_nobody_else():
    """Two stages there and back: F 1 s, B 2 s, a message 4 bytes at 1 byte/s and 0.5 s."""
    edges = (Edge("F", 0, 1, 4), Edge("B", 1, 0, 4))
    program = lower_schedule(gpipe(2, 1), edges=edges)
    action_s = np.zeros((5, 2, 1))
    action_s[0], action_s[1] = 1.0, 2.0
    packing_s = np.array([[[0.1], [0.2]], [[0.01], [0.02]]])  # [packs or unpacks, edge, device]
    device = DeviceKind("d", 1, (), 1.0)
    cluster = Cluster((device,), (Host("h", "d", 2),), Link(0.5, 1.0))
    found = simulate(program, Costs(action_s, packing_s=packing_s), cluster)
    messages = (0.1 + 0.5 + 4 + 0.01) + (0.2 + 0.5 + 4 + 0.02)
    assert step_s(found) == pytest.approx(2 * 1 + 2 * 2 + messages)
    assert found.totals.busy_s == pytest.approx((3, 3))
    with pytest.raises(ValueError, match="packing of 1 edges for a program of 2"):
        simulate(program, Costs(action_s, packing_s=packing_s[:, :1]), cluster)
    with pytest.raises(ValueError, match=r"packing_s\[0, 0, 0\] is -1\.0 s"):
        Costs(action_s, packing_s=-np.ones((2, 2, 1)))
