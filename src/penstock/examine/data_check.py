"""Data check: whether the micro-batches of a job are a function of their number alone.

A run reads them on several ranks, each from where it begins, and a resumed one from the middle.
So a few micro-batches are read: in a row, each again, each as the first of an iterator of its own,
with other random states, and in another process; their digests must agree.  All of it is read in
forked processes, whatever the job's data changes there, but for the first micro-batch.

Not noticed:  what changes only later, as in a second epoch, or with what another program writes;
an order that depends on the hashes of strings, which differ in a later run.
"""

import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.batches.how import own_random
from penstock.batches.reads import started
from penstock.device import here
from penstock.errors import JobError, PenstockError
from penstock.examine.kept_containers import MEND, WRITTEN, writes_kept_containers
from penstock.examine.queries import text_of
from penstock.examine.surroundings import NOTES, NUMBER, noting
from penstock.graph.code import SeededRandom, micro_batch_seed
from penstock.graph.contents import flatten, mapped, own, seen
from penstock.graph.functional import where
from penstock.graph.shared_memory_views import overlaps_of
from penstock.graph.trace import build_model, loss_of
from penstock.graph.without_gradients import without_gradients
from penstock.job import Job
from penstock.processes.child import Beat, SilentError, can_fork, in_a_fork
from penstock.runtime.digest import digest_of

_LEAST, _MOST = 6, 64  # micro-batches read in a row
_BUDGET_S = 2.0  # after which fewer are read in a row, but two
_HELD = 4  # at a time, to see whether their memory is filled again
_AGAIN = 3  # read a second time
_PATIENCE, _PATIENCE_S = 30, 30.0  # with a silent process: times as long as here, and at least

_MEND = (
    "use ps.batches(dataset, batch_size) or ps.from_loader(loader), or make micro-batch k from k "
    "alone, as with torch.Generator().manual_seed(k)"
)
_GENERATORS: dict[str, tuple[Callable[[int], object], str]] = {
    "Python's": (random.seed, "random.Random(k)"),
    "numpy's": (np.random.seed, "numpy.random.default_rng(k)"),
    "torch's": (torch.default_generator.manual_seed, "torch.Generator().manual_seed(k)"),
}


@dataclass(frozen=True, slots=True)
class DataFound:
    """What was found about a job's data.

    problem:        why a micro-batch is not a function of its number alone, and how to fix it.
    reuses_memory:  whether the memory of one is filled again later.
    keeps:          what of it Python keeps from step to step, and no checkpoint; "" for nothing.
    begins:         digest of the first micro-batch; "" for nothing.
    """

    problem: str | None = None
    reuses_memory: bool = False
    keeps: str = ""
    begins: str = field(default="", compare=False)


def check_data(
    job: Job, *, per_step: int, first: int = 0, writes_batch: bool | None = None
) -> DataFound:
    """Return what is found by reading a few micro-batches from number `first` on.

    per_step:      micro-batches of a step, over all replicas.
    writes_batch:  whether the loss writes into the batch, as a trace of it knows; None: it is
                   computed once, where the data yields the same memory again.

    Reads about three steps, or what a few seconds allow.  Data that ends is no problem here.
    Raises:   JobError: the data raises; the message names the line.
    """
    look = partial(_look, job, per_step, first, writes_batch)
    with own_random():
        start = time.perf_counter()
        here = _first_digest(job, first)
        limit_s = max(_PATIENCE_S, _PATIENCE * (time.perf_counter() - start))
        if not can_fork():
            seen = look(_deaf)
            return DataFound(_words(seen, first, ()), seen.reuses_memory, _kept(job, seen))
        try:
            seen = _Seen(**in_a_fork(lambda beat: asdict(look(beat)), limit_s))
            there = in_a_fork(lambda beat: _begun(job, first, seen.starts[-1:], beat), limit_s)
        except SilentError as problem:
            what = f"in this process micro-batch {first} was read, but {problem.message}"
            why = "a run's ranks are such processes: they have none of this one's threads"
            return DataFound(f"{what}: {why}; start threads inside `data`", reuses_memory=False)
    words = _words(seen, first, [*here, *there])
    return DataFound(words, seen.reuses_memory, _kept(job, seen), here[0])


def check_here(job: Job, begins: str) -> None:
    """Return if this process, which has loaded the job, reads what forked ones have begun with.

    Where it does not, no rank and no plain loop in a fork reads what the author means.
    Raises:   JobError: it reads another first micro-batch.
    """
    NOTES.lines.pop(NUMBER, None)  # of who has asked for it before
    with own_random(), noting():
        (here,) = _first_digest(job, 0)
    if here == begins:
        return
    line = NOTES.lines.get(NUMBER)
    why = "the number of the process, a thread, or what only the first process has is in it"
    if line is not None:
        why = f"{line[0]}:{line[1]} asks for {NUMBER}"
    message = f"micro-batch 0 differs in forked processes, as ranks are: {why}"
    raise JobError(message, hint=_MEND)


