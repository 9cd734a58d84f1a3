"""View: what `penstock train` shows while it runs and when it is done."""

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, cast

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from penstock.cli import face
from penstock.job import ROW
from penstock.plan.plan import Plan
from penstock.timeline.breakdown import parts_table
from penstock.training.listener import Listener, Move, Row
from penstock.training.phases import until_in, words_of_phases
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from penstock.runtime.run import Outcome
    from penstock.training.results import Trained

_LOG_EVERY_S = 10.0  # where stderr is no terminal


class Terminal(Listener):
    """Reports on stderr: messages as lines, long work as a bar on a terminal."""

    def say(self, words: str) -> None:
        """Print a message."""
        face.say(words)

    def busy(self, what: str) -> AbstractContextManager[None]:
        """Show what is being done."""
        return face.busy(what)

    def progress(self, what: str) -> AbstractContextManager[Move]:
        """Show a bar."""
        return face.progress(what)

    def steps(
        self, first_step: int, num_steps: int, predicted_s: float | None
    ) -> AbstractContextManager[Callable[[Row], None]]:
        """Show loss, speed and predicted beside measured."""
        return training(first_step, num_steps, predicted_s)


TERMINAL = Terminal()


@contextmanager
def training(
    first_step: int, num_steps: int, predicted_s: float | None
) -> Generator[Callable[[Row], None]]:
    """Show loss, speed and predicted beside measured: a bar on a terminal, else a line at times."""
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    bars = Progress(*columns, console=face.err, auto_refresh=False)
    bars.disable = not face.err.is_terminal
    last_line = time.monotonic()
    with bars:
        bar = bars.add_task("", total=num_steps, completed=first_step)

        def show(row: Row) -> None:
            nonlocal last_line
            text = _words(row, predicted_s)
            bars.update(bar, completed=row["step"], description=text, refresh=True)
            now, over = time.monotonic(), row["step"] == num_steps
            if bars.disable and (over or now - last_line > _LOG_EVERY_S):
                face.say(f"step {row['step']}/{num_steps}  {text}")
                last_line = now

        yield show


def _words(row: Row, predicted_s: float | None) -> str:
    speed = row["tokens_per_second"], row["samples_per_second"]
    samples = f"{speed[1]:,.1f} samples/s" if speed[1] else ""
    rate = f"{speed[0]:,.0f} tokens/s" if speed[0] else samples
    predicted = f" (predicted {format_seconds(predicted_s)})" if predicted_s else ""
    others = [name for name in row if name not in ROW and name != "val_seconds"]
    shown = ((name.replace("_", " "), row[name]) for name in ("loss", *others))
    figures = "  ".join(f"{name} {value:.4f}" for name, value in shown if value is not None)
    return f"{figures}  {rate}  {format_seconds(row['seconds'] or 0.0)}{predicted}"


def show_trained(trained: "Trained") -> None:
    """Print the result, predicted beside measured, its bottleneck, and where it is."""
    outcome = trained.outcome
    _show_outcome(outcome, trained.plan)
    if isinstance(saved := trained.summary.get("checkpointing"), dict):
        face.say(_checkpoints(cast("dict[str, float]", saved)))
    if outcome.breakdown is not None:
        parts = parts_table(outcome.breakdown, trained.predicted)
        face.say(f"\n{parts}\n{trained.bottleneck}\n")
    if (told := until_in(trained.folder)) is not None:
        face.say("\n".join(words_of_phases(told)))
    face.say(f"written to {trained.folder}: open {trained.folder / 'report.html'}")


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
    face.say(face.table(("", "predicted", "measured", "error"), rows))


def words_of(summary: Mapping[str, object]) -> str:
    """Return what the run and the job report, a line each; the tables above have the rest."""
    left_out = ("steps", "checked", "step_s_", "peak_bytes", "cap_bytes", "live_versions")
    left_out += ("breakdown", "bottleneck", "replanned", "generations", "sampling", "checkpointing")
    left_out += ("until", "machines", "audited_to", "audits")
    shown = ((k, v) for k, v in summary.items() if v is not None and not k.startswith(left_out))
    rows = [(k.replace("_", " "), v) for k, v in shown]
    return "\n".join(f"{k}: {f'{v:.4f}' if isinstance(v, float) else v}" for k, v in rows)


def _pair(guess: float | None, found: float, words: Callable[[float], str]) -> tuple[str, str, str]:
    if not guess:
        return "-", words(found) if found else "-", "-"
    error = f"{100 * (guess / found - 1):+.1f} %" if found else "-"
    return words(guess), words(found), error
