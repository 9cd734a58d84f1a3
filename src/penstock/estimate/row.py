"""Row: one line of a table of runs, whose cells are checked when they are read."""

import math
from dataclasses import dataclass

from penstock.errors import EstimateError

FAILED = {
    "", "-", "nan", "na", "n/a", "none", "null", "inf", "-inf", "infinity", "oom",
    "out of memory", "failed", "fail", "error",
}  # fmt: skip
_MOST = 10**9  # of what is counted
_LEAST, _LARGEST = 1e-12, 1e18  # of what is measured, in any unit: beyond them it is a mistake


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a file, by column."""

    place: str
    cells: dict[str, str]

    def has(self, column: str) -> bool:
        """Return whether a cell is there and not empty."""
        return bool(self.cells.get(column, "").strip())

    def text(self, column: str) -> str:
        """Return a cell as it is."""
        return self.cells[column].strip()

    def number(self, column: str) -> float:
        """Return a cell as a positive number.

        Raises:   EstimateError: it is not one.
        """
        return self.number_in(column, self.text(column))

    def number_in(self, column: str, text: str, most: float = _LARGEST) -> float:
        """Return a part of a cell as a positive number of at most `most`.

        Raises:   EstimateError: it is not one.
        """
        try:
            value = float(text) if text.isascii() and "_" not in text else math.nan
        except ValueError:
            value = math.nan
        if not _LEAST <= value <= _LARGEST:
            message = f"{self.place}: {column} is {self.text(column)!r}, not a positive number"
            raise EstimateError(message, hint="correct the cell, or remove the row")
        if value > most:
            message = f"{self.place}: {column} is {self.text(column)}"
            raise EstimateError(message, hint=f"it can be {most:,} at most")
        return value

    def integer(self, column: str, most: int = _MOST) -> int:
        """Return a cell as a whole number from 1 to `most`.

        Raises:   EstimateError: it is not one.
        """
        value = self.number(column)
        if value == int(value) and value > most:
            message = f"{self.place}: {column} is {self.text(column)}"
            raise EstimateError(message, hint=f"it can be {most:,} at most")
        if value != int(value):
            message = f"{self.place}: {column} is {self.text(column)!r}, not a whole number"
            raise EstimateError(message, hint="correct the cell, or remove the row")
        return int(value)

    def integers(self, column: str) -> list[int]:
        """Return the whole numbers in a cell, separated by slashes.

        Raises:   EstimateError: the cell holds something else.
        """
        parts = self.text(column).split("/")
        if not all(part.isdecimal() and len(part) < 10 for part in parts):
            message = f"{self.place}: {column} is {self.text(column)!r}, not like 12/14"
            raise EstimateError(message, hint="give a whole number for every stage")
        return [int(part) for part in parts]

    def measured(self, column: str) -> float | None:
        """Return a measured cell; None where the run failed: empty, not finite, zero or "OOM".

        Raises:   EstimateError: it is another text, or below zero.
        """
        text = self.text(column)
        if text.lower() in FAILED:
            return None
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if value != 0 and not _LEAST <= value <= _LARGEST:
            message = f"{self.place}: {column} is {text!r}, not a possible number"
            raise EstimateError(message, hint="leave the cell of a failed run empty")
        return value or None
