"""Plan: the decisions, who took each and why, and their predicted result."""

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, get_args

from penstock import taken
from penstock.errors import PlanError, ScheduleError
from penstock.files import Json, read_noun, write_text
from penstock.graph.cut_points import block_ends
from penstock.graph.graph import Graph
from penstock.graph.owners import owners_of
from penstock.graph.stages import Recompute
from penstock.job import AS_IT_IS, Precision, is_wire_bits
from penstock.schedule import Schedule, recipe
from penstock.schedule.grid import Grid, misfit, misplaced, unlike, written
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
from penstock.taken import Taken
from penstock.typed import MisfitError, damage, typed
from penstock.units import format_bytes, format_seconds

_MOST_LISTED = 8  # ranks
_MOST_WORK = 50_000_000  # what a schedule can list: arrays of about 2 GiB
By = Literal["search", "user", "only choice"]
Buffers = Literal["exact", "one copy", "per replica"]
Units: TypeAlias = Literal["block"] | int  # of a stage: one per block, or at most that many
Offloaded = Literal["none", "state", "activations", "both", "weights", "all"]
Sharding = Literal["replicate", "shard", "shard_keep"]


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision: what was decided, its value, who took it, and what it was expected to gain."""

    what: str
    value: str
    by: By
    why: str


class Guarding(NamedTuple):
    """How a rank keeps a copy of what another one alone has.

    every:   0: it makes each update of the copy.  Else it keeps the gradients, and a part of the
             state is sent anew in each step, all of it within so many.
    apart:   rank r guards rank r - apart; those before rank 0 are the last ones.
    """

    every: int
    apart: int = 1

    def __str__(self) -> str:
        how = f"log of {self.every} steps" if self.every else "updates"
        return f"{how}, {self.apart} rank{'s' if self.apart > 1 else ''} further"


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the simulation of a plan says: seconds per step, bytes per rank, dollars per step."""

    step_s: float
    peak_bytes: tuple[int, ...]
    usd: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How to train one graph: where it is cut, what runs where, in which order, keeping what.

    graph:              digest of the graph that the plan is for.
    cuts:               indices of the graph's cut points, one fewer than stages.
    cut_names:          their names, for people and for the check against the graph.
    schedule:           a recipe (or its name), or the schedule itself: one synchronous step of
                        these stages, micro-batches and ranks.  A recipe's units say which stages
                        are parts of one, as `refined` makes them.
    num_micro_batches:  per replica and step; of the largest share, where there are `shares`.
    num_ranks:          ranks of one pipeline; a rank holds several stages if there are more.
    replicas:           copies of the pipeline, each on its own ranks (data parallel).
    recompute:          for each stage, whether B repeats F instead of keeping its activations; or
                        the ops of F that it repeats, as nodes of the graph, increasing.
    offload:            for each stage, what is in far memory while not needed: the state of
                        the optimizer, what F keeps for the backward, or both; "weights": weights,
                        gradients and state, "all": these and what F keeps.
    beside:             whether these are copied there and back while the rank computes.
    shard:              for each stage, whether every replica holds it whole, or a part that is
                        made whole while it is used, or kept whole for a step ("shard_keep").
    prefetch:           how many stages before its use the gathering of such a one begins, or the
                        loading of one whose weights are in far memory.
    parts:              by rank, how much of its divided stages it keeps beside the ranks of other
                        replicas with which it divides them; empty: all as much.
    clip:               whether updates wait for a number of all gradients: to clip by their norm
                        (the job says to what), or to leave out a step that overflows in float16.
    commits:            whether a step counts, and is updated, only once all ranks have come to its
                        end: for runs that go on when ranks are lost.
    guard:              how another rank keeps a copy of what a rank alone has; None: none does.
    post_validation:    whether a rank updates before the norm is known, and takes the update back
                        where gradients have to be clipped; same weights, less waiting, more memory.
    joined:             of the job's micro-batches that make one of the plan's: several, one, or a
                        part of one, 1 / n, where each is divided among n (docs/plan.md).
    buffers:            which values those that forward writes have: "exact", those of the plain
                        loop; "one copy", likewise, by one copy of each stage that takes its
                        micro-batches in order; "per replica", those of the first replica.
    early:              computes by which each receive is posted before the one that it is posted
                        for; over gloo a message moves only then.
    shares:             micro-batches of a step, by replica, where they are not alike.
    split:              (name, slices) of each parameter that the graph has in slices.
    compiled:           whether runs of ops are compiled as one (graph/fuse.py): equal to rounding.
    wire:               bits of a number in messages of activations, and of gradients, between ranks
                        (graph/wire.py); 32: as it is.
    sums:               dtype in which gradients travel that copies of a stage sum; None: as they
                        are (docs/precision.md).
    hosts:              names of the cluster's hosts on which ranks are numbered, in that order;
                        empty: as they stand in the cluster.
    """

    graph: str
    cuts: tuple[int, ...]
    cut_names: tuple[str, ...]
    schedule: AnySchedule
    num_micro_batches: int
    num_ranks: int
    replicas: int = 1
    recompute: tuple[Recompute, ...] = ()
    offload: tuple[Offloaded, ...] = ()
    beside: bool = False
    shard: tuple[Sharding, ...] = ()
    prefetch: int = 0
    parts: tuple[int, ...] = ()
    clip: bool = False
    commits: bool = False
    guard: Guarding | None = None
    post_validation: bool = False
    joined: Taken = 1
    buffers: Buffers = "exact"
    early: int = 0
    shares: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    split: tuple[tuple[str, int], ...] = ()
    compiled: bool = False
    wire: tuple[int, int] = (AS_IT_IS, AS_IT_IS)
    sums: Precision | None = None
    decisions: tuple[Decision, ...] = ()
    predicted: Prediction | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedule", any_schedule(self.schedule))
        if list(self.cuts) != sorted(set(self.cuts)) or min(self.cuts, default=0) < 0:
            raise PlanError(f"cuts {self.cuts} are not increasing numbers of cut points")
        if len(self.cut_names) != len(self.cuts):
            raise PlanError(f"{len(self.cut_names)} names for {len(self.cuts)} cuts")
        for what in ("num_micro_batches", "num_ranks", "replicas"):
            if getattr(self, what) < 1:
                raise PlanError(f"{what} is {getattr(self, what)}; it must be 1 or more")
        if self.early < 0:
            raise PlanError(f"early is {self.early} computes; it must be 0 or more")
        work = self.num_stages * self.num_micro_batches, self.num_ranks * self.replicas
        if max(work) > _MOST_WORK:
            counts = f"{work[0]} forwards of a pipeline, {work[1]} ranks"
            raise PlanError(f"{counts}; neither can be above {_MOST_WORK}")
        if len(set(self.hosts)) < len(self.hosts):
            raise PlanError(f"hosts are {', '.join(self.hosts)}; each may appear once")
        if self.buffers not in get_args(Buffers):
            raise PlanError(f"buffers are {self.buffers!r}, not one of {get_args(Buffers)}")
        if self.buffers == "one copy" and self.replicas > 1:
            message = f"buffers need one copy of each stage, the plan has {self.replicas}"
            raise PlanError(f"{message} replicas", hint="make the plan with 1 replica")
        if self.sums not in (None, *get_args(Precision)):
            raise PlanError(f"sums are in {self.sums!r}, not one of {get_args(Precision)}")
        if not all(map(is_wire_bits, self.wire)):
            raise PlanError(f"wire is {self.wire} bits; each is 2 to 16, or 32")
        if self.compiled and self.rounds:
            hint = "leave the wire as it is, or do not compile"
            raise PlanError("compiled ops round in the last bit, and so would the wire", hint=hint)
        _check_joined(self)
        _check_split(self)
        _check_recompute(self)
        _check_offload(self)
        _check_sharding(self)
        _check_shares(self)
        object.__setattr__(self, "shares", unlike(self.shares))
        object.__setattr__(self, "parts", self.grid.uneven(self.parts))
        _check_schedule(self)

    @property
    def num_stages(self) -> int:
        """Return the number of stages: one more than cuts."""
        return len(self.cuts) + 1

    @property
    def offloads(self) -> bool:
        """Return whether anything waits in far memory."""
        return any(word != "none" for word in self.offload) or bool(copied_of(self.schedule))

    @property
    def far(self) -> frozenset[int]:
        """Return the stages whose weights, gradients and state are in far memory."""
        return frozenset(s for s, word in enumerate(self.offload) if word in ("weights", "all"))

    @property
    def shards(self) -> bool:
        """Return whether any stage is divided among its replicas."""
        return any(word != "replicate" for word in self.shard)

    @property
    def divided(self) -> tuple[int, ...]:
        """Return among how many ranks each stage is divided; empty where none is."""
        if not self.shards:
            return ()
        return tuple(1 if word == "replicate" else self.replicas for word in self.shard)

    @property
    def rounds(self) -> bool:
        """Return whether numbers are rounded on their way between ranks."""
        return self.wire != (AS_IT_IS, AS_IT_IS)

    @property
    def grid(self) -> Grid:
        """Whose the ranks are, and who takes which micro-batches of a step."""
        return Grid(self.num_ranks, self.shares or (self.num_micro_batches,) * self.replicas)

    @property
    def share_words(self) -> str:
        """Return how many micro-batches the replicas take, in words."""
        if self.shares:
            return written(self.shares)
        return f"{self.num_micro_batches} per replica"

    @property
    def step_micro_batches(self) -> int:
        """Return the micro-batches of a step, over all replicas."""
        return self.grid.step_micro_batches

    @property
    def job_micro_batches(self) -> int:
        """Return how many of the job's micro-batches a step takes, over all replicas."""
        return int(self.joined * self.step_micro_batches)

    @property
    def total_ranks(self) -> int:
        """Return the number of ranks of all replicas."""
        return self.num_ranks * self.replicas

    def refined(self, graph: Graph, units: Units = "block") -> "Plan":
        """Return the plan with each stage cut again, into units: stages of their own.

        Where a rank did a stage it does its units, one after the other; what it computes, sends
        and waits for stays what it was (schedule/refine.py).  A unit repeats F where its stage did,
        from what F handed to it; a tied parameter that several units use counts once for each.
        units:    "block": one per block of the model (`block_ends`); or at most that many of a
                  stage, cut at points that are spread evenly.
        Raises:   PlanError: the plan is for another graph, or `units` is below 1.
        """
        return _refined(self, graph, units)

    def __str__(self) -> str:
        head = (
            f"Plan for graph {self.graph}: {self.replicas} x {self.num_stages} stages on "
            f"{self.total_ranks} ranks, {name_of(self.schedule)}, "
            f"{written(self.shares or (self.num_micro_batches,))} micro-batches"
        )
        lines = [f"  {d.what}: {d.value} ({d.by}): {d.why}" for d in self.decisions]
        return "\n".join([head, *lines, *self._prediction_line()])

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
        rows["schedule"], rows["joined"] = recipe.to_json(self.schedule), taken.written(self.joined)
        rows["decisions"] = list(map(asdict, self.decisions))
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
    if "schedule" not in content:
        raise MisfitError("is missing", "schedule")
    made: dict[str, object] = {}
    try:
        made["schedule"] = recipe.from_json(content["schedule"])
    except MisfitError as problem:
        raise problem.inside("schedule") from None
    try:
        made["joined"] = taken.read(content.get("joined", 1))
    except MisfitError as problem:
        raise problem.inside("joined") from None
    return typed(Plan, {name: v for name, v in content.items() if name not in made}, made=made)


