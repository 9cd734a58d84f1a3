"""penstock train --elastic and penstock join, as a person gives them, and under torchrun."""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.members.member import RunMember
from penstock.members.notice import looking
from penstock.members.words import Told
from penstock.runtime.rank import Rank
from penstock.training.addresses import ADDRESSES, Addresses, addresses_in, write_addresses
from penstock.training.joining import _token_in
from tests.cli.conftest import Call
from tests.runtime.as_torchrun import FORK, as_torchrun

STEPS, LIMIT_S = 30, 300.0
JOB = '''
import os, signal
from dataclasses import replace
from pathlib import Path

from tests.cli import mlp

FOLDER = Path({folder!r})


def once(name):
    """Return whether this is the first process to come here."""
    try:
        os.close(os.open(FOLDER.parent / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def data(start):
    for index, batch in enumerate(mlp.data(start), start):
        trains = (FOLDER / "metrics.jsonl").exists()
        if trains and index == {dies} and once("died"):
            os.kill(os.getpid(), signal.SIGKILL)
        yield batch


def job():
    return replace(mlp.job(), data=data, num_steps={steps})
'''


def job_in(folder: Path, *, dies: int = -1) -> str:
    """Write a job: who reads micro-batch `dies` of its steps is killed, once."""
    path = folder / "elastic_job.py"
    path.write_text(JOB.format(folder=str(folder / "run"), dies=dies, steps=STEPS))
    return f"{path}:job"


def rows(folder: Path, name: str) -> list[dict]:
    path = folder / "run" / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


POLICY = """
policy = "transient"
pools = ["zone"]
machines = 2
plan = ""
deadline_h = 1.0
budget_usd = 0.0
expected_usd = 1.0
expected_hours = 1.0
chance_in_time = 1.0
traces = ["trace.csv"]
tick_s = 0.1
[job]
steps = 1
start_s = 1.0
speeds = [{ machines = 1, steps_per_s = 10.0 }, { machines = 2, steps_per_s = 20.0 }]
"""


def policy_in(folder: Path, machines: int) -> str:
    """Write a policy, and a trace that offers so many machines."""
    header = "time_s,pool,machines,usd_h,on_demand_usd_h"
    (folder / "trace.csv").write_text(f"{header}\n0,zone,{machines},1.0,3.0\n")
    (folder / "policy.toml").write_text(POLICY)
    return str(folder / "policy.toml")


def until(is_so, times: int = 10_000) -> None:
    for _ in range(times):
        if is_so():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it never is")


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory, profiles: Path) -> list[float]:
    """Return the losses of a run whose ranks stay."""
    folder = tmp_path_factory.mktemp("plain")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(profiles))
        command = ["train", job_in(folder), "--out", str(folder / "run"), "--ranks", "1"]
        assert main(command) == 0
    return [row["loss"] for row in rows(folder, "metrics.jsonl")]


@pytest.mark.long
def test_under_torchrun_one_that_is_killed_takes_nobody_with_it(
    tmp_path: Path, losses: list[float], monkeypatch: pytest.MonkeyPatch, profiles: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(profiles))
    command = ["train", job_in(tmp_path, dies=13), "--elastic", "--out", str(tmp_path / "run")]
    command += ["--set", f"policy={policy_in(tmp_path, 2)}"]
    done = as_torchrun(partial(main, command), tmp_path, nodes=2)
    assert [code for code, _, _ in done] == [0, 0], done
    found = rows(tmp_path, "metrics.jsonl")
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    assert [row["loss"] for row in found] == pytest.approx(losses, rel=1e-4)
    events = rows(tmp_path, "events.jsonl")
    assert [event["what"] for event in events] == ["begins", "lost"]
    assert (tmp_path / "run" / "report.html").exists()
    assert any("others go on" in err for _, _, err in done)
    first = decisions(tmp_path)[0]
    assert first["wanted"] == first["ready"] == {"zone": 2, "zone:on-demand": 0}


