"""Loading: the job that a run trains, made in one way by all that take part in it.

The command that begins a run, the ranks that join it and the commands that only look at a job make
it here.  So a newcomer has the weights, the modules and the rate of those that were there before.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from penstock.choose.imported import beginning_with
from penstock.choose.module_swaps import replaced, verify
from penstock.examine.learning_rate import replayed
from penstock.examine.surroundings import noting
from penstock.job import Job, load_job
from penstock.listener import Listener
from penstock.rules.rule import Rule


class JobTerms(NamedTuple):
    """What makes the job of a run besides the text that names it.

    weights:  the file or folder whose weights the model begins with; "": it makes its own.
    rules:    to which every plan keeps; those that replace modules make another model.
    sums:     in place of `Job.sums`; "": as the job says.
    """

    weights: str = ""
    rules: tuple[Rule, ...] = ()
    sums: str = ""

    def from_anywhere(self) -> "JobTerms":
        """Return the same terms with the places of files as seen from any folder of this host."""
        weights = str(Path(self.weights).absolute()) if self.weights else ""
        return self._replace(weights=weights, rules=tuple(map(_from_anywhere, self.rules)))


class Loaded(NamedTuple):
    """A job as its author wrote it, and as it is trained: with modules replaced by rules.

    Where no rule replaces any the two are one object.
    """

    author: Job
    job: Job


def loaded(job: Job | str, terms: JobTerms = JobTerms()) -> Loaded:  # noqa: B008 - a tuple
    """Return the job that a record or a text stands for, as `terms` say.

    Raises:   JobError: there is no such job; a rule names no function.
              CheckpointError: there are no such weights.
    """
    with noting():
        author = load_job(job) if isinstance(job, str) else job
    if terms.weights:
        author = beginning_with(author, terms.weights)
    if terms.sums:
        author = replace(author, sums=terms.sums)
    author = replayed(author)
    return Loaded(author, replaced(author, terms.rules))


def check_replaced(found: Loaded, rules: Sequence[Rule], listener: Listener) -> None:
    """Compare a step of both jobs where modules are replaced.

    Raises:   JobError: a module is replaced by one that computes something else.
    """
    if found.job is not found.author:
        with listener.busy("comparing the modules that are replaced"):
            verify(found.author, found.job, rules)


def _from_anywhere(rule: Rule) -> Rule:
    """Return a rule whose function is found from any folder: its file by its whole path."""
    if rule.verb != "replace":
        return rule
    file, colon, name = rule.how.rpartition(":")
    path = Path(rule.file).parent / file
    return replace(rule, how=f"{path.absolute()}{colon}{name}") if path.is_file() else rule
