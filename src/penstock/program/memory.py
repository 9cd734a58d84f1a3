"""V5, memory: how many bytes each rank holds at most, and whether that fits.

Held all the time: the gradient of each stage, the optimizer's state, one version of the weights.
Beside it, walking along the program:

    weights       a further version from the Update that made a newer one to its last reader; the
                  rule's history to the end
    activations   of a micro-batch, from F to B or I;  deferred: from I to W
    slots         a message, from its Receive to the last use
    sharded       1 / replicas of weights, gradient and state; all weights from Unshard to Reshard

Ignores:  values made here until they are sent; what a kernel needs while it runs; the allocator.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ProgramError
from penstock.program.codes import COMPUTE, RECEIVE, RESHARD, UNSHARD, UPDATE, excerpt
from penstock.program.loops import loop, part
from penstock.program.program import Program
from penstock.program.rules import Columns
from penstock.program.verify import columns
from penstock.program.wiring import Wiring, wire
from penstock.schedule.orders import B, F, I, W
from penstock.units import format_bytes


class Held(NamedTuple):
    """Bytes per stage and per message, and the room of the walk."""

    weights: NDArray[np.int64]
    activations: NDArray[np.int64]
    deferred: NDArray[np.int64]
    message: NDArray[np.int64]  # edge -> bytes
    posted: NDArray[np.uint8]  # [edge, micro-batch]: it is in a slot of the rank at hand
    last_read: NDArray[np.int64]  # [stage, version + oldest] -> row, or -1
    history: NDArray[np.int64]  # stage -> versions before version 0 that are kept
    updates: NDArray[np.int64]  # stage -> updates so far


class Window(NamedTuple):
    """The window of a program."""

    micro_batches: int
    steps: int
    oldest: int  # the greatest history of all stages
    backward: bool


def peak_bytes(program: Program) -> tuple[int, ...]:
    """Return for each rank the most bytes that it holds at once.

    Raises:   ValueError: the program does not know the sizes of its stages.
    """
    return tuple(_peaks(program)[0].tolist())


def check_memory(program: Program, cap_bytes: int | Sequence[int]) -> None:
    """Return when no rank ever holds more than its cap.

    Raises:   ProgramError: one does: at which instruction, and how much.
    """
    caps = [cap_bytes] * program.num_ranks if isinstance(cap_bytes, int) else list(cap_bytes)
    peaks, rows = (values.tolist() for values in _peaks(program))
    for rank, (peak, cap, row) in enumerate(zip(peaks, caps, rows, strict=True)):
        if peak > cap:
            where = (
                f"after {program.code.between(slice(row, row + 1))[0]}"
                if row >= 0
                else "before it begins"
            )
            head = (
                f"rank {rank} holds {format_bytes(peak)} {where}; it may hold {format_bytes(cap)}"
            )
            shown = f"\n{excerpt(program.code, row)}" if row >= 0 else ""
            hint = "use more stages or ranks, fewer micro-batches in flight, recompute or shard"
            raise ProgramError(head + shown, hint=hint)


def _peaks(program: Program) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return for each rank its peak, and the row after which it is reached (-1: from the start)."""
    if not program.stage_bytes:
        raise ValueError("this program has no stage_bytes; lower it with the sizes of its stages")
    history = program.weight_rule.history(program.num_stages, program.num_micro_batches)
    window = Window(
        program.num_micro_batches * program.num_steps,
        program.num_steps,
        int(history.max()),
        bool((program.code.kind[program.code.op == COMPUTE] != F).any()),
    )
    sizes = np.array(program.stage_bytes, np.int64)
    held = Held(
        np.ascontiguousarray(sizes[:, 0]),
        np.ascontiguousarray(sizes[:, 2]),
        np.ascontiguousarray(sizes[:, 3]),
        np.array([edge.size_bytes for edge in program.edges], np.int64),
        np.zeros(len(program.edges) * window.micro_batches, np.uint8),
        np.zeros(program.num_stages * (window.steps + window.oldest + 1), np.int64),
        history,
        np.zeros(program.num_stages, np.int64),
    )
    peaks = _always_held(program)
    rows = np.full(program.num_ranks, -1, np.int64)
    _walk(columns(program.code), wire(program.num_stages, program.edges), window, held, peaks, rows)
    return peaks, rows


