"""Launch: the ranks of a run as threads, as forked processes, or as started by torchrun.

Whatever fails on one rank ends all of them at once, with that rank's error.  Processes never
outlive the run: the parent kills them, and the kernel does if the parent dies.  The same holds for
the processes that a rank forks to read its data.
"""

import contextlib
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

from penstock import _compat
from penstock.checkpoints.saver import Saves
from penstock.device import here
from penstock.errors import PenstockError, RunError
from penstock.job import exit_words
from penstock.processes.child import death_of, join, let_children_die_with_this
from penstock.processes.end_with_parent import die_with
from penstock.processes.inherited import be_as_plain
from penstock.processes.spared_readers import spare
from penstock.processes.stuck_forks import StuckWatch
from penstock.profile.noise import NoiseTold
from penstock.runtime.calls import StepResult
from penstock.runtime.error_kinds import kind_of, raised_for
from penstock.runtime.finite import NotFiniteError
from penstock.runtime.left_steps import has_left
from penstock.runtime.sampler import Samples
from penstock.runtime.worker import RankResult, Report
from penstock.timeline.spans import Held, Span
from penstock.timeline.spent import Spent
from penstock.transport.groups import world_of
from penstock.transport.shared_memory import SharedMemoryTransport, available
from penstock.transport.threads import thread_transports
from penstock.transport.torch_distributed import TorchDistributedTransport
from penstock.transport.transport import Transport, TransportError
from penstock.typed import typed

_CONNECT_S = 600.0  # for which ranks of torchrun may take until all are connected

T = TypeVar("T")
Groups = Sequence[tuple[int, ...]]
Work = Callable[[Transport, Report], RankResult]


class Launcher(Protocol):
    """What runs ranks and returns what they return, in order; `groups` as in `run_processes`."""

    def __call__(
        self, work: Work, num_ranks: int, report: Report, *, groups: Groups = ()
    ) -> list[RankResult]: ...


_FileStore: Any = dist.FileStore  # pyright: ignore[reportPrivateImportUsage]
_PrefixStore: Any = dist.PrefixStore  # pyright: ignore[reportPrivateImportUsage]
_rendezvous: Any = dist.rendezvous  # pyright: ignore


def run_threads(
    work: Work, num_ranks: int, report: Report, *, groups: Groups = ()
) -> list[RankResult]:
    """Run every rank as a thread of this process.

    Raises:   RunError: a rank failed; the others have ended when this is raised.
    """
    transports = thread_transports(num_ranks)
    results: dict[int, RankResult] = {}
    failures: list[tuple[int, BaseException]] = []
    reporting = threading.Lock()

    def tell(step: StepResult) -> None:
        if failures:
            raise TransportError(failures[0][0], "failed")
        with reporting:
            report(step)

    def live(transport: Transport) -> None:
        torch.set_num_threads(1)  # a setting of each thread, as the device that is current
        here().enter()
        try:
            results[transport.rank] = work(transport, tell)
        except BaseException as problem:  # noqa: BLE001 - carried to the caller's thread below
            failures.append((transport.rank, problem))
            transport.abort(str(problem))
        finally:
            transport.close()
            ended[transport.rank].set()

    ended = [threading.Event() for _ in transports]
    threads = [_named_as_main(partial(live, end)) for end in transports]
    try:
        _live_together(threads, ended)
    except BaseException as problem:  # Ctrl-C, as a rule
        failures.append((0, problem))
        for transport in transports:
            transport.abort("interrupted")
        _wait([(t, end) for t, end in zip(threads, ended, strict=True) if t.ident is not None])
        raise
    if failures:
        raise _first_cause(failures)
    return [results[rank] for rank in range(num_ranks)]


def _named_as_main(call: Callable[[], None]) -> threading.Thread:
    """Return a thread that has the name by which the job's code knows its own from a plain run."""
    return threading.Thread(target=call, name=threading.main_thread().name, daemon=True)


def _live_together(threads: Sequence[threading.Thread], ended: Sequence[threading.Event]) -> None:
    for thread in threads:
        thread.start()
    _wait(list(zip(threads, ended, strict=True)))


