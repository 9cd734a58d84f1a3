"""Growing: a trace to which something appends rows while a run follows it."""

from pathlib import Path
from typing import final

from penstock.errors import FleetError
from penstock.files import read_bytes
from penstock.fleet.csv_rows import RowError
from penstock.fleet.market import Market
from penstock.fleet.traces import read_market

_HEAD = 2  # lines without which there is nothing: a header and a row


@final
class GrowingTrace:
    """A trace file, read again where it has changed.

    problem   what is wrong with its first row that cannot be read; "": nothing.  Those before hold.
    A row counts once its line has ended.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.problem = path, ""
        self._state: tuple[int, int] | None = None
        self._market: Market | None = None

    def read(self) -> Market:
        """Return the trace as far as it has grown.

        Raises:   FleetError: it tells nothing, and never did.
        """
        try:
            stat = self.path.stat()
            state = stat.st_mtime_ns, stat.st_size
        except OSError:  # it is being replaced, or gone
            state = None
        if self._market is None or state != self._state:
            self._state = state
            try:
                self._market = self._read()
            except FleetError as problem:
                if self._market is None:
                    raise
                self.problem = problem.message
        return self._market

    def _read(self) -> Market:
        content = read_bytes(self.path, FleetError, "trace")
        lines, self.problem = content.count(b"\n"), ""
        while True:
            try:
                return read_market(self.path, lines=lines)
            except RowError as problem:
                if not _HEAD <= problem.line - 1 < lines:
                    raise
                lines, self.problem = problem.line - 1, problem.message
