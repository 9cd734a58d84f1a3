"""Terminal: what people read on stderr while something is done: a bar there, else a line.

Where stderr is no terminal, each thing that is begun has its line at once, and every ten seconds
another that says how far it is.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn

_LINE_EVERY_S = 10.0
_DRAWN_EVERY_S = 0.1
_WIDE = 10_000  # columns of what is no terminal: nothing is wrapped or shortened


def console(*, stderr: bool) -> Console:
    """Return what draws on stderr, or on stdout."""
    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    width = None if is_terminal else _WIDE
    return Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


err = console(stderr=True)


def say(message: str) -> None:
    """Print a message to stderr; if nobody can read it, it is lost."""
    with contextlib.suppress(OSError):
        print(message, file=sys.stderr, flush=True)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return aligned columns, numbers to the right; no line ends in a space."""
    cells = [tuple(map(str, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    right = [all(row[at][:1].isdigit() for row in cells) for at in range(len(head))]

    def line(row: Sequence[str]) -> str:
        padded = zip(row, widths, right, strict=True)
        return "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in padded).rstrip()

    return "\n".join(map(line, (head, *cells)))


@contextlib.contextmanager
def busy(what: str) -> Generator[None, None, None]:
    """Show what is being done until it is; a line where stderr is no terminal."""
    with _live(what, TextColumn("{task.description} ...")):
        yield


@contextlib.contextmanager
def progress(what: str) -> Generator[Callable[[int, int], None], None, None]:
    """Show a bar; the call that is yielded moves it: (done, total or 0).

    It may be called as often as one likes: what is shown changes at times.
    """
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    last_s = time.monotonic()
    with _live(what, *columns) as bars:

        def tell(done: int, total: int) -> None:
            nonlocal last_s
            now_s = time.monotonic()
            if now_s - last_s < (_LINE_EVERY_S if bars.disable else _DRAWN_EVERY_S):
                return
            last_s = now_s
            if bars.disable:
                say(f"{what}: {done:,} of {total:,}" if total else f"{what}: {done:,}")
            for task in bars.task_ids:
                bars.update(task, completed=done, total=total or None, refresh=True)

        yield tell


@contextlib.contextmanager
def _live(what: str, *columns: ProgressColumn) -> Generator[Progress, None, None]:
    bars = Progress(*columns, console=err, transient=True, auto_refresh=False)
    bars.disable = not err.is_terminal
    if bars.disable:
        say(f"{what} ...")
    with bars:
        bars.add_task(what, total=None)
        bars.refresh()
        yield bars
