"""Finished: a run that is to go on, and has done all of its steps."""

from pathlib import Path

from penstock.errors import PlanError, RunError
from penstock.files import Json, read_json


class NothingLeftError(PlanError):
    """Nothing is left to do of the run in `folder`: the command says so, and ends well."""

    def __init__(self, message: str, folder: Path, *, hint: str) -> None:
        super().__init__(message, hint=hint)
        self.folder = folder

    def summary(self) -> dict[str, Json] | None:
        """Return what the run gave; None where it was lost before it could say.

        Raises:   RunError: the file is damaged.
        """
        path = self.folder / "summary.json"
        return read_json(path, RunError, "summary") if path.exists() else None
