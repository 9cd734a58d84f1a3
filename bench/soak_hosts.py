"""Soak on hosts: whole hosts of an elastic run are killed, and come back.

Each host is a network namespace, with a line of 125 MB/s and 0.5 ms between the two.  The run is
begun by a torchrun on each, two ranks a host.  A host that is killed loses all that runs in its
namespace at once; it comes back by `penstock join`, twice.  One host is left always: the other is
killed only once both have ranks in the run again.
"""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.network import Place, line
from penstock.errors import RunError
from penstock.training.addresses import addresses_in
from penstock.training.at_work import ENDED
from penstock.training.events import EVENTS

HOSTS, RANKS_EACH = 2, 2
_LINE = 125e6, 0.0005
_END_S = 120.0
_LOOK_S = 0.05


@dataclass
class DisturbedHosts:
    """A run on two hosts under way; `killed`: when a host was, and which."""

    folder: Path
    source: random.Random
    places: Sequence[Place]
    killed: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    joined: list[subprocess.Popen[bytes]] = field(default_factory=list[subprocess.Popen[bytes]])

    def __post_init__(self) -> None:
        self.own = [_namespace(place) for place in self.places]
        self.port = str(20_000 + self.source.randrange(10_000))
        self.started = [self.torchrun(host) for host in range(HOSTS)]

    def torchrun(self, host: int) -> "subprocess.Popen[bytes]":
        """Start what begins the run on a host; or, on one that was lost, comes back to it."""
        rendezvous = ("--master-addr", self.places[0].address, "--master-port", self.port)
        many = "--nnodes", str(HOSTS), "--nproc-per-node", str(RANKS_EACH), "--node-rank", str(host)
        words = (
            "train",
            "bench.elastic_soak:job",
            "--elastic",
            "--set",
            "trial=false",
            "--out",
            self.folder,
        )
        command = "-m", "torch.distributed.run", *many, *rendezvous, "-m", "penstock", *words
        return self.at(host, *map(str, command), "--set", "checkpoint_every=20s")

    def at(self, host: int, *words: str) -> "subprocess.Popen[bytes]":
        """Start Python with some words on a host."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (self.folder.parent / "said").open("ab") as said:
            command = [*self.places[host].enter, sys.executable, *words]
            about: dict[str, Any] = {"stdout": said, "stderr": said, "env": environment}
            return subprocess.Popen(command, start_new_session=True, **about)

    def said(self) -> str:
        """Return the last of what the commands have said."""
        return (self.folder.parent / "said").read_text()[-4000:]

    def processes(self, host: int) -> list[int]:
        """Return all processes on a host but that which keeps the line, which is on one, too."""
        found, keeper = list[int](), self.places[host].enter[1].split("/")[2]
        for entry in os.listdir("/proc"):
            with suppress(OSError):
                if (
                    entry.isdigit()
                    and entry != keeper
                    and _inode(f"/proc/{entry}/ns/net") == self.own[host]
                ):
                    found.append(int(entry))
        return found

    def began(self) -> bool:
        """Return whether a step is over."""
        path = self.folder / "metrics.jsonl"
        return path.exists() and path.stat().st_size > 0

    def is_over(self) -> bool:
        """Return whether the run has ended, or nobody is left of it."""
        return (self.folder / ENDED).exists() or not any(map(self.processes, range(HOSTS)))

    def events(self) -> list[dict[str, Any]]:
        """Return what has happened to the run."""
        return [json.loads(row) for row in (self.folder / EVENTS).read_text().splitlines()]

    def there(self) -> set[int]:
        """Return the hosts that have ranks in the run, as its own file of addresses says."""
        with suppress(RunError):
            at = {place.address: host for host, place in enumerate(self.places)}
            return {at[where.host] for where in addresses_in(self.folder).members.values()}
        return set()

    def kill(self, host: int | None = None) -> bool:
        """Kill a host if both have ranks in the run; return whether one was."""
        if len(self.there()) < HOSTS or not self.is_settled():
            return False
        victim = self.source.randrange(HOSTS) if host is None else host
        processes = self.processes(victim)
        self.killed.append((time.time(), victim))
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        return True

    def kill_rank(self) -> None:
        """Kill the last rank of the run: it is the process that listens where its line is."""
        (*_, where) = addresses_in(self.folder).members.values()
        host = [place.address for place in self.places].index(where.host)
        listens = [*self.places[host].enter, "ss", "-Hltnp", f"sport = :{where.port}"]
        found = subprocess.run(listens, capture_output=True, text=True, check=True).stdout
        os.kill(int(found.partition("pid=")[2].partition(",")[0]), signal.SIGKILL)

    def is_settled(self) -> bool:
        """Return whether the newest loss of a host has been made up for: all ranks are there."""
        newest = self.events()[-1]
        lost_s = self.killed[-1][0] if self.killed else 0.0
        return newest["time"] > lost_s and len(newest["members"]) == HOSTS * RANKS_EACH

    def join(self) -> bool:
        """Let a host come back on which nothing runs; return whether one did."""
        gone = [host for host in range(HOSTS) if not self.processes(host)]
        if not gone or not self.killed or self.events()[-1]["time"] < self.killed[-1][0]:
            return False
        for _ in range(RANKS_EACH):
            self.joined.append(self.at(gone[0], "-m", "penstock", "join", str(self.folder)))
        return True

    def end(self) -> None:
        """Ask the run to stop, from a host that has ranks in it, and return once it has."""
        (host, *_) = sorted(self.there())
        self.at(host, "-m", "penstock", "stop", str(self.folder)).wait(_END_S)
        until = time.monotonic() + _END_S
        while any(map(self.processes, range(HOSTS))) and time.monotonic() < until:
            self._kill_torchruns()
            time.sleep(_LOOK_S)

    def _kill_torchruns(self) -> None:
        """End agents that wait for that of a lost host, which torchrun does for five minutes."""
        for process in self.started:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            with suppress(OSError):
                if process.poll() is None and not children.read_text().split():
                    process.kill()

    def close(self) -> None:
        """Let nothing of it live on."""
        for host in range(HOSTS):
            for process in self.processes(host):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        for process in (*self.started, *self.joined):
            process.wait()

    def recovered_s(self) -> list[float]:
        """Return for each host that was killed the seconds until the next step was done."""
        losses = [event["time"] for event in self.events() if event["what"] == "lost"]
        after = (next((at for at in losses if at > killed), None) for killed, _ in self.killed)
        pairs = zip(after, self.killed, strict=True)
        return [at - killed for at, (killed, _) in pairs if at is not None]


def _inode(path: str) -> int:
    return os.stat(path).st_ino


def _namespace(place: Place) -> int:
    return _inode(place.enter[1].removeprefix("--net="))


@contextmanager
def on_hosts(folder: Path, source: random.Random) -> Generator[DisturbedHosts]:
    """Give a run on two hosts, which has begun."""
    with line(*_LINE) as places:
        run = DisturbedHosts(folder, source, places)
        try:
            yield run
        finally:
            run.close()


def disturb(run: DisturbedHosts, lasts_s: float, every_s: float, told: Any) -> None:
    """Kill hosts, and let them come back, for so long.

    Raises:   RuntimeError: the run does not begin, or ends.
    """
    until = time.monotonic() + 300.0
    while not run.began():
        if run.is_over() or time.monotonic() > until:
            raise RuntimeError(f"no step: {run.said()}")
        time.sleep(_LOOK_S)
    start = time.monotonic()
    kill_s, join_s = run.source.expovariate(1 / every_s), 0.0
    while (now_s := time.monotonic() - start) < lasts_s:
        if run.is_over():
            raise RuntimeError(f"the run has ended: {run.said()}")
        if now_s > kill_s and run.kill():
            join_s = now_s + run.source.expovariate(1 / every_s)
            kill_s = join_s + run.source.expovariate(1 / every_s)
        if now_s > join_s:
            run.join()
        told(f"{now_s:,.0f} of {lasts_s:,.0f} s, {len(run.killed)} hosts killed")
        time.sleep(_LOOK_S)


def recoveries(seconds: Sequence[float]) -> dict[str, float]:
    """Return the median and the worst of what hosts that were killed cost."""
    if not seconds:
        return {}
    return {"recovered_s": statistics.median(seconds), "worst_recovered_s": max(seconds)}