def _check_joined(plan: Plan) -> None:
    """Raise where micro-batches cannot be joined so, or divided."""
    joined = plan.joined
    if joined <= 0 or (joined != int(joined) and Fraction(joined).numerator != 1):
        raise PlanError(f"joined is {joined}; it must be 1 or more, or a part: 1/2, 1/3, ...")
    if joined >= 1:
        return
    problem = "an asynchronous schedule" if has_window(plan.schedule) else ""
    problem = "rounded messages" if plan.rounds else problem
    problem = f"sums in {plan.sums}" if plan.sums else problem
    if problem:
        hint = "make the plan with the job's own micro-batches"
        raise PlanError(f"micro-batches in {1 / joined} parts, with {problem}", hint=hint)
    if joined * plan.step_micro_batches != int(joined * plan.step_micro_batches):
        message = f"{plan.step_micro_batches} micro-batches of {joined} are no whole ones"
        raise PlanError(message, hint="make the plan again with `penstock plan`")


def _check_split(plan: Plan) -> None:
    """Raise where what is in slices cannot be."""
    names = [name for name, _ in plan.split]
    if names != sorted({*names}) or any(count < 2 for _, count in plan.split):
        message = f"split says {dict(plan.split)}, not slices of parameters by name"
        raise PlanError(message, hint="give each parameter once, in 2 slices or more")
    if plan.split and has_window(plan.schedule):
        message = f"{name_of(plan.schedule)} reads older weights, of which there are no slices"
        raise PlanError(message, hint="take a synchronous schedule, or leave all parameters whole")


