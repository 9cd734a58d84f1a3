"""Fed: the seconds of a measured step that were waiting for data, and the step without them.

A timeline shows what threads computed.  While a rank waited for its data there is a gap before the
forward that reads them; how long a rank waited in all, its run has counted.  So that many seconds
of the gaps before forwards are data's, each gap by its length.

Ignores:  the wait before the first action of the window, which the window does not show.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from penstock.program.codes import COMPUTE, SEND, WORKS
from penstock.program.program import Program
from penstock.schedule.orders import F
from penstock.simulate.matched import Floats, match, sends_read
from penstock.simulate.measured_seconds import arrivals
from penstock.simulate.recorded import READING, Recorded
from penstock.timeline.timeline import Timeline


def data_waits(program: Program, timeline: Timeline, data_s: Sequence[float]) -> Floats:
    """Return by row of the program the seconds that its rank waited for data before it.

    data_s:   of each rank, of a step, as the run has counted them; empty: none.
    """
    code, waits_s = program.code, np.zeros(program.code.num_instructions)
    if not any(data_s):
        return waits_s
    matched, reads = match(program, timeline), sends_read(program)
    came = arrivals(program, matched, reads)
    forwards = np.flatnonzero((code.op == COMPUTE) & (code.kind == F))
    owners = np.searchsorted(code.offsets, forwards, side="right") - 1
    gaps_s = np.array(
        [
            came.reading_s[list(reads[row])].sum()
            if row in reads
            else matched.starts_s[row] - came.before_s[row]
            for row in forwards.tolist()
        ]
    ).clip(min=0.0)
    for rank, each_s in enumerate(data_s):
        own = owners == rank
        total_s = float(gaps_s[own].sum())
        if total_s > 0:
            part = min(1.0, each_s * program.num_steps / total_s)
            waits_s[forwards[own]] = part * gaps_s[own]
    return waits_s


def fed(program: Program, recorded: Recorded, waits_s: Floats, times: float) -> Recorded:
    """Return the seconds of instructions, had data come `times` times faster."""
    if times == 1.0 or not waits_s.any():
        return recorded
    saved_s, reads = waits_s * (1 - 1 / times), sends_read(program)
    own_s, message_s = saved_s.copy(), recorded.message_s
    if message_s is not None:
        rows = np.flatnonzero(program.code.op == SEND)
        message_s = message_s.copy()
        for row in np.flatnonzero(saved_s).tolist():
            if row in reads:
                at = np.searchsorted(rows, list(reads[row]))
                message_s[at, READING] -= saved_s[row] / len(at)
                own_s[row] = 0.0
        message_s = np.maximum(message_s, 0.0)
    work_s = np.maximum(recorded.work_s - own_s[WORKS[program.code.op]], 0.0)
    return replace(recorded, work_s=work_s, message_s=message_s)
