"""Begin: from where a run goes on."""

from pathlib import Path
from typing import NamedTuple


class Begin(NamedTuple):
    """The next step of a run, and the checkpoint from which its ranks start.

    checkpoint:  None: from the weights that the model makes.
    """

    step: int = 0
    checkpoint: Path | None = None
