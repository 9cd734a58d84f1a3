"""Explain: what each decision of a plan gains, predicted; and of a run, what was measured.

predicted gain   the plan simulated with this decision alone undone (search/undone.py), less
                 the plan as it is: seconds of a step, bytes of the fullest rank
measured         the part of the step that the decision is about, beside its prediction.  Only
                 one plan was run: what another one takes was not measured, but in a trial
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, cast

from penstock.errors import ClusterError, PlanError, ProfileError, ScheduleError
from penstock.files import Json, read_json
from penstock.pilot.phases import UntilFile, figures_of, until_in
from penstock.pilot.replan_log import replanned
from penstock.plan.decision_words import Words, value_of
from penstock.plan.plan import Decision, Plan
from penstock.schedule.recipe import Recipe, words_of
from penstock.schedule.schedule import Schedule
from penstock.search.candidate import Candidate
from penstock.search.judge import Judge
from penstock.search.undone import Undone, undone
from penstock.timeline.breakdown import (
    PART_WORDS,
    Breakdown,
    Part,
    breakdown_from_json,
    breakdown_of,
)
from penstock.timeline.timeline import Timeline, num_steps
from penstock.training.saved import load_basis

_PARTS: dict[str, tuple[Part, ...]] = {  # of a step, that a decision is about
    "ranks": ("F", "B", "I", "W"),
    "replicas": ("collectives", "meeting"),
    "stages": ("messages", "waiting"),
    "cuts": ("messages", "waiting"),
    "schedule": ("messages", "waiting"),
    "recompute": ("B", "I"),
    "offload": ("copies",),
    "copies": ("copies",),
    "wire": ("messages", "waiting"),
    "post-validation": ("meeting",),
    "receives": ("messages", "waiting"),
    "units": ("collectives", "meeting"),
    "shard": ("collectives", "meeting"),
    "compiled": ("F", "B", "I", "W"),
}
_NOT_UNDONE = "not simulated: nothing to undo, or it needs another search, graph or profile"


class PartSeconds(NamedTuple):
    """What a part of a step takes on each rank, the mean, in both clocks."""

    what: str
    predicted_s: float | None
    measured_s: float


@dataclass(frozen=True, slots=True)
class Gain:
    """What a plan would be with one decision otherwise: why it cannot be, or its figures."""

    otherwise: str
    step_s: float
    peak_bytes: int
    gain_s: float
    gain_bytes: int
    refused: str = ""


@dataclass(frozen=True, slots=True)
class ExplainedDecision:
    """One decision, what it gains, and what was measured of what it is about."""

    decision: Decision
    gain: Gain | None
    measured: PartSeconds | None


@dataclass(frozen=True, slots=True)
class SeenPlan:
    """A plan with what it was made with, and what was measured of it, if it was run.

    own:   what it gives, simulated again.
    replanned:  of a run, the plans that were made again while it ran (replans.py).
    until:      of a run to a loss, its phases (pilot/phases.py).
    """

    place: str
    plan: Plan
    judge: Judge
    own: Candidate
    measured_s: float | None = None
    measured_bytes: tuple[int, ...] = ()
    breakdown: Breakdown | None = None
    expected: Breakdown | None = None
    replanned: tuple[Mapping[str, Json], ...] = ()
    until: UntilFile | None = None

    @property
    def peak_bytes(self) -> int:
        """Return the predicted bytes of the fullest rank."""
        return max(self.own.peak_bytes, default=0)


def seen(path: Path) -> SeenPlan:
    """Return the plan in a file, or that of the run in a folder.

    Raises:   PlanError: neither is there, or a plan without what it was made with.
              ReportError, TimelineError: files of the run are damaged.
    """
    file = path / "plan.json" if path.is_dir() else path
    if path.is_dir() and not file.exists():
        hint = "give a plan, or the folder of a run; a run without a plan decides nothing"
        raise PlanError(f"{path} holds no plan.json", hint=hint)
    plan = Plan.load(file)
    judge = Judge(*load_basis(file, plan))
    own = judge.candidate(plan, as_said=True)
    if not own.peak_bytes:
        raise PlanError(f"{file} cannot be simulated: {own.refused}", hint="make the plan again")
    found = SeenPlan(str(path), plan, judge, own)
    return _with_run(found, path) if (path / "summary.json").exists() else found


def _with_run(found: SeenPlan, folder: Path) -> SeenPlan:
    summary = read_json(folder / "summary.json", PlanError, "summary")
    step_s, peaks = summary.get("step_s_measured"), summary.get("peak_bytes_measured")
    written, trace = summary.get("breakdown"), folder / "predicted.trace.json"
    breakdown = breakdown_from_json(written) if written is not None else None
    expected = None
    if trace.exists():
        timeline = Timeline.load(trace)
        expected = breakdown_of(timeline, found.own.step_s * num_steps(timeline))
    return replace(
        found,
        measured_s=float(step_s) if isinstance(step_s, int | float) else None,
        measured_bytes=tuple(int(size) for size in peaks if isinstance(size, int))
        if isinstance(peaks, list)
        else (),
        breakdown=breakdown,
        expected=expected,
        replanned=tuple(replanned(folder)),
        until=until_in(folder),
    )


def explained(found: SeenPlan) -> list[ExplainedDecision]:
    """Return the decisions of a plan, in its order; then those that it has without a reason."""
    others = {each.what: each for each in undone(found.judge, found.plan)}
    rows = [
        ExplainedDecision(each, _gain(found, others.get(each.what)), _measured(found, each.what))
        for each in found.plan.decisions
    ]
    named = {each.what for each in found.plan.decisions}
    named |= {name.partition(" ")[0] for name in named}  # rules have a pattern
    for what, other in others.items():
        if what not in named:
            decision = Decision(what, "as the plan says", "user", "no reason is given")
            rows.append(ExplainedDecision(decision, _gain(found, other), _measured(found, what)))
    return rows


def _gain(found: SeenPlan, other: Undone | None) -> Gain | None:
    if other is None:
        return None
    one, peak = other.candidate, max(other.candidate.peak_bytes, default=0)
    if not one.peak_bytes:
        return Gain(other.otherwise, 0.0, 0, 0.0, 0, one.refused)
    gains = one.step_s - found.own.step_s, peak - found.peak_bytes
    return Gain(other.otherwise, one.step_s, peak, *gains, one.refused)


def _measured(found: SeenPlan, what: str) -> PartSeconds | None:
    parts, expected = _PARTS.get(what), found.expected
    if parts is None or found.breakdown is None:
        return None
    clocks = [clock for clock in (expected, found.breakdown) if clock is not None]
    shown: list[Part] = [part for part in parts if any(any(each.of(part)) for each in clocks)]
    if not shown:
        return None
    words = ", ".join(PART_WORDS[part] for part in shown)
    predicted_s = None if expected is None else sum(fmean(expected.of(part)) for part in shown)
    return PartSeconds(words, predicted_s, sum(fmean(found.breakdown.of(part)) for part in shown))


def told(found: SeenPlan) -> dict[str, Json]:
    """Return the figures of a plan as JSON values."""
    return {
        "place": found.place,
        "step_s_predicted": found.own.step_s,
        "peak_bytes_predicted": list(found.own.peak_bytes),
        "usd": found.own.usd,
        "step_s_measured": found.measured_s,
        "peak_bytes_measured": list(found.measured_bytes) or None,
        "replanned": [dict(row) for row in found.replanned],
        "until": None if found.until is None else figures_of(found.until),
    }


def row_of(row: ExplainedDecision) -> dict[str, Json]:
    """Return an explained decision as JSON values."""
    content: dict[str, Any] = asdict(row.decision)
    content["without"] = None if row.gain is None else asdict(row.gain)
    content["not_undone"] = _NOT_UNDONE if row.gain is None else None
    content["measured"] = None if row.measured is None else row.measured._asdict()
    return content


# -- two plans -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Unlike:
    """One thing that two plans say differently; who decided it in each, and why.

    alone:   what the first plan gives with this of the second one, simulated; None: it cannot be.
    """

    what: str
    values: tuple[str, str]
    decided: tuple[Decision | None, Decision | None]
    alone: Candidate | None


def unlike(a: SeenPlan, b: SeenPlan) -> Iterator[Unlike]:
    """Yield what differs between two plans, in the order of a plan's fields."""
    pairs = [
        (name, value_of(a.plan, name), value_of(b.plan, name)) for name in Words.__annotations__
    ]
    for name, one, other in pairs:
        if name in _NO_DECISION or one == other:
            continue
        what = _DECIDED.get(name, name)
        decided = tuple(_decision(seen.plan, what) for seen in (a, b))
        values = _words(one), _words(other)
        yield Unlike(name, values, (decided[0], decided[1]), _alone(a, b, name))


