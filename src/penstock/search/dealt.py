"""Dealt: which devices of several hosts the ranks of a plan are on, where these have several each.

Ranks are numbered replica by replica.  As they stand, a replica is on as few hosts as can be, its
messages stay inside, and the ranks that share a stage, whose gradients are summed, are scattered
over hosts.  Where a stage's weights are many and what goes from stage to stage is little, the other
way round is faster.  Tried, of the best plan with each number of replicas, are

    two replicas of two stages         rank      0  1   2  3
    as it stands                       on host   a  a   b  b      sums go between the hosts
    by stage                           on host   a  b   a  b      messages do
    by turns                           on host   a  b   a  b

and then, of few ranks, what exchanging the hosts of two ranks makes better.

Source:  the placements of DAPPLE, arXiv:2007.01045: scatter first, append first and fresh first.
"""

import itertools
from collections.abc import Iterator, Sequence

from penstock.plan.plan import Plan
from penstock.search.candidate import Candidate
from penstock.search.field import Field
from penstock.search.shapes import has_turns

_FEW = 8  # ranks, of which exchanges of two are tried
_KEPT = 3  # plans that are handed on


def dealt(field: Field) -> list[Candidate]:
    """Return the plans that are better with their ranks dealt otherwise, the best first."""
    found = list[Candidate]()
    for start in _starts(field):
        best = start
        for hosts in orders_by_rank(_hosts_of(field, start.plan), start.plan.grid.num_ranks):
            best = _better(field, best, hosts)
        if start.plan.total_ranks <= _FEW:
            best = _exchanged(field, best)
        found += [best] if best is not start else []
    return sorted(found, key=lambda each: each.score(field.objective))[:_KEPT]


def orders_by_rank(hosts: Sequence[str], num_ranks: int) -> Iterator[tuple[str, ...]]:
    """Yield the hosts of ranks where those of one place are neighbours, and where hosts take turns.

    hosts:      of each rank as it stands.
    num_ranks:  of a replica.
    """
    replicas = len(hosts) // num_ranks
    yield tuple(hosts[p * replicas + r] for r in range(replicas) for p in range(num_ranks))
    rows = ([name] * hosts.count(name) for name in dict.fromkeys(hosts))
    turns = itertools.chain.from_iterable(itertools.zip_longest(*rows))
    yield tuple(name for name in turns if name is not None)


def _starts(field: Field) -> Iterator[Candidate]:
    """Yield the best plan of several ranks with each number of replicas, and with turns of ranks.

    Of pipelines whose hosts have several devices: of others no two orders differ.
    """
    counts = sorted({plan.replicas for plan in field.plans if _may_differ(field, plan)})
    for count in counts if field.objective != "memory" else ():
        yield from field.best(1, lambda plan, of=count: _is_of(field, plan, of))


def _is_of(field: Field, plan: Plan, replicas: int) -> bool:
    return plan.replicas == replicas and _may_differ(field, plan)


def _may_differ(field: Field, plan: Plan) -> bool:
    """Return whether another order of the devices may change what is sent between hosts."""
    if plan.num_ranks == 1 or (plan.total_ranks == plan.num_ranks and not has_turns(plan.schedule)):
        return False
    hosts = _hosts_of(field, plan)
    return 1 < len({*hosts}) < len(hosts)


def _hosts_of(field: Field, plan: Plan) -> list[str]:
    there = field.judge.cluster_of(plan.place.hosts)
    return [there.host_of(rank).name for rank in range(plan.total_ranks)]


def _better(field: Field, best: Candidate, hosts: Sequence[str]) -> Candidate:
    if list(hosts) == _hosts_of(field, best.plan) or field.is_over():
        return best
    plan = best.plan.changed(hosts=hosts)
    if field.effort.prune and not field.judge.may_beat(plan, best, field.objective):
        return best
    other = field.judge.candidate(plan)
    is_it = not other.refused and other.score(field.objective) < best.score(field.objective)
    return other if is_it else best


def _exchanged(field: Field, best: Candidate) -> Candidate:
    """Return what exchanging the hosts of two ranks leads to, while that is better."""
    before = None
    while best is not before:
        before = best
        hosts = _hosts_of(field, best.plan)
        for a, b in itertools.combinations(range(len(hosts)), 2):
            if hosts[a] != hosts[b]:
                other = [*hosts]
                other[a], other[b] = hosts[b], hosts[a]
                best = _better(field, best, other)
                hosts = _hosts_of(field, best.plan)
    return best
