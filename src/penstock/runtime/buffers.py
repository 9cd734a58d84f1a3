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
"""

from collections.abc import Sequence
from dataclasses import replace

from penstock.errors import PlanError
from penstock.graph.cut_points import written_buffers
from penstock.graph.graph import Graph
from penstock.graph.linear import crooked
from penstock.graph.trace import Capture
from penstock.job import Job
from penstock.plan import Decision, Plan, is_asynchronous
from penstock.runtime.measured import BufferLaw, Laws, measured_laws
from penstock.schedule.recipe import name_of
from penstock.search import Fixed

__all__ = [
    "BufferLaw",
    "Laws",
    "buffer_laws",
    "check_chosen",
    "fixed_for",
    "settled",
]

_MOST_NAMED = 3
_UNWRITTEN = "forward did not write it when it was tried"
_UNTRACED = "the step is not traced, so its next value may be another one in a later micro-batch"


def buffer_laws(job: Job, capture: Capture | None = None) -> dict[str, BufferLaw]:
    """Return the law of every buffer that forward writes, by its name in the model.

    capture:  the traced step, if there is one: without writes there, nothing is run.
    Frozen parameters that forward writes, such as a teacher's, count as buffers.  It costs at most
    four micro-batches of the uncut model in this process, two of them without a backward.

    Raises:   JobError: the model or the loss raises, or there is no data.
    """
    if capture is not None and not written_buffers(capture.graph):
        return {}
    return settled(measured_laws(job), capture)


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
    return found


def _unsettled(law: BufferLaw) -> BufferLaw:
    return law if law.coefficient is None else BufferLaw(None, _UNTRACED)


def fixed_for(job: Job, laws: Laws, fixed: Fixed) -> tuple[Fixed, Decision | None]:
    """Return what the buffers leave of `fixed`, and the decision; None where none is written.

    The decision's value is that of `Plan.buffers`.
    """
    if not laws:
        return fixed, None
    ordered = {name: law for name, law in laws.items() if law.coefficient is None}
    if job.buffers == "per replica":
        why = f"as Job.buffers says, the first replica's are saved: {_listed(laws)}"
        fit = replace(fixed, buffers="per replica", in_order=fixed.in_order or bool(ordered))
        return fit, Decision("buffers", "per replica", "user", why)
    if ordered:
        why = f"must see every micro-batch in order: {_listed(ordered)}"
        fit = replace(fixed, buffers="one copy")
        return fit, Decision("buffers", "one copy", "only choice", why)
    why = f"as in the plain loop, whatever the copies: {_listed(laws)}"
    return fixed, Decision("buffers", "exact", "only choice", why)


def check_chosen(plan: Plan, job: Job, graph: Graph) -> None:
    """Raise unless plan and job agree on the buffers that forward writes, and on what is rounded.

    Raises:   PlanError: in one of them each replica has its own, in the other not; or the plan
              sends numbers in fewer bits than the job allows, or updates before it is known
              whether the step is to be left out.
    """
    if job.scales_loss and (is_asynchronous(plan) or (plan.clip and plan.post_validation)):
        what = name_of(plan.schedule) if is_asynchronous(plan) else "post_validation"
        message = f"{what} updates before it is known whether the step overflows in float16"
        hint = 'set Job.precision="bfloat16", or take a synchronous schedule that updates last'
        raise PlanError(message, hint=hint)
    if any(bits < fewest for bits, fewest in zip(plan.wire, job.fewest_bits, strict=True)):
        own, fewest = (" and ".join(map(str, row)) for row in (plan.wire, job.fewest_bits))
        message = f"the plan sends numbers in {own} bits (there, back); the job allows {fewest}"
        raise PlanError(message, hint=f"make a new plan, or set Job.wire_bits={plan.wire}")
    if plan.sums != job.sums and plan.total_ranks > 1:
        own, asked = plan.sums or "as they are", job.sums or "as they are"
        message = f"the plan sums gradients over ranks that travel {own}; Job.sums says {asked}"
        raise PlanError(message, hint=f"make a new plan, or set Job.sums={plan.sums!r}")
    replicas = "per replica"
    if (plan.buffers == replicas) == (job.buffers == replicas) or not written_buffers(graph):
        return
    message = f'the plan has buffers "{plan.buffers}", and Job.buffers is "{job.buffers}"'
    raise PlanError(message, hint="make a new plan, or set Job.buffers to what the plan says")


def _listed(laws: Laws) -> str:
    """Return the laws in words, each with the first names to which it applies."""
    names: dict[str, list[str]] = {}
    for name, law in laws.items():
        names.setdefault(str(law), []).append(name)
    return "; ".join(f"{_some(row)} ({law})" for law, row in names.items())


def _some(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
