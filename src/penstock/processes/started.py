"""Started: who has started this process: torchrun, a run that asks it something, or neither."""

import os

ASKED = "PENSTOCK_ASKED_BESIDE"  # the files by which it is asked, and answers


def under_torchrun() -> bool:
    """Return whether this process is a rank that torchrun started."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def is_asked_beside() -> bool:
    """Return whether this process was begun anew, to do something else than its command says."""
    return ASKED in os.environ
