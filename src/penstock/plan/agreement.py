"""Agreement: how the ranks of a plan agree on gradients, and on steps that count."""

from dataclasses import dataclass

from penstock.errors import PlanError
from penstock.program.instructions import Guarding
from penstock.routes import topology_of
from penstock.sums import sums_way


@dataclass(frozen=True, slots=True)
class Agreement:
    """How ranks agree.

    sums:               in how few numbers gradients travel that copies of a stage sum, as
                        `penstock.sums` says it; None: as they are (docs/agree.md).
    topology:           along which rounds sums go from rank to rank, as `penstock.routes` says it;
                        None: as the transport sums.
    clip:               whether updates wait for a number of all gradients: to clip by their norm
                        (the job says to what), or to leave out a step that overflows in float16.
    post_validation:    whether a rank updates before the norm is known, and takes the update back
                        where gradients have to be clipped; same weights, less waiting, more memory.
    commits:            whether a step counts, and is updated, only once all ranks have come to its
                        end: for runs that go on when ranks are lost.
    guard:              how another rank keeps a copy of what a rank alone has; None: none does.
    """

    sums: str | None = None
    topology: str | None = None
    clip: bool = False
    post_validation: bool = False
    commits: bool = False
    guard: Guarding | None = None

    def __post_init__(self) -> None:
        try:
            sums_way(self.sums)
        except ValueError as problem:
            raise PlanError(f"sums are not {problem}") from None
        try:
            topology_of(self.topology or "direct")
        except ValueError as problem:
            raise PlanError(f"topology is not {problem}") from None
        if self.guard is not None and self.guard.every < 0:
            message = f"guard is {self.guard.every} steps"
            raise PlanError(message, hint="give 0 steps or more")
