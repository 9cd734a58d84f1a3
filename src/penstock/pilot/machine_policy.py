"""Machine policy: a run asks its policy which machines it wants, and sees to it that it gets them.

The first member asks at every tick; what it decides stands in the run's folder, so another one
goes on where it has stopped, whatever stopped it.
"""

import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast, final

import numpy as np

from penstock.errors import FleetError
from penstock.files import add_line
from penstock.fleet.growing import GrowingTrace
from penstock.fleet.job_work import FleetJob
from penstock.fleet.market import HOUR_S, Market, noticed, only, priced, together
from penstock.fleet.one_future import MOST_HELD, Floats
from penstock.fleet.policy_file import PolicyFile, read_policy
from penstock.fleet.replay import Ruler
from penstock.fleet.rulers import basis_of, ruler_from, ruler_of, table_of
from penstock.fleet.running import RunAim, Standing, measured, so_far, to_come, wants
from penstock.listener import Listener
from penstock.members.member import RunSeen
from penstock.pilot.wishes import (
    DECISIONS,
    ELSEWHERE,
    LOG,
    ON_DEMAND,
    POLICY,
    POOL,
    TABLE,
    WANTED,
    Wanted,
    WantedPool,
    decisions_in,
    pool_here,
    wanted_in,
    write_wanted,
)
from penstock.runtime.stop import Stopped

if TYPE_CHECKING:
    from penstock.checkpoints.control import Board

_LATE_S = 60.0  # at least; after twice a start a machine that is not there is asked for again
_LONG_S = 86400  # for which a machine that has come waits to be taken in
_LOOK_S = 0.2
_FEWEST_S = 1.0  # of work, from which a speed is taken


class MachineOrder(NamedTuple):
    """How many machines of a pool are wanted now and were held, and what each has to run."""

    pool: str
    wanted: int
    held: int
    join: str


Started = subprocess.Popen[bytes]
Provide = Callable[[MachineOrder], Sequence[Started]]


class Decided(NamedTuple):
    """What is wanted from a tick on, what has to be ordered or given back, and words of a trace."""

    state: Wanted
    orders: tuple[MachineOrder, ...]
    problems: tuple[str, ...]


def begin_following(folder: Path, path: Path, steps: int, *, resume: bool, here: bool) -> None:
    """Let the run in a folder follow a policy file, on its clock from now on.

    resume:   the run had begun before, and its clock goes on.
    here:     processes of this host are its machines, if no command provides others.
    Raises:   FleetError: the file lacks traces or the job's figures, or they cannot be read.
    """
    given = read_policy(path)
    if not given.traces or given.job is None:
        hint = "`penstock fleet advise --policy-file` writes both"
        raise FleetError(f"policy {path} has no traces, or no job, to follow", hint=hint)
    near = path.absolute().parent
    traces = tuple(str(near / trace) for trace in given.traces)
    given = replace(given, traces=traces, provision=given.provision or ("" if here else ELSEWHERE))
    given.save(folder / POLICY)
    markets = [GrowingTrace(Path(trace)).read() for trace in traces]
    whole = _priced(given, markets[0] if len(markets) == 1 else together(markets))
    job, lasts_s = measured(figures_of(given), float(steps), {}), given.deadline_h * HOUR_S
    ruler_from(given.policy, np.zeros(0))  # it is a built-in one
    ruler = ruler_of(given.policy, job, basis_of(whole, lasts_s), _no_function)
    with (folder / f"{TABLE}.part").open("wb") as file:
        np.save(file, table_of(ruler))
    (folder / f"{TABLE}.part").replace(folder / TABLE)
    if not (resume and (folder / WANTED).exists()):
        join = f"penstock join {shlex.quote(str(folder.absolute()))} --yes --limit {_LONG_S}"
        write_wanted(folder, Wanted(time.time(), join))


def _no_function(text: str) -> "Callable[..., None]":
    raise FleetError(f"{text} is no built-in policy", hint="a run follows those that are")


