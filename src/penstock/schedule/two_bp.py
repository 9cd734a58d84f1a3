"""2BP: the gradients of the weights wait until a rank has nothing better to do.

`delay_weights` takes a schedule whose backwards of a stage come in the order of micro-batches, cuts
each of them in two, keeps the order of F and I, and puts
every W where its rank would idle, or where it may hold no more activations, or at the end.  What is
put off may be done in batches: the W of several micro-batches of a stage as one action, for which
a runtime concatenates what the products of matrices read (graph/joint.py).

    2BP on 1F1B, S = 3, M = 4, one second per action:
    rank 0  F0 F1 F2 .  .  I0 F3 I1 W0 I2 W1 I3 W2 W3
    rank 1  .  F0 F1 .  I0 F2 I1 F3 I2 W0 I3 W1 W2 W3
    rank 2  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3

Source: 2BP, arXiv:2405.18047.
"""

from dataclasses import replace

import numpy as np

from penstock.errors import ScheduleError
from penstock.schedule.greedy import NO_LIMIT, Rules, Seconds, greedy, script
from penstock.schedule.one_f_one_b import one_f_one_b
from penstock.schedule.orders import B, F, I, Orders, W
from penstock.schedule.schedule import Schedule


def two_bp(
    num_stages: int, num_micro_batches: int, *, limit: int | None = None, batch: int = 1
) -> Schedule:
    """Return 2BP on 1F1B, one stage per rank, with at most `limit` activations on each.

    With `batch` the W of that many micro-batches are one action, at the place of the last of them;
    `batch` - 1 more activations may be held for it.
    Bubble, in seconds, for equal stages, free links, w <= min(f, i) and M >= S, without a limit or
    with S or more: (S - 1) * (f + i - w), that of ZB-H1.  Without a limit every rank holds M.

    Raises:   ScheduleError: `limit` is less than 1F1B needs; `batch` does not divide the
              micro-batches.
    """
    schedule = delay_weights(one_f_one_b(num_stages, num_micro_batches), limit=limit, batch=batch)
    return replace(schedule, name=two_bp.__name__)


def delay_weights(
    schedule: Schedule,
    *,
    limit: int | None = None,
    batch: int = 1,
    seconds: Seconds | None = None,
) -> Schedule:
    """Return `schedule` with every W put off until its rank would idle, or is full.

    Keeps:   on every rank the order of F and I (or B, which becomes I and W), and in every stage
             the order of micro-batches.
    Gains:   gradients are sent before the W, not after it; and the W fill bubbles.  What idles is
             found with `seconds`, by default f = i = w.
    Costs:   activations live until their W.  A rank does W before it holds more than `limit`.
    With `batch` the W of that many consecutive micro-batches of a stage are one action, at the
    place of the last of them; `batch` - 1 more activations may be held for each stage.

    Raises:   ScheduleError: `schedule` lists updates, has W of several micro-batches already, goes
              back through micro-batches out of order, or needs more than `limit`; `batch` is no
              number that divides the micro-batches.
    """
    if schedule.has_updates:
        raise ScheduleError("the schedule lists updates", hint="delay the W of a single step")
    if batch < 1:
        raise ScheduleError(f"batch is {batch}", hint="give 1 micro-batch or more")
    if schedule.together > 1:
        message = f"{schedule.name or 'it'} has backwards of {schedule.together} micro-batches"
        raise ScheduleError(message, hint="delay the W of one with backwards of one")
    if (schedule.orders.kinds == F).all():
        return schedule
    if not _goes_back_in_order(schedule):
        message = f"{schedule.name or 'it'} goes back through the micro-batches out of order"
        raise ScheduleError(message, hint="let the backwards of a stage follow their numbers")
    ranks = schedule.ranks.astype(np.int64)
    limits = np.full(schedule.num_ranks, NO_LIMIT if limit is None else limit)
    rules = Rules(script(schedule.orders, ranks.shape), limits, in_order=True)
    orders = greedy(ranks, seconds or Seconds(), [rules]).orders
    return replace(schedule, orders=_in_batches(orders, batch), together=batch)


def _goes_back_in_order(schedule: Schedule) -> bool:
    """Return whether the backwards of a stage come in the order of micro-batches, on every rank."""
    orders = schedule.orders
    back = (orders.kinds == B) | (orders.kinds == I)
    ranks = np.repeat(np.arange(schedule.num_ranks), np.diff(orders.offsets))[back]
    keys = ranks * schedule.num_stages + orders.stages[back]
    rows = np.argsort(keys, kind="stable")
    is_same = np.diff(keys[rows]) == 0
    return bool((np.diff(orders.micro_batches[back][rows].astype(np.int64))[is_same] > 0).all())


def _in_batches(orders: Orders, batch: int) -> Orders:
    """Return `orders` with one W for each batch, under its first micro-batch, where its last is."""
    if batch == 1:
        return orders
    is_last = (orders.kinds != W) | (orders.micro_batches % batch == batch - 1)
    numbers = np.where(orders.kinds == W, orders.micro_batches - batch + 1, orders.micro_batches)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(is_last)])[orders.offsets]
    return Orders(orders.kinds[is_last], orders.stages[is_last], numbers[is_last], offsets)
