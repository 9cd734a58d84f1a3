"""Other machines: the step of a job that is planned for machines which are not here.

Nothing is measured here for them, so the model is built without values and traced (hollow.py in
`graph`).  What an examination finds by running the job is asked only where that takes seconds; of a
larger job it is left out, and the plan says so.
"""

import os
import resource
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from penstock.choose import settle
from penstock.choose.prepare import traced
from penstock.choose.settle import CheckOptions
from penstock.cluster.cluster import Cluster
from penstock.cluster.machine import detect, free_bytes
from penstock.errors import GraphError, JobError
from penstock.examine import examine
from penstock.examine.examine import Examined
from penstock.graph.hollow import hollow, stand_ins
from penstock.graph.trace import Capture, build_model
from penstock.graph.waiting import bytes_of, is_hollow
from penstock.job import Job
from penstock.listener import Listener
from penstock.plan.plan import Decision
from penstock.processes.child import can_fork
from penstock.profile.estimate import kinds_of
from penstock.profile.of_graph import kind_here
from penstock.rules.rule import Rule
from penstock.search.shapes import Fixed
from penstock.state.laws.buffers import laws_in
from penstock.units import format_bytes

_EXAMINED_BYTES = 1 << 28  # of weights, up to which a job is run here to examine it
_EXAMINED_FLOP = 10**11  # of a micro-batch: seconds for all that an examination runs
_SMALL = 64  # elements in each dimension of the parameters that an optimizer is tried on
_SHARE = 0.9  # of the memory that is free
_LEAST_BYTES = 1 << 28  # what a process may have in any case: many libraries end at less
_WHAT = "what the job's Python does besides the step is not known"


class Planning(NamedTuple):
    """A job as it is planned: its step, what it leaves of what is fixed, decisions that follow.

    job:  hollow where its step was traced without values.
    """

    job: Job
    captured: Capture
    fixed: Fixed
    decisions: tuple[Decision, ...]


class Looking(NamedTuple):
    """How a job was named, how it is looked at, and who listens."""

    text: str
    care: CheckOptions
    listener: Listener


def is_elsewhere(cluster: Cluster | None) -> bool:
    """Return whether no device of a cluster is of this machine; None is this machine."""
    return cluster is not None and all(kind.name != kind_here() for kind in kinds_of(cluster))


def hands(cluster: Cluster) -> int:
    """Return how many searches for a cluster may go on beside each other; 1: in this process.

    One on each core that this process may use, as far as there is memory for as much as it has;
    only where nothing is measured here meanwhile, and a fork lacks no thread.
    """
    is_alone, has_memory = threading.active_count() == 1, hasattr(os, "memfd_create")
    if not (is_elsewhere(cluster) and is_alone and has_memory and can_fork()):
        return 1
    room = int(_SHARE * free_bytes()) // max(1, _data_bytes())
    return max(1, min(detect().cores, room))


def planning(job: Job, cluster: Cluster | None, fixed: Fixed, looking: Looking) -> Planning:
    """Return what a search for a plan of `job` needs besides the machines.

    cluster:  None for this machine.
    Raises:   JobError: no plan trains it, or this machine lacks the memory to build its model.
              GraphError: it cannot be traced.  PlanError: a rule matches nothing.
    """
    text, care, listener = looking
    if not is_elsewhere(cluster):
        found = settle.examined(job, text, care, listener)
        captured = traced(job, listener, rules=fixed.rules)
        bounds = settle.bounded(job, text, captured, found.settled(captured), fixed, listener)
        return _told(Planning(job, captured, *bounds), care)
    bare, captured = traced_elsewhere(job, fixed.rules, listener)
    if care.check and not _is_large(captured):
        found = settle.examined(job, text, care, listener).settled(captured)
        with stand_ins(captured.model, _SMALL):
            bounds = settle.bounded(bare, text, captured, found, fixed, listener)
        return Planning(bare, captured, *bounds)
    with stand_ins(captured.model, _SMALL):  # its twin in miniature
        whole, is_own = examine.examine_optimizer(bare, captured)
    found = Examined(laws=laws_in(captured))
    fixed, decisions = examine.bounded(bare, found, whole, fixed.needing(state_stays=is_own))
    return _told(Planning(bare, captured, fixed, decisions), care)


