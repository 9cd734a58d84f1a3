"""Exact with offload: what is held at every moment, the shortest there is, and the bound."""

import itertools
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule import Seconds
from penstock.schedule.exact import exact
from penstock.schedule.exact_offload import Copies, exact_offload
from tests.draws import examples
from tests.schedule.brute_offload import Case, shortest

tiny = st.sampled_from(((1, 3), (2, 2), (2, 3), (2, 3)))
computes, moves, slow = st.integers(1, 5), st.integers(1, 3), st.integers(1, 9)
sizes = st.tuples(st.integers(1, 3), st.integers(1, 5))
quarters = st.integers(0, 24).map(lambda each: each / 4)


def rows(draw, num_stages, *kinds):
    return tuple(tuple(draw(kind) for _ in range(num_stages)) for kind in kinds)


def replay(found, times, limit):
    """Check the result against its definition, from nothing but the times it tells."""
    seconds, copies = times
    f, i, w, out, back = [*seconds.table(found.schedule.num_stages, split=True), *copies]
    begins, ends, took = {}, {}, dict(zip("FIW", (f, i, w), strict=True))
    for order, starts_s in zip(found.schedule.orders, found.starts_s, strict=True):
        for action, start_s in zip(order, starts_s, strict=True):
            begins[action] = start_s
            ends[action] = start_s + took[action.kind][action.stage]
        for one, then in itertools.pairwise(order):
            assert ends[one] <= begins[then]
    for action in begins:
        kind, stage, m = action
        before = [("I", stage, m)] if kind == "W" else []
        before += [("F", stage, m)] if kind == "I" else []
        assert all(ends[each] <= begins[action] for each in before)
        other = (kind, stage - 1 if kind == "F" else stage + 1, m)
        if kind != "W" and other in ends:
            assert ends[other] + seconds.message_s <= begins[action]
    assert found.step_s == max(ends.values())
    for stage in range(found.schedule.num_stages):
        mine = [copy for copy in found.copies if copy.stage == stage]
        for copy in mine:
            m = copy.micro_batch
            assert copy.offloaded_s == copy.offload_s + out[stage]
            assert copy.reloaded_s == copy.reload_s + back[stage]
            assert ends["F", stage, m] <= copy.offload_s
            assert copy.offloaded_s <= copy.reload_s
            assert copy.reloaded_s <= begins["I", stage, m]
        for lane in (lambda c: (c.offload_s, c.offloaded_s), lambda c: (c.reload_s, c.reloaded_s)):
            spans = sorted(map(lane, mine))
            assert all(one[1] <= then[0] for one, then in itertools.pairwise(spans))
        held = {m: [(begins["F", stage, m], ends["W", stage, m])] for s, m in pairs(ends, stage)}
        for c in mine:
            ((from_s, to_s),) = held[c.micro_batch]
            held[c.micro_batch] = [(from_s, c.offloaded_s), (c.reload_s, to_s)]
        spans = [span for each in held.values() for span in each]
        for now_s, _ in spans:
            assert sum(from_s <= now_s < to_s for from_s, to_s in spans) <= limit


def pairs(ends, stage):
    return [each[1:] for each in ends if each[:2] == ("F", stage)]


@given(tiny, st.data(), st.integers(1, 2))
@examples(6)
def test_step_is_the_shortest_there_is_and_is_proved(size, data, limit):
    times = rows(data.draw, size[0], computes, computes, computes, moves, moves)
    seconds = Seconds(*times[:3])
    without = exact(*size, seconds=seconds, limit=limit)
    found = exact_offload(*size, Copies(*times[3:]), seconds=seconds, limit=limit)
    assert found.is_proved
    assert found.bound_s <= found.step_s
    assert found.step_s == shortest(Case(*size, times, limit), int(without.step_s))


@given(tiny, st.data(), st.integers(1, 2), st.integers(0, 2))
@examples(5)
def test_solver_alone_finds_what_moving_actions_about_finds(size, data, limit, message_s):
    times = rows(data.draw, size[0], *[st.integers(2, 9)] * 3, slow, slow)
    seconds, copies = Seconds(*times[:3], message_s), Copies(*times[3:])
    found = exact_offload(*size, copies, seconds=seconds, limit=limit)
    with pytest.MonkeyPatch.context() as patch:
        module = sys.modules[exact_offload.__module__]
        patch.setattr(module, "anneal", lambda order, away, *_: (order, away, 0.0))
        alone = exact_offload(*size, copies, seconds=seconds, limit=limit)
    replay(alone, (seconds, times[3:]), limit)
    assert alone.is_proved
    assert alone.step_s == pytest.approx(found.step_s)


@given(sizes, st.data(), st.integers(1, 4), quarters)
@examples(10)
def test_no_rank_holds_more_than_the_limit_nor_makes_two_copies_at_once(size, data, limit, lag_s):
    times = rows(data.draw, size[0], *[st.integers(1, 9)] * 3, quarters, quarters)
    seconds, copies = Seconds(*times[:3], lag_s), Copies(*times[3:])
    found = exact_offload(*size, copies, seconds=seconds, limit=limit, time_limit_s=3)
    replay(found, (seconds, times[3:]), limit)
    least = exact(*size, seconds=seconds, limit=size[1])
    most = exact(*size, seconds=seconds, limit=limit)
    assert least.bound_s <= found.step_s <= most.step_s
    if found.copies:
        assert found.step_s < most.step_s  # else nobody would copy