def _wait(threads: Sequence[tuple[threading.Thread, threading.Event]]) -> None:
    """Wait until all have ended.

    Ctrl-C in a `join` may mark a thread that still runs as stopped, and a later one not wait.
    """
    for _, ended in threads:
        ended.wait()
    for thread, _ in threads:
        join(thread)


def _first_cause(failures: Sequence[tuple[int, BaseException]]) -> RunError:
    """Return the error of the rank that failed by itself, not of those that noticed."""
    own = [(r, p) for r, p in failures if not isinstance(p, TransportError)]
    rank, problem = (own or list(failures))[0]
    error = _rank_error(rank, _problem_as_json(problem))
    error.__cause__ = problem
    return error


def local_launcher(num_ranks: int) -> Callable[..., list[RankResult]]:
    """Return what runs `num_ranks` ranks on this host: processes, or on one GPU a thread.

    Raises:   RunError: several GPUs, whose processes torchrun has to start.
    """
    if here().can_fork:
        return run_processes
    if num_ranks > 1:
        hint = f"torchrun --nproc-per-node {num_ranks} -m penstock train ..."
        raise RunError(f"{num_ranks} ranks on GPUs need a process each, started afresh", hint=hint)
    return run_threads


# -- processes ------------------------------------------------------------------------------------

Pipes = Sequence[tuple[Connection, Connection]]


def run_processes(
    work: Work, num_ranks: int, report: Report, *, groups: Groups = ()
) -> list[RankResult]:
    """Run every rank as a forked process of this host, one thread each.

    groups:   the sets of ranks that will sum or gather; gloo connects them beforehand.

    Raises:   RunError: a rank failed or died; the others are gone when this is raised.
    """
    context = multiprocessing.get_context("fork")
    _compat.let_sockets_have_no_files()
    pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
    stores = os.memfd_create("penstock store"), os.memfd_create("penstock watch")
    join = partial(_host_transport, num_ranks=num_ranks, stores=stores, groups=groups)
    here = os.getpid(), random.getstate()
    watches = [StuckWatch() for _ in range(num_ranks)]
    processes = [
        context.Process(target=_child, args=(work, rank, join, pipes, (*here, watch)), daemon=True)
        for rank, watch in enumerate(watches)
    ]
    try:
        for process in processes:
            process.start()  # 7 in docs/architecture.md
        for _, sender in pipes:
            sender.close()
        return _supervise(processes, [receiver for receiver, _ in pipes], report, watches)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
        for process in processes:
            if process.pid is not None:
                process.join()
            process.close()
        for end in itertools.chain(*pipes):
            end.close()
        for store in stores:
            os.close(store)
        for watch in watches:
            watch.close()


def _child(
    work: Work,
    rank: int,
    join: Callable[[int], Transport],
    pipes: Pipes,
    parent: tuple[int, tuple[Any, ...], StuckWatch],
) -> None:
    die_with(parent[0])
    parent[2].begin()
    be_as_plain()
    random.setstate(parent[1])  # Python seeds it anew in a fork, as numpy and torch do not
    let_children_die_with_this()
    _leave_signals_to_the_parent()
    for number, (receiver, sender) in enumerate(pipes):
        receiver.close()
        if number != rank:
            sender.close()
    pipe = pipes[rank][1]
    torch.set_num_threads(1)
    with contextlib.suppress(BrokenPipeError):
        try:
            transport = join(rank)
            result = work(transport, lambda step: _tell(pipe, "step", asdict(step)))
            _tell(pipe, "done", as_json(result))
            transport.close()
        except BaseException as problem:  # noqa: BLE001 - the parent raises it again
            _tell(pipe, "error", _problem_as_json(problem))
    pipe.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # not the parent's exit handlers


