"""Guide: makes the plan of a run again between steps, where what was sampled has moved."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from penstock.runtime.sampler import Sampler
    from penstock.runtime.worker import Task
    from penstock.transport.transport import Transport


class Guide(Protocol):
    """What the ranks of a run ask; each has its own, with one aim."""

    def begun(self, rank: int, seconds: float) -> None:
        """Note that a rank is ready for the first window of a plan, and what it took to be."""
        ...

    def look(self, rank: int, step: int, sampler: "Sampler") -> None:
        """Take what a rank has sampled, after `step` steps; it may ask for another plan."""
        ...

    def probe(self, task: "Task", transport: "Transport") -> None:
        """Measure the links between hosts as they are now; every rank calls it."""
        ...

    def next(self, task: "Task", step: int, transport: "Transport") -> "Task":
        """Return what is done after `step` steps, in place of `task`; every rank calls it.

        A checkpoint of that step was written.
        """
        ...

    def shared(self, task: "Task", step: int, transport: "Transport") -> "Task":
        """Return what is done after `step` steps, in place of `task`; every rank calls it.

        Ranks keep what they hold: only who takes which micro-batches is another.
        """
        ...

    def ready(self, rank: int) -> None:
        """Note that a rank is ready for that."""
        ...
