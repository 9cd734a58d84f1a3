"""Calling: who knows the token of a run, and is none of its ranks, asks one of them.

So a newcomer learns who is there, and `penstock stop` ends a run.  It needs no torch.
"""

import contextlib
import secrets
from collections.abc import Callable, Generator
from typing import NamedTuple

from penstock.errors import RunError
from penstock.members.mesh import Mesh, address_towards, listening, where_of
from penstock.members.words import Ask, Stop, Welcome, Where

_FIRST_NEWCOMER = 2**20  # numbers below are those of members that began the run


def introduced(where: Where, token: bytes) -> Welcome:
    """Return what a member of a run tells of it to who knows its token.

    Raises:   RunError: no such host; nobody is there, or does not take the token.
    """
    with _calling(where, token) as caller:
        return caller.mesh.call(where, Ask(caller.where, "", ()))


@contextlib.contextmanager
def _calling(where: Where, token: bytes) -> "Generator[Caller]":
    """Yield who can call a member of a run without being one.

    Raises:   RunError: no such host.
    """
    try:
        own = address_towards(where.host)
    except OSError as problem:
        raise RunError(f"{where.host} cannot be reached: {problem.strerror}") from problem
    caller = newcomer(Where(own, 0, ""), token, "")
    caller.mesh.start()
    try:
        yield caller
    finally:
        caller.mesh.close()


def ask_to_stop(where: Where, token: bytes) -> None:
    """Ask a member of a run, as one that knows its token, to end the run with a checkpoint.

    Raises:   RunError: as `introduced`.
    """
    with _calling(where, token) as caller:
        caller.mesh.call(where, Ask(caller.where, "", ()))
        caller.mesh.tell(Stop())


class Caller(NamedTuple):
    """A newcomer: its lines, where it listens, and the digest of the step that it has traced.

    in_vain: whether it need not wait any more: it has to go, or the run is over.
    """

    mesh: Mesh
    where: Where
    graph: str
    in_vain: Callable[[], bool] = lambda: False


def newcomer(at: Where, token: bytes, graph: str) -> Caller:
    """Return a newcomer that listens at the host of `at`; no other member has its number."""
    listens = listening(at.host)
    number = _FIRST_NEWCOMER + secrets.randbelow(2**40)
    return Caller(Mesh(number, listens, token), where_of(listens, at.key, at.pool), graph)
