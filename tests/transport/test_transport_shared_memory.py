"""What ranks of one host promise: speed by memory, and no harm whoever dies when."""

import os
import platform
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from penstock.transport import TensorSpec, roster, segment
from penstock.transport.segment import LINE_WORDS, SharedSegment
from penstock.transport.shared_memory import available, host_key
from tests.draws import examples
from tests.runtime.left import SHARED, names_in, stays_in
from tests.transport.transport_ranks import Outcome, errors, run_shared_memory, values

SPEC = (TensorSpec((4,), torch.int64),)


def both_ways(end, peer):
    """Return (send, wait) of a stream to and one from `peer`."""
    return end.bind_send(0, peer, SPEC), end.bind_receive(0, peer, SPEC)[1]


@examples(5)
@given(
    sizes=st.lists(st.integers(0, 2000), min_size=1, max_size=5),
    order=st.lists(st.integers(0, 4), min_size=50, max_size=200),
    slots=st.integers(1, 5),
    spin_s=st.sampled_from((0.0, 50e-6)),
)
def test_thousands_of_messages_in_both_directions_arrive_in_order(sizes, order, slots, spin_s):
    repeats = 1000 // len(order) + 1

    def body(end):
        specs = [(TensorSpec((size,), torch.int64),) for size in sizes]
        peer = 1 - end.rank
        sends = [end.bind_send(edge, peer, spec) for edge, spec in enumerate(specs)]
        waits = [end.bind_receive(edge, peer, spec)[1] for edge, spec in enumerate(specs)]
        end.barrier()
        for number, edge in enumerate(order * repeats):
            at = edge % len(sizes)
            sends[at]([torch.full((sizes[at],), number)])
            (got,) = waits[at]()
            assert (got == number).all()
        end.barrier()
        end.close()

    values(run_shared_memory(2, body, slots=slots, spin_s=spin_s))


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_many_ranks_on_few_cores_pass_messages_round(slots):
    num_ranks, num_rounds = 8, 300

    def body(end):
        rank = end.rank
        send = end.bind_send(rank, (rank + 1) % num_ranks, SPEC)
        _, wait = end.bind_receive((rank - 1) % num_ranks, (rank - 1) % num_ranks, SPEC)
        end.barrier()
        token = torch.zeros(4, dtype=torch.int64)
        for number in range(num_rounds):
            if rank or number:
                (token,) = wait()
            send([token + 1])
        if rank == 0:
            (token,) = wait()
        end.barrier()
        end.close()
        return token[0].item()

    assert values(run_shared_memory(num_ranks, body, slots=slots))[0] == num_ranks * num_rounds


@pytest.mark.parametrize("spin_s", [0.0, 50e-6])
def test_sleepers_are_woken_and_need_not_look(spin_s, monkeypatch):
    monkeypatch.setattr(roster, "_LOOK_S", 3600.0)  # a wake-up that is lost hangs the test

    def body(end):
        send, wait = both_ways(end, 1 - end.rank)
        end.barrier()
        for number in range(2000):
            message = [torch.full((4,), number)]
            if end.rank == 0:
                for _ in range(number % 7):  # more than there are slots: the sender sleeps too
                    send(message)
                for _ in range(number % 7):
                    wait()
            else:
                for _ in range(number % 7):
                    send(wait())
            if number % 5 == 0:
                end.all_reduce(torch.zeros(1), (0, 1))
        end.barrier()
        end.close()

    values(run_shared_memory(2, body, spin_s=spin_s))


def test_message_that_is_not_yet_read_is_not_overwritten():
    def body(end):
        send, wait = both_ways(end, 1 - end.rank)
        end.barrier()
        got = []
        if end.rank == 0:
            for number in range(50):
                send([torch.full((4,), number)])
        else:
            for _ in range(50):
                got.append(wait()[0].tolist())
        end.barrier()
        end.close()
        return got

    got = values(run_shared_memory(2, body, slots=3, spin_s=0.0))[1]
    assert got == [[number] * 4 for number in range(50)]


def test_counts_pass_the_greatest_word():
    """Counts start 8 below 2**32, so nine messages and nine barriers show the wrap."""

    def body(end):
        send, wait = both_ways(end, 1 - end.rank)
        got = []
        for number in range(40):
            end.barrier()
            send([torch.full((4,), number)])
            got.append(wait()[0][0].item())
        end.close()
        return got

    assert values(run_shared_memory(2, body)) == [list(range(40))] * 2


