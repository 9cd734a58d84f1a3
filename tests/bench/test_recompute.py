"""bench.recompute gives what its docstring says."""

import pytest

from bench import recompute as bench
from bench.play import Block, Played
from bench.zoo import JOBS
from penstock.cluster import Cluster
from penstock.graph.trace import capture
from tests.search.chains import costless, with_costs


@pytest.mark.long
def test_every_cap_has_a_plan_that_fits_and_is_no_slower_than_whole_stages():
    job = JOBS["small gpt"]
    graph = capture(job).graph
    op_s = tuple(1e-6 + 1e-9 * node.flop for node in graph.nodes)
    rates = {
        "call_s": 1e-5,
        "accumulate_s_per_byte": 1e-10,
        "update_s_per_byte": 1e-10,
        "state_bytes_per_byte": 2.0,
    }
    profile = with_costs(costless(graph.digest, op_s, beside=1), **rates)
    none, every, *capped = bench.cases(job, graph, profile, Cluster.here(2), (0.6,))
    assert none.predicted_s < every.predicted_s
    assert none.predicted_bytes > every.predicted_bytes
    assert [each.way for each in capped] == ["whole stages", "any ops"]
    assert all(each.predicted_bytes <= each.cap < none.predicted_bytes for each in capped)
    assert none.predicted_s < capped[1].predicted_s < capped[0].predicted_s
    blocks = [[(1.0, 0), (2.0, 0), (4.0, 0)], [(2, 0), (1, 0), (2, 0)]]
    free, played = (Played([Block(*block) for block in row], 7) for row in blocks)
    row = bench.row_of(graph, capped[1], played, none, free)
    assert (row["step_s"], row["ratio"], row["measured_bytes"]) == (2, 0.5, 7)
    assert row["predicted_ratio"] == pytest.approx(capped[1].predicted_s / none.predicted_s)
    whole = bench.row_of(graph, every, played, none, free)
    assert 0 < row["again"] < whole["again"]
    assert row["held_bytes"] > whole["held_bytes"]
    assert "any ops" in bench.table([row])
