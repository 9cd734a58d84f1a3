"""Words: what members of an elastic run say to each other, and how it is written on a line.

A message is its length in 4 bytes and then JSON, which is checked against the record that it says
it is: nothing that a peer sends is ever executed or unpickled.  Before it is heard at all, a peer
proves that it knows the run's token, which itself never travels:

    caller   PENSTOCK 1 | its id, nonce
    called   its id, nonce, HMAC(token, "called" ids nonces)
    caller   HMAC(token, "caller" ids nonces)

Ignores:  reading and changing messages on the way: lines between hosts are taken to be private.
"""

import hmac
import json
import secrets
import struct
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import msgspec

from penstock.errors import RunError

GREETING = b"PENSTOCK 1\n"
MOST_BYTES = 2**26  # of a message; a catalog of 100,000 tensors is 10 MB
MOST_UNKNOWN_BYTES = 2**10  # of one from a peer that has not proved anything
_SIZE = struct.Struct("<I")
_DIGEST = "sha256"


class WireError(RunError):
    """A peer that sends something else than a message."""


class HeldTensor(NamedTuple):
    """A tensor that a member can give to others: its key as in a checkpoint, dtype and shape."""

    key: str
    dtype: str
    shape: tuple[int, ...]


class Where(NamedTuple):
    """Where a member listens; members with one `key` can share memory.

    pool:    of which its machine is; "": it does not say.
    """

    host: str
    port: int
    key: str
    pool: str = ""


class Cursor(NamedTuple):
    """From `step` on a step has `size` micro-batches of the job; the first one is `number`."""

    step: int
    number: int
    size: int


class Told(NamedTuple):
    """A step that has happened, as all ranks together know it; seconds are those of the first."""

    step: int
    loss: float | None
    seconds: float
    micro_batches: int
    figures: dict[str, float]


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """A member is alive, and has finished so many steps."""

    done: int


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """A newcomer wants to be taken in; it has connected to `known`, and traced this graph."""

    where: Where
    graph: str
    known: tuple[int, ...]


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """What a newcomer has to know: who is there, and where, and what else the pilot tells of it."""

    members: dict[int, Where]
    graph: str
    about: str = ""


class Halt(msgspec.Struct, frozen=True, tag="stopped"):
    """A member has left a generation: what it has done, and what it can give to others.

    done:    steps that it has finished; it holds the state after the last of them.
    newest:  that last step; None where it was done by an earlier run, or is known to others only.
    lost:    members that it cannot reach.
    leaves:  whether it wants to go.
    """

    generation: int
    done: int
    holds: tuple[HeldTensor, ...]
    plain: dict[str, msgspec.Raw]
    newest: Told | None = None
    lost: tuple[int, ...] = ()
    leaves: bool = False


class View(msgspec.Struct, frozen=True, tag="view"):
    """A generation: who works together, by which plan, from which step on.

    members:  by position: rank r of the plan is members[r].
    before:   the members of the generation before.
    gone:     those of them that died, were given up, or left, and why.
    holds:    what each member holds that is there already; newcomers hold nothing.
    plain:    values of the state that are no tensors.
    resume:   the checkpoint from which all start instead, where nobody has some of the state any
              more: a folder, or "start"; "": the state is moved.
    newest:   the step before, for whoever reports steps from now on.
    cursors:  where in the data steps begin, if their batch follows the ranks.
    """

    generation: int
    step: int
    plan: str
    members: tuple[int, ...]
    before: tuple[int, ...] = ()
    gone: dict[int, str] = {}
    where: dict[int, Where] = {}
    holds: dict[int, tuple[HeldTensor, ...]] = {}
    plain: dict[str, msgspec.Raw] = {}
    resume: str = "start"
    newest: Told | None = None
    why: str = ""
    cursors: tuple[Cursor, ...] = ()


