"""Gate: lines to peers, and where strangers stand until they have proved that they belong here.

Whoever reaches a member's port can connect, and that must not slow the run.  A stranger has a
second for each of the two lines that it has to say, and 1 KiB for both.  MOST_STRANGERS stand here
at a time; where one more comes, the one that has stood longest goes, so that those who only hold
their connections keep nobody out.  Of those that prove nothing a member accepts MOST_PER_BEAT
between two beats; the others wait in the kernel's queue, which costs nothing.
"""

import contextlib
import selectors
import socket
import time
from dataclasses import dataclass, field
from typing import final

from penstock.members.encrypted import EncryptedLine
from penstock.members.token_proof import Handshake

PROVE_S = 1.0  # for which a stranger may take to say a line
CALL_S = 5.0  # for which one that was called may take
MOST_STRANGERS = 64
MOST_PER_BEAT = 10
_STAYS_S = 0.5  # for which a stranger stands at least, however many come


@final
@dataclass(eq=False)
class MeshLine:
    """A line to a peer, until it has proved itself a stranger's."""

    socket: socket.socket
    handshake: Handshake
    since: float
    heard: float
    spoke: float = 0.0  # when last something came; `heard` also counts what was not listened for
    came: bytearray = field(default_factory=bytearray)
    owed: bytearray = field(default_factory=bytearray)
    is_ending: bool = False
    is_reset: bool = False  # what was on its way is lost
    only_asks: bool = False  # whether the others have gone on
    waits_for_room: bool = False  # with what is owed
    encrypted: EncryptedLine | None = None  # None: the line is as it is

    @property
    def peer(self) -> int:
        """Return the member at the other end; -1: it has not proved who it is."""
        return self.handshake.peer if self.handshake.is_over else -1

    @property
    def is_late(self) -> bool:
        """Return whether its time to prove itself is up."""
        limit_s = CALL_S if self.handshake.is_caller else PROVE_S
        return time.monotonic() - self.since > limit_s

    def owe(self, data: bytes, most_bytes: int) -> None:
        """Seal a message that goes over the line; one that is too far behind gets none."""
        if len(self.owed) + len(data) <= most_bytes:
            self.say(self.handshake.sends.sealed(data))

    def say(self, data: bytes) -> None:
        """Owe bytes to the other end."""
        self.owed += data if self.encrypted is None else self.encrypted.said(data)

    def take(self, data: bytes) -> None:
        """Take bytes that have come over the line.

        Raises:   WireError: the other end does not know the token, or speaks otherwise.
        """
        self.heard = self.spoke = time.monotonic()
        self.came += data if self.encrypted is None else self.encrypted.heard(data)

    def hear_stranger(self) -> None:
        """Take what has come of its proof, and owe the answer.

        Raises:   WireError: it does not know the token, or speaks otherwise.  OSError: it has gone.
        """
        was_open = self._is_open
        room = self.handshake.room - len(self.came) if was_open else self._room
        data = self.socket.recv(max(1, room))
        if not data:
            raise ConnectionResetError("it has ended")
        self.take(data)
        answer = self.handshake.feed(self.came)
        if answer or self._is_open != was_open:
            self.since = self.heard
        if answer or self.encrypted is not None:
            self.say(answer)

    @property
    def _is_open(self) -> bool:
        return self.encrypted is None or self.encrypted.is_open

    @property
    def _room(self) -> int:
        return 0 if self.encrypted is None else self.encrypted.room


@final
class Gate:
    """The listener of a member, and the lines that have not proved themselves yet."""

    def __init__(self, listener: socket.socket, selector: selectors.BaseSelector) -> None:
        listener.setblocking(False)
        self.listener, self._selector = listener, selector
        self.strangers: set[MeshLine] = set()
        self._left = MOST_PER_BEAT
        self._is_open = False
        self._open()

    def accept(self) -> socket.socket | None:
        """Return the next stranger's end, if it may come in now."""
        callers = [line for line in self.strangers if not line.handshake.is_caller]
        if len(callers) >= MOST_STRANGERS:
            oldest = min(callers, key=lambda line: line.since)
            if time.monotonic() - oldest.since < _STAYS_S:
                return self._shut()
            self.end(oldest)
        try:
            end, _ = self.listener.accept()
        except BlockingIOError:
            return None
        except OSError:  # no descriptor is free: it would be asked again and again
            return self._shut()
        self._left -= 1
        if self._left <= 0:
            self._shut()
        return end

    def proved(self, line: MeshLine) -> None:
        """Let a line go that is no stranger's: it does not count as one that was accepted."""
        self.strangers.discard(line)
        self._left += not line.handshake.is_caller
        self._open()

    def beat(self) -> list[MeshLine]:
        """Accept again; return the strangers whose time is up."""
        self._left = MOST_PER_BEAT
        self._open()
        return [line for line in self.strangers if line.is_late]

    def end(self, line: MeshLine) -> None:
        """End any line."""
        self.strangers.discard(line)
        if not line.is_ending:
            line.is_ending = True
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(line.socket)
            line.socket.close()

    def _open(self) -> None:
        if not self._is_open:
            self._selector.register(self.listener, selectors.EVENT_READ)
            self._is_open = True

    def _shut(self) -> None:
        """Leave those that come in the kernel's queue, until the next beat."""
        if self._is_open:
            self._selector.unregister(self.listener)
            self._is_open = False
