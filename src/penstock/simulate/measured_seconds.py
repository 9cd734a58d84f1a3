"""Replay: the seconds of every instruction of a measured run, for `simulate`.

    recorded = record(program, measured)
    replayed = simulate(program, recorded)       the step once more, on a computed clock

A measured timeline holds what computing threads did, not what they waited for.  That is in the
gaps: a thread that reaches a compute waits for its messages and copies them out, then runs.

    what works        its span; a gap before it where no message is read is its own
    Send              its span.  The message may be there before it ends (the sender may lose the
                      processor to the reader it wakes): it is under way from the Send's start on
    reading           the gap before a compute whose messages were there already.  Where they were
                      not, the median of those gaps on the same rank, and the rest was waiting
    under way         known for the message that was waited for.  For others, the median between the
                      same ranks, but no longer than until their reader found them there
    a begun copy      from when its thread began it, and the copy before was over, until its end
    Reduction, Unshard   from when the last of its members reached it, and was through with the sums
                      before, until each was through: beside the thread, up to the next update

Replayed unchanged, every action begins and ends when it was measured, as far as the clocks of the
ranks agree.

Ignores:  that a Send waits where the reader leaves no room for more messages: that is its own time.
"""

import statistics
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from penstock.errors import TimelineError
from penstock.program.codes import (
    BEGIN_OFFLOAD,
    BEGIN_RELOAD,
    COMPUTE,
    JOINS,
    OFFLOAD,
    RECEIVE,
    RELOAD,
    SEND,
    SHOWN,
    UNSHARD,
    WAITS_FOR_SUMS,
    WORKS,
    begun,
)
from penstock.program.program import Program
from penstock.simulate.matched import (
    Floats,
    Matched,
    awaited_first,
    match,
    members,
    sends_read,
)
from penstock.simulate.recorded import READING, SENDING, UNDER_WAY, Recorded
from penstock.timeline.timeline import Timeline


def record(program: Program, timeline: Timeline) -> Recorded:
    """Return the seconds of every instruction of `program` in its measured `timeline`.

    Raises:   TimelineError: not a timeline of this program, or one that is not measured.
    """
    matched = match(program, timeline)
    op = program.code.op
    if not matched.is_measured:
        hint = "give the measured.trace.json of a run"
        raise TimelineError("the timeline was not measured by a run", hint=hint)
    reads = sends_read(program)
    came = arrivals(program, matched, reads)
    begins_s = came.before_s.copy()
    begins_s[list(reads)] = matched.starts_s[list(reads)]  # what is before that is the messages'
    for row, begin_s in _copies_begin_s(program, matched, came).items():
        begins_s[row] = begin_s
    message_s = np.zeros((len(op), 3))
    message_s[:, SENDING] = matched.ends_s - came.before_s
    message_s[:, UNDER_WAY] = came.there_s - came.before_s
    message_s[:, READING] = came.reading_s
    return Recorded(
        np.maximum(matched.ends_s - begins_s, 0.0)[WORKS[op]],
        _sums_s(program, matched, came)[JOINS[op]],
        np.maximum(message_s[op == SEND], 0.0),
        came.start_s,
    )


class Arrivals(NamedTuple):
    """When each computing thread reached each of its rows, and messages their readers.

    start_s:    [rank]: when the thread began; 0 where it began by waiting for a message.
    before_s:   [row]: when the thread had done all that stands before it; of a reduction, when the
                sums before it were over too.  Of what is in a timeline, and of what begins a copy.
    there_s:    [row of a Send]: when its message was there.
    reading_s:  [row of a Send]: what its message cost the reader's thread.
    """

    start_s: Floats
    before_s: Floats
    there_s: Floats
    reading_s: Floats


def arrivals(program: Program, matched: Matched, reads: Mapping[int, tuple[int, ...]]) -> Arrivals:
    """Return who arrived when in a measured run; `reads` is what `sends_read` returns."""
    count = program.code.num_instructions
    start_s, before_s = _walk(program, matched, reads)
    came = Arrivals(start_s, before_s, np.full(count, np.nan), np.full(count, np.nan))
    found, waited = list[int](), list[int]()
    for row, sends in reads.items():
        was_there = all(matched.ends_s[send] <= before_s[row] for send in sends)
        (found if was_there else waited).append(row)
    gaps_s: defaultdict[int, list[float]] = defaultdict(list)
    for row in found:
        gap_s = matched.starts_s[row] - before_s[row]
        gaps_s[program.code.rank_at(row)].append(gap_s)
        came.reading_s[list(reads[row])] = gap_s / len(reads[row])
    usual_s = {rank: statistics.median(gaps) for rank, gaps in gaps_s.items()}
    ways_s: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for row in waited:
        sends, rank = reads[row], program.code.rank_at(row)
        last = max(sends, key=lambda send: before_s[send])
        room_s = matched.starts_s[row] - max(before_s[row], before_s[last])
        reading_s = max(0.0, min(usual_s.get(rank, 0.0), room_s))
        came.reading_s[list(sends)] = reading_s / len(sends)
        came.there_s[last] = max(matched.starts_s[row] - reading_s, before_s[last])
        ways_s[program.code.rank_at(last), rank].append(came.there_s[last] - before_s[last])
    _fill(program, matched, reads, came, {k: statistics.median(v) for k, v in ways_s.items()})
    return came


