"""Launch: the members of an elastic run as processes of this host, or as threads of this one.

Processes do not die with the one that started them: if that is killed they go on.  What all have
to see is written by the first of them.  They end when the run does.
"""

import contextlib
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol, final

import torch

from penstock import _compat
from penstock.errors import PenstockError, RunError
from penstock.files import FULL, NO_ROOM
from penstock.gauge.hosts import place_key
from penstock.members.calling import Caller, newcomer
from penstock.members.ends import Join, joined
from penstock.members.member import GivenUpError, Outside, OverError, Pilot, RunMember
from penstock.members.mesh import Mesh, listening, where_of
from penstock.members.notice import looking
from penstock.members.own_fault import is_own_fault
from penstock.members.words import Ask, Failed, View, Welcome, Where, WireError
from penstock.processes.child import let_children_die_with_this
from penstock.processes.end_with_parent import outlive_parent
from penstock.processes.inherited import be_as_plain
from penstock.processes.spared_readers import spare
from penstock.runtime.calls import StepResult
from penstock.runtime.error_kinds import kind_of, raised_for
from penstock.runtime.worker import RankResult
from penstock.transport.threads import ThreadTransport, thread_transports
from penstock.transport.transport import Transport

LOOPBACK = "127.0.0.1"
_THREAD_SILENT_S = 60.0  # a thread hangs with its whole process, or waits long for the processor
AGAIN_S = 60.0  # for which others may take to let a member in again that they had given up
_CALL_S = 5.0  # for which a newcomer tries to reach all members that it knows of
_ASK_S, _LOOK_S = 1.0, 0.05  # between its questions, and between looks whether it has to go
_ENDS_S = 60.0  # for which others may take once one has said that the run is over

_STEP_FIELDS = tuple(each.name for each in fields(StepResult))

Report = Callable[[StepResult], None]
Places = Mapping[int, Where]