def _leave_signals_to_the_parent() -> None:
    """Let this rank, and what reads its data, survive a signal to the whole group.

    The parent stops it by a word between steps, or kills it; a program that it starts is ended.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    spare()


def _host_transport(
    rank: int, *, num_ranks: int, stores: tuple[int, int], groups: Groups
) -> Transport:
    """Return the rank's end; `stores` are files without a name, so nothing is ever left of them."""
    store, watch = (_FileStore(f"/proc/self/fd/{fd}", num_ranks) for fd in stores)
    if available()[0]:
        return SharedMemoryTransport(rank, num_ranks, store)
    limit = timedelta(minutes=10)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=limit)
    return TorchDistributedTransport(torch.device("cpu"), watch, groups=groups)


def _tell(pipe: Connection, what: str, content: Any) -> None:
    pipe.send_bytes(json.dumps([what, content]).encode())


def as_json(result: RankResult) -> dict[str, Any]:
    return {
        **{name: getattr(result, name) for name in ("rank", "peak_bytes", "window_s", "typical_s")},
        "spans": [list(span) for span in result.spans],
        "memory": [list(held) for held in result.memory],
        "versions": list(result.versions.items()),
        "spent": None if result.spent is None else asdict(result.spent),
        "samples": None if result.samples is None else asdict(result.samples),
        "saves": asdict(result.saves),
        "noise": asdict(result.noise),
        "held": dict(result.held),
    }


def from_json(content: dict[str, Any]) -> RankResult:
    return RankResult(
        rank=content["rank"],
        spans=tuple(Span(*row) for row in content["spans"]),
        memory=tuple(Held(*row) for row in content["memory"]),
        peak_bytes=content["peak_bytes"],
        window_s=tuple(content["window_s"]),
        typical_s=content["typical_s"],
        versions={int(stage): count for stage, count in content["versions"]},
        spent=None if content["spent"] is None else typed(Spent, content["spent"]),
        samples=None if content["samples"] is None else typed(Samples, content["samples"]),
        saves=typed(Saves, content["saves"]),
        noise=typed(NoiseTold, content["noise"]),
        held=content["held"],
    )


def _problem_as_json(problem: BaseException) -> dict[str, Any]:
    if isinstance(problem, SystemExit):
        message, hint = exit_words(problem)
        problem = RunError(message, hint=hint)
    known = isinstance(problem, PenstockError)
    return {
        "message": problem.message if known else f"{type(problem).__name__}: {problem}",
        "hint": problem.hint if known else "",
        "trace": "" if known else "".join(traceback.format_exception(problem)),
        "follows": isinstance(problem, TransportError),
        "lingers": isinstance(problem, NotFiniteError) or has_left(),
        "kind": kind_of(problem),
    }


_STUCK_LOOK_S = 2.0
_LINGER_S = 20.0  # for which a number that is not finite lets the other ranks go on


def _supervise(
    processes: Sequence[Any],
    pipes: Sequence[Connection],
    report: Report,
    watches: Sequence[StuckWatch],
) -> list[RankResult]:
    """Read what ranks report until all are done; raise as soon as one fails, dies or is stuck."""
    results: dict[int, RankResult] = {}
    causes: list[tuple[int, dict[str, Any]]] = []
    followers: list[tuple[int, dict[str, Any]]] = []
    open_pipes = dict(enumerate(pipes))
    while open_pipes:
        wait_s = _LINGER_S if causes else 1.0 if followers else _STUCK_LOOK_S
        ready = multiprocessing.connection.wait(list(open_pipes.values()), timeout=wait_s)
        if not ready and not causes and not followers:
            _check_stuck({rank: processes[rank].pid for rank in open_pipes}, watches)
            continue
        if not ready:
            raise _rank_error(*[*causes, *followers][0])
        for rank, pipe in [(r, p) for r, p in open_pipes.items() if p in ready]:
            told = _read(pipe)
            if told is None:
                del open_pipes[rank]
                if rank not in results and rank not in dict([*causes, *followers]):
                    raise _death(rank, processes[rank])
                continue
            what, content = told
            if what == "step":
                report(StepResult(**content))
            elif what == "done":
                results[rank] = from_json(content)
            elif content["follows"]:  # another rank will say what happened
                followers.append((rank, content))
            elif content["lingers"]:  # the others write down what they hold
                causes.append((rank, content))
            else:
                raise _rank_error(rank, content)
    if causes or followers:
        raise _rank_error(*[*causes, *followers][0])
    return [results[rank] for rank in range(len(processes))]


