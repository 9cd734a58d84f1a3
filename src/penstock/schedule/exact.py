"""Exact: the shortest step of a zero-bubble schedule under a limit of memory, with its proof.

A mixed-integer program: when each action starts, and for any two actions of a rank that could come
in either order, which does.  Keeping micro-batches in order in each stage loses nothing: in any
schedule the k-th F, I and W of a stage may be called those of micro-batch k.  The limit is then
a precedence as well: F of micro-batch m waits for W of m - limit.

The greedy schedule bounds it from above.  What each action needs before and after it, on its rank
and elsewhere, then leaves few pairs open, and often none: nothing shorter exists.

Source: Zero Bubble, arXiv:2401.10241 (the same problem as an integer program).
"""

from typing import NamedTuple

from penstock.schedule.exact_problem import Problem, solve
from penstock.schedule.greedy import Seconds
from penstock.schedule.improve import step_of
from penstock.schedule.orders import Orders
from penstock.schedule.schedule import Schedule
from penstock.schedule.zb_greedy import best_of_rules

LESS = 1e-6  # steps shorter by less than this fraction are not looked for


class Optimum(NamedTuple):
    """The best schedule found, and a bound that no schedule can beat."""

    schedule: Schedule
    step_s: float
    bound_s: float

    @property
    def is_proved(self) -> bool:
        """Whether nothing is shorter, except perhaps by a millionth."""
        return is_least(self.step_s, self.bound_s)


def is_least(step_s: float, bound_s: float) -> bool:
    """Return whether nothing can be shorter than `step_s`, except perhaps by a millionth."""
    return step_s * (1 - 2 * LESS) <= bound_s


def exact(
    num_stages: int,
    num_micro_batches: int,
    *,
    seconds: Seconds | None = None,
    limit: int | None = None,
    time_limit_s: float = 60.0,
) -> Optimum:
    """Return the shortest schedule with one stage per rank, or the best after `time_limit_s`.

    `seconds` and `limit` are as for `zb_greedy`, which it is never worse than; without time it is
    the best of what rules of thumb find.

    Raises:   ScheduleError: `limit` is less than 1, or a time is negative.
    """
    times, most = seconds or Seconds(), num_stages if limit is None else limit
    found = best_of_rules(num_stages, num_micro_batches, times, most)
    schedule = Schedule(num_stages, num_micro_batches, found.orders, name=exact.__name__)
    problem = Problem(num_stages, num_micro_batches, times, most)
    below_s = found.step_s * (1 - LESS)
    if not problem.tighten(below_s):
        return Optimum(schedule, found.step_s, below_s)
    if time_limit_s <= 0:
        return Optimum(schedule, found.step_s, min(below_s, problem.least_s()))
    found_x, bound_s = solve(problem.model(below_s), time_limit_s)
    if found_x is None:
        return Optimum(schedule, found.step_s, min(below_s, bound_s))
    orders = Orders.of(problem.orders(found_x))
    step_s = step_of(orders, times, (num_stages, num_micro_batches))
    schedule = Schedule(num_stages, num_micro_batches, orders, name=exact.__name__)
    return Optimum(schedule, step_s, min(step_s, bound_s))
