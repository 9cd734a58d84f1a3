"""What a choice among all sizes of micro-batches says of the plans that it does not take."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from penstock.choose.choose import _why_not_fastest
from penstock.plan import plan_by_hand
from penstock.plan.plan import Decision
from penstock.search import Candidate
from tests.search.chains import chain

PLAN = plan_by_hand(chain([3, 3, 3], [5, 6, 7]), [1], "gpipe", num_micro_batches=4)


def option(joined, *seconds, refused="", simplest=False):
    """Return what was found with micro-batches joined so: the plan's seconds, then others'."""
    rows = [Candidate(PLAN, each, (1,), 0.0) for each in seconds]
    rows[1:2] = [replace(each, refused=refused) for each in rows[1:2]]
    found = SimpleNamespace(candidates=rows)
    decisions = (Decision("simplest", "2 messages a step", "search", "less"),) if simplest else ()
    choice = SimpleNamespace(plan=replace(PLAN, decisions=decisions))
    return SimpleNamespace(
        way=SimpleNamespace(joined=joined), found=found, best=rows[0], choice=choice
    )


def test_a_faster_plan_with_other_micro_batches_that_is_not_taken_is_told():
    first, other = option(2, 1.02, 1.5), option(1, 1.03, 1.0)
    (told,) = _why_not_fastest(first, [first, other], "time")
    assert (told.what, told.by) == ("simplest", "search")
    assert "gpipe with none joined, is predicted at 1.00 s " in told.why
    assert "; 2.0% is less than the prediction error" in told.why


@pytest.mark.parametrize(
    ("first", "other", "objective"),
    [
        (option(2, 1.0, 1.5), option(1, 1.03, 1.01), "time"),  # it is the fastest
        (option(2, 1.02, 1.5), option(1, 1.03, 1.0, refused="memory"), "time"),
        (option(2, 1.02, 1.0, simplest=True), option(1, 1.03, 1.01), "time"),  # it is told
        (option(2, 1.02, 1.5), option(1, 1.03, 1.0), "memory"),  # no plan is simplified then
    ],
)
def test_else_there_is_nothing_to_tell(first, other, objective):
    assert _why_not_fastest(first, [first, other], objective) == ()
