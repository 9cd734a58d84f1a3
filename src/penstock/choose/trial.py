"""Trial: the best few distinct plans take turns at some real steps, and the fastest is run.

A prediction may be wrong, on a busy machine by a lot.  So what is run was faster, here and now,
than plain replicas and than one process, wherever these could have been faster.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from penstock import taken
from penstock.choose.choose import Choice, Machines, Searched, best_like
from penstock.errors import PlanError, RunError
from penstock.plan.fits import divided_what
from penstock.plan.plan import Decision, Plan
from penstock.schedule.recipe import Recipe, name_of, units_of
from penstock.search.shapes import Fixed
from penstock.units import format_seconds

if TYPE_CHECKING:
    from penstock.state.laws.buffers import Laws

NEAR = 1.15  # a plan that is predicted to take longer by this is no finalist, but see `finalists`
WORTH_S = 30.0  # a run that is predicted to take less is over before a trial would pay
_MOST_SHAPES = 2  # finalists that are cut like none before them, besides the best and the plain
_TURN_S, _MOST_STEPS = 0.6, 5  # of a turn: its first step, which is not counted, and more
_TURNS = 2
_EVEN = 0.03  # a difference that two turns do not settle: then fewer stages, then fewer ranks

Timer = Callable[[Choice, int], list[float]]


@dataclass(slots=True, eq=False)
class Finalist:
    """A plan that is tried, and the seconds of its steps; why it was left, if it was."""

    choice: Choice
    seconds: list[float] = field(default_factory=list[float])
    left: str = ""

    @property
    def predicted_s(self) -> float:
        """Return the seconds that a step should take."""
        predicted = self.choice.plan.predicted
        assert predicted is not None, "a search predicts"
        return predicted.step_s

    @property
    def step_s(self) -> float:
        """Return the median of the measured seconds; infinite without any."""
        return statistics.median(self.seconds) if self.seconds else float("inf")

    @property
    def took(self) -> str:
        """Return what was measured, in words, or why nothing was."""
        return self.left or f"{format_seconds(self.step_s)} measured"

    def __str__(self) -> str:
        plan = self.choice.plan
        what = f"{plan.replicas} x {_whole_stages(plan)} stages by {name_of(plan.schedule)}"
        joined = f", {taken.words(plan.terms.joined)}" if plan.terms.joined != 1 else ""
        joined += f", {divided_what(plan)} divided among {plan.tensor}" if plan.tensor > 1 else ""
        joined += f" in {plan.num_stages} units" if units_of(plan.schedule) else ""
        joined += ", compiled" if plan.terms.compiled else ""
        return f"{what}{joined}: {self.took}, {format_seconds(self.predicted_s)} predicted"


def is_worth_it(plan: Plan, num_steps: int) -> bool:
    """Return whether a run of so many steps is long enough to be tried before."""
    return plan.predicted is not None and plan.predicted.step_s * num_steps >= WORTH_S


def finalists(found: Searched, fixed: Fixed, there: Machines) -> list[Choice]:
    """Return the best plan of a search, and the best of those that decide otherwise what is open.

    These are up to two with other numbers of stages, one with micro-batches joined otherwise and
    one with another schedule, if they are predicted to be near; and, where `fixed` leaves them,
    plain replicas and one process, whatever is predicted of them.
    """
    best = found.choice.plan
    limit = NEAR * best.predicted.step_s if best.predicted else 0.0
    near = sorted(
        (
            (each.step_s, at, each.plan)
            for option in found.options
            for at, each in enumerate(option.found.candidates)
            if not each.refused and each.step_s <= limit
        ),
        key=lambda row: row[:2],
    )
    plans = [plan for _, _, plan in near]
    variants: list[Fixed] = []
    if fixed.stages is None:
        own = _whole_stages(best), 1
        others = [s for s in dict.fromkeys(map(_whole_stages, plans)) if s not in own]
        variants += [replace(fixed, stages=stages) for stages in others[:_MOST_SHAPES]]
        variants += [replace(fixed, stages=1)]
        variants += [replace(fixed, stages=1, ranks=1)] if fixed.ranks is None else []
    variants += list(islice(_other_schedules(best, plans, fixed), 1))
    choices = [found.choice, *islice(_joined_otherwise(found, limit), 1)]
    for each in variants:
        try:
            choice = _untold(best_like(found, each, there), fixed)
        except PlanError:  # nothing of that kind fits
            continue
        if all(_bare(choice) != _bare(other) for other in choices):
            choices.append(choice)
    return choices


def _joined_otherwise(found: Searched, limit_s: float) -> Iterator[Choice]:
    """Yield the best plans of other ways of joining micro-batches, if they are near; best first."""
    others = (o for o in found.options if o.way.joined != found.choice.plan.terms.joined)
    for option in sorted(others, key=lambda option: option.best.step_s):
        if option.best.step_s <= limit_s:
            yield option.choice


def _other_schedules(best: Plan, near: Sequence[Plan], fixed: Fixed) -> Iterator[Fixed]:
    """Yield what fixes other schedules of the best plan's stages and ranks, the best first."""
    own = name_of(best.schedule), _whole_stages(best), best.replicas, best.num_ranks
    for plan in near:
        recipe, shape = plan.schedule, (_whole_stages(plan), plan.replicas, plan.num_ranks)
        is_like = fixed.schedule is None and shape == own[1:] and plan.num_ranks > 1
        if is_like and isinstance(recipe, Recipe) and name_of(recipe) != own[0]:
            each = replace(recipe, seconds=None, units=(), woven=False)
            sizes = {"stages": shape[0], "replicas": plan.replicas, "ranks": plan.total_ranks}
            yield replace(fixed, schedule=each, **sizes)


