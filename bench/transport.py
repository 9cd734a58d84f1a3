"""How long a message and a sum take over each transport: `python -m bench.transport [--json]`.

Two processes play ping-pong; one way is half of it.  Transports and sizes take turns, so
that noise of the machine meets all of them.  `best_us` is the least of the rounds, and
`median_us` their median; `bytes_per_s` is the size over the best.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from bench.machine import machine
from penstock.transport import TensorSpec, Transport
from penstock.transport.shared_memory import SharedMemoryTransport
from penstock.transport.threads import thread_transports
from penstock.transport.torch_distributed import TorchDistributedTransport
from penstock.units import KiB, MiB, format_bytes

SIZES = (64, 4 * KiB, 64 * KiB, 256 * KiB, MiB, 4 * MiB, 16 * MiB)
SUM_SIZES = (4, 64 * KiB, MiB, 28 * MiB)
ROUND_BYTES = 8 * MiB  # a round of messages moves about so much, in 4 to 100 messages
PAIR = (0, 1)


def rounds_of(end: Transport) -> dict[tuple[str, int], Callable[[], float]]:
    """Bind everything; return, by operation and size, a round that returns its seconds."""
    peer, rounds = 1 - end.rank, {}
    for edge, size_bytes in enumerate(SIZES):
        spec = (TensorSpec((size_bytes // 4,), torch.float32),)
        send = end.bind_send(edge, peer, spec)
        _, wait = end.bind_receive(edge, peer, spec)
        rounds["message", size_bytes] = ping_pong(end.rank, size_bytes, send, wait)
    for size_bytes in SUM_SIZES:
        rounds["sum", size_bytes] = summing(end, size_bytes)
    end.barrier()
    return rounds


def ping_pong(rank: int, size_bytes: int, send, wait) -> Callable[[], float]:
    count = max(4, min(100, ROUND_BYTES // size_bytes))
    message = [torch.ones(size_bytes // 4)]

    def play() -> float:
        start = time.perf_counter()
        for _ in range(count):
            if rank == 0:
                send(message)
                wait()
            else:
                send(wait())
        return (time.perf_counter() - start) / count / 2

    return play


def summing(end: Transport, size_bytes: int) -> Callable[[], float]:
    count = max(1, min(20, ROUND_BYTES // size_bytes))
    summand = torch.zeros(size_bytes // 4)

    def add() -> float:
        start = time.perf_counter()
        for _ in range(count):
            end.all_reduce(summand, PAIR)
        return (time.perf_counter() - start) / count

    return add


def measure(rank: int, path: str, num_rounds: int) -> list[dict[str, object]]:
    """Play one of the two processes; return the rows (the same on both, rank 0's clock counts)."""
    torch.set_num_threads(1)
    store = dist.FileStore(path, 2)
    dist.init_process_group("gloo", store=dist.PrefixStore("d", store), rank=rank, world_size=2)
    shared = SharedMemoryTransport(rank, 2, dist.PrefixStore("s", store))
    gloo = TorchDistributedTransport(torch.device("cpu"), dist.PrefixStore("g", store.clone()))
    ends: dict[str, Transport] = {"shared_memory": shared, "gloo": gloo}
    played = {name: rounds_of(end) for name, end in ends.items()}
    if rank == 0:
        played["threads"] = rounds_in_threads()
    seconds: dict[tuple[str, str, int], list[float]] = {}
    for turn in range(num_rounds + 1):
        for key, name in itertools.product(played["gloo"], ("shared_memory", "gloo", "threads")):
            shared.barrier()
            if name in played:
                took = played[name][key]()
                if turn:  # the first touches memory
                    seconds.setdefault((key[0], name, key[1]), []).append(took)
    for end in ends.values():
        end.barrier()
        end.close()
    dist.destroy_process_group()
    return [row(*key, all_seconds) for key, all_seconds in sorted(seconds.items())]


def rounds_in_threads() -> dict[tuple[str, int], Callable[[], float]]:
    """Return rounds that this thread plays with another one of this process."""
    ours, theirs = thread_transports(2)
    turns = {}

    def other() -> None:
        turns.update(rounds_of(theirs))
        while (key := theirs.broadcast_bytes(b"", PAIR).decode()) != "":
            operation, size_bytes = key.split()
            turns[operation, int(size_bytes)]()

    threading.Thread(target=other, daemon=True).start()
    own = rounds_of(ours)

    def with_other(key: tuple[str, int]) -> float:
        ours.broadcast_bytes(f"{key[0]} {key[1]}".encode(), PAIR)
        return own[key]()

    return {key: lambda key=key: with_other(key) for key in own}


def row(operation: str, name: str, size_bytes: int, seconds: list[float]) -> dict[str, object]:
    return {
        "operation": operation,
        "transport": name,
        "size_bytes": size_bytes,
        "best_us": min(seconds) * 1e6,
        "median_us": statistics.median(seconds) * 1e6,
        "bytes_per_s": size_bytes / min(seconds),
    }


def run(num_rounds: int) -> dict[str, object]:
    """Fork the two processes and return {"rows": ..., "machine": ...}."""
    about = machine()
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for rank in PAIR:
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    rows = measure(rank, f"{folder}/store", num_rounds)
                    if rank == 0:
                        with open(f"{folder}/rows.json", "w", encoding="utf-8") as file:
                            json.dump(rows, file)
                    code = 0
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        if codes != [0, 0]:
            raise SystemExit(f"error: the two processes exited with {codes}")
        with open(f"{folder}/rows.json", encoding="utf-8") as file:
            return {"rows": json.load(file), "machine": about}


def show(rows: list[dict[str, object]]) -> None:
    cells = {(r["operation"], r["size_bytes"], r["transport"]): r for r in rows}
    names = ("shared_memory", "threads", "gloo")
    print(f"{'best (median) us, one way':>27}" + "".join(f"{name:>22}" for name in names))
    for operation, size_bytes in dict.fromkeys((r["operation"], r["size_bytes"]) for r in rows):
        line = f"{operation:>16} {format_bytes(size_bytes):>10}"
        for name in names:
            cell = cells[operation, size_bytes, name]
            line += f"{cell['best_us']:>11,.1f} ({cell['median_us']:,.1f})".rjust(22)
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    result = run(options.rounds)
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        show(result["rows"])
        print(", ".join(f"{key} {value}" for key, value in result["machine"].items()))


if __name__ == "__main__":
    main()