def _check_recompute(plan: Plan) -> None:
    """Raise where what is to be repeated is not said of each stage, in order."""
    if plan.recompute and len(plan.recompute) != plan.num_stages:
        raise PlanError(f"recompute says {len(plan.recompute)} of {plan.num_stages} stages")
    for stage, ops in enumerate(plan.recompute):
        if not isinstance(ops, bool) and (not ops or list(ops) != sorted(set(ops))):
            message = f"recompute of stage {stage} is {list(ops)}, no increasing numbers of ops"
            raise PlanError(message, hint="give false, true, or the ops to repeat")


def _check_offload(plan: Plan) -> None:
    """Raise where what is to be offloaded cannot be."""
    if plan.beside and all(word == "none" for word in plan.offload):
        raise PlanError("copies run beside computes, and there are none", hint="offload something")
    if plan.offload and len(plan.offload) != plan.num_stages:
        raise PlanError(f"offload says {len(plan.offload)} of {plan.num_stages} stages")
    for word in plan.offload:
        if word not in get_args(Offloaded):
            raise PlanError(f"offload says {word!r}, not one of {get_args(Offloaded)}")
    for stage in copied_of(plan.schedule) if plan.offload else ():
        if stage < len(plan.offload) and plan.offload[stage] in ("activations", "both", "all"):
            message = f"{name_of(plan.schedule)} says what of stage {stage} is in far memory"
            raise PlanError(message, hint="offload nothing else, or the state")
    _check_far(plan)
    if plan.clip and plan.post_validation and {"state", "both"} & set(plan.offload):
        hint = "clip before the update, or do not offload the state"
        raise PlanError("an update that may be undone needs the optimizer's state", hint=hint)


