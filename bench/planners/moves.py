"""Moves: the assignments that differ from one in a single respect."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from bench.planners.problem import Assignment, Groups, Problem


def moves(problem: Problem, assignment: Assignment) -> Iterator[Assignment]:
    """Yield every assignment one move away, the schedule as it is.

    A cut a layer or two further; a device to another group, out of use or into it; two devices, or
    two groups, exchanged; where every group has one stage, also two neighbours joined, and a stage
    cut in two.
    """
    yield from cut_moves(problem, assignment)
    for groups in _other_groups(problem, assignment.groups):
        yield replace(assignment, groups=groups)
    if len(assignment.ends) == len(assignment.groups):
        yield from _joined(assignment)
        yield from _divided(problem, assignment)


def cut_moves(problem: Problem, assignment: Assignment) -> Iterator[Assignment]:
    """Yield every assignment with a cut, or two neighbours of them, a layer or two further."""
    for ends in _other_cuts(assignment.ends):
        yield replace(assignment, ends=ends)


def _other_cuts(ends: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    bounds = (0, *ends)
    for first in range(1, len(ends)):
        for end in (first + 1, first + 2):
            for by in (-2, -1, 1, 2):
                moved = bounds[first:end]
                if end > len(ends) or not (
                    bounds[first - 1] < moved[0] + by and moved[-1] + by < bounds[end]
                ):
                    continue
                yield (*bounds[1:first], *(cut + by for cut in moved), *bounds[end:])


def _other_groups(problem: Problem, groups: Groups) -> Iterator[Groups]:
    used = {device for group in groups for device in group}
    idle = [device for device in range(problem.num_devices) if device not in used]
    for at, group in enumerate(groups):
        for device in idle:
            yield _with(groups, {at: (*group, device)})
        for place, device in enumerate(group):
            left = group[:place] + group[place + 1 :]
            for other in idle:
                yield _with(groups, {at: (*left, other)})
            if left:
                yield _with(groups, {at: left})
                for to in range(len(groups)):
                    if to != at:
                        yield _with(groups, {at: left, to: (*groups[to], device)})
    for a, b in itertools.combinations(range(len(groups)), 2):
        yield _with(groups, {a: groups[b], b: groups[a]})
        for i, j in itertools.product(range(len(groups[a])), range(len(groups[b]))):
            first = (*groups[a][:i], groups[b][j], *groups[a][i + 1 :])
            second = (*groups[b][:j], groups[a][i], *groups[b][j + 1 :])
            yield _with(groups, {a: first, b: second})


def _with(groups: Groups, others: dict[int, tuple[int, ...]]) -> Groups:
    return tuple(others.get(at, group) for at, group in enumerate(groups))


def _joined(assignment: Assignment) -> Iterator[Assignment]:
    ends, groups = assignment.ends, assignment.groups
    for at in range(len(groups) - 1):
        for group in (groups[at] + groups[at + 1], groups[at], groups[at + 1]):
            joined = (*groups[:at], group, *groups[at + 2 :])
            yield replace(assignment, ends=ends[:at] + ends[at + 1 :], groups=joined)


def _divided(problem: Problem, assignment: Assignment) -> Iterator[Assignment]:
    ends, groups = assignment.ends, assignment.groups
    used = {device for group in groups for device in group}
    idle = [(device,) for device in range(problem.num_devices) if device not in used]
    firsts = (0, *ends[:-1])
    for at, group in enumerate(groups):
        parts = [(group[:k], group[k:]) for k in range(1, len(group))]
        parts += [(b, a) for a, b in parts]
        parts += [pair for one in idle for pair in ((group, one), (one, group))]
        for cut in range(firsts[at] + 1, ends[at]):
            new_ends = (*ends[:at], cut, *ends[at:])
            for first, second in parts:
                divided = (*groups[:at], first, second, *groups[at + 1 :])
                yield replace(assignment, ends=new_ends, groups=divided)
