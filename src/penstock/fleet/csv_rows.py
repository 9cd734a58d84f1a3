"""Rows: the cells of a CSV file, and columns of them as numbers, times or names.

Every error names the file and the row, counted from 1 as an editor counts lines.
"""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.errors import FleetError
from penstock.files import read_bytes

Floats: TypeAlias = NDArray[np.float64]


class RowError(FleetError):
    """A row that cannot be read, on a line of its file."""

    def __init__(self, place: str, line: int, what: str, *, hint: str) -> None:
        super().__init__(f"{place} row {line}: {what}", hint=hint)
        self.line = line


MOST = 1e15  # a number that is larger is a fault, and breaks sums
FORMAT = "docs/fleet.md has the format of a trace"


@dataclass(frozen=True, slots=True)
class CellRows:
    """Rows of equal length, as texts without spaces around them.

    place   the file, as errors name it
    lines   of each row, the line of the file on which it stands
    """

    place: str
    lines: Sequence[int]
    columns: tuple[tuple[str, ...], ...]

    def __len__(self) -> int:
        return len(self.columns[0])

    def fail(self, row: int, what: str, *, hint: str = FORMAT) -> RowError:
        """Return the error of one row, counted from 0; -1 for the header."""
        line = self.lines[row] if row >= 0 else 1
        return RowError(self.place, line, what, hint=hint)

    def numbers(self, column: int, name: str, *, least: float = 0.0) -> Floats:
        """Return a column of numbers.

        Raises:   FleetError: the first cell that is none, is below `least` or is beyond 1e15.
        """
        cells = self.columns[column]
        try:
            found = np.array(cells, np.float64)
        except ValueError:
            found = np.array([_number(cell) for cell in cells])
        checks = (
            (~np.isfinite(found), "not a number"),
            (found < least, f"below {least:g}"),
            (np.abs(found) > MOST, f"beyond {MOST:g}"),
        )
        for wrong, why in checks:
            if wrong.any():
                row = int(np.argmax(wrong))
                raise self.fail(row, f"{name} is {cells[row]!r:.60}, {why}")
        return found

    def seconds(self, columns: Sequence[int]) -> Floats:
        """Return date, or date and time in two columns, as seconds since 1970 in UTC.

        Raises:   FleetError: the first row that is no date.
        """
        cells = [" ".join(parts) for parts in zip(*(self.columns[k] for k in columns), strict=True)]
        known: dict[str, float] = {}
        for row, cell in enumerate(cells):
            if cell not in known:
                try:
                    moment = datetime.fromisoformat(cell)
                except ValueError as problem:
                    raise self.fail(row, f"{cell!r:.60} is no date") from problem
                known[cell] = moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()
        return np.array([known[cell] for cell in cells])


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return np.nan


def begin_of_file(path: Path, lines: int | None) -> bytes:
    """Return the first lines of a file, all of them for None.

    Raises:   FleetError: it cannot be read.
    """
    content = read_bytes(path, FleetError, "trace")
    return content if lines is None else b"".join(content.splitlines(keepends=True)[:lines])


def read_cells(path: Path, lines: int | None = None) -> tuple[tuple[str, ...], CellRows]:
    """Return the header of a CSV file, empty if it has none, and its rows; blank lines are none.

    lines     of it that are read
    Raises:   FleetError: nothing in it, not UTF-8, or a row of another length.
    """
    place = str(path)
    try:
        text = begin_of_file(path, lines).decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise FleetError(f"{place} is no text: {problem.reason}", hint=FORMAT) from problem
    try:
        found = [*enumerate(csv.reader(io.StringIO(text)), start=1)]
    except csv.Error as problem:
        raise FleetError(f"{place} is no CSV: {problem}", hint=FORMAT) from problem
    found = [(at, row) for at, row in found if row and any(cell.strip() for cell in row)]
    if not found:
        raise FleetError(f"{place} is empty", hint=FORMAT)
    header = () if _is_data(found[0][1]) else tuple(cell.strip() for cell in found[0][1])
    rows = found[1:] if header else found
    if not rows:
        raise FleetError(f"{place} has a header and no rows", hint=FORMAT)
    width = len(header or rows[0][1])
    for at, row in rows:
        if len(row) != width:
            raise RowError(place, at, f"{len(row)} cells, not {width}", hint=FORMAT)
    columns = tuple(
        tuple(cell.strip() for cell in column) for column in zip(*(r for _, r in rows), strict=True)
    )
    return header, CellRows(place, [at for at, _ in rows], columns)


def _is_data(row: Sequence[str]) -> bool:
    """Return whether a first row is data: it begins with a number or a date."""
    cell = row[0].strip()
    return bool(cell) and (cell[0].isdigit() or cell[0] in "+-.")
