"""Assign: the best stages, devices and schedule of a problem, every candidate simulated exactly.

    all        of few layers on few devices every assignment is a candidate; else
    lines      devices in many orders; in each the stages whose slowest is least and, under falling
               limits on the slowest, those whose sum is least, for every number of stages
    simulated  all of them, by 1F1B
    moved      from the best, and from the best of each number of groups, under each schedule: a
               cut, a device or a group at a time, while that is better
    made       for the best: schedules made for their seconds, then cuts moved

So the best of few is found under every schedule that has one stage on a group and is not made for
seconds.  What does not fit the memory comes after all that does; of that what lacks least is first.
Deterministic: candidates come in one order, and ties go to the earlier one.

Ignores:  unequal shares in a group; what can only be reached by several moves of which the first is
          no better; schedules with a stage on several ranks.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from bench.planners.device_order import many
from bench.planners.line import Lined, on_line
from bench.planners.line_kernel import Arrays, Rules
from bench.planners.moves import cut_moves, moves
from bench.planners.problem import Assignment, Problem, slowest_links
from bench.planners.simulated import MADE_FOR_SECONDS, Outcome, simulated
from penstock.errors import PlanError
from penstock.schedule import find
from penstock.search.transformer.partition import partition

SCHEDULES_TRIED = (
    "one_f_one_b", "gpipe", "dapple", "zb_h1", "zb_h2", "interleaved", "zb_v", "zb_greedy",
)  # fmt: skip
_TWO_STAGES = ("interleaved", "zb_v")  # on a rank
_LIMITS = (math.inf, 1.5, 1.2, 1.1, 1.05, 1.02, 1.0)  # of the slowest stage, of the least possible
_MESSAGES = ((0.0, 1.0), (1.0, 0.0))  # times added to a stage, times a stage of its own
_FEW = 2_000  # assignments that are all tried
_MADE = 48  # schedules made for seconds, at once
_EACH, _BEST, _NEAR = 16, 6, 1.25  # candidates of a depth; starts; of these, as slow at most


def assign(problem: Problem, *, schedules: Sequence[str] = SCHEDULES_TRIED) -> Outcome:
    """Return the fastest assignment found that fits.

    schedules   that may be taken, by name
    Raises:     PlanError: none is found that fits.
    """
    known = simulated(problem, candidates(problem))
    known += [improved(problem, start) for start in _starts(known)]
    found: list[Outcome] = []
    for name in schedules:
        if name in MADE_FOR_SECONDS:
            found += _made(problem, name, known, found)
            continue
        for start in _starts(_under(problem, name, known)):
            found.append(improved(problem, start))
        known += [one for one in found if len(one.assignment.ends) == len(one.assignment.groups)]
    best = min(found, key=_rank, default=None)
    if best is None or not best.fits:
        lacks = f", the best lacks {best.excess_bytes:.4g} bytes" if best else ""
        message = f"no stages found that fit {problem.num_devices} devices{lacks}"
        raise PlanError(message, hint="use more devices, or a schedule that holds less")
    return best


def candidates(problem: Problem) -> list[Assignment]:
    """Return all assignments if they are few, else the best on lines of devices; each once."""
    if num_assignments(problem) <= _FEW:
        return list(all_assignments(problem))
    arrays, found = problem.arrays(), dict[Assignment, None]()
    orders = (*many(problem), *_orders_of_kinds(problem))
    for order in dict.fromkeys(orders):
        for added, beside in _MESSAGES:
            rules = Rules(
                0.0, 1 / problem.num_micro_batches, added, beside, 1.0, 1.0,
                problem.num_micro_batches, np.arange(1, problem.num_devices + 1),
            )  # fmt: skip
            for one in _by_limits(arrays, order, rules):
                found[Assignment(one.ends, one.groups)] = None
    return list(found)


def _orders_of_kinds(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Yield lines in which the kinds stand as `partition` finds best, links by their slowest.

    A kind that it leaves out, or devices of it, stand at the end.
    """
    if len(problem.kinds) < 2:
        return
    links = slowest_links(problem)
    for replicas, count in itertools.product(((1,), None), (None, problem.num_micro_batches)):
        try:
            found = partition(
                problem.chain, problem.kinds, links, num_micro_batches=count, replicas=replicas
            )
        except PlanError:
            continue
        left = [
            [d for d, own in enumerate(problem.kind_of) if own == kind]
            for kind in range(len(links))
        ]
        order: list[int] = []
        for stage in found.stages:
            order += left[stage.kind][: stage.replicas]
            del left[stage.kind][: stage.replicas]
        yield (*order, *itertools.chain(*left))


def num_assignments(problem: Problem) -> int:
    """Return the number of ways to put stages on groups, devices out of use or not."""
    layers, devices = len(problem.chain), problem.num_devices
    return sum(
        math.comb(layers - 1, stages - 1)
        * sum(
            (-1) ** none * math.comb(stages, none) * (stages + 1 - none) ** devices
            for none in range(stages + 1)
        )
        for stages in range(1, min(layers, devices) + 1)
    )


