"""Ending: an end is one for all ranks of a run, and whoever may can bring it about."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

import penstock as ps
from penstock.errors import RunError
from penstock.listener import SILENT
from penstock.members.encrypted import MARK
from penstock.members.mesh import Mesh, listening, where_of
from penstock.members.words import Welcome, Where
from penstock.runtime.stop import Stopped
from penstock.training import elastic_driver, ending, lock
from penstock.training.addresses import Addresses, write_addresses
from penstock.training.at_work import ENDED, check_free
from penstock.training.ending import stop_run, tell_members, why_over
from penstock.training.session import Session

TOKEN = b"token"
ELSEWHERE = {"pid": 1, "host": "elsewhere", "started": "today"}


def addresses(folder: Path, where: dict[int, Where], token: bytes = TOKEN) -> None:
    write_addresses(Addresses(token.hex(), str(folder), {}, (), 9), where)


def over(folder: Path, holder: lock.Holder | None = None) -> str:
    return why_over(folder, TOKEN.hex(), holder)


def test_ranks_go_on_while_the_run_has_not_ended(tmp_path: Path) -> None:
    assert over(tmp_path) == ""
    addresses(tmp_path, {})
    with lock.locked(tmp_path):
        assert over(tmp_path, lock.holder_of(tmp_path)) == ""


def test_ranks_do_not_go_on_when_the_run_has_ended(tmp_path: Path) -> None:
    (tmp_path / ENDED).write_text("{}")
    assert "has ended" in over(tmp_path)


def test_ranks_do_not_go_on_when_another_run_has_begun(tmp_path: Path) -> None:
    addresses(tmp_path, {}, b"other")
    assert "another run" in over(tmp_path)


def test_ranks_do_not_go_on_when_another_run_holds_the_folder(tmp_path: Path) -> None:
    with lock.locked(tmp_path):
        holder = lock.holder_of(tmp_path)
        assert f"process {os.getpid()}" in over(tmp_path)
        (tmp_path / lock.NAME).write_text(json.dumps(ELSEWHERE))
        assert "elsewhere" in over(tmp_path, holder)


def test_a_lock_of_one_that_died_stops_nobody(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (tmp_path / lock.NAME).write_text(json.dumps({**lock._own(), "pid": ended.pid}))
    assert over(tmp_path) == ""
    (tmp_path / lock.NAME).write_text("nobody")
    assert over(tmp_path) == ""


@contextmanager
def listens(folder: Path, token: bytes = TOKEN) -> Generator[Mesh]:
    """Yield a member of a run in `folder`, which tells where it listens."""
    end = listening()
    where = where_of(end, "")
    mesh = Mesh(0, end, token)
    mesh.greets = lambda: Welcome({0: where}, "graph")
    mesh.start()
    addresses(folder, {0: where}, token)
    yield mesh
    mesh.drop()


@pytest.fixture
def member(tmp_path: Path):
    with listens(tmp_path) as mesh:
        yield mesh


def test_members_hear_that_the_run_is_to_end(member: Mesh, tmp_path: Path) -> None:
    assert tell_members(tmp_path) == 1
    assert member.wait(lambda: member.is_asked_to_stop, 300.0)


def test_who_does_not_know_the_token_ends_nothing(member: Mesh, tmp_path: Path) -> None:
    addresses(tmp_path, {0: where_of(member._gate.listener, "")}, b"other")
    assert tell_members(tmp_path) == 0
    assert not member.is_asked_to_stop


def test_a_run_is_stopped_by_its_members(
    member: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[str]()

    def told(folder: Path) -> int:
        (folder / ENDED).write_text("{}")
        return tell_members(folder)

    monkeypatch.setattr(ending, "tell_members", told)
    assert stop_run(tmp_path, 60.0, said.append)
    assert said == ["1 rank of the run asked to end with a checkpoint"]


def test_a_run_that_does_not_end_in_time_is_said_not_to_have(member: Mesh, tmp_path: Path) -> None:
    assert not stop_run(tmp_path, 0.0, lambda words: None)


HOLDS = """
import signal, sys
from pathlib import Path
from penstock.training.lock import locked
with locked(Path(sys.argv[1])):
    try:
        print("holds", flush=True)
        signal.pause()
    except KeyboardInterrupt:
        pass
