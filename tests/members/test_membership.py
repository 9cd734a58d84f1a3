"""Membership: in every order of deaths, cuts, mends and joins one generation goes on, or none."""

from collections.abc import Mapping, Sequence

import pytest

from penstock.members.mesh import Fate, LastSeen
from penstock.members.views import Left, left_of
from penstock.members.words import Halt
from tests.members.membership import Limits, Model, Rules, ViolationError, planted, search

SMALL = {
    "a death": Limits(deaths=1, cuts=0, mends=0),
    "two deaths": Limits(deaths=2, cuts=0, mends=0),
    "a cut": Limits(deaths=0, cuts=1, mends=0, steps=1),
    "a newcomer": Limits(ranks=2, deaths=1, cuts=0, mends=0, joins=True),
    "two ranks, a death and a cut": Limits(ranks=2, deaths=1, cuts=1, mends=1),
    "a death and a cut": Limits(deaths=1, cuts=1, mends=0, steps=1),
}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.sampled(2)
def test_in_every_order_of_events_one_generation_goes_on(name: str) -> None:
    found = search(Model(limits=SMALL[name]))
    assert found.states > 100
    assert any("over" in end for end in found.ends)


@pytest.mark.long
@pytest.mark.parametrize(
    "limits",
    [
        Limits(deaths=0, cuts=1, mends=1, steps=1),
        Limits(deaths=1, cuts=1, mends=1, steps=1),
        Limits(deaths=2, cuts=1, mends=0, steps=1),
    ],
)
def test_so_does_it_in_more_orders(limits: Limits) -> None:
    search(Model(limits=limits))


def anyone(members: Sequence[int], left: Left, lost: Mapping[int, Fate]) -> bool:
    return True


def half(members: Sequence[int], left: Left, lost: Mapping[int, Fate]) -> bool:
    maybe = [m for m in members if lost.get(m) not in ("died", "left")]
    return 2 * len(left.members) >= len(maybe)


def own_step(
    generation: int, members: Sequence[int], lost: Mapping[int, Fate], stopped: Mapping[int, Halt]
) -> Left | None:
    """Take what the first one has done for what all have."""
    here = [m for m in members if m not in lost and m in stopped]
    done = stopped[here[0]].done if here else 0
    told = {m: Halt(h.generation, done, (), {}, None, h.lost) for m, h in stopped.items()}
    return left_of(generation, members, lost, told)


def as_seen(ends: Mapping[int, LastSeen]) -> dict[int, Fate]:
    return {member: each.fate for member, each in ends.items()}


CUT_IN_TWO = Limits(ranks=2, deaths=0, cuts=1, mends=1, steps=1)
FAULTS: dict[str, tuple[Rules, Limits, str]] = {
    "whoever is left goes on": (planted(go_on=anyone), CUT_IN_TWO, "two generations|again"),
    "of two halves both go on": (planted(go_on=half), CUT_IN_TWO, "two generations|again"),
    "a line that is cut is a death": (planted(cut_is_death=True), CUT_IN_TWO, "two gen|again"),
    "the end is not looked at": (planted(looks_at_end=False), CUT_IN_TWO, "after the end"),
    "a step that only some have seen is forgotten": (
        planted(left_of=own_step),
        Limits(deaths=1, cuts=0, mends=0),
        "has done",
    ),
    "of two views of one number both are taken": (
        planted(keeps_to_first=False),
        Limits(deaths=0, cuts=1, mends=0, steps=1),
        "two generations",
    ),
    "who ends after a silence is dead for certain": (
        planted(fates_of=as_seen),
        Limits(deaths=1, cuts=1, mends=0, steps=1),
        "two generations",
    ),
    "who is ahead of a view goes on with it": (
        planted(resigns_ahead=False),
        Limits(deaths=0, cuts=1, mends=0),
        "has done 1 steps",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.sampled(2)
def test_a_fault_that_is_planted_is_found(name: str) -> None:
    rules, limits, words = FAULTS[name]
    with pytest.raises(ViolationError, match=words):
        search(Model(rules, limits))
