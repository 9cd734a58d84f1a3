"""Launch: the members of an elastic run as processes of this host, or as threads of this one.

Processes do not die with the one that started them: if that is killed they go on, and the first of
them writes what it would have written.  They end when the run does.
"""

import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, final

import torch

from penstock.elastic.member import GivenUpError, Outside, Pilot, RunMember
from penstock.elastic.mesh import GenerationStore, Mesh, listening, where_of
from penstock.elastic.words import Ask, View, Where, WireError
from penstock.errors import PenstockError, RunError
from penstock.runtime.calls import StepResult
from penstock.runtime.child import let_children_die_with_this
from penstock.runtime.launch import as_json, from_json
from penstock.runtime.transport import Transport
from penstock.runtime.transport.shared_memory import SharedMemoryTransport, host_key
from penstock.runtime.transport.threads import ThreadTransport, thread_transports
from penstock.runtime.worker import RankResult

_MOST_UNREAD = 256  # reports that may be on the way to the process that started the run
_JOIN_S = 30.0  # for which members of a view may take to be ready

Report = Callable[[StepResult], None]
Join = Callable[[View, int, Callable[[], None]], Transport]


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


class Heir(NamedTuple):
    """What a member does when the process that started the run has died, and it is the first.

    report:  takes steps in its place, those that it had already perhaps again.
    finish:  takes what all ranks measured, or None: the run was stopped.
    """

    report: Report
    finish: Callable[[list[RankResult] | None], None]


class Start(NamedTuple):
    """How a run begins: the view of its first generation, a token, and what members ask.

    pilots:  makes the pilot of one member.
    asked:   the number of a signal by which the run is to stop, or 0.
    where:   is told where members listen.
    generations: where members that are threads find each other.
    """

    view: View
    token: bytes
    pilots: Callable[[], Pilot]
    asked: Callable[[], int] = lambda: 0
    where: Callable[[Mapping[int, Where]], None] = lambda where: None
    generations: ThreadGenerations | None = None


# -- processes ------------------------------------------------------------------------------------


def run_members(start: Start, report: Report, heir: Heir) -> list[RankResult] | None:
    """Run the members of a view as forked processes; return what those of the last one measured.

    None where the run was asked to stop.  A member that dies is not the run's end while another
    can go on.
    Raises:   RunError: the job fails, or nobody is left.
    """
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in start.view.members]
    listeners = [listening() for _ in start.view.members]
    key = host_key()
    where = {m: where_of(s, key) for m, s in zip(start.view.members, listeners, strict=True)}
    start.where(where)
    here = random.getstate()
    processes: list[Any] = []
    for number in range(len(pipes)):
        about = start, heir, _Fork(number, where, listeners, pipes, here)
        processes.append(context.Process(target=_child, args=about, daemon=False))
    try:
        for process in processes:
            process.start()
        for end in (*listeners, *(sender for _, sender in pipes)):
            end.close()
        return _supervise(processes, [receiver for receiver, _ in pipes], report)
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
            process.close()
        for receiver, _ in pipes:
            receiver.close()


def _supervise(
    processes: Sequence[Any], pipes: Sequence[Connection], report: Report
) -> list[RankResult] | None:
    """Take what members say until the run is over; those that die are no reason to end it."""
    open_pipes, next_step = dict(enumerate(pipes)), 0
    result: list[RankResult] | None = None
    is_over, lost = False, dict[int, str]()
    while open_pipes:
        for pipe in multiprocessing.connection.wait(list(open_pipes.values())):
            place = next(k for k, each in open_pipes.items() if each is pipe)
            told = _read(pipe)
            if told is None:
                del open_pipes[place]
                processes[place].join()
                lost[place] = f"left with {processes[place].exitcode}"
                continue
            what, content = told
            if what == "step":
                step = StepResult(**content)
                if step.validated is not None or step.step >= next_step:
                    report(step)
                    next_step = max(next_step, step.step + (step.validated is None))
            elif what == "done":
                is_over = True
                if content is not None:
                    result = [from_json(row) for row in content]
            elif what == "error" and not content["given_up"]:
                raise RunError(content["message"], hint=content["hint"])
    if not is_over:
        words = ", ".join(f"member {place} {how}" for place, how in lost.items())
        hint = "--resume continues from the last checkpoint"
        raise RunError(f"no rank is left: {words}", hint=hint)
    return result


def _read(pipe: Any) -> tuple[str, Any] | None:
    try:
        what, content = json.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        return None
    return what, content


@final
class _Parent:
    """The process that started a member: what the first one says to it, or does in its place."""

    def __init__(self, pipe: Connection | None, heir: Heir) -> None:
        self._pipe, self._heir, self._lock = pipe, heir, threading.Lock()
        self._recent: deque[StepResult] = deque(maxlen=_MOST_UNREAD)

    def report(self, step: StepResult) -> None:
        self._recent.append(step)
        if not self._tell("step", asdict(step)):
            while self._recent:  # it may have died before it had read the last of them
                self._heir.report(self._recent.popleft())

    def finish(self, results: list[RankResult] | None, *, is_first: bool) -> None:
        content = None if results is None else [as_json(result) for result in results]
        if not self._tell("done", content if is_first else None) and is_first:
            self._heir.finish(results)

    def fail(self, message: str, hint: str, *, given_up: bool = False) -> None:
        content = {"message": message, "hint": hint, "given_up": given_up}
        if not self._tell("error", content):
            sys.stderr.write(f"error: {message}\nhint: {hint}\n")

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
    """A member that is forked: the how-manieth, where all listen, and pipes to this process."""

    number: int
    where: Mapping[int, Where]
    listeners: Sequence[socket.socket]
    pipes: Sequence[tuple[Connection, Connection]]
    seed: tuple[Any, ...]


