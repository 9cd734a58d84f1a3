"""Mesh: who is there, who is dead for certain, and who is told that the others went on."""

import socket
import struct
from collections.abc import Callable, Generator
from contextlib import contextmanager

import pytest

from penstock.members.mesh import Mesh, address_towards, anybody_at, listening, where_of
from penstock.members.words import View, Where, WireError

LIMIT_S = 300.0


@contextmanager
def meshes(*numbers: int) -> Generator[tuple[list[Mesh], dict[int, Where]]]:
    """Give meshes that listen, none of which knows another, and where they are."""
    ends = {number: listening() for number in numbers}
    where = {number: where_of(end, "") for number, end in ends.items()}
    them = [Mesh(number, end, b"token", silent_s=LIMIT_S) for number, end in ends.items()]
    for each in them:
        each.start()
    try:
        yield them, where
    finally:
        for each in them:
            each.close()


def closed_place() -> Where:
    with listening() as end:
        return where_of(end, "")


@pytest.mark.parametrize("dead", [0, 9], ids=["it would be called", "it would call"])
def test_one_at_whose_place_nobody_listens_is_dead(dead: int) -> None:
    with meshes(5) as ([own], where):
        own.connect({**where, dead: closed_place()})
        assert own.lost == {dead: "died"}


def test_one_that_listens_and_does_not_come_is_given_up() -> None:
    with meshes(5) as ([own], where), listening() as silent:
        members = {**where, 9: where_of(silent, "")}
        with pytest.raises(WireError, match=r"members \[9\] cannot be reached"):
            own.connect(members, limit_s=0.0)
        own.connect(members, limit_s=0.0, gives_up=True)
        assert own.lost == {9: "silent"}


@pytest.mark.parametrize(("members", "answer"), [((0,), True), ((0, 1), False)])
def test_one_that_was_given_up_learns_whether_the_others_went_on(
    members: tuple[int, ...], answer: bool
) -> None:
    """Those that wait as it does say nothing, and end the line."""
    with meshes(0, 1) as ((first, other), where):
        first.give_up(1)
        first.view = View(2, 4, "", members)
        other.where |= where
        other.seek(0)
        ended: Callable[[], bool] = lambda: other.given_up or not other._gate.strangers  # noqa: E731
        assert other.wait(ended, LIMIT_S)
        assert other.given_up is answer
        assert not other.lost


def test_somebody_is_at_one_of_some_places() -> None:
    closed = closed_place()
    assert not anybody_at([])
    assert not anybody_at([closed, closed])
    with listening() as end:
        assert anybody_at([closed, where_of(end, "")])


def test_address_of_this_host_is_that_of_its_way_to_another() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    if socket.has_ipv6 and any(there[0] == socket.AF_INET6 for there in addresses("::1")):
        with listening(address_towards("::1")) as end:
            assert anybody_at([where_of(end, "")])


def addresses(host: str) -> list[tuple]:
    """Return what a host's name leads to, if this machine can listen there."""
    try:
        listening(host).close()
        return socket.getaddrinfo(host, None)
    except OSError:
        return []


def test_of_two_that_were_silent_for_each_other_neither_is_told_that_the_other_went_on() -> None:
    """Only who has decided on a view says so."""
    with meshes(0, 1) as ((first, other), where):
        for each in (first, other):
            each.where |= where
        other.connect(where)
        assert first.wait(lambda: 1 in first.members, LIMIT_S)
        with first._changed:
            first._lose(1, "silent")
        first._wake()
        assert other.wait(lambda: 0 in other.lost, LIMIT_S)
        assert other.lost == {0: "silent"}
        assert not other.given_up
        assert first.ends[1].spoke_s > 0
        assert other.ends[0].spoke_s == 0, "nobody knows when the other one gave it up"


def reset(mesh: Mesh, member: int) -> None:
    """End a line so that what was said last is lost."""
    with mesh._changed:
        line = mesh._lines.pop(member)
        line.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        mesh._gate.end(line)


def test_a_line_that_is_reset_is_no_sign_of_death_while_somebody_listens_there() -> None:
    """The other one may have given this one up, and its word be lost: both would go on."""
    with meshes(0, 1) as ((first, other), where):
        for each in (first, other):
            each.where |= where
        other.connect(where)
        assert first.wait(lambda: 1 in first.members, LIMIT_S)
        reset(other, 0)
        assert first.wait(lambda: 1 in first.lost, LIMIT_S)
        assert first.lost == {1: "silent"}
        assert first.ends[1].spoke_s == 0


def test_a_line_that_is_reset_where_nobody_listens_any_more_is_that_of_a_dead_one() -> None:
    with meshes(0, 1) as ((first, other), where):
        other.connect(where)
        assert first.wait(lambda: 1 in first.members, LIMIT_S)
        first.where[1] = closed_place()
        reset(other, 0)
        assert first.wait(lambda: 1 in first.lost, LIMIT_S)
        assert first.lost == {1: "died"}
        assert 0 < first.ends[1].spoke_s <= first.ends[1].ended_s


def test_one_that_was_silent_is_dead_once_nobody_listens_at_its_place() -> None:
    with meshes(0) as ([own], where):
        own.where |= {**where, 1: closed_place()}
        own.give_up(1)
        assert own.lost == {1: "silent"}
        own.seek(1)
        assert own.lost == {1: "died"}


def test_of_two_views_of_one_number_the_first_counts_and_the_other_ones_author_is_told() -> None:
    """Two that cannot reach each other may both decide, where a third reaches both."""
    with meshes(0, 1, 2) as ((first, second, third), where):
        for each in (first, second, third):
            each.where |= where
        third.connect(where)
        ready: Callable[[], bool] = lambda: 2 in second.members and 2 in first.members  # noqa: E731
        assert second.wait(ready, LIMIT_S) or ready()
        kept = View(2, 4, "", (0, 2))
        first.tell(kept)
        assert third.wait(lambda: third.view is not None, LIMIT_S)
        second.tell(View(2, 4, "", (1, 2)))
        assert second.wait(lambda: second.given_up, LIMIT_S)
        assert third.view == kept
        assert not first.given_up
