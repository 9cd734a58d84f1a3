"""A run on accelerators is audited where its plan leaves most memory, and in no more than that."""

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.prove.audits import Audited
from penstock.training import audit_anew
from penstock.training.audit_anew import AuditSeat, audit_beside, begun_anew, seat_for
from penstock.training.run_asked import RunAsked


@dataclass
class Accelerator:
    """One of 100 bytes, on which a context takes 10."""

    index: int = 0
    limited: int = 0
    peak_bytes: int = 7

    @property
    def place(self) -> str:
        return f"cuda:{self.index}"

    def beside_bytes(self, held: int) -> int:
        return max(0, 90 - held - 10)

    def limit(self, size: int) -> None:
        self.limited = size

    def reset_peak(self) -> int:
        return 0


DEVICES = tuple(Accelerator(index) for index in range(3))


@pytest.fixture(autouse=True)
def _there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_anew, "all_here", lambda: DEVICES)
    monkeypatch.setattr(audit_anew, "here", lambda: DEVICES[1])


def test_it_is_where_the_plan_holds_least():
    seat = seat_for([50, 20, 30], 40)
    assert (seat.device, seat.room_bytes) == (DEVICES[1], 60)
    assert "waits" not in str(seat)
    assert "its weights wait" in str(seat._replace(plain_bytes=61))


def test_of_several_hosts_the_fullest_rank_counts():
    seat = seat_for([50, 20, 30, 70], 40)
    assert (seat.device, seat.room_bytes) == (DEVICES[1], 10)
    assert seat_for([95] * 3, 1).room_bytes == 0


def model() -> torch.nn.Module:
    return torch.nn.Linear(2, 2)


@pytest.mark.parametrize("plain", [50, 70])
def test_it_holds_no_more_than_is_left(monkeypatch, tmp_path, plain):
    about = model, lambda m, b: m(b).sum(), lambda start: iter(()), torch.optim.AdamW
    job = ps.Job(*about, sums="bfloat16")
    device: Any = DEVICES[1]
    seat = AuditSeat(device, 60, plain)
    session: Any = SimpleNamespace(folder=tmp_path, author=job, asked=RunAsked(), key="")
    asked, told = begun_anew(session, seat, None, 2).asked, list[Any]()
    monkeypatch.setattr(audit_anew, "asked_beside", lambda: json.loads(json.dumps(asked)))
    monkeypatch.setattr(audit_anew, "answer_beside", told.append)
    seen: list[Any] = []
    monkeypatch.setattr(
        audit_anew, "audit_asked", lambda case, *_: (seen.append(case), Audited())[1]
    )
    audit_beside(session)
    assert DEVICES[1].limited == 60
    assert (told[0]["room_bytes"], told[0]["most_bytes"]) == (60, 7)
    assert set(seen[0].owners) == {"weight", "bias"}
    assert asked["by_parts"] == (plain > 60)