@final
class ThreadGenerations:
    """The transports of members that are threads of one process, by generation."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[ThreadTransport, ...]] = {}
        self._lock = threading.Lock()

    def join(self, view: View, position: int, news: Callable[[], None]) -> Transport:
        """Return the end of one rank of a view."""
        news()
        with self._lock:
            if view.generation not in self._made:
                made = thread_transports(len(view.members), copies=True)
                self._made[view.generation] = made
            return self._made[view.generation][position]


class Scribe(NamedTuple):
    """What the first member does for all: it writes down what has happened.

    report:  takes steps, and validations; some perhaps twice.
    finish:  takes what all ranks measured, or None: the run was stopped.
    """

    report: Report
    finish: Callable[[list[RankResult] | None], None]


class Start(NamedTuple):
    """How a run begins: the view of its first generation, a token, and what members ask.

    pilots:  makes the pilot of one member.
    asked:   the number of a signal by which the run is to stop, or 0.
    notice:  whether this machine will go.
    meet:    takes where the members of this process listen, and returns where all do.
    join:    makes their ends of transports, where they are threads.
    generations: where members that are threads find each other.
    """

    view: View
    token: bytes
    pilots: Callable[[], Pilot]
    asked: Callable[[], int] = lambda: 0
    notice: Callable[[], bool] = lambda: False
    meet: Callable[[Places], Places] = lambda where: where
    join: Join | None = None
    generations: ThreadGenerations | None = None


NOBODY = View(0, 0, "", ())  # of who joins others


class Here(NamedTuple):
    """The members that this process starts; None: all.  They listen at `address`.

    pools:   of which their machines are, as far as they say.
    """

    members: tuple[int, ...] | None = None
    address: str = LOOPBACK
    pools: Mapping[int, str] = {}


ALL_HERE = Here()

# -- processes ------------------------------------------------------------------------------------


class NobodyLeftError(RunError):
    """All members that this process has started are dead, and they were all that there were."""


def run_members(start: Start, report: Report, scribe: Scribe, here: Here = ALL_HERE) -> bool:
    """Run members of a view as forked processes; return whether the run is over.

    It is not where those of other processes may go on.
    report:  is called in this process with steps of which a member here was the first.
    Raises:   RunError: the job fails.  NobodyLeftError: who has joined since may go on.
    """
    context = multiprocessing.get_context("fork")
    _compat.let_sockets_have_no_files()
    own = start.view.members if here.members is None else here.members
    listeners = {member: listening(here.address) for member in own}
    key = place_key()
    told = {m: where_of(end, key, here.pools.get(m, "")) for m, end in listeners.items()}
    where = start.meet(told)
    pipes = {member: context.Pipe(duplex=False) for member in own}
    state = random.getstate()
    processes: dict[int, Any] = {}
    for member in own:
        about = start, scribe, _Fork(member, where, listeners, pipes, state)
        processes[member] = context.Process(target=_child, args=about, daemon=False)
    try:
        for process in processes.values():
            process.start()
        for end in (*listeners.values(), *(sender for _, sender in pipes.values())):
            end.close()
        receivers = {member: receiver for member, (receiver, _) in pipes.items()}
        is_over, lost = _supervise(processes, receivers, report)
    finally:
        for process in processes.values():
            if process.pid is not None:
                process.kill()
                process.join()
            process.close()
        for receiver, _ in pipes.values():
            receiver.close()
    if not is_over and {*own} == {*start.view.members}:
        words = ", ".join(f"member {member} {how}" for member, how in lost.items())
        hint = "resume=True continues from the last checkpoint"
        raise NobodyLeftError(f"no rank is left: {words}", hint=hint)
    return is_over


def _supervise(
    processes: Mapping[int, Any], pipes: Mapping[int, Connection], report: Report
) -> tuple[bool, dict[int, str]]:
    """Take what members say until all have ended; those that die are no reason to end the others.

    Return whether one said that the run is over, and how the others ended.  Then it waits a while
    for those that are left: one may sleep in its own code that the others had gone on without.
    Raises:   RunError: the job fails.
    """
    open_pipes, next_step = dict(pipes), 0
    over_s, lost = math.inf, dict[int, str]()
    while open_pipes:
        left_s = None if over_s == math.inf else max(0.0, over_s + _ENDS_S - time.monotonic())
        ready = multiprocessing.connection.wait(list(open_pipes.values()), left_s)
        if not ready:
            break
        for pipe in ready:
            member = next(m for m, each in open_pipes.items() if each is pipe)
            told = _read(pipe)
            if told is None:
                del open_pipes[member]
                processes[member].join()
                lost[member] = f"left with {processes[member].exitcode}"
                continue
            what, content = told
            if what == "step":
                step = StepResult(**content)
                if step.validated is not None or step.step >= next_step:
                    report(step)
                    next_step = max(next_step, step.step + (step.validated is None))
            elif what == "done":
                over_s = min(over_s, time.monotonic())
            elif what == "say":
                sys.stderr.write(f"member {member}: {content}\n")
            elif what == "error":
                raise raised_for(content["kind"])(content["message"], hint=content["hint"])
    return over_s < math.inf, lost


def _read(pipe: Any) -> tuple[str, Any] | None:
    try:
        what, content = json.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        return None
    return what, content


@final
class _Parent:
    """The process that started a member: what is said to it, if it is there."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe: Connection | None = pipe
        self._lock = threading.Lock()

    def report(self, step: StepResult) -> None:
        self._tell("step", {name: getattr(step, name) for name in _STEP_FIELDS})

    def say(self, words: str) -> None:
        if not self._tell("say", words):
            sys.stderr.write(f"{words}\n")

    def finish(self) -> None:
        self._tell("done", None)

    def fail(self, problem: PenstockError) -> None:
        known = as_job_fails(problem)
        about = {"message": known.message, "hint": known.hint, "kind": kind_of(known)}
        if not self._tell("error", about):
            sys.stderr.write(f"error: {known.message}\nhint: {known.hint}\n")

    def _tell(self, what: str, content: Any) -> bool:
        """Return whether the parent took it."""
        with self._lock:
            if self._pipe is None:
                return False
            try:
                self._pipe.send_bytes(json.dumps([what, content]).encode())
            except (BrokenPipeError, OSError):
                self._pipe = None
        return self._pipe is not None


class _Fork(NamedTuple):
    """A member that is forked: its number, where all listen, and pipes to this process."""

    member: int
    where: Places
    listeners: Mapping[int, socket.socket]
    pipes: Mapping[int, tuple[Connection, Connection]]
    seed: tuple[Any, ...]