def _child(start: Start, heir: Heir, place: _Fork) -> None:
    random.setstate(place.seed)
    let_children_die_with_this()
    os.setpgid(0, 0)  # what ends the process that started it need not end this one
    for number, (receiver, sender) in enumerate(place.pipes):
        receiver.close()
        if number != place.number:
            sender.close()
            place.listeners[number].close()
    torch.set_num_threads(1)
    notice = threading.Event()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: notice.set())  # its machine will go
    own = start.view.members[place.number]
    mesh = Mesh(own, place.listeners[place.number], start.token)
    parent = _Parent(place.pipes[place.number][1], heir)
    live(mesh, place.where, start, parent, leaves=notice.is_set)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # not the parent's exit handlers


def live(
    mesh: Mesh,
    where: Mapping[int, Where],
    start: Start,
    parent: _Parent,
    *,
    leaves: Callable[[], bool] = lambda: False,
) -> None:
    """Live as one member in a process of its own, and say how it ended."""
    join = partial(_shared, mesh)
    member = RunMember(mesh, start.pilots(), Outside(join, parent.report, start.asked, leaves))
    try:
        mesh.start()
        mesh.connect(where)
        results = member.live(start.view)
        if not member.has_left:
            parent.finish(results, is_first=member.is_first)
    except PenstockError as problem:
        parent.fail(problem.message, problem.hint, given_up=isinstance(problem, GivenUpError))
    finally:
        mesh.close()


class Caller(NamedTuple):
    """A newcomer: its lines, where it listens, and the digest of the step that it has traced."""

    mesh: Mesh
    where: Where
    graph: str


def taken_in(caller: Caller, members: Sequence[Where], limit_s: float) -> View:
    """Return the view in which a newcomer is, once the members of a run have taken it in.

    members:  where some of them listen.
    Raises:   RunError: none of them is there, or takes it: it trains another job, is on another
              host, or there is no plan for as many ranks.
    """
    mesh, welcome = caller.mesh, None
    for where in members:
        with contextlib.suppress(WireError):
            welcome = mesh.call(where, Ask(caller.where, caller.graph, ()))
            break
    if welcome is None:
        places = ", ".join(f"{where.host}:{where.port}" for where in members)
        raise RunError(f"no rank of the run answers at {places}", hint="is it still running?")
    if welcome.graph != caller.graph:
        message = f"the run trains graph {welcome.graph}; this process traced {caller.graph}"
        raise RunError(message, hint="have the job file and packages of the run")
    if {where.key for where in welcome.members.values()} != {caller.where.key}:
        raise RunError("the run is on another host", hint="join it on its own host")
    known, until = dict(welcome.members), time.monotonic() + limit_s
    while time.monotonic() < until:
        mesh.connect({**known, mesh.own: caller.where})
        mesh.tell(Ask(caller.where, caller.graph, tuple(known)))
        seen = 0 if mesh.view is None else mesh.view.generation
        mesh.wait(lambda seen=seen: mesh.view is not None and mesh.view.generation > seen, 1.0)
        view = mesh.view
        if view is not None and mesh.own in view.members:
            return view
        if view is not None:
            known = {m: view.where[m] for m in view.members if m in view.where}
    message = f"the run did not take this process in within {limit_s:.0f} s"
    raise RunError(message, hint="it has plans for as many ranks as it began with, and for fewer")


def join(
    caller: Caller,
    members: Sequence[Where],
    pilot: Pilot,
    limit_s: float,
    make: Join | None = None,
) -> int:
    """Be a rank of a run that is under way, to its end; return how many steps there were then.

    make:     makes its end of a transport; default: shared memory.
    Raises:   RunError: it is not taken in; the job fails, or nobody is left.
    """
    mesh = caller.mesh
    member = RunMember(mesh, pilot, Outside(make or partial(_shared, mesh), _unheard))
    mesh.start()
    try:
        member.live(taken_in(caller, members, limit_s))
    finally:
        mesh.close()
    return mesh.done


def _unheard(step: StepResult) -> None:
    """Let a report pass: the members that began the run write it down."""


def _shared(mesh: Mesh, view: View, position: int, news: Callable[[], None]) -> Transport:
    """Return a member's end of a view whose members are all on this host."""
    store = GenerationStore(mesh, view.generation)
    count = len(view.members)
    return SharedMemoryTransport(position, count, store, limit_s=_JOIN_S, news=news)


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
    start.where(where)

    def live_one(number: int) -> None:
        torch.set_num_threads(1)
        mesh = Mesh(number, listeners[number], start.token)
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
            member.leave_transport()

    threads = [threading.Thread(target=live_one, args=(m,), daemon=True) for m in listeners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ended
