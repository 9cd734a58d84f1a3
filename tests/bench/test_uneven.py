"""bench.uneven gives what its docstring says."""

import pytest

from bench import uneven as bench
from bench.play import Block, Played
from penstock.cluster import Cluster
from penstock.graph.trace import capture
from penstock.schedule import Seconds
from penstock.schedule.recipe import Recipe
from tests.search.chains import costless, with_costs


@pytest.mark.long
def test_pairs_differ_in_the_seconds_that_their_schedules_are_built_for() -> None:
    captured = capture(bench.jobs()["widths"])
    nodes = captured.graph.nodes
    op_s = tuple(1e-9 * node.flop for node in nodes)
    rates = {
        "accumulate_s_per_byte": 1e-10,
        "update_s_per_byte": 1e-10,
        "state_bytes_per_byte": 2.0,
    }
    profile = with_costs(costless(captured.graph.digest, op_s, beside=1), **rates)
    found = list(bench.pairs(captured, profile, Cluster.here(2)))
    assert [row["schedule"] for row, *_ in found] == [*bench.BUILDERS]
    for row, alike, own in found:
        assert alike.schedule == Recipe(str(row["schedule"]))
        assert isinstance(own.schedule, Recipe)
        assert isinstance(own.schedule.seconds, Seconds)
        assert row["ratio"] == pytest.approx(float(row["own_s"]) / float(row["alike_s"]))
        assert row["ratio"] <= 1.0001
        assert bench.table([{"network": "n", "how": "simulated", **row}])


def test_ratio_is_the_median_of_the_turns() -> None:
    one, other = (
        Played([Block(seconds, 0.0) for seconds in row], 0) for row in ((1.0, 2.0, 4.0), (2, 1, 2))
    )
    row = bench.measured(one, other)
    assert (row["alike_s"], row["own_s"]) == (2.0, 2)
    assert (row["ratio"], row["low"], row["high"]) == (0.5, 0.5, 2.0)