def _check_far(plan: Plan) -> None:
    """Raise where weights cannot be in far memory."""
    if not plan.far:
        return
    if has_window(plan.schedule):
        message = f"{name_of(plan.schedule)} reads older weights, which cannot be in far memory"
        raise PlanError(message, hint="take a synchronous schedule, or offload the state only")
    if plan.clip and plan.post_validation:
        message = "an update that may be undone needs its weights"
        raise PlanError(message, hint="clip before the update, or offload activations only")
    whole = {s for s in plan.far if not plan.shard or plan.shard[s : s + 1] == ("replicate",)}
    if plan.replicas > 1 and whole:
        message = f"every replica would have stage {min(whole)} in far memory of its own"
        raise PlanError(message, hint="divide such stages among the replicas: shard them")


def _check_sharding(plan: Plan) -> None:
    """Raise where what is to be sharded cannot be."""
    if plan.shard and len(plan.shard) != plan.num_stages:
        raise PlanError(f"shard says {len(plan.shard)} of {plan.num_stages} stages")
    for word in plan.shard:
        if word not in get_args(Sharding):
            raise PlanError(f"shard says {word!r}, not one of {get_args(Sharding)}")
    if plan.prefetch < 0 or (plan.prefetch and not (plan.shards or plan.far)):
        message = f"prefetch is {plan.prefetch} stages"
        hint = "give 0 or more" if plan.prefetch < 0 else "shard or offload weights, or give 0"
        raise PlanError(message, hint=hint)
    if found := misplaced(plan.parts, plan.grid):
        raise PlanError(found[0], hint=found[1])
    if not plan.shards and plan.parts:
        raise PlanError("parts of stages, and none is divided", hint="shard something, or no parts")
    if not plan.shards:
        return
    if plan.replicas == 1:
        message = "shards are divided among replicas, and there is one"
        raise PlanError(message, hint="give the plan 2 replicas or more")
    if has_window(plan.schedule):
        message = f"{name_of(plan.schedule)} reads older weights, of which there are no shards"
        raise PlanError(message, hint="take a synchronous schedule, or replicate all stages")
    if plan.clip and plan.post_validation:
        message = "an update that may be undone cannot be that of a shard"
        raise PlanError(message, hint="clip before the update, or replicate all stages")