# -- reading --------------------------------------------------------------------------------------


def _first_digest(job: Job, first: int) -> list[str]:
    """Return the digest of micro-batch `first`, the first one read here; "" where there is none.

    The model is built first where the data cannot be read without one: a loop has it by then, and
    the data may ask it for its device or its length.  What it reads of weights is found later.
    Raises:   JobError: the data raises all the same.
    """
    try:
        return _digests(job, first, 1) or [""]
    except JobError:
        build_model(job)
        return _digests(job, first, 1) or [""]


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one process saw; offsets are from the first number.

    digests:  of the micro-batches in a row.
    again:    offset of one that differed when it was read again.
    starts:   offsets at which iterators were begun, as far as was looked.
    begun:    digest of what the last of these began with, if it differed; "" for nothing.
    drawn:    whose generators are drawn from without being seeded.
    written:  that the loss writes into what the data yields again; "" if it does not.
    """

    digests: list[str]
    reuses_memory: bool
    again: int | None
    starts: list[int]
    begun: str | None
    drawn: list[str]
    written: str


def _look(job: Job, per_step: int, first: int, writes_batch: bool | None, beat: Beat) -> _Seen:
    left = max(1, job.num_steps * per_step - first)
    count = min(max(_LEAST, per_step + 2), _MOST, left)
    digests, reuses = _in_a_row(job, first, count, beat)
    second = _digests(job, first, min(_AGAIN, len(digests)), beat)
    pairs = itertools.zip_longest(second, digests[:_AGAIN])
    again = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
    starts, begun = list[int](), None
    for at in _starts(per_step, len(digests)):
        starts.append(at)
        (found,) = _digests(job, first + at, 1, beat) or [""]
        if found != digests[at]:
            begun = found
            break
    drawn = _drawn_from(job, first, digests[:2], beat)
    written = ""
    if writes_batch is not False and _is_written(job, first, digests, reuses=reuses):
        written = _WRITTEN
    elif writes_kept_containers(job, first, left):
        written = WRITTEN
    return _Seen(digests, reuses, again, starts, begun, drawn, written)


def _is_written(job: Job, first: int, digests: Sequence[str], *, reuses: bool) -> bool:
    """Return whether what the loss writes into micro-batches is in what the data yields later.

    That is the same one read again, or the next ones, which the loop reads once it was written.
    digests:  of the micro-batches in a row, where nobody writes.
    """
    row = list(itertools.islice(started(job.data, first), min(_HELD, len(digests))))
    if not _share_memory([next(started(job.data, first), None), *row]):  # all kept at a time
        return False
    device, model, found = here().place, build_model(job), list[str]()
    for number, batch in enumerate(itertools.islice(started(job.data, first), len(row)), first):
        found.append(digest_of(flatten(batch)[0]))
        taken = seen(batch, device) if can_fork() else own(batch, device)
        taken = mapped(taken, lambda leaf: leaf)  # its containers are for `writes_kept_containers`
        try:
            with SeededRandom(micro_batch_seed(job.seed, number)):
                without_gradients(partial(loss_of, job, model, taken))
        except Exception:  # noqa: BLE001 - the job's loss fails, as whoever computes it next will say
            return False
        is_written = digest_of(flatten(taken)[0]) != found[-1]
        if not is_written or not can_fork():  # nothing of the job's may change in this process
            return is_written and not reuses
    found.append(digest_of(flatten(next(started(job.data, first), None))[0]))
    return found != [*digests[: len(row)], digests[0]]


def _share_memory(batches: Sequence[Any]) -> bool:
    """Return whether two of these micro-batches, all of them kept, have memory in common."""
    rows = [[leaf for leaf in flatten(batch)[0] if isinstance(leaf, Tensor)] for batch in batches]
    leaves = list(itertools.chain.from_iterable(rows))
    owner = list(itertools.chain.from_iterable([k] * len(row) for k, row in enumerate(rows)))
    return any(len({owner[at] for at in one.leaves}) > 1 for one in overlaps_of(leaves))


def _in_a_row(job: Job, first: int, count: int, beat: Beat) -> tuple[list[str], bool]:
    """Return digests, and whether what was yielded is written later."""
    until, digests, reuses = time.perf_counter() + _BUDGET_S, list[str](), False
    held: deque[tuple[str, Sequence[Any]]] = deque()
    for leaves in itertools.islice(_leaves(job, first), count):
        beat()
        digests.append(digest_of(leaves))
        held.append((digests[-1], leaves))
        if len(held) > _HELD:
            digest, older = held.popleft()
            reuses = reuses or digest_of(older) != digest
        if time.perf_counter() > until and len(digests) > 1:
            break
    return digests, reuses or any(digest_of(leaves) != digest for digest, leaves in held)


def _starts(per_step: int, count: int) -> list[int]:
    """Return where ranks begin: one after the first, a second replica, the next step and after."""
    parts = next((n for n in range(2, per_step + 1) if per_step % n == 0), 1)
    return sorted({at for at in (1, per_step // parts, per_step, count - 1) if 0 < at < count})


def _drawn_from(job: Job, first: int, expected: Sequence[str], beat: Beat) -> list[str]:
    """Return whose generators the data draws from, where a seed of them makes it the same again."""

    def read(**seeds: int) -> list[str]:
        for name, (seed, _) in _GENERATORS.items():
            seed(seeds.get(name, 1))
        return _digests(job, first, len(expected), beat)

    before = read()
    if before == expected == read(**dict.fromkeys(_GENERATORS, 2)):
        return []
    found = [name for name in _GENERATORS if read(**{name: 2}) != before]
    return found if read() == before else []


def _begun(job: Job, first: int, starts: Sequence[int], beat: Beat) -> list[str]:
    """Return the digests that iterators from there on begin with; "" for nothing."""
    offsets = (0, *starts)
    return [(_digests(job, first + at, 1, beat) or [""])[0] for at in offsets]


def _digests(job: Job, start: int, count: int, beat: Beat = lambda: None) -> list[str]:
    found: list[str] = []
    for leaves in itertools.islice(_leaves(job, start), count):
        beat()
        found.append(digest_of(leaves))
    return found


def _leaves(job: Job, start: int) -> Iterator[list[Any]]:
    """Yield the leaves of the micro-batches from `start` on.

    Raises:   JobError: the job's own code raises.
    """
    try:
        for batch in started(job.data, start):
            yield flatten(batch)[0]
    except PenstockError:
        raise
    except Exception as problem:  # whatever the job's code raises
        message = where(problem, f"the job's data fails from micro-batch {start} on")
        raise JobError(message, hint="does it run without Penstock?") from problem


def _deaf() -> None:
    """Nothing waits to hear from this process."""


# -- words ----------------------------------------------------------------------------------------


_WRITTEN = "the loss writes into the micro-batch, whose memory `data` yields again"


def _words(seen: _Seen, first: int, there: Sequence[str]) -> str | None:
    """Return what is wrong and how to fix it.

    there:  what iterators began with in the process that asks, and in another one at the first
            number and at the last start; nothing where there is none.
    """
    if not seen.digests:
        return None
    if seen.drawn:
        whose = " and ".join(f"{name} generator" for name in seen.drawn)
        ways = ", ".join(_GENERATORS[name][1] for name in seen.drawn)
        what = f"`data` draws from {whose}, which the number of a micro-batch does not seed"
        return f"{what}: use ps.batches(dataset, batch_size), or {ways} for micro-batch k"
    found = _again(seen, first, there) or _apart(seen, first) or _elsewhere(seen, first, there)
    if not found and seen.written:
        mend = "let the loss write into a clone()" if seen.written == _WRITTEN else MEND
        return f"{seen.written}, so later ones hold what it wrote: {mend}"
    return f"{found}; {_MEND}" if found else None


def _kept(job: Job, seen: _Seen) -> str:
    if not seen.written:
        return ""
    code = getattr(job.loss, "__code__", None)
    line = "" if code is None else f"{text_of((code.co_filename, code.co_firstlineno))}: "
    return f"{line}{seen.written}"


def _again(seen: _Seen, first: int, there: Sequence[str]) -> str:
    if seen.again is None:
        return ""
    what = f"micro-batch {first + seen.again} differs when it is read again"
    if there[1:2] == seen.digests[:1]:
        return f"{what}: an iterator, a counter or a generator outlives the call of `data`"
    return f"{what}: the time is in it, or random numbers that nothing seeds, or what was read"


def _apart(seen: _Seen, first: int) -> str:
    if seen.begun is None:
        return ""
    at = seen.starts[-1]
    call, number = f"data({first + at})", first + at
    if not seen.begun:
        return f"{call} yields nothing, and data({first}) yields micro-batch {number}"
    if seen.begun == seen.digests[0]:
        return f"{call} begins where data({first}) does: it ignores its argument"
    as_well = seen.digests.index(seen.begun) if seen.begun in seen.digests else None
    which = "another one" if as_well is None else f"micro-batch {first + as_well}"
    return f"{call} begins with {which}, not with micro-batch {number} of data({first})"


def _elsewhere(seen: _Seen, first: int, there: Sequence[str]) -> str:
    at = (0, 0, *seen.starts[-1:])
    differ = (k for k, digest in zip(at, there, strict=False) if digest != seen.digests[k])
    number = next(differ, None)
    if number is None:
        return ""
    what = f"micro-batch {first + number} differs in another process"
    return f"{what}: its number, its name, its environment or the time is in it"
