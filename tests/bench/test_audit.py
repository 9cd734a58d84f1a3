"""Faults that are planted to be found: thirty, each of which is gone afterwards."""

from pathlib import Path

from bench import audit
from bench.audit import LEAST, long_enough, summary
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


def test_a_job_is_lengthened_until_its_share_pays_for_audits(monkeypatch) -> None:
    tried: list[int] = []

    def ran(job: str, plan: Path, steps: int, share: str, out: Path) -> dict[str, float]:
        tried.append(steps)
        return {"audits": steps // 600}

    monkeypatch.setattr(audit, "ran", ran)
    steps = long_enough("job", Path("plan"), 1300, "1%", Path("out"))
    assert tried == [1300, steps]
    assert steps // 600 >= LEAST
    tried.clear()
    assert long_enough("job", Path("plan"), 1800, "1%", Path("out")) == 1800
    assert tried == [1800]