# deaths


def dies(end):
    os.kill(os.getpid(), signal.SIGKILL)


def exits(end):
    os._exit(3)


WAITS = {
    "receive": lambda end: end.bind_receive(0, 1, SPEC)[1](),
    "send": lambda end: [send(MESSAGE) for send in [end.bind_send(1, 1, SPEC)] * 9],
    "sum": lambda end: end.all_reduce(torch.zeros(100_000), (0, 1, 2)),
    "barrier": lambda end: end.barrier(),
    "gather": lambda end: end.all_gather_bytes(b"x" * 5_000_000, (0, 1, 2)),
}
MESSAGE = [torch.zeros(4, dtype=torch.int64)]


@pytest.mark.parametrize("how", WAITS)
def test_killed_rank_fails_those_who_wait_and_leaves_nothing(how):
    before = names_in(SHARED)

    def body(end):
        if end.rank == 1:
            if how == "receive":
                end.bind_send(0, 0, SPEC)
                end.bind_send(0, 2, SPEC)
            if how == "send":
                end.bind_receive(1, 0, SPEC)
                end.bind_receive(1, 2, SPEC)
            time.sleep(0.1)  # the others wait by now, most likely; either way they must fail
            dies(end)
        WAITS[how](end)

    outcomes = run_shared_memory(3, body)
    assert outcomes[1] == Outcome(signal=signal.SIGKILL)
    for rank in (0, 2):
        assert outcomes[rank].error.startswith("TransportError: rank 1 died: its process ")
    assert stays_in(SHARED, before) == set()


def test_rank_killed_while_it_sends_and_sums_fails_the_others():
    def body(end):
        send, wait = both_ways(end, 1 - end.rank)
        end.barrier()
        if end.rank == 1:
            victim = os.getpid()
            if os.fork() == 0:
                time.sleep(0.05)  # somewhere in the loop below
                os.kill(victim, signal.SIGKILL)
                os._exit(0)
        while True:
            send(MESSAGE)
            wait()
            end.all_reduce(torch.zeros(3_000_000), (0, 1))

    waiting, killed = run_shared_memory(2, body)
    assert waiting.error.startswith("TransportError: rank 1 died")
    assert killed.signal == signal.SIGKILL


@pytest.mark.parametrize("leave", [dies, exits])
def test_death_of_a_rank_nobody_waits_for_is_noticed(leave):
    """Rank 0 waits for rank 1, which lives and computes; rank 2 is gone."""

    def body(end):
        if end.rank == 0:
            _, wait = end.bind_receive(0, 1, SPEC)
            end.barrier()
            wait()
        elif end.rank == 1:
            end.bind_send(0, 0, SPEC)
            end.barrier()
            while True:
                time.sleep(0.01)
                end.all_gather_bytes(b"", (1,))
        else:
            end.barrier()
            leave(end)

    outcomes = run_shared_memory(3, body)
    for rank in (0, 1):
        assert outcomes[rank].error.startswith("TransportError: rank 2 died")


def test_interrupt_ends_a_wait():
    def body(end):
        _, wait = both_ways(end, 1 - end.rank)
        end.barrier()
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        wait()

    assert errors(run_shared_memory(2, body)) == ["KeyboardInterrupt: "] * 2


def test_rank_that_never_comes_is_named():
    def body(end):
        raise AssertionError("no end can be built")

    def run():
        return run_shared_memory(2, body, limit_s=0.2)

    # rank 1 dies before it joins
    original = roster.Roster.__init__

    def refuse(self, rank, *args, **options):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, rank, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(roster.Roster, "__init__", refuse)
        alone, _ = run()
    assert alone.error.startswith("TransportError: rank 1 has not joined within 0.2 s")


def test_stream_that_the_peer_never_binds_is_named(tmp_path: Path):
    def body(end):
        end.all_gather_bytes(b"", (0, 1))  # all have come
        if end.rank == 1:
            end._roster._limit_s = 0.1
            try:
                end.bind_receive(7, 0, SPEC)
            finally:
                (tmp_path / "asked").touch()
        while not (tmp_path / "asked").exists():
            time.sleep(0.01)

    _, lonely = run_shared_memory(2, body)
    assert "rank 0 has not shown edge 7 from 0 to 1 to rank 1" in lonely.error


