"""Table: a CSV of measured runs, in the layout of any of the sets that are published."""

import csv
import io
from pathlib import Path
from typing import NamedTuple

from penstock.errors import EstimateError
from penstock.estimate.layouts import LAYOUTS, Build, Sample
from penstock.estimate.row import Line
from penstock.files import read_bytes

_HINT = "see docs/estimate.md for the columns that are known"


class RunTable(NamedTuple):
    """The samples of a file, and how many rows were skipped because the run failed."""

    layout: str
    samples: tuple[Sample, ...]
    skipped: int


def read(path: Path) -> RunTable:
    """Return the rows of a file.

    Raises:   EstimateError: not there, no CSV, columns of no known layout, text where a number
              must be, an impossible configuration, or no usable row.
    """
    head, rows = read_lines(path)
    layout = next((layout for layout in LAYOUTS if layout.columns <= set(head)), None)
    if layout is None:
        raise EstimateError(f"{path} has columns of no known layout: {_short(head)}", hint=_HINT)
    found = [_sample(row, layout.build) for row in rows]
    samples = tuple(sample for sample in found if sample is not None)
    if not samples:
        message = f"{path} has no row to use: {len(rows)} rows, none with a measured time"
        raise EstimateError(message, hint="give a file with at least one finished run")
    return RunTable(layout.name, samples, len(found) - len(samples))


def _sample(row: Line, build: Build) -> Sample | None:
    try:
        return build(row)
    except EstimateError as problem:
        if problem.message.startswith(row.place):
            raise
        raise EstimateError(f"{row.place}: {problem.message}", hint=problem.hint) from problem


def read_lines(path: Path) -> tuple[list[str], list[Line]]:
    """Return the head and the rows of a CSV file.

    Raises:   EstimateError: not there, no CSV, empty, or a row with another number of cells.
    """
    content = read_bytes(path, EstimateError, "table")
    try:
        file = io.StringIO(content.decode("utf-8-sig"), newline="")
        lines = [line for line in csv.reader(file, strict=True) if any(line)]
    except (UnicodeDecodeError, csv.Error) as problem:
        raise EstimateError(f"{path} is not CSV: {problem}", hint="give a CSV file") from problem
    if not lines:
        raise EstimateError(f"{path} is empty", hint="the first line must name the columns")
    head = [name.strip() for name in lines[0]]
    rows: list[Line] = []
    for at, line in enumerate(lines[1:], start=2):
        if len(line) != len(head):
            message = f"{path}, row {at}: {len(line)} cells for {len(head)} columns"
            raise EstimateError(message, hint="each row must have a cell for every column")
        rows.append(Line(f"{path}, row {at}", dict(zip(head, line, strict=True))))
    return head, rows


def _short(names: list[str]) -> str:
    text = ", ".join(names)
    return text if len(text) <= 80 else text[:77] + "..."
