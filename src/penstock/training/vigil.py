"""Vigil: the ranks of a torchrun job know of each other's deaths before they are connected.

torchrun tells nobody on other hosts that a rank has died, and torch waits half an hour for one that
does not come.  So each rank has a line to rank 0, and one that ends tells all.  Whoever waits for
others then ends at once; who waits inside torch, which cannot be told, after some seconds.

Ignores:  a rank that dies before it has called rank 0: it is waited for as long as hosts may take
          to start.  That strangers who reach the store may end a run: torchrun's own store is open.
"""

import json
import os
import secrets
import sys
import threading
from typing import final

from penstock.errors import RunError
from penstock.members.mesh import Mesh, listening, where_of
from penstock.members.words import Failed, Where, WireError

SILENT_S = 30.0  # a rank that compiles or traces may hold on to the interpreter
_GRACE_S = 10.0


@final
class Vigil:
    """One rank's line to rank 0, or rank 0's lines to all; begun by all of them.

    problem:  why the job cannot begin; "": it can.
    """

    def __init__(self, rank: int, address: str, token: bytes = b"") -> None:
        self.problem = ""
        self._rank, self._is_open = rank, True
        self._token = token or secrets.token_bytes(16)
        listener = listening(address)
        self.where = where_of(listener, "")
        self._mesh = Mesh(rank, listener, self._token, on_change=self._changed, silent_s=SILENT_S)
        self._mesh.start()

    def told(self) -> str:
        """Return what the others need to call rank 0."""
        return json.dumps([self.where, self._token.hex()])

    def call(self, where: Where) -> None:
        """Connect to rank 0.

        Raises:   RunError: it is not there.
        """
        try:
            self._mesh.connect({0: where})
        except WireError as problem:
            raise RunError(f"rank 0 cannot be reached at {where.host}:{where.port}") from problem
        self._changed()

    def fail(self, words: str) -> None:
        """Tell all that this rank has failed."""
        self._is_open = False
        self._mesh.tell(Failed(words, ""))

    def _changed(self) -> None:
        """A rank is lost, or has failed: tell all, and end this process should it not end."""
        mesh = self._mesh
        lost = {member: how for member, how in mesh.lost.items() if how != "left"}
        if self.problem or not self._is_open or not (lost or mesh.failed):
            return
        if mesh.failed is not None:
            self.problem = mesh.failed.message
        else:
            member, how = next(iter(lost.items()))
            words = "died" if how == "died" else f"was silent for {SILENT_S:.0f} s"
            self.problem = f"rank {member} {words} before all were connected"
        if self._rank == 0:
            mesh.tell(Failed(self.problem, ""))
        timer = threading.Timer(_GRACE_S, self._end)
        timer.daemon = True
        timer.start()

    def _end(self) -> None:
        if self._is_open:
            sys.stderr.write(f"error: {self.problem}\n")
            sys.stderr.flush()
            os._exit(1)

    def close(self) -> None:
        """Leave: what becomes of this rank from now on is told otherwise."""
        if self._mesh.is_open:
            self._is_open = False
            self._mesh.close()
