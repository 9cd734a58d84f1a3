"""penstock explain and diff: what each decision of a plan gains, and how two plans differ."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import face
from penstock.files import Json
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from penstock.search.candidate import Candidate
    from penstock.training.explain import ExplainedDecision, Gain, SeenPlan, Unlike

_AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
_PLACE = "A plan, or the folder of a run."


def explain(
    place: Annotated[Path, typer.Argument(metavar="PLAN|DIR", help=_PLACE)],
    as_json: _AsJson = False,
) -> None:
    """Show each decision of a plan: by whom, why, its predicted gain, and what was measured.

    The gain is that over the same plan with only this decision undone, simulated.

    Example: penstock explain runs/gpt
    """
    from penstock.training.explain import explained, row_of, seen, told

    found = seen(place)
    with face.busy("simulating the plan without each decision"):
        rows = explained(found)
    if as_json:
        decisions: list[Json] = [row_of(row) for row in rows]
        face.show_json({**told(found), "decisions": decisions})
    else:
        _show(found, rows)


def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help=_PLACE)],
    second: Annotated[Path, typer.Argument(metavar="B", help=_PLACE)],
    as_json: _AsJson = False,
) -> None:
    """Show how two plans differ, decision by decision, with what is predicted and was measured.

    Each difference is also simulated alone: A with this of B.

    Example: penstock diff runs/gpt runs/gpt.1
    """
    from penstock.training.explain import seen, told, unlike

    both = seen(first), seen(second)
    rows = list(unlike(*both))
    if as_json:
        documents: list[Json] = [told(each) for each in both]
        different: list[Json] = [_document(row) for row in rows]
        face.show_json({"plans": documents, "differences": different})
    else:
        _show_both(both, rows)


# -- explain ---------------------------------------------------------------------------------------


def _show(found: "SeenPlan", rows: "list[ExplainedDecision]") -> None:
    from penstock.pilot.phases import words_of_phases
    from penstock.pilot.replan_log import words_of

    face.show(f"{str(found.plan).splitlines()[0]}\n")
    for row in rows:
        face.show(f"{row.decision.what}: {row.decision.value} ({row.decision.by})")
        face.show(f"  why        {row.decision.why}")
        if row.gain is not None:
            face.show(f"  otherwise  {row.gain.otherwise}: {_gained(row.gain)}")
        if row.measured is not None:
            what, predicted_s, measured_s = row.measured
            both = f"{_seconds(predicted_s)} predicted, {_seconds(measured_s)} measured"
            face.show(f"  measured   {what}: {both}, a step, the mean of the ranks")
    if found.until is not None:
        face.show("\n".join(words_of_phases(found.until)))
    for again in found.replanned:
        face.show("\n".join(words_of(again)))
    face.show(f"\n{_table([found])}")
    if found.measured_s is not None:
        replayed = f"`penstock replay {found.place}` tells what they would be by measured seconds"
        face.say(f"other plans were not run, but in a trial; {replayed}")


def _gained(gain: "Gain") -> str:
    if not gain.peak_bytes:
        return f"not possible: {gain.refused}"
    words = f"{_seconds(gain.step_s)} and {format_bytes(gain.peak_bytes)}; "
    words += f"as decided {_signed(gain.gain_s, 'faster', 'slower', _seconds)}, "
    less = _signed(gain.gain_bytes, "less", "more", lambda size: format_bytes(int(size)))
    return words + less + (f"; {gain.refused}" if gain.refused else "")


def _signed(value: float, more: str, less: str, words: Callable[[float], str]) -> str:
    return "the same" if not value else f"{words(abs(value))} {more if value > 0 else less}"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)


def _table(plans: "list[SeenPlan]") -> str:
    """Return seconds and bytes of plans, predicted and measured."""
    rows: list[tuple[str, ...]] = []
    for each in plans:
        measured = max(each.measured_bytes, default=0)
        rows.append(
            (
                each.place,
                _seconds(each.own.step_s),
                _seconds(each.measured_s),
                format_bytes(each.peak_bytes),
                format_bytes(measured) if measured else "-",
            )
        )
    head = "plan", "step predicted", "measured", "fullest rank predicted", "measured"
    return face.table(head, rows)


# -- diff ------------------------------------------------------------------------------------------


def _show_both(both: "tuple[SeenPlan, SeenPlan]", rows: "list[Unlike]") -> None:
    if not rows:
        face.show("no difference")
    for row in rows:
        face.show(f"{row.what}: {row.values[0]} -> {row.values[1]}")
        for name, decision in zip("AB", row.decided, strict=True):
            if decision is not None:
                face.show(f"  {name}  {decision.value} ({decision.by}): {decision.why}")
        if row.alone is not None:
            face.show(f"  A with this of B: {_figures(row.alone, both[0])}")
    face.show(f"\n{_table([*both])}")


def _figures(found: "Candidate", own: "SeenPlan") -> str:
    peak = max(found.peak_bytes)
    gain = _signed(own.own.step_s - found.step_s, "faster", "slower", _seconds)
    words = f"{_seconds(found.step_s)} ({gain}), {format_bytes(peak)}"
    return words + (f"; {found.refused}" if found.refused else "")


def _document(row: "Unlike") -> dict[str, Json]:
    decided: list[Json] = [
        None if each is None else {"value": each.value, "by": each.by, "why": each.why}
        for each in row.decided
    ]
    alone = row.alone
    return {
        "what": row.what,
        "values": [*row.values],
        "decided": decided,
        "alone": None
        if alone is None
        else {
            "step_s": alone.step_s,
            "peak_bytes": max(alone.peak_bytes),
            "refused": alone.refused or None,
        },
    }
