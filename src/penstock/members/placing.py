"""Placing: which member becomes which rank of a plan, so that the least has to be moved.

Guards hold copies, so the order that moves least may leave all replicas of a stage to the members
of one host; then those orders are looked at that take hosts block by block, or by turns, and of few
members all orders of hosts.  That which loses state with the fewest hosts is taken.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, permutations, zip_longest
from typing import Any, NamedTuple

import numpy as np

from penstock.members.assigned import least_assigned
from penstock.members.words import HeldTensor
from penstock.state.tensor_parts import key_in

Sizes = Mapping[str, int]  # bytes, by name of a parameter or buffer
_FEW = 6  # members, all orders of whose hosts are looked at
_MOST_HOSTS = 4  # likewise, block by block


class OnHosts(NamedTuple):
    """Where members are, and what a host costs.

    homes:   the host of each member.
    losses:  with how many hosts state would be lost, of ranks on these hosts.
    """

    homes: Mapping[int, str]
    losses: Callable[[Sequence[str]], int]


def placed(
    members: Sequence[int],
    wanted: Sequence[Mapping[str, int]],
    holds: Mapping[int, Sequence[HeldTensor]],
    on: OnHosts | None = None,
) -> tuple[tuple[int, ...], int]:
    """Return the members by rank, and the bytes that have to move in all.

    wanted:  by rank, the bytes of each tensor that it needs, by key.
    holds:   what each member has.
    on:      their hosts; None: all are on one.
    Of orders that move as little, the one in which members stay as they stand is preferred.
    """
    lacks = _lacks(members, wanted, holds)
    best = _ordered(members, lacks, None, {})
    if on is None or not (least := on.losses([on.homes[m] for m in best[0]])):
        return best
    for homes in _patterns([on.homes[member] for member in members]):
        lost = on.losses(homes)
        made = _ordered(members, lacks, homes, on.homes) if lost <= least else best
        if lost < least or made[1] < best[1]:
            best, least = made, lost
    return best


def _patterns(own: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield ways in which ranks may be on the hosts of members, each once."""
    if len(own) <= _FEW:
        yield from sorted({*permutations(own)})
        return
    count = Counter(own)
    for hosts in islice(permutations(count), math.factorial(_MOST_HOSTS)):
        rows = [[host] * count[host] for host in hosts]
        yield tuple(host for row in rows for host in row)
        yield tuple(host for turn in zip_longest(*rows) for host in turn if host is not None)


def _lacks(
    members: Sequence[int],
    wanted: Sequence[Mapping[str, int]],
    holds: Mapping[int, Sequence[HeldTensor]],
) -> Any:
    """Return by member and rank the bytes that would have to move."""
    has = {m: {key_in(held.key) for held in holds.get(m, ())} for m in members}
    rows = [
        [sum(size for key, size in need.items() if key not in has[m]) for need in wanted]
        for m in members
    ]
    return np.array(rows, dtype=np.float64)


def _ordered(
    members: Sequence[int],
    lacks: Any,
    homes: Sequence[str] | None,
    home_of: Mapping[int, str],
) -> tuple[tuple[int, ...], int]:
    """Return members by rank, and the bytes that move; `homes`: of each rank, None: any."""
    apart = np.abs(np.subtract.outer(np.arange(len(members)), np.arange(len(members))))
    costs = lacks + apart / (1 + apart.sum())
    if homes is not None:
        costs[[[home_of[m] != home for home in homes] for m in members]] = math.inf
    ranks = least_assigned(costs)
    moved = sum(float(lacks[row, rank]) for row, rank in enumerate(ranks))
    return tuple(members[ranks.index(rank)] for rank in range(len(members))), int(moved)


def sizes_of(holds: Mapping[int, Sequence[HeldTensor]], width: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of every tensor that anybody holds, parts counted as the whole they are of.

    width:  bytes of a number, by dtype.
    """
    found: dict[str, int] = {}
    for rows in holds.values():
        for held in rows:
            shape = held.shape
            key = key_in(held.key)
            if key != held.key:
                words = held.key.split("/", 1)[0].rpartition(" ")[2]
                shape = tuple(map(int, words.split("x"))) if words else ()
            found[key] = math.prod(shape) * width.get(held.dtype, 4)
    return found
