"""Keys: the steps of several shapes of one job, each traced, and planned with one division.

The plan is found for the step in which most of the time is spent, and holds for all: same stages,
same ranks, so that state stays where it is.  The mean over the steps as they come is predicted, and
the peak of the largest.
"""

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from penstock.batches.one_key import job_of_key, keys_of
from penstock.choose.choose import Choice, Machines, PlannedKey, decided, predicted
from penstock.choose.prepare import traced
from penstock.cluster.cluster import Cluster
from penstock.errors import UnlikeCutsError, UnlikeShapesError
from penstock.job import Job
from penstock.keyed import keyed, kinds_of
from penstock.listener import Listener
from penstock.plan.lower_plan import stages_of
from penstock.plan.of_key import for_key
from penstock.plan.plan import Decision, Plan, Prediction, is_asynchronous
from penstock.rules.rule import Rule
from penstock.runtime.key_steps import check_alike
from penstock.search.shapes import Fixed
from penstock.units import format_seconds

if TYPE_CHECKING:
    from penstock.graph.trace import Capture


Found = TypeVar("Found")


class TracedKey(NamedTuple):
    """The traced step of one key of a job.

    share:    of all steps.
    job:      of the steps of this key alone.
    seconds:  that tracing took.
    """

    key: Hashable
    share: float
    job: Job
    captured: "Capture"
    seconds: float


def traced_keys(job: Job, listener: Listener, rules: Sequence[Rule]) -> tuple[TracedKey, ...]:
    """Return the steps of all keys, that with the most FLOP over all its steps first.

    Nothing where there is one.

    Their weights are those of the first one's model.
    Raises:   as `traced`.
    """
    keys, found = keys_of(job), list[TracedKey]()
    if len(keys) < 2:
        return ()
    for key, count in keys.items():
        start, own = time.perf_counter(), job_of_key(job, key)
        captured = traced(own, listener, rules=rules)
        share = count / sum(keys.values())
        seconds = time.perf_counter() - start
        found.append(TracedKey(key, share, own, captured, seconds))
        listener.say(f"steps of {key}: {share:.0%} of all, traced in {format_seconds(seconds)}")
    found.sort(key=lambda each: -each.share * each.captured.graph.flop)
    model = found[0].captured.model
    return tuple(each._replace(captured=replace(each.captured, model=model)) for each in found)


def with_keys(
    choice: Choice, job: Job, steps: Sequence[TracedKey], there: Machines, cluster: Cluster
) -> Choice:
    """Return a choice for the first of these steps with plans for the others, by the same division.

    job:      of all keys.
    Raises:   UnlikeShapesError: a step cannot be divided so, or several are under way at once.
    """
    plan, first = choice.plan, choice.captured
    several = f"the steps of the job have several {kinds_of(job.data)}"
    if is_asynchronous(plan) or plan.agreement.post_validation:
        message = f"{several}, and this plan lets steps overlap"
        hint = "take a synchronous schedule, without post-validation"
        raise UnlikeShapesError(message, hint=hint)
    if plan.holds_back or plan.averages or plan.served:
        message = f"{several}, and ranks agree over several steps"
        raise UnlikeShapesError(message, hint=f"leave out sums = {plan.agreement.sums}")
    if (plan.terms.joined, plan.terms.split, plan.tensor) != (1, (), 1):
        message = f"{several}, and this plan joins or divides them"
        raise UnlikeShapesError(message, hint="make the plan for this job")
    others, stages = list[PlannedKey](), stages_of(plan, first.graph)
    for step in steps[1:]:
        own, graph = for_key(plan, first.graph, step.captured.graph)
        captured = replace(step.captured, graph=graph)
        check_alike((first, stages), (captured, stages_of(own, graph)))
        profiles = there.profile(captured, step.job, cluster, there.listener)
        own = predicted(own, graph, profiles, cluster)
        others.append(PlannedKey(step.key, step.share, captured, own))
    key, traced_s = steps[0].key, sum(step.seconds for step in steps)
    first_row = PlannedKey(key, steps[0].share, first, plan)
    whole = _with_mean(kinds_of(job.data), [first_row, *others], traced_s)
    return Choice(job, first, whole, key, tuple(others))


def _with_mean(kinds: str, rows: Sequence[PlannedKey], traced_s: float) -> Plan:
    """Return the plan of the first row with the mean seconds of all, and the bytes of the largest.

    traced_s:  what tracing them all took.
    """
    plan = rows[0].plan
    known = [(row, row.plan.predicted) for row in rows if row.plan.predicted is not None]
    if plan.predicted is None or len(known) < len(rows):
        return plan
    step_s = sum(row.share * said.step_s for row, said in known)
    usd = sum(row.share * said.usd for row, said in known)
    peaks = tuple(map(max, zip(*(said.peak_bytes for _, said in known), strict=True)))
    told = (f"{row.key} {row.share:.0%} {format_seconds(said.step_s)}" for row, said in known)
    why = "one division for all; the mean is predicted, and the memory of the largest; "
    why += f"traced in {format_seconds(traced_s)}"
    mean = Prediction(step_s, peaks, usd, plan.predicted.tried)
    made = decided(plan, [Decision(kinds, ", ".join(told), "only choice", why)])
    return replace(made, predicted=mean)


def cut_alike(find: Callable[[Fixed], Found], fixed: Fixed, listener: Listener) -> Found:
    """Return what `find` finds within what is fixed; of one stage where steps cannot be cut alike.

    Raises:   UnlikeCutsError: they cannot, and stages or their order are fixed.
              UnlikeShapesError: it has a decision that does not suit several kinds of steps.
    """
    try:
        return find(fixed)
    except UnlikeCutsError as problem:
        if fixed.stages is not None or fixed.schedule is not None:
            raise
        listener.say(f"{problem.message}: planning it as one stage")
    return find(replace(fixed, stages=1))


def find_key(choice: Choice) -> Callable[[int], Hashable]:
    """Return what tells the key of a step."""
    data = keyed(choice.job.data)
    assert data is not None, "only keyed data has several keys"
    count: Any = choice.job.micro_batches
    return lambda step: data.key_of(step * count)


def is_too_large(choice: Choice, cluster: Cluster) -> bool:
    """Return whether the largest of the steps needs more memory than some rank has."""
    said = choice.plan.predicted
    peaks = () if said is None else said.peak_bytes
    return any(peak > cluster.memory_of(rank) for rank, peak in enumerate(peaks))


def largest_first(steps: Sequence[TracedKey]) -> tuple[TracedKey, ...]:
    """Return these steps, that with the most FLOP first."""
    return tuple(sorted(steps, key=lambda each: -each.captured.graph.flop))
