"""In process: a member in the process that begins it, where no forked one could compute.

Whoever has started that process, a rank on an accelerator, lets it live when others die.
"""

import gc
import sys
from typing import final

from penstock.device import here
from penstock.errors import PenstockError, RunError
from penstock.gauge.hosts import place_key
from penstock.members.launch_members import (
    Here,
    NobodyLeftError,
    Report,
    Scribe,
    Start,
    as_job_fails,
    live,
)
from penstock.members.mesh import Mesh, listening, where_of
from penstock.processes.end_with_parent import outlive_parent
from penstock.runtime.calls import StepResult


def run_inside(start: Start, report: Report, scribe: Scribe, place: Here) -> bool:
    """Be the only member of a view that is here; return whether the run is over.

    Raises:   RunError: the job fails; or another one is to be here, too.
    """
    own = start.view.members if place.members is None else place.members
    if len(own) != 1:
        message = f"{len(own)} ranks on accelerators need a process each, started afresh"
        raise RunError(message, hint=f"train with elastic=True, ranks={len(own)}")
    (member,) = own
    outlive_parent()
    here().enter()
    gc.collect()  # a proof had its ranks in this process
    listens = listening(place.address)
    told = where_of(listens, place_key(), place.pools.get(member, ""))
    where, parent = start.meet({member: told}), _Inside(member, report)
    live(Mesh(member, listens, start.token), start, where, scribe, parent)
    if parent.problem is not None:
        raise parent.problem
    if not parent.is_over and {*own} == {*start.view.members}:
        hint = "resume=True continues from the last checkpoint"
        raise NobodyLeftError("no rank is left: the only one has left", hint=hint)
    return parent.is_over


@final
class _Inside:
    """What is said to whoever began a member, in the same process."""

    def __init__(self, member: int, report: Report) -> None:
        self.member, self._report, self._next = member, report, 0
        self.is_over = False
        self.problem: RunError | None = None

    def report(self, step: StepResult) -> None:
        """Tell a step of which this member was the first; some come twice."""
        if step.validated is not None or step.step >= self._next:
            self._report(step)
            self._next = max(self._next, step.step + (step.validated is None))

    def say(self, words: str) -> None:
        """Tell people."""
        sys.stderr.write(f"member {self.member}: {words}\n")

    def finish(self) -> None:
        """Note that the run is over."""
        self.is_over = True

    def fail(self, problem: PenstockError) -> None:
        """Note that the job fails."""
        self.problem = as_job_fails(problem)
