"""Listener: what a run reports to.  This one is silent; a face overrides it."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

Row = Mapping[str, float | int | None]
Move = Callable[[int, int], None]  # (done, total)


class Listener:
    """Gets what a person would like to know while a run is prepared and made."""

    def say(self, words: str) -> None:
        """Take a message, one or more lines of it."""

    def busy(self, what: str) -> AbstractContextManager[None]:
        """Learn that something is being done, until it is."""
        return nullcontext()

    def progress(self, what: str) -> AbstractContextManager[Move]:
        """Learn how far something is, by calls of what is yielded."""
        return nullcontext(_nothing)

    def steps(
        self, first_step: int, num_steps: int, predicted_s: float | None
    ) -> AbstractContextManager[Callable[[Row], None]]:
        """Learn of the steps from `first_step` on, by a call with the row of each."""
        return nullcontext(_nothing)


SILENT = Listener()


def _nothing(*_: object) -> None:
    """Ignore it."""
