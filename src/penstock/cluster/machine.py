"""What this machine has: cores, memory, accelerators; torch is asked only when already loaded."""

import os
import platform
import sys
from pathlib import Path
from typing import NamedTuple

HERE = "here"  # the region of a host that says nothing of it
CGROUP = Path("/sys/fs/cgroup")  # limits of a container (version 2); absent elsewhere


class Accelerator(NamedTuple):
    """One accelerator; `memory_bytes` is what a plan may use of it."""

    name: str
    memory_bytes: int
    has_copy_engine: bool = True


class Machine(NamedTuple):
    """One machine as found."""

    name: str
    cores: int
    memory_bytes: int
    accelerators: tuple[Accelerator, ...]


def detect(cgroup: Path = CGROUP) -> Machine:
    """Return the part of this machine that this process may use, container limits included.

    Accelerators are listed only when the caller has imported torch; torch is not imported for it.
    """
    cores, memory_bytes = _cores(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    quota = _words(cgroup / "cpu.max")
    if len(quota) == 2 and quota[0].isdecimal() and quota[1].isdecimal():
        cores = max(1, min(cores, int(quota[0]) // int(quota[1])))
    limit = _words(cgroup / "memory.max")
    if len(limit) == 1 and limit[0].isdecimal():
        memory_bytes = min(memory_bytes, int(limit[0]))
    return Machine(platform.node() or "here", cores, memory_bytes, _accelerators())


def free_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = CGROUP) -> int:
    """Return the bytes that a new process could have, a container's limit included.

    What a container has read from files and not looked at since is there to be had, too.
    """
    free = detect(cgroup).memory_bytes
    for line in _lines(meminfo):
        if line.startswith("MemAvailable:"):
            free = min(free, 1024 * int(line.split()[1]))
    limit, used = _words(cgroup / "memory.max"), _words(cgroup / "memory.current")
    if len(limit) == len(used) == 1 and limit[0].isdecimal():
        rows = (line.split() for line in _lines(cgroup / "memory.stat"))
        idle = sum(int(row[1]) for row in rows if row[0] == "inactive_file")
        free = min(free, int(limit[0]) - int(used[0]) + idle)
    return max(0, free)


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's own name, or else its architecture."""
    lines = _lines(cpuinfo)
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine() or "cpu"


def _cores() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _accelerators() -> tuple[Accelerator, ...]:
    if "torch" not in sys.modules:
        return ()
    from penstock.device import all_here

    return tuple(
        Accelerator(each.name, each.usable_bytes, each.has_copy_engine) for each in all_here()
    )
