"""Mesh: the lines between all members of an elastic run, and who of them is there.

One thread of each member reads, writes and listens for all its lines.  A line that ends without a
word says that the member's process has died: the kernel closes it, and within a millisecond all
know.  One that is silent says that the member hangs, or cannot be reached: it may be alive.

Ranks that compute are not slowed: the thread sleeps until something comes, or a beat is due.
"""

import contextlib
import errno
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, NamedTuple, final

from penstock.members.encrypted import EncryptedLine, check_installed, is_encrypted
from penstock.members.gate import CALL_S, Gate, MeshLine
from penstock.members.standing import Stands
from penstock.members.token_proof import Handshake
from penstock.members.words import (
    Ask,
    Beat,
    Done,
    Failed,
    GivenUp,
    Halt,
    Put,
    Stop,
    View,
    Welcome,
    Where,
    WireError,
    Word,
    word_in,
    written,
)

BEAT_S = 0.25
SILENT_S = 4.0  # after which a member is given up
_TRY_S = 0.05  # between two attempts to reach a member
_KNOCK_S = 0.5  # between two looks whether one that has to call is there
_LOOK_S = 0.2  # for an answer at the place of one whose line ended
_READ_BYTES = 2**18
_ANY_PORT = 9  # nothing is sent to it
_MOST_OWED_BYTES = 2**28  # that a member may be behind with reading

Fate = Literal["died", "silent", "left"]


class LastSeen(NamedTuple):
    """How a member was lost, when it last spoke, and when that was seen, by this one's clock."""

    fate: Fate
    spoke_s: float
    ended_s: float