def figures_of(policy: PolicyFile) -> FleetJob:
    """Return what a policy knows of the job; it was checked that it does."""
    assert policy.job is not None, "it was checked"
    return policy.job


def _priced(policy: PolicyFile, market: Market) -> Market:
    """Return the pools of a policy, with its prices and notice where the market has none."""
    sure, spot = policy.prices or (0.0, 0.0)
    there = priced(only(market, policy.pools), sure, spot)
    return noticed(there, figures_of(policy).notice_s)


# -- decisions -------------------------------------------------------------------------------------


class MachinesThere(NamedTuple):
    """Which machines are there: pools by member, and those that wait to be taken in."""

    there: Mapping[int, str]
    waiting: tuple[int, ...] = ()


@final
class Follower:
    """Asks the policy of the run in `folder` for one process.

    now:      seconds since 1970.
    provide:  sees to machines; None: as the policy file says.
    """

    def __init__(
        self,
        folder: Path,
        steps: int,
        *,
        now: Callable[[], float] = time.time,
        provide: Provide | None = None,
    ) -> None:
        self.folder, self.steps, self.now = folder, steps, now
        self.policy = read_policy(folder / POLICY)
        command = self.policy.provision
        own = partial(call, command, folder) if command else partial(start_here, folder)
        self.provide = provide or own
        self._started: list[Started] = []
        self._traces = [GrowingTrace(Path(trace)) for trace in self.policy.traces]
        self._ruler: Ruler | None = None
        self._told: set[str] = set()
        self._next_s = 0.0
        self._leaves = False
        self._before: tuple[float, int, tuple[int, ...]] = 0.0, 0, ()
        self._rates: dict[int, tuple[float, float]] = {}  # steps and seconds, by machines

    @property
    def aim(self) -> RunAim:
        """Return until when the run must be done."""
        return RunAim(self.policy.deadline_h * HOUR_S, self.policy.tick_s)

    @property
    def names(self) -> list[str]:
        """Return pools of preemptible machines and of those on demand, by turns."""
        return [f"{pool}{kind}" for pool in self.policy.pools for kind in ("", ON_DEMAND)]

    def follows(self, seen: RunSeen) -> tuple[bool, Sequence[str]]:
        """Note how the run stands; return whether this member is to leave, and words for people."""
        now = self.now()
        self._measure(seen, now)
        if now < self._next_s:
            return self._leaves, ()
        self._next_s = now + self.policy.tick_s
        words = self._ticked(seen) if seen.is_first else []
        try:
            self._leaves = seen.own in wanted_in(self.folder).leave
        except FleetError as problem:  # somebody has put another file there: the run goes on
            words = [*words, problem.message]
        fresh = [each for each in words if each not in self._told]
        self._told |= {*fresh}
        return self._leaves, fresh

    def _measure(self, seen: RunSeen, now: float) -> None:
        """Count the steps and seconds of this number of machines."""
        before_s, done, members = self._before
        self._before = now, seen.done, seen.view.members
        if members == seen.view.members and seen.done >= done:
            steps, seconds = self._rates.get(len(members), (0.0, 0.0))
            self._rates[len(members)] = steps + seen.done - done, seconds + now - before_s

    def rates(self) -> dict[int, float]:
        """Return steps per second by machines, as measured."""
        known = {n: row for n, row in self._rates.items() if row[0] > 0 and row[1] >= _FEWEST_S}
        return {n: steps / seconds for n, (steps, seconds) in known.items()}

    def _ticked(self, seen: RunSeen) -> list[str]:
        """Decide, and have done what follows; return words for people."""
        first = self.names[0]
        members = (*seen.view.members, *seen.waiting)
        said = {m: seen.where[m].pool for m in members if m in seen.where}
        order = {m: pool if pool in self.names else first for m, pool in said.items()}
        try:
            decided = self.decide(seen.done, MachinesThere(order, seen.waiting))
            words = [*decided.problems]
            for each in decided.orders:
                self._started += self.provide(each)
        except (FleetError, OSError) as problem:
            words = [f"the policy is not followed now: {problem}"]
        ends = [(one, one.poll()) for one in self._started]
        words += [f"{_words_of(one)} ended with {code}: see {LOG}" for one, code in ends if code]
        self._started = [one for one, code in ends if code is None]
        return words

    def decide(self, done: int, machines: MachinesThere) -> Decided:
        """Decide once, and write it down.

        Raises:   FleetError: the traces tell nothing, or have no prices.
        """
        state = wanted_in(self.folder)
        now_s = self.now() - state.begun_s
        markets = [trace.read() for trace in self._traces]
        problems = tuple(trace.problem for trace in self._traces if trace.problem)
        market = _priced(self.policy, so_far(markets, now_s, state.begun_s))
        offered = self._offered(market, now_s)
        held, lost, late = self._held(state, machines, offered, now_s)
        stands = Standing(now_s, float(done), held, self._counts(state, machines))
        job = measured(figures_of(self.policy), float(self.steps), self.rates())
        wanted = wants(self._ruled(), job, market, stands, self.aim)
        new = self._next(state, machines, (held, wanted), stands)
        usd_h = self._usd_h(market, now_s, wanted)
        paid = state.usd + state.usd_h * max(0.0, now_s - state.now_s) / HOUR_S
        new = replace(new, usd=paid, usd_h=usd_h, offered=offered)
        orders: tuple[MachineOrder, ...] = ()
        if not state.pools or lost or late or _wanted(new) != _wanted(state):
            orders = self._orders(held, wanted, state.join)
            after = to_come(self._ruled(), job, market, stands._replace(held=wanted), self.aim)
            figures = {"left_h": _finite(after.hours), "left_usd": after.usd}
            self._tell("wants", new, stands, {**figures, "why": _why(state, new, lost, late)})
            new = replace(new, decided_s=now_s, settled=False)
        self._settled(new, stands)
        return Decided(new, orders, problems)

    def _settled(self, new: Wanted, stands: Standing) -> None:
        """Write what is wanted, and a line if all of it is there now."""
        if not new.settled and all(each.there == each.wanted for each in new.pools):
            self._tell("there", new, stands, {"took_s": stands.now_s - new.decided_s})
            new = replace(new, settled=True)
        write_wanted(self.folder, new)

    def _ruled(self) -> Ruler:
        if self._ruler is None:
            try:
                table = np.load(self.folder / TABLE)
            except (OSError, ValueError) as problem:
                hint = "resume the run with its policy"
                raise FleetError(f"{self.folder / TABLE}: {problem}", hint=hint) from problem
            self._ruler = ruler_from(self.policy.policy, table)
        return self._ruler

    def _offered(self, market: Market, now_s: float) -> dict[str, float]:
        """Return how many machines each pool offers, at most so many as can be held."""
        row = market.row_at(now_s - market.begins_s + 1e-9)
        counts = np.minimum(market.machines[row], MOST_HELD)
        return dict(zip(market.names, map(float, counts), strict=True))

    def _usd_h(self, market: Market, now_s: float, held: Floats) -> float:
        """Return dollars per hour of machines [pool, kind]."""
        row = market.row_at(now_s - market.begins_s + 1e-9)
        sure = np.array([pool.usd_h for pool in market.pools])
        return float(held[:, 0] @ market.usd_h[row] + held[:, 1] @ sure)

    def _counts(self, state: Wanted, machines: MachinesThere) -> Floats:
        """Return the machines that are there and stay: [pool, kind]."""
        here = [pool for member, pool in machines.there.items() if member not in state.leave]
        return np.array([float(here.count(name)) for name in self.names]).reshape(-1, 2)

    def _held(
        self, state: Wanted, machines: MachinesThere, offered: Mapping[str, float], now_s: float
    ) -> tuple[Floats, list[str], list[str]]:
        """Return the machines that were ordered and are not lost, the pools of those that are, and
        those whose machines have not come.

        No more are on their way than are offered.
        """
        before = state.members or {}
        gone = [m for m in before if int(m) not in machines.there and int(m) not in state.leave]
        lost, late = [before[m] for m in gone], list[str]()
        there, held = self._counts(state, machines).ravel(), list[float]()
        known = {each.pool: each for each in state.pools}
        patience_s = max(_LATE_S, 2 * figures_of(self.policy).start_s)
        for name, count in zip(self.names, there, strict=True):
            own = known.get(name, WantedPool(name))
            coming = max(0.0, own.held - lost.count(name) - count)
            if not name.endswith(ON_DEMAND):
                coming = min(coming, max(0.0, offered[name] - count))
            if coming and now_s - own.called_s > patience_s:
                late.append(name)
                coming = 0.0
            held.append(count + coming)
        return np.array(held).reshape(-1, 2), lost, late

    def _next(
        self,
        state: Wanted,
        machines: MachinesThere,
        counts: tuple[Floats, Floats],
        stands: Standing,
    ) -> Wanted:
        """Return what is wanted, with who is to leave: of too many those that came last."""
        held, wanted = (table.ravel() for table in counts)
        there, known = stands.ready.ravel(), {each.pool: each for each in state.pools}
        came = [*filter(machines.there.__contains__, map(int, state.members or {}))]
        came += [member for member in machines.there if member not in came]
        leave, pools = [m for m in state.leave if m in machines.there], list[WantedPool]()
        for at, name in enumerate(self.names):
            own = [m for m in came if machines.there[m] == name and m not in leave]
            own = [m for m in own if m not in machines.waiting] + [
                m for m in own if m in machines.waiting
            ]
            leave += own[int(wanted[at]) :]
            is_called = wanted[at] > held[at]
            called_s = stands.now_s if is_called or name not in known else known[name].called_s
            row = int(wanted[at]), int(wanted[at]), int(min(there[at], wanted[at]))
            pools.append(WantedPool(name, *row, called_s))
        members = {str(member): machines.there[member] for member in came}
        return replace(
            state,
            now_s=stands.now_s,
            step=int(stands.done),
            pools=tuple(pools),
            members=members,
            leave=tuple(leave),
        )

    def _orders(self, held: Floats, wanted: Floats, join: str) -> tuple[MachineOrder, ...]:
        """Return what has to be ordered, and what given back."""
        rows = zip(self.names, held.ravel(), wanted.ravel(), strict=True)
        return tuple(
            MachineOrder(name, int(want), int(have), f"{POOL}={shlex.quote(name)} {join}")
            for name, have, want in rows
            if have != want
        )

    def _tell(self, what: str, state: Wanted, stands: Standing, more: Mapping[str, object]) -> None:
        """Write a line about a decision, or what followed; all that the policy saw is in it."""
        row: dict[str, object] = {
            "time": state.begun_s + state.now_s,
            "now_s": state.now_s,
            "step": state.step,
            "what": what,
            "wanted": _wanted(state),
            "held": dict(zip(self.names, stands.held.ravel().tolist(), strict=True)),
            "ready": dict(zip(self.names, stands.ready.ravel().tolist(), strict=True)),
            "offered": state.offered,
            "leave": list(state.leave),
            "usd": state.usd,
            "usd_h": state.usd_h,
            "deadline_h": self.policy.deadline_h - state.now_s / HOUR_S,
            **more,
        }
        add_line(self.folder / DECISIONS, json.dumps(row))

    # -- who started the run ----------------------------------------------------------------------

    def first_machines(self, done: int, board: "Board", listener: Listener) -> list[str]:
        """Return the pools of the machines with which this process begins, or goes on, once any are
        wanted; until then nobody works.

        All that are wanted, or the first of them where a command provides the others.
        Raises:   Stopped: a signal ends the waiting.  FleetError: the traces tell nothing.
        """
        is_told = False
        while True:
            decided = self.decide(done, MachinesThere({}))
            for problem in {*decided.problems} - self._told:
                listener.say(problem)
            self._told |= {*decided.problems}
            found = [each.pool for each in decided.state.pools for _ in range(each.wanted)]
            if self.policy.provision and found:
                own = pool_here()
                found = [own if own in found else found[0]]
            for each in decided.orders:
                begins = found.count(each.pool)
                if each.wanted > each.held + begins:
                    self._started += self.provide(each._replace(held=each.held + begins))
            if found:
                return found
            if not is_told:
                listener.say(f"the policy wants no machine now: waiting (see {WANTED})")
                is_told = True
            until = self.now() + self.policy.tick_s
            while self.now() < until:
                if board.asked():
                    raise Stopped(board.asked(), "waiting for machines was interrupted")
                time.sleep(min(_LOOK_S, self.policy.tick_s))

    def ended(self, done: int) -> str:
        """Write down that the run is over; return what it cost beside what was predicted."""
        state = wanted_in(self.folder)
        now_s = self.now() - state.begun_s
        usd = state.usd + state.usd_h * max(0.0, now_s - state.now_s) / HOUR_S
        state = replace(state, now_s=now_s, step=done, usd=usd, usd_h=0.0)
        write_wanted(self.folder, state)
        none = np.zeros((len(self.policy.pools), 2))
        self._tell("ended", state, Standing(now_s, float(done), none, none), {})
        rows = decisions_in(self.folder)
        first = next(row for row in rows if row["what"] == "wants")
        left_h = first["left_h"]
        hours = "never" if left_h is None else f"{left_h:.3g} h"
        return (
            f"followed {self.policy.policy}: {usd:.4g} dollars and {now_s / HOUR_S:.3g} h of "
            f"{self.policy.deadline_h:g} h; predicted at first, had the market stayed: "
            f"{first['left_usd']:.4g} dollars and {hours}"
        )