_NO_DECISION = "decisions", "predicted", "cuts"  # cuts have names
_DECIDED = {  # the decision that a field belongs to, where it has another name
    "cut_names": "cuts",
    "num_ranks": "stages",
    "num_micro_batches": "micro-batches",
    "joined": "micro-batches",
    "shares": "micro-batches",
    "early": "receives",
    "beside": "copies",
    "post_validation": "post-validation",
}
_TOGETHER = {"cut_names": ("cuts", "cut_names")}


def _decision(plan: Plan, what: str) -> Decision | None:
    return next((each for each in plan.decisions if each.what == what), None)


def _words(value: object) -> str:
    match value:
        case Recipe() | Schedule():
            return words_of(value)
        case bool():
            return "yes" if value else "no"
        case tuple():
            return ", ".join(map(str, cast("tuple[object, ...]", value))) or "none"
        case _:
            return str(value)


def _alone(a: SeenPlan, b: SeenPlan, name: str) -> Candidate | None:
    """Return what `a` gives with one field of `b`; None where that is no plan of its graph."""
    if a.plan.graph != b.plan.graph or name == "graph":
        return None
    other = {word: value_of(b.plan, word) for word in _TOGETHER.get(name, (name,))}
    try:
        made = replace(a.plan.changed(**cast("Words", other)), decisions=(), predicted=None)
        if made.job_micro_batches != a.plan.job_micro_batches:
            return None  # another step
        found = a.judge.candidate(made, as_said=True)
    except (PlanError, ScheduleError, ClusterError, ProfileError):
        return None
    return found if found.peak_bytes else None