def _untold(choice: Choice, fixed: Fixed) -> Choice:
    """Return a choice that does not say of a variant that somebody has asked for it."""
    open_ones = {"stages", "schedule", "replicas", "ranks"}
    asked = {name for name in open_ones if getattr(fixed, name) is not None}
    said = tuple(
        replace(each, by="search", why="tried beside the best of the search: see trial")
        if each.by == "user" and each.what in open_ones - asked
        else each
        for each in choice.plan.decisions
    )
    return choice._replace(plan=replace(choice.plan, decisions=said))


def _whole_stages(plan: Plan) -> int:
    """Return the stages of the schedule itself, their units not counted."""
    return len(units_of(plan.schedule)) or plan.num_stages


def _bare(choice: Choice) -> object:
    return replace(choice.plan, decisions=(), predicted=None)


def tried(choices: Sequence[Choice], time: Timer, *, trusting: bool = True) -> list[Finalist]:
    """Return the plans after their turns, the fastest first.

    One whose prediction, an error taken off, is above what another one has taken has no turn; of
    two that differ by less than 3 % the one with fewer stages, then fewer ranks, then what is not
    compiled, comes first.
    time:      runs some steps of a plan, and returns the seconds of those after the first.
    trusting:  whether a prediction is reason enough for that.
    Raises:   RunError: the ranks of every one of them failed.
    """
    found = [Finalist(choice) for choice in choices]
    failure: RunError | None = None
    for turn in range(_TURNS):
        for each in sorted(found, key=lambda one: one.predicted_s):
            fastest = min(one.step_s for one in found)
            if each.left or (turn and each.step_s > NEAR * fastest):
                continue
            if trusting and each.predicted_s > NEAR * fastest:
                each.left = "not tried"
                continue
            try:
                each.seconds += time(each.choice, _steps_of(each.predicted_s))
            except RunError as problem:
                each.left, failure = f"failed ({problem.message.splitlines()[0]})", problem
                each.seconds.clear()
    if failure is not None and not any(each.seconds for each in found):
        raise failure
    fastest = min(each.step_s for each in found)
    return sorted(found, key=partial(_place, fastest=fastest))


def _place(one: Finalist, *, fastest: float) -> tuple[float, ...]:
    plan = one.choice.plan
    is_even = one.step_s <= (1 + _EVEN) * fastest
    simple = plan.num_stages, plan.total_ranks, plan.terms.compiled
    return (0.0, *simple, one.step_s) if is_even else (1.0, one.step_s, *simple)


def _steps_of(step_s: float) -> int:
    return 1 + max(1, min(_MOST_STEPS, int(_TURN_S / max(step_s, 1e-9)) - 1))


def decision(order: Sequence[Finalist]) -> Decision:
    """Return what the trial decided, with the figures of all that were in it."""
    first, *others = order
    why = f"{first}; " + "; ".join(map(str, others))
    return Decision("trial", f"{format_seconds(first.step_s)} a step", "search", why)


def seconds_of(laws: "Laws", choice: Choice, num_steps: int) -> list[float]:
    """Return the seconds of the first steps of a plan on its ranks, without the very first.

    laws:     of the buffers that forward writes.
    Raises:   RunError: a rank failed.
    """
    from penstock.plan.lower_plan import lower_plan, stages_of
    from penstock.runtime.launch import local_launcher
    from penstock.runtime.run import Steps
    from penstock.runtime.windows import repeated
    from penstock.runtime.worker import Task, work

    plan, graph = choice.plan, choice.captured.graph
    program = lower_plan(plan, graph)
    task = Task(
        capture=choice.captured,
        stages=stages_of(plan, graph),
        job=choice.job,
        windows=repeated(program, range(num_steps)),
        laws=laws,
        compiled=plan.terms.compiled,
    ).compile_ahead()
    steps = Steps(choice.job.micro_batches)
    launch = local_launcher(plan.total_ranks)
    launch(partial(work, task), plan.total_ranks, steps.add, groups=task.groups)
    return [step.seconds for step in steps.finished][1:]
