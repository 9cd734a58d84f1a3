"""Two hosts of this machine, each a network namespace, with members of an elastic run on both."""

import ctypes
import json
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from bench.network import Place, line
from penstock.members.launch_members import Here, Scribe, Start, run_members
from penstock.members.words import Where
from penstock.processes.child import die_with
from penstock.runtime.calls import StepResult

FORK = multiprocessing.get_context("fork")
_CLONE_NEWNET = 0x40000000
LIMIT_S = 300.0


class Cable(NamedTuple):
    """A line between two places, which can be cut: no packet is lost, but none comes through."""

    places: tuple[Place, Place]

    @property
    def _keeper(self) -> int:
        found = re.search(r"/proc/(\d+)/", self.places[0].enter[1])
        assert found is not None, "it names the process between the places"
        return int(found[1])

    def cut(self) -> None:
        os.kill(self._keeper, signal.SIGSTOP)

    def mend(self) -> None:
        os.kill(self._keeper, signal.SIGCONT)


@contextmanager
def cable(delay_s: float = 0.0005, loss: float = 0.0) -> Generator[Cable]:
    with line(125e6, delay_s, loss) as places:
        yield Cable(places)


def enter(place: Place) -> None:
    """Let this process, whose threads are none yet, be at a place."""
    file = os.open(place.enter[1].removeprefix("--net="), os.O_RDONLY)
    assert ctypes.CDLL(None, use_errno=True).setns(file, _CLONE_NEWNET) == 0
    os.close(file)


class Host(NamedTuple):
    """A process that runs members, and how it ended: what it wrote into `told`; what it said."""

    process: Any
    told: Path
    said: Path

    def ended(self) -> str:
        self.process.join(LIMIT_S)
        assert self.process.exitcode is not None, "it has not ended"
        return self.told.read_text() if self.told.exists() else "killed"


def start_host(
    place: Place, members: tuple[int, ...], start: Start, folder: Path, scribe: Scribe
) -> Host:
    """Run some members at a place; all find each other through the files of `folder`."""
    told, said = folder / f"host {members[0]}", folder / f"said {members[0]}"
    about = place, members, start, scribe, (told, said), os.getpid()
    process = FORK.Process(target=_live, args=about, daemon=False)
    process.start()
    return Host(process, told, said)


def _live(
    place: Place,
    members: tuple[int, ...],
    start: Start,
    scribe: Scribe,
    files: tuple[Path, Path],
    parent: int,
) -> None:
    die_with(parent)
    enter(place)
    told, said = files
    sys.stderr = said.open("w", buffering=1)

    def meet(own: Mapping[int, Where]) -> Mapping[int, Where]:
        for member, where in own.items():
            put(told.parent / f"member {member}", json.dumps(where))
        wanted = {m: told.parent / f"member {m}" for m in start.view.members}
        until(lambda: all(path.exists() for path in wanted.values()))
        return {m: Where(*json.loads(path.read_text())) for m, path in wanted.items()}

    here = Here(members, place.address)
    try:
        is_over = run_members(start._replace(meet=meet), _unheard, scribe, here)
        put(told, f"{is_over}")
    except Exception as problem:  # noqa: BLE001 - the test reads it
        put(told, f"{problem}\n{traceback.format_exc()}")
    os._exit(0)


def put(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.rename(path)


def _unheard(step: StepResult) -> None:
    """Let a step pass."""


def until(is_so: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    end = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end, "it never is"
        time.sleep(0.01)


def members_of(host: Host) -> Sequence[int]:
    """Return the processes of a host's members, in their order."""
    pid = host.process.pid
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return sorted(map(int, text.split()))


def kill(host: Host) -> None:
    """Kill all processes of a host, as if its power had gone."""
    pids = members_of(host) if host.process.is_alive() else ()
    for pid in (*pids, *([host.process.pid] if host.process.is_alive() else [])):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
