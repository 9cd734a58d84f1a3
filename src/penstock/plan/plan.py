"""Plan: the decisions, who took each and why, and their predicted result."""

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from html import escape
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar, Unpack

from penstock import taken
from penstock.errors import PlanError
from penstock.files import Json, read_noun, write_text
from penstock.graph.cut_points import block_ends
from penstock.graph.graph import Graph
from penstock.graph.owners import owners_of
from penstock.graph.stages import Recompute
from penstock.plan.agreement import Agreement
from penstock.plan.decision_words import Words, records_of, value_of
from penstock.plan.earlier_files import is_flat, nested
from penstock.plan.fits import check_schedule, check_sizes, check_together
from penstock.plan.overlap import Overlap
from penstock.plan.placement import Placement
from penstock.plan.stage import StagePlan
from penstock.plan.terms import StepTerms
from penstock.plan.tried import Tried, headline, tried_lines
from penstock.program.passes.offload import Offloaded
from penstock.program.passes.shard import Sharding
from penstock.schedule import recipe
from penstock.schedule.grid import Grid, written
from penstock.schedule.recipe import (
    AnySchedule,
    Recipe,
    any_schedule,
    built,
    copied_of,
    has_window,
    name_of,
    refined,
    words_of,
)
from penstock.schedule.schedule import Schedule
from penstock.sums import AS_THEY_ARE, SumsKind, SumsWay, sums_way
from penstock.typed import MisfitError, damage, typed
from penstock.units import format_bytes, format_seconds

