"""Stage: what a plan says of one stage: where it ends, what it repeats, what waits elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar, get_args

from penstock.errors import PlanError
from penstock.graph.stages import Recompute
from penstock.program.passes.offload import Offloaded
from penstock.program.passes.shard import Sharding

_FAR, _WEIGHTS = get_args(Offloaded), get_args(Sharding)
_Word = TypeVar("_Word")


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage of a plan.

    cut:        index of the graph's cut point at its end; None: it is the last stage.
    name:       the name of that point, for people and for the check against the graph; the last
                stage has none.
    recompute:  whether B repeats F instead of keeping its activations; or the ops of F that it
                repeats, as nodes of the graph, increasing.
    far:        what is in far memory while not needed: the state of the optimizer, what F keeps for
                the backward, or both; "weights": weights, gradients and state, "all": these and
                what F keeps.
    weights:    whether every replica holds it whole, or a part that is made whole while it is used,
                or kept whole for a step ("shard_keep").
    """

    cut: int | None = None
    name: str = ""
    recompute: Recompute = False
    far: Offloaded = "none"
    weights: Sharding = "replicate"

    def __post_init__(self) -> None:
        if self.cut is None and self.name:
            raise PlanError(f"the last stage ends at {self.name!r}; it has no cut point at its end")
        ops = self.recompute
        if not isinstance(ops, bool) and (not ops or list(ops) != sorted(set(ops))):
            message = f"recompute of a stage is {list(ops)}, no increasing numbers of ops"
            raise PlanError(message, hint="give false, true, or the ops to repeat")
        if self.far not in _FAR:
            raise PlanError(f"offload says {self.far!r}, not one of {_FAR}")
        if self.weights not in _WEIGHTS:
            raise PlanError(f"shard says {self.weights!r}, not one of {_WEIGHTS}")


def stage_plans(
    cuts: Sequence[int],
    cut_names: Sequence[str],
    recompute: Sequence[Recompute] = (),
    offload: Sequence[Offloaded] = (),
    shard: Sequence[Sharding] = (),
) -> tuple[StagePlan, ...]:
    """Return the stages of which these rows speak; an empty row says nothing of any stage.

    Raises:   PlanError: a row is of another number of stages, or says what no stage can have.
    """
    if len(cut_names) != len(cuts):
        raise PlanError(f"{len(cut_names)} names for {len(cuts)} cuts")
    count = len(cuts) + 1
    again: Sequence[Recompute] = _row("recompute", recompute, False, count)
    far: Sequence[Offloaded] = _row("offload", offload, "none", count)
    weights: Sequence[Sharding] = _row("shard", shard, "replicate", count)
    return tuple(map(StagePlan, (*cuts, None), (*cut_names, ""), again, far, weights))


def _row(what: str, row: Sequence[_Word], default: _Word, count: int) -> Sequence[_Word]:
    if row and len(row) != count:
        raise PlanError(f"{what} says {len(row)} of {count} stages")
    return row or (default,) * count
