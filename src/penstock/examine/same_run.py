"""Same run: whether who goes on with a run, or joins it, reads and makes what the run began with.

Each has loaded the script by itself: a file may have changed since, or hold something else on
another host; a variable of the environment, too.  `alike.json` in the folder of a run holds
digests of its first two micro-batches and of what is made beside them, and of all that the job's
code had read, so that the line can be named.

Ignores:  what shows in neither; jobs that only the plain loop trains, whose data may be any.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import JobError
from penstock.examine.queries import text_of
from penstock.examine.rank_inputs import facts_of_data, sample
from penstock.examine.surroundings import ENVIRONMENT, NOTES, THERE, now_of
from penstock.files import read_json, write_text
from penstock.graph.lasting import lasting_buffers
from penstock.graph.trace import build_model
from penstock.graph.whole_optimizer import whole_optimizer
from penstock.job import Job
from penstock.processes.child import apart, can_fork
from penstock.runtime.digest import digest_of
from penstock.state.optimizer.rates import ReplayedRate, options_of
from penstock.typed import damage, typed

if TYPE_CHECKING:
    from penstock.graph.trace import Capture

FACTS = "alike.json"
_FIRST = (0, 1)  # micro-batches
_RATES = 8  # steps
_OF_RUN = ("num_steps", "validate_every", "micro_batches")  # may be others as the run goes on
_PLAIN = (str, int, float, bool)
_ALL = f"{ENVIRONMENT}*"
_SAME = "let it have the same files and environment as the run"


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a run began with: digests and numbers, by name.

    data:    of its first micro-batches.
    kept:    what no checkpoint holds: constants of the loss, buffers that are not saved; where
             the step was `traced`, who else would know them.
    made:    what else each rank makes by itself: the job's numbers, options of the optimizer.
    rates:   of its first steps.
    keeps:   whether its rate keeps state.
    read:    what the job's code had read; `lines`, where.
    """

    data: Mapping[str, str] = field(default_factory=dict[str, str])
    kept: Mapping[str, str] = field(default_factory=dict[str, str])
    made: Mapping[str, str] = field(default_factory=dict[str, str])
    rates: Mapping[str, str] = field(default_factory=dict[str, str])
    keeps: bool = False
    read: Mapping[str, str] = field(default_factory=dict[str, str])
    lines: Mapping[str, str] = field(default_factory=dict[str, str])
    traced: bool = True


def run_facts_of(job: Job, captured: "Capture | None") -> RunFacts | None:
    """Return what a run of `job` begins with; None where nothing can be tried apart.

    captured:  the traced step, if there is one.
    Raises:   JobError: the job fails.
    """
    if not can_fork():
        return None
    data = facts_of_data(job, 0, _FIRST)
    made, rates = apart(lambda: [_made(job, captured), _rates(job)])
    keeps = isinstance(job.learning_rate, ReplayedRate)
    read = {**data.variables, **NOTES.taken()}
    lines = {**data.lines, **{what: text_of(line) for what, line in NOTES.lines.items()}}
    kept, traced = _kept(captured), captured is not None
    return RunFacts(data.digests, kept, made, rates, keeps, read, lines, traced)


def _kept(captured: "Capture | None") -> dict[str, str]:
    if captured is None:
        return {}
    model, constants = captured.model, enumerate(captured.constants.values())
    saved = lasting_buffers(model)
    named = {f"buffer {n}": b for n, b in model.named_buffers() if n not in saved}
    named |= {f"constant {at} of the loss": each for at, each in constants}
    return {name: digest_of([sample(tensor)]) for name, tensor in named.items()}


def _made(job: Job, captured: "Capture | None") -> dict[str, str]:
    names = [each.name for each in fields(job) if each.name not in _OF_RUN]
    values = {name: getattr(job, name) for name in names}
    found = {f"Job.{n}": repr(value) for n, value in values.items() if isinstance(value, _PLAIN)}
    model = build_model(job) if captured is None else captured.model
    optimizer = whole_optimizer(job, model).optimizer
    for at, group in enumerate(options_of(optimizer)):
        own = ((str(name), repr(value)) for name, value in group.items())
        found |= {f"{name} of group {at} of the optimizer": value for name, value in own}
    return found | {"the optimizer": type(optimizer).__qualname__}


