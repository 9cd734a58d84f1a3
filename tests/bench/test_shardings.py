"""bench.shardings: the ways that plans spread tables, and what the figures come to."""

import math

import pytest
import torch

from bench import shardings as bench
from penstock.cluster import Cluster, DeviceKind, Host, Link
from penstock.graph.trace import capture
from penstock.profile.estimate import estimated
from penstock.search import evaluate
from penstock.units import GiB

SMALL = bench.DlrmSize((40, 8), 4, 6)


@pytest.fixture(scope="module")
def ways():
    return bench.ways_of(capture(bench.job_of(SMALL)))


def test_each_way_is_a_plan_of_its_own_that_is_predicted(ways):
    cluster = Cluster.here(bench.RANKS)
    plans = [one.plan for one in ways.values()]
    assert len(plans) == len({repr(plan) for plan in plans}) == 8
    for plan, captured in ways.values():
        profile = estimated(captured.graph, cluster.devices[0], 1.0)
        assert evaluate(captured.graph, (profile,), cluster, plan)[0].step_s > 0
        assert plan.total_ranks == bench.RANKS
        assert plan.step_micro_batches == bench.MICRO_BATCHES


def test_what_is_divided_is_what_the_name_says(ways):
    assert not ways["replicate"].plan.shards
    for way, count in (("shard", 1), ("slices", 4), ("largest", 4)):
        words = ways[way].plan.shard
        assert words == ("shard",) * count + ("replicate",) * (len(words) - count), way
    assert ways["shard_keep"].plan.shard[0] == "shard_keep"
    assert {*ways["shard all"].plan.shard} == {"shard"}
    assert ways["largest"].captured.graph.slices == (("tables.0.weight", 4),)
    assert [ways[way].plan.replicas for way in ("tables | rest", "half | half")] == [1, 1]


def test_data_begins_anywhere():
    job = bench.job_of(SMALL)
    first = [batch for batch, _ in zip(job.data(0), range(12), strict=False)]
    for start in (0, 3, 9):
        assert torch.equal(next(job.data(start))["dense"], first[start]["dense"])


def rows(*pairs):
    of = {"size": "s", "link": "free"}
    return [
        {**of, "way": f"{at}", "predicted_s": a, "measured_s": b, "searched_s": 0.5}
        for at, (a, b) in enumerate(pairs)
    ]


def test_error_is_a_mean_of_factors():
    assert bench.error_of(rows((2.0, 1.0), (1.0, 2.0))) == pytest.approx(1.0)
    assert bench.error_of(rows((1.0, 1.0), (1.21, 1.0))) == pytest.approx(0.1)
    assert bench.error_of(rows((1.0, math.e))) == pytest.approx(math.e - 1)


def test_a_pick_within_two_percent_of_the_best_counts():
    for second, is_best in ((1.019, True), (1.03, False)):
        one, all_of = bench.summary(rows((2.0, 1.0), (1.0, second), (3.0, 9.0)))
        assert one["is_best"] is is_best
        assert one["regret"] == pytest.approx(second - 1)
        assert (one["best"], one["predicted_best"]) == ("0", "1")
        assert all_of["is_best"] == float(is_best)
        assert one["searched"] == all_of["searched"] == 0.5


@pytest.mark.parametrize("bytes_per_s", [5e9, 1e8])
def test_search_is_behind_no_way_to_spread_tables(bytes_per_s):
    """Between fast ranks tables are copied, over a slow line they are on one: found unasked."""
    kind = DeviceKind("d", 64 * GiB, (("float32", 50e9),), 10e9)
    cluster = Cluster((kind,), (Host("h", "d", bench.RANKS),), Link(20e-6, bytes_per_s))
    ways = bench.ways_of(capture(bench.job_of(bench.DlrmSize((20_000, 2_000), 32, 128))))
    seconds = dict[str, float]()
    for name, (plan, captured) in ways.items():
        profile = estimated(captured.graph, kind, 2.0)
        seconds[name] = evaluate(captured.graph, (profile,), cluster, plan)[0].step_s
    whole = ways["replicate"].captured
    found_s = bench.searched_s(whole, estimated(whole.graph, kind, 2.0), cluster)
    assert found_s <= min(seconds.values()) * 1.02, seconds
    assert (seconds["replicate"] < seconds["tables | rest"]) is (bytes_per_s > 1e9)