def _check_shares(plan: Plan) -> None:
    """Raise where the shares are not those of the replicas."""
    if found := misfit(plan.shares, plan.replicas, plan.num_micro_batches):
        raise PlanError(found[0], hint=found[1])
    is_fixed = isinstance(plan.schedule, Schedule) or has_window(plan.schedule)
    if unlike(plan.shares) and is_fixed:
        hint = "give all replicas the same share, or name the builder of a synchronous schedule"
        message = f"shares are {written(plan.shares)}, by {name_of(plan.schedule)}"
        raise PlanError(message, hint=hint)


def _check_schedule(plan: Plan) -> None:
    """Raise where the schedule is not of what the plan has, or has no end of a step."""
    if plan.commits and (has_window(plan.schedule) or (plan.clip and plan.post_validation)):
        what = "post_validation" if plan.clip and plan.post_validation else name_of(plan.schedule)
        message = f"a step is to count once all ranks have come to its end; {what} updates before"
        raise PlanError(message, hint="take a synchronous schedule, without post_validation")
    if plan.guard is not None:
        _check_guard(plan, plan.guard)
    sizes = plan.num_stages, plan.num_micro_batches
    if isinstance(plan.schedule, Recipe):
        plan.schedule.check(plan.num_stages)
        return
    if has_window(plan.schedule):
        message = f"{name_of(plan.schedule)} is written out for {plan.schedule.num_steps} steps"
        hint = "a plan holds one synchronous step; name the builder of an asynchronous schedule"
        raise PlanError(f"{message}, weights {plan.schedule.weight_rule.name}", hint=hint)
    try:
        built(plan.schedule, *sizes, num_ranks=plan.num_ranks)
    except ScheduleError as problem:
        raise PlanError(problem.message, hint=problem.hint) from problem


def _check_guard(plan: Plan, guard: Guarding) -> None:
    """Raise where no rank can keep a copy of what another one has."""
    if guard.every < 0 or not 0 < guard.apart < plan.total_ranks:
        message = f"guard is {guard.every} steps, {guard.apart} ranks apart of {plan.total_ranks}"
        raise PlanError(message, hint="give 0 steps or more, and 1 to one less than all ranks")
    if not plan.commits or plan.far:
        message = "guards keep copies of steps that all ranks agree on, of weights that are near"
        raise PlanError(message, hint="let the plan commit, and offload no weights")


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
    if plan.buffers == "one copy" and not made.is_in_order:
        message = "buffers need one copy of each stage that takes its micro-batches in order"
        hint = "use another schedule, such as one_f_one_b"
        raise PlanError(f"{message}; {made.name} does not", hint=hint)
    return made


def repeats_all(plan: Plan) -> bool:
    """Return whether every stage repeats all of F."""
    return bool(plan.recompute) and all(again is True for again in plan.recompute)


def is_asynchronous(plan: Plan) -> bool:
    """Return whether the plan's schedule drains only at the end of a window of several steps."""
    return has_window(plan.schedule)


