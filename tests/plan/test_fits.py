"""What goes together in a plan: every pair of features is in FITS, or there is a plan with both."""

from fractions import Fraction
from itertools import combinations

import pytest

from penstock.errors import PlanError
from penstock.plan.fits import FEATURES, FITS
from penstock.plan.plan import Plan, plan_by_hand
from penstock.program.instructions import Guarding
from penstock.schedule import one_f_one_b
from tests.search.chains import chain

PLAN = plan_by_hand(chain([3, 3, 3], [5, 6, 7]), [1], "one_f_one_b", num_micro_batches=4)

_ALL = ("shard", "shard")
_SHARDS = {"replicas": 2, "shard": _ALL}
WAYS: dict[str, list[dict[str, object]]] = {  # changes by which a plan has the feature
    "a window": [{"schedule": "double_buffered"}],
    "a schedule as it is": [{"schedule": one_f_one_b(2, 4)}, {"schedule": "double_buffered"}],
    "post-validation": [{"clip": True, "post_validation": True}],
    "replicas": [{"replicas": 2}],
    "one replica": [{"replicas": 1}],
    "unlike shares": [{"replicas": 2, "shares": (4, 2)}],
    "shards": [_SHARDS],
    "parts": [_SHARDS | {"parts": (3, 1, 1, 1)}],
    "whole stages": [{"shard": ()}],
    "far weights": [
        _SHARDS | {"offload": (word, "state"), "replicas": replicas, "shard": shard}
        for word in ("weights", "all")
        for replicas, shard in ((1, ()), (2, _ALL))
    ],
    "far weights of each replica": [{"offload": ("weights", "none"), "replicas": 2, "shard": ()}],
    "far state": [{"offload": row} for row in (("state", "none"), ("weights", "state"))],
    "copies beside computes": [
        {"offload": row, "beside": True}
        for row in (("activations", "none"), ("state", "none"), ("weights", "state"))
    ],
    "nothing far": [{"offload": ()}],
    "prefetch": [_SHARDS | {"prefetch": 1}, {"offload": ("weights", "state"), "prefetch": 1}],
    "nothing to fetch": [{"shard": (), "prefetch": 0}],
    "slices": [{"split": (("head.weight", 4),)}],
    "divided micro-batches": [{"joined": Fraction(1, 2)}],
    "rounded messages": [{"wire": (8, 16)}],
    "sums in fewer bits": [
        {"sums": "bfloat16"},
        {"sums": "int8", "replicas": 2},
        {"sums": "local:4", "replicas": 2},
        {"sums": "ssp:2", "replicas": 2, "num_ranks": 1, "schedule": "breadth_first"},
    ],
    "sums that hold back": [
        {"sums": "int8", "replicas": 2},
        {"sums": "int8", "replicas": 1},
        {"sums": "rank:2", "replicas": 2, "topology": "ring"},
    ],
    "averages of weights": [
        {"sums": "local:4", "replicas": 2},
        {"sums": "gossip", "replicas": 2},
    ],
    "gradients that are served": [
        {"sums": sums, "replicas": 2, "num_ranks": 1, "schedule": "breadth_first"}
        for sums in ("backup:1", "ssp:2", "async:aware")
    ],
    "ranks that divide a replica": [{"num_ranks": 2}],
    "clipping": [{"clip": True}],
    "a topology": [{"topology": "ring", "replicas": 2}, {"topology": "ring"}],
    "sums that have ways of their own": [
        {"sums": "bfloat16", "replicas": 2},
        {"sums": "int8", "replicas": 2},
        {"sums": "gossip", "replicas": 2},
        {"sums": "bfloat16"},
    ],
    "compiled ops": [{"compiled": True}],
    "one copy of buffers": [{"buffers": "one copy"}],
    "commits": [{"commits": True}],
    "no commits": [{"commits": False}],
    "a guard": [{"commits": True, "guard": Guarding(0, 1)}],
    "divided ops": [{"tensor": 2}],
    "anything far": [
        {"offload": row}
        for row in (("activations", "none"), ("state", "none"), ("weights", "state"))
    ],
}
OPPOSITE = {  # by what the words mean, or by what one of them needs
    frozenset(pair)
    for pair in (
        ("replicas", "one replica"),
        ("unlike shares", "one replica"),
        ("parts", "one replica"),
        ("shards", "whole stages"),
        ("commits", "no commits"),
        ("far weights", "nothing far"),
        ("anything far", "nothing far"),
        ("parts", "divided ops"),
        ("copies beside computes", "divided ops"),
        ("prefetch", "divided ops"),
        ("far weights", "divided ops"),
        ("far state", "divided ops"),
        ("a guard", "divided ops"),
        ("far state", "nothing far"),
        ("far weights", "nothing to fetch"),
        ("shards", "nothing to fetch"),
        ("parts", "nothing to fetch"),
        ("a window", "unlike shares"),  # it is a schedule as it is
        ("parts", "a window"),  # a plan with parts has shards
        ("parts", "post-validation"),
        ("prefetch", "a window"),  # what is fetched early is a shard, or comes from far memory
        ("prefetch", "post-validation"),
        ("one copy of buffers", "unlike shares"),  # of replicas
        ("one copy of buffers", "shards"),
        ("one copy of buffers", "parts"),
        ("a guard", "a window"),  # a guard needs commits
        ("a guard", "post-validation"),
        ("parts", "sums that hold back"),
        ("prefetch", "sums that hold back"),
        ("a guard", "sums that hold back"),
        ("divided ops", "sums that hold back"),
        ("divided micro-batches", "sums that hold back"),  # they are sums in fewer bits
        ("averages of weights", "one replica"),
        ("averages of weights", "one copy of buffers"),
        ("averages of weights", "sums that hold back"),  # one way at a time
        ("averages of weights", "parts"),  # of shards
        ("averages of weights", "prefetch"),
        ("averages of weights", "a guard"),
        ("averages of weights", "divided ops"),  # as sums in fewer bits
        ("averages of weights", "divided micro-batches"),
        ("a topology", "parts"),  # of shards
        *(
            ("gradients that are served", other)
            for other in (
                *("a schedule as it is", "one replica", "one copy of buffers"),
                *("sums that hold back", "averages of weights", "sums that have ways of their own"),
                *("parts", "prefetch", "a guard", "divided ops", "divided micro-batches"),
            )
        ),
        ("a window", "clipping"),
        ("divided micro-batches", "sums that have ways of their own"),  # sums in fewer bits
        ("divided ops", "sums that have ways of their own"),
    )
}
REFUSED = {  # what a window, an undone update, one replica and so on have no room for
    "a window": {"slices", "shards", "far weights", "divided micro-batches", "commits"},
    "post-validation": {"shards", "far weights", "far state", "commits"},
    "rounded messages": {"compiled ops", "divided micro-batches"},
    "sums in fewer bits": {"divided micro-batches"},
    "sums that hold back": {
        *("a window", "post-validation", "shards", "far weights", "slices", "commits"),
    },
    "averages of weights": {
        *("a window", "post-validation", "shards", "far weights", "slices", "unlike shares"),
        *("rounded messages", "commits"),
    },
    "gradients that are served": {
        *("a window", "post-validation", "ranks that divide a replica", "shards", "far weights"),
        *("far state", "slices", "unlike shares", "rounded messages", "commits", "a topology"),
    },
    "a topology": {"shards", "sums that have ways of their own"},
    "replicas": {"one copy of buffers", "far weights of each replica"},
    "one replica": {"shards"},
    "whole stages": {"parts"},
    "nothing far": {"copies beside computes"},
    "nothing to fetch": {"prefetch"},
    "a schedule as it is": {"unlike shares"},
    "a guard": {"no commits", "far weights"},
    "divided ops": {
        "a window",
        "post-validation",
        "unlike shares",
        "shards",
        "anything far",
        "slices",
        "rounded messages",
        "sums in fewer bits",
        "compiled ops",
        "commits",
    },
}
NEVER = "far weights of each replica"  # it is there to be refused


