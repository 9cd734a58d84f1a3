"""Buffer terms: what those that forward writes leave of a plan, and whether a plan heeds them."""

from collections.abc import Sequence

from penstock.errors import PlanError
from penstock.graph.graph import Graph
from penstock.job import Job
from penstock.plan.plan import Decision, Plan, is_asynchronous
from penstock.schedule.recipe import name_of
from penstock.search.shapes import Fixed
from penstock.state.laws.measured import Laws

_MOST_NAMED = 3


def fixed_for(job: Job, laws: Laws, fixed: Fixed) -> tuple[Fixed, Decision | None]:
    """Return what the buffers leave of `fixed`, and the decision; None where none is written.

    The decision's value is that of `Plan.terms.buffers`.
    """
    if not laws:
        return fixed, None
    ordered = {name: law for name, law in laws.items() if law.is_ordered}
    if job.buffers == "per replica":
        why = f"as Job.buffers says, the first replica's are saved: {_listed(laws)}"
        fit = fixed.needing(buffers="per replica", in_order=fixed.needs.in_order or bool(ordered))
        return fit, Decision("buffers", "per replica", "user", why)
    if ordered:
        why = f"must see every micro-batch in order: {_listed(ordered)}"
        fit = fixed.needing(buffers="one copy")
        return fit, Decision("buffers", "one copy", "only choice", why)
    why = f"as in the plain loop, whatever the copies: {_listed(laws)}"
    return fixed, Decision("buffers", "exact", "only choice", why)


def check_chosen(plan: Plan, job: Job, graph: Graph) -> None:
    """Raise unless plan and job agree on the buffers that forward writes, and on what is rounded.

    Raises:   PlanError: in one of them each replica has its own, in the other not; or the plan
              sends numbers in fewer bits than the job allows, or updates before it is known
              whether the step is to be left out.
    """
    undoes = plan.agreement.clip and plan.agreement.post_validation
    if job.scales_loss and (is_asynchronous(plan) or undoes):
        what = name_of(plan.schedule) if is_asynchronous(plan) else "post_validation"
        message = f"{what} updates before it is known whether the step overflows in float16"
        hint = 'set Job.precision="bfloat16", or take a synchronous schedule that updates last'
        raise PlanError(message, hint=hint)
    if any(bits < fewest for bits, fewest in zip(plan.terms.wire, job.fewest_bits, strict=True)):
        own, fewest = (" and ".join(map(str, row)) for row in (plan.terms.wire, job.fewest_bits))
        message = f"the plan sends numbers in {own} bits (there, back); the job allows {fewest}"
        raise PlanError(message, hint=f"make a new plan, or set Job.wire_bits={plan.terms.wire}")
    if plan.agreement.sums != job.sums and plan.total_ranks > 1:
        own, asked = plan.agreement.sums or "as they are", job.sums or "as they are"
        message = f"the plan sums gradients over ranks that travel {own}; Job.sums says {asked}"
        raise PlanError(message, hint=f"make a new plan, or set Job.sums={plan.agreement.sums!r}")
    apart = plan.averages or plan.served
    if apart and graph.written and job.buffers != "per replica":
        message = f"ranks agree as {apart} says, with buffers that forward writes"
        hint = 'set Job.buffers="per replica": each replica has its own weights, and so its own'
        raise PlanError(message, hint=hint)
    replicas = "per replica"
    if (plan.terms.buffers == replicas) == (job.buffers == replicas) or not graph.written:
        return
    message = f'the plan has buffers "{plan.terms.buffers}", and Job.buffers is "{job.buffers}"'
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
