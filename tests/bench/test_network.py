"""A slow line of two namespaces: links measured over it are what tc was told, and nothing stays."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.line import at_both_ends, cluster_over
from bench.network import can_throttle, line

WORKS, WHY = can_throttle()
needs_line = pytest.mark.skipif(not WORKS, reason=f"no line can be made here: {WHY}")
RATE, DELAY_S = 6.25e6, 0.01  # 50 Mbit/s


def keepers() -> list[str]:
    """Return the processes that keep a line."""
    found: list[str] = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = place.read_bytes().split(b"\0")
        except OSError:
            continue
        if any(word.endswith(b"bench/network.py") for word in words):
            parent = (place.parent / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) in (os.getpid(), 1):
                found.append(place.parent.name)
    return found


@pytest.mark.long
@needs_line
def test_links_measured_over_a_line_are_those_that_tc_was_told(tmp_path):
    with line(RATE, DELAY_S) as places:
        cluster = cluster_over(places, tmp_path, "tests.bench.hasty")
    assert keepers() == []
    assert [host.num_devices for host in cluster.hosts] == [1, 1]
    assert cluster.inside is None
    assert cluster.between is not None
    assert 0.6 * RATE < cluster.between.bytes_per_s < 1.1 * RATE
    # what the ends compute is measured apart from the messages, and may be a little too much
    assert cluster.between.latency_s > 0.9 * DELAY_S
    assert cluster.between.latency_s + 2 * cluster.between.overhead_s > DELAY_S


@needs_line
def test_places_reach_each_other_and_nothing_else():
    program = "import socket, sys; socket.create_connection((sys.argv[1], 9), 5)"
    with line(1e8, 0.0) as (here, there):
        for address, how in ((there.address, "refused"), ("192.0.2.1", "unreachable")):
            command = [*here.enter, sys.executable, "-c", program, address]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert how in done.stderr


@needs_line
def test_line_is_gone_when_what_uses_it_fails_or_is_killed():
    with pytest.raises(ValueError, match="fails"), line(1e8, 0.0) as _:
        raise ValueError("the body fails")
    assert keepers() == []
    with pytest.raises(subprocess.CalledProcessError), line(1e8, 0.0) as places:
        at_both_ends(places, ["no_such_module"])
    assert keepers() == []
    program = (
        "import os, signal, bench.network as n\n"
        "with n.line(1e8, 0.0) as places:\n"
        "    print(places[0].enter[1], flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    keeper = Path(done.stdout.split("=")[1].split("/fd")[0])
    until = time.monotonic() + 60
    while keeper.exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert not keeper.exists()
