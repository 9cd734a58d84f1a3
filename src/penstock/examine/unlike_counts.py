"""Unlike counts: a loss that is a mean over what it counts, where micro-batches hold unlike many.

The mean of such means weighs a token of a short micro-batch more than one of a long one, so a step
is not that of one large batch: the known fault of accumulated gradients.  `Job.weight` mends it.
"""

from collections.abc import Iterator
from itertools import islice

from penstock.batches.reads import started
from penstock.errors import GraphError, RunError
from penstock.graph.counted import count_of, counts_in
from penstock.graph.trace import Capture
from penstock.job import Job
from penstock.processes.child import can_fork, in_a_fork

_MOST = 16  # micro-batches that are looked at
_MADE_S = 3.0
_SHOWN = 4


def words_of_counts(job: Job, captured: Capture) -> Iterator[str]:
    """Yield what a step is whose micro-batches are divided by unlike counts, and the mend."""
    if job.weight is not None or job.micro_batches == 1 or not can_fork():
        return
    if not counts_in(captured):
        return
    try:
        rows = in_a_fork(lambda beat: _counts(job, captured), _MADE_S)
    except RunError:
        return
    unlike = next((column for column in zip(*rows, strict=True) if len({*column}) > 1), None)
    if unlike is not None:
        numbers = ", ".join(f"{number:g}" for number in unlike[:_SHOWN])
        yield f"the loss divides by unlike counts ({numbers}, ... in the micro-batches of a step),"
        yield "  and a step is the mean of those means: it weighs micro-batches alike, not tokens"
        yield '  Job.weight=lambda batch: (batch["labels"] != -100).sum() makes it one of the whole'


def _counts(job: Job, captured: Capture) -> list[list[float]]:
    counts = counts_in(captured)
    batches = islice(started(job.data, 0), min(_MOST, job.micro_batches))
    try:
        return [count_of(captured, counts, batch) for batch in batches]
    except GraphError:  # one of another shape: the run says so
        return []
