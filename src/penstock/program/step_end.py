"""StepEnd: what ranks do at the end of a step besides summing gradients and updating."""

from dataclasses import dataclass

from penstock.program.instructions import Guarding
from penstock.program.reductions import Word

_ROUTED: tuple[Word, ...] = "delayed", "tied", "replicas", "average"


@dataclass(frozen=True, slots=True)
class StepEnd:
    """How the ranks of a program end a step.

    clip:             by the global norm of the gradient, over all stages of a replica.
    post_validation:  whether it clips after the updates, and undoes one where it was wrong.
    commits:          whether a step counts only once all ranks have come to its end.
    guard:            how another rank keeps a copy of what one alone has; None: none does.
    topology:         along which rounds sums go (penstock/routes.py); empty: as transports sum.
    averages:         how replicas average weights (penstock/sums.py), in place of gradients.
    served:           how a server updates weights by the gradients of ranks (penstock/sums.py).
    """

    clip: bool = False
    post_validation: bool = False
    commits: bool = False
    guard: Guarding | None = None
    averages: str = ""
    topology: str = ""
    served: str = ""

    def topology_of(self, word: str) -> str:
        """Return along which rounds a reduction goes; empty: as the transport sums.

        A sum in shards ends where its part is, and what is no sum of gradients or weights is a few
        bytes.
        """
        return self.topology if word in _ROUTED else ""