# -- who joins ------------------------------------------------------------------------------------


@contextmanager
def beside(call: Callable[[], int], *, limit_s: float = LIMIT_S) -> Generator[None]:
    """Let a process of its own call it while something else happens; it has to return 0."""
    process = FORK.Process(target=lambda: os._exit(call()))
    process.start()
    try:
        yield
        process.join(limit_s)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
        process.close()


@pytest.fixture
def short_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profiles: Path
) -> Generator[Path]:
    """Give a run that has lost one of its ranks, and ends once another rank has asked to join."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(profiles))
    counts = RunMember.counts

    def patient(member: RunMember, told: Told, rank: Rank) -> None:
        counts(member, told, rank)
        if told.step == 10 and member.is_first:
            view = member.last_view
            assert member.mesh.wait(lambda: bool(member._newcomers(view)), LIMIT_S)

    monkeypatch.setattr(RunMember, "counts", patient)
    folder = tmp_path / "run"
    command = ["train", job_in(tmp_path, dies=13), "--elastic", "--out", str(folder)]

    def by_torchrun() -> int:
        done = as_torchrun(partial(main, command), tmp_path, ranks=2)
        if any(code is None for code, _, _ in done):
            sys.stderr.write(f"it does not end: {done}")
        return max(-1 if code is None else code for code, _, _ in done)

    with beside(by_torchrun):
        until(lambda: len(rows(tmp_path, "events.jsonl")) == 2)
        yield folder


def test_who_has_joined_finishes_when_all_that_the_command_started_are_dead(
    tmp_path: Path,
    losses: list[float],
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
    profiles: Path,
) -> None:
    """The command waits for it, and ends as the run does."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(profiles))
    counts = RunMember.counts

    def mortal(member: RunMember, told: Told, rank: Rank) -> None:
        counts(member, told, rank)
        view = member.last_view
        if told.step == 10 and member.is_first:
            assert member.mesh.wait(lambda: bool(member._newcomers(view)), LIMIT_S)
        if told.step == 20 and member.mesh.own < 2:  # the last that began
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(RunMember, "counts", mortal)
    folder = tmp_path / "run"
    command = ["train", job_in(tmp_path, dies=13), "--elastic", "--ranks", "2"]
    with beside(lambda: main([*command, "--out", str(folder)])):
        until(lambda: len(rows(tmp_path, "events.jsonl")) == 2)
        done = call("join", folder, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["over"]
    events = rows(tmp_path, "events.jsonl")
    assert [len(event["members"]) for event in events] == [2, 1, 2, 1]
    found = rows(tmp_path, "metrics.jsonl")
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    assert [row["loss"] for row in found] == pytest.approx(losses, rel=1e-4)


def joined(folder: Path) -> None:
    """Raise unless a rank was lost and another one joined, and no step was lost or done twice."""
    events = rows(folder.parent, "events.jsonl")
    assert [event["what"] for event in events] == ["begins", "lost", "joined"]
    assert [len(event["members"]) for event in events] == [2, 1, 2]
    found = rows(folder.parent, "metrics.jsonl")
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))


def test_who_knows_an_address_and_the_token_joins(
    short_of_one: Path, tmp_path: Path, losses: list[float], call: Call
) -> None:
    known, token = addresses_in(short_of_one), tmp_path / "token"
    token.write_text(f"{known.token}\n")
    (left,) = rows(tmp_path, "events.jsonl")[1]["members"]
    where = known.members[str(left)]
    address = f"tcp://{where.host}:{where.port}"
    done = call("join", address, "--token-file", token, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out) == {"joined": address, "steps": STEPS, "over": True}
    found = rows(tmp_path, "metrics.jsonl")
    assert [row["loss"] for row in found] == pytest.approx(losses, rel=1e-4)
    joined(short_of_one)


