"""Words: what goes over a line comes back as it was, and nothing else is ever taken."""

import os
import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.elastic.words import (
    MOST_UNKNOWN_BYTES,
    Ask,
    Beat,
    Halt,
    Handshake,
    HeldTensor,
    Put,
    Told,
    View,
    Where,
    WireError,
    taken,
    written,
)

WORDS = (
    Beat(3),
    Put(2, "edge 1", "text"),
    Ask(Where("host", 5, "key"), "graph", (1, 2)),
    Halt(
        4, 9, (HeldTensor("weights/a", "float32", (2, 3)),), {}, Told(8, None, 0.1, 4, {"x": 1.0})
    ),
    View(5, 9, "{}", (1, 2), gone={0: "died"}, where={1: Where("a", 1, "k")}, why="why"),
)


@given(st.lists(st.sampled_from(WORDS), max_size=5), st.integers(1, 50))
def test_words_come_back_however_they_are_cut(words, size: int) -> None:
    data, buffer, found = b"".join(map(written, words)), bytearray(), []
    for start in range(0, len(data), size):
        buffer += data[start : start + size]
        found += taken(buffer)
    assert found == words
    assert not buffer


@given(st.binary(max_size=200), st.sampled_from(WORDS), st.integers(0, 300), st.integers(0, 255))
def test_garbage_is_refused_with_one_error(garbage: bytes, word, place: int, value: int) -> None:
    changed = bytearray(written(word))
    changed[place % len(changed)] = value
    for data in (bytearray(garbage), changed, bytearray(struct.pack("<I", 5) + garbage)):
        with suppress(WireError):
            taken(data)


def test_a_message_that_is_too_long_is_refused_before_it_is_there() -> None:
    with pytest.raises(WireError, match="bytes"):
        taken(bytearray(struct.pack("<I", 2**31)))


def talk(caller: Handshake, called: Handshake) -> None:
    """Let both sides say what they have to say."""
    there, back = bytearray(caller.begin()), bytearray()
    for _ in range(6):
        back += called.feed(there)
        there += caller.feed(back)


def test_two_that_know_the_token_find_each_other() -> None:
    caller, called = Handshake(7, b"token", True), Handshake(3, b"token", False)
    talk(caller, called)
    assert (caller.peer, called.peer) == (3, 7)
    assert (caller.is_over, called.is_over) == (True, True)


@pytest.mark.parametrize("tokens", [(b"token", b"other"), (b"", b"token")])
def test_who_does_not_know_the_token_is_not_heard(tokens: tuple[bytes, bytes]) -> None:
    caller, called = Handshake(7, tokens[0], True), Handshake(3, tokens[1], False)
    with pytest.raises(WireError, match="token"):
        talk(caller, called)
    assert (caller.is_over, called.is_over) == (False, False)


def test_what_was_said_once_does_not_prove_anything_later() -> None:
    caller, called = Handshake(7, b"token", True), Handshake(3, b"token", False)
    first = caller.begin()
    reply = called.feed(bytearray(first))
    proof = caller.feed(bytearray(reply))
    again = Handshake(3, b"token", False)
    again.feed(bytearray(first))
    with pytest.raises(WireError, match="token"):
        again.feed(bytearray(proof))


@given(st.binary(min_size=1, max_size=3000), st.booleans())
def test_a_stranger_can_say_what_it_likes(data: bytes, is_caller: bool) -> None:
    side, buffer = Handshake(1, os.urandom(8), is_caller), bytearray()
    try:
        for start in range(0, len(data), 97):
            buffer += data[start : start + 97]
            side.feed(buffer)
    except WireError:
        pass
    assert not side.is_over
    assert len(buffer) <= MOST_UNKNOWN_BYTES + 97
