"""Kept containers: whether the loss writes into a dict, list or record that `data` yields again.

A rank copies what it reads, so that nothing of what a loss puts into a batch (`batch["seen"] += 1`)
is there when the data yields the same object once more.  In a plain loop it is.  So some
micro-batches are computed twice from the same weights: as copies, and as the data's own objects,
one after the other.  Where losses or containers differ, what was written matters; a loss that
writes before it reads, and the same each time (`batch["x"] = batch["x"].float()`), is no finding.

Not noticed:  a container that comes again neither in the next micro-batch nor where data begins
anew; a loss that writes into none of the first four.
"""

import itertools
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.batches.reads import started
from penstock.device import here
from penstock.errors import JobError
from penstock.graph.code import SeededRandom, micro_batch_seed
from penstock.graph.contents import containers, flatten, own, seen
from penstock.graph.trace import build_model, loss_of
from penstock.graph.without_gradients import without_gradients
from penstock.job import Job
from penstock.processes.child import can_fork
from penstock.runtime.digest import digest_of

WRITTEN = "the loss writes into a dict, a list or an object of the batch that `data` yields again"
MEND = "let it write into a copy, as of `batch = dict(batch)`, or keep what it counts in the model"
_MOST, _BUDGET_S = 64, 0.5  # micro-batches of a run that is read to its end; seconds for it
_LEAST = 4  # micro-batches that are computed
_MOVED = 0.01  # what is added to the weights before each of them

Computed = list[tuple[str, str]]


def writes_kept_containers(job: Job, first: int, left: int) -> bool:
    """Return whether what the loss puts into containers of the batch is there when they come again.

    left:     micro-batches until the run ends.
    Raises:   JobError: it is, and one process, too, would see a copy: of arrays, or on a device.
    """
    row = _row_with_repeats(job, first, left)
    if row is None:
        return False
    batches, copies = list(_batches(job, first, row)), list(_copies(job, first, row))
    before = [_contents(copy) for copy in copies]
    alone = _computed(job, first, copies)
    written = {
        id(node)
        for batch, copy, old in zip(batches, copies, before, strict=True)
        for node, was, now in zip(containers(batch), old, _contents(copy), strict=False)
        if was != now
    }
    times = Counter(id(node) for batch in batches for node in containers(batch))
    written = {key for key in written if times[key] > 1}
    if not written:
        return False
    views = [seen(batch, here().place) for batch in batches]
    if written <= {id(node) for view in views for node in containers(view)} and can_fork():
        own_objects = (seen(batch, here().place) for batch in _batches(job, first, row))
        return alone != _computed(job, first, own_objects)
    again = _computed(job, first, copies, moves=1)
    if again != _computed(job, first, _copies(job, first, row), moves=1):
        raise JobError(WRITTEN, hint=MEND)
    return False


class _ReadTwice(NamedTuple):
    """How many micro-batches are read, and whether the first of data begun anew comes then."""

    rows: int
    anew: bool


def _batches(job: Job, first: int, row: _ReadTwice) -> Iterator[Any]:
    yield from itertools.islice(started(job.data, first), row.rows)
    yield from itertools.islice(started(job.data, first), int(row.anew))


def _copies(job: Job, first: int, row: _ReadTwice) -> Iterator[Any]:
    return (own(batch, here().place) for batch in _batches(job, first, row))


def _row_with_repeats(job: Job, first: int, left: int) -> _ReadTwice | None:
    """Return how far to read until a container comes again; None: it does not before the end."""
    held = list(itertools.islice(started(job.data, first), min(2, left)))
    held += itertools.islice(started(job.data, first), 1)
    if not (_repeats(held[:2]) or _repeats(held)):
        return None
    rows, until = min(_LEAST, left), time.perf_counter() + _BUDGET_S
    held.clear()
    if left > _MOST:
        return _ReadTwice(rows, anew=True)
    for batch in itertools.islice(started(job.data, first), left):
        held.append(batch)
        if _repeats(held):
            return _ReadTwice(max(rows, len(held)), anew=len(held) < left)
        if time.perf_counter() > until:
            return _ReadTwice(rows, anew=True)
    return None


def _repeats(batches: Sequence[Any]) -> bool:
    """Return whether the last of these micro-batches has a container of another one."""
    before = {id(node) for batch in batches[:-1] for node in containers(batch)}
    return any(id(node) in before for node in containers(batches[-1] if batches else None))


def _computed(job: Job, first: int, batches: Iterable[Any], *, moves: int = 0) -> Computed:
    """Return of each of these micro-batches its loss, or what fails, and what it then holds.

    moves:    how often the weights have been moved before.
    """
    model, found = build_model(job), Computed()
    with _as_before(model):  # it may be the author's own
        for _ in range(moves):
            _move(model)
        for number, batch in enumerate(batches, first):
            try:
                with SeededRandom(micro_batch_seed(job.seed, number)):
                    told = repr(float(without_gradients(partial(loss_of, job, model, batch))))
            except Exception as problem:  # noqa: BLE001 - as whoever computes it next will say
                told = repr(problem)
            found.append((told, "".join(_contents(batch))))
            _move(model)
    return found


@contextmanager
def _as_before(model: nn.Module) -> Generator[None]:
    """Put the weights and the buffers of a model back at the end."""
    held = [(each, each.detach().clone()) for each in (*model.parameters(), *model.buffers())]
    try:
        yield
    finally:
        for each, before in held:
            if each.shape == before.shape:
                each.data.copy_(before)  # what looks at it stays
            else:
                each.data = before


def _move(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(_MOVED)


def _contents(batch: Any) -> Sequence[str]:
    """Return what is in each container of a batch, in the order of `containers`."""
    return [_content(node) for node in containers(batch)]


def _content(node: object) -> str:
    leaves, spec = flatten(node)
    return f"{spec} {digest_of(leaves)}"
