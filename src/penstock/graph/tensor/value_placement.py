"""Placement: what of a value each rank of the tensor axis has."""

from dataclasses import dataclass, replace
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Whole:
    """Every rank has all of it."""

    def __str__(self) -> str:
        return "whole"


@dataclass(frozen=True, slots=True)
class Slices:
    """Each rank has a part of dim `dim`: of each of its `pieces` equal runs, one slice a rank.

    With 2 ranks, dim of 6: pieces 1 gives rank 0 the places 0 1 2, pieces 3 the places 0 2 4.

    folded:  of every second run ranks take the slices in reverse order; there are as many others.
             With 2 ranks, dim of 8, pieces 2: rank 0 has the places 0 1 6 7, rank 1 2 3 4 5.
    """

    dim: int
    pieces: int = 1
    folded: bool = False

    def __str__(self) -> str:
        runs = f" in each of {self.pieces} runs" if self.pieces > 1 else ""
        return f"sliced along dim {self.dim}{runs}{', folded' if self.folded else ''}"

    def along(self, dim: int) -> "Slices":
        """Return these slices of another dim."""
        return replace(self, dim=dim)


@dataclass(frozen=True, slots=True)
class Partial:
    """Each rank has a summand of it.

    rows:  the name of the value that tells which places along `dim` are whose, where each place is
           one rank's alone: the others have zeros there (expert_slices.py).
    """

    rows: str = ""
    dim: int = 0

    def __str__(self) -> str:
        return "rows of each rank's experts" if self.rows else "a sum that is due"

    def along(self, dim: int) -> "Partial":
        """Return this with its rows along another dim."""
        return replace(self, dim=dim) if self.rows else self


@dataclass(frozen=True, slots=True)
class Filled:
    """Each place along `dim` is one rank's alone; the others have there whatever number came out.

    rows:  as of `Partial`.
    """

    rows: str
    dim: int = 0

    def __str__(self) -> str:
        return "rows of each rank's experts, and others' of no worth"

    def along(self, dim: int) -> "Filled":
        """Return this with its rows along another dim."""
        return replace(self, dim=dim)


Placement: TypeAlias = Whole | Slices | Partial | Filled
State: TypeAlias = Placement | tuple[Placement, ...]  # of an op with several results, of each
WHOLE, PARTIAL = Whole(), Partial()


def are_exchanged(before: State, after: Placement) -> bool:
    """Return whether ranks need to tell each other parts of their slices only, for other slices.

    Of slices in several runs, or folded ones, all is gathered.
    """
    both = before, after
    plain = all(isinstance(p, Slices) and p.pieces == 1 and not p.folded for p in both)
    return plain and before != after


def fits(place: Placement, shape: tuple[int, ...], ranks: int) -> bool:
    """Return whether a value of this shape can be placed so, with alike slices."""
    if not isinstance(place, Slices):
        return True
    if place.folded and place.pieces % 2:
        return False
    return place.dim < len(shape) and shape[place.dim] % (place.pieces * ranks) == 0


def local(place: Placement, shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Return the shape of what one rank has of a value of this shape."""
    if not isinstance(place, Slices):
        return shape
    return (*shape[: place.dim], shape[place.dim] // ranks, *shape[place.dim + 1 :])


def reshaped(
    place: Slices, old: tuple[int, ...], new: tuple[int, ...], ranks: int
) -> Slices | None:
    """Return the slices of the same numbers in another shape; None: along no single dim."""
    outer, before = place.pieces, 1
    for size in old[: place.dim]:
        outer *= size
    for dim, size in enumerate(new):
        pieces, rest = divmod(outer, before)
        if before <= outer and not rest and size % (pieces * ranks) == 0 and size:
            inner = size // (pieces * ranks)
            for more in new[dim + 1 :]:
                inner *= more
            own = old[place.dim] // (place.pieces * ranks)
            for more in old[place.dim + 1 :]:
                own *= more
            if own == inner and not (place.folded and pieces % 2):
                return Slices(dim, pieces, place.folded)
        before *= size
    return None
