"""penstock watch: how a run stands, in the terminal, as a page that redraws itself, or once."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import face

if TYPE_CHECKING:
    from penstock.report.inputs import Generation, Pair
    from penstock.report.watched import Watch, Watched

_EVERY_S = 1.0
_MOST = 8  # changes and checkpoints that the terminal lists


def watch(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What `penstock train` writes.")],
    page: Annotated[
        bool, typer.Option("--page", help="Serve a page on this host, until Ctrl-C.")
    ] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Of the page; default: a free one.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show how a run stands: ranks, step, loss, speed, what losses cost, checkpoints.

    In a terminal it is redrawn until the run has ended; elsewhere it is printed once.

    Example: penstock watch runs/gpt --page
    """
    from penstock.report.watched import Watch

    watched = _begun(folder) if (page or port) and not as_json else Watch(folder)
    if as_json:
        face.show_json(_look(watched).to_json())
    elif page or port:
        _serve(watched, port)
    else:
        _redraw(watched)


def _begun(folder: Path) -> "Watch":
    """Return the watch of a run, once there is one: a page may be opened before.

    Raises:   ReportError: the folder is a file.
    """
    from penstock.report.watched import Watch, is_run

    if not is_run(folder) and not folder.is_file():
        face.say(f"waiting for a run in {folder}; Ctrl-C ends it")
        while not is_run(folder):
            time.sleep(_EVERY_S)
    return Watch(folder)


def _look(watched: "Watch") -> "Watched":
    from penstock.training.lock import is_held

    return watched.look(time.time(), is_held=is_held(watched.folder))


def _serve(watched: "Watch", port: int) -> None:
    from penstock.report.live import LivePage

    _look(watched)  # what is damaged is told here
    with LivePage(port, lambda: _look(watched)) as served:
        face.show(served.address)
        face.say("Ctrl-C ends it")
        try:
            served.serve_forever()
        except KeyboardInterrupt:
            return


def _redraw(watched: "Watch") -> None:
    """Show the run until it has ended; where stdout is no terminal, once."""
    from rich.live import Live
    from rich.text import Text

    told = _look(watched)
    if not face.out.is_terminal:
        face.show(words_of(told))
        return
    # Drawn by this thread, at the pace of the files.
    with Live(Text(words_of(told)), console=face.out, auto_refresh=False) as live:
        while told.state == "running":
            time.sleep(_EVERY_S)
            told = _look(watched)
            live.update(Text(words_of(told)), refresh=True)


def words_of(told: "Watched") -> str:
    """Return how a run stands, in lines."""
    from penstock.report.figure_words import bytes_text, number_text, seconds_text
    from penstock.report.live import state_words

    lines = [f"{told.folder}: {state_words(told)}", ""]
    rows = [("loss", "", number_text(told.loss))]
    rows.append(("step time", *_both(told.step_s, seconds_text)))
    rates = ("tokens/s", told.tokens_per_s), ("samples/s", told.samples_per_s)
    rows += [(name, *_both(pair, _rate)) for name, pair in rates if pair.measured is not None]
    lines += [face.table(("", "predicted", "measured"), rows)]
    if told.ranks:
        lines += ["", face.table(("rank", "is", "step"), _ranks(told))]
    if told.changes:
        head = ("after step", "generation", "what", "cost", "moved", "a step then, predicted")
        changes = [_change(each) for each in told.changes[-_MOST:]]
        lines += ["", face.table(head, changes)]
    if told.inputs.changes.machines:
        from penstock.report.wanted import HEAD, wanted_rows

        lines += ["", face.table(HEAD, wanted_rows(told.inputs.changes.machines)[-_MOST:])]
    if told.checkpoints:
        kept = [(f"{e.step:,}", bytes_text(e.size_bytes)) for e in told.checkpoints[-_MOST:]]
        lines += ["", face.table(("checkpoint after", "size"), kept)]
    return "\n".join(lines).replace("\N{MINUS SIGN}", "-")


def _ranks(told: "Watched") -> list[tuple[str, str, str]]:
    now = "works" if told.state == "running" else "worked to the end"
    return [
        (f"{rank.member}", now if rank.works else rank.how, f"{rank.step:,}") for rank in told.ranks
    ]


def _both(pair: "Pair", words: "Words") -> tuple[str, str]:
    return words(pair.predicted), words(pair.measured)


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.0f}"


def _change(each: "Generation") -> tuple[str, ...]:
    from penstock.report.figure_words import bytes_text, seconds_text

    who = ", ".join(f"{member} {how}" for member, how in each.gone.items())
    return (
        f"{each.step:,}",
        f"{each.generation}",
        each.what + (f": {who}" if who else ""),
        seconds_text(each.cost_s),
        bytes_text(each.moved_bytes),
        seconds_text(each.predicted_step_s),
    )


if TYPE_CHECKING:
    from collections.abc import Callable

    Words = Callable[[float | None], str]
