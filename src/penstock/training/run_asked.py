"""Run asked: what a run was asked for and stays, and what it has learned of its job by now."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.checkpoints.folders import Keep
from penstock.choose.run_windows import EVERY, CheckpointInterval
from penstock.examine.same_run import RunFacts
from penstock.listener import Row
from penstock.plan.plan import Plan, Units
from penstock.prove.audits import AuditTerms
from penstock.runtime.shared_cores import CoreTerms, parse_turns
from penstock.runtime.step_traces import FOLDER, ProfiledSteps, parse_steps
from penstock.training.options import Value

if TYPE_CHECKING:
    from penstock.choose.keys import TracedKey
    from penstock.examine.examine import Examined


@dataclass(frozen=True)
class RunAsked:
    """What a run was asked for, besides its job and what may change on the way.

    text:     how the job was named, "file.py:name -- ARGUMENTS"; "": it was given as a record.
    weights:  the file or folder whose weights the model begins with; "": it makes its own.
    units:    into which the stages of the plan are cut, whichever it is; None: it stays as it is.
    on_step:  called with the row of each step, as `metrics.jsonl` has it, and the writers' rows.
    tls:      whether the lines of an elastic run are encrypted.
    policy:   the file of the policy that the run follows; None: none.
    mirror:   URL at which the folder is kept, too; "": nowhere else.
    audit:    how much of it is made again by the plain loop.
    options:  all that was asked for, as a file can hold it; defaults are left out.
    """

    text: str = ""
    weights: str = ""
    given_plan: Plan | None = None
    units: Units | None = None
    every: CheckpointInterval = EVERY
    keep: Keep = Keep()  # noqa: RUF009 - a frozen record
    on_step: Callable[[Row], None] | None = None
    tls: bool = False
    policy: Path | None = None
    mirror: str = ""
    audit: AuditTerms = AuditTerms()  # noqa: RUF009 - a tuple
    options: Mapping[str, Value] = field(default_factory=dict[str, Value])

    @property
    def turns(self) -> CoreTerms | None:
        """Return how it shares cores with another run; None: with none."""
        text = self.options.get("turns")
        return parse_turns(str(text)) if text else None

    def profiled(self, folder: Path) -> ProfiledSteps | None:
        """Return the steps that torch's profiler watches; None: none."""
        text = self.options.get("torch_profile")
        return ProfiledSteps(*parse_steps(str(text)), folder / FOLDER) if text else None


@dataclass
class JobLearned:
    """What is known of a job by now.

    found:    what it is found to be, under torchrun, on rank 0.
    shapes:   the steps of its shapes, if it has several, that with most of the work first.
    noticed:  lines of the loss that print, or log, where it was traced.
    untraced: why there is no trace.
    facts:    what the run begins with, for those who go on with it, or join.
    late:     what was found only while it ran that no checkpoint holds.
    """

    found: "Examined | None" = None
    shapes: "tuple[TracedKey, ...]" = ()
    noticed: list[str] = field(default_factory=list[str])
    untraced: str = ""
    facts: RunFacts | None = None
    late: str = ""