@given(sizes, st.data(), st.integers(1, 3), st.integers(1, 6))
@examples(5)
def test_more_room_or_faster_copies_are_never_worse(size, data, limit, copy_s):
    seconds = Seconds(*rows(data.draw, size[0], *[st.integers(2, 9)] * 3))
    found = exact_offload(*size, Copies(copy_s, copy_s), seconds=seconds, limit=limit)
    better = (
        exact_offload(*size, Copies(copy_s / 2, copy_s), seconds=seconds, limit=limit),
        exact_offload(*size, Copies(copy_s, copy_s / 2), seconds=seconds, limit=limit),
        exact_offload(*size, Copies(copy_s, copy_s), seconds=seconds, limit=limit + 1),
    )
    assert all(each.bound_s <= found.step_s for each in better)
    assert all(each.step_s <= found.step_s for each in better if each.is_proved)


def test_four_stages_with_six_micro_batches_are_proved():
    seconds = Seconds(10, 11, 8, 1)
    found = exact_offload(4, 6, Copies(10, 10), seconds=seconds, limit=3)
    replay(found, (seconds, ([10] * 4, [10] * 4)), 3)
    assert (found.step_s, found.is_proved) == (227.0, True)
    assert exact(4, 6, seconds=seconds, limit=3).step_s > 227 > exact(4, 6, seconds=seconds).step_s


def test_copies_that_take_no_time_need_no_more_than_one_activation():
    found = exact_offload(2, 4, Copies(0, 0), seconds=Seconds(3, 4, 5), limit=1)
    replay(found, (Seconds(3, 4, 5), ([0, 0], [0, 0])), 1)
    assert found.is_proved
    assert found.step_s < exact(2, 4, seconds=Seconds(3, 4, 5), limit=1).step_s


def test_nothing_is_offloaded_where_all_fits():
    found = exact_offload(3, 4, Copies(1, 1), limit=4)
    assert found.copies == ()
    assert found.step_s == exact(3, 4, limit=4).step_s


def test_picture_in_the_docstring_is_what_comes_out():
    seconds = Seconds(2, 1, 1)
    found = exact_offload(2, 3, Copies(1, 1), seconds=seconds, limit=1)
    assert (found.step_s, found.is_proved) == (18.0, True)
    assert exact(2, 3, seconds=seconds, limit=1).step_s == 21.0
    lines = []
    for rank, order in enumerate(found.schedule.orders):
        cells, copied = [["."] * 18, [""] * 18]
        for action, start_s in zip(order, found.starts_s[rank], strict=True):
            for second in range(2 if action.kind == "F" else 1):
                cells[int(start_s) + second] = f"{action.kind}{action.micro_batch}"
        for copy in found.copies:
            if copy.stage == rank:
                copied[int(copy.offload_s)] += f">{copy.micro_batch}"
                copied[int(copy.reload_s)] += f"<{copy.micro_batch}"
        for name, row in ((f"rank {rank}", cells), ("", copied)):
            line = f"    {name:6}  {' '.join(each.ljust(2) for each in row)}".rstrip(" .")
            lines += [line] if line else []
    assert "\n".join(lines) in sys.modules[exact_offload.__module__].__doc__


def test_it_prints_as_orders_and_copies():
    found = exact_offload(1, 2, Copies(1, 2), limit=1)
    assert str(found) == "step 6 s, no step is shorter\nrank 0  F0.0 I0.0 W0.0 F0.1 I0.1 W0.1"
    found = exact_offload(2, 4, Copies(5, 5), seconds=Seconds(10, 11, 8, 1), limit=1)
    step, *_, copy = str(found).splitlines()
    assert step == "step 156 s, no step is shorter"
    pattern = r"stage 0 micro-batch \d  to the host \d+ to \d+ s  back \d+ to \d+ s"
    assert re.fullmatch(pattern, copy)


def test_without_time_a_schedule_comes_back_with_a_bound():
    seconds, copies = Seconds(12, 8, 12, 1), Copies(30, 30)
    found = exact_offload(5, 6, copies, seconds=seconds, limit=3, time_limit_s=0.0)
    replay(found, (seconds, ([30] * 5, [30] * 5)), 3)
    assert found.bound_s < found.step_s
    assert not found.is_proved
    assert "no step is below" in str(found)


def test_what_cannot_be_is_refused():
    with pytest.raises(ScheduleError, match="offload_s is -1, for 2 stages"):
        exact_offload(2, 2, Copies(-1, 1))
    with pytest.raises(ScheduleError, match=r"reload_s is \(1, 2, 3\), for 2 stages"):
        exact_offload(2, 2, Copies(1, (1, 2, 3)))
    with pytest.raises(ScheduleError, match="may hold 0 activations"):
        exact_offload(2, 2, Copies(1, 1), limit=0)
