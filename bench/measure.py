"""Measure: what the benches share - ranks as processes, sides that take turns, quiet blocks.

A side is a call that every rank makes at the same time: one step of one system.  Sides take
turns in short blocks, there and back, so that a change of the machine meets all of them.
A block is kept if other processes had less than a tenth of a core meanwhile.
"""

import ctypes
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from penstock.transport import Transport

Side = Callable[[], object]
_PR_SET_PDEATHSIG = 1
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


# -- sides that take turns ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Turns:
    """How long to measure: blocks of about `block_s`, until each side has `wanted` quiet ones.

    limit:      blocks of each side at most; then the quietest ones have to do.
    max_other:  cores that other processes may have during a quiet block.
    """

    wanted: int = 9
    limit: int = 36
    block_s: float = 0.6
    max_other: float = 0.1


class Block(NamedTuple):
    """One side's turn: some steps one after another.

    step_s:   of each step, from the start of the first rank to the end of the last one.
    cpu_s:    of all threads of all ranks, per step.
    other:    cores that other processes had meanwhile, from the ticks of /proc/stat.
    notes:    what the side returned on this rank, for each step.
    """

    step_s: tuple[float, ...]
    cpu_s: float
    other: float
    notes: tuple[Any, ...]


def take_turns(
    sides: Mapping[str, Side], end: Transport, turns: Turns, seldom: Container[str] = ()
) -> dict[str, list[Block]]:
    """Return the blocks of each side; every rank calls this with the same sides.

    seldom:  sides that sit out two turns of three, and need a third of the blocks.
    """
    counts = {name: _warm_up(side, end, turns) for name, side in sides.items()}
    wanted = {name: -(-turns.wanted // 3) if name in seldom else turns.wanted for name in sides}
    blocks: dict[str, list[Block]] = {name: [] for name in sides}
    for turn in range(turns.limit):
        here = [name for name in sides if turn % 3 == 0 or name not in seldom]
        for name in here[:: 1 if turn % 2 == 0 else -1]:
            blocks[name].append(_block(sides[name], end, counts[name]))
        if all(len(quiet(row, turns)) >= wanted[name] for name, row in blocks.items()):
            break
    return blocks


def _warm_up(side: Side, end: Transport, turns: Turns) -> int:
    """Run two steps; return how many of them make a block."""
    seconds = 0.0
    for _ in range(2):
        end.barrier()
        start = time.perf_counter()
        side()
        end.barrier()
        seconds = time.perf_counter() - start
    count = max(1, round(turns.block_s / seconds))
    return int(end.broadcast_bytes(str(count).encode(), _everyone(end)))


def _block(side: Side, end: Transport, count: int) -> Block:
    end.barrier()
    began, busy, cpu = time.perf_counter(), busy_s(), time.process_time()
    times: list[tuple[float, float]] = []
    notes: list[object] = []
    for _ in range(count):
        end.barrier()
        start = time.perf_counter()
        notes.append(side())
        times.append((start, time.perf_counter()))
    end.barrier()
    cpu, busy = time.process_time() - cpu, busy_s() - busy
    mine = [times, cpu, busy, time.perf_counter() - began]
    told = end.all_gather_bytes(json.dumps(mine).encode(), _everyone(end))
    ranks = [json.loads(text) for text in told]
    own = sum(rank_cpu for _, rank_cpu, _, _ in ranks)
    _, _, busy, wall = ranks[0]
    steps = zip(*(rank_times for rank_times, _, _, _ in ranks), strict=True)
    step_s = (max(stop for _, stop in step) - min(start for start, _ in step) for step in steps)
    return Block(tuple(step_s), own / count, max(0.0, busy - own) / wall, tuple(notes))


def _everyone(end: Transport) -> tuple[int, ...]:
    return tuple(range(end.num_ranks))


def busy_s() -> float:
    """Return the seconds that all cores were busy or stolen since the machine started."""
    with open("/proc/stat", encoding="ascii") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = ticks
    return (user + nice + system + irq + softirq + steal) / _TICKS_PER_S


def quiet(blocks: Sequence[Block], turns: Turns) -> list[Block]:
    """Return the blocks during which other processes had little."""
    return [block for block in blocks if block.other <= turns.max_other]


class Figure(NamedTuple):
    """What was measured of one side: medians over the steps of its quiet blocks.

    low_s, high_s:  first and ninth tenth.
    kept, blocks:   quiet blocks of all blocks; 0 kept: none was quiet, these are of the quietest.
    """

    step_s: float
    low_s: float
    high_s: float
    cpu_s: float
    kept: int
    blocks: int


def figure(blocks: Sequence[Block], turns: Turns) -> Figure:
    """Return the figures of one side."""
    chosen = chosen_of(blocks, turns)
    steps = sorted(step for block in chosen for step in block.step_s)
    tenth = len(steps) // 10
    return Figure(
        step_s=statistics.median(steps),
        low_s=steps[tenth],
        high_s=steps[-1 - tenth],
        cpu_s=statistics.median(block.cpu_s for block in chosen),
        kept=len(quiet(blocks, turns)),
        blocks=len(blocks),
    )


def chosen_of(blocks: Sequence[Block], turns: Turns) -> list[Block]:
    """Return the quiet blocks, or the quietest quarter if there are fewer than three."""
    kept = quiet(blocks, turns)
    if len(kept) >= min(3, len(blocks)):
        return kept
    return sorted(blocks, key=lambda block: block.other)[: max(1, len(blocks) // 4)]


# -- ranks ----------------------------------------------------------------------------------------


def in_ranks(work: Callable[[int, Path], object], num_ranks: int = 2) -> list[Any]:
    """Return the results of `work(rank, folder)`, a forked process for each rank, as JSON values.

    Each has one thread to compute with.  The folder is theirs alone, and gone afterwards.
    Raises:   SystemExit: a rank failed, after its traceback was written to stderr; none is left.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        processes: list[multiprocessing.context.ForkProcess] = []
        pipes: list[Connection] = []
        try:
            for rank in range(num_ranks):  # no rank holds the writing end of another one
                receiver, sender = context.Pipe(duplex=False)
                arguments = (work, rank, Path(folder), sender)
                processes.append(context.Process(target=_live, args=arguments, daemon=True))
                pipes.append(receiver)
                processes[-1].start()
                sender.close()
            return _answers(pipes)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
            for pipe in pipes:
                pipe.close()


def _answers(pipes: list[Connection]) -> list[Any]:
    answers: dict[int, Any] = {}
    while len(answers) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in answers]
        for pipe in multiprocessing.connection.wait(waiting):
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                answers[rank] = json.loads(pipes[rank].recv_bytes())
            except EOFError:
                raise SystemExit(f"error: rank {rank} of the bench failed") from None
    return [answers[rank] for rank in range(len(pipes))]


def _live(work: Callable[[int, Path], object], rank: int, folder: Path, pipe: Connection) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    try:
        pipe.send_bytes(json.dumps(work(rank, folder)).encode())
    except BaseException:  # noqa: BLE001 - told on stderr; the parent stops
        traceback.print_exc()
    finally:
        pipe.close()
        os._exit(0)  # not the parent's exit handlers
