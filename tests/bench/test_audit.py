"""Faults that are planted to be found: thirty, each of which is gone afterwards."""

from bench.audit import summary
from bench.audit_faults import FAULTS
from penstock.runtime.rank import Rank
from penstock.runtime.reader import Reader
from penstock.state.weights import StageWeights


def test_each_fault_changes_one_place_and_leaves_it_as_it_was() -> None:
    right = StageWeights.step, Reader.read, Rank.seed
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) == 30
    for fault in FAULTS:
        with fault.plant(5):
            now = StageWeights.step, Reader.read, Rank.seed
            assert sum(one is not other for one, other in zip(now, right, strict=True)) == 1
        assert (StageWeights.step, Reader.read, Rank.seed) == right


def test_summary_counts_what_was_found_and_how_late() -> None:
    rows = [{"late": 8, "why": ""}, {"late": None, "why": ""}, {"late": 80, "why": ""}]
    words = summary([*rows, {"late": None, "why": "audited at 7 steps"}])
    assert words.startswith("2 of 3 faults found, 44 steps late in the median, 80 at most")
    assert words.endswith("audited at 7 steps")
    assert "steps late" not in summary([{"late": None, "why": ""}, {"late": None, "why": ""}])