def _check_stuck(pids: Mapping[int, int], watches: Sequence[StuckWatch]) -> None:
    for rank, pid in pids.items():
        if watches[rank].is_stuck(pid):
            raise RunError(f"rank {rank} {watches[rank].words(pid)}")


def _read(pipe: Connection) -> tuple[str, Any] | None:
    try:
        what, content = json.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        return None
    return what, content


def _rank_error(rank: int, content: dict[str, Any]) -> RunError:
    trace = f"\n{content['trace']}" if content["trace"] else ""
    error = raised_for(content["kind"])
    return error(f"rank {rank} failed: {content['message']}{trace}", hint=content["hint"])


def _death(rank: int, process: Any) -> RunError:
    process.join(timeout=5.0)
    return death_of(f"rank {rank}", process.exitcode)


# -- torchrun -------------------------------------------------------------------------------------


def torchrun_store() -> Any:
    """Return the store that all ranks of this torchrun job share."""
    store, _, _ = next(iter(_rendezvous("env://")))
    return store


def under(store: Any, name: str) -> Any:
    """Return `store` with its keys under `name`: no other use of it sees them."""
    return _PrefixStore(name, store)


def on_one_host() -> bool:
    """Return whether all ranks of this torchrun job are on this host."""
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]


class HostWay(NamedTuple):
    """How ranks that torchrun started reach each other.

    address:  of this host, as the others reach it; "": where gloo finds it.
    news:     is asked while others are waited for, and raises to end that.
    """

    address: str = ""
    news: Callable[[], None] = lambda: None


ANY_WAY = HostWay()


def run_torchrun(
    work: Work,
    store: Any,
    report: Report,
    *,
    groups: Groups = (),
    rank: int | None = None,
    way: HostWay = ANY_WAY,
) -> RankResult:
    """Run the rank that this process is; every rank of the torchrun job calls it.

    Ranks of one host exchange messages through shared memory, else over gloo or NCCL.
    `store` is that of `torchrun_store`, with a prefix of its own for each call.
    rank:  which one it is, where that is not its number under torchrun.
    """
    return join_torchrun(lambda end: work(end, report), store, groups=groups, rank=rank, way=way)


def join_torchrun(
    call: Callable[[Transport], T],
    store: Any,
    *,
    groups: Groups = (),
    rank: int | None = None,
    way: HostWay = ANY_WAY,
) -> T:
    """Return what `call` returns on the rank that this process is; as `run_torchrun`."""
    number = int(os.environ["RANK"]) if rank is None else rank
    let_children_die_with_this()
    transport = _torchrun_transport(number, store, groups, way)
    try:
        return call(transport)
    except BaseException as problem:
        transport.abort(str(problem) or type(problem).__name__)
        raise
    finally:
        transport.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _torchrun_transport(rank: int, store: Any, groups: Groups, way: HostWay) -> Transport:
    num_ranks, device = int(os.environ["WORLD_SIZE"]), here()
    if on_one_host() and device.is_cpu and available()[0]:
        own = _PrefixStore("shared", store)
        return SharedMemoryTransport(rank, num_ranks, own, limit_s=_CONNECT_S, news=way.news)
    found, watch = _PrefixStore("groups", store), _PrefixStore("watch", store.clone())
    if not device.is_cpu:
        device.enter()
        dist.init_process_group(device.backend, store=found, rank=rank, world_size=num_ranks)
        return TorchDistributedTransport(device.place, watch, groups=groups)
    world = world_of(
        (rank, num_ranks),
        found,
        address=way.address,
        device=device.place,
        limit_s=_CONNECT_S,
        news=way.news,
    )
    return TorchDistributedTransport(device.place, watch, groups=groups, world=world)
