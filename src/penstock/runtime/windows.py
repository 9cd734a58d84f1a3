"""Windows: which program runs next.  Every rank asks between windows, and all get one answer."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from penstock.program.program import Program


@dataclass(frozen=True, slots=True)
class Windows:
    """The windows of a run, one after another.

    first_step:  of the run.
    ask:         step -> the program of the window that begins with it; None: the run is over.  It
                 is asked when all steps before are done, more than once, and on every rank.
    programs:    all that `ask` may return; they are bound before the first window.
    """

    first_step: int
    ask: Callable[[int], Program | None]
    programs: tuple[Program, ...]

    def __iter__(self) -> Iterator[tuple[Program, int]]:
        """Yield (program, first step), as the answers are now."""
        step = self.first_step
        while (program := self.ask(step)) is not None:
            yield program, step
            step += program.num_steps

    def count(self, most: int) -> int:
        """Return how many windows there are, or `most` if there are more."""
        return sum(1 for _ in islice(self, most))


def repeated(program: Program, steps: range) -> Windows:
    """Return the windows of one program, until `steps` are done."""
    return Windows(steps.start, lambda step: program if step < steps.stop else None, (program,))
