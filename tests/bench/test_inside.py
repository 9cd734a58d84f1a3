"""Seconds inside a step belong to the action that took them, and every action has some."""

import time
from functools import partial

import pytest
from torch import distributed as dist

from bench.inside import Inside, bound_s
from bench.measure import in_ranks
from bench.ours import rank_of
from bench.peer import Stepper, schedule_of
from bench.pipeline import cases, join
from penstock.program.lower import lower
from penstock.schedule import gpipe, one_f_one_b
from penstock.schedule.schedule import Action
from tests.bench.test_models import MINI


def test_bound_is_the_computes_and_the_bubble():
    for make in (gpipe, one_f_one_b):
        schedule = make(2, 5)
        seconds = {a: {"F": 1.0, "B": 2.0}[a.kind] for order in schedule.orders for a in order}
        assert bound_s(lower(schedule), seconds) == 5 * 3 + 3


def test_seconds_count_for_the_action_under_way_until_they_are_taken(monkeypatch):
    inside, clock = Inside(), iter([1.0, 3.0, 10.0, 11.0, 20.0, 24.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    one, other = Action("F", 0, 0), Action("B", 0, 0)
    work = inside.timed(lambda: "done")
    assert inside.during(one, work)() == "done"
    work()
    inside.during(other, work)()
    assert inside.take([one, other]) == [3.0, 4.0]
    assert inside.take([one, other]) == [0.0, 0.0]


def computed_by_both(case, rank, folder):
    """Return for ours and the peer the actions of this rank, and which of them took no time."""
    end = join(rank, folder, gloo=True)
    (peer, *_), inside = case.peers, Inside()
    stepper = Stepper(peer, case.size, case.num_micro_batches, rank)
    _, window = rank_of(case.ours, end, inside=inside)
    theirs = schedule_of(peer, stepper.schedule, case.num_micro_batches).orders[rank]
    found = []
    for step, clock, order in (
        (window, inside, case.ours.orders()[rank]),
        (stepper.step, stepper.inside, list(theirs)),
    ):
        step()
        clock.take(order)
        step()
        silent = [action for action, s in zip(order, clock.take(order), strict=True) if s == 0.0]
        found.append([len(order), [str(action) for action in silent], len(clock.seconds)])
    end.barrier()
    dist.destroy_process_group()
    end.close()
    return found


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["one_f_one_b", "zb_h1"])
def test_every_action_of_ours_and_of_the_peer_has_seconds(schedule):
    (case,) = cases([MINI], [schedule], [4])
    for found in in_ranks(partial(computed_by_both, case)):
        for count, silent, more in found:
            assert count >= 8
            assert all(text.startswith("I0.") for text in silent)  # tokens have no gradient
            assert more == 0