def all_assignments(problem: Problem) -> Iterator[Assignment]:
    """Yield every assignment, by 1F1B."""
    layers, devices = len(problem.chain), range(problem.num_devices)
    for stages in range(1, min(layers, len(devices)) + 1):
        for places in itertools.product(range(stages + 1), repeat=len(devices)):
            groups = tuple(
                tuple(device for device in devices if places[device] == stage)
                for stage in range(stages)
            )
            for cuts in itertools.combinations(range(1, layers), stages - 1) if all(groups) else ():
                yield Assignment((*cuts, layers), groups)


def _by_limits(arrays: Arrays, order: tuple[int, ...], rules: Rules) -> Iterator[Lined]:
    fastest = on_line(arrays, order, rules)
    yield from fastest
    least = min((one.slowest_s for one in fastest), default=math.inf)
    for limit in _LIMITS if fastest else ():
        yield from on_line(arrays, order, rules, limit_s=limit * least, by_sum=True)


def _rank(outcome: Outcome) -> tuple[float, float]:
    """Return the sort key of an assignment: first whether it fits, then its seconds."""
    return outcome.excess_bytes, outcome.step_s


def _by_depth(outcomes: Iterable[Outcome]) -> list[list[Outcome]]:
    """Return outcomes by their number of groups, each the best first."""
    found: defaultdict[int, list[Outcome]] = defaultdict(list)
    for one in sorted(outcomes, key=_rank):
        found[len(one.assignment.groups)].append(one)
    return [found[depth] for depth in sorted(found)]


def _starts(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the best, and the best of every number of groups that is nearly as good."""
    best = sorted(outcomes, key=_rank)[:_BEST]
    first = [alike[0] for alike in _by_depth(outcomes)]
    near = [
        one
        for one in first
        if one.excess_bytes or one.step_s <= _NEAR * best[0].step_s or not best[0].fits
    ]
    return list(dict.fromkeys([*best, *near]))


def _under(problem: Problem, name: str, known: Sequence[Outcome]) -> list[Outcome]:
    """Return the best of every number of groups with another schedule."""
    made: dict[Assignment, None] = {}
    most = _EACH if num_assignments(problem) > _FEW else None
    for alike in _by_depth(known):
        for one in alike[:most]:
            own = replace(one.assignment, schedule=name)
            for each in _two_stages(problem, own) if name in _TWO_STAGES else (own,):
                made[each] = None
    return simulated(problem, list(made))


def improved(problem: Problem, start: Outcome) -> Outcome:
    """Return the result of the best move, made again and again until none is better."""
    best = start
    while True:
        others = simulated(problem, list(moves(problem, best.assignment)))
        found = min(others, key=_rank, default=best)
        if not _rank(found) < _rank(best):
            return best
        best = found


def _made(
    problem: Problem, name: str, known: Sequence[Outcome], found: Sequence[Outcome]
) -> list[Outcome]:
    """Return the best by a schedule made for the seconds, if it is better than all `found`.

    Making one takes as long as simulating many, so it is made where the bound is least, and cuts
    alone are moved.
    """
    best = min(found, key=_rank, default=None)
    options = [one.assignment for one in sorted(known, key=lambda one: (one.bound_s, _rank(one)))]
    while True:
        others = _better(problem, name, options, best)
        if best is not None and (not others or not _rank(others[0]) < _rank(best)):
            return [best]
        if not others:
            return []
        best = others[0]
        options = list(cut_moves(problem, best.assignment))


def _better(
    problem: Problem, name: str, options: Sequence[Assignment], best: Outcome | None
) -> list[Outcome]:
    """Return the first so many options that are not bound to be slower than `best`, sorted."""
    plain = dict.fromkeys(replace(one, schedule="one_f_one_b") for one in options)
    worth = [
        replace(one.assignment, schedule=name)
        for one in simulated(problem, list(plain))
        if best is None or not best.fits or one.bound_s < best.step_s
    ]
    return sorted(simulated(problem, worth[:_MADE]), key=_rank)


def _two_stages(problem: Problem, assignment: Assignment) -> Iterator[Assignment]:
    """Yield the groups with two stages each, every stage as long as its group is fast."""
    layers, groups = len(problem.chain), assignment.groups
    if layers < 2 * len(groups):
        return
    ranks = find(assignment.schedule)(2 * len(groups), 1).ranks[:, 0]
    speed = np.array([_speed(problem, group) for group in groups])[ranks]
    work = problem.arrays().seconds.mean(axis=0)
    ends: list[int] = []
    for share in np.cumsum(speed / speed.sum()):
        end = int(np.abs(work - share * work[-1]).argmin())
        least, most = len(ends) + 1, layers - len(ranks) + len(ends) + 1
        ends.append(min(max(end, least, ends[-1] + 1 if ends else 0), most))
    yield replace(assignment, ends=(*ends[:-1], layers))


def _speed(problem: Problem, group: Sequence[int]) -> float:
    kinds = [problem.kinds[problem.kind_of[device]] for device in group]
    return len(group) / max(sum(kind.layer_s) or 1.0 for kind in kinds)
