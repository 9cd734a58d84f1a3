"""Table: the rows of a CSV of runs, each made into a sample or refused with its number."""

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from penstock.errors import EstimateError
from penstock.estimate.row import Line
from penstock.estimate.sample import Sample
from penstock.files import read_bytes


class RunTable(NamedTuple):
    """The samples of a file, how many rows were skipped because the run failed, and what was
    taken for columns that the file has not.
    """

    layout: str
    samples: tuple[Sample, ...]
    skipped: int
    taken: tuple[str, ...] = ()


Build = Callable[[Line], Sample | None]


def read_rows(path: Path, layout: str, build: Build) -> RunTable:
    """Return the rows of a file, each made by `build`; None is a run that failed.

    Raises:   EstimateError: not there, no CSV, text where a number must be, an impossible
              configuration, or no usable row.
    """
    _, rows = read_lines(path)
    found = [_sample(row, build) for row in rows]
    samples = tuple(sample for sample in found if sample is not None)
    if not samples:
        message = f"{path} has no row to use: {len(rows)} rows, none with a measured time"
        raise EstimateError(message, hint="give a file with at least one finished run")
    return RunTable(layout, samples, len(found) - len(samples))


def read_head(path: Path) -> list[str]:
    """Return the names of the columns of a file.

    Raises:   EstimateError: not there, no CSV, empty.
    """
    return read_lines(path)[0]


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
        unprintable = next((cell for cell in line if not cell.isprintable()), None)
        if unprintable is not None:
            message = f"{path}, row {at}: a cell is {unprintable!r}"
            raise EstimateError(message, hint="a cell is one line of printable text")
        rows.append(Line(f"{path}, row {at}", dict(zip(head, line, strict=True))))
    return head, rows