def _wanted(state: Wanted) -> dict[str, int]:
    return {each.pool: each.wanted for each in state.pools}


def _finite(hours: float) -> float | None:
    return hours if hours < math.inf else None


def _why(before: Wanted, now: Wanted, lost: Sequence[str], late: Sequence[str]) -> str:
    """Return what is new at a decision, in words."""
    if not before.pools:
        return "the run begins"
    were, are = before.offered or {}, now.offered or {}
    words = [
        f"{pool} offers {count:g} in place of {were[pool]:g}"
        for pool, count in are.items()
        if pool in were and were[pool] != count
    ]
    words += [f"{lost.count(pool)} of {pool} lost" for pool in dict.fromkeys(lost)]
    words += [f"machines of {pool} have not come" for pool in late]
    return "; ".join(words) or "by the clock, and the steps that are done"


# -- who provides machines -------------------------------------------------------------------------


def call(command: str, folder: Path, order: MachineOrder) -> Sequence[Started]:
    """Call the user's command, which finds in its environment what is wanted."""
    told = {
        POOL: order.pool,
        "PENSTOCK_WANTED": f"{order.wanted}",
        "PENSTOCK_HELD": f"{order.held}",
        "PENSTOCK_JOIN": order.join,
    }
    return [_start(["sh", "-c", command], folder, told)]


def start_here(folder: Path, order: MachineOrder) -> Sequence[Started]:
    """Start processes of this host as machines; those that are not wanted leave by themselves."""
    words = [
        sys.executable,
        "-m",
        "penstock",
        "join",
        str(folder),
        "--yes",
        "--limit",
        f"{_LONG_S}",
    ]
    count = max(0, order.wanted - order.held)
    return [_start(words, folder, {POOL: order.pool}) for _ in range(count)]


def _start(words: Sequence[str], folder: Path, told: Mapping[str, str]) -> Started:
    """Start a process that does not end with this one; what it says goes into a file."""
    with (folder / LOG).open("ab") as log:
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **told},
            start_new_session=True,
        )


def _words_of(started: Started) -> str:
    words = started.args
    return words if isinstance(words, str) else " ".join(map(str, cast("list[str]", words)))
