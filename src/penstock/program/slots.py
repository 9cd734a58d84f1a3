"""Slots: where a rank keeps what it has received, until the last use."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.program.codes import COMPUTE, RECEIVE, SEND, Numbers
from penstock.program.loops import loop, part
from penstock.program.rules import Columns
from penstock.program.wiring import Wiring
from penstock.schedule.orders import B, W


def assign_slots(
    code: Columns,
    slots: Numbers,
    wiring: Wiring,
    where: tuple[NDArray[np.int64], int, int],
    backward: bool,
) -> None:
    """Fill `slots`: the smallest free slot of its edge for each Receive, and the same for its Send.

    A slot is taken from the Receive to the last use by the edge's target: B, or W where B is split
    (the received gradient may be an operand of W), or F where there is no backward.
    `where`: the replica of each rank, micro-batches of the window, and of a B or W.
    """
    replica, micro_batches, _ = where
    num_edges = len(wiring.source)
    pool = SlotPool(
        np.full((int(replica[-1]) + 1) * num_edges * micro_batches, -1, np.int32),
        np.zeros(num_edges * micro_batches, np.uint8),
        np.zeros(num_edges, np.int64),
    )
    _assign(code, slots, wiring, pool, where, backward)


class SlotPool(NamedTuple):
    """Which slots are taken, and by what."""

    slot_of: NDArray[np.int32]  # message -> slot
    taken: NDArray[np.uint8]  # slots by (edge, slot)
    lowest: NDArray[np.int64]  # edge -> no slot below this one is free


@loop
def _assign(
    code: Columns,
    slots: Numbers,
    wiring: Wiring,
    pool: SlotPool,
    where: tuple[NDArray[np.int64], int, int],
    backward: bool,
) -> None:
    replica, micro_batches, together = where
    for rank in range(len(code.offsets) - 1):
        first = replica[rank] * len(wiring.source)
        for row in range(code.offsets[rank], code.offsets[rank + 1]):
            op, kind, micro_batch = code.op[row], code.kind[row], code.micro_batch[row]
            if op == RECEIVE:
                edge = int(code.edge[row])
                slots[row] = _take(edge, micro_batches, pool)
                pool.slot_of[(first + edge) * micro_batches + micro_batch] = slots[row]
            elif op == COMPUTE and (kind in (B, W) or not backward):
                key = 2 * int(code.stage[row])
                for place in range(wiring.into_offsets[key], wiring.into_offsets[key + 2]):
                    edge = int(wiring.into[place])
                    message = int((first + edge) * micro_batches + micro_batch)
                    for member in range(together if backward else 1):
                        slot = int(pool.slot_of[message + member])
                        if slot >= 0:
                            pool.taken[edge * micro_batches + slot] = 0
                            pool.lowest[edge] = min(pool.lowest[edge], slot)
    for rank in range(len(code.offsets) - 1):
        first = replica[rank] * len(wiring.source)
        for row in range(code.offsets[rank], code.offsets[rank + 1]):
            if code.op[row] == SEND:
                message = (first + code.edge[row]) * micro_batches + code.micro_batch[row]
                slots[row] = pool.slot_of[message]


@part
def _take(edge: int, micro_batches: int, pool: SlotPool) -> int:
    slot = pool.lowest[edge]
    while pool.taken[edge * micro_batches + slot]:
        slot += 1
    pool.taken[edge * micro_batches + slot] = 1
    pool.lowest[edge] = slot + 1
    return slot
