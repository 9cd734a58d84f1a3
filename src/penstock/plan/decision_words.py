"""Words: what a plan says, each decision by its own name, whichever record of the plan holds it.

A plan is made of words, and changed by words: `Plan.of(graph=..., cuts=...)`, `plan.changed(...)`.
What is said of each stage is a row; an empty row says nothing of any stage.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypedDict

from penstock.graph.stages import Recompute
from penstock.plan.agreement import Agreement
from penstock.plan.overlap import Overlap, prefetch_of
from penstock.plan.placement import Placement, placed
from penstock.plan.stage import stage_plans
from penstock.plan.terms import Buffers, StepTerms
from penstock.program.instructions import Guarding
from penstock.program.passes.offload import Offloaded
from penstock.program.passes.shard import Sharding
from penstock.schedule.recipe import AnySchedule, any_schedule
from penstock.taken import Taken

if TYPE_CHECKING:
    from penstock.plan.plan import Decision, Plan, Prediction


class Words(TypedDict, total=False):
    """Everything that a plan says, in the order in which it is read; the records tell what it is.

    cuts, cut_names, recompute, offload, shard:   the rows: cut, name, recompute, far and weights of
                                                  each `StagePlan`; no cut and name of the last.
    """

    graph: str
    cuts: Sequence[int]
    cut_names: Sequence[str]
    schedule: str | AnySchedule
    num_micro_batches: int
    num_ranks: int
    replicas: int
    recompute: Sequence[Recompute]
    offload: Sequence[Offloaded]
    beside: bool
    shard: Sequence[Sharding]
    prefetch: int | Sequence[int]
    parts: Sequence[int]
    clip: bool
    commits: bool
    guard: Guarding | None
    post_validation: bool
    joined: Taken
    buffers: Buffers
    early: int
    shares: Sequence[int]
    hosts: Sequence[str]
    tensor: int
    context: bool
    split: tuple[tuple[str, int], ...]
    compiled: bool
    wire: tuple[int, int]
    sums: str | None
    topology: str | None
    decisions: "tuple[Decision, ...]"
    predicted: "Prediction | None"


ROWS: Mapping[str, str] = MappingProxyType(  # fields of StagePlan
    {
        "cuts": "cut",
        "cut_names": "name",
        "recompute": "recompute",
        "offload": "far",
        "shard": "weights",
    }
)
_RECORDS = {"place": Placement, "terms": StepTerms, "overlap": Overlap, "agreement": Agreement}
HOMES: Mapping[str, str] = MappingProxyType(  # the record of the plan that has a word as its field
    {field.name: home for home, record in _RECORDS.items() for field in fields(record)}
)
_OWN = ("graph", "schedule", "decisions", "predicted")  # fields of the plan itself


def value_of(plan: "Plan", word: str) -> object:
    """Return what a plan says by a word: of stages, the row."""
    return getattr(getattr(plan, HOMES[word]) if word in HOMES else plan, word)


def records_of(words: Words, plan: "Plan | None" = None) -> dict[str, Any]:
    """Return the fields of a plan that says these words, and else what `plan` says.

    Of `plan` only the records that a word changes are returned.
    Raises:   TypeError: no plan says such a word.
              PlanError, ScheduleError: a record cannot be so, or a text names no schedule.
    """
    said: dict[str, Any] = {**words}
    unknown = said.keys() - Words.__annotations__.keys()
    if unknown:
        raise TypeError(f"a plan says nothing of {', '.join(sorted(unknown))}")
    made = {name: said[name] for name in _OWN if name in said}
    if "schedule" in said:
        made["schedule"] = any_schedule(said["schedule"])
    if "prefetch" in said:
        said["prefetch"] = prefetch_of(said["prefetch"])
    if plan is None or not said.keys().isdisjoint(ROWS):
        rows = {} if plan is None else {row: getattr(plan, row) for row in ROWS}
        made["stages"] = stage_plans(**{"cuts": (), "cut_names": (), **rows, **_only(said, ROWS)})
    for home, record in _RECORDS.items():
        own = _only(said, record.__dataclass_fields__)
        if plan is None or own:
            made[home] = _record(home, own, plan)
    return made


def _record(home: str, own: dict[str, Any], plan: "Plan | None") -> object:
    if home == "place":
        old = (
            {} if plan is None else {f.name: getattr(plan.place, f.name) for f in fields(Placement)}
        )
        return placed(**{**old, **own})
    return _RECORDS[home](**own) if plan is None else replace(getattr(plan, home), **own)


def _only(said: Mapping[str, Any], names: Mapping[str, object]) -> dict[str, Any]:
    return {name: said[name] for name in names if name in said}