def _fill(
    program: Program,
    matched: Matched,
    reads: Mapping[int, tuple[int, ...]],
    came: Arrivals,
    usual_s: Mapping[tuple[int, int], float],
) -> None:
    """Fill in the arrival times of messages that nobody waited for."""
    for row, sends in reads.items():
        rank, copied_s = program.code.rank_at(row), float(came.reading_s[list(sends)].sum())
        latest_s = matched.starts_s[row] - copied_s
        for send in sends:
            if np.isnan(came.there_s[send]):
                own_s = matched.ends_s[send] - came.before_s[send]
                way_s = usual_s.get((program.code.rank_at(send), rank), own_s)
                there_s = min(came.before_s[send] + way_s, latest_s)
                came.there_s[send] = max(there_s, came.before_s[send])


def _walk(
    program: Program, matched: Matched, reads: Mapping[int, tuple[int, ...]]
) -> tuple[Floats, Floats]:
    """Return when each thread began, and when it reached each row, counted from the first span."""
    op, offsets = program.code.op, program.code.offsets.tolist()
    starts_s, before_s = np.zeros(program.num_ranks), np.zeros(len(op))
    begins = np.isin(op, (BEGIN_OFFLOAD, BEGIN_RELOAD))
    shown, after = (SHOWN[op] | begins) & (op != RECEIVE), awaited_first(program)
    for rank in range(program.num_ranks):
        rows = np.flatnonzero(shown[offsets[rank] : offsets[rank + 1]]) + offsets[rank]
        first = next(row for row in rows.tolist() if not begins[row])
        now_s = 0.0 if first in reads else float(matched.starts_s[first])
        starts_s[rank] = now_s
        summed_s = now_s
        whole_s = dict[int, float]()  # by stage: when its weights are there
        for row in rows.tolist():
            if WAITS_FOR_SUMS[op[row], program.code.kind[row]]:
                now_s = max(now_s, summed_s)
            if op[row] == COMPUTE:
                now_s = max(now_s, whole_s.pop(int(program.code.stage[row]), now_s))
            if row in after:
                now_s = max(now_s, float(matched.ends_s[after[row]]))
            before_s[row] = now_s
            if begins[row]:
                continue
            if JOINS[op[row]]:  # it is begun, and the thread goes on
                before_s[row] = max(now_s, summed_s)
                summed_s = float(matched.ends_s[row])
                whole_s |= {int(program.code.stage[row]): summed_s} if op[row] == UNSHARD else {}
            else:
                now_s = max(now_s, float(matched.ends_s[row]))
    return starts_s, before_s


def _copies_begin_s(program: Program, matched: Matched, came: Arrivals) -> dict[int, float]:
    """Return by row of an Offload or Reload that was begun: when its lane could begin to copy.

    Not when it began: a lane that was late was held up by what else the machine did.
    """
    code, could = program.code, dict[int, float]()
    for begin_op, op in ((BEGIN_OFFLOAD, OFFLOAD), (BEGIN_RELOAD, RELOAD)):
        waits = begun(code) & (code.op == op)
        for first, end in pairwise(code.offsets.tolist()):
            begun_s, free_s = dict[tuple[int, ...], float](), 0.0
            for row in range(first, end):
                what = int(code.kind[row]), int(code.stage[row]), int(code.micro_batch[row])
                if code.op[row] == begin_op:
                    begun_s[what] = float(came.before_s[row])
                elif waits[row]:
                    could[row] = max(begun_s.pop(what), free_s)
                    free_s = float(matched.ends_s[row])
    return could


def _sums_s(program: Program, matched: Matched, came: Arrivals) -> Floats:
    """Return by row of a reduction or Unshard the seconds from when its last member came."""
    sums_s = np.zeros(len(program.code.op))
    for row, group in members(program).items():
        last_s = max(float(came.before_s[member]) for member in group)
        sums_s[row] = max(0.0, float(matched.ends_s[row]) - last_s)
    return sums_s
