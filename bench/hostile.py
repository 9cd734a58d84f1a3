"""Hostile: what strangers at the ports of an elastic run cost it, attack by attack.

    python -m bench.hostile [--json] [--seconds S] [--hosts 2]

`penstock train --elastic --ranks 4` of bench.elastic_soak's chain, whose ranks listen on this host.
Whoever attacks has no token; each attack lasts S seconds, goes to the line of each rank at once,
and is looked at for as long before and after.

asks       8 connections a port ask for the proof again and again, never read, and come anew
holds      64 connections a port that say nothing, and come anew when they are ended
floods     one connection a port that sends bytes without a line, and comes anew
garbage    8 connections a port that send random bytes, and come anew
sums       --hosts 2 (Linux, root): two hosts as network namespaces, two ranks each, 1,024 files
           a process; 60 connections a port and look, of 8 bytes each, to all ports where the
           hosts listen but those of the lines: gloo's.  Halfway a rank is killed, so that the
           others connect anew meanwhile

before, during, after   steps per second
recovered_s             from the attack's end to the first second with nine tenths of the steps
joined_s                that a newcomer with the token takes to get in meanwhile
mib, files, threads     of the largest rank, more after all attacks than before them
held                    connections that strangers still have at the end; lost: ranks but the killed
"""

import argparse
import json
import os
import random
import resource
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bench.elastic_soak import Disturbed
from bench.machine import machine
from bench.soak_hosts import HOSTS, DisturbedHosts, disturb, on_hosts
from penstock.errors import RunError
from penstock.members.calling import introduced
from penstock.members.token_proof import GREETING
from penstock.members.words import Where
from penstock.training.addresses import addresses_in

_START_S, _WORTH = 300.0, 0.9
_LISTENS = "0A"  # as the kernel writes a socket's state
_AT_ONCE, _MOST, _LOOK_S = 60, 4_000, 0.002  # connections a port and look, and in all
_FILES, _FILES_KIND = 1_024, resource.RLIMIT_NOFILE
Row = dict[str, float | int | str]


class Attack(NamedTuple):
    """How many connections a port has, and what is said on each, again and again."""

    connections: int
    says: Callable[[], bytes]


ATTACKS = {
    "asks": Attack(8, lambda: GREETING + b"[1,2]\n" * 512),
    "holds": Attack(64, lambda: b""),
    "floods": Attack(1, lambda: b"." * 2**16),
    "garbage": Attack(8, lambda: random.randbytes(2**12)),
}


class Attacker:
    """Connections to all ports, until it is ended; what is refused is tried again at once."""

    def __init__(self, attack: Attack, places: Sequence[Where]) -> None:
        self._attack, self._places = attack, places
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for place in self._places:
                for _ in range(self._attack.connections):
                    self._open(selector, place)
            while not self._is_over.is_set():
                for key, _ in selector.select(0.05):
                    if not self._says(key.fileobj):  # type: ignore[arg-type]
                        selector.unregister(key.fileobj)
                        key.fileobj.close()  # type: ignore[union-attr]
                        self._open(selector, key.data)
                time.sleep(0.001)  # it shares the processor with those that it attacks
            for key in list(selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]

    def _open(self, selector: selectors.BaseSelector, place: Where) -> None:
        end = socket.socket()
        end.setblocking(False)
        end.connect_ex(place[:2])
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._attack.says() else 0)
        selector.register(end, events, place)

    def _says(self, end: socket.socket) -> bool:
        """Return whether the other end has taken what is said, or may yet."""
        data = self._attack.says()
        try:
            if data:
                end.send(data)
            elif not end.recv(4096):
                return False
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def end(self) -> None:
        """Close all of them."""
        self._is_over.set()
        self._thread.join()


class Held(NamedTuple):
    """Resident MiB, open files, and threads of the rank that has most of each."""

    mib: float
    files: int
    threads: int


def held(run: Disturbed) -> Held:
    """Return what the ranks of a run hold."""
    found = [Held(0.0, 0, 0)]
    for rank in run.ranks():
        place = Path(f"/proc/{rank}")
        pages = int((place / "statm").read_text().split()[1])
        mib = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
        found.append(Held(mib, len(os.listdir(place / "fd")), len(os.listdir(place / "task"))))
    return Held(*(max(column) for column in zip(*found, strict=True)))


def steps_in(run: Disturbed | DisturbedHosts) -> int:
    """Return how many steps have happened."""
    return (run.folder / "metrics.jsonl").read_bytes().count(b"\n")


def pace(run: Disturbed | DisturbedHosts, seconds: float) -> float:
    """Return steps per second, for so long."""
    first, start = steps_in(run), time.monotonic()
    time.sleep(seconds)
    return (steps_in(run) - first) / (time.monotonic() - start)


def recovered_s(run: Disturbed, usual: float, limit_s: float) -> float:
    """Return seconds until the end of a second of nearly the usual pace; the limit: not in time."""
    start = time.monotonic()
    while (now_s := time.monotonic() - start) < limit_s:
        if pace(run, 1.0) >= _WORTH * usual:
            return now_s
    return limit_s


def joined_s(run: Disturbed) -> float:
    """Return seconds until a newcomer with the token is welcomed; inf: it is not."""
    known, start = addresses_in(run.folder), time.monotonic()
    for where in known.members.values():
        with suppress(RunError):
            introduced(where, known.secret)
            return time.monotonic() - start
    return float("inf")


