"""Buffers: how the next value of each tensor that forward writes follows from the one before.

A buffer is linear if its next value is c * old + x, where c is one number and neither x nor the
loss, a gradient or another buffer depends on the old value: the running statistics of a batch
norm, counters, sums, moving averages that nothing reads.  Copies of a stage can carry those
exactly (carried.py).  Any other has to see all micro-batches in order, in one place.

Neither is assumed.  That a buffer is linear for every micro-batch is read off the ops of the traced
step (graph/linear.py); where there is none, it is known of torch's own norms, as long as they are
called as often in each micro-batch.  What c is, is measured, and what is read off is confirmed: the
uncut model runs eagerly on two micro-batches, the first time so that it is seen what reads what
(flow.py), then with other values in the buffers: the loss and every gradient must keep all their
bits, and c must be the same everywhere.

One with a row for each place of a step (step_places.py) is of neither kind: whoever takes a place
holds its row.
"""

from math import nan

from penstock.graph.by_place import rows_by_place
from penstock.graph.linear import crooked
from penstock.graph.trace import Capture
from penstock.job import Job
from penstock.state.laws.measured import BufferLaw, Laws, measured_laws

__all__ = [
    "BufferLaw",
    "Laws",
    "buffer_laws",
    "laws_in",
    "settled",
]

_UNWRITTEN = "forward did not write it when it was tried"
_UNTRACED = "the step is not traced, so its next value may be another one in a later micro-batch"


def buffer_laws(job: Job, capture: Capture | None = None) -> dict[str, BufferLaw]:
    """Return the law of every buffer that forward writes, by its name in the model.

    capture:  the traced step, if there is one: without writes there, nothing is run.
    Frozen parameters that forward writes, such as a teacher's, count as buffers.  It costs at most
    four micro-batches of the uncut model in this process, two of them without a backward.

    Raises:   JobError: the model or the loss raises, or there is no data.
    """
    if capture is not None and not capture.graph.written:
        return {}
    return settled(measured_laws(job), capture)


def laws_in(capture: Capture) -> dict[str, BufferLaw]:
    """Return the law of every buffer that forward writes, read off the traced step alone.

    The coefficients of linear ones are not known: nothing is run.
    """
    rows = crooked(capture).items()
    found = {name: BufferLaw(None, why) if why else BufferLaw(nan) for name, why in rows}
    return found | _placed(capture)


def settled(measured: Laws, capture: Capture | None) -> dict[str, BufferLaw]:
    """Return the laws that hold whatever the batch: of what was only measured, there is none.

    capture:  the traced step; None: there is none, and forward may do something else each time.
    """
    if capture is None:
        return {name: law if law.calls else _unsettled(law) for name, law in measured.items()}
    bent = crooked(capture)
    found = {name: BufferLaw(None, why or _UNWRITTEN) for name, why in bent.items()}
    for name, law in measured.items():
        why = bent.get(name, "the traced step does not write it")
        found[name] = law if not why or law.coefficient is None else BufferLaw(None, why)
    return found | _placed(capture)


def _placed(capture: Capture) -> dict[str, BufferLaw]:
    return {name: BufferLaw(None, places=count) for name, count in rows_by_place(capture).items()}


def _unsettled(law: BufferLaw) -> BufferLaw:
    return law if law.coefficient is None else BufferLaw(None, _UNTRACED)