_MOST_LISTED = 8  # ranks
By = Literal["search", "user", "only choice"]
Units: TypeAlias = Literal["block", "woven"] | int  # of a stage: one per block, or at most so many
_Word = TypeVar("_Word")


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision: what was decided, its value, who took it, and what it was expected to gain."""

    what: str
    value: str
    by: By
    why: str


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the simulation of a plan says: seconds per step, bytes per rank, dollars per step.

    tried:  what it says of other plans, where the search tried any.
    """

    step_s: float
    peak_bytes: tuple[int, ...]
    usd: float = 0.0
    tried: tuple[Tried, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """How to train one graph: where it is cut, what runs where, in which order, keeping what.

    graph:      digest of the graph that the plan is for.
    stages:     what is said of each, from the input to the loss.
    schedule:   a recipe, or the schedule itself: one synchronous step of these stages,
                micro-batches and ranks.  A recipe's units say which stages are parts of one, as
                `refined` makes them.
    place:      the ranks, and which part of a step is whose.
    terms:      what a step computes, and with how many bits.
    overlap:    what begins before it is needed.
    agreement:  how ranks agree on gradients, and on steps that count.
    """

    graph: str
    stages: tuple[StagePlan, ...]
    schedule: AnySchedule
    place: Placement
    terms: StepTerms = field(default_factory=StepTerms)
    overlap: Overlap = field(default_factory=Overlap)
    agreement: Agreement = field(default_factory=Agreement)
    decisions: tuple[Decision, ...] = ()
    predicted: Prediction | None = None

    def __post_init__(self) -> None:
        check_sizes(self)
        check_together(self)
        check_schedule(self)

    @classmethod
    def of(cls, **words: Unpack[Words]) -> "Plan":
        """Return the plan that says these words (`Words`), and of all others the default.

        Raises:   PlanError: they contradict each other.  ScheduleError: a text names no schedule.
                  TypeError: no graph, schedule, number of ranks or micro-batches; an unknown word.
        """
        return cls(**records_of(words))

    def changed(self, **words: Unpack[Words]) -> "Plan":
        """Return the plan that says these words, and else the same.

        Raises:   PlanError: they contradict each other, or the rest.
                  ScheduleError: a text names no schedule.  TypeError: an unknown word.
        """
        return replace(self, **records_of(words, self))

    @property
    def num_stages(self) -> int:
        """Return the number of stages: one more than cuts."""
        return len(self.stages)

    @property
    def cuts(self) -> tuple[int, ...]:
        """Return the indices of the graph's cut points, one fewer than stages."""
        return tuple(stage.cut for stage in self.stages if stage.cut is not None)

    @property
    def cut_names(self) -> tuple[str, ...]:
        """Return the names of the cut points."""
        return tuple(stage.name for stage in self.stages if stage.cut is not None)

    @property
    def recompute(self) -> tuple[Recompute, ...]:
        """Return what of F each stage repeats."""
        return tuple(stage.recompute for stage in self.stages)

    @property
    def offload(self) -> tuple[Offloaded, ...]:
        """Return what of each stage is in far memory; empty where nothing is."""
        row: tuple[Offloaded, ...] = tuple(stage.far for stage in self.stages)
        return row if any(word != "none" for word in row) else ()

    @property
    def shard(self) -> tuple[Sharding, ...]:
        """Return which stages are divided among replicas, and how; empty where none is."""
        row: tuple[Sharding, ...] = tuple(stage.weights for stage in self.stages)
        return row if any(word != "replicate" for word in row) else ()

    @property
    def num_ranks(self) -> int:
        """Return the ranks of one pipeline."""
        return self.place.num_ranks

    @property
    def replicas(self) -> int:
        """Return the number of pipelines."""
        return self.place.replicas

    @property
    def tensor(self) -> int:
        """Return how many ranks divide the ops of each stage."""
        return self.place.tensor

    @property
    def num_micro_batches(self) -> int:
        """Return the micro-batches of a replica and step, those of the largest share."""
        return self.place.num_micro_batches

    @property
    def offloads(self) -> bool:
        """Return whether anything waits in far memory."""
        return any(stage.far != "none" for stage in self.stages) or bool(copied_of(self.schedule))

    @property
    def far(self) -> frozenset[int]:
        """Return the stages whose weights, gradients and state are in far memory."""
        words = enumerate(stage.far for stage in self.stages)
        return frozenset(number for number, word in words if word in ("weights", "all"))

    @property
    def shards(self) -> bool:
        """Return whether any stage is divided among its replicas."""
        return any(stage.weights != "replicate" for stage in self.stages)

    @property
    def ahead(self) -> tuple[int, ...]:
        """Return how many stages ahead of its use each is gathered or loaded, where it is."""
        return self.overlap.by_stage(self.num_stages)

    @property
    def divided(self) -> tuple[int, ...]:
        """Return among how many ranks each stage is divided; empty where none is."""
        if not self.shards:
            return ()
        return tuple(1 if word == "replicate" else self.replicas for word in self.shard)

    @property
    def holds_back(self) -> bool:
        """Whether ranks may hold back what they do not send of the gradients that they sum."""
        return self.total_ranks > 1 and sums_way(self.agreement.sums).holds_back

    @property
    def sums_way(self) -> SumsWay:
        """Return how ranks agree, where they keep something for it; else as if they did not."""
        keeps = self.holds_back or bool(self.averages or self.served)
        return sums_way(self.agreement.sums) if keeps else AS_THEY_ARE

    @property
    def sums_kind(self) -> SumsKind:
        """Return in which way gradients, or weights, travel between ranks."""
        return sums_way(self.agreement.sums).kind

    @property
    def averages(self) -> str:
        """Return how replicas average weights in place of summing gradients; empty: they do not."""
        sums = self.agreement.sums
        return sums if sums and self.replicas > 1 and sums_way(sums).averages else ""

    @property
    def served(self) -> str:
        """Return how a server updates weights as gradients come; empty: there is none."""
        sums = self.agreement.sums
        return sums if sums and self.replicas > 1 and sums_way(sums).served else ""

    @property
    def topology(self) -> str:
        """Return along which rounds sums go; empty: as the transport sums, or there are none."""
        if self.served:
            return self.agreement.topology or "server"
        return self.agreement.topology or "" if self.total_ranks > 1 else ""

    @property
    def grid(self) -> Grid:
        """Whose the ranks are, and who takes which micro-batches of a step."""
        return self.place.grid

    @property
    def share_words(self) -> str:
        """Return how many micro-batches the replicas take, in words."""
        if self.place.shares:
            return written(self.place.shares)
        return f"{self.num_micro_batches} per replica"

    @property
    def step_micro_batches(self) -> int:
        """Return the micro-batches of a step, over all replicas."""
        return self.grid.step_micro_batches

    @property
    def job_micro_batches(self) -> int:
        """Return how many of the job's micro-batches a step takes, over all replicas."""
        return int(self.terms.joined * self.step_micro_batches)

    @property
    def total_ranks(self) -> int:
        """Return the number of ranks of all replicas."""
        return self.num_ranks * self.replicas * self.tensor

    def refined(self, graph: Graph, units: Units = "block") -> "Plan":
        """Return the plan with each stage cut again, into units: stages of their own.

        Where a rank did a stage it does its units, one after the other; what it computes, sends
        and waits for stays what it was (schedule/refine.py).  A unit repeats F where its stage did,
        from what F handed to it; a tied parameter that several units use counts once for each.
        units:    "woven": those between the collects of ranks that divide ops, of two micro-batches
                  in turn; "block": one per block of the model (`block_ends`); or at most that many
                  of a stage, cut at points that are spread evenly.
        Raises:   PlanError: the plan is for another graph, or `units` is below 1.
        """
        return _refined(self, graph, units)

    def __str__(self) -> str:
        told = [*tried_lines(self), *self._prediction_line()]
        lines = [f"  {d.what}: {d.value} ({d.by}): {d.why}" for d in self.decisions]
        return "\n".join([headline(self), *told, *lines])

    def _repr_html_(self) -> str:
        """Return the plan in words for a notebook."""
        return f"<pre>{escape(str(self))}</pre>"

    def _prediction_line(self) -> list[str]:
        if self.predicted is None:
            return []
        peaks = self.predicted.peak_bytes
        sizes = ", ".join(map(format_bytes, peaks))
        if len(peaks) > _MOST_LISTED:
            sizes = f"{format_bytes(min(peaks))} to {format_bytes(max(peaks))} a rank"
        usd = f", {self.predicted.usd:.3g} usd" if self.predicted.usd else ""
        return [f"  predicted: {format_seconds(self.predicted.step_s)}{usd} per step; peak {sizes}"]

    def to_json(self) -> dict[str, Json]:
        """Return the plan as JSON values."""
        rows = {each.name: getattr(self, each.name) for each in fields(self)}
        records = {name: asdict(rows[name]) for name in ("place", "terms", "overlap", "agreement")}
        records["terms"]["joined"] = taken.written(self.terms.joined)
        rows |= records | {"schedule": recipe.to_json(self.schedule)}
        rows |= {name: list(map(asdict, rows[name])) for name in ("stages", "decisions")}
        rows["predicted"] = None if self.predicted is None else asdict(self.predicted)
        return {"penstock": "plan", **json.loads(json.dumps(rows))}

    def save(self, path: Path | str) -> None:
        """Write the plan as JSON, whole or not at all."""
        write_text(path, json.dumps(self.to_json(), indent=2) + "\n")

    @classmethod
    def from_text(cls, text: str) -> "Plan":
        """Return the plan whose file holds `text`, as `save` wrote it."""
        content: dict[str, Json] = json.loads(text)
        del content["penstock"]
        return _read(content)

    @classmethod
    def load(cls, path: Path | str) -> "Plan":
        """Read a plan written by `save`, or printed by `penstock plan --json`.

        Raises:   PlanError: missing, damaged, not a plan, or decisions that contradict each other.
        """
        hint = "make it again with `penstock plan`"
        content = read_noun(path, PlanError, "plan", hint=hint)
        for beside in ("front", "tally"):  # what else was found, where it was printed
            content.pop(beside, None)
        with damage(f"plan {path}", PlanError, hint=hint):
            return _read(content)


def _read(content: dict[str, Json]) -> Plan:
    """Return the plan of which `to_json` made `content`.

    Raises:   PlanError, ScheduleError, MisfitError: it is not a plan, or an impossible one.
    """
    content = nested(content) if is_flat(content) else content
    if "schedule" not in content:
        raise MisfitError("is missing", "schedule")
    made: dict[str, object] = {}
    try:
        made["schedule"] = recipe.from_json(content["schedule"])
    except MisfitError as problem:
        raise problem.inside("schedule") from None
    try:
        made["terms"] = _read_terms(content.get("terms", {}))
    except MisfitError as problem:
        raise problem.inside("terms") from None
    return typed(Plan, {name: v for name, v in content.items() if name not in made}, made=made)


def _read_terms(content: Json) -> StepTerms:
    if not isinstance(content, dict):
        raise MisfitError.of(content, "an object")
    rest = {name: value for name, value in content.items() if name != "joined"}
    try:
        joined = taken.read(content.get("joined", 1))
    except MisfitError as problem:
        raise problem.inside("joined") from None
    return typed(StepTerms, rest, made={"joined": joined})


def schedule_of(plan: Plan, *, num_steps: int = 1, share: int | None = None) -> Schedule:
    """Return the schedule of `plan`; `num_steps` is the window of an asynchronous one.

    share:    micro-batches of a replica; default: the largest share.

    Raises:   ScheduleError: it cannot be built for these sizes.
              PlanError: it puts the stages on another number of ranks.
    """
    sizes = plan.num_stages, share or plan.num_micro_batches
    made = built(plan.schedule, *sizes, num_ranks=plan.num_ranks, num_steps=num_steps)
    if made.num_ranks != plan.num_ranks:
        message = f"{made.name} puts {plan.num_stages} stages on {made.num_ranks} ranks"
        hint = "cut the model into more stages, or use another number of ranks"
        raise PlanError(f"{message}, the plan on {plan.num_ranks}", hint=hint)
    if plan.terms.buffers == "one copy" and not made.is_in_order:
        message = "buffers need one copy of each stage that takes its micro-batches in order"
        hint = "use another schedule, such as one_f_one_b"
        raise PlanError(f"{message}; {made.name} does not", hint=hint)
    return made


def repeats_all(plan: Plan) -> bool:
    """Return whether every stage repeats all of F."""
    return all(stage.recompute is True for stage in plan.stages)


def is_asynchronous(plan: Plan) -> bool:
    """Return whether the plan's schedule drains only at the end of a window of several steps."""
    return has_window(plan.schedule)


def check_fits(plan: Plan, graph: Graph) -> None:
    """Raise unless `plan` was made for `graph`.

    Raises:   PlanError: another model, batch shape or cut points.
    """
    if plan.place.axis != (graph.tensor, graph.context):
        what = "tokens" if plan.place.context or graph.context else "ops"
        own = graph.tensor if graph.tensor == 1 or graph.context == plan.place.context else 1
        message = f"the plan divides {what} among {plan.tensor} ranks, the graph {own}"
        raise PlanError(message, hint="divide the graph as the plan says, or make a new plan")
    if plan.graph != graph.digest:
        asked, own = dict(plan.terms.split), dict(graph.slices)
        if asked != own:
            message = f"the plan has {asked or 'nothing'} in slices, the graph {own or 'nothing'}"
            raise PlanError(message, hint="split the graph as the plan says, or make a new plan")
        raise PlanError(
            f"the plan is for graph {plan.graph}; this job traces to graph {graph.digest}",
            hint="the model, the batch shape or torch changed: make a new plan",
        )
    for at, name in zip(plan.cuts, plan.cut_names, strict=True):
        if at >= len(graph.cut_points) or graph.cut_points[at].name != name:
            raise PlanError(f"the plan cuts {name!r}, which is not cut point {at} of this graph")


def _refined(plan: Plan, graph: Graph, asked: Units) -> Plan:
    check_fits(plan, graph)
    if asked == "woven":
        return _woven(plan)
    if asked != "block" and asked < 1:
        raise PlanError(f"{asked} units per stage", hint='give "block", or 1 or more')
    ends = (-1, *plan.cuts, len(graph.cut_points))
    inner = [range(a + 1, b) for a, b in itertools.pairwise(ends)]  # the cut points in a stage
    if asked == "block":
        blocks = set(block_ends(graph))
        chosen = [[point for point in points if point in blocks] for points in inner]
    else:
        chosen = [_spread(points, asked - 1) for points in inner]
    units = tuple(len(points) + 1 for points in chosen)
    if set(units) == {1}:
        return plan
    value = " ".join(map(str, units))
    why = "one per block" if asked == "block" else f"at most {asked} per stage"
    reason = Decision("units", value, "user", f"requested: {why}")
    plan = divided(plan, graph, itertools.chain.from_iterable(chosen))
    return replace(plan, decisions=(*plan.decisions, reason))


_NOT_WOVEN = "leave out units"


def why_not_woven(plan: Plan) -> PlanError | None:
    """Return why there are no units of two micro-batches to be done in turn; None: there are."""
    why = "units are to be woven, and"
    if plan.tensor == 1:
        hint = f"{_NOT_WOVEN}, or give tensor or context"
        return PlanError(f"{why} no ranks divide ops or tokens", hint=hint)
    if plan.num_ranks > 1:
        message = f"{why} those of a replica are of {plan.num_ranks} ranks"
        return PlanError(message, hint=f"{_NOT_WOVEN}, or give stages=1")
    if max(plan.grid.shares) == 1:
        hint = f"{_NOT_WOVEN}, or give the job 2 micro_batches or more for each replica"
        return PlanError(f"{why} a replica has one micro-batch a step", hint=hint)
    return None


def _woven(plan: Plan) -> Plan:
    """Return the plan of ranks that divide ops with units of two micro-batches in turn."""
    recipe, why = plan.schedule, why_not_woven(plan)
    if why is not None or not isinstance(recipe, Recipe):
        raise why or PlanError("units of a written schedule are to be woven", hint=_NOT_WOVEN)
    reason = Decision("units", "woven", "user", "requested: of two micro-batches in turn")
    made = plan.changed(schedule=replace(recipe, woven=True), predicted=None)
    others = (each for each in plan.decisions if each.what != "units")
    return replace(made, decisions=(*others, reason))


def divided(plan: Plan, graph: Graph, points: Iterable[int]) -> Plan:
    """Return the plan with its stages cut at these cut points, too, into units of theirs.

    Raises:   PlanError: the plan is for another graph.
    """
    check_fits(plan, graph)
    cuts = tuple(sorted({*plan.cuts, *points}))
    ends = (-1, *plan.cuts, len(graph.cut_points))
    units = tuple(sum(a < cut < b for cut in cuts) + 1 for a, b in itertools.pairwise(ends))
    if set(units) == {1}:
        return plan
    return plan.changed(
        cuts=cuts,
        cut_names=tuple(graph.cut_points[cut].name for cut in cuts),
        schedule=refined(plan.schedule, units),
        recompute=_repeated(plan, graph, cuts, units),
        offload=_by_unit(plan.offload, units),
        shard=_by_unit(plan.shard, units),
        prefetch=_by_unit(plan.ahead, units),
        predicted=None,
    )


def _by_unit(row: Sequence[_Word], units: Sequence[int]) -> tuple[_Word, ...]:
    """Return what units say of which the stages say this, if anything is said."""
    pairs = zip(row, units, strict=True) if row else ()
    return tuple(word for word, count in pairs for _ in range(count))


def _repeated(
    plan: Plan, graph: Graph, cuts: Sequence[int], units: Sequence[int]
) -> tuple[Recompute, ...]:
    """Return what each unit repeats of what its stage does: of single ops, its own."""
    rows = _by_unit(plan.recompute, units)
    if all(isinstance(again, bool) for again in rows):
        return rows
    owners = owners_of(graph, [graph.cut_points[cut].at for cut in cuts])
    return tuple(
        again
        if isinstance(again, bool)
        else tuple(op for op in again if owners.free[op] or owners.stage_of[op] == unit) or False
        for unit, again in enumerate(rows)
    )


def _spread(points: range, count: int) -> list[int]:
    """Return `count` of `points`, or all if there are no more, evenly spread."""
    count = min(count, len(points))
    return [points[(k + 1) * (len(points) + 1) // (count + 1) - 1] for k in range(count)]


def diff(a: Plan, b: Plan) -> tuple[str, ...]:
    """Return one line for each decision in which two plans differ."""
    names = [name for name in Words.__annotations__ if name not in ("decisions", "predicted")]
    pairs = ((name, value_of(a, name), value_of(b, name)) for name in names)
    return tuple(
        f"{name}: {_shown(old)} -> {_shown(new)}" for name, old, new in pairs if old != new
    )


def _shown(value: object) -> object:
    return words_of(value) if isinstance(value, Recipe | Schedule) else value


def decide(plan: Plan, decisions: Iterable[Decision], predicted: Prediction) -> Plan:
    """Return `plan` with its reasons and its prediction."""
    return replace(plan, decisions=tuple(decisions), predicted=predicted)


def plan_by_hand(
    graph: Graph, cuts: Sequence[int], schedule: str | AnySchedule, /, **words: Unpack[Words]
) -> Plan:
    """Return a plan whose every decision is the caller's.

    words:    what it says besides (`Words`).  A schedule that stands for itself knows the
              micro-batches and ranks of a replica; else there is one stage on each rank by default.
    Raises:   PlanError: an unknown cut, or a schedule of other sizes.
              ScheduleError: a text that names no schedule.
    """
    given, sizes = any_schedule(schedule), Words(num_ranks=len(cuts) + 1)
    if isinstance(given, Schedule):
        sizes = Words(num_ranks=given.num_ranks, num_micro_batches=given.num_micro_batches)
    axis = Words(tensor=graph.tensor, context=graph.context)
    words = Words(split=graph.slices) | axis | sizes | words
    if "num_micro_batches" not in words:
        message = f"{name_of(given)} can have any number of micro-batches"
        raise PlanError(message, hint="give num_micro_batches=")
    names = tuple(graph.cut_points[c].name for c in cuts if 0 <= c < len(graph.cut_points))
    if len(names) != len(cuts):
        message = f"cuts are {list(cuts)}; the graph has {len(graph.cut_points)} cut points"
        raise PlanError(message, hint="use fewer stages, or other cut points")
    own = Words(graph=graph.digest, cuts=cuts, cut_names=names, schedule=given)
    return Plan.of(**(words | own))