class Put(msgspec.Struct, frozen=True, tag="put"):
    """A key of the store that the members of a generation share."""

    generation: int
    key: str
    value: str


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The job itself fails: the run ends."""

    message: str
    hint: str


class Done(msgspec.Struct, frozen=True, tag="done"):
    """A member has finished the run, or leaves it: that its line ends now says nothing."""


class GivenUp(msgspec.Struct, frozen=True, tag="given_up"):
    """The one that hears this was silent for too long.

    is_decided:  whether the others go on without it; else the line alone has ended.
    """

    is_decided: bool = True


Word: TypeAlias = Beat | Ask | Welcome | Halt | View | Put | Failed | Done | GivenUp

_decoder = msgspec.json.Decoder(Word)


def written(word: Word) -> bytes:
    """Return a message as it goes over the line."""
    data = msgspec.json.encode(word)
    return _SIZE.pack(len(data)) + data


def taken(buffer: bytearray) -> list[Word]:
    """Take all whole messages from the front of `buffer` and return them.

    Raises:   WireError: one is too long, or not a message.
    """
    found: list[Word] = []
    while len(buffer) >= _SIZE.size:
        (size,) = _SIZE.unpack_from(buffer)
        if size > MOST_BYTES:
            raise WireError(f"a message of {size} bytes; {MOST_BYTES} are the most")
        if len(buffer) < _SIZE.size + size:
            break
        data = bytes(buffer[_SIZE.size : _SIZE.size + size])
        del buffer[: _SIZE.size + size]
        try:
            found.append(_decoder.decode(data))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
            raise WireError(f"not a message: {problem}") from None
    return found


@dataclass(slots=True)
class Handshake:
    """One side of the proof that both know the token; `peer` is who the other says it is.

    is_caller:  whether this side has connected.  `feed` it what comes; send what it returns.
    """

    own: int
    token: bytes
    is_caller: bool
    nonce: str = ""
    peer: int = -1
    is_over: bool = False
    _theirs: str = ""

    def __post_init__(self) -> None:
        self.nonce = self.nonce or secrets.token_hex(16)

    def begin(self) -> bytes:
        """Return what the caller sends first; the called side sends nothing."""
        return GREETING + _line(self.own, self.nonce) if self.is_caller else b""

    def feed(self, buffer: bytearray) -> bytes:
        """Take whole lines from the front of `buffer`; return what to send.

        Raises:   WireError: the peer does not know the token, or speaks otherwise.
        """
        answer = b""
        while not self.is_over and (line := _first_line(buffer)) is not None:
            answer += self._take(line)
        if not self.is_over and len(buffer) > MOST_UNKNOWN_BYTES:
            raise WireError("a peer that does not prove that it knows the token")
        return answer

    def _take(self, line: bytes) -> bytes:
        if line == GREETING[:-1] and not self.is_caller and self.peer < 0:
            return b""
        try:
            words = json.loads(line)
            texts = [str(word) for word in words]
            if self.peer < 0:
                self.peer, self._theirs = int(texts[0]), texts[1]
        except (ValueError, TypeError, IndexError, RecursionError):
            raise WireError("a peer that speaks otherwise") from None
        if self.is_caller:  # number, nonce, proof
            self._check(texts[-1], "called")
            self.is_over = True
            return _line(self._proof("caller"))
        if not self.is_over and len(texts) == 2:
            return _line(self.own, self.nonce, self._proof("called"))
        self._check(texts[-1], "caller")
        self.is_over = True
        return b""

    def _proof(self, role: str) -> str:
        rows = [(self.own, self.nonce), (self.peer, self._theirs)]
        text = json.dumps([role, *(rows if self.is_caller else reversed(rows))])
        return hmac.new(self.token, text.encode(), _DIGEST).hexdigest()

    def _check(self, proof: str, role: str) -> None:
        if not hmac.compare_digest(proof.encode(), self._proof(role).encode()):
            raise WireError("a peer that does not know the token")


def _line(*words: object) -> bytes:
    return json.dumps(words).encode() + b"\n"


def _first_line(buffer: bytearray) -> bytes | None:
    end = buffer.find(b"\n")
    if end < 0:
        return None
    line = bytes(buffer[:end])
    del buffer[: end + 1]
    return line
