"""bench.refined gives what its docstring says."""

import pytest

from bench import refined as bench
from bench.play import Block, Played
from bench.zoo import JOBS
from penstock.cluster import Cluster
from penstock.graph.trace import capture
from penstock.plan import schedule_of
from penstock.schedule import refine
from penstock.schedule.orders import I
from tests.search.chains import costless, with_costs


@pytest.mark.long
def test_every_schedule_that_drains_stands_beside_its_units():
    job = JOBS["small gpt"]
    graph = capture(job).graph
    op_s = tuple(1e-9 * node.flop for node in graph.nodes)
    rates = {
        "call_s": 1e-5,
        "accumulate_s_per_byte": 1e-10,
        "update_s_per_byte": 1e-10,
        "state_bytes_per_byte": 2.0,
    }
    profile = with_costs(costless(graph.digest, op_s, beside=1), **rates)
    found = list(bench.pairs(job, graph, profile, Cluster.here(2)))
    names = [plain.name for plain, _ in found]
    assert len(set(names)) == len(names) >= 18
    assert {"gpipe", "zb_h1", "interleaved", "one_f_one_b, recompute", "2 replicas"} <= {*names}
    for plain, refined in found:
        assert plain.plan.total_ranks == refined.plan.total_ranks == 2
        counts = refined.plan.schedule.units
        assert refined.plan.num_stages == sum(counts) >= 9
        if not plain.plan.schedule.takes_seconds:
            assert schedule_of(refined.plan) == refine(schedule_of(plain.plan), counts)
        # The first stage's I has nothing to do, its units' has; a unit repeats less of F.
        splits = (schedule_of(plain.plan).orders.kinds == I).any()
        least = 0.7 if splits or any(plain.plan.recompute) else 1.0
        assert least < refined.predicted_s / plain.predicted_s < 1.1


def test_row_has_the_medians_and_the_ratios_of_the_turns():
    class _Plan:
        num_stages = 2

    plain, refined = bench.Case("a", _Plan(), 2.0, 10), bench.Case("a", _Plan(), 2.2, 11)
    turns = [[(1.0, 0), (2.0, 0), (4.0, 0)], [(2, 0), (1, 0), (2, 0)]]
    played = [Played([Block(*block) for block in row], 7) for row in turns]
    row = bench.row_of("n", (plain, refined), played)
    assert (row["plain_s"], row["refined_s"], row["ratio"]) == (2.0, 2, 0.5)
    assert (row["low"], row["high"], row["predicted"]) == (0.5, 2.0, pytest.approx(1.1))
    assert "0.500 (0.500 to 2.000), predicted 1.100" in bench.table([row])