def traced_for(job: Job, cluster: Cluster, listener: Listener) -> tuple[Job, Capture]:
    """Return a job and its step, traced for a cluster: without values where that is elsewhere.

    Raises:   as `traced_elsewhere`.
    """
    if is_elsewhere(cluster):
        return traced_elsewhere(job, (), listener)
    return job, traced(job, listener)


def traced_elsewhere(job: Job, rules: Sequence[Rule], listener: Listener) -> tuple[Job, Capture]:
    """Return a job and its step, traced without values where that can be.

    Raises:   GraphError: it cannot be traced.  PlanError: a rule matches nothing.
              JobError: its model needs values, and has no room here.
    """
    bare = hollow(job)
    try:
        with _within_memory(None):
            return bare, traced(bare, listener, rules=rules)
    except (GraphError, JobError, NotImplementedError, RuntimeError) as problem:
        why = problem
    _check_room(bare, why)
    with _within_memory(why):
        return job, traced(job, listener, rules=rules)


def _check_room(bare: Job, why: Exception) -> None:
    """Raise where the weights of a model that can be built without values have no room here."""
    try:
        needed = bytes_of(build_model(bare).parameters())
    except (GraphError, JobError):  # it cannot be built so: how large it is, is not known
        return
    if needed > (free := int(_SHARE * free_bytes())):
        raise _no_room(f"{format_bytes(needed)} of weights, and {format_bytes(free)} are free", why)


@contextmanager
def _within_memory(why: Exception | None) -> Generator[None]:
    """While active, what asks for more memory than is free is refused, not killed.

    Ignores:  systems that do not say what a process has.
    why:      the model cannot be built, or traced, without values.
    Raises:   JobError.
    """
    free, before = int(_SHARE * free_bytes()), resource.getrlimit(resource.RLIMIT_DATA)
    used = _data_bytes()
    if used:
        free = max(free, _LEAST_BYTES)
        most = used + free if before[1] < 0 else min(used + free, before[1])
        resource.setrlimit(resource.RLIMIT_DATA, (most, before[1]))
    try:
        yield
    except (MemoryError, RuntimeError) as problem:
        if not isinstance(problem, MemoryError) and "allocate memory" not in str(problem):
            raise
        raise _no_room(f"more than the {format_bytes(free)} that are free", why) from problem
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _data_bytes(status: Path = Path("/proc/self/status")) -> int:
    """Return the bytes of data that this process has, 0 where the system does not say."""
    lines = status.read_text().splitlines() if status.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmData:")), 0)


def _no_room(needed: str, why: Exception | None) -> JobError:
    message = f"the model has no room on this machine: it takes {needed}"
    message += f"\n  {why}" if why else ""
    hint = "let `model()` build it without asking for values of its parameters"
    return JobError(message, hint=f"{hint}, or plan on a machine with more memory")


def _is_large(captured: Capture) -> bool:
    """Return whether running a job here takes more than seconds."""
    flop = sum(node.flop for node in captured.graph.nodes)
    return bytes_of(captured.model.parameters()) > _EXAMINED_BYTES or flop > _EXAMINED_FLOP


def _told(found: Planning, care: CheckOptions) -> Planning:
    """Return it with a line that says what was not examined, and why."""
    if care.check and not is_hollow(found.captured.model):
        return found
    size = format_bytes(bytes_of(found.captured.model.parameters()))
    why = f"{size} of weights are not made here for machines elsewhere: {_WHAT}"
    by = "only choice" if care.check else "user"
    left_out = Decision("examination", "left out", by, why if care.check else f"as asked: {_WHAT}")
    return found._replace(decisions=(*found.decisions, left_out))
