"""StepEnd: what ranks do at the end of a step besides summing gradients and updating."""

from dataclasses import dataclass

from penstock.program.instructions import Guarding


@dataclass(frozen=True, slots=True)
class StepEnd:
    """How the ranks of a program end a step.

    clip:             by the global norm of the gradient, over all stages of a replica.
    post_validation:  whether it clips after the updates, and undoes one where it was wrong.
    commits:          whether a step counts only once all ranks have come to its end.
    guard:            how another rank keeps a copy of what one alone has; None: none does.
    averages:         how replicas average weights (penstock/sums.py), in place of gradients.
    """

    clip: bool = False
    post_validation: bool = False
    commits: bool = False
    guard: Guarding | None = None
    averages: str = ""
