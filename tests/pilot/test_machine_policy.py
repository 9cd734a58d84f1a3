"""Following: a run that follows its policy, on a clock that the test turns."""

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from penstock.choose.choose import Machines
from penstock.errors import FleetError
from penstock.fleet import read_market
from penstock.fleet.job_work import FleetJob, Speed
from penstock.fleet.market import noticed, priced
from penstock.fleet.policy_file import PolicyFile, read_policy
from penstock.fleet.replay import Ruler, replay
from penstock.fleet.rulers import ruler_from
from penstock.members.member import RunSeen
from penstock.members.words import View, Where
from penstock.pilot import machine_policy
from penstock.pilot.machine_policy import Follower, MachineOrder, begin_following
from penstock.pilot.wishes import (
    DECISIONS,
    POLICY,
    WANTED,
    decisions_in,
    is_to_leave,
    wanted_in,
)
from penstock.search import Fixed
from penstock.training.elastic_run import follower_in
from penstock.training.run_asked import RunAsked
from penstock.training.run_folder import FILES, words_to_resume
from penstock.training.session import Session
from tests.cli import mlp

START_S, TICK_S, STEPS = 10.0, 1.0, 400
PAUSES = {"reform_s": 0.0, "restart_s": 0.0, "checkpoint_s": 0.0, "notice_s": 30.0}
JOB = FleetJob(1.0, (Speed(1, 1.0), Speed(2, 2.0)), start_s=START_S, **PAUSES)
TRACE = "time_s,pool,machines,usd_h,on_demand_usd_h\n0,a,2,1,3\n"


def policy_in(folder: Path, rows: str = TRACE, **changes: object) -> Path:
    """Write a trace and a policy that follows it."""
    (folder / "trace.csv").write_text(rows)
    given = PolicyFile(
        policy="transient",
        pools=("a",),
        machines=2,
        plan="",
        deadline_h=0.2,
        budget_usd=0.0,
        expected_usd=1.0,
        expected_hours=0.1,
        chance_in_time=1.0,
        traces=("trace.csv",),
        tick_s=TICK_S,
        job=JOB,
    )
    replace(given, **changes).save(folder / "policy.toml")
    return folder / "policy.toml"


