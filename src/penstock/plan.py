"""Plan: the decisions, who took each of them and why, and what they are expected to give."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from penstock.errors import PlanError
from penstock.files import Json, read_json, write_text
from penstock.graph.graph import Graph
from penstock.typed import MisfitError, typed
from penstock.units import format_bytes, format_seconds

_MOST_LISTED = 8  # ranks
_MOST_WORK = 50_000_000  # what a schedule can list: arrays of about 2 GiB
By = Literal["search", "user", "only choice"]
Buffers = Literal["exact", "one copy", "per replica"]


class Decision(NamedTuple):
    """One decision: what was decided, its value, who took it, and what it was expected to gain."""

    what: str
    value: str
    by: By
    why: str


class Prediction(NamedTuple):
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
    schedule:           name of a schedule; num_micro_batches is per replica and step.
    num_ranks:          ranks of one pipeline; a rank holds several stages if there are more.
    replicas:           copies of the pipeline, each on its own ranks (data parallel).
    recompute:          for each stage, whether B repeats F instead of keeping its activations.
    clip:               whether gradients are clipped by their global norm (the job says to what).
    post_validation:    whether a rank updates before the norm is known, and takes the update back
                        where gradients have to be clipped; same weights, less waiting, more memory.
    joined:             of the job's micro-batches that make one of the plan's.
    buffers:            which values those that forward writes have: "exact", those of the plain
                        loop; "one copy", likewise, by one copy of each stage that takes its
                        micro-batches in order; "per replica", those of the first replica.
    hosts:              names of the cluster's hosts on which ranks are numbered, in that order;
                        empty: as they stand in the cluster.
    """

    graph: str
    cuts: tuple[int, ...]
    cut_names: tuple[str, ...]
    schedule: str
    num_micro_batches: int
    num_ranks: int
    replicas: int = 1
    recompute: tuple[bool, ...] = ()
    clip: bool = False
    post_validation: bool = False
    joined: int = 1
    buffers: Buffers = "exact"
    hosts: tuple[str, ...] = ()
    decisions: tuple[Decision, ...] = ()
    predicted: Prediction | None = None

    def __post_init__(self) -> None:
        if list(self.cuts) != sorted(set(self.cuts)) or min(self.cuts, default=0) < 0:
            raise PlanError(f"cuts {self.cuts} are not increasing numbers of cut points")
        if len(self.cut_names) != len(self.cuts):
            raise PlanError(f"{len(self.cut_names)} names for {len(self.cuts)} cuts")
        for what in ("num_micro_batches", "num_ranks", "replicas", "joined"):
            if getattr(self, what) < 1:
                raise PlanError(f"{what} is {getattr(self, what)}; it must be 1 or more")
        work = self.num_stages * self.num_micro_batches, self.num_ranks * self.replicas
        if max(work) > _MOST_WORK:
            counts = f"{work[0]} forwards of a pipeline, {work[1]} ranks"
            raise PlanError(f"{counts}; neither can be above {_MOST_WORK}")
        if len(set(self.hosts)) < len(self.hosts):
            raise PlanError(f"hosts are {', '.join(self.hosts)}; each can stand there once")
        if self.buffers not in get_args(Buffers):
            raise PlanError(f"buffers are {self.buffers!r}, not one of {get_args(Buffers)}")
        if self.buffers == "one copy" and self.replicas > 1:
            message = f"buffers ask for one copy of each stage, the plan has {self.replicas}"
            raise PlanError(f"{message} replicas", hint="make the plan with 1 replica")
        if self.recompute and len(self.recompute) != self.num_stages:
            raise PlanError(f"recompute says {len(self.recompute)} of {self.num_stages} stages")

    @property
    def num_stages(self) -> int:
        """Return the number of stages: one more than cuts."""
        return len(self.cuts) + 1

    @property
    def total_ranks(self) -> int:
        """Return the number of ranks of all replicas."""
        return self.num_ranks * self.replicas

    def __str__(self) -> str:
        head = (
            f"Plan for graph {self.graph}: {self.replicas} x {self.num_stages} stages on "
            f"{self.total_ranks} ranks, {self.schedule}, {self.num_micro_batches} micro-batches"
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
        content: dict[str, Json] = {"penstock": "plan", **json.loads(json.dumps(asdict(self)))}
        content["decisions"] = [decision._asdict() for decision in self.decisions]
        content["predicted"] = None if self.predicted is None else _plain(self.predicted)
        return content

    def save(self, path: Path | str) -> None:
        """Write the plan as JSON, whole or not at all."""
        write_text(path, json.dumps(self.to_json(), indent=2) + "\n")

    @classmethod
    def from_text(cls, text: str) -> "Plan":
        """Return the plan whose file holds `text`, as `save` wrote it."""
        content: dict[str, Json] = json.loads(text)
        del content["penstock"]
        return typed(cls, content)

    @classmethod
    def load(cls, path: Path | str) -> "Plan":
        """Read a plan written by `save`, or printed by `penstock plan --json`.

        Raises:   PlanError: missing, damaged, no plan, or decisions that contradict each other.
        """
        content = read_json(path, PlanError, "plan")
        if content.pop("penstock", None) != "plan":
            raise PlanError(f"{path} is JSON, but no plan", hint="make one with `penstock plan`")
        for beside in ("front", "tally"):  # what else was found, where it was printed
            content.pop(beside, None)
        try:
            return typed(cls, content)
        except (PlanError, MisfitError) as problem:
            hint = "make it again with `penstock plan`"
            raise PlanError(f"plan {path} is damaged: {problem}", hint=hint) from problem


def check_fits(plan: Plan, graph: Graph) -> None:
    """Raise unless `plan` was made for `graph`.

    Raises:   PlanError: another model, batch shape or cut points.
    """
    if plan.graph != graph.digest:
        raise PlanError(
            f"the plan is for graph {plan.graph}; this job traces to graph {graph.digest}",
            hint="the model, the batch shape or torch changed: make a new plan",
        )
    for at, name in zip(plan.cuts, plan.cut_names, strict=True):
        if at >= len(graph.cut_points) or graph.cut_points[at].name != name:
            raise PlanError(f"the plan cuts {name!r}, which is not cut point {at} of this graph")


def diff(a: Plan, b: Plan) -> tuple[str, ...]:
    """Return one line for each decision in which two plans differ."""
    names = [name for name in Plan.__dataclass_fields__ if name not in ("decisions", "predicted")]
    pairs = ((name, getattr(a, name), getattr(b, name)) for name in names)
    return tuple(f"{name}: {old} -> {new}" for name, old, new in pairs if old != new)


def decide(plan: Plan, decisions: Iterable[Decision], predicted: Prediction) -> Plan:
    """Return `plan` with its reasons and its prediction."""
    return replace(plan, decisions=tuple(decisions), predicted=predicted)


def plan_by_hand(  # noqa: PLR0913 - one for each decision
    graph: Graph,
    cuts: Sequence[int],
    schedule: str,
    *,
    num_micro_batches: int,
    num_ranks: int | None = None,
    replicas: int = 1,
    recompute: Sequence[bool] = (),
    clip: bool = False,
    post_validation: bool = False,
) -> Plan:
    """Return a plan whose every decision is the caller's; one stage on each rank by default."""
    names = tuple(graph.cut_points[c].name for c in cuts if 0 <= c < len(graph.cut_points))
    if len(names) != len(cuts):
        message = f"cuts are {list(cuts)}; the graph has {len(graph.cut_points)} cut points"
        raise PlanError(message, hint="use fewer stages, or other cut points")
    return Plan(
        graph=graph.digest,
        cuts=tuple(cuts),
        cut_names=names,
        schedule=schedule,
        num_micro_batches=num_micro_batches,
        num_ranks=len(cuts) + 1 if num_ranks is None else num_ranks,
        replicas=replicas,
        recompute=tuple(recompute) or (False,) * (len(cuts) + 1),
        clip=clip,
        post_validation=post_validation,
    )


def _plain(prediction: Prediction) -> dict[str, Json]:
    return {**prediction._asdict(), "peak_bytes": list(prediction.peak_bytes)}
