"""Costs and Memory: what they refuse, and that they cannot be written."""

import numpy as np
import pytest

from penstock.program.lower import lower
from penstock.schedule import gpipe
from penstock.simulate import Costs, Memory, simulate

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