def test_a_host_that_is_there_again_joins_by_the_same_torchrun(
    short_of_one: Path, tmp_path: Path
) -> None:
    again = tmp_path / "again"
    again.mkdir()
    command = ["train", f"{tmp_path / 'elastic_job.py'}:job", "--elastic"]
    command += ["--out", str(short_of_one)]
    ((code, _, err),) = as_torchrun(partial(main, command), again)
    assert code == 0, err
    assert "joining the run" in err
    joined(short_of_one)


def test_a_rank_whose_machine_has_had_notice_leaves_and_the_others_go_on(
    short_of_one: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Notice comes only to the one that joins: the others were started without the variable."""
    monkeypatch.setenv("PENSTOCK_NOTICE", str(tmp_path / "notice"))
    monkeypatch.setattr("penstock.members.launch_members.looking", partial(looking, ask_s=0.001))
    counts = RunMember.counts

    def noted(member: RunMember, told: Told, rank: Rank) -> None:
        counts(member, told, rank)
        if told.step == 14:
            (tmp_path / "notice").touch()
        if told.step > 14:
            until(member.outside.leaves)

    monkeypatch.setattr(RunMember, "counts", noted)
    done = call("join", short_of_one, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["over"] is False
    until(lambda: len(rows(tmp_path, "events.jsonl")) == 4)
    events = rows(tmp_path, "events.jsonl")
    assert {*events[3]["gone"].values()} <= {"left", "notice"}
    until((short_of_one / "report.html").exists)
    found = rows(tmp_path, "metrics.jsonl")
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))


def test_notice_for_all_ranks_stops_the_run_with_a_checkpoint_and_it_goes_on(
    tmp_path: Path,
    losses: list[float],
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
    profiles: Path,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(profiles))
    monkeypatch.setattr("penstock.members.launch_members.looking", partial(looking, ask_s=0.001))
    counts = RunMember.counts

    def noted(member: RunMember, told: Told, rank: Rank) -> None:
        counts(member, told, rank)
        if told.step == 9:
            (tmp_path / "notice").touch()
            until(member.outside.leaves)

    command = ["train", job_in(tmp_path), "--elastic", "--ranks", "2", "--out", tmp_path / "run"]
    with monkeypatch.context() as patched:
        patched.setattr(RunMember, "counts", noted)
        patched.setenv("PENSTOCK_NOTICE", str(tmp_path / "notice"))
        done = call(*command)
    assert done.code == 128 + signal.SIGTERM, done.err
    assert "--resume" in done.err
    (kept,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert 11 <= int(kept.name.removeprefix("step-")) < STEPS
    assert call(*command, "--resume").code == 0
    found = rows(tmp_path, "metrics.jsonl")
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    assert [row["loss"] for row in found] == pytest.approx(losses, rel=1e-4)


def test_token_is_in_a_file_of_its_own_or_in_that_of_addresses(tmp_path: Path) -> None:
    alone, whole = tmp_path / "token", tmp_path / ADDRESSES
    alone.write_text("00ff\n")
    write_addresses(Addresses("00ff", str(tmp_path), {}, (), 4), {})
    assert _token_in(alone) == _token_in(whole) == b"\x00\xff"
    assert whole.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("run", "token", "says"),
    [
        ("tcp://127.0.0.1:9", None, "a run on another host asks for its token"),
        ("tcp://127.0.0.1:9", "no token", "holds no token"),
        ("tcp://127.0.0.1:9", '{"members": {}}', "holds no token"),
        ("tcp://127.0.0.1", "00ff", "is no address"),
        ("tcp://127.0.0.1:port", "00ff", "is no address"),
        ("nowhere", None, "there is no folder nowhere"),
    ],
)
def test_what_names_no_run_is_refused(
    run: str, token: str | None, says: str, call: Call, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text(token or "")
    done = call("join", run, *(["--token-file", file] if token else []))
    assert (done.code, done.out) == (2 if run == "nowhere" else 1, "")
    assert says in done.err
    assert "hint: " in done.err


def test_host_that_nobody_knows_is_named(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*about: object, **more: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    (tmp_path / "token").write_text("00" * 32)
    done = call("join", "tcp://elsewhere:9", "--token-file", tmp_path / "token")
    assert done.code == 1, done
    assert "error: elsewhere cannot be reached: Name or service not known" in done.err


def test_nobody_at_an_address_is_said_so(call: Call, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("00" * 32)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    done = call("join", f"tcp://127.0.0.1:{port}", "--token-file", tmp_path / "token")
    assert done.code == 1, done
    assert f"127.0.0.1:{port}" in done.err


# -- a run that follows a policy -------------------------------------------------------------------

FOLLOWING = """
import threading
from dataclasses import replace
from pathlib import Path

from tests.cli import mlp

OVER = Path({over!r})


def data(start):
    for index, batch in enumerate(mlp.data(start), start):
        if not OVER.exists():  # steps are slow, and slower, until the market has changed
            threading.Event().wait(0.02 if index < 600 else 1.0)
        yield batch


def job():
    return replace(mlp.job(), data=data, num_steps={steps})
"""


def decisions(folder: Path) -> list[dict]:
    return rows(folder, "decisions.jsonl")


def market_of(folder: Path, machines: int) -> None:
    """Let the market offer so many machines from now on, and wait until the run has them."""
    wanted = json.loads((folder / "run" / "wanted.json").read_text())
    with (folder / "trace.csv").open("a") as file:
        file.write(f"{time.time() - wanted['begun_s']:.3f},zone,{machines},1.0,3.0\n")
    until(lambda: _has(decisions(folder), machines), times=30_000)


def pools_in(folder: Path) -> list[str]:
    """Return the pools of the ranks, as they are written after a generation's first step."""
    return [where.pool for where in addresses_in(folder).members.values()]


def _has(told: list[dict], machines: int) -> bool:
    last = [row["wanted"]["zone"] for row in told if row["what"] == "wants"][-1]
    return last == machines and told[-1]["what"] == "there"


def test_a_run_has_as_many_machines_as_its_policy_wants_and_none_when_it_wants_none(
    tmp_path: Path, losses: list[float], monkeypatch: pytest.MonkeyPatch, profiles: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(profiles))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    path, over, steps = tmp_path / "job.py", tmp_path / "over", 200
    path.write_text(FOLLOWING.format(over=str(over), steps=steps))
    command = ["train", f"{path}:job", "--elastic", "--set", f"policy={policy_in(tmp_path, 1)}"]
    command += ["--out", str(tmp_path / "run"), "--set", "trial=false", "--set", "check=false"]
    with beside(lambda: main(command)):
        until(lambda: len(rows(tmp_path, "metrics.jsonl")) > 2, times=30_000)
        market_of(tmp_path, 2)
        until(lambda: pools_in(tmp_path / "run") == ["zone", "zone"])
        market_of(tmp_path, 1)
        until(lambda: pools_in(tmp_path / "run") == ["zone"])  # who came last has left
        for machines in (0, 1):
            market_of(tmp_path, machines)
        over.touch()
    found = rows(tmp_path, "metrics.jsonl")
    assert [row["step"] for row in found] == list(range(1, steps + 1))
    assert [row["loss"] for row in found[: len(losses)]] == pytest.approx(losses, rel=1e-4)
    told = [row for row in decisions(tmp_path) if row["what"] == "wants"]
    assert [row["wanted"]["zone"] for row in told] == [1, 2, 1, 0, 1]
    sizes = [len(event["members"]) for event in rows(tmp_path, "events.jsonl")]
    assert sizes == [1, 2, 1, 1]
    assert decisions(tmp_path)[-1]["what"] == "ended"
    assert "this rank has left" in (tmp_path / "run" / "machines.log").read_text()
