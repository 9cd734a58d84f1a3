"""Jobs that are planned for machines elsewhere: nothing of them has to fit here."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.choose import other_machines
from penstock.choose.other_machines import Looking, Planning, planning
from penstock.choose.settle import CheckOptions
from penstock.cluster.cluster import Cluster
from penstock.errors import JobError
from penstock.graph.waiting import is_hollow
from penstock.listener import SILENT
from penstock.plan.plan import Decision
from penstock.search.shapes import Fixed
from tests.graph.test_hollow import Asks, Net, job_of

MIXED = Cluster.load(Path(__file__).parents[2] / "examples" / "mixed.toml")


def planned(job: ps.Job, *, check: bool = True) -> Planning:
    looking = Looking("", CheckOptions(check=check, strict=True), SILENT)
    return planning(job, MIXED, Fixed(), looking)


def left_out(found: Planning) -> Decision | None:
    return next((each for each in found.decisions if each.what == "examination"), None)


def test_large_job_is_not_run_and_the_plan_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_machines, "_EXAMINED_BYTES", 0)
    found = planned(job_of())
    line = left_out(found)
    assert is_hollow(found.captured.model)
    assert line is not None
    assert (line.value, line.by) == ("left out", "only choice")
    buffers = next(each for each in found.decisions if each.what == "buffers")
    assert buffers.value == "exact"  # read off the step: c * old + new


def test_examination_is_left_out_where_that_is_asked_for() -> None:
    line = left_out(planned(job_of(), check=False))
    assert line is not None
    assert line.by == "user"


def test_small_job_is_examined_and_planned_without_values() -> None:
    found = planned(job_of())
    assert left_out(found) is None
    assert is_hollow(found.captured.model)


def test_model_that_needs_values_is_built_where_there_is_room() -> None:
    assert not is_hollow(planned(job_of(Asks), check=False).captured.model)


class Large(Asks):
    """Takes a TiB, and asks for a value of it."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.zeros(1 << 38))


def test_model_that_needs_values_and_has_no_room_is_refused_with_the_figure() -> None:
    with pytest.raises(JobError, match=r"no room on this machine: it takes more than the .*iB"):
        planned(job_of(Large), check=False)


class Branches(Net):
    """Can be built without values, and not be traced."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if float(self.inner.weight.sum()) > 0 else 1)


def test_weights_without_room_are_refused_before_they_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(other_machines, "free_bytes", lambda: 100)
    with pytest.raises(JobError, match=r"it takes 240 B of weights, and 90 B are free"):
        planned(job_of(Branches), check=False)
