"""View: what a run shows while it is prepared and made, and when it is done."""

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, cast

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from penstock import terminal
from penstock.job import ROW
from penstock.listener import Listener, Move, Row
from penstock.pilot.phases import until_in, words_of_phases
from penstock.plan.plan import Plan
from penstock.timeline.breakdown import parts_table
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from penstock.runtime.run import Outcome
    from penstock.training.results import Trained

_LOG_EVERY_S = 10.0  # where stderr is no terminal
_WITH_BAR = 100  # columns from which on there is room for a bar


class Terminal(Listener):
    """Reports on stderr: messages as lines, long work as a bar on a terminal."""

    def say(self, words: str) -> None:
        """Print a message."""
        terminal.say(words)

    def busy(self, what: str) -> AbstractContextManager[None]:
        """Show what is being done."""
        return terminal.busy(what)

    def progress(self, what: str) -> AbstractContextManager[Move]:
        """Show a bar."""
        return terminal.progress(what)

    def steps(
        self, first_step: int, num_steps: int, predicted_s: float | None
    ) -> AbstractContextManager[Callable[[Row], None]]:
        """Show loss, speed and predicted beside measured."""
        return training(first_step, num_steps, predicted_s)

    def finished(self, trained: "Trained") -> None:
        """Print predicted beside measured, the bottleneck, and the folder."""
        show_trained(trained)


TERMINAL = Terminal()


@contextmanager
def training(
    first_step: int, num_steps: int, predicted_s: float | None
) -> Generator[Callable[[Row], None]]:
    """Show loss, speed and predicted beside measured: a bar on a terminal, else a line at times."""
    has_bar = terminal.err.width >= _WITH_BAR
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        *([BarColumn(20)] if has_bar else []),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    bars = Progress(*columns, console=terminal.err, auto_refresh=False)
    bars.disable = not terminal.err.is_terminal
    used = len("step  0:00:00  ") + 2 * len(f"{num_steps}") + 2 + (21 if has_bar else 0)
    room = terminal.err.width - used
    last_line = time.monotonic()
    with bars:
        bar = bars.add_task("", total=num_steps, completed=first_step)

        def show(row: Row) -> None:
            nonlocal last_line
            text = step_words(row, predicted_s, room)
            bars.update(bar, completed=row["step"], description=text, refresh=True)
            now, over = time.monotonic(), row["step"] == num_steps
            is_first = row["step"] == first_step + 1
            if bars.disable and (over or is_first or now - last_line > _LOG_EVERY_S):
                terminal.say(f"step {row['step']}/{num_steps}  {text}")
                last_line = now

        yield show


def step_words(row: Row, predicted_s: float | None, room: int) -> str:
    """Return what a row tells, as much as there is room for: first loss and seconds."""
    tokens, samples = row["tokens_per_second"], row["samples_per_second"]
    rate = f"{tokens:,.0f} tokens/s" if tokens else f"{samples:,.1f} samples/s" if samples else ""
    predicted = f" (predicted {format_seconds(predicted_s)})" if predicted_s else ""
    seconds = f"{format_seconds(row['seconds'] or 0.0)}{predicted}"
    others = [name for name in row if name not in ROW and name != "val_seconds"]
    shown = ((name.replace("_", " "), row[name]) for name in ("loss", *others))
    loss, *figures = [f"{name} {value:.4f}" for name, value in shown if value is not None] or [""]
    text = loss
    for part in (seconds, rate, *figures):
        longer = f"{text}  {part}" if text and part else text or part
        text = longer if len(longer) <= room else text
    return text


def show_trained(trained: "Trained") -> None:
    """Print the result, predicted beside measured, its bottleneck, and where it is."""
    outcome = trained.outcome
    _show_outcome(outcome, trained.plan)
    if isinstance(saved := trained.summary.get("checkpointing"), dict):
        terminal.say(_checkpoints(cast("dict[str, float]", saved)))
    if outcome.breakdown is not None:
        parts = parts_table(outcome.breakdown, trained.predicted)
        terminal.say(f"\n{parts}\n{trained.bottleneck}\n")
    if (told := until_in(trained.folder)) is not None:
        terminal.say("\n".join(words_of_phases(told)))
    terminal.say(f"written to {trained.folder}: open {trained.folder / 'report.html'}")


def _checkpoints(saved: Mapping[str, float]) -> str:
    """Return a line on the checkpoints that were written beside the steps."""
    blocked, most = (format_seconds(saved[name]) for name in ("blocked_s", "most_blocked_s"))
    size, late = format_bytes(int(saved["bytes"])), saved["waited"] + saved["postponed"]
    tail = f"; {late:.0f} waited for the one before" if late else ""
    every = saved["every_s"]
    tail += f"; the last interval was {format_seconds(every)}, by failures" if every else ""
    return (
        f"checkpoints written beside the steps: {saved['beside']:.0f} of {size}; "
        f"training stood still for {blocked} each, {most} at most{tail}"
    )


def _show_outcome(outcome: "Outcome", plan: Plan | None) -> None:
    guess = plan.predicted if plan else None
    rows = [("seconds per step", *_pair(guess and guess.step_s, outcome.step_s, format_seconds))]
    for rank, size in enumerate(outcome.peak_bytes):
        expected = guess.peak_bytes[rank] if guess else None
        rows.append((f"peak bytes of rank {rank}", *_pair(expected, size, format_bytes)))
    terminal.say(terminal.table(("", "predicted", "measured", "error"), rows))


def words_of(summary: Mapping[str, object]) -> str:
    """Return what the run and the job report, a line each; the tables above have the rest."""
    left_out = ("steps", "checked", "step_s_", "peak_bytes", "cap_bytes", "live_versions")
    left_out += ("breakdown", "bottleneck", "replanned", "generations", "sampling", "checkpointing")
    left_out += ("until", "machines", "audited_to", "audits")
    left_out += ("held_bytes", "far_bytes", "flop_per_s", "mfu")
    shown = ((k, v) for k, v in summary.items() if v is not None and not k.startswith(left_out))
    rows = [(k.replace("_", " "), v) for k, v in shown]
    return "\n".join(f"{k}: {f'{v:.4f}' if isinstance(v, float) else v}" for k, v in rows)


def _pair(guess: float | None, found: float, words: Callable[[float], str]) -> tuple[str, str, str]:
    if not guess:
        return "-", words(found) if found else "-", "-"
    error = f"{100 * (guess / found - 1):+.1f} %" if found else "-"
    return words(guess), words(found), error