def _child(start: Start, scribe: Scribe, place: _Fork) -> None:
    be_as_plain()
    random.setstate(place.seed)
    let_children_die_with_this()
    outlive_parent()
    os.setsid()  # what ends the process that started it need not end this one
    for member, (receiver, sender) in place.pipes.items():
        receiver.close()
        if member != place.member:
            sender.close()
            place.listeners[member].close()
    torch.set_num_threads(1)
    notice = threading.Event()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: notice.set())  # its machine will go
    spare()
    told = start.notice
    start = start._replace(notice=lambda: notice.is_set() or told())
    mesh = Mesh(place.member, place.listeners[place.member], start.token)
    live(mesh, start, place.where, scribe, _Parent(place.pipes[place.member][1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # not the parent's exit handlers


def as_job_fails(problem: PenstockError) -> RunError:
    """Return what a member's error is for whoever has begun it."""
    return raised_for(kind_of(problem))(problem.message, hint=problem.hint)


class Starter(Protocol):
    """Whoever has begun a member, as it sees that."""

    def report(self, step: StepResult) -> None:
        """Take a step, or a validation."""
        ...

    def say(self, words: str) -> None:
        """Take words for people."""
        ...

    def finish(self) -> None:
        """Learn that the run is over."""
        ...

    def fail(self, problem: PenstockError) -> None:
        """Learn that the job fails."""
        ...


def live(mesh: Mesh, start: Start, where: Places, scribe: Scribe, parent: Starter) -> None:
    """Live as one member in a process of its own, and say how it ended."""

    def report(step: StepResult) -> None:
        scribe.report(step)
        parent.report(step)

    def begin() -> View:
        mesh.connect(where, gives_up=True)
        return start.view

    try:
        with looking(parent.say) as told:
            own = start._replace(notice=lambda: start.notice() or told())
            if _life(mesh, begin, own, Scribe(report, scribe.finish), parent.say).is_over:
                parent.finish()
    except PenstockError as problem:
        parent.fail(problem)


class Lived(NamedTuple):
    """How a member has ended: whether the run is over, and after how many steps that was."""

    is_over: bool
    done: int


def _life(
    mesh: Mesh, begin: Callable[[], View], start: Start, scribe: Scribe, say: Callable[[str], None]
) -> Lived:
    """Live as one member, to the end of the run, or until it has to go.

    begin:   returns the first view, once there are lines to all of it.
    One that the others have given up - it was stopped for a while, or a line was cut - joins them
    again, as a newcomer with another number.
    """
    while True:
        own, pilot = mesh, start.pilots()
        join = start.join or partial(joined, own)
        member = RunMember(own, pilot, Outside(join, scribe.report, start.asked, start.notice, say))
        try:
            own.start()
            results = member.live(begin())
            if not member.has_left:
                _finish(own, member, scribe, results)
                return Lived(True, own.done)
            if member.leaves:
                return Lived(False, own.done)
        except GivenUpError as problem:
            say(problem.message)
        except _StaysOutError as problem:
            say(problem.message)
            return Lived(False, own.done)
        except OverError as problem:
            say(problem.message)
            return Lived(True, own.done)
        except PenstockError:
            raise
        except Exception as problem:
            if is_own_fault(problem) and len(own.members) > 1:
                words = f"{type(problem).__name__}: {problem}"
                say(f"{words}: this rank leaves, the others go on")
                return Lived(False, own.done)
            raise _failed(own, problem) from problem
        finally:
            own.close()
            member.close()
        caller = newcomer(own.where[own.own], start.token, pilot.graph)
        say("joining them again")
        others = tuple(where for number, where in own.where.items() if number != own.own)
        mesh, begin = caller.mesh, partial(_again, caller, others, start.notice)


def _failed(mesh: Mesh, problem: Exception) -> RunError:
    """Tell the others why the run fails; return what is raised here."""
    if isinstance(problem, OSError) and problem.errno in FULL:
        words = f"cannot write {problem.filename or _place_of(problem)}: {problem.strerror}"
        mesh.tell(Failed(words, NO_ROOM))
        return RunError(words, hint=NO_ROOM)
    words = f"{type(problem).__name__}: {problem}"
    mesh.tell(Failed(words, ""))
    return RunError(f"{words}\n{traceback.format_exc()}")


def _place_of(problem: OSError) -> str:
    """Return where a file without a name was to be written, as shared memory is."""
    (place,) = traceback.extract_tb(problem.__traceback__)[-1:]
    return f"memory or a file at {place.filename}:{place.lineno}"


class _StaysOutError(RunError):
    """One that asks to be taken in has to go, or had been given up, and is not taken in again."""


def _again(caller: "Caller", members: Sequence[Where], leaves: Callable[[], bool]) -> View:
    try:
        return taken_in(caller, members, AGAIN_S, leaves)
    except RunError as problem:
        raise _StaysOutError(problem.message, hint=problem.hint) from problem


def _finish(
    mesh: Mesh, member: RunMember, scribe: Scribe, results: list[RankResult] | None
) -> None:
    """Return once what is written at the end is there: the first member that lives writes it."""
    view = member.last_view
    before = [other for other in view.members if other < mesh.own]
    mesh.wait(lambda: all(other in mesh.lost for other in before))
    if not any(mesh.lost.get(other) == "left" for other in before):
        scribe.finish(results)


# -- newcomers ------------------------------------------------------------------------------------


def taken_in(
    caller: Caller,
    members: Sequence[Where],
    limit_s: float,
    leaves: Callable[[], bool] = lambda: False,
) -> View:
    """Return the view in which a newcomer is, once the members of a run have taken it in.

    members:  where some of them listen.
    leaves:   whether it has to go, whatever it waits for.
    Raises:   RunError: none of them is there, or takes it: it trains another job, or there is no
              plan for as many ranks; it has to go.
    """
    mesh = caller.mesh
    known = dict(_welcomed(caller, members, leaves).members)
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        if caller.in_vain():
            raise _StaysOutError("the run is over, or needs no more ranks")
        with contextlib.suppress(WireError):  # one is dead, and another view will say so
            mesh.connect({**known, mesh.own: caller.where}, limit_s=_ASK_S, calls=True)
        mesh.tell(Ask(caller.where, caller.graph, tuple(mesh.members & {*known})))
        view = _next_view(mesh, leaves)
        if view is not None and mesh.own in view.members:
            together = {m: view.where[m] for m in view.members}  # others that came with it
            mesh.connect(together, limit_s=_CALL_S, gives_up=True)
            return view
        if leaves():
            raise _StaysOutError("this process has to go, and the run had not taken it in")
        if view is not None:
            known = {m: view.where[m] for m in view.members if m in view.where}
    message = f"the run did not take this process in within {limit_s:.0f} s"
    raise RunError(message, hint="it has plans for as many ranks as it began with, and for fewer")


def _welcomed(caller: Caller, members: Sequence[Where], leaves: Callable[[], bool]) -> Welcome:
    """Return what the first member that answers tells.

    Raises:   RunError: as `taken_in`.
    """
    for where in members:
        with contextlib.suppress(WireError):
            welcome = caller.mesh.call(where, Ask(caller.where, caller.graph, ()))
            if welcome.graph == caller.graph:
                return welcome
            message = f"the run trains graph {welcome.graph}; this process traced {caller.graph}"
            raise RunError(message, hint="have the job file and packages of the run")
        if leaves():
            raise _StaysOutError("this process has to go, and no rank of the run has answered")
    places = ", ".join(f"{where.host}:{where.port}" for where in members)
    raise RunError(f"no rank of the run answers at {places}", hint="is it still running?")


def _next_view(mesh: Mesh, leaves: Callable[[], bool]) -> View | None:
    """Return the newest view, as soon as there is another one, this process has to go, or soon."""
    seen = 0 if mesh.view is None else mesh.view.generation
    until = time.monotonic() + _ASK_S
    while time.monotonic() < until and not leaves():
        if mesh.wait(lambda: mesh.view is not None and mesh.view.generation > seen, _LOOK_S):
            break
    return mesh.view


def join(
    caller: Caller,
    members: Sequence[Where],
    start: Start,
    scribe: Scribe,
    say: Callable[[str], None],
    limit_s: float,
) -> Lived:
    """Be a rank of a run that is under way, to its end, or until this machine has to go.

    members:  where some of its ranks listen.
    limit_s:  for which to wait to be taken in.
    Raises:   RunError: it is not taken in; the job fails, or nobody is left.
    """
    with looking(say) as told:
        own = start._replace(notice=lambda: start.notice() or told())
        begin = partial(taken_in, caller, members, limit_s, own.notice)
        return _life(caller.mesh, begin, own, scribe, say)


# -- threads --------------------------------------------------------------------------------------


class Ended(NamedTuple):
    """How a member that is a thread has ended: with results, by an error, or by being killed."""

    results: list[RankResult] | None
    problem: BaseException | None
    is_first: bool


def run_threads(
    start: Start,
    report: Report,
    *,
    killed: Callable[[int, RunMember], contextlib.AbstractContextManager[None]] | None = None,
) -> dict[int, Ended]:
    """Run the members of a view as threads; return how each of them ended.

    killed:   is entered by each member with its number; what it raises inside kills the member as
              SIGKILL would: its lines end without a word.
    """
    made, ended = start.generations or ThreadGenerations(), dict[int, Ended]()
    listeners = {member: listening() for member in start.view.members}
    where = {member: where_of(end, "threads") for member, end in listeners.items()}
    start.meet(where)

    def live_one(number: int) -> None:
        torch.set_num_threads(1)
        mesh = Mesh(number, listeners[number], start.token, silent_s=_THREAD_SILENT_S)
        outside = Outside(made.join, report, start.asked)
        member = RunMember(mesh, start.pilots(), outside)
        mesh.start()
        try:
            mesh.connect(where)
            with killed(number, member) if killed else contextlib.nullcontext():
                found = member.live(start.view)
            ended[number] = Ended(found, None, member.is_first)
            mesh.close()
        except PenstockError as problem:
            ended[number] = Ended(None, problem, is_first=False)
            mesh.close()
        except BaseException as problem:  # noqa: BLE001 - it is killed
            ended[number] = Ended(None, problem, is_first=False)
            mesh.drop()
            member.drop()
        member.close()

    threads = [threading.Thread(target=live_one, args=(m,), daemon=True) for m in listeners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ended
