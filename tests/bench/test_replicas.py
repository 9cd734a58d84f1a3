"""bench.replicas gives what its docstring says."""

import math
from dataclasses import replace

import pytest

from bench import beside, replicas
from bench.models import TINY
from penstock.graph.trace import capture
from penstock.plan.lower_plan import lower_plan
from penstock.profile.measure import measure
from penstock.program.program import Compute
from penstock.program.reductions import Reduction
from tests.bench.sides import play_tiny


def test_gradients_of_every_unit_but_the_last_are_summed_beside_the_backward():
    captured = capture(TINY.job())
    plan = replicas.plan_of(captured, 4, 1)
    code = lower_plan(plan, captured.graph).code[0]
    last = max(at for at, one in enumerate(code) if isinstance(one, Compute))
    sums = [at for at, one in enumerate(code) if isinstance(one, Reduction)]
    assert plan.num_stages == len(sums) >= TINY.blocks
    assert sum(at > last for at in sums) == 1


@pytest.mark.long
def test_slower_line_is_predicted_to_cost_more_and_sums_at_the_end_more_than_that():
    job = replace(TINY.job(), optimizer=beside.adamw)
    captured = capture(job)
    profile, plan = measure(captured, job), replicas.plan_of(captured, 2)
    said = [beside.predicted(plan, captured, profile, (2, rate)) for rate in (math.inf, 1e9, 1e7)]
    found = [each["predicted_s"] for each in said]
    assert found == sorted(found)
    program = lower_plan(plan, captured.graph)
    sums = [each.size_bytes for each in program.code.reductions]
    cluster = beside.cluster_of(2, 1e7)
    assert found[2] < found[0] + sum(cluster.all_reduce_s(size, (0, 1)) for size in sums)


@pytest.mark.long
def test_rows_are_of_both_sides_which_come_to_the_same_weights(monkeypatch):
    play_tiny(monkeypatch, replicas)
    (row,) = replicas.rows("gpt", (2,), (math.inf,), 1)
    names = ["model", "ranks", "link", "ours_s", "peer_s", "ratio", "predicted_s"]
    assert list(row) == names
    assert row["ratio"] == row["ours_s"] / row["peer_s"] > 0
    assert (row["model"], row["ranks"], row["link"]) == ("tiny", 2, "free")
