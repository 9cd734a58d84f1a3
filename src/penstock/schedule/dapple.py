"""DAPPLE: 1F1B with a choice of how many forwards run ahead, and of how many ranks a stage has.

Rank r runs K forwards (warm-up), then alternates.  Policy "A" has K = S - r, and is 1F1B.  Policy
"B" has K = 2 (S - r) - 1: a message may then take as long as a forward and a backward together
before a rank waits for it, at the price of more activations.  K is never more than fit: `limit`.

    S = 3, M = 5, one second for F, two for B:
    rank 0  F0 F1 F2 F3 F4 .  .  B0 B0 .  B1 B1 .  B2 B2 .  B3 B3 .  B4 B4
    rank 1  .  F0 F1 F2 .  B0 B0 F3 B1 B1 F4 B2 B2 .  B3 B3 .  B4 B4 .  .
    rank 2  .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 .  .  .  .

A stage may have several ranks (`ranks`), to which micro-batches go in turn, or so many to each of
a turn: its gradients are summed over them before the update, as those of replicas are.

    S = 2, M = 4, ranks 2-1; seconds of stage 0: two for F, four for B; of stage 1: half
    rank 0  F0.0 -    F0.2 -    .    B0.0 -    -    -    .    .    B0.2 -    -    -    .    .    .
    rank 1  F0.1 -    F0.3 -    .    .    .    .    B0.1 -    -    -    .    .    B0.3 -    -    -
    rank 2  .    .    F1.0 B1.0 -    F1.1 B1.1 -    F1.2 B1.2 -    F1.3 B1.3 -    .    .    .    .

Source: DAPPLE, arXiv:2007.01045.
"""

import re
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ScheduleError
from penstock.schedule.schedule import Row, Schedule, arrange
from penstock.schedule.stage_placement import ranks_for

Policy = Literal["A", "B"]
_RANKS = re.compile(r"[1-9]\d{0,3}(?:\+[1-9]\d{0,3})*(?:-[1-9]\d{0,3}(?:\+[1-9]\d{0,3})*)*")


def dapple(
    num_stages: int,
    num_micro_batches: int,
    *,
    policy: Policy = "B",
    limit: int | None = None,
    ranks: int | str = 1,
) -> Schedule:
    """Return DAPPLE's early backward schedule, one stage per rank, or on the `ranks` of each.

    Bubble, in seconds, for equal stages and free links: (S - 1) * (f + b), whatever the policy,
    where `limit` is S or more.  Rank r holds min(K, limit, M) activations.

    `ranks` of 3-1 are three of stage 0 and one of stage 1, 2+1-1 two of stage 0, of which the first
    takes two micro-batches of three; stages not named are on one.  With D ranks from a stage on,
    its ranks together hold D micro-batches by "A", 2 D less its own ranks by "B": each its part of
    them, rounded up, or what the next stage may ask of it before one comes back.

    Raises:   ScheduleError: a size or `limit` is less than 1, or it is too little for many ranks;
              `ranks` are not as above, of more stages than there are, or of too many ranks.
    """
    ranks_for(num_stages, num_micro_batches, num_stages)
    if limit is not None and limit < 1:
        raise ScheduleError(f"the limit is {limit} activations", hint="give 1 or more")
    most = num_micro_batches if limit is None else limit
    turns = turns_of(ranks)
    if len(turns) > num_stages:
        message = f"ranks {ranks} of {len(turns)} stages, of {num_stages}"
        raise ScheduleError(message, hint="name no more stages than there are")
    turns += ((1,),) * (num_stages - len(turns))
    taken = [_taken(turn, num_micro_batches) for turn in turns]
    rows: list[tuple[Row, Row]] = []
    for stage, warm_ups in enumerate(_warm_ups(turns, taken, policy)):
        pairs = zip(taken[stage], warm_ups, strict=True)
        rows += [_rows(stage, own, min(most, warm_up)) for own, warm_up in pairs]
    return Schedule(num_stages, num_micro_batches, arrange(rows), name=dapple.__name__)


def turns_of(ranks: int | str) -> tuple[tuple[int, ...], ...]:
    """Return for each stage that `ranks` names how many micro-batches of a turn each rank takes.

    Raises:   ScheduleError: it is not of the form 3-1, or 2+1-1.
    """
    if not _RANKS.fullmatch(str(ranks)):
        hint = "write the ranks of each stage: 3-1, or what each takes of a turn: 2+1-1"
        raise ScheduleError(f"the stages are on {ranks!r} ranks", hint=hint)
    words = (word.split("+") for word in str(ranks).split("-"))
    return tuple(
        (1,) * int(parts[0]) if len(parts) == 1 else tuple(map(int, parts)) for parts in words
    )


def words_of_turns(turns: Sequence[Sequence[int]]) -> str:
    """Return the text of which `turns_of` makes `turns`."""
    return "-".join(
        str(len(turn)) if len({*turn}) == 1 else "+".join(map(str, turn)) for turn in turns
    )


def _taken(turn: tuple[int, ...], num_micro_batches: int) -> list[NDArray[np.int64]]:
    """Return the micro-batches of each rank of a stage: the next one's is that which is least far.

    Raises:   ScheduleError: one of them has none.
    """
    owners, counts = list[int](), [0] * len(turn)
    for _ in range(num_micro_batches):
        owner = min(range(len(turn)), key=lambda at: (counts[at] + 1) / turn[at])
        owners.append(owner)
        counts[owner] += 1
    if 0 in counts:
        message = f"{num_micro_batches} micro-batches leave a rank of {len(turn)} without one"
        raise ScheduleError(message, hint="give the stage fewer ranks, or a step more of them")
    return [np.flatnonzero(np.array(owners) == at) for at in range(len(turn))]


def _warm_ups(
    turns: Sequence[tuple[int, ...]], taken: Sequence[Sequence[NDArray[np.int64]]], policy: Policy
) -> list[list[int]]:
    """Return for each rank of each stage how many forwards it runs before its first backward.

    At least as many as the next stage may ask of it before it hands back the first of them.
    """
    behind, found = 0, list[list[int]]()
    later: list[tuple[NDArray[np.int64], int]] = []
    for turn, own in zip(reversed(turns), reversed(taken), strict=True):
        behind += len(turn)
        held = behind if policy == "A" else 2 * behind - len(turn)
        counts = [-(-part * held // sum(turn)) for part in turn]
        counts = [max(most, _asked(mine, later)) for most, mine in zip(counts, own, strict=True)]
        later = list(zip(own, counts, strict=True))
        found.insert(0, counts)
    return found


def _asked(own: NDArray[np.int64], later: Sequence[tuple[NDArray[np.int64], int]]) -> int:
    """Return the most of its `own` micro-batches that a rank sends on before one comes back.

    later:    of each rank of the next stage, its micro-batches, and how many forwards it runs
              before its first backward.
    """
    most = 1
    for theirs, count in later:
        ends = theirs[np.minimum(np.arange(len(theirs)) + count - 1, len(theirs) - 1)]
        inside = np.searchsorted(own, ends, "right") - np.searchsorted(own, theirs)
        most = max(most, int(inside.max()))
    return most


def _rows(stage: int, own: NDArray[np.int64], warm_up: int) -> tuple[Row, Row]:
    m = np.arange(len(own))
    return Row("F", stage, own, 2 * (m - warm_up) + 1), Row("B", stage, own, 2 * m)
