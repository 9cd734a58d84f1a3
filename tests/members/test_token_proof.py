"""Proof: only who knows the token is heard, and only what it has said, once and in its order."""

import json
import os
import struct
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.members.token_proof import GREETING, HEAD_BYTES, MOST_UNKNOWN_BYTES, Handshake, Seal
from penstock.members.words import WireError

KEY = b"key"
messages = st.lists(st.binary(max_size=40), min_size=1, max_size=5)


@given(st.lists(st.binary(max_size=40) | st.just(bytes(5000)), max_size=5), st.integers(1, 50))
def test_messages_come_back_however_they_are_cut(said: list[bytes], size: int) -> None:
    sends, hears, buffer, heard = Seal(KEY), Seal(KEY), bytearray(), list[bytes]()
    data = b"".join(map(sends.sealed, said))
    for start in range(0, len(data), size):
        buffer += data[start : start + size]
        heard += hears.opened(buffer)
    assert heard == said
    assert not buffer


@given(messages, st.data())
def test_a_message_that_was_changed_is_not_taken(said: list[bytes], data: st.DataObject) -> None:
    sends = Seal(KEY)
    frames = [sends.sealed(message) for message in said]
    at = data.draw(st.integers(0, len(frames) - 1))
    frame = bytearray(frames[at])
    place = data.draw(st.integers(0, len(frame) - 1))
    frame[place] ^= data.draw(st.integers(1, 255))
    heard = list[bytes]()
    with pytest.raises(WireError, match="sealed"):
        heard.extend(
            Seal(KEY).opened(bytearray(b"".join([*frames[:at], frame, *frames[at + 1 :]])))
        )


@given(st.lists(st.integers(0, 3), max_size=6))
def test_messages_are_taken_once_and_in_their_order(order: list[int]) -> None:
    sends, hears, heard = Seal(KEY), Seal(KEY), list[bytes]()
    frames = [sends.sealed(bytes([number])) for number in range(4)]
    buffer = bytearray(b"".join(frames[at] for at in order))
    try:
        for message in hears.opened(buffer):
            heard.append(message)
    except WireError:
        assert order != [*range(len(order))]
    else:
        assert order == [*range(len(order))]
    assert heard == [bytes([number]) for number in range(len(heard))]


def test_a_message_that_is_too_long_is_refused_before_it_is_there() -> None:
    with pytest.raises(WireError, match="bytes"):
        list(Seal(KEY).opened(bytearray(struct.pack("<I", 2**31).ljust(HEAD_BYTES))))


def talk(caller: Handshake, called: Handshake) -> None:
    """Let both sides say what they have to say."""
    there, back = bytearray(caller.begin()), bytearray()
    for _ in range(6):
        back += called.feed(there)
        there += caller.feed(back)


def pair() -> tuple[Handshake, Handshake]:
    return Handshake(7, b"token", is_caller=True), Handshake(3, b"token", is_caller=False)


def test_two_that_know_the_token_find_each_other() -> None:
    caller, called = pair()
    talk(caller, called)
    assert (caller.peer, called.peer) == (3, 7)
    assert (caller.is_over, called.is_over) == (True, True)


def test_each_direction_of_each_line_has_a_key_of_its_own() -> None:
    sides = [*pair(), *pair()]
    talk(*sides[:2])
    talk(*sides[2:])
    caller, called = sides[:2]
    assert caller.sends.key == called.hears.key
    assert caller.hears.key == called.sends.key
    assert len({seal.key for side in sides for seal in (side.sends, side.hears)}) == 4


@pytest.mark.parametrize("tokens", [(b"token", b"other"), (b"", b"token")])
def test_who_does_not_know_the_token_is_not_heard(tokens: tuple[bytes, bytes]) -> None:
    caller = Handshake(7, tokens[0], is_caller=True)
    called = Handshake(3, tokens[1], is_caller=False)
    with pytest.raises(WireError, match="token"):
        talk(caller, called)
    assert (caller.is_over, called.is_over) == (False, False)


def test_what_was_said_once_does_not_prove_anything_later() -> None:
    caller, called = pair()
    first = caller.begin()
    reply = called.feed(bytearray(first))
    proof = caller.feed(bytearray(reply))
    again = Handshake(3, b"token", is_caller=False)
    again.feed(bytearray(first))
    with pytest.raises(WireError, match="token"):
        again.feed(bytearray(proof))


@pytest.mark.parametrize("second", [b'[1, "a"]\n', GREETING, b"[1,2]\n", b"[]\n"])
def test_a_stranger_is_answered_once(second: bytes) -> None:
    _, called = pair()
    assert called.feed(bytearray(GREETING + b'[1, "a"]\n'))
    with pytest.raises(WireError):
        called.feed(bytearray(second))


@pytest.mark.parametrize(
    "line",
    [b"[1,2]", b'[1, "a", "b"]', b'["1", "a"]', b'[-1, "a"]', b'[1.0, "a"]', b"{}", b"[" * 900],
)
def test_a_line_that_no_member_says_is_not_answered(line: bytes) -> None:
    _, called = pair()
    with pytest.raises(WireError):
        called.feed(bytearray(GREETING + line + b"\n"))


@pytest.mark.parametrize("proof", ["\ud800", "\u00e9", "0" * 64, ""])
def test_any_text_for_a_proof_is_no_proof(proof: str) -> None:
    _, called = pair()
    called.feed(bytearray(GREETING + b'[1, "a"]\n'))
    with pytest.raises(WireError):
        called.feed(bytearray(json.dumps([proof]).encode() + b"\n"))


@given(st.integers(1, 400))
def test_a_stranger_has_so_many_bytes_for_all_its_lines(size: int) -> None:
    _, called = pair()
    words = GREETING + json.dumps([1, "a" * size]).encode() + b"\n"
    rest = MOST_UNKNOWN_BYTES - len(words)
    called.feed(bytearray(words))
    called.feed(bytearray(b"." * rest))
    with pytest.raises(WireError, match="token"):
        called.feed(bytearray(b"." * (rest + 1)))


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


def test_a_proof_takes_no_lock_of_the_whole_process() -> None:
    """OpenSSL's, in which a fork as a thread ends may leave every new thread of the child."""
    called = set[str]()

    def note(frame: object, event: str, what: object) -> None:
        if event == "c_call" and getattr(what, "__module__", None) == "_hashlib":
            called.add(getattr(what, "__name__", ""))

    sys.setprofile(note)
    try:
        one, other = Handshake(0, b"token", is_caller=True), Handshake(1, b"token", is_caller=False)
        answer = other.feed(bytearray(one.begin()))
        other.feed(bytearray(one.feed(bytearray(answer))))
        heard = list(other.hears.opened(bytearray(one.sends.sealed(b"word"))))
    finally:
        sys.setprofile(None)
    assert heard == [b"word"]
    assert called <= {"compare_digest"}
