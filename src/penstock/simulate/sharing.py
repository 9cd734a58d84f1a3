"""Sharing: ranks beyond the cores of their host have a part of a core each.

While n ranks of a host with c cores compute, each runs at min(1, c / n) of its speed.  How long
a compute takes then depends on what runs beside it, and that on how long it takes: the simulation
is repeated, and each time every compute gets the seconds that it would need at the mean share that
it had the time before, until none changes by more than `_CLOSE`.

Ignores:  what messages and collectives take of the cores; switching from one rank to another.
"""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from penstock.cluster.cluster import Cluster
from penstock.program.codes import COST_ROW, WORKS
from penstock.program.program import Program
from penstock.simulate.costs import with_copies

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_CLOSE = 1e-4
_MOST_ROUNDS = 40


def crowded(num_ranks: int, cluster: Cluster | None) -> dict[int, int]:
    """Return the cores of each host that has fewer cores than ranks, by its number."""
    if cluster is None or not any(host.cores for host in cluster.hosts):
        return {}
    numbers = [cluster.host_number(rank) for rank in range(num_ranks)]
    cores = {number: cluster.hosts[number].cores for number in set(numbers)}
    return {number: few for number, few in cores.items() if 0 < few < numbers.count(number)}


def shared_s(
    program: Program,
    cluster: Cluster,
    cores: Mapping[int, int],
    alone_s: Floats,
    run: Callable[[Floats], Floats],
) -> Floats:
    """Return the seconds of all that works, of which `alone_s` are those without sharing.

    cores:  by number of the host, for those that have too few.
    run:    simulates with such seconds, and returns when each began and ended.
    """
    hosts = _hosts_of_works(program, cluster)
    taken_s = alone_s
    for number in range(_MOST_ROUNDS):
        spans_s = run(taken_s)
        share = np.ones(len(alone_s))
        for host, few in cores.items():
            here = hosts == host
            share[here] = _mean_share(spans_s[here], few)
        wanted_s = alone_s / share
        if (abs(wanted_s - taken_s) <= _CLOSE * wanted_s).all():
            return wanted_s
        step = 1.0 if number < 4 else 0.5  # what goes to and fro comes to rest
        taken_s = taken_s + step * (wanted_s - taken_s)
    return taken_s


def _mean_share(spans_s: Floats, cores: int) -> Floats:
    """Return the mean fraction of full speed of each of several computes on one host."""
    times_s = np.unique(spans_s)
    begun = np.searchsorted(np.sort(spans_s[:, 0]), times_s, side="right")
    over = np.searchsorted(np.sort(spans_s[:, 1]), times_s, side="right")
    rate = np.minimum(1.0, cores / np.maximum(begun - over, 1))
    done_s = np.concatenate([[0.0], np.cumsum(np.diff(times_s) * rate[:-1])])
    lengths_s = spans_s[:, 1] - spans_s[:, 0]
    worked_s = np.interp(spans_s[:, 1], times_s, done_s) - np.interp(spans_s[:, 0], times_s, done_s)
    return np.where(lengths_s > 0, worked_s / np.where(lengths_s > 0, lengths_s, 1.0), 1.0)


def alone_s(program: Program, action_s: Floats, device: Ints) -> Floats:
    """Return the seconds of all that works as it stands in the code."""
    code, rows = program.code, _works(program)
    costs = COST_ROW[code.op[rows], code.kind[rows]]
    return with_copies(action_s)[costs, code.stage[rows], device[_owners(program, rows)]]


def _works(program: Program) -> Ints:
    return np.flatnonzero(WORKS[program.code.op])


def _owners(program: Program, rows: Ints) -> Ints:
    return np.searchsorted(program.code.offsets, rows, side="right") - 1


def _hosts_of_works(program: Program, cluster: Cluster) -> Ints:
    numbers = np.array([cluster.host_number(rank) for rank in range(program.num_ranks)])
    return numbers[_owners(program, _works(program))]
