"""Rank inputs: ranks that torchrun started read the same micro-batches, and build the same model.

Each of them has loaded the script by itself, and what it makes may follow its own number, the
order of a set, or the files of its host.  So each reads a few micro-batches apart, as the run will
read them, and says digests of them, of its fresh weights and of the loss's constants.  That is
done at every start: what was proved before was proved of other processes.

Not noticed:  what differs in none of the micro-batches that are read.
"""

import itertools
import json
import os
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from penstock.batches.how import own_random
from penstock.batches.reads import ReadNumbers, read
from penstock.errors import JobError, PenstockError
from penstock.examine.surroundings import ENVIRONMENT, NOTES, noting
from penstock.graph.contents import flatten
from penstock.graph.functional import where
from penstock.job import Job
from penstock.processes.child import Beat, can_fork, in_a_fork
from penstock.runtime.digest import digest_of

if TYPE_CHECKING:
    from penstock.graph.trace import Capture
    from penstock.training.rendezvous import Rendezvous

_STEPS = 4  # the first of a run, of which two micro-batches are drawn
_PATIENCE_S = 600.0  # with a micro-batch
_SAMPLED = 1024  # elements of a tensor
_DATA, _MODEL = "penstock/alike/data", "penstock/alike/model"

_SHARE = "let `data` yield what all ranks share, whatever the rank: Penstock divides it among them"
_SORT = "sort what comes out of a set, or start with PYTHONHASHSEED=0 in the environment"
_FILES = "let all hosts have the same files, and the number of a micro-batch seed all chance"


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What a rank has found: digests by name; and the variables that its job reads, by name.

    lines:  where it reads them.
    """

    digests: Mapping[str, str]
    variables: Mapping[str, str]
    lines: Mapping[str, str]


def agree_on_data(rendezvous: "Rendezvous", job: Job, first: int) -> None:
    """Return once all ranks read the same micro-batches near number `first`; every rank calls it.

    Raises:   JobError: this rank reads others than rank 0, or its data fails.
              RunError: another one does.
    """
    facts = facts_of_data(job, first)
    _agree(rendezvous, _DATA, facts)


def agree_on_model(rendezvous: "Rendezvous", captured: "Capture") -> None:
    """Return once all ranks have built the same model and loss; every rank calls it.

    Raises:   JobError: this rank has others than rank 0.  RunError: another one has.
    """
    named = {f"weight {name}": each for name, each in captured.model.named_parameters()}
    named |= {f"buffer {name}": each for name, each in captured.model.named_buffers()}
    constants = enumerate(captured.constants.values())
    named |= {f"constant {at} of the loss": each for at, each in constants}
    digests = {name: digest_of([sample(tensor)]) for name, tensor in named.items()}
    _agree(rendezvous, _MODEL, _with_variables(digests))


def facts_of_data(job: Job, first: int, places: tuple[int, ...] = ()) -> RankFacts:
    """Return digests of micro-batches from number `first` on, read in a process of their own.

    places:  which ones; none: the first two, and two of the next steps that the job's seed draws.
    Raises:   JobError: the data fails; the message names the line.
    """
    drawn = random.Random(job.seed).sample(range(2, 2 + _STEPS * job.micro_batches), 2)
    places = places or (0, 1, *sorted(drawn))

    def look(beat: Beat) -> list[Any]:
        with own_random(), noting(in_fork=can_fork()):
            found = _digests(job, ReadNumbers(first, places, places[-1] + 1), beat)
        facts = _with_variables(found)
        return [facts.digests, facts.variables, facts.lines]

    return RankFacts(*(in_a_fork(look, _PATIENCE_S) if can_fork() else look(lambda: None)))


def _digests(job: Job, reads: ReadNumbers, beat: Beat) -> dict[str, str]:
    found: dict[str, str] = {}
    numbers = itertools.islice(reads.numbers(), len(reads.places))
    try:
        for number, batch in zip(numbers, read(job.data, reads), strict=False):
            found[f"micro-batch {number}"] = digest_of(flatten(batch)[0])
            beat()
    except PenstockError:
        raise
    except Exception as problem:  # whatever the job's code raises
        message = where(problem, f"the job's data fails near micro-batch {reads.first}")
        raise JobError(message, hint="does it run without Penstock?") from problem
    return found


def sample(tensor: Tensor) -> Tensor:
    """Return at most so many elements of a tensor, from all over it."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLED)]


def _with_variables(digests: Mapping[str, str]) -> RankFacts:
    read = {what: value for what, value in NOTES.values.items() if what.startswith(ENVIRONMENT)}
    lines = {what: "{}:{}".format(*NOTES.lines[what]) for what in read if what in NOTES.lines}
    return RankFacts(digests, read, lines)


# -- compared -------------------------------------------------------------------------------------


def _agree(rendezvous: "Rendezvous", key: str, facts: RankFacts) -> None:
    if rendezvous.rank == 0:
        rendezvous.put(key, json.dumps([dict(facts.digests), dict(facts.variables)]))
    else:
        digests, variables = json.loads(rendezvous.take(key))
        problem = differs(facts, RankFacts(digests, variables, {}), rendezvous.rank)
        if problem is not None:
            raise problem
    rendezvous.meet(key)


def differs(own: RankFacts, first: RankFacts, rank: int) -> JobError | None:
    """Return what this rank has otherwise than the first one, and why, as far as that is known."""
    names = [*own.digests, *(name for name in first.digests if name not in own.digests)]
    name = next((each for each in names if own.digests.get(each) != first.digests.get(each)), None)
    if name is None:
        return None
    does = "reads" if name.startswith("micro-batch") else "makes"
    if name not in own.digests or name not in first.digests:
        who = rank if name in own.digests else 0
        message = f"rank {who} alone {does} {name}, of rank 0 and rank {rank}"
    else:
        message = f"{name} as rank {rank} {does} it differs from that of rank 0"
    why, hint = _cause(own, first)
    return JobError(f"{message}: {why}", hint=hint)


def _cause(own: RankFacts, first: RankFacts) -> tuple[str, str]:
    """Return why ranks may differ, and what to do."""
    for what, value in own.variables.items():
        if value != first.variables.get(what, value):
            variable = what.removeprefix(ENVIRONMENT)
            name = "the environment" if variable == "*" else variable
            place = own.lines.get(what, "the job's code")
            return f"{place} reads {name}, which differs from rank to rank", _SHARE
    if os.environ.get("PYTHONHASHSEED", "random") == "random" and sys.flags.hash_randomization:
        return "the order of a set, or hashes of text, differ from process to process", _SORT
    return "files, the time, the process or chance that nothing seeds may be in it", _FILES
