"""Shapes: a session whose steps have several, from their examination to the task of the ranks.

    ps.bucketed    tells the key of each step, so all are examined, traced, planned and proved
                   before the first one
    ps.in_turn     likewise: a key is a turn

Ranks that torchrun has started make the same of the plans of rank 0.  Where ranks come and go each
has the whole model, so that nothing is lost with one.  A run to a goal, one that follows a policy
and one whose batch follows its ranks have one shape: there the job is trained without a plan, as
data that does not tell its keys.
"""

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from penstock.batches.one_key import job_of_key, keys_of
from penstock.choose.choose import Choice
from penstock.choose.keys import (
    cut_alike,
    find_key,
    is_too_large,
    largest_first,
    traced_keys,
    with_keys,
)
from penstock.choose.known_shapes import with_known_shapes
from penstock.choose.number_tensors import with_number_tensors
from penstock.choose.prepare import machines
from penstock.choose.settle import Checked, CheckOptions, NoPlanError, examined, found_of, heed
from penstock.errors import MemoryShortError, PlanError, UnlikeShapesError
from penstock.examine.impurities import UNLIKE
from penstock.job import Job
from penstock.keyed import kinds_of
from penstock.search.shapes import Fixed
from penstock.units import format_seconds

if TYPE_CHECKING:
    from penstock.choose.keys import TracedKey
    from penstock.examine.examine import Examined
    from penstock.graph.trace import Capture
    from penstock.training.session import Session


def plans_keys(session: "Session") -> bool:
    """Return whether the steps of a session have several shapes that a plan may have."""
    return len(keys_of(session.job)) > 1 and may_plan_keys(session)


def may_plan_keys(session: "Session") -> bool:
    """Return whether a session can have plans for several shapes."""
    return not _has_one_shape(session)


def _has_one_shape(session: "Session") -> str:
    """Return why the plans of a session are of one shape, in words; "": they need not be."""
    if session.goal is not None:
        return "a run to a loss finds the batch of its steps"
    if session.asked.policy is not None:
        return "a run that follows a policy has plans for one shape"
    return "Job.batch_by_ranks has plans for one" if session.job.batch_by_ranks else ""


def check_whole(session: "Session") -> None:
    """Raise unless each rank may have the whole model, where ranks come and go.

    Raises:   UnlikeShapesError: steps have several shapes, and something else was asked for.
    """
    if not (session.elastic and plans_keys(session)):
        return
    fixed, given = session.fixed, session.asked.given_plan
    is_cut = (fixed.stages or 1) > 1 or fixed.schedule is not None or fixed.offload is not None
    if is_cut or (given is not None and (given.num_stages > 1 or given.shards or given.offloads)):
        kinds = kinds_of(session.job.data)
        message = f"steps have several {kinds}: then each rank that may go has the whole model"
        raise UnlikeShapesError(message, hint="leave out stages, schedule, offload and plan")


def examined_job(session: "Session", care: CheckOptions) -> "Examined":
    """Return what the job of a session is found to be; of several shapes, what the first is that
    no plan trains, or the one that most steps have.

    Raises:   as `examined`; NoPlanError: ranks come and go.
    """
    about = care, session.listener
    check_whole(session)
    if care.eager or not plans_keys(session):
        found = found_of(session.job, session.key, *about, num_steps=session.num_steps)
        if not care.eager and _is_told_more(session, found):
            return examined_job(session, care)
        heed(found, session.job, *about)
        return found if care.eager else _of_one_shape(session, found, strict=care.strict)
    rows: list[Examined] = []
    for key in keys_of(session.job):
        job = job_of_key(session.job, key)
        rows.append(examined(job, _named(session, key), *about, num_steps=session.num_steps))
        if rows[-1].failed or rows[-1].one_process or rows[-1].no_plan:
            return rows[-1]
    return rows[0]


def _is_told_more(session: "Session", found: "Examined") -> bool:
    """Return whether a job whose micro-batches are unlike has other data now, of which there may be
    a plan.
    """
    is_asked = may_plan_keys(session) and (session.fixed.ranks or 2) > 1
    if not is_asked or not found.no_plan.startswith(UNLIKE):
        return False
    return _has_number_tensors(session) or _has_known_shapes(session)


def _has_number_tensors(session: "Session") -> bool:
    """Return whether numbers of batches, which change, are tensors now."""
    with session.listener.busy("trying numbers of the batch as tensors"):
        told = with_number_tensors(session.job)
    if told is None:
        return False
    session.tells_more(told)
    session.listener.say("numbers of the batch change: they are tensors of a plan")
    return True


def _has_known_shapes(session: "Session") -> bool:
    """Return whether data tells the shapes of micro-batches now, and did not before."""
    if keys_of(session.job):
        return False
    with session.listener.busy("looking at the shapes of all micro-batches"):
        told = with_known_shapes(session.job, session.num_steps)
    if told is None:
        return False
    session.tells_more(told)
    kinds = len(keys_of(told))
    session.listener.say(f"{session.num_steps:,} micro-batches have {kinds} shapes: a plan of each")
    return True


