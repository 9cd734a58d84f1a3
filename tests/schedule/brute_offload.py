"""The shortest step with offload, second by second: every rank starts whatever it may, or waits.

For whole seconds only.  F, I and W go by micro-batch in each stage; copies go in any order.
"""

from typing import NamedTuple

HERE, LEAVING, AWAY, COMING, BACK, GONE = range(6)  # where an activation is, once its F has begun
NONE = (-1, 0)  # a lane with nothing to do: what it works on, and for how long still


class Rank(NamedTuple):
    done: tuple[int, int, int]  # F, I and W that ended
    compute: tuple[int, int] = NONE  # kind and seconds left
    to_host: tuple[int, int] = NONE  # micro-batch and seconds left
    to_device: tuple[int, int] = NONE
    where: tuple[int, ...] = ()  # of each micro-batch whose F has begun


class Case(NamedTuple):
    num_stages: int
    num_micro_batches: int
    times: tuple[tuple[int, ...], ...]  # of F, I, W, offload and reload, per stage
    limit: int


def shortest(case: Case, most_s: int) -> int:
    """Return the least seconds of a step, or `most_s` if none is shorter."""
    states = {tuple(Rank((0, 0, 0)) for _ in range(case.num_stages))}
    for now_s in range(most_s):
        if any(is_done(case, state) for state in states):
            return now_s
        begun = {new for state in states for new in starts(case, state)}
        states = {
            new
            for state in begun
            if may_end(case, new := tuple(map(second, state)), most_s - now_s - 1)
        }
    return most_s


def is_done(case: Case, state: tuple[Rank, ...]) -> bool:
    return all(rank.done[2] == case.num_micro_batches for rank in state)


def may_end(case: Case, state: tuple[Rank, ...], left_s: int) -> bool:
    """Return whether the work of every rank fits into the seconds, with one to spare."""
    for stage, rank in enumerate(state):
        kind, busy_s = rank.compute
        work_s = busy_s
        for each in range(3):
            begun = rank.done[each] + (kind == each)
            work_s += (case.num_micro_batches - begun) * case.times[each][stage]
        if work_s >= left_s and work_s > 0:
            return False
    return True


def starts(case: Case, state: tuple[Rank, ...]) -> set[tuple[Rank, ...]]:
    """Return all that can begin now, the ranks one after the other, nothing included."""
    found = {state}
    for stage in range(case.num_stages):
        found = {
            (*each[:stage], new, *each[stage + 1 :])
            for each in found
            for new in rank_starts(case, each, stage)
        }
    return found


def rank_starts(case: Case, state: tuple[Rank, ...], stage: int) -> set[Rank]:
    found, new = {state[stage]}, {state[stage]}
    while new:
        new = {
            after
            for rank in new
            for after in one_start(case, (*state[:stage], rank, *state[stage + 1 :]), stage)
        } - found
        found |= new
    return found


def one_start(case: Case, state: tuple[Rank, ...], stage: int) -> list[Rank]:
    """Return the rank after each one thing that it can begin."""
    rank, last = state[stage], case.num_stages - 1
    f, i, w = rank.done
    where, found = rank.where, []
    room = case.limit - sum(at not in (AWAY, GONE) for at in where)
    seconds = [row[stage] for row in case.times]
    if rank.compute == NONE:
        arrived = stage == 0 or state[stage - 1].done[0] > f
        if f < case.num_micro_batches and arrived and room > 0:
            found.append(rank._replace(compute=(0, seconds[0]), where=(*where, HERE)))
        arrived = f > i if stage == last else state[stage + 1].done[1] > i
        if i < f and arrived and where[i] in (HERE, BACK):
            found.append(rank._replace(compute=(1, seconds[1])))
        if w < i:
            found.append(rank._replace(compute=(2, seconds[2])))
    begun = i + (rank.compute[0] == 1)
    for m in range(begun, f):
        if where[m] == HERE and rank.to_host == NONE:
            moved = (*where[:m], LEAVING, *where[m + 1 :])
            found.append(rank._replace(to_host=(m, seconds[3]), where=moved))
        if where[m] == AWAY and rank.to_device == NONE and room > 0:
            moved = (*where[:m], COMING, *where[m + 1 :])
            found.append(rank._replace(to_device=(m, seconds[4]), where=moved))
    return found


def second(rank: Rank) -> Rank:
    """Return the rank a second later."""
    done, where = list(rank.done), list(rank.where)
    compute, to_host, to_device = (
        (what, left_s - 1) if what >= 0 else NONE
        for what, left_s in (rank.compute, rank.to_host, rank.to_device)
    )
    if compute[0] >= 0 and compute[1] == 0:
        if compute[0] == 2:
            where[done[2]] = GONE
        done[compute[0]] += 1
        compute = NONE
    if to_host[0] >= 0 and to_host[1] == 0:
        where[to_host[0]], to_host = AWAY, NONE
    if to_device[0] >= 0 and to_device[1] == 0:
        where[to_device[0]], to_device = BACK, NONE
    return Rank((done[0], done[1], done[2]), compute, to_host, to_device, tuple(where))
