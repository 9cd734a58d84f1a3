"""Listener: what a run reports to.  This one is silent; training/view.py has one that prints."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from penstock.training.results import Trained

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

    def finished(self, trained: "Trained") -> None:
        """Learn what a run gave, once it has ended."""


@final
class SaysOnly(Listener):
    """Hands on messages alone: of a rank beside the first, whose phases and steps are the same."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    def say(self, words: str) -> None:
        """Hand on a message."""
        self._listener.say(words)


SILENT = Listener()


def _nothing(*_: object) -> None:
    """Ignore it."""
