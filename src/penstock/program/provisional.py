"""Provisional: what each rank may do of a step while the update before may still be taken back.

Under post-validation (`Agreement.post_validation`) a rank begins the next step before it is known
whether the gradients have to be clipped.  Until then it does nothing but forwards and their
messages, so that all it has done can be done again with other weights.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.program.codes import COMPUTE, OFFLOAD, RECEIVE, RELOAD, RESHARD, SEND, UNSHARD
from penstock.schedule.orders import F

if TYPE_CHECKING:
    from penstock.program.program import Program

Way = tuple[int, int, int]  # edge, sender, receiver


class _Message(NamedTuple):
    """The rows of its Send, and of the first compute that reads it or a later one of its way."""

    sent: int
    sender: int
    read: int
    receiver: int


def provisional_ends(program: "Program") -> NDArray[np.int64]:
    """Return for each rank the row of the code before which everything is provisional.

    All before these rows is forwards and their messages, and reads no message that is sent behind
    them: what the ranks have done up to there can be done again.  Nothing is, where a program moves
    activations or weights to and from elsewhere.
    """
    code = program.code
    if np.isin(code.op, (OFFLOAD, RELOAD, UNSHARD, RESHARD)).any():
        return code.offsets[:-1].astype(np.int64)
    forward = _of_forwards(program)
    may = (code.op == RECEIVE) | ((code.op == COMPUTE) & (code.kind == F))
    may |= (code.op == SEND) & forward
    ends = np.array(
        [
            part.start + int(np.argmin(np.append(may[part], False)))
            for part in map(code.slice_of, range(program.num_ranks))
        ],
        np.int64,
    )
    messages = _messages(program, forward)
    while True:
        late = [m for m in messages if m.sent >= ends[m.sender] and m.read < ends[m.receiver]]
        if not late:
            return ends
        for message in late:
            ends[message.receiver] = min(ends[message.receiver], message.read)


def sent_until(program: "Program", ends: NDArray[np.int64]) -> dict[Way, int]:
    """Return how many messages are sent each way before these rows of each rank."""
    code, counts = program.code, dict[Way, int]()
    for sender, end in enumerate(ends.tolist()):
        first = code.slice_of(sender).start
        for row in (first + np.flatnonzero(code.op[first:end] == SEND)).tolist():
            way = int(code.edge[row]), sender, int(code.peer[row])
            counts[way] = counts.get(way, 0) + 1
    return counts


def _of_forwards(program: "Program") -> NDArray[np.bool_]:
    """Return by row whether it sends or receives what a forward has made."""
    code = program.code
    of_edge = np.array([edge.kind == "F" for edge in program.edges], np.bool_)
    found = (code.op == SEND) | (code.op == RECEIVE)
    found[found] = of_edge[code.edge[found]]
    return found


def _messages(program: "Program", forward: NDArray[np.bool_]) -> list[_Message]:
    """Return the messages from forwards to forwards on other ranks."""
    code = program.code
    owners = np.repeat(np.arange(program.num_ranks), np.diff(code.offsets)).tolist()
    sent: dict[tuple[int, int, int, int], int] = {}
    for row in np.flatnonzero((code.op == SEND) & forward).tolist():
        way = int(code.edge[row]), owners[row], int(code.peer[row])
        sent[*way, int(code.micro_batch[row])] = row
    reads: dict[tuple[int, int, int], int] = {}
    for row in np.flatnonzero((code.op == COMPUTE) & (code.kind == F)).tolist():
        reads[owners[row], int(code.stage[row]), int(code.micro_batch[row])] = row
    found: list[_Message] = []
    later: dict[Way, int] = {}  # the first row that reads a message behind, on each way
    for row in np.flatnonzero((code.op == RECEIVE) & forward).tolist()[::-1]:
        edge, receiver, sender = int(code.edge[row]), owners[row], int(code.peer[row])
        way, number = (edge, sender, receiver), int(code.micro_batch[row])
        own = reads[receiver, program.edges[edge].target, number]
        later[way] = min(own, later.get(way, own))
        found.append(_Message(sent[*way, number], sender, later[way], receiver))
    return found