def test_nothing_stays_open_after_close():
    def body(end):
        send, wait = both_ways(end, 1 - end.rank)
        end.all_reduce(torch.zeros(3), (0, 1))
        send(MESSAGE)
        wait()
        end.barrier()
        end.close()
        end.close()
        return sorted((descriptors() - inherited).elements())

    inherited = descriptors()
    assert values(run_shared_memory(2, body)) == [[], []]


def descriptors() -> Counter[str]:
    """Return what this process's descriptors of Penstock's memory and of processes lead to."""
    return Counter(
        link
        for fd in Path("/proc/self/fd").iterdir()
        if fd.is_symlink() and ("penstock" in (link := os.readlink(fd)) or "pidfd" in link)
    )


def test_processes_that_are_not_related_find_each_other():
    script = """
import sys
import torch, torch.distributed as dist
from penstock.transport import TensorSpec
from penstock.transport.shared_memory import SharedMemoryTransport
rank, port = int(sys.argv[1]), int(sys.argv[2])
store = dist.PrefixStore("transport", dist.TCPStore("127.0.0.1", port))
end = SharedMemoryTransport(rank, 2, store)
spec = (TensorSpec((3,), torch.float32),)
send, (_, wait) = end.bind_send(0, 1 - rank, spec), end.bind_receive(0, 1 - rank, spec)
end.barrier()
send([torch.full((3,), float(rank))])
print(wait()[0].tolist(), end.all_gather_bytes(b"%d" % rank, (1, 0)))
end.barrier()
end.close()
"""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-W", "ignore", "-c", script]
    ranks = [
        subprocess.Popen([*command, str(rank), str(store.port)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        printed = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert printed == ["[1.0, 1.0, 1.0] [b'1', b'0']\n", "[0.0, 0.0, 0.0] [b'1', b'0']\n"]


# segments


def test_segments_are_available_here_and_refused_elsewhere(monkeypatch):
    assert available() == (True, "")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert available() == (False, "the order of stores is known on x86_64 only, not on aarch64")
    monkeypatch.undo()
    monkeypatch.delattr(os, "memfd_create")
    assert available()[0] is False
    monkeypatch.undo()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert available() == (False, "darwin has no futex")
    monkeypatch.undo()

    def refused(name):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refused)
    assert available() == (
        False,
        "memory cannot be shared between processes here: [Errno 1] Operation not permitted",
    )


def test_host_key_is_that_of_the_host():
    assert host_key() == host_key()
    assert str(os.getuid()) in host_key()


def test_segment_is_seen_by_whoever_opens_it_and_by_nobody_after_close():
    made = SharedSegment.make(2 * LINE_WORDS)
    opened = SharedSegment.open(made.address, 2 * LINE_WORDS)
    made.words[LINE_WORDS] = 7
    assert opened.words[LINE_WORDS] == 7
    assert opened.bytes[4 * LINE_WORDS] == 7
    made.close()
    made.close()
    with pytest.raises(OSError, match=r"/proc/|does not hold"):
        SharedSegment.open(made.address, 2 * LINE_WORDS)
    assert opened.words[LINE_WORDS] == 7


def test_wrong_segment_is_not_taken_for_the_right_one():
    made, other = SharedSegment.make(LINE_WORDS), SharedSegment.make(LINE_WORDS)
    pid, fd, _ = made.address.split()
    with pytest.raises(OSError, match="does not hold the segment of 64 bytes"):
        SharedSegment.open(f"{pid} {fd} {other.address.split()[2]}", LINE_WORDS)
    with pytest.raises(OSError, match="does not hold the segment of 128 bytes"):
        SharedSegment.open(made.address, 2 * LINE_WORDS)
    for one in (made, other):
        one.close()


def test_sleep_ends_at_once_if_the_word_has_changed():
    made = SharedSegment.make(LINE_WORDS)
    made.words[8] = 5
    segment.sleep_while(made.address_of(8), 4, 3600.0)
    segment.sleep_while(made.address_of(8), 5, 0.001)
    segment.wake(made.address_of(8))
    made.close()
