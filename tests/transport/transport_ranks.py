"""Ranks for the transport tests: each runs a body with its own end and hands back a value."""

import json
import os
import select
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from penstock.transport import Transport
from penstock.transport.groups import Prefixed, world_of
from penstock.transport.several_hosts import HostsTransport, spanning
from penstock.transport.shared_memory import SharedMemoryTransport
from penstock.transport.threads import thread_transports
from penstock.transport.torch_distributed import TorchDistributedTransport

LIMIT_S = 100.0
Body = Callable[[Transport], object]


class Outcome(NamedTuple):
    value: object = None  # what the body returned, as JSON gives it back
    error: str = ""  # "TransportError: ...", of what it raised
    signal: int = 0  # what killed the process


def run_threads(num_ranks: int, body: Body, **options) -> list[Outcome]:
    outcomes = [Outcome()] * num_ranks

    def run(end: Transport) -> None:
        outcomes[end.rank] = _outcome(lambda: body(end))

    ends = thread_transports(num_ranks, **options)
    threads = [threading.Thread(target=run, args=(end,), daemon=True) for end in ends]
    for thread in threads:
        thread.start()
    until = time.monotonic() + LIMIT_S
    for thread in threads:
        thread.join(max(0, until - time.monotonic()))
    hanging = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    for end in ends:
        end.abort("the test is over")
    assert not hanging, f"ranks {hanging} hang"
    return outcomes


def run_shared_memory(num_ranks: int, body: Body, **options) -> list[Outcome]:
    def build(rank: int, store: dist.Store) -> Transport:
        return SharedMemoryTransport(rank, num_ranks, store, **{"limit_s": LIMIT_S} | options)

    return _run_processes(num_ranks, build, body)


def run_gloo(num_ranks: int, body: Body, **options) -> list[Outcome]:
    """Run ranks over gloo; without `groups`, any set of them can sum."""
    counts = range(2, num_ranks + 1)
    sets = [each for count in counts for each in combinations(range(num_ranks), count)]
    options.setdefault("groups", sets)

    def build(rank: int, store: dist.Store) -> Transport:
        world = dist.PrefixStore("world", store)
        dist.init_process_group("gloo", store=world, rank=rank, world_size=num_ranks)
        mine = dist.PrefixStore("transport", store.clone())
        return TorchDistributedTransport(torch.device("cpu"), mine, **options)

    return _run_processes(num_ranks, build, body)


def run_hosts(num_ranks: int, body: Body, **options) -> list[Outcome]:
    """Run ranks as if they were of two hosts, the even ones and the odd ones."""
    counts = range(2, num_ranks + 1)
    sets = [each for count in counts for each in combinations(range(num_ranks), count)]
    options.setdefault("groups", sets)
    groups = options.pop("groups")

    def build(rank: int, store: dist.Store) -> Transport:
        here, cpu = tuple(range(rank % 2, num_ranks, 2)), torch.device("cpu")
        own = Prefixed(store, "groups")
        about = {"address": "127.0.0.1", "device": cpu, "limit_s": LIMIT_S}
        world, spans = world_of((rank, num_ranks), own, **about), spanning(groups, here)
        watch = dist.PrefixStore("watch", store.clone())
        between = TorchDistributedTransport(cpu, watch, groups=spans, world=world, **options)
        inside = Prefixed(store, f"inside {rank % 2}")
        shared = SharedMemoryTransport(
            rank, num_ranks, inside, here=here, limit_s=LIMIT_S, **options
        )
        return HostsTransport(shared, between, here)

    return _run_processes(num_ranks, build, body)


RUNNERS = {
    "threads": run_threads,
    "shared_memory": run_shared_memory,
    "gloo": run_gloo,
    "hosts": run_hosts,
}


def values(outcomes: list[Outcome]) -> list[object]:
    """Return what the bodies returned; none of them may have failed."""
    for rank, outcome in enumerate(outcomes):
        assert outcome._replace(value=None) == Outcome(), f"rank {rank}: {outcome}"
    return [outcome.value for outcome in outcomes]


def errors(outcomes: list[Outcome]) -> list[str]:
    return [outcome.error.splitlines()[0] if outcome.error else "" for outcome in outcomes]


def _run_processes(num_ranks, build, body: Body) -> list[Outcome]:
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_fork(rank, num_ranks, folder, build, body) for rank in range(num_ranks)]
        until = time.monotonic() + LIMIT_S
        hanging = [rank for rank, (pid, _) in enumerate(ranks) if not _ends(pid, until)]
        outcomes = [_reap(pid, Path(file)) for pid, file in ranks]
    assert not hanging, f"ranks {hanging} hang: {outcomes}"
    return outcomes


def _fork(rank: int, num_ranks: int, folder: str, build, body: Body) -> tuple[int, str]:
    file = f"{folder}/rank{rank}.json"
    pid = os.fork()
    if pid:
        return pid, file

    def run() -> object:
        store = dist.FileStore(f"{folder}/store", num_ranks)
        return body(build(rank, store))

    try:
        Path(file).write_text(json.dumps(_outcome(run)))
    finally:
        os._exit(0)


def _outcome(run: Callable[[], object]) -> Outcome:
    try:
        return Outcome(run())
    except BaseException as error:  # noqa: BLE001 (KeyboardInterrupt too is what a test looks at)
        return Outcome(error=f"{type(error).__name__}: {error}\n{traceback.format_exc()}")


def _ends(pid: int, until: float) -> bool:
    fd = os.pidfd_open(pid)
    ended, _, _ = select.select([fd], [], [], max(0.0, until - time.monotonic()))
    os.close(fd)
    if not ended:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(ended)


def _reap(pid: int, file: Path) -> Outcome:
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return Outcome(signal=os.WTERMSIG(status))
    if not file.exists():
        return Outcome(error=f"the process exits with {os.WEXITSTATUS(status)}")
    return Outcome(*json.loads(file.read_text()))