@dataclass
class Simulated:
    """A run on a clock of its own: machines come a start after their order, and leave when asked.

    come:  when each machine is there, by number; `pools`, of which pool it is.
    """

    folder: Path
    now_s: float = 0.0
    done: float = 0.0
    come: dict[int, float] = field(default_factory=dict[int, float])
    pools: dict[int, str] = field(default_factory=dict[int, str])
    orders: list[MachineOrder] = field(default_factory=list[MachineOrder])

    def begin(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> Follower:
        run = self.folder / "run"
        run.mkdir(exist_ok=True)
        monkeypatch.setattr(machine_policy.time, "time", lambda: 1e6)
        begin_following(run, path, STEPS, resume=False, here=True)
        return self.follower()

    def follower(self) -> Follower:
        run = self.folder / "run"
        return Follower(run, STEPS, now=lambda: 1e6 + self.now_s, provide=self.provide)

    def provide(self, order: MachineOrder) -> Sequence[subprocess.Popen[bytes]]:
        self.orders.append(order)
        for _ in range(order.wanted - order.held):
            number = len(self.come)
            self.come[number] = self.now_s + START_S
            self.pools[number] = order.pool
        return ()

    @property
    def there(self) -> list[int]:
        return [member for member, at in self.come.items() if at <= self.now_s]

    def seen(self, own: int) -> RunSeen:
        view = View(1, 0, "", tuple(self.there))
        where = {m: Where("", 0, "", self.pools[m]) for m in self.there}
        return RunSeen(own, own == min(self.there), int(self.done), view, where, ())

    def tick(self, follower: Follower, seconds: float = TICK_S) -> list[str]:
        """Let time pass, and the first member ask; those that are to leave are gone then."""
        self.done += seconds * JOB.table()[min(2, len(self.there))]
        self.now_s += seconds
        if self.there:
            words = list(follower.follows(self.seen(min(self.there)))[1])
        else:  # who started the run waits
            decided = follower.decide(int(self.done), machine_policy.MachinesThere({}))
            words = [*decided.problems]
            for order in decided.orders:
                self.provide(order)
        for member in wanted_in(self.folder / "run").leave:
            self.come.pop(member, None)
            self.come[-1 - member] = float("inf")  # numbers are not used again
        return words


CHANGES = "60,a,0,1,3\n100,a,2,1,3\n140,a,0,1,3\n150,a,2,0.5,3\n"


@pytest.mark.parametrize(
    "policy", ["uniform_progress", "greedy", "auto_scaling,0.1", "anchored,1", "on_demand"]
)
@pytest.mark.sampled(2)
def test_decisions_are_those_of_a_replay_to_a_tick(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = policy_in(tmp_path, TRACE + CHANGES, policy=policy, deadline_h=300 / 3600)
    simulated = Simulated(tmp_path)
    follower = simulated.begin(path, monkeypatch)
    decided = follower.decide(0, machine_policy.MachinesThere({}))
    for order in decided.orders:
        simulated.provide(order)
    simulated.now_s = START_S - TICK_S
    while simulated.done < STEPS and simulated.now_s < 1000:
        simulated.tick(follower)
    market = noticed(priced(read_market(tmp_path / "trace.csv"), 0.0, 0.0), JOB.notice_s)
    job = replace(JOB, steps=float(STEPS), has_copies=True)
    numbers = np.array([float(each) for each in policy.split(",")[1:]])
    ruler = Ruler(policy, ruler_from(policy, numbers).policy, tuple(numbers))
    about = {"deadline_s": 300.0, "tick_s": TICK_S, "with_timeline": True}
    run = replay(market, job, ruler, **about)
    theirs = _changes([(row[0], (row[1], row[2])) for row in run.timeline.tolist()])
    rows = [row for row in decisions_in(tmp_path / "run") if row["what"] == "wants"]
    ours = _changes([(row["now_s"], tuple(map(float, row["wanted"].values()))) for row in rows])
    assert [wanted for _, wanted in ours] == [held for _, held in theirs]
    assert len(ours) > 2 or policy == "on_demand"
    for (mine, _), (its, _) in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(its, abs=2 * TICK_S)
    assert run.hours * 3600 == pytest.approx(simulated.now_s, abs=5 * TICK_S)
    state = wanted_in(tmp_path / "run")
    assert state.usd == pytest.approx(run.usd, rel=0.05)


def _changes(rows: list[tuple[float, tuple[float, ...]]]) -> list[tuple[float, tuple[float, ...]]]:
    found: list[tuple[float, tuple[float, ...]]] = []
    for now_s, counts in rows:
        if not found or found[-1][1] != counts:
            found.append((now_s, counts))
    return found


def begun(folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: object):
    """Return a run with both of its machines at work, and who follows for it."""
    simulated = Simulated(folder)
    follower = simulated.begin(policy_in(folder, **changes), monkeypatch)
    for order in follower.decide(0, machine_policy.MachinesThere({})).orders:
        simulated.provide(order)
    simulated.now_s = START_S
    simulated.tick(follower)
    return simulated, follower


def test_a_machine_that_is_lost_is_ordered_again(tmp_path, monkeypatch) -> None:
    simulated, follower = begun(tmp_path, monkeypatch)
    del simulated.come[1]
    simulated.come[-2] = float("inf")
    simulated.tick(follower)
    assert simulated.orders[-1][:3] == ("a", 2, 1)
    last = decisions_in(tmp_path / "run")[-1]
    assert (last["what"], last["why"]) == ("wants", "1 of a lost")
    simulated.tick(follower)
    assert len(simulated.orders) == 2  # it is on its way


def test_one_that_does_not_come_is_asked_for_again(tmp_path, monkeypatch) -> None:
    simulated, follower = begun(tmp_path, monkeypatch)
    del simulated.come[1]
    simulated.come[-2] = float("inf")
    simulated.tick(follower)
    simulated.come[2] = float("inf")  # the cloud has none
    simulated.tick(follower, machine_policy._LATE_S)
    assert len(simulated.orders) == 2
    simulated.tick(follower, 2 * TICK_S)
    assert simulated.orders[-1][:3] == ("a", 2, 1)
    assert "have not come" in decisions_in(tmp_path / "run")[-1]["why"]


def test_those_that_came_last_leave_and_only_they(tmp_path, monkeypatch) -> None:
    simulated, follower = begun(tmp_path, monkeypatch)
    with (tmp_path / "trace.csv").open("a") as file:
        file.write("11.5,a,1,1,3\n")
    simulated.now_s += TICK_S
    other = simulated.follower()
    assert other.follows(simulated.seen(1)) == (False, [])
    leaves, words = follower.follows(simulated.seen(0))
    assert (leaves, words) == (False, [])
    assert wanted_in(tmp_path / "run").leave == (1,)
    assert is_to_leave(tmp_path / "run", 1)
    assert not is_to_leave(tmp_path / "run", 0)
    simulated.now_s += TICK_S
    assert other.follows(simulated.seen(1))[0]
    assert simulated.orders[-1] == ("a", 1, 2, simulated.orders[0].join)
    del simulated.come[1]
    simulated.tick(follower)
    assert len(simulated.orders) == 2


def test_those_that_wait_to_be_taken_in_leave_before_those_that_work(tmp_path, monkeypatch):
    _, follower = begun(tmp_path, monkeypatch)
    there = machine_policy.MachinesThere({7: "a", 0: "a", 1: "a"}, waiting=(7,))
    assert follower.decide(5, there).state.leave == (7,)


def test_another_first_member_goes_on_where_the_first_has_stopped(tmp_path, monkeypatch) -> None:
    simulated, follower = begun(tmp_path, monkeypatch)
    simulated.tick(follower)
    paid = wanted_in(tmp_path / "run").usd
    del simulated.come[0]
    simulated.come[-1] = float("inf")
    simulated.tick(simulated.follower(), 36.0)
    state = wanted_in(tmp_path / "run")
    assert state.usd == pytest.approx(paid + 2 * 36.0 / 3600)
    assert decisions_in(tmp_path / "run")[-1]["why"] == "1 of a lost"


def test_speeds_that_are_measured_are_those_that_the_policy_sees(tmp_path, monkeypatch) -> None:
    """Half as fast as was said: a fleet that scales to a pace needs the second machine."""
    changes = {"policy": "auto_scaling,0.0", "deadline_h": 600 / 3600}
    simulated, follower = begun(tmp_path, monkeypatch, **changes)
    assert simulated.orders[-1].wanted == 1
    for _ in range(20):
        simulated.done -= TICK_S * JOB.table()[1] / 2
        simulated.tick(follower)
    assert follower.rates()[1] == pytest.approx(0.5, abs=0.06)  # whole steps are told
    assert simulated.orders[-1][:2] == ("a", 2)


def test_a_bad_row_is_told_once_and_those_before_it_hold(tmp_path, monkeypatch) -> None:
    simulated, follower = begun(tmp_path, monkeypatch)
    with (tmp_path / "trace.csv").open("a") as file:
        file.write("12,a,-1,1,3\n13,a,0,1,3\n")
    words = [each for _ in range(4) for each in simulated.tick(follower)]
    assert len(words) == 1
    assert "row 3" in words[0]
    assert wanted_in(tmp_path / "run").pools[0].wanted == 2


def test_a_command_hears_what_is_wanted_and_its_failure_is_told(tmp_path, monkeypatch) -> None:
    words = 'echo "$PENSTOCK_POOL $PENSTOCK_WANTED $PENSTOCK_HELD $PENSTOCK_JOIN" >> told; exit 3'
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_POOL", raising=False)
    simulated = Simulated(tmp_path)
    own = simulated.begin(policy_in(tmp_path, provision=words), monkeypatch)
    own = Follower(own.folder, STEPS, now=own.now)  # provides as the file says
    board = type("Board", (), {"asked": lambda self: 0})()
    assert own.first_machines(0, board, None) == ["a"]  # the others are provided
    (started,) = own._started
    assert started.wait() == 3
    told = (tmp_path / "told").read_text().split()
    assert told[:3] == ["a", "2", "1"]
    assert told[3] == "PENSTOCK_POOL=a"
    assert told[4:6] == ["penstock", "join"]
    simulated.come, simulated.pools = {0: 0.0}, {0: "a"}
    simulated.now_s = TICK_S
    said = own.follows(simulated.seen(0))[1]
    assert len(said) == 1
    assert "ended with 3" in said[0]


def test_a_policy_file_keeps_all_that_a_run_needs(tmp_path: Path) -> None:
    path = policy_in(tmp_path, prices=(3.0, 1.0), provision="./order.sh")
    found = read_policy(path)
    assert found.job == JOB
    assert (found.prices, found.provision, found.tick_s) == ((3.0, 1.0), "./order.sh", TICK_S)
    for line, why in (("tick_s = 1.0", "tick_s = 0"), ("prices = [3.0, 1.0]", "prices = [1.0]")):
        (tmp_path / "bad.toml").write_text(path.read_text().replace(line, why))
        with pytest.raises(FleetError, match="of the policy"):
            read_policy(tmp_path / "bad.toml")


def test_what_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for changes, why in (
        ({"traces": ()}, "no traces"),
        ({"job": None}, "no job"),
        ({"policy": "mine:policy"}, "built-in"),
        ({"pools": ("b",)}, "no pool"),
    ):
        path = policy_in(tmp_path, **changes)
        with pytest.raises(FleetError, match=why):
            begin_following(tmp_path / "run", path, STEPS, resume=False, here=True)
    assert follower_in(tmp_path / "run", STEPS) is None
    assert follower_in(None, STEPS) is None


def test_a_run_that_goes_on_keeps_its_clock_and_dollars(tmp_path, monkeypatch) -> None:
    begun(tmp_path, monkeypatch)
    run, before = tmp_path / "run", wanted_in(tmp_path / "run")
    monkeypatch.setattr(machine_policy.time, "time", lambda: 2e6)
    begin_following(run, tmp_path / "policy.toml", STEPS, resume=True, here=False)
    assert wanted_in(run) == before
    assert read_policy(run / POLICY).provision == machine_policy.ELSEWHERE
    begin_following(run, tmp_path / "policy.toml", STEPS, resume=False, here=True)
    assert wanted_in(run).begun_s == 2e6
    assert wanted_in(run).usd == 0
    assert {WANTED, DECISIONS} <= {*os.listdir(run)} <= {*FILES}  # those are moved aside together
    assert json.loads((run / WANTED).read_text())["join"].startswith("penstock join ")


def test_the_end_tells_what_was_paid_beside_what_was_predicted(tmp_path, monkeypatch) -> None:
    simulated, follower = begun(tmp_path, monkeypatch)
    simulated.now_s = 360.0
    words = follower.ended(STEPS)
    assert "0.2 dollars and 0.1 h of 0.2 h" in words
    last = decisions_in(tmp_path / "run")[-1]
    assert (last["what"], last["step"]) == ("ended", STEPS)


def test_a_trace_of_prices_alone_offers_as_many_as_are_wanted(tmp_path, monkeypatch) -> None:
    rows = "time_s,pool,usd_h,on_demand_usd_h\n0,a,1,3\n"
    simulated = Simulated(tmp_path)
    follower = simulated.begin(policy_in(tmp_path, rows), monkeypatch)
    assert follower.decide(0, machine_policy.MachinesThere({})).state.pools[0].wanted == 2
    assert wanted_in(tmp_path / "run").offered == {"a": 4096.0}


@pytest.mark.parametrize("name", [WANTED, machine_policy.TABLE])
@pytest.mark.parametrize("content", [None, b"no such thing"])
def test_a_file_that_is_gone_or_spoilt_does_not_end_the_run(
    name: str, content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated, _ = begun(tmp_path, monkeypatch)
    path = tmp_path / "run" / name
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    follower, words = simulated.follower(), []
    for _ in range(3):
        simulated.now_s += TICK_S
        leaves, said = follower.follows(simulated.seen(0))
        assert not leaves
        words += said
    assert any(name in each for each in words)
    assert len(words) == len({*words})
    assert not is_to_leave(tmp_path / "run", 0)


def test_a_run_that_was_stopped_says_how_it_goes_on_with_its_machines(tmp_path: Path) -> None:
    """A share is a part of what all ranks take: so they are said again where the batch follows."""
    job = replace(mlp.job(), num_steps=STEPS)
    asked, fixed = RunAsked(text="a.py:job"), Fixed(ranks=3)
    session = Session(job, job, tmp_path, STEPS, fixed, Machines(), asked, elastic=True)
    assert words_to_resume(session).endswith("--resume --elastic")
    by_ranks = replace(session, job=replace(job, batch_by_ranks=True))
    assert words_to_resume(by_ranks).endswith("--resume --elastic --ranks 3")
    assert words_to_resume(replace(session, elastic=False)).endswith("--resume")