def _of_one_shape(session: "Session", found: "Examined", *, strict: bool) -> "Examined":
    """Return what a job is found to be for a run whose plans are of one shape: if it has several,
    no plan trains it.

    Raises:   NoPlanError: one is wanted.
    """
    kinds, is_known = kinds_of(session.job.data), found.failed or found.one_process or found.no_plan
    if is_known or kinds != "shapes" or len(keys_of(session.job)) < 2:
        return found
    why = f"steps have several shapes, and {_has_one_shape(session)}"
    hint = 'let all have one shape: last="drop"'
    if strict or session.elastic:
        raise NoPlanError(f"no plan can be made: {why}", found, hint=hint)
    session.listener.say(f"no plan can be made: {why}")
    return replace(found, no_plan=why)


def _named(session: "Session", key: object) -> str:
    return f"{session.key}; steps of {key}" if session.key else ""


def traced_shapes(session: "Session") -> "tuple[TracedKey, ...]":
    """Return the steps of a session's shapes, traced; nothing where it has one.

    Raises:   as `traced`.
    """
    if not plans_keys(session):
        return ()
    return traced_keys(session.job, session.listener, session.fixed.rules)


def with_shapes(session: "Session", choice: Choice) -> Choice:
    """Return a choice with plans for the other shapes of the job.

    Raises:   UnlikeShapesError: its division suits one shape only.
              MemoryShortError: the largest has no room.
    """
    start, there = time.perf_counter(), session.there
    cluster = there.cluster or machines(None, choice.plan.total_ranks, there.listener)
    made = with_keys(choice, session.job, session.learned.shapes, there, cluster)
    if is_too_large(made, cluster.within(session.fixed.memory)):
        raise MemoryShortError("the step of the largest shape has no room by this plan")
    made.plan.save(session.folder / "plan.json")
    seconds = format_seconds(time.perf_counter() - start)
    kinds, count = kinds_of(session.job.data), len(made.others)
    others = kinds if count > 1 else kinds.removesuffix("s")
    session.listener.say(f"planned {count} other {others} alike in {seconds}")
    return made


def chosen(session: "Session", choose: "Callable[[Fixed, Capture], Choice]") -> Choice:
    """Return a choice for all shapes of a session: made for that with most of the work, or if the
    largest has no room then for that; as one stage if the shapes cannot be cut alike.

    choose:   makes the choice for a traced step, within what is fixed.
    Raises:   as `with_shapes`, and as `choose`.
    """
    find = partial(_chosen_within, session, choose)
    if session.asked.given_plan is not None:
        return find(session.fixed)
    if session.elastic:
        return _replicated(session, find)
    return cut_alike(find, session.fixed, session.listener)


def _replicated(session: "Session", find: Callable[[Fixed], Choice]) -> Choice:
    """Return a choice in which each rank has the whole model: made for the first of the shapes
    whose steps ranks can share, where those of another are done by each of them.

    Raises:   PlanError: there is none.
    """
    shapes, problems = session.learned.shapes, list[PlanError]()
    for first in shapes:
        session.planned_for((first, *(other for other in shapes if other is not first)))
        try:
            return find(replace(session.fixed, stages=1))
        except PlanError as problem:
            problems.append(problem)
    raise problems[0]


def _chosen_within(
    session: "Session", choose: "Callable[[Fixed, Capture], Choice]", fixed: Fixed
) -> Choice:
    try:
        return with_shapes(session, choose(fixed, session.learned.shapes[0].captured))
    except MemoryShortError as problem:
        shapes = largest_first(session.learned.shapes)
        if shapes == session.learned.shapes:
            raise
        session.listener.say(f"{problem.message}: planning for the largest")
        session.planned_for(shapes)
        return with_shapes(session, choose(fixed, shapes[0].captured))


def proved_shapes(
    session: "Session", choice: Choice, prove: "Callable[[Job, Choice, str], Checked]"
) -> Checked:
    """Return how the first steps of each shape compare with the plain loop's.

    prove:    compares those of one.
    """
    if not choice.others:
        return prove(session.author, choice, session.key)
    words: list[str] = []
    for key, own in each_key(choice):
        session.listener.say(f"steps of {key}:")
        checked = prove(job_of_key(session.author, key), own, _named(session, key))
        if checked.problem:
            return checked
        words.append(f"{key}: {checked.words}")
    return Checked("; ".join(words))


def each_key(choice: Choice) -> list[tuple[Hashable, Choice]]:
    """Return the choice for the steps of each key alone, by key."""
    first = choice._replace(others=())
    others = (
        (each.key, first._replace(captured=each.captured, plan=each.plan)) for each in choice.others
    )
    return [(choice.key, first), *others]


def sizes_by_step(
    of: "tuple[Job, Sequence[TracedKey]]", choice: Choice | None, samples: int, tokens: int
) -> Callable[[int], tuple[int, int]]:
    """Return what tells the samples and tokens of a step: where all have one shape, so many.

    of:       the job, and its traced shapes.
    """
    if choice is None or not choice.others:
        return lambda step: (samples, tokens)
    (job, shapes), key_of = of, find_key(choice)
    graphs, count = {shape.key: shape.captured.graph for shape in shapes}, job.micro_batches
    rows = {key: (graph.samples * count, graph.tokens * count) for key, graph in graphs.items()}
    return lambda step: rows[key_of(step)]
