"""Examine: what a job is made of, found by running its own functions eagerly, without a plan.

What is found limits what may be planned (docs/decisions/0007).  It is found in a process of its
own: a counter in the job's code that this moves is where it was when the run begins.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from penstock.errors import JobError, PenstockError
from penstock.examine.buffer_terms import fixed_for
from penstock.examine.data_check import DataFound, check_data
from penstock.examine.impurities import begun_anew, describe, looked_at
from penstock.examine.learning_rate import rate_of
from penstock.examine.shared_state import shared_digests, what_moved
from penstock.examine.streams import refusal, replaced_streams, streams_read
from penstock.examine.surroundings import NOTES, noting
from penstock.examine.unsaved import Key, Unsaved
from penstock.files import Json
from penstock.graph.trace import Capture, build_model
from penstock.graph.whole_optimizer import whole_optimizer
from penstock.job import Job
from penstock.plan.plan import Decision
from penstock.processes.child import apart, can_fork
from penstock.routes import FASTEST, topology_of
from penstock.search.shapes import Fixed
from penstock.state.laws.buffers import BufferLaw, settled
from penstock.state.laws.measured import measured_laws
from penstock.state.optimizer.optimizer import (
    hooks_a_gradient,
    remembers,
    takes_sparse,
    undividable,
)
from penstock.sums import sums_way
from penstock.typed import typed


@dataclass(frozen=True, slots=True)
class Examined:
    """What a job was found to be.

    one_process:  why only the plain loop itself trains it correctly; empty if plans do.
    no_plan:      why no plan trains it, though eager replicas do; empty if plans do.
    laws:         of each buffer that forward writes, as measured until `settled`.
    failed:       what the job raised when it was run; whoever calls it next will get it too.
    begins:       digest of the first micro-batch, where the data was found to be right.
    mend:         what to do for a plan to be made, or against what it raised.
    forgets:      what a run that goes on from a checkpoint would begin anew, each with its line.
    beside:       what it keeps where no checkpoint looks: whether that is lost is to be tried.
    keys:         of the functions that keep it, and of the others that ran.
    """

    one_process: str = ""
    no_plan: str = ""
    mend: str = ""
    forgets: tuple[str, ...] = ()
    beside: tuple[Unsaved, ...] = ()
    keys: tuple[Key, ...] = ()
    laws: Mapping[str, BufferLaw] = field(default_factory=dict[str, BufferLaw])
    failed: str = ""
    begins: str = ""
    seconds: float = 0.0

    def refuse_failed(self) -> None:
        """Raise what the job raised when it was run.

        Raises:   JobError: it raised something.
        """
        if self.failed:
            raise JobError(self.failed, hint=self.mend or "does it run without Penstock?")

    def settled(self, captured: Capture | None) -> "Examined":
        """Return it with the laws that hold whatever the batch: those that the traced step shows.

        captured:  None where there is none.
        """
        return replace(self, laws=settled(self.laws, captured))

    def to_json(self) -> dict[str, Json]:
        """Return it as JSON values."""
        return json.loads(json.dumps(asdict(self)))


def examine(job: Job, *, check: bool = True) -> Examined:
    """Return what `job` is found to be, by a process of its own.

    check:    whether to look for what a trace would lose, too.
    Raises:   RunError: the process died.
    """
    call = partial(_examined, job, check=check)
    return typed(Examined, _noted_apart(lambda: call().to_json(), check=check))


def _noted_apart(call: Callable[[], Any], *, check: bool = True) -> Any:
    """Return what a process of its own returns; what the job reads there is noted here.

    check:    whether it may not change the files that it reads.
    """
    is_fork = can_fork()

    def noted() -> list[Any]:
        streams = replaced_streams(NOTES.pipes) if is_fork else []
        NOTES.forget_written()
        with noting(in_fork=is_fork):
            found = call()
        return [found, NOTES.taken(), streams_read(streams), NOTES.changed()]

    shared = shared_digests()
    found, read, streams, changed = apart(noted)
    if streams:
        raise refusal(streams)
    if check and is_fork and (moved := what_moved(shared, shared_digests())):
        message = f"{moved}, which its processes share, is another one since the job was looked at"
        raise JobError(message, hint=_OWN)
    if changed and check:
        message = f"{changed[0]}, which it reads: it is another one since the job was looked at"
        raise JobError(message, hint=_COPY)
    NOTES.add(read)
    return found


_OWN = "keep it in an attribute or a list, of which each process has its own, or in Job.state"
_COPY = "put the file back, and let the job read it only, or keep in memory what changes"


def examine_optimizer(job: Job, captured: Capture) -> tuple[str, bool]:
    """Return why the optimizer has to stay whole, empty if stages can have parts of it; and whether
    it is of its own kind, so that nothing is known of its state.

    Raises:   JobError: it is not usable.
    """

    def asked() -> list[str | bool]:
        is_own = not whole_optimizer(job, captured.model).is_plain
        return [undividable(job, captured) or "", is_own]

    whole, is_own = _noted_apart(asked)
    return str(whole), bool(is_own)


def bounded(
    job: Job, found: Examined, whole: str, fixed: Fixed
) -> tuple[Fixed, tuple[Decision, ...]]:
    """Return what is left of `fixed` for a job, and the decisions that leave no more.

    An optimizer that stays whole leaves one stage, and so at most one rank for each copy of it.
    So does one whose hook keeps tensors beside it: of a part's parameters it has those alone.
    whole:    why the optimizer has to stay whole; empty if it need not.
    Raises:   JobError: the job cannot be trained as requested.
    """
    whole = whole or next((str(o) for o in found.beside if o.by_update and o.tensor), "")
    fixed, about_buffers = fixed_for(job, found.laws, fixed)
    decisions = [] if about_buffers is None else [about_buffers]
    if whole:
        if fixed.stages not in (None, 1):
            hint = "leave stages out, or fix the optimizer"
            message = f"the optimizer cannot be divided into {fixed.stages} stages: {whole}"
            raise JobError(message, hint=hint)
        if (servers := _servers(fixed)) > 1:
            hint = "leave topology out, or fix the optimizer"
            message = f"the optimizer cannot be divided among {servers} servers: {whole}"
            raise JobError(message, hint=hint)
        fixed = replace(fixed, stages=1)
        decisions.append(Decision("optimizer", "whole on each replica", "only choice", whole))
        decisions.append(Decision("stages", "1", "only choice", "the optimizer stays whole"))
        most, why = _most_copies(job, fixed)
        if (fixed.schedule, fixed.replicas) == (None, None) and (fixed.ranks or 0) > most:
            fixed = replace(fixed, ranks=most)
            decisions.append(Decision("ranks", str(most), "only choice", why))
    return fixed, tuple(decisions)


def _servers(fixed: Fixed) -> int:
    """Return among how many servers the parameters are divided, where any are asked for."""
    if not sums_way(fixed.exchange.sums).served or fixed.exchange.topology in (None, FASTEST):
        return 1
    asked = topology_of(fixed.exchange.topology)
    return asked.size if asked.kind == "server" else 1


def _most_copies(job: Job, fixed: Fixed) -> tuple[int, str]:
    """Return how many copies of the only stage there can be, and why no more ranks are used."""
    why = "the optimizer stays whole on one stage, of which there is "
    if fixed.needs.buffers == "one copy":
        return 1, f"{why}one copy: buffers must see every micro-batch in order"
    each = f"at most one copy for each of the {job.micro_batches} micro-batches of a step"
    return job.micro_batches, why + each


def _examined(job: Job, *, check: bool) -> Examined:
    start = time.perf_counter()
    try:
        found = _asked(job, check=check)
    except PenstockError as problem:
        found = Examined(failed=problem.message, mend=problem.hint)
    except Exception as problem:  # noqa: BLE001 - the job's own code may raise anything
        found = Examined(failed=f"{type(problem).__name__}: {problem}")
    return replace(found, seconds=time.perf_counter() - start)


def _asked(job: Job, *, check: bool) -> Examined:
    data = check_data(job, per_step=job.micro_batches) if check else DataFound()
    if not (check or data.problem):
        return Examined(laws=measured_laws(job))
    looked = looked_at(job)
    impure, beside = looked.impurities, rate_of(job).beside
    kept = [one for one in (beside, data.keeps) if one]
    found = Examined(forgets=(*begun_anew(impure), *kept), beside=looked.beside, keys=looked.keys)
    if data.problem:
        return replace(found, one_process=data.problem)
    if not all(one.batch for one in impure):
        return replace(found, one_process=describe(impure))
    if beside:
        why = f"the learning rate depends on more than the step\n  {beside}"
        return replace(found, one_process=why)
    laws = measured_laws(job)
    model = build_model(job)
    if kind := takes_sparse(job, model):
        why = f"the job's optimizer, {kind}, takes sparse gradients, and replicas sum dense ones"
        return replace(found, one_process=why)
    if hooked := hooks_a_gradient(job, model):
        why = f"the job's optimizer puts a hook on the gradient of {hooked}, and replicas sum later"
        return replace(found, one_process=why)
    no_plan, mend = describe(impure), _ONE_KIND if impure else ""
    if check and not impure and (outside := remembers(job, model)):
        no_plan = f"the job's optimizer remembers something outside itself: {outside}"
        mend = _ITS_OWN
    return replace(found, laws=laws, no_plan=no_plan, mend=mend, begins=data.begins)


_ONE_KIND = (
    "let `data` drop a short last batch (drop_last=True) or pad to one shape, or to a few "
    "(ps.bucketed); yield numbers as tensors"
)
_ITS_OWN = "create what it remembers, and what it draws from, where the optimizer is made"