@final
class Mesh:
    """The lines of one member.

    own:        number of this member; no two of a run ever have the same.
    listener:   where others connect.
    token:      what a peer has to know.
    on_change:  called, in the mesh's thread, when a member is lost or says that it stopped.
    looks:      tells, in that thread, whether this member's step stands, for how long.

    State that `wait` may look at: `lost`, by member how; `stopped`, the newest of each; `view`, the
    newest heard; `asks` of newcomers; `failed`; `given_up`, whether the others went on without it;
    `is_asked_to_stop`, by who is none of them.
    """

    def __init__(
        self,
        own: int,
        listener: socket.socket,
        token: bytes,
        *,
        on_change: Callable[[], None] = lambda: None,
        silent_s: float = SILENT_S,
    ) -> None:
        self.own, self.on_change, self.done = own, on_change, 0
        self.where: dict[int, Where] = {}
        self.lost: dict[int, Fate] = {}
        self._spoke_s: dict[int, float] = {}  # of those that were lost, and when that was
        self._ended_s: dict[int, float] = {}
        self.stopped: dict[int, Halt] = {}
        self.asks: dict[int, Ask] = {}
        self.view: View | None = None
        self.failed: Failed | None = None
        self.given_up = self.is_asked_to_stop = False
        self.greets: Callable[[], Welcome] | None = None
        self.looks: Callable[[], Stands] = lambda: "goes"
        self._standing: set[int] = set()  # members whose steps stand
        if is_encrypted(token):
            check_installed()
        self._token, self._silent_s = token, silent_s
        self._store: dict[tuple[int, str], str] = {}
        self._lines: dict[int, MeshLine] = {}
        self._changed = threading.Condition()
        self._selector = selectors.DefaultSelector()
        self._wake_end, self._woken_end = os.pipe()[::-1]
        os.set_blocking(self._woken_end, False)
        os.set_blocking(self._wake_end, False)
        self._gate = Gate(listener, self._selector)
        self._selector.register(self._woken_end, selectors.EVENT_READ)
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name="penstock mesh", daemon=True)

    # -- what a member does -------------------------------------------------------------------

    def start(self) -> None:
        """Begin to listen, and to beat."""
        self._thread.start()

    def connect(
        self,
        members: Mapping[int, Where],
        *,
        limit_s: float = 30.0,
        gives_up: bool = False,
        calls: bool = False,
    ) -> None:
        """Return once there is a line to each of `members` that has not been lost.

        Of two members the one with the greater number calls; the other waits for it.  One whose
        place nobody listens at any more is dead.
        gives_up: whether those that cannot be reached in time are given up.
        calls:    whether this one calls all of them: a newcomer, whom they do not know of.
        Raises:   WireError: one cannot be reached in time.
        """
        until, knocks_s = time.monotonic() + limit_s, time.monotonic() + _KNOCK_S
        with self._changed:
            self.where |= members
        missing = set(members) - {self.own}
        while missing := {m for m in missing if m not in self._lines and m not in self.lost}:
            if time.monotonic() > until:
                if not gives_up:
                    raise WireError(f"members {sorted(missing)} cannot be reached")
                for member in missing:
                    self.give_up(member)
            knocks = time.monotonic() > knocks_s
            knocks_s += _KNOCK_S if knocks else 0.0
            for member in sorted(missing):
                if calls or member < self.own or knocks:
                    self._reach(member, calls=calls or member < self.own)
            self.wait(lambda: all(m in self._lines for m in missing), _TRY_S)

    def _reach(self, member: int, *, calls: bool) -> None:
        """Call a member, or only see that somebody is there; nobody is: it is dead."""
        is_dead = self._refuses(self.where[member]) if calls else not self._may_live(member)
        if is_dead:
            with self._changed:
                self._lose(member, "died")

    def _refuses(self, where: Where, *, only_asks: bool = False) -> bool:
        """Call a place; return whether nobody listens there any more."""
        try:
            self._call(where, only_asks=only_asks)
        except ConnectionRefusedError:
            return True
        except OSError:
            pass  # it may yet be reached
        return False

    def call(self, where: Where, ask: Ask, *, limit_s: float = 10.0) -> Welcome:
        """Connect to one member of a run, as a newcomer that knows nobody, and return its answer.

        Raises:   WireError: nobody is there, or does not accept the token.
        """
        try:
            line = self._call(where)
        except OSError as problem:
            raise WireError(f"nobody at {where.host}:{where.port}: {problem}") from None
        found: list[Welcome] = []

        def welcomed() -> bool:
            found[:] = [self._welcome] if self._welcome else []
            return bool(found) or line.is_ending

        self._welcome: Welcome | None = None
        until = time.monotonic() + limit_s
        while time.monotonic() < until and not welcomed():
            self.send(line.peer, ask)
            self.wait(welcomed, 2 * BEAT_S)
        if not found:
            hint = "is the token that of this run?"
            raise WireError(f"{where.host}:{where.port} does not take it in", hint=hint)
        return found[0]

    def seek(self, member: int) -> None:
        """Ask a member that was given up whether the others went on without this one.

        Its answer is in `given_up`, soon; it says nothing if it waits as this one does.  One whose
        place nobody listens at any more is dead.
        """
        if self._refuses(self.where[member], only_asks=True):
            with self._changed:
                self.lost[member] = "died"
                self._ended_s[member] = time.monotonic()

    @property
    def ends(self) -> dict[int, LastSeen]:
        """Return how each of those that were lost has ended."""
        with self._changed:
            spoke, ended = self._spoke_s, self._ended_s
            return {m: LastSeen(fate, spoke[m], ended[m]) for m, fate in self.lost.items()}

    def send(self, member: int, word: Word) -> None:
        """Send a word to one member, if there is a line to it; returns without waiting."""
        with self._changed:
            line = self._lines.get(member)
            if line is not None:
                self._owe(line, word)
        self._wake()

    def tell(self, word: Word) -> None:
        """Send a word to all members, and hear it as the others do."""
        data = written(word)
        with self._changed:
            for line in self._lines.values():
                line.owe(data, _MOST_OWED_BYTES)
            self._hear(self.own, word)
            self._changed.notify_all()
        self._wake()

    def wait(self, is_so: Callable[[], bool], limit_s: float | None = None) -> bool:
        """Return whether `is_so()`, as soon as that is so, or after `limit_s` at most."""
        with self._changed:
            return self._changed.wait_for(is_so, limit_s)

    @property
    def is_open(self) -> bool:
        """Return whether it has lines, or may have."""
        return self._is_open

    @property
    def members(self) -> set[int]:
        """Return the members to whom there is a line, and this one."""
        with self._changed:
            return {self.own, *self._lines}

    def give_up(self, member: int) -> None:
        """Go on without a member that does not answer; it is told, should it ever listen."""
        with self._changed:
            self._lose(member, "silent", is_decided=True)
        self._wake()

    def resign(self) -> None:
        """Leave the others for certain, whatever this member's own thread does; it hears of it."""
        with self._changed:
            for line in list(self._lines.values()):
                self._owe(line, Done())
                self._write(line)
                self._gate.end(line)
            self._lines.clear()
            self.given_up = True
            self.on_change()
            self._changed.notify_all()

    def _somebody_waits(self) -> bool:
        """Return whether a member is there whose own step does not stand: it waits for others."""
        members = () if self.view is None else self.view.members
        there = [m for m in members or self.where if m in self._lines]
        return any(member not in self._standing for member in there)

    def drop(self) -> None:
        """Die as a killed process does: without a word."""
        self._is_open = False
        self._wake()
        self._thread.join()

    def close(self) -> None:
        """Leave in good order; returns once what was said is on its way."""
        self.tell(Done())
        until = time.monotonic() + 1.0
        while time.monotonic() < until and any(line.owed for line in self._lines.values()):
            time.sleep(1e-3)
        self.drop()

    # -- a store, as transports want one --------------------------------------------------------

    def put(self, generation: int, key: str, value: str) -> None:
        """Let the members of a generation see a value."""
        self.tell(Put(generation, key, value))

    def found(self, generation: int, key: str) -> str | None:
        """Return a value that some member put; None: not yet."""
        return self._store.get((generation, key))

    def forget(self, generation: int) -> None:
        """Drop the keys of older generations."""
        with self._changed:
            self._store = {k: v for k, v in self._store.items() if k[0] >= generation}

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        beat_at = last = time.monotonic()
        while self._is_open:
            for key, events in self._selector.select(max(0.0, beat_at - time.monotonic())):
                if key.fileobj is self._gate.listener:
                    self._accept()
                elif key.fileobj == self._woken_end:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._woken_end, 4096)
                else:
                    self._serve(key.data, events)
            now = time.monotonic()
            if now - last > self._silent_s / 2:  # this process did not run
                for line in self._all():
                    line.heard = line.since = now
            last = now
            if now >= beat_at:
                beat_at = _next_beat_s(now)
                self._beat(now)
            self._flush()
        self._gate.listener.close()  # before lines: whose line ends is looked for there
        for line in self._all():
            line.socket.close()
        self._selector.close()
        with self._changed:  # its number may be another file's from now on
            wake_end, self._wake_end = self._wake_end, -1
        os.close(wake_end)
        os.close(self._woken_end)

    def _all(self) -> list[MeshLine]:
        with self._changed:
            return [*self._lines.values(), *self._gate.strangers]

    def _beat(self, now: float) -> None:
        stands = self.looks()
        if stands == "leaves" and self._somebody_waits():
            self.resign()
        data = written(Beat(self.done, stands != "goes"))
        with self._changed:
            for member, line in list(self._lines.items()):
                if now - line.heard > self._silent_s:
                    self._lose(member, "silent")
                else:
                    line.owe(data, _MOST_OWED_BYTES)
            for line in self._gate.beat():
                self._gate.end(line)

    def _accept(self) -> None:
        with self._changed:
            end = self._gate.accept()
        if end is not None:
            with contextlib.suppress(OSError):  # it has gone again
                self._open(end, is_caller=False)

    def _call(self, where: Where, *, only_asks: bool = False) -> MeshLine:
        end = socket.create_connection(where[:2], timeout=1.0)
        line = self._open(end, is_caller=True, only_asks=only_asks)
        self._wake()
        self.wait(lambda: line.handshake.is_over or line.is_ending, CALL_S)
        return line

    def _open(self, end: socket.socket, *, is_caller: bool, only_asks: bool = False) -> MeshLine:
        end.setblocking(False)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        now = time.monotonic()
        line = MeshLine(end, Handshake(self.own, self._token, is_caller), now, now)
        line.only_asks = only_asks
        if is_encrypted(self._token):
            line.encrypted = EncryptedLine(self._token, is_caller)
        line.say(line.handshake.begin())
        with self._changed:
            self._gate.strangers.add(line)
            self._selector.register(end, selectors.EVENT_READ, line)
        return line

    def _serve(self, line: MeshLine, events: int) -> None:
        if not events & selectors.EVENT_READ or line.is_ending:
            return
        if not line.handshake.is_over:
            self._serve_stranger(line)
            return
        try:
            data = line.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data, line.is_reset = b"", True
        try:
            line.take(data)
        except WireError:
            data, line.is_reset = b"", True
        self._take(line, is_over=not data)

    def _serve_stranger(self, line: MeshLine) -> None:
        """Hear one that has not proved itself; what it says takes nobody's lock."""
        try:
            line.hear_stranger()
        except BlockingIOError:
            return
        except (OSError, WireError):
            with self._changed:
                self._gate.end(line)
                if line.handshake.is_caller:  # somebody waits for it
                    self._changed.notify_all()
            return
        if line.handshake.is_over:
            with self._changed:
                self._proved(line)
                self._changed.notify_all()
            self._take(line, is_over=False)

    def _take(self, line: MeshLine, *, is_over: bool) -> None:
        """Hear what has come; who says what nobody could have said may live: the line ends."""
        words = list[Word]()
        try:
            for data in line.handshake.hears.opened(line.came):
                words.append(word_in(data))
        except WireError:
            is_over = line.is_reset = True
        if not words and not is_over:
            return
        with self._changed:
            for word in words:
                self._hear(line.peer, word)
            if is_over:
                self._ended(line)
            self._changed.notify_all()

    def _proved(self, line: MeshLine) -> None:
        """Let a stranger that knows the token be a member, or a newcomer."""
        if line.only_asks:
            return
        if line.peer == self.own or line.peer in self._lines or line.peer in self.lost:
            if self.view is not None and line.peer not in self.view.members:
                self._owe(line, GivenUp())
                self._write(line)
            self._gate.end(line)  # a second line, or one that was given up: it has to come anew
            return
        self._gate.proved(line)
        self._lines[line.peer] = line

    def _hear(self, member: int, word: Word) -> None:
        match word:
            case Beat(stands=stands):
                (self._standing.add if stands else self._standing.discard)(member)
            case Welcome():
                self._welcome = word
            case Ask(known=()):
                line = self._lines.get(member)
                if self.greets is not None and line is not None:
                    self._owe(line, self.greets())
            case Ask():
                self.asks[member] = word
                self.where[member] = word.where
                self.on_change()
            case Halt():
                self.stopped[member] = word
                self.on_change()
            case View():
                self._hear_view(member, word)
            case Put(generation, key, value):
                self._store[generation, key] = value
            case Failed():
                self.failed = self.failed or word
                self.on_change()
            case Stop():
                self.is_asked_to_stop = True
            case Done():
                if member != self.own:
                    self._note(member, "left", self._lines.get(member))
            case GivenUp(is_decided=True):
                self.given_up = True
                self.on_change()
            case GivenUp():  # it may be alive, and wait as this one does
                self._lose(member, "silent", gave_up=True)

    def _hear_view(self, member: int, view: View) -> None:
        """Keep to the newest view, and of two with one number to the first that was heard.

        Two members that cannot reach each other may both decide, where others reach both of them.
        Whose view is not kept to is told: it would wait for this member.
        """
        if self.view is None or view.generation > self.view.generation:
            self.view = view
        elif view.generation == self.view.generation and member not in self.view.members:
            line = self._lines.get(member)
            if line is not None:
                self._owe(line, GivenUp())

    def _ended(self, line: MeshLine) -> None:
        """A line has ended by itself: its process is dead, unless it was silent for long before.

        Of one that was reset, what was said last - that this one was given up - may be lost; so its
        process is dead only if nobody greets at its place.
        """
        if line.peer >= 0 and self._lines.get(line.peer) is line:
            was_silent = time.monotonic() - line.heard > self._silent_s / 2
            lives = was_silent or (line.is_reset and self._may_live(line.peer))
            self._lose(line.peer, "silent" if lives else "died", gave_up=lives)
        else:
            self._gate.end(line)

    def _may_live(self, member: int) -> bool:
        """Return whether a member greets who calls it, or nothing tells that it is dead.

        A process that dies ends its lines before it stops to listen: so a greeting is waited for.
        """
        try:
            with socket.create_connection(self.where[member][:2], timeout=_LOOK_S) as end:
                end.recv(1)
        except (ConnectionRefusedError, ConnectionResetError, KeyError):
            return False
        except OSError:
            return True
        return True

    def _lose(
        self, member: int, fate: Fate, *, is_decided: bool = False, gave_up: bool = False
    ) -> None:
        """Go on without a line to a member.

        gave_up:  whether it may have given this one up first, nobody knows when.
        """
        line = self._lines.pop(member, None)
        if line is not None and fate == "silent":
            self._owe(line, GivenUp(is_decided))
        if line is not None:
            self._write(line)
            self._gate.end(line)
        self.asks.pop(member, None)
        if member not in self.lost:
            self._note(member, fate, None if gave_up else line)
            self.on_change()
        self._changed.notify_all()

    def _note(self, member: int, fate: Fate, line: MeshLine | None) -> None:
        """Keep how a member was lost, the first time; without a line it was never heard."""
        if member not in self.lost:
            self.lost[member] = fate
            self._ended_s[member] = time.monotonic()
            self._spoke_s[member] = 0.0 if line is None else line.spoke

    def _owe(self, line: MeshLine, word: Word) -> None:
        line.owe(written(word), _MOST_OWED_BYTES)

    def _flush(self) -> None:
        with self._changed:
            for line in self._all_here():
                if line.owed:
                    self._write(line)

    def _all_here(self) -> list[MeshLine]:
        return [*self._lines.values(), *self._gate.strangers]

    def _write(self, line: MeshLine) -> None:
        """Write what the line takes; what is left goes when a beat is due, or there is room."""
        try:
            while line.owed and not line.is_ending:
                sent = line.socket.send(line.owed[:_READ_BYTES])
                del line.owed[:sent]
        except BlockingIOError:
            line.waits_for_room = True
            self._selector.modify(line.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, line)
            return
        except OSError:
            line.is_reset = True
            line.owed.clear()  # reading says that it has ended
            return
        if line.waits_for_room and not line.is_ending:
            line.waits_for_room = False
            self._selector.modify(line.socket, selectors.EVENT_READ, line)

    def _wake(self) -> None:
        with self._changed, contextlib.suppress(BlockingIOError, OSError):
            if self._wake_end >= 0:
                os.write(self._wake_end, b".")


