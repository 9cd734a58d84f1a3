"""The study of staleness agrees with what is known in closed form."""

import math

import pytest

from bench import staleness
from bench.staleness import batch, highest_rate, picture, rests, rows_of, rules, text
from penstock.schedule import DOUBLE_BUFFERED, SYNCHRONOUS
from penstock.schedule.weight_rule import STASHING, VERTICAL_SYNC, WeightRule

KEYS = {"rule", "schedule", "quadratic_max_rate", "max_rate", "best_rate", "loss", "losses"}


def delayed_bound(delay: int) -> float:
    """Return the highest stable rate of w(t+1) = w(t) - rate * w(t - delay)."""
    return 2 * math.sin(math.pi / (2 * (2 * delay + 1)))


@pytest.mark.parametrize(
    ("rule", "delay"), [(SYNCHRONOUS, 0), (DOUBLE_BUFFERED, 1), (STASHING, 3), (VERTICAL_SYNC, 3)]
)
def test_highest_rate_without_momentum_is_the_closed_form(rule: WeightRule, delay: int):
    assert highest_rate(rule, momentum=0.0) == pytest.approx(delayed_bound(delay), rel=0.03)


def test_rate_with_momentum_is_the_closed_form_where_nothing_is_stale():
    bound = 2 * (1 + staleness.MOMENTUM)  # of curvature 1
    assert highest_rate(SYNCHRONOUS) == pytest.approx(bound, rel=0.02)


def test_remedies_allow_higher_rates_than_the_rule_that_they_mend():
    named = {rule.rule.name: rule.rule for rule in rules()}
    for mended, plain in (("predicted", "pipelined"), ("compensated", "pipelined")):
        assert highest_rate(named[mended]) > highest_rate(named[plain])
    assert highest_rate(named["speculative"]) > highest_rate(named["stashing"])


def test_every_rule_rests_at_a_small_rate_and_none_at_a_great_one():
    for rule in rules():
        for stage in range(staleness.STAGES):
            assert rests(rule.rule, stage, 1e-2), rule.rule.name
            assert not rests(rule.rule, stage, 8.0), rule.rule.name


def test_text_that_is_held_out_is_not_trained_on():
    border = len(text()) * 9 // 10
    own, held = batch(3)[0], batch(3, held_out=True)[0]
    assert own.shape == held.shape == (8, 32)
    assert (batch(3)[0] == own).all()
    assert border > 10_000


@pytest.mark.long
def test_rows_have_a_curve_for_every_rule_and_a_picture(monkeypatch):
    monkeypatch.setattr(staleness, "highest_rate", lambda rule: 0.5)
    monkeypatch.setattr(staleness, "HELD_OUT", 1)
    two = rules()[:2]
    monkeypatch.setattr(staleness, "rules", lambda: two)
    rows = list(rows_of(1, (0.01, 0.1)))
    assert [row["rule"] for row in rows] == ["synchronous", "double_buffered"]
    assert all(row.keys() >= KEYS and len(row["losses"]) == 2 for row in rows)
    assert picture(rows).count("<polyline") == 4