def check_fits(plan: Plan, graph: Graph) -> None:
    """Raise unless `plan` was made for `graph`.

    Raises:   PlanError: another model, batch shape or cut points.
    """
    if plan.graph != graph.digest:
        asked, own = dict(plan.split), dict(graph.slices)
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
    away = zip(plan.offload, units, strict=True) if plan.offload else ()
    parts = zip(plan.shard, units, strict=True) if plan.shard else ()
    return replace(
        plan,
        cuts=cuts,
        cut_names=tuple(graph.cut_points[cut].name for cut in cuts),
        schedule=refined(plan.schedule, units),
        recompute=_repeated(plan, graph, cuts, units),
        offload=tuple(word for word, count in away for _ in range(count)),
        shard=tuple(word for word, count in parts for _ in range(count)),
        predicted=None,
    )


def _repeated(
    plan: Plan, graph: Graph, cuts: Sequence[int], units: Sequence[int]
) -> tuple[Recompute, ...]:
    """Return what each unit repeats of what its stage does: of single ops, its own."""
    if not plan.recompute:
        return ()
    stages = zip(plan.recompute, units, strict=True)
    rows = [again for again, count in stages for _ in range(count)]
    if all(isinstance(again, bool) for again in rows):
        return tuple(rows)
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
    names = [name for name in Plan.__dataclass_fields__ if name not in ("decisions", "predicted")]
    pairs = ((name, getattr(a, name), getattr(b, name)) for name in names)
    return tuple(
        f"{name}: {_shown(old)} -> {_shown(new)}" for name, old, new in pairs if old != new
    )


def _shown(value: object) -> object:
    return words_of(value) if isinstance(value, Recipe | Schedule) else value


def decide(plan: Plan, decisions: Iterable[Decision], predicted: Prediction) -> Plan:
    """Return `plan` with its reasons and its prediction."""
    return replace(plan, decisions=tuple(decisions), predicted=predicted)


def plan_by_hand(  # long: one for each decision  # noqa: PLR0913 - one for each decision
    graph: Graph,
    cuts: Sequence[int],
    schedule: str | AnySchedule,
    *,
    num_micro_batches: int | None = None,
    num_ranks: int | None = None,
    replicas: int = 1,
    recompute: Sequence[Recompute] = (),
    offload: Sequence[Offloaded] = (),
    shard: Sequence[Sharding] = (),
    clip: bool = False,
    post_validation: bool = False,
    shares: Sequence[int] = (),
) -> Plan:
    """Return a plan whose every decision is the caller's.

    A schedule that stands for itself knows the micro-batches and ranks of a replica; else there
    is one stage on each rank by default.
    Raises:   PlanError: an unknown cut, or a schedule of other sizes.
              ScheduleError: a text that names no schedule.
    """
    given, own_ranks = any_schedule(schedule), len(cuts) + 1
    if isinstance(given, Schedule):
        own_ranks, num_micro_batches = given.num_ranks, num_micro_batches or given.num_micro_batches
    if num_micro_batches is None:
        message = f"{name_of(given)} can have any number of micro-batches"
        raise PlanError(message, hint="give num_micro_batches=")
    names = tuple(graph.cut_points[c].name for c in cuts if 0 <= c < len(graph.cut_points))
    if len(names) != len(cuts):
        message = f"cuts are {list(cuts)}; the graph has {len(graph.cut_points)} cut points"
        raise PlanError(message, hint="use fewer stages, or other cut points")
    return Plan(
        graph=graph.digest,
        cuts=tuple(cuts),
        cut_names=names,
        schedule=given,
        num_micro_batches=num_micro_batches,
        num_ranks=own_ranks if num_ranks is None else num_ranks,
        replicas=replicas,
        recompute=tuple(recompute) or (False,) * (len(cuts) + 1),
        offload=tuple(offload),
        shard=tuple(shard),
        clip=clip,
        post_validation=post_validation,
        shares=tuple(shares),
        split=graph.slices,
    )