def made(*changes: dict[str, object]) -> Plan | None:
    """Return the plan with all changes; None where they contradict each other, or do not fit."""
    both: dict[str, object] = {}
    for change in changes:
        if any(both.get(key, value) != value for key, value in change.items()):
            return None
        both |= change
    try:
        return PLAN.changed(**both)
    except PlanError:
        return None


def test_every_feature_has_plans_but_the_one_that_is_refused() -> None:
    assert WAYS.keys() == FEATURES.keys()
    for name, changes in WAYS.items():
        plans = [plan for change in changes if (plan := made(change)) is not None]
        assert bool(plans) == (name != NEVER), name
        assert all(FEATURES[name](plan) for plan in plans), name


def test_the_table_has_what_cannot_be_and_no_more() -> None:
    table = {frozenset((row.one, row.other)) for row in FITS}
    assert table == {frozenset((one, other)) for one in REFUSED for other in REFUSED[one]}
    assert len(table) == len(FITS)


def test_every_pair_of_features_is_refused_by_the_table_or_is_had_by_a_plan() -> None:
    table = {frozenset((row.one, row.other)) for row in FITS}
    lone = {frozenset((NEVER, name)) for name in FEATURES}
    for one, other in combinations(FEATURES, 2):
        pair = frozenset((one, other))
        if pair in table | lone | OPPOSITE:
            continue
        plans = [made(a, b) for a in WAYS[one] for b in WAYS[other]]
        has = [plan for plan in plans if plan is not None]
        assert any(FEATURES[one](plan) and FEATURES[other](plan) for plan in has), (one, other)


@pytest.mark.parametrize("row", FITS, ids=lambda row: f"{row.one}, {row.other}")
def test_a_row_of_the_table_refuses_whatever_plan_has_both(row) -> None:
    for a in WAYS[row.one]:
        for b in WAYS[row.other]:
            assert made(a, b) is None or not (
                FEATURES[row.one](made(a, b)) and FEATURES[row.other](made(a, b))
            )
    assert row.hint
