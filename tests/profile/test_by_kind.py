"""Costs by kind: each kind of op alone, on made-up values."""

import itertools

import pytest

from penstock.graph.trace import capture
from penstock.profile.by_kind import costs_by_kind
from tests.graph.zoo import JOBS


@pytest.mark.parametrize("name", ["blocks", "dropout"])
def test_every_op_is_timed_and_ops_of_one_kind_cost_the_same(name: str) -> None:
    made = capture(JOBS[name])
    ticks = itertools.count()
    seconds, workspaces = costs_by_kind(made, lambda: float(next(ticks)))
    ops = [
        node.op == "call_function" and "getitem" not in str(node.target) for node in made.fx_nodes
    ]
    assert [value == 1.0 for value in seconds] == ops  # one tick from start to end
    assert set(workspaces) == {0}  # of a CPU they are not known
    assert next(ticks) / 14 < sum(ops)  # fewer kinds than ops


def test_op_that_takes_no_made_up_values_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*given: object, **named: object) -> None:
        raise RuntimeError("of such values")

    monkeypatch.setattr("penstock.profile.by_kind.callable_of", lambda target: refuses)
    seconds, _ = costs_by_kind(capture(JOBS["blocks"]), lambda: 0.0)
    assert set(seconds) == {0.0}
