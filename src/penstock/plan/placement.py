"""Placement: which ranks there are, on which hosts, and how much of a step each takes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.errors import PlanError
from penstock.schedule.grid import Grid, InnerAxis, misfit, misplaced, unlike, written

_MOST_RANKS = 50_000_000  # what arrays of a schedule can list


@dataclass(frozen=True, slots=True)
class Placement:
    """The ranks of a plan.

    num_ranks:          of one pipeline; a rank holds several stages if there are more.
    num_micro_batches:  per replica and step; of the largest share, where there are `shares`.
    replicas:           copies of the pipeline, each on its own ranks (data parallel).
    shares:             micro-batches of a step, by replica, where they are not alike.
    parts:              by rank, how much of its divided stages it keeps beside the ranks of other
                        replicas with which it divides them, in least terms; empty: all as much.
    hosts:              names of the cluster's hosts on which ranks are numbered, in that order;
                        or of the host of each rank; empty: as they stand in the cluster.
    tensor:             ranks that divide the ops of each stage among them (docs/tensor.md).
    context:            whether they divide the tokens of each sequence, and have all weights.
    """

    num_ranks: int
    num_micro_batches: int
    replicas: int = 1
    shares: tuple[int, ...] = ()
    parts: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    tensor: int = 1
    context: bool = False

    def __post_init__(self) -> None:
        for what in ("num_micro_batches", "num_ranks", "replicas", "tensor"):
            if getattr(self, what) < 1:
                raise PlanError(f"{what} is {getattr(self, what)}; it must be 1 or more")
        if self.context and self.tensor == 1:
            hint = "give tensor= the ranks that divide them, or leave out context"
            raise PlanError("tokens are to be divided, among 1 rank", hint=hint)
        total = self.num_ranks * self.replicas * self.tensor
        if total > _MOST_RANKS:
            message = f"{total} ranks"
            raise PlanError(f"{message}; there cannot be more than {_MOST_RANKS}")
        if len(set(self.hosts)) < len(self.hosts) != total:
            message = f"hosts are {', '.join(self.hosts)}, of {total} ranks"
            raise PlanError(message, hint="name each once, or the host of each rank")
        _check_shares(self)
        _check_parts(self)

    @property
    def axis(self) -> InnerAxis:
        """The ranks that divide each stage inside, and what of it."""
        return InnerAxis(self.tensor, self.context)

    @property
    def grid(self) -> Grid:
        """Whose the ranks are, and who takes which micro-batches of a step."""
        shares = self.shares or (self.num_micro_batches,) * self.replicas
        copies = shares if self.tensor == 1 else [n for n in shares for _ in range(self.tensor)]
        return Grid(self.num_ranks, tuple(copies), *self.axis)


def _check_shares(place: Placement) -> None:
    problem = misfit(place.shares, place.replicas, place.num_micro_batches)
    if problem:
        raise PlanError(problem[0], hint=problem[1])
    if place.shares != unlike(place.shares):
        raise PlanError(f"shares are {written(place.shares)}, all alike", hint="leave them out")


def _check_parts(place: Placement) -> None:
    if not place.parts:
        return
    problem = misplaced(place.parts, place.grid)
    if problem:
        raise PlanError(problem[0], hint=problem[1])
    least = place.grid.uneven(place.parts)
    if place.parts != least:
        hint = f"give {written(least)}" if least else "leave them out"
        raise PlanError(f"parts are {written(place.parts)}, not in least terms", hint=hint)


def placed(  # noqa: PLR0913 - the fields of a placement
    num_ranks: int,
    num_micro_batches: int,
    replicas: int = 1,
    shares: Sequence[int] = (),
    parts: Sequence[int] = (),
    hosts: Sequence[str] = (),
    tensor: int = 1,
    context: bool = False,
) -> Placement:
    """Return the placement in its normal form: alike shares and equal parts are left out.

    Other parts are in least terms.
    Raises:   PlanError: there can be no such placement.
    """
    sizes = num_ranks, num_micro_batches, replicas
    is_alike = tuple(shares) == (num_micro_batches,) * len(shares) and len(shares) == replicas
    own = () if is_alike else tuple(shares)
    place = Placement(*sizes, own, hosts=tuple(hosts), tensor=tensor, context=context)
    if not parts or misplaced(tuple(parts), place.grid):
        return replace(place, parts=tuple(parts)) if parts else place
    return replace(place, parts=place.grid.uneven(tuple(parts)))
