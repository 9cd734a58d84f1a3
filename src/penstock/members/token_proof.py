"""Proof: how members show each other that they know the run's token, and seal what they say then.

    caller   PENSTOCK 3 | its id, nonce
    called   its id, nonce, MAC(token, "called" ids nonces)
    caller   MAC(token, "caller" ids nonces)
    both     length, MAC(key, number, length), message, MAC(key, number, message)

MAC is BLAKE2b with a key, which takes no lock of the whole process.  OpenSSL does, in each thread's
first call and in its end: a process that forks as a thread ends may leave that lock taken in the
child for ever, and then no thread begun there could prove anything.

The token itself never travels.  Each direction of each line has a key of its own, made of the
token and both nonces, and numbers its messages: one that was changed, left out, repeated or put
elsewhere on the way is not taken, and the line ends.  So who only passes bytes on learns what is
said, and can cut the line; nothing else.

A peer that has not proved itself may say MOST_UNKNOWN_BYTES in all, each of its lines once.

Ignores:  reading on the way: lines between hosts are taken to be private, or run inside a tunnel.
Source:   RFC 7693 (BLAKE2).
"""

import hmac
import json
import secrets
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Annotated, TypeVar, final

import msgspec

from penstock.members.words import MOST_BYTES, WireError

GREETING = b"PENSTOCK 3\n"
MOST_UNKNOWN_BYTES = 2**10  # that a peer may say before it has proved anything
_SIZE, _NUMBER = struct.Struct("<I"), struct.Struct("<Q")
HEAD_BYTES, SEAL_BYTES = 20, 32  # in front of each message, and behind it
_Member = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
_FROM_CALLER = msgspec.json.Decoder(tuple[_Member, str])
_FROM_CALLED = msgspec.json.Decoder(tuple[_Member, str, str])
_PROOF = msgspec.json.Decoder(tuple[str])
T = TypeVar("T")


@final
@dataclass(slots=True)
class Seal:
    """One direction of a line: its key, and how many messages have gone that way."""

    key: bytes
    count: int = 0

    def sealed(self, data: bytes) -> bytes:
        """Return a message as it goes over the line."""
        self.count += 1
        return self._head(len(data)) + data + self._seal(data)

    def opened(self, buffer: bytearray) -> Iterator[bytes]:
        """Take all whole messages from the front of `buffer` and yield them.

        Raises:   WireError: one is too long, or not the next one of the other end.
        """
        while len(buffer) >= HEAD_BYTES:
            (size,) = _SIZE.unpack_from(buffer)
            if size > MOST_BYTES:
                raise WireError(f"a message of {size} bytes; {MOST_BYTES} are the most")
            end = HEAD_BYTES + size + SEAL_BYTES
            if len(buffer) < end:
                self._check(buffer[:HEAD_BYTES], self._head(size, ahead=1))
                break
            data = bytes(buffer[HEAD_BYTES : HEAD_BYTES + size])
            seal = bytes(buffer[HEAD_BYTES + size : end])
            head = bytes(buffer[:HEAD_BYTES])
            del buffer[:end]
            self.count += 1
            self._check(head, self._head(size))
            self._check(seal, self._seal(data))
            yield data

    def _head(self, size: int, *, ahead: int = 0) -> bytes:
        """Return what a message begins with: a length that was changed would be waited for."""
        words = _NUMBER.pack(self.count + ahead) + _SIZE.pack(size)
        return _SIZE.pack(size) + _mac(self.key, b"h" + words)[: HEAD_BYTES - _SIZE.size]

    def _seal(self, data: bytes) -> bytes:
        return _mac(self.key, b"m" + _NUMBER.pack(self.count), data)

    def _check(self, told: bytes | bytearray, known: bytes) -> None:
        if not hmac.compare_digest(told, known):
            raise WireError(f"message {self.count} is not as the other end has sealed it")


@final
@dataclass(slots=True)
class Handshake:
    """One side of the proof that both know the token; `peer` is who the other says it is.

    is_caller:  whether this side has connected.  `feed` it what comes; send what it returns.
    sends, hears:  once it is over, the seals of both directions.
    room:       bytes that the other end may still say before it has proved anything.
    """

    own: int
    token: bytes
    is_caller: bool
    nonce: str = ""
    peer: int = -1
    is_over: bool = False
    sends: Seal = field(default_factory=lambda: Seal(b""))
    hears: Seal = field(default_factory=lambda: Seal(b""))
    room: int = MOST_UNKNOWN_BYTES
    _theirs: str = ""
    _has_greeted: bool = False

    def __post_init__(self) -> None:
        self.nonce = self.nonce or secrets.token_hex(16)

    def begin(self) -> bytes:
        """Return what the caller sends first; the called side sends nothing."""
        return GREETING + _line(self.own, self.nonce) if self.is_caller else b""

    def feed(self, buffer: bytearray) -> bytes:
        """Take whole lines from the front of `buffer`; return what to send.

        What comes behind the proof is left there.
        Raises:   WireError: the peer does not know the token, or speaks otherwise.
        """
        answer = b""
        while not self.is_over and (line := _first_line(buffer)) is not None:
            self.room -= len(line) + 1
            if self.room < 0:
                break
            answer += self._take(line)
        if not self.is_over and self.room < len(buffer):
            raise WireError("a peer that does not prove that it knows the token")
        return answer

    def _take(self, line: bytes) -> bytes:
        if not self.is_caller and not self._has_greeted:
            if line != GREETING[:-1]:
                raise WireError("a peer that speaks otherwise")
            self._has_greeted = True
            return b""
        if self.is_caller:
            self.peer, self._theirs, proof = _read(_FROM_CALLED, line)
            self._check(proof, "called")
            answer = _line(self._proof("caller"))
        elif self.peer < 0:
            self.peer, self._theirs = _read(_FROM_CALLER, line)
            return _line(self.own, self.nonce, self._proof("called"))
        else:
            self._check(*_read(_PROOF, line), "caller")
            answer = b""
        self._seal()
        return answer

    def _seal(self) -> None:
        sides = "from caller", "from called"
        sends, hears = sides if self.is_caller else reversed(sides)
        self.sends, self.hears = Seal(self._keyed(sends)), Seal(self._keyed(hears))
        self.is_over = True

    def _keyed(self, role: str) -> bytes:
        rows = [(self.own, self.nonce), (self.peer, self._theirs)]
        text = json.dumps([role, *(rows if self.is_caller else reversed(rows))])
        return _mac(blake2b(self.token, digest_size=SEAL_BYTES).digest(), text.encode())

    def _proof(self, role: str) -> str:
        return self._keyed(role).hex()

    def _check(self, proof: str, role: str) -> None:
        if not hmac.compare_digest(proof.encode(errors="replace"), self._proof(role).encode()):
            raise WireError("a peer that does not know the token")


def _mac(key: bytes, head: bytes, data: bytes = b"") -> bytes:
    made = blake2b(head, key=key, digest_size=SEAL_BYTES)
    made.update(data)
    return made.digest()


def _read(decoder: msgspec.json.Decoder[T], line: bytes) -> T:
    """Return the words of a line.

    Raises:   WireError: it has others.
    """
    try:
        return decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise WireError("a peer that speaks otherwise") from None


def _line(*words: object) -> bytes:
    return json.dumps(words).encode() + b"\n"


def _first_line(buffer: bytearray) -> bytes | None:
    end = buffer.find(b"\n")
    if end < 0:
        return None
    line = bytes(buffer[:end])
    del buffer[: end + 1]
    return line