def _always_held(program: Program) -> NDArray[np.int64]:
    """Return for each rank the bytes of weights, gradient and optimizer state of its stages."""
    code = program.code
    total = np.zeros(program.num_ranks, np.int64)
    for rank in range(program.num_ranks):
        part = code.slice_of(rank)
        sharded = set(np.unique(code.stage[part][code.op[part] == UNSHARD]).tolist())
        for stage in program.stages_of(rank):
            one = program.stage_bytes[stage]
            whole = 2 * one.weights + one.optimizer
            total[rank] += -(-whole // program.replicas) if stage in sharded else whole
    return total


@loop
def _walk(
    code: Columns,
    wiring: Wiring,
    window: Window,
    held: Held,
    peaks: NDArray[np.int64],
    rows: NDArray[np.int64],
) -> None:
    """Raise `peaks` from what is always held to the most that is held; note in `rows` where."""
    for rank in range(len(peaks)):
        now = peaks[rank] + _old_versions(rank, code, window, held)
        peaks[rank] = now
        for row in range(code.offsets[rank], code.offsets[rank + 1]):
            op, freed = code.op[row], 0
            if op == COMPUTE:
                now += _taken_by(code.kind[row], code.stage[row], held)
                freed = _freed_by(row, code, wiring, window, held)
            elif op == RECEIVE:
                now += held.message[code.edge[row]]
                held.posted[code.edge[row] * window.micro_batches + code.micro_batch[row]] = 1
            elif op == UNSHARD:
                now += held.weights[code.stage[row]]
            elif op == RESHARD:
                now -= held.weights[code.stage[row]]
            elif op == UPDATE:
                now += _update(row, code, window, held)
            if now > peaks[rank]:
                peaks[rank], rows[rank] = now, row
            now -= freed


@part
def _old_versions(rank: int, code: Columns, window: Window, held: Held) -> int:
    """Note the last reader of each version; return the bytes of those older than version 0."""
    versions = window.steps + window.oldest + 1
    held.last_read[:] = -1
    held.updates[:] = 0
    for row in range(code.offsets[rank], code.offsets[rank + 1]):
        if code.op[row] == COMPUTE:
            at = code.stage[row] * versions + code.version[row] + window.oldest
            held.last_read[at] = row
    total = 0
    for stage in range(len(held.weights)):
        for version in range(window.oldest):
            if held.last_read[stage * versions + version] >= 0:
                total += held.weights[stage]
    return total


@part
def _taken_by(kind: int, stage: int, held: Held) -> int:
    if kind == F:
        return held.activations[stage]
    return held.deferred[stage] - held.activations[stage] if kind == I else 0


@part
def _freed_by(row: int, code: Columns, wiring: Wiring, window: Window, held: Held) -> int:
    """Return the bytes that a Compute frees: saved values, slots, a version of the weights."""
    kind, stage, micro_batch = code.kind[row], int(code.stage[row]), code.micro_batch[row]
    freed = 0
    if kind == B or not window.backward:
        freed += held.activations[stage]
    elif kind == W:
        freed += held.deferred[stage]
    if kind in (B, W) or not window.backward:
        for place in range(wiring.into_offsets[2 * stage], wiring.into_offsets[2 * stage + 2]):
            at = wiring.into[place] * window.micro_batches + micro_batch
            freed += held.posted[at] * held.message[wiring.into[place]]
            held.posted[at] = 0
    version = int(code.version[row])
    versions = window.steps + window.oldest + 1
    is_old = version < held.updates[stage] and version < window.steps - held.history[stage]
    if is_old and held.last_read[stage * versions + version + window.oldest] == row:
        freed += int(held.weights[stage])
    return int(freed)


@part
def _update(row: int, code: Columns, window: Window, held: Held) -> int:
    """Return the bytes of a further version: none where nobody reads the old one again."""
    stage, version = int(code.stage[row]), int(code.micro_batch[row])
    held.updates[stage] = version + 1
    versions = window.steps + window.oldest + 1
    read_later = held.last_read[stage * versions + version + window.oldest] > row
    kept = version >= window.steps - held.history[stage]
    return int(held.weights[stage]) if read_later or kept else 0
