"""Gate: strangers cost a member nothing, and keep nobody out."""

import errno
import select
import selectors
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.members.gate import MOST_PER_BEAT, MOST_STRANGERS, Gate
from penstock.members.mesh import listening, where_of
from penstock.members.token_proof import GREETING, Handshake
from penstock.members.words import (
    Ask,
    Done,
    Failed,
    GivenUp,
    Welcome,
    Where,
    WireError,
    written,
)
from tests.members.test_mesh import LIMIT_S, meshes
from tests.members.test_words import WORDS

WELCOME = Welcome({}, "graph", "about")


def connected(where: Where) -> socket.socket:
    return socket.create_connection(where[:2], timeout=LIMIT_S)


def said_until_the_end(end: socket.socket) -> bytes:
    """Return what comes before the other end closes the line."""
    heard = b""
    with suppress(ConnectionResetError):
        while data := end.recv(4096):
            heard += data
    return heard


@pytest.mark.parametrize("line", [b"[1,2]\n", b'[1,"a"]\n'])
def test_a_stranger_that_never_stops_is_answered_once_at_most(line: bytes) -> None:
    with meshes(0) as (_, where), connected(where[0]) as end:
        with suppress(ConnectionResetError, BrokenPipeError):
            end.sendall(GREETING + line * 1000)
        assert said_until_the_end(end).count(b"\n") <= 1


@pytest.mark.parametrize("says", [b"", GREETING, GREETING + b'[1,"a"]\n'])
def test_a_stranger_that_says_nothing_more_has_to_go(says: bytes) -> None:
    with meshes(0) as (_, where), connected(where[0]) as end:
        end.sendall(says)
        said_until_the_end(end)


def test_a_newcomer_gets_in_though_strangers_hold_all_places() -> None:
    with meshes(0, 9) as ((own, caller), where), ExitStack() as held:
        own.greets = lambda: WELCOME
        ends = [held.enter_context(connected(where[0])) for _ in range(MOST_STRANGERS)]
        assert caller.call(where[0], Ask(where[9], "graph", ())) == WELCOME
        assert len(ends) == MOST_STRANGERS


def accepting(held: ExitStack, count: int) -> tuple[Gate, list[socket.socket]]:
    """Return a gate that so many strangers wait at."""
    listener = held.enter_context(listening())
    selector = held.enter_context(selectors.DefaultSelector())
    ends = [held.enter_context(connected(where_of(listener, ""))) for _ in range(count)]
    return Gate(listener, selector), ends


def test_of_strangers_so_many_come_in_between_two_beats() -> None:
    with ExitStack() as held:
        own, _ = accepting(held, MOST_PER_BEAT + 1)
        for _ in range(MOST_PER_BEAT):
            end = own.accept()
            assert end is not None
            held.enter_context(end)
        assert own.listener not in own._selector.get_map()
        own.beat()
        assert own.listener in own._selector.get_map()


class Short:
    """A listener of a process that has no descriptor left."""

    def __init__(self, listener: socket.socket) -> None:
        self.fileno, self.setblocking = listener.fileno, listener.setblocking

    def accept(self) -> None:
        raise OSError(errno.EMFILE, "Too many open files")


def test_where_descriptors_are_short_the_gate_is_not_asked_again_until_the_next_beat() -> None:
    with listening() as listener, selectors.DefaultSelector() as selector:
        own = Gate(Short(listener), selector)  # pyright: ignore[reportArgumentType]
        assert own.accept() is None
        assert not selector.get_map()


class Relay:
    """What stands between two members and passes on what they say, changed."""

    def __init__(self, there: Where, change: Callable[[bytes, bool], bytes]) -> None:
        self._there, self._change = there, change
        self._listener = listening()
        self.where = where_of(self._listener, "")
        self._threads = [threading.Thread(target=self._accepts)]
        self._threads[0].start()

    def _accepts(self) -> None:
        with suppress(OSError), self._listener:
            while True:
                near, _ = self._listener.accept()
                self._threads.append(threading.Thread(target=self._passes, args=(near,)))
                self._threads[-1].start()

    def _passes(self, near: socket.socket) -> None:
        with suppress(OSError), near, connected(self._there) as far:
            other = {near: far, far: near}
            while True:
                for end in select.select([near, far], [], [])[0]:
                    data = end.recv(65536)
                    if not data:
                        return
                    other[end].sendall(self._change(data, end is near))

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()


@contextmanager
def relay(there: Where, change: Callable[[bytes, bool], bytes]) -> Generator[Where]:
    own = Relay(there, change)
    try:
        yield own.where
    finally:
        own.close()


def test_what_is_changed_on_the_way_is_not_taken() -> None:
    """A relay that passes the proof on cannot put another folder into the welcome."""

    def change(data: bytes, is_call: bool) -> bytes:
        return data if is_call else data.replace(b"about", b"w.py.")

    with meshes(0, 9) as ((own, caller), where):
        own.greets = lambda: WELCOME
        refused = pytest.raises(WireError, match="does not take it in")
        with relay(where[0], change) as between, refused:
            caller.call(between, Ask(where[9], "graph", ()))


def test_one_whose_words_are_changed_may_live() -> None:
    """Were it dead for certain, both ends of the line would go on alone."""
    is_bad = threading.Event()

    def change(data: bytes, is_call: bool) -> bytes:
        return bytes(byte ^ 1 for byte in data) if is_bad.is_set() else data

    with meshes(0, 1) as ((first, other), where), relay(where[0], change) as between:
        other.connect({0: between})
        assert first.wait(lambda: 1 in first.members, LIMIT_S)
        first.where[1] = where[1]
        is_bad.set()
        assert first.wait(lambda: 1 in first.lost, LIMIT_S)
        assert first.lost == {1: "silent"}


def proved(where: Where, number: int = 7) -> tuple[socket.socket, Handshake]:
    """Return a line whose end knows the token, and says what it likes from then on."""
    end, own, came = connected(where), Handshake(number, b"token", is_caller=True), bytearray()
    end.sendall(own.begin())
    while not own.is_over:
        came += end.recv(4096)
        end.sendall(own.feed(came))
    return end, own


others = st.sampled_from(
    (*WORDS, Welcome({}, "other"), Done(), GivenUp(), GivenUp(False), Failed("", ""))
)


@settings(max_examples=25)
@given(said=st.lists(others.map(written) | st.binary(max_size=60), max_size=6))
def test_one_that_knows_the_token_may_say_what_it_likes_and_stops_no_thread(
    said: list[bytes],
) -> None:
    with meshes(0, 9) as ((own, caller), where):
        own.greets = lambda: WELCOME
        end, line = proved(where[0])
        with end, suppress(ConnectionResetError, BrokenPipeError):
            for message in said:
                end.sendall(line.sends.sealed(message))
        assert caller.call(where[0], Ask(where[9], "graph", ())) == WELCOME
        assert own._thread.is_alive()
