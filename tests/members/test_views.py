"""Views: who goes on, and when a step has happened."""

from itertools import combinations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from penstock.members.mesh import Fate, LastSeen
from penstock.members.views import fates_of, go_on, left_of, may_go_on
from penstock.members.words import Failed, Halt, Told


def halt(done: int, *, lost: tuple[int, ...] = (), leaves: bool = False, at: int = 3) -> Halt:
    newest = Told(done - 1, 0.5, 1.0, 4, {})
    return Halt(at, done, (), {}, newest, lost, leaves)


@given(st.permutations(range(6)), st.data())
def test_of_two_parts_that_do_not_see_each_other_at_most_one_goes_on(members, data) -> None:
    dead = data.draw(st.sets(st.sampled_from(members), max_size=5))
    alive = [m for m in members if m not in dead]
    here = data.draw(st.sets(st.sampled_from(alive)))
    there = {*alive} - here
    fates: dict[int, Fate] = dict.fromkeys(dead, "died")
    own = may_go_on(members, here, {**fates, **dict.fromkeys(there, "silent")})
    other = may_go_on(members, there, {**fates, **dict.fromkeys(here, "silent")})
    assert not (own and other)
    assert own or other or not alive or 2 * max(len(here), len(there)) <= len(alive)
    if not there:
        assert own == bool(alive)


def test_half_goes_on_if_the_first_that_may_be_alive_is_there() -> None:
    for here in combinations(range(4), 2):
        lost: dict[int, Fate] = {m: "silent" for m in range(4) if m not in here}
        assert may_go_on(range(4), {*here}, lost) == (0 in here)
    assert may_go_on((0, 1), {1}, {0: "died"})
    assert not may_go_on((0, 1), {1}, {0: "silent"})


def test_who_ended_after_a_silent_one_spoke_last_may_have_gone_on_with_it() -> None:
    silent = LastSeen("silent", 10.0, 14.0)
    ends = {1: silent, 2: LastSeen("died", 9.0, 9.5), 3: LastSeen("died", 11.0, 11.0)}
    assert fates_of(ends) == {1: "silent", 2: "died", 3: "silent"}
    ends[4] = LastSeen("left", 12.0, 12.5)
    assert fates_of(ends)[4] == "silent"
    assert fates_of({m: each for m, each in ends.items() if m != 1})[3] == "died"
    gave_up = {1: LastSeen("silent", 0.0, 8.0), 2: LastSeen("died", 7.0, 7.0)}
    assert fates_of(gave_up) == {1: "silent", 2: "silent"}
    assert not may_go_on((0, 1, 2), {0}, fates_of(gave_up))


def test_nothing_is_decided_before_all_have_made_the_update_that_anyone_has_seen_count() -> None:
    assert left_of(3, (4, 5, 6), {6: "died"}, {4: halt(7), 5: halt(8)}) is None
    found = left_of(3, (4, 5, 6), {6: "died"}, {4: halt(8), 5: halt(8)})
    assert found is not None
    assert (found.members, found.done, found.gone) == ((4, 5), 8, {6: "died"})
    assert found.newest is not None
    assert found.newest.step == 7


def test_nothing_is_decided_while_one_still_runs() -> None:
    assert left_of(3, (4, 5, 6), {6: "died"}, {4: halt(7)}) is None
    assert left_of(3, (4, 5), {}, {4: halt(7), 5: halt(7, at=2)}) is None


def test_who_had_notice_gives_what_it_holds_and_goes() -> None:
    found = left_of(3, (4, 5), {}, {4: halt(7, leaves=True), 5: halt(7)})
    assert found is not None
    assert (found.members, found.gone) == ((5,), {4: "notice"})


@given(st.permutations(range(5)), st.data())
def test_the_others_go_on_whoever_leaves_in_peace(members, data) -> None:
    goes = data.draw(st.sets(st.sampled_from(members), min_size=1, max_size=4))
    left = left_of(3, members, {}, {m: halt(7, leaves=m in goes) for m in members})
    assert left is not None
    assert {*left.members} == {*members} - goes
    assert go_on(members, left, {})


def test_one_that_leaves_takes_no_part_in_who_goes_on() -> None:
    """Of two that stay one is silent: the first of these two goes on, not the other."""
    told = {4: halt(7, leaves=True), 5: halt(7)}
    left = left_of(3, (4, 5, 6), {6: "silent"}, told)
    assert left is not None
    assert go_on((4, 5, 6), left, {6: "silent"})
    told = {4: halt(7, leaves=True), 6: halt(7)}
    left = left_of(3, (4, 5, 6), {5: "silent"}, told)
    assert left is not None
    assert not go_on((4, 5, 6), left, {5: "silent"})


def test_of_two_without_a_line_the_later_one_goes() -> None:
    told = {4: halt(7), 5: halt(7, lost=(6,)), 6: halt(7)}
    found = left_of(3, (4, 5, 6), {}, told)
    assert found is not None
    assert found.members == (4, 5)
    assert found.gone == {6: "no line to member 5"}


def test_who_cannot_make_an_update_that_counts_is_waited_for_by_nobody_but_waits_for_others() -> (
    None
):
    fails = Failed("KeyError: row 9", "")
    spoiled = msgspec.structs.replace(halt(7), newest=halt(8).newest, fails=fails)
    assert spoiled.counted_steps == 8
    assert halt(7).counted_steps == 7
    assert left_of(3, (4, 5), {}, {4: spoiled, 5: halt(7)}) is None
    assert left_of(3, (4, 5), {}, {4: spoiled, 5: halt(8)}) is None
    found = left_of(3, (4, 5), {}, {4: spoiled, 5: spoiled})
    assert found is not None
    assert found.done == 7
    assert found.newest is None
    found = left_of(3, (4, 5), {}, {4: msgspec.structs.replace(spoiled, done=8), 5: halt(8)})
    assert found is not None
    assert found.done == 8
