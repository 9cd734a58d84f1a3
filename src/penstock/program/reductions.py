"""Reductions: what ranks do together with all that a step has made, before or after its updates.

tied:wte.0         Sum: of the gradients of a parameter that lives in several stages, in step 0
replicas:stage1.0  Sum: of the gradients of a stage that lives on several ranks
shards:stage1.0    Sum: likewise; each rank keeps its own shard of it
delayed:stage1.0   Sum: likewise, of a step before; at the beginning of a step
norm:all.0         Norm: of all gradients, to clip by
guard:all.0        Guard: each rank gives another what it alone has, for a copy there
commit:all.0       Commit: all have come to the end of the step, which counts only then
validate:all.0     Validate: the norm, after an update that is undone and redone where it clips
average:stage1.0   AverageWeights: of the weights of a stage, after its update

A rank begins one where its code has it, and goes on; they run on a lane of their own, one after the
other, each once all its `ranks` have begun it.  The next Update waits for all of them.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias, get_args

from penstock.errors import ProgramError

SumHow = Literal["delayed", "tied", "replicas", "shards"]
Word = Literal[
    "delayed", "tied", "replicas", "shards", "norm", "guard", "commit", "validate", "average"
]
WORDS: tuple[Word, ...] = get_args(Word)  # in the order in which they come in a step
AFTER_UPDATES: tuple[Word, ...] = "validate", "average"
AT_THE_END: tuple[Word, ...] = "norm", "guard", "commit", *AFTER_UPDATES  # of a step


class _AsWord:
    """Prints as its row of the table of instructions says."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"{self.word}:{self.bucket}.{self.step}"  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Sum(_AsWord):
    """Sum the gradients of a bucket over `ranks`.

    tied:      of a parameter that lives in several stages: on the spot where they share a rank.
    replicas:  of a stage that lives on several ranks.
    shards:    likewise, of which each rank keeps its own shard; it waits for the one before it on
               its rank, whose whole gradients are freed then.
    delayed:   likewise, of the step before, or of one before that (penstock/sums.py).

    bucket:      a tied parameter's name, or "stage3".
    size_bytes:  of a tensor whose sum takes as long.
    """

    how: SumHow
    bucket: str
    ranks: tuple[int, ...]
    step: int = 0
    size_bytes: int = 0

    @property
    def word(self) -> Word:
        return self.how

    @property
    def stage(self) -> int:
        """Return the stage whose gradients it sums, if it is of one stage."""
        return int(self.bucket.removeprefix("stage"))


@dataclass(frozen=True, slots=True)
class _OfAll(_AsWord):
    """A word of all `ranks`; it takes as long as a sum of `size_bytes`."""

    ranks: tuple[int, ...]
    step: int = 0
    bucket: ClassVar[str] = "all"
    size_bytes: ClassVar[int] = 8


class Norm(_OfAll):
    """Find the norm of all gradients, and clip by it."""

    __slots__ = ()
    word = "norm"


class Guard(_OfAll):
    """Give another rank what this one alone has of the step, for a copy there; no sum."""

    __slots__ = ()
    word = "guard"
    size_bytes = 0


class Commit(_OfAll):
    """Learn whether all ranks have come to the end of the step, which counts only then."""

    __slots__ = ()
    word = "commit"


class Validate(_OfAll):
    """Find the norm after the update, which is undone and redone where it should have clipped.

    It is begun behind the updates, and awaited before the first backward of the next step.
    """

    __slots__ = ()
    word = "validate"


@dataclass(frozen=True, slots=True)
class AverageWeights(_AsWord):
    """Average the weights of a stage over `ranks`, after the updates of some steps of a run.

    bucket:      "stage3", or "stage3/1" where the ranks change by round.
    size_bytes:  of the weights.
    every:       steps from one time to the next.  first: steps until the first time.
    """

    bucket: str
    ranks: tuple[int, ...]
    step: int = 0
    size_bytes: int = 0
    every: int = 1
    first: int = 1
    word: ClassVar[Word] = "average"

    @property
    def stage(self) -> int:
        return int(self.bucket.removeprefix("stage").partition("/")[0])

    def is_due(self, step: int) -> bool:
        """Return whether it is done in step number `step` of a run."""
        return step + 1 >= self.first and (step + 1 - self.first) % self.every == 0


Reduction: TypeAlias = Sum | Norm | Guard | Commit | Validate | AverageWeights
_OF_ALL = {each.word: each for each in (Norm, Guard, Commit, Validate)}


def reduction_of(
    word: Word, bucket: str, ranks: tuple[int, ...], size_bytes: int, every: int = 1, first: int = 1
) -> Reduction:
    """Return the reduction of step 0 with these operands.

    Raises:   ProgramError: of all gradients, with a bucket or a size of its own; or no average, and
              not due in each step.
    """
    if word == "average":
        return AverageWeights(bucket, ranks, 0, size_bytes, every, first)
    if (every, first) != (1, 1):
        message = f"{word}:{bucket} is due each {every} steps from step {first} on"
        raise ProgramError(message, hint="only averages may be left out in a step")
    if (of_all := _OF_ALL.get(word)) is None:
        return Sum(word, bucket, ranks, 0, size_bytes)  # type: ignore[arg-type]
    if (bucket, size_bytes) != (of_all.bucket, of_all.size_bytes):
        message = f"{word} is of all gradients, in {of_all.size_bytes} bytes"
        hint = f"write {word}:all.0"
        raise ProgramError(f"{message}, not of {bucket!r} in {size_bytes}", hint=hint)
    return of_all(ranks)