"""


ASKS = """
import sys
from pathlib import Path
from penstock.training.lock import holding_pid
print(holding_pid(Path(sys.argv[1])))
"""


def test_a_run_of_one_process_is_stopped_by_a_signal(tmp_path: Path) -> None:
    words = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"holds\n"
        assert lock.holding_pid(tmp_path) == process.pid
        assert stop_run(tmp_path, 60.0, lambda words: None)
        assert process.wait() == 0


def test_a_lock_file_alone_names_nobody_who_gets_a_signal(tmp_path: Path) -> None:
    """A folder of others may name any process."""
    (tmp_path / lock.NAME).write_text(json.dumps(lock._own()))
    with pytest.raises(RunError, match="no run is at work"):
        stop_run(tmp_path, 0.0, lambda words: None)


def test_a_run_of_another_host_is_stopped_there(tmp_path: Path) -> None:
    (tmp_path / lock.NAME).write_text(json.dumps(ELSEWHERE))
    with pytest.raises(RunError, match="process 1 on elsewhere"):
        stop_run(tmp_path, 0.0, lambda words: None)


class Asked:
    """A board on which a signal stands."""

    def asked(self) -> int:
        return signal.SIGINT


def test_a_signal_to_the_command_ends_the_ranks_that_took_the_place_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(folder: Path) -> int:
        (folder / ENDED).write_text("{}")
        return 1

    monkeypatch.setattr(elastic_driver, "tell_members", told)
    monkeypatch.setattr(elastic_driver, "anybody_at", lambda places: True)
    addresses(tmp_path, {})
    elastic_driver.wait_for_end(tmp_path, SILENT, Asked())  # pyright: ignore[reportArgumentType]


def test_a_signal_that_no_rank_hears_ends_the_waiting(tmp_path: Path) -> None:
    addresses(tmp_path, {})
    with pytest.raises(Stopped):
        elastic_driver.wait_for_end(tmp_path, SILENT, Asked())  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("options", [{}, {"elastic": True}, {"elastic": True, "resume": True}])
def test_a_folder_whose_ranks_are_at_work_is_refused_before_anything_is_done(
    options: dict, member: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leads(session: Session) -> None:
        raise AssertionError("it examines, traces and searches")

    monkeypatch.setattr(Session, "lead", leads)
    words = f"ranks of an elastic run are at work in {tmp_path}"
    with pytest.raises(RunError, match=words) as caught:
        ps.train("tests.cli.mlp:job", out=tmp_path, listener=None, **options)
    assert f"penstock stop {tmp_path}" in caught.value.hint


def refused(folder: Path) -> tuple[bool, str]:
    """Return whether `penstock train` had loaded torch when it was refused, and what it said."""
    program = (
        "import sys\nfrom penstock.cli import main\n"
        f"code = main(['train', 'tests/cli/mlp.py', '--out', {str(folder)!r}])\n"
        "assert code == 1, code\nsys.exit(7 if 'torch' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode in (0, 7), done.stderr
    return done.returncode == 7, done.stderr


@pytest.mark.parametrize("token", [TOKEN, MARK + TOKEN])
def test_train_is_refused_where_ranks_are_at_work_before_torch_is_loaded(
    token: bytes, tmp_path: Path
) -> None:
    with listens(tmp_path, token):
        has_torch, words = refused(tmp_path)
    assert "ranks of an elastic run are at work" in words
    assert not has_torch


def test_train_is_refused_where_a_run_has_the_lock_before_torch_is_loaded(tmp_path: Path) -> None:
    holds = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(holds, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"holds\n"
        has_torch, words = refused(tmp_path)
        process.send_signal(signal.SIGINT)
    assert f"is in use by process {process.pid}" in words
    assert not has_torch


def test_who_asks_whether_a_folder_is_free_keeps_the_lock_of_its_own(tmp_path: Path) -> None:
    with lock.locked(tmp_path):
        check_free(tmp_path)
        asked = [sys.executable, "-c", ASKS, str(tmp_path)]
        assert subprocess.run(asked, stdout=subprocess.PIPE).stdout == f"{os.getpid()}\n".encode()
