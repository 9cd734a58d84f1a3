"""Links: what a message and a sum cost between two ranks of this host, measured in a second."""

import math
import statistics
import time

import torch

from penstock.cluster import Link
from penstock.runtime.launch import run_processes
from penstock.runtime.transport import TensorSpec, Transport
from penstock.runtime.worker import RankResult, Report
from penstock.units import MiB

_SMALL = (TensorSpec((16,), torch.float32),)
_LARGE = (TensorSpec((MiB // 4,), torch.float32),)
_SUMMED = TensorSpec((4 * MiB // 4,), torch.float32)
_ROUNDS = 60


def measure_link() -> Link:
    """Return the link between two ranks that are processes of this host.

    overhead_s and copy_bytes_per_s are from the computing thread's own time at both ends,
    latency_s from half a round trip less those, bytes_per_s from an all-reduce of 4 MiB.
    """
    result = run_processes(_ping_pong, 2, lambda step: None)[0]
    small_s, large_s, trip_s, sum_s = result.window_s
    per_byte = max(1e-13, (large_s - small_s) / _LARGE[0].size_bytes)
    return Link(
        latency_s=max(1e-6, trip_s / 2 - 2 * small_s),
        bytes_per_s=_SUMMED.size_bytes / sum_s,
        overhead_s=small_s,
        copy_bytes_per_s=1.0 / per_byte if per_byte > 1e-13 else math.inf,
    )


def _ping_pong(transport: Transport, report: Report) -> RankResult:
    rank, peer = transport.rank, 1 - transport.rank
    ends = {
        edge: (
            transport.bind_send(2 * edge + rank, peer, specs),
            transport.bind_receive(2 * edge + peer, peer, specs)[1],
        )
        for edge, specs in enumerate((_SMALL, _LARGE))
    }
    transport.barrier()
    figures: list[float] = []
    trips: list[float] = []
    for edge, specs in enumerate((_SMALL, _LARGE)):
        send, wait = ends[edge]
        message = [torch.zeros(spec.shape, dtype=spec.dtype) for spec in specs]
        ends_s: list[float] = []
        for _ in range(_ROUNDS):
            start, cpu = time.perf_counter(), time.thread_time()
            if rank == 0:
                send(message)
                ends_s.append(time.thread_time() - cpu)
                wait()
            else:
                wait()
                send(message)
            trips.append(time.perf_counter() - start)
        figures.append(statistics.median(ends_s or [0.0]))
    summed, sums = torch.zeros(_SUMMED.shape, dtype=_SUMMED.dtype), list[float]()
    for _ in range(8):
        start = time.perf_counter()
        transport.all_reduce(summed, (0, 1))
        sums.append(time.perf_counter() - start)
    small_trip = statistics.median(trips[:_ROUNDS])
    window_s = (*figures, small_trip, statistics.median(sums[2:]))
    return RankResult(rank, (), (), 0, window_s, 0.0, {})
