"""Keys: the steps of several shapes of one job, each traced, and planned with one division.

The plan is found for the step in which most of the time is spent, and holds for all: same stages,
same ranks, so that state stays where it is.  The mean over the steps as they come is predicted, and
the peak of the largest.
"""

import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from penstock.batches.one_key import job_of_key, keys_of
from penstock.choose.choose import Choice, Machines, PlannedKey, decided, predicted
from penstock.choose.joined_counts import parts_alike
from penstock.choose.prepare import traced
from penstock.cluster.cluster import Cluster
from penstock.errors import (
    GraphError,
    PlanError,
    ScheduleError,
    UnlikeCutsError,
    UnlikeShapesError,
)
from penstock.job import Job
from penstock.keyed import keyed, kinds_of
from penstock.listener import Listener
from penstock.plan.lower_plan import stages_of
from penstock.plan.of_key import for_key
from penstock.plan.plan import Decision, Plan, Prediction, is_asynchronous
from penstock.rules.rule import Rule
from penstock.runtime.key_steps import check_alike
from penstock.schedule.grid import evenly, unlike
from penstock.search.shapes import Fixed
from penstock.taken import Taken, words
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
    if plan.terms.joined > 1 or (plan.terms.split, plan.tensor) != ((), 1):
        message = f"{several}, and this plan joins them, or divides ops"
        raise UnlikeShapesError(message, hint="make the plan for this job")
    from penstock.graph.merge import merged

    others = [planned_alike(choice, job, step, there, cluster) for step in steps[1:]]
    key, traced_s = steps[0].key, sum(step.seconds for step in steps)
    own = merged(job, plan.terms.joined, first.batch.division)
    first_row = PlannedKey(key, steps[0].share, first, plan, own)
    whole = _with_mean(kinds_of(job.data), [first_row, *others], traced_s)
    return Choice(own, first, whole, key, tuple(others))


def planned_alike(
    choice: Choice, job: Job, step: TracedKey, there: Machines, cluster: Cluster
) -> PlannedKey:
    """Return the plan of a step of another key, by the same stages on the same ranks.

    Its micro-batches are divided as suits their own number of samples; or each replica does them
    whole, if they can be shared in no way, or if that is as fast.
    Raises:   UnlikeShapesError: there is no such plan.  UnlikeCutsError: none with these stages.
    """
    found, problem = list[PlannedKey](), PlanError("there is no way")
    for captured, parts in _divisions(choice.plan, step):
        try:
            found.append(_divided_alike(choice, (job, step), captured(), parts, there, cluster))
        except (GraphError, PlanError, ScheduleError) as why:
            problem = why
    if not found:
        if isinstance(problem, UnlikeCutsError):
            raise problem
        message = f"steps of {step.key} cannot follow the plan of the others"
        raise UnlikeShapesError(f"{message}: {problem}", hint="let all have one shape")
    return min(found, key=lambda one: one.plan.predicted.step_s if one.plan.predicted else 0.0)


def _divisions(plan: Plan, step: TracedKey) -> "Iterator[tuple[Callable[[], Capture], int]]":
    """Yield how micro-batches of a key may be divided, and into how many parts each, if at all."""
    from penstock.graph.joined.divided_batch import divided, done_by_each

    whole, count = step.captured, step.job.micro_batches
    if plan.terms.joined == 1:
        yield lambda: whole, 1
        return
    several = False
    for parts in parts_alike(plan, whole.graph.samples, count):
        several = several or count * parts % plan.replicas > 0
        yield partial(divided, whole, parts), parts
    if several or plan.replicas > count:  # a share that is larger, or none that can be
        each = plan.replicas // math.gcd(plan.replicas, count)
        yield partial(done_by_each, whole, each), each


def _divided_alike(
    choice: Choice,
    of: tuple[Job, TracedKey],
    captured: "Capture",
    parts: int,
    there: Machines,
    cluster: Cluster,
) -> PlannedKey:
    """Return the plan of a step whose micro-batches are divided into so many parts.

    Raises:   PlanError, ScheduleError: it cannot be divided so.  UnlikeCutsError: as `for_key`.
    """
    from penstock.graph.merge import merged

    (job, step), first = of, (choice.captured, stages_of(choice.plan, choice.captured.graph))
    own, graph = for_key(choice.plan, first[0].graph, captured.graph)
    own = _sharing(own, step.job.micro_batches * parts, Fraction(1, parts))
    captured = replace(captured, graph=graph, model=first[0].model)
    check_alike(first, (captured, stages_of(own, graph)))
    per_key = merged(step.job, own.terms.joined, captured.batch.division)
    profiles = there.profile(captured, per_key, cluster, there.listener)
    own = predicted(own, graph, profiles, cluster)
    whole = merged(job, own.terms.joined, captured.batch.division)
    return PlannedKey(step.key, step.share, captured, own, whole)


def _sharing(plan: Plan, count: int, joined: Taken) -> Plan:
    """Return a plan whose replicas share so many micro-batches of a step."""
    if count == plan.step_micro_batches:
        return plan.changed(joined=joined)
    own = plan.place.shares
    times, rest = divmod(count, sum(own) or 1)
    shares = tuple(times * share for share in own) if own and not rest else ()
    shares = shares or evenly(count, plan.replicas)
    return plan.changed(joined=joined, num_micro_batches=max(shares), shares=unlike(shares))


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
    told = (
        f"{row.key} {row.share:.0%} {format_seconds(said.step_s)}{_in_parts(row)}"
        for row, said in known
    )
    why = "one division for all; the mean is predicted, and the memory of the largest; "
    why += f"traced in {format_seconds(traced_s)}"
    mean = Prediction(step_s, peaks, usd, plan.predicted.tried)
    made = decided(plan, [Decision(kinds, ", ".join(told), "only choice", why)])
    return replace(made, predicted=mean)


def _in_parts(row: PlannedKey) -> str:
    """Return into what its micro-batches are divided, in words; empty: nothing."""
    division = row.captured.batch.division
    if division is None:
        return ""
    return f" {words(row.plan.terms.joined)}" if division.rows else " whole on each replica"


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
    from penstock.graph.merge import unjoined

    author, _ = unjoined(choice.job)
    data = keyed(author.data)
    assert data is not None, "only keyed data has several keys"
    count: Any = author.micro_batches
    return lambda step: data.key_of(step * count)


def is_too_large(choice: Choice, cluster: Cluster) -> bool:
    """Return whether the largest of the steps needs more memory than some rank has."""
    said = choice.plan.predicted
    peaks = () if said is None else said.peak_bytes
    return any(peak > cluster.memory_of(rank) for rank, peak in enumerate(peaks))


def largest_first(steps: Sequence[TracedKey]) -> tuple[TracedKey, ...]:
    """Return these steps, that with the most FLOP first."""
    return tuple(sorted(steps, key=lambda each: -each.captured.graph.flop))
