"""Network: two places of this machine that reach each other only over a slow line.

Each place is a network namespace without a name: it is gone with its last process, whatever ends
that one.  The line is a TUN device at each end, whose rate `tc` limits, and a process between them
that keeps every packet for the delay.  It takes some percent of a core, before anybody else: where
it had to wait for one, a line of 150 MB/s lost half of its rate beside computes.

    with line(25e6, 0.001) as places:
        subprocess.run([*places[0].enter, "program", ...])
"""

import ctypes
import fcntl
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_PR_SET_PDEATHSIG = 1
_DEVICE = "line"
_LEAST_MTU, _MOST_MTU = 9_000, 65_000  # few packets: little work for the process between
_PACKET_S = 0.5e-3  # at most, of a larger one
_TOOLS = ("ip", "tc", "nsenter")


class Place(NamedTuple):
    """One end of a line: how to start a program there, and its address."""

    enter: tuple[str, ...]
    address: str
    device: str = _DEVICE


def can_throttle() -> tuple[bool, str]:
    """Return (True, "") where lines can be made, else (False, the reason)."""
    if sys.platform != "linux":
        return False, f"{sys.platform} has no network namespaces"
    if os.geteuid() != 0:
        return False, "only root can make network namespaces"
    for tool in _TOOLS:
        if shutil.which(tool) is None:
            return False, f"{tool} is not installed (iproute2, util-linux)"
    if not Path("/dev/net/tun").exists():
        return False, "there is no /dev/net/tun"
    try:
        with line(1e6, 0.0):
            return True, ""
    except (OSError, subprocess.CalledProcessError) as problem:
        return False, f"no line can be made here: {problem}"


@contextmanager
def line(bytes_per_s: float, delay_s: float, loss: float = 0.0) -> Generator[tuple[Place, Place]]:
    """Give two places with a line of so many bytes/s in each direction, which takes `delay_s`.

    loss:     the part of its packets that never comes.
    Raises:   OSError, CalledProcessError: not root, or a tool is missing.
    """
    parent = str(os.getpid())
    command = [sys.executable, __file__, parent, str(delay_s), str(loss)]
    keeper = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert keeper.stdout is not None
        told = keeper.stdout.readline().split()
        if len(told) != 2:
            raise OSError(f"the line's process left with {keeper.wait()}")
        places = tuple(_place(keeper.pid, int(fd), at) for at, fd in enumerate(told))
        for place in places:
            _set_up(place, bytes_per_s)
        yield places[0], places[1]
    finally:
        keeper.kill()
        keeper.wait()
        if keeper.stdout is not None:
            keeper.stdout.close()


def _place(keeper: int, fd: int, at: int) -> Place:
    return Place(("nsenter", f"--net=/proc/{keeper}/fd/{fd}"), f"10.79.0.{at + 1}")


def _set_up(place: Place, bytes_per_s: float) -> None:
    mtu = int(max(_LEAST_MTU, min(_MOST_MTU, _PACKET_S * bytes_per_s)))
    rate = f"rate {int(8 * bytes_per_s)}bit burst {2 * mtu} latency 2s"
    for words in (
        "ip link set lo up",
        f"ip addr add {place.address}/24 dev {_DEVICE}",
        f"ip link set {_DEVICE} mtu {mtu} up",
        f"tc qdisc add dev {_DEVICE} root tbf {rate}",
    ):
        command = [*place.enter, *words.split()]
        subprocess.run(command, check=True, capture_output=True, text=True)


# -- the process between --------------------------------------------------------------------------


def _keep(parent: int, delay_s: float, loss: float) -> None:
    """Make both places, tell their numbers, and carry packets until the parent is gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))  # a line waits for no core
    if os.getppid() != parent:
        return
    ends: list[int] = []
    places: list[int] = []
    for _ in range(2):
        if libc.unshare(_CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        places.append(os.open("/proc/self/ns/net", os.O_RDONLY))
        ends.append(_tun())
    print(*places, flush=True)
    for _ in _carry(ends, delay_s, loss):
        pass


def _tun() -> int:
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    wanted = struct.pack("16sH22x", _DEVICE.encode(), _IFF_TUN | _IFF_NO_PI)
    fcntl.ioctl(end, _TUNSETIFF, wanted)
    return end


def _carry(ends: list[int], delay_s: float, loss: float) -> Iterator[None]:
    """Pass packets from each end to the other, `delay_s` after they came, or lose them."""
    chance = random.Random(0)
    under_way: deque[tuple[float, int, bytes]] = deque()
    clock = time.monotonic
    while True:
        wait_s = max(0.0, under_way[0][0] - clock()) if under_way else None
        ready, _, _ = select.select(ends, [], [], wait_s)
        for end in ready:
            packet = os.read(end, _MOST_MTU + 64)
            if chance.random() >= loss:
                under_way.append((clock() + delay_s, ends[end == ends[0]], packet))
        while under_way and under_way[0][0] <= clock():
            _, other, packet = under_way.popleft()
            with suppress(OSError):  # its end is not up yet: lost, as on any line
                os.write(other, packet)
        yield


if __name__ == "__main__":
    _keep(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
