"""Views: who goes on when a generation ends, after which step, and when a step has happened.

A step counts once a word has gone around to which every rank adds only when all its gradients are
whole (`Commit`).  Who has seen the word knows that all have come so far, so all who
are left can make the update by themselves; if none of them has, nobody needs the step: it is done
again from the state before it.  So it happens once, whoever dies when.

Members are numbered, and the first of a generation that is left decides for all.  To go on, those
who are left must be more than half of the members that may be alive - or half with the first of
these - so of two parts of a cut network only one goes on.  Whose line ended by itself is dead for
certain and does not count; who was only silent may be alive.  Who ended after a silent one was last
heard may have gone on with that one before, and counts as it does.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from math import inf
from typing import NamedTuple

from penstock.members.mesh import Fate, LastSeen
from penstock.members.words import Halt, Told


class Left(NamedTuple):
    """What is left of a generation.

    members:  those that go on, in their order.
    done:     steps that have happened; `newest`: the last of them.
    gone:     the others, and how they went.
    """

    members: tuple[int, ...]
    done: int
    gone: Mapping[int, str]
    newest: Told | None


def fates_of(ends: Mapping[int, LastSeen]) -> dict[int, Fate]:
    """Return what is certain of those that were lost, for who may go on without them.

    While all reach each other nobody goes on without this member.  So whose line ended when the
    silent ones still spoke had gone on with none of them; whose line ended later may have.
    """
    quiet = (each.spoke_s for each in ends.values() if each.fate == "silent")
    last_s = min(quiet, default=inf)
    return {m: "silent" if each.ended_s > last_s else each.fate for m, each in ends.items()}


def may_go_on(members: Sequence[int], here: AbstractSet[int], lost: Mapping[int, Fate]) -> bool:
    """Return whether `here`, some members of a generation, may go on without the others."""
    maybe = [m for m in members if lost.get(m) not in ("died", "left")]
    own = [m for m in maybe if m in here]
    twice = 2 * len(own)
    return bool(own) and (twice > len(maybe) or (twice == len(maybe) and maybe[0] in here))


def go_on(members: Sequence[int], left: Left, lost: Mapping[int, Fate]) -> bool:
    """Return whether those that are left of a generation may go on.

    Who has said that it leaves will not go on anywhere, and does not count.
    """
    stay = [member for member in members if left.gone.get(member) != "notice"]
    return may_go_on(stay, {*left.members}, lost)


def left_of(
    generation: int,
    members: Sequence[int],
    lost: Mapping[int, Fate],
    stopped: Mapping[int, Halt],
) -> Left | None:
    """Return what is left of a generation; None while one of those that are there still runs, or
    has not made the update of a step that others have seen happen.

    Of those that want to leave, what they hold counts, but they do not go on - unless all want to:
    then they stay together, to stop the run.  Of two that cannot reach each other the later one
    does not.
    """
    here = [m for m in members if m not in lost]
    told = {m: stopped[m] for m in here if m in stopped and stopped[m].generation == generation}
    if not here or told.keys() != set(here):
        return None
    done, seen = told[here[0]].done, max(each.counted_steps for each in told.values())
    if any(each.done != done or (each.done < seen and not each.fails) for each in told.values()):
        return None  # who is late hears of it, makes its update or cannot, and says so
    gone: dict[int, str] = {m: lost[m] for m in members if m in lost}
    kept: list[int] = []
    for member in here:
        apart = [k for k in kept if member in told[k].lost or k in told[member].lost]
        if apart:
            gone[member] = f"no line to member {apart[0]}"
        elif told[member].leaves:
            gone[member] = "notice"
        else:
            kept.append(member)
    if not kept:
        kept = [member for member in here if gone[member] == "notice"]
        gone = {member: how for member, how in gone.items() if how != "notice"}
    known = (s.newest for s in told.values() if s.newest and s.newest.step < done)
    newest = next(known, None)
    return Left(tuple(kept), done, gone, newest)
