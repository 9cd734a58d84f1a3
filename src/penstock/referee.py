"""Referee: which gradients a server takes, in which order, and when a rank gets weights again.

    backup:K   the gradients of the first n - K ranks that are ready make a step, by their mean;
               what comes later of that step is dropped
    ssp:S      each gradient is an update; no rank begins a step that is more than S steps ahead of
               the slowest rank's (stale synchronous parallel)
    async      each gradient is an update, and nobody waits

Real time decides here and nowhere else.  Each decision is a row; with the rows of another run a
referee decides as that one did, however ranks come.

Source:  arXiv:1604.00981 (backup workers), "More effective distributed ML via a stale synchronous
         parallel parameter server", 2013 (SSP), arXiv:1511.05950 (rate divided by staleness).
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, final

from penstock.errors import RunError
from penstock.sums import SumsWay

SERVER = 0  # the rank beside which it is
_SAVES = "take the checkpoint_every of the run that is replayed"


class ServedUpdate(NamedTuple):
    """A decision: an update of a server, by the mean gradient of ranks.

    version:  of the weights before it: as many updates came before.
    step:     of the run, of these ranks.
    ranks:    whose gradients it takes.
    read:     the version of the weights that they are gradients of.
    """

    version: int
    step: int
    ranks: tuple[int, ...]
    read: int

    @property
    def staleness(self) -> int:
        """Return the number of updates between the weights of its gradient and those it updates."""
        return self.version - self.read


class ServedAnswer(NamedTuple):
    """What a rank is told: that it may go on.

    renews:   whether it gets the weights as they are now; else it has the right ones.
    is_still: whether nothing moves until the one who writes a checkpoint is done.
    """

    rank: int
    renews: bool = True
    is_still: bool = False


@final
class Referee:
    """Decides for a server and `ranks` ranks, all of which have done `first_step` steps.

    script:  rows that are decided already, from that step on.
    """

    def __init__(
        self, way: SumsWay, ranks: int, first_step: int, script: Sequence[ServedUpdate] = ()
    ) -> None:
        self.way, self.script = way, deque(script)
        self.is_backup = way.kind == "backup"
        self.version = first_step * (1 if self.is_backup else ranks)
        self.wanted = ranks - int(way.amount) if self.is_backup else 1
        self.done = dict.fromkeys(range(ranks), first_step)  # steps, of ranks that go on
        self.pushed: dict[int, tuple[int, int]] = {}  # by rank, in the order of their coming
        self.waits: set[int] = set()  # for weights
        self.still: set[int] = set()  # where a checkpoint is written

    def push(self, rank: int, step: int, read: int) -> Iterator[ServedUpdate | ServedAnswer]:
        """Yield what follows from a gradient that has come, one after the other.

        step:  of the run, that the rank has computed; read: the version of the weights that it is
               a gradient of.
        Raises:   RunError: what was decided in another run cannot come to pass.
        """
        if self.is_backup and read < self.version:
            yield ServedAnswer(rank)
            return
        self.pushed[rank] = step, read
        yield from self._decided()

    def save(self, rank: int) -> Iterator[ServedUpdate | ServedAnswer]:
        """Yield what follows where a rank has come to where a checkpoint is written."""
        self.still.add(rank)
        yield from self._decided()

    def leave(self, rank: int) -> Iterator[ServedUpdate | ServedAnswer]:
        """Yield what follows where a rank is done with its steps."""
        self.done.pop(rank)
        yield from self._decided()

    def _decided(self) -> Iterator[ServedUpdate | ServedAnswer]:
        moved = False
        while taken := self._next():
            moved = True
            if self.script:
                self.script.popleft()
            yield taken
            self.version += 1
            over = [*self.pushed] if self.is_backup else taken.ranks
            for rank in over:
                step, _ = self.pushed.pop(rank)
                self.done[rank] = self.version if self.is_backup else step + 1
                self.waits.add(rank)
            yield from self._released()
        for answer in self._released():
            moved = True
            yield answer
        if self.still and self.still >= self.done.keys():
            for rank in sorted(self.still):
                yield ServedAnswer(rank, self._read_of(rank) is None, is_still=True)
            self.still.clear()
        elif self.script and self.still and not moved and self._is_stuck():
            message = f"ranks write a checkpoint after {self.version} updates"
            raise RunError(f"{message}, and the run that is replayed wrote none", hint=_SAVES)

    def _next(self) -> ServedUpdate | None:
        """Return the next update, if what it takes is there."""
        if self.script:
            taken = self.script[0]
            return taken if set(taken.ranks) <= self.pushed.keys() else None
        if not self.pushed or (self.is_backup and len(self.pushed) < self._enough()):
            return None
        ranks = tuple(sorted([*self.pushed][: self._enough()]))
        step, read = self.pushed[ranks[0]]
        return ServedUpdate(self.version, step, ranks, read)

    def _enough(self) -> int:
        return min(self.wanted, max(1, len(self.done)))

    def _released(self) -> Iterator[ServedAnswer]:
        for rank in sorted(self.waits):
            if self._may_go(rank):
                self.waits.discard(rank)
                yield ServedAnswer(rank)

    def _may_go(self, rank: int) -> bool:
        read = self._read_of(rank)
        if read is not None and not self.is_backup:
            return read == self.version
        if self.way.kind == "ssp":
            return self.done[rank] - min(self.done.values()) <= int(self.way.amount)
        return True

    def _read_of(self, rank: int) -> int | None:
        """Return which version a rank has to read next, if that is decided already."""
        return next((row.read for row in self.script if rank in row.ranks), None)

    def _is_stuck(self) -> bool:
        return self.done.keys() <= self.still | self.waits | self.pushed.keys()