def _rates(job: Job) -> dict[str, str]:
    steps = range(min(_RATES, job.num_steps)) if job.learning_rate is not None else ()
    rates: dict[str, str] = {}
    for step in steps:
        assert job.learning_rate is not None, "only then it is asked"
        rates[str(step)] = repr(float(job.learning_rate(step)))
    return rates


# -- of a folder ----------------------------------------------------------------------------------


def keep_facts(folder: Path, facts: RunFacts | None) -> None:
    """Write what a run begins with into its folder; None: nothing is known."""
    if facts is None:
        (folder / FACTS).unlink(missing_ok=True)
        return
    write_text(folder / FACTS, json.dumps({"penstock": "alike", **asdict(facts)}) + "\n")


def _facts_in(folder: Path) -> RunFacts | None:
    if not (folder / FACTS).exists():
        return None
    content = read_json(folder / FACTS, JobError, FACTS)
    content.pop("penstock", None)
    with damage(str(folder / FACTS), JobError, hint="delete it"):
        return typed(RunFacts, content)


def check_joins(folder: Path, own: RunFacts | None) -> None:
    """Raise where who joins the run in `folder` has something else than it began with.

    Raises:   JobError: it names the first thing, and why.
    """
    run = None if own is None else _facts_in(folder)
    if run is None or own is None:
        return
    for what in ("data", "kept", "made", "rates"):
        _compare(folder, what, own, run, hint=_SAME)


def check_goes_on(folder: Path, own: RunFacts | None) -> str:
    """Raise where a run that goes on would read other data than before, or get other rates.

    Return in words that a rate is another one, where that is a function of the step: its source
    says so.
    Raises:   JobError: it names the first thing, and why.
    """
    run = None if own is None else _facts_in(folder)
    if run is None or own is None:
        return ""
    hint = "let the job have what the run began with, or go on with this: forget_state=True"
    for what in ("data", "kept") if own.traced and run.traced else ("data",):
        _compare(folder, what, own, run, hint=hint)
    try:
        _compare(folder, "rates", own, run, hint=hint)
    except JobError as problem:
        if own.keeps or _cause(own, run, sources=False):
            raise
        return problem.message
    return ""


def _compare(folder: Path, what: str, own: RunFacts, run: RunFacts, *, hint: str) -> None:
    ours, theirs = getattr(own, what), getattr(run, what)
    names = dict.fromkeys([*theirs, *ours])
    name = next((name for name in names if ours.get(name) != theirs.get(name)), None)
    if name is None:
        return
    was, now = theirs.get(name, "nothing"), ours.get(name, "nothing")
    words = {
        "data": f"{name} is not the one that the run in {folder} began with",
        "kept": f"{name} is not the one that the run in {folder} began with",
        "made": f"{name} is {now}; in the run in {folder} it is {was}",
        "rates": f"the learning rate of step {name} is {now}; in the run in {folder} it was {was}",
    }
    cause = _cause(own, run)
    raise JobError(f"{words[what]}{f': {cause}' if cause else ''}", hint=hint)


def _cause(own: RunFacts, run: RunFacts, *, sources: bool = True) -> str:
    """Return what the job's code reads that has another value than when the run began; or "".

    sources:  whether its own files count.
    """
    for what, value in run.read.items():
        is_source = what.endswith(".py") or what.startswith(THERE)
        if what == _ALL or (is_source and not sources):
            continue
        if (own.read.get(what) or now_of(what)) != value:
            who = own.lines.get(what) or run.lines.get(what) or "the job"
            return f"{who} reads {what.removeprefix(ENVIRONMENT)}, which is another one now"
    return ""
