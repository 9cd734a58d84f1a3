"""Local ranks: those on a host's accelerators, as processes that `penstock train` itself starts.

What has looked at an accelerator has no forks that can use it, so each rank is the same command
begun anew, with what torchrun would tell it in its environment.  What no plan can train as its
author wrote it is trained by other ranks, each with a replica, or by the process that has started
them, on one device.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

from penstock.cluster.cluster import Cluster
from penstock.device import all_here, here
from penstock.errors import PenstockError, RunError
from penstock.plan.plan import Plan
from penstock.processes.end_with_parent import die_with
from penstock.processes.started import is_asked_beside, under_torchrun
from penstock.runtime.stop import handed_on

UNPLANNED = 75  # how a rank exits that has found that no plan can train the job
_REASON = "PENSTOCK_UNPLANNED"  # the file to which it writes why
_EAGERLY = "PENSTOCK_EAGERLY"  # is there in ranks that are replicas without a plan
_LOOK_S, _GRACE_S = 0.05, 30.0
_LOST = "rank 0, which tells what becomes of the run, was lost: summary.json in its folder does"


def ranks_to_start(
    ranks: int | None, plan: Path | None, cluster: Path | None, *, alone: bool
) -> int:
    """Return how many processes train on the accelerators here; 1: this one, alone.

    alone:    whether what is asked for is done by one process.
    Raises:   PlanError, ClusterError: a file is damaged.
    """
    if under_torchrun() or here().can_fork or alone or is_asked_beside():
        return 1
    most = len(all_here())
    count = ranks or most
    if plan is not None:
        count = Plan.load(plan).total_ranks
    elif ranks is None and cluster is not None:
        count = Cluster.load(cluster).num_ranks
    return count if count <= most else 1  # which says that there are not so many


class RanksEnded(NamedTuple):
    """How ranks have ended.

    code:      of the first one's exit.
    why:       what is wrong with a plan, if it is that; and of how many `replicas` without one
               the job can be trained.
    """

    code: int
    why: str = ""
    replicas: int = 1


def start_ranks(count: int, *, eagerly: bool = False, elastically: bool = False) -> RanksEnded:
    """Run this process's command as so many ranks; return how they ended.

    A signal goes to all of them; whoever is left a while after the first failure is killed.
    eagerly:  whether they are replicas without a plan.
    elastically:  whether the others go on where one is lost: it ends as one that has not died.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-") as name:
        folder = Path(name)
        said = [folder / f"rank{rank}" for rank in range(count)]
        place = str(_free_port())
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, path in enumerate(said):
                with path.open("wb") as file:
                    own = {_REASON: str(folder / "reason"), **({_EAGERLY: "1"} if eagerly else {})}
                    processes.append(_begun(rank, count, place, own, file))
            with handed_on([process.pid for process in processes]):
                _wait(processes, grace_s=float("inf") if elastically else _GRACE_S)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        codes = [process.returncode for process in processes]
        if elastically:
            living = [code for code in codes if code >= 0] or codes  # of those that were not killed
            if codes[0] < 0 <= living[0]:
                sys.stderr.write(f"{_LOST}\n")
            codes = living
        first = codes[0]
        if first == UNPLANNED:
            return RanksEnded(first, *json.loads((folder / "reason").read_text()))
        failed = next((rank for rank, code in enumerate(codes) if code), 0)
        if failed and (not first or first < 0):  # rank 0 did not say why
            sys.stderr.write(said[failed].read_text(errors="replace"))
            first = codes[failed]
        return RanksEnded(128 - first if first < 0 else first)


class UnplannedError(RunError):
    """No plan can train the job, and who has started this rank goes on without one."""


def are_replicas() -> bool:
    """Return whether this rank was started as a replica without a plan."""
    return _EAGERLY in os.environ


def unplanned(problem: PenstockError, replicas: int = 1) -> UnplannedError | None:
    """Return what ends this rank where no plan can train the job, if `start_ranks` began it.

    replicas:  of how many without a plan it can be trained.
    """
    place = os.environ.get(_REASON)
    if place is None:
        return None
    if os.environ["RANK"] == "0":
        Path(place).write_text(json.dumps([problem.message, replicas]))
    return UnplannedError(problem.message, hint=problem.hint)


def _begun(
    rank: int, count: int, port: str, more: Mapping[str, str], said: IO[bytes]
) -> "subprocess.Popen[bytes]":
    """Return a rank; what another than the first says is read only if that says nothing."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    named = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "penstock"}
    environment = {**os.environ, **named, **{key: str(value) for key, value in own.items()}, **more}
    return subprocess.Popen(
        [sys.executable, *sys.orig_argv[1:]],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=None if rank == 0 else subprocess.DEVNULL,
        stderr=None if rank == 0 else said,
        start_new_session=True,  # a signal to the group is handed on, once
        preexec_fn=partial(die_with, os.getpid()),
    )


def _wait(processes: Sequence["subprocess.Popen[bytes]"], *, grace_s: float) -> None:
    """Return once all have ended, or a while after one has failed."""
    until = float("inf")
    while any(process.poll() is None for process in processes) and time.monotonic() < until:
        if until == float("inf") and any(process.returncode for process in processes):
            until = time.monotonic() + grace_s
        time.sleep(_LOOK_S)


def _free_port() -> int:
    """Return a port of this host at which nobody listens now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
