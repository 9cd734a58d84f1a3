"""Ranks as torchrun would start them, forked: what has been loaded and traced they need not."""

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.processes.child import die_with

FORK = multiprocessing.get_context("fork")
_LIMIT_S = 300


def as_torchrun(
    call: Callable[[], int | None],
    folder: Path,
    *,
    nodes: int = 1,
    ranks: int = 1,
    places: Sequence[Path] = (),
) -> list[tuple[int | None, str, str]]:
    """Call it in every rank of a torchrun job; return exit code, stdout and stderr of each.

    folder:   for what they say.
    places:   the working directories of the nodes.
    """
    heard, tell = FORK.Pipe(duplex=False)
    keeper = FORK.Process(target=_keep, args=(tell, os.getpid()), daemon=True)
    keeper.start()
    port, total = heard.recv(), nodes * ranks
    said = [(folder / f"out{rank}", folder / f"err{rank}") for rank in range(total)]
    processes = [
        FORK.Process(
            target=_rank,
            args=(call, said[rank], places[rank // ranks] if places else None, os.getpid()),
            kwargs=_environment(rank, ranks, total, port),
        )
        for rank in range(total)
    ]
    try:
        for each in processes:
            each.start()
        for each in processes:
            each.join(_LIMIT_S)
        codes = [each.exitcode for each in processes]
        tell_where([each.pid for each in processes if each.exitcode is None])
    finally:
        for each in (*processes, keeper):
            each.kill()
            each.join()
            each.close()
        heard.close()
        tell.close()
    return [
        (code, out.read_text(), err.read_text())
        for code, (out, err) in zip(codes, said, strict=True)
    ]


def tell_where(processes: Sequence[int | None]) -> None:
    """Let ranks that do not end, and what they have forked, say where they are to their stderr."""
    parents = dict[int, int]()
    for place in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parents[int(place.parent.name)] = int(place.read_text().rpartition(")")[2].split()[1])
    found = {pid for pid in processes if pid is not None}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    if found:
        time.sleep(1.0)


def _environment(rank: int, ranks: int, total: int, port: int) -> dict[str, str]:
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank % ranks,
        "WORLD_SIZE": total,
        "LOCAL_WORLD_SIZE": ranks,
        "GROUP_RANK": rank // ranks,
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": 0,
    }
    more = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "TORCHELASTIC_RUN_ID": "none"}
    more["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    return {**more, **{name: str(value) for name, value in numbers.items()}}


def _keep(tell: Any, parent: int) -> None:
    """Keep the store, as the agent of torchrun does, until the end."""
    die_with(parent)
    limit = timedelta(seconds=_LIMIT_S)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
    tell.send(store.port)
    signal.pause()


def _rank(
    call: Callable[[], int | None],
    said: Sequence[Path],
    place: Path | None,
    parent: int,
    **environment: str,
) -> None:
    die_with(parent)
    os.environ.update(environment)
    os.setsid()
    torch.set_num_threads(1)
    torch.set_num_threads = lambda count: None  # a fork waits for those of its parent for ever
    if place is not None:
        os.chdir(place)
    for number, file in enumerate(said, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    code = 1
    try:
        code = call() or 0
    except Exception:  # noqa: BLE001 - the test reads it
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