def _next_beat_s(now: float) -> float:
    """Return when the next beat is due: at one moment for all members of a host, so that each
    wakes once for its own and theirs, and all are held up together."""
    return (now // BEAT_S + 1) * BEAT_S


def listening(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """Return a socket on which a member will listen; port 0: any that is free.

    Raises:   OSError: the address is not this host's, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=64)


def address_towards(host: str) -> str:
    """Return this host's address on its way to another; nothing is sent.

    Raises:   OSError: there is no such host, or no way to it.
    """
    found = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as end:
        end.connect(address)
        return end.getsockname()[0]


def where_of(listener: socket.socket, key: str, pool: str = "") -> Where:
    """Return where others reach it, on a host with that `key`, a machine of that pool."""
    address, port, *_ = listener.getsockname()
    return Where(address, port, key, pool)


def anybody_at(places: Iterable[Where], limit_s: float = 2.0) -> bool:
    """Return whether somebody listens at one of some places, as far as is known in time."""
    ends = [_knocking(place) for place in places]
    try:
        with selectors.DefaultSelector() as selector:
            for end in filter(None, ends):
                selector.register(end, selectors.EVENT_WRITE)
            until = time.monotonic() + limit_s
            while selector.get_map() and time.monotonic() < until:
                for key, _ in selector.select(until - time.monotonic()):
                    end = key.fileobj
                    assert isinstance(end, socket.socket), "it was registered"
                    if end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                        return True
                    selector.unregister(end)
        return False
    finally:
        for end in filter(None, ends):
            end.close()


def _knocking(place: Where) -> socket.socket | None:
    """Return a socket that begins to connect; None: there is no way to that place."""
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    end = socket.socket(family, socket.SOCK_STREAM)
    end.setblocking(False)
    if end.connect_ex((place.host, place.port)) in (0, errno.EINPROGRESS):
        return end
    end.close()
    return None
