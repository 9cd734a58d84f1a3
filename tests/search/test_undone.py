"""Undone: what a plan gives with one decision otherwise is what that plan gives."""

from dataclasses import replace

import pytest

from penstock.cluster import Link
from penstock.plan import Decision, Plan, plan_by_hand
from penstock.search import evaluate
from penstock.search.judge import Judge
from penstock.search.undone import undone
from tests.search.chains import SIX, SIX_PROFILE, cluster_of

CLUSTER = cluster_of(2, link=Link(0.1, 100.0))


def by_hand(cuts, schedule="one_f_one_b", count=4, **more) -> Plan:
    return plan_by_hand(SIX, cuts, schedule, num_micro_batches=count, **more)


PIPELINE = by_hand([1], recompute=(True, False), offload=("state", "none"), clip=True)
UNITS = by_hand([1]).refined(SIX, 2)
RULED = replace(
    by_hand([1, 3], "one_f_one_b / units 1 2", num_ranks=2, recompute=(False, True, False)),
    decisions=(Decision("recompute layers.[23]", "yes", "user", "asked for"),),
)
SHARD = Decision("shard layers.0*", "yes", "user", "asked for")
REPLICAS = by_hand([], count=2, replicas=2)


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (
            PIPELINE,
            {
                "ranks": by_hand([], clip=True),
                "replicas": by_hand([], count=2, replicas=2, clip=True),
                "cuts": PIPELINE.changed(cuts=(2,), cut_names=("after layers.2",)),
                "schedule": PIPELINE.changed(schedule="gpipe"),
                "recompute": PIPELINE.changed(recompute=(False, False)),
                "offload": PIPELINE.changed(offload=()),
                "copies": PIPELINE.changed(beside=True),
                "post-validation": None,  # not with the state in far memory
            },
        ),
        (
            UNITS,
            {
                "ranks": by_hand([]),
                "replicas": by_hand([], count=2, replicas=2),
                "schedule": UNITS.changed(schedule="gpipe / units 2 2"),
                "recompute": UNITS.changed(recompute=(True,) * 4),
                "units": by_hand([1]),
            },
        ),
        (
            RULED,
            {
                "ranks": by_hand([]),
                "replicas": by_hand([], count=2, replicas=2),
                "schedule": RULED.changed(schedule="gpipe / units 1 2"),
                "recompute": RULED.changed(recompute=(False,) * 3),
                "recompute layers.[23]": RULED.changed(recompute=(False,) * 3),
                "units": None,  # of which one recomputes and the other does not
            },
        ),
        (
            REPLICAS.changed(shard=("shard",), decisions=(SHARD,)),
            {
                "ranks": by_hand([]),
                "replicas": by_hand([3]),
                "recompute": REPLICAS.changed(shard=("shard",), recompute=(True,)),
                "shard": REPLICAS,
                "shard layers.0*": None,  # the chain's weights have no modules
            },
        ),
        (
            REPLICAS,
            {
                "ranks": by_hand([]),
                "replicas": by_hand([3]),  # 5 and 4 of 9 seconds
                "recompute": REPLICAS.changed(recompute=(True,)),
            },
        ),
    ],
)
def test_each_decision_undone_gives_what_that_plan_gives(plan, expected) -> None:
    found = {each.what: each for each in undone(Judge(SIX, SIX_PROFILE, CLUSTER), plan)}
    assert set(found) == {what for what, other in expected.items() if other is not None}
    for what, each in found.items():
        other, _ = evaluate(SIX, SIX_PROFILE, CLUSTER, expected[what])
        assert each.candidate.step_s == other.step_s, what
        assert each.candidate.peak_bytes == other.peak_bytes, what
        assert each.candidate.plan.cuts == expected[what].cuts
