"""On hosts: what a stand-in hears of signals, of the folder, and of the end elsewhere."""

import os
import signal
from pathlib import Path

import pytest

from penstock.checkpoints.control import LocalBoard
from penstock.errors import PlanError, RunError
from penstock.listener import SILENT
from penstock.members.mesh import listening, where_of
from penstock.runtime.stop import Stopped
from penstock.training import elastic_driver
from penstock.training.addresses import Addresses, write_addresses
from penstock.training.at_work import ENDED
from penstock.training.elastic_driver import wait_for_end
from penstock.training.elastic_hosts import _digest, known_in, noticing


@pytest.mark.parametrize(("siblings", "noticed"), [(1, True), (10**6, False)])
def test_sigterm_is_notice_unless_torchrun_ends_all_for_one_that_is_gone(
    siblings: int, noticed: bool
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with noticing(siblings) as notice:
        assert not notice()
        os.kill(os.getpid(), signal.SIGTERM)
        assert notice() is noticed
    assert signal.getsignal(signal.SIGTERM) is before


def addresses(folder: Path, token: str = "00ff") -> Addresses:
    """Write where the members of a run are, of which none is."""
    own = Addresses(token, str(folder), {}, (), 4)
    with listening() as closed:
        write_addresses(own, {0: where_of(closed, "")})
    return own


@pytest.fixture
def board():
    made = LocalBoard()
    yield made
    made.close()


def test_stand_in_waits_until_the_run_has_ended(
    tmp_path: Path, board: LocalBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []

    def look(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            (tmp_path / ENDED).touch()

    monkeypatch.setattr(elastic_driver.time, "sleep", look)
    monkeypatch.setattr(elastic_driver, "_PATIENCE_S", 1e6)
    addresses(tmp_path)
    wait_for_end(tmp_path, SILENT, board)
    assert len(looks) == 3


def test_stand_in_ends_with_an_error_once_nobody_is_left(
    tmp_path: Path, board: LocalBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic_driver, "_PATIENCE_S", 0.0)
    addresses(tmp_path)
    with pytest.raises(RunError, match="no rank of the run in "):
        wait_for_end(tmp_path, SILENT, board)


def test_signal_ends_the_waiting(tmp_path: Path, board: LocalBoard) -> None:
    addresses(tmp_path)
    board.ask_to_stop(signal.SIGINT)
    with pytest.raises(Stopped):
        wait_for_end(tmp_path, SILENT, board)


def test_folder_that_is_not_that_of_rank_0_is_refused(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    digest = _digest(addresses(there).secret)
    assert known_in(there, digest).token == "00ff"
    for _ in range(2):
        with pytest.raises(PlanError, match="here as seen from here is not the folder"):
            known_in(here, digest)
        addresses(here, "ff00")