def attacked(run: Disturbed, name: str, seconds: float) -> Row:
    """Return the row of one attack."""
    places = [*addresses_in(run.folder).members.values()]
    before = pace(run, seconds)
    attacker = Attacker(ATTACKS[name], places)
    try:
        first, start = steps_in(run), time.monotonic()
        time.sleep(seconds / 2)
        came_s = joined_s(run)
        time.sleep(max(0.0, seconds - (time.monotonic() - start)))
        during = (steps_in(run) - first) / (time.monotonic() - start)
    finally:
        attacker.end()
    back_s = recovered_s(run, before, seconds)
    after = pace(run, seconds)
    row: Row = {"attack": name, "before": before, "during": during, "after": after}
    return {**row, "recovered_s": back_s, "joined_s": came_s, "ports": len(places)}


def hostile(folder: Path, seconds: float, told: Callable[[str], None]) -> list[Row]:
    """Return a row for each attack, and one of what ranks hold after all of them."""
    run = Disturbed(folder / "run", random.Random(0), 1.0)
    try:
        until = time.monotonic() + _START_S
        while not run.began():
            if run.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"no step: {run.said()}")
            time.sleep(0.1)
        time.sleep(seconds)
        early, rows = held(run), list[Row]()
        for name in ATTACKS:
            told(name)
            rows.append(attacked(run, name, seconds))
        late, lost = held(run), len(run.ranks()) < 4
        run.end()
    finally:
        run.close()
    more = {"mib": late.mib - early.mib, "files": late.files - early.files}
    return [*rows, {"attack": "all", **more, "threads": late.threads - early.threads, "lost": lost}]


# -- two hosts ------------------------------------------------------------------------------------


def listening_at(process: int) -> set[int]:
    """Return the ports at which somebody listens where a process is."""
    rows = Path(f"/proc/{process}/net/tcp").read_text().splitlines()[1:]
    columns = (row.split() for row in rows)
    return {int(row[1].partition(":")[2], 16) for row in columns if row[3] == _LISTENS}


def at_sums(address: str, process: int, spared: Sequence[int], seconds: float) -> int:
    """Connect to all ports of a host but some, for so long; return how many it keeps."""
    ends, until = list[socket.socket](), time.monotonic() + seconds
    while time.monotonic() < until:
        for port in listening_at(process) - {*spared}:
            for _ in range(_AT_ONCE):
                ends.append(socket.socket())
                ends[-1].setblocking(False)
                ends[-1].connect_ex((address, port))
        time.sleep(_LOOK_S)
        ends = [end for end in ends if _takes(end)]
        for end in ends[:-_MOST]:
            end.close()
        ends = ends[-_MOST:]
    return sum(_is_connected(end) for end in ends)


def _takes(end: socket.socket) -> bool:
    try:
        end.send(b"." * 8)
    except BlockingIOError:
        return True
    except OSError:
        end.close()
        return False
    return True


def _is_connected(end: socket.socket) -> bool:
    with suppress(OSError):
        end.getpeername()
        return True
    return False


def at_hosts(run: DisturbedHosts, seconds: float) -> Row:
    """Return the row of strangers at the ports of a run's sums."""
    lines = [where.port for where in addresses_in(run.folder).members.values()]
    spared, attackers = [*lines, int(run.port)], list[subprocess.Popen[str]]()
    before = pace(run, seconds)
    for host, other in ((0, 1), (1, 0)):
        told = run.places[host].address, run.processes(host)[0], spared, seconds
        command = [sys.executable, "-m", "bench.hostile", "--at", json.dumps(told)]
        whole = [*run.places[other].enter, *command]
        attackers.append(subprocess.Popen(whole, stdout=subprocess.PIPE, text=True))
    first, start = steps_in(run), time.monotonic()
    time.sleep(seconds / 2)
    run.kill_rank()
    held = sum(int(each.communicate()[0]) for each in attackers)
    during = (steps_in(run) - first) / (time.monotonic() - start)
    gone = [*run.events()[-1]["gone"]] if run.events()[-1]["what"] == "lost" else []
    after = pace(run, seconds)
    row: Row = {"attack": "sums", "before": before, "during": during, "after": after}
    return {**row, "held": held, "lost": len(gone) - 1 if run.there() else HOSTS}


def hostile_hosts(folder: Path, seconds: float) -> list[Row]:
    """Return the row of an attack on two hosts."""
    resource.setrlimit(_FILES_KIND, (_FILES, resource.getrlimit(_FILES_KIND)[1]))
    with on_hosts(folder / "run", random.Random(0)) as run:
        disturb(run, 0.0, 1.0, lambda words: None)
        row = at_hosts(run, seconds)
        run.end()
    return [row]


def main() -> None:
    """Print a row for each attack."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--hosts", type=int, choices=(1, 2), default=1)
    parser.add_argument("--at", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.at:
        _, most = resource.getrlimit(_FILES_KIND)
        resource.setrlimit(_FILES_KIND, (most, most))
        print(at_sums(*json.loads(asked.at)))
        return
    with tempfile.TemporaryDirectory() as name:
        told = partial(_told, asked.json)
        alone = asked.hosts == 1
        where = Path(name)
        rows = hostile(where, asked.seconds, told) if alone else hostile_hosts(where, asked.seconds)
    if asked.json:
        print(json.dumps({"machine": machine(), "rows": rows}))
        return
    for row in rows:
        print(
            "  ".join(
                f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()
            )
        )


def _told(is_json: bool, words: str) -> None:
    if not is_json:
        print(words)


if __name__ == "__main__":
    main()
