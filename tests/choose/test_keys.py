"""Steps of several kinds that cannot be cut alike."""

import pytest

from penstock.choose.keys import cut_alike
from penstock.errors import UnlikeCutsError, UnlikeShapesError
from penstock.listener import Listener
from penstock.search.shapes import Fixed


def found(fixed: Fixed) -> str:
    if fixed.stages != 1:
        raise UnlikeCutsError("a stage has other weights", hint="")
    return f"one stage on {fixed.ranks} ranks"


def test_what_cannot_be_cut_alike_is_planned_as_one_stage():
    assert cut_alike(found, Fixed(ranks=2), Listener()) == "one stage on 2 ranks"


@pytest.mark.parametrize("fixed", [Fixed(stages=2), Fixed(schedule="gpipe")])
def test_stages_that_are_asked_for_stay(fixed):
    with pytest.raises(UnlikeCutsError):
        cut_alike(found, fixed, Listener())


def test_what_one_stage_does_not_mend_is_not_searched_for_again():
    asked = []

    def overlaps(fixed: Fixed) -> str:
        asked.append(fixed)
        raise UnlikeShapesError("this plan lets steps overlap", hint="")

    with pytest.raises(UnlikeShapesError, match="overlap"):
        cut_alike(overlaps, Fixed(ranks=2), Listener())
    assert asked == [Fixed(ranks=2)]
