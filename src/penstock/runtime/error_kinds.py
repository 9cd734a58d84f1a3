"""Error kinds: errors of a rank after which a run goes on in another way, by name."""

from penstock.errors import AloneError, BatchMisfitError, PenstockError, RankMisfitError, RunError

# What a rank raises, and what is raised for it.
_KINDS: dict[str, tuple[type[PenstockError], type[RunError]]] = {
    "misfit": (BatchMisfitError, RankMisfitError),
    "alone": (AloneError, AloneError),
}


def kind_of(problem: BaseException) -> str:
    """Return the name of an error's kind; empty: the run does not go on after it."""
    return next((name for name, kinds in _KINDS.items() if isinstance(problem, kinds)), "")


def raised_for(kind: str) -> type[RunError]:
    """Return what is raised for a rank's error of a kind."""
    return _KINDS[kind][1] if kind else RunError
