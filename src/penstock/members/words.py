"""Words: what members of an elastic run say to each other, and how it is written.

A message is JSON, which is checked against the record that it says it is: nothing that a peer sends
is ever executed or unpickled.  Before it is heard at all, a peer proves that it belongs to the run
(token_proof.py).
"""

from typing import NamedTuple, TypeAlias

import msgspec

from penstock.errors import RunError
from penstock.runtime.error_kinds import raised_for

MOST_BYTES = 2**26  # of a message; a catalog of 100,000 tensors is 10 MB


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
    """A member is alive, and has finished so many steps; whether the step that it is in stands."""

    done: int
    stands: bool = False


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


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The job itself fails: the run ends.

    kind:  of the error, after which the run may go on in another way.
    """

    message: str
    hint: str
    kind: str = ""

    @property
    def error(self) -> RunError:
        """Return what a member raises that has heard it."""
        return raised_for(self.kind)(self.message, hint=self.hint)


class Halt(msgspec.Struct, frozen=True, tag="stopped"):
    """A member has left a generation: what it has done, and what it can give to others.

    done:    steps that it has finished; it holds the state after the last of them.
    newest:  that last step; None where it was done by an earlier run, or is known to others only.
             The step behind it where that counts, and the update fails here.
    lost:    members that it cannot reach.
    leaves:  whether it wants to go.
    validated:  the newest step of which it has heard the validation.
    fails:   the job's own error, for which it has left; None: it had none.
    """

    generation: int
    done: int
    holds: tuple[HeldTensor, ...]
    plain: dict[str, msgspec.Raw]
    newest: Told | None = None
    lost: tuple[int, ...] = ()
    leaves: bool = False
    validated: int = -1
    fails: Failed | None = None

    @property
    def counted_steps(self) -> int:
        """Return how many steps it has seen happen: one more than it has done, where that fails."""
        return self.done if self.newest is None else max(self.done, self.newest.step + 1)


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
    validates:  whether the step before is validated first: nobody that is left has heard of it.
    fails:    the job's own error, with which all end once a checkpoint is written; None: none.
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
    validates: bool = False
    fails: Failed | None = None


class Put(msgspec.Struct, frozen=True, tag="put"):
    """A key of the store that the members of a generation share."""

    generation: int
    key: str
    value: str


class Done(msgspec.Struct, frozen=True, tag="done"):
    """A member has finished the run, or leaves it: that its line ends now says nothing."""


class GivenUp(msgspec.Struct, frozen=True, tag="given_up"):
    """The one that hears this was silent for too long.

    is_decided:  whether the others go on without it; else the line alone has ended.
    """

    is_decided: bool = True


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Somebody who knows the token asks the run to end after the step under way."""


Word: TypeAlias = Beat | Ask | Welcome | Halt | View | Put | Failed | Done | GivenUp | Stop

_decoder = msgspec.json.Decoder(Word)


def written(word: Word) -> bytes:
    """Return a message as text."""
    return msgspec.json.encode(word)


def word_in(data: bytes) -> Word:
    """Return the word that a message is.

    Raises:   WireError: it is none.
    """
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise WireError(f"not a message: {problem}") from None
