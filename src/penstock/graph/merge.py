"""Merge: consecutive micro-batches joined into one, where that gives the same gradient; and a job
that begins with a later one.

Larger micro-batches make larger products and fewer calls; smaller ones make a smaller bubble
and less memory.  Joining k of them along their first dimension leaves the gradient as it was
if the loss is a mean over independent samples, which is tested, not assumed.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from penstock.batches import ReadNumbers, read, started
from penstock.errors import GraphError
from penstock.graph.code import seed_ahead
from penstock.graph.contents import flatten, rebuilt
from penstock.graph.graph import Graph
from penstock.graph.trace import build, loss_and_figures, on_device
from penstock.job import Job

_TOLERANCE = 1e-4  # of gradients, relative; sums are made in another order


def merged(job: Job, count: int) -> Job:
    """Return `job` with `count` consecutive micro-batches joined into one.

    Raises:   GraphError: a step's micro-batches cannot be divided so; the call of its data:
              leaves that cannot be joined.
    """
    if count == 1:
        return job
    if job.micro_batches % count:
        raise GraphError(f"{job.micro_batches} micro-batches cannot be joined by {count}")

    data = _Merged(job.data, count)
    return replace(job, data=data, micro_batches=job.micro_batches // count)


def ahead(job: Job, count: int) -> Job:
    """Return a job whose micro-batch k is number k + `count` of `job`, its dropout too.

    count:    may be below 0, for a job of which only later micro-batches are read.
    Its weights begin otherwise: it goes on from a checkpoint.
    """
    if count == 0:
        return job
    return replace(job, data=_Ahead(job.data, count), seed=seed_ahead(job.seed, count))


@final
@dataclass(frozen=True, slots=True)
class _Ahead:
    """Data whose micro-batch k is number k + `count` of another."""

    data: Callable[[int], Iterator[Any]]
    count: int

    def __call__(self, start: int) -> Iterator[Any]:
        return self.picked(ReadNumbers.all_from(start))

    def picked(self, reads: ReadNumbers) -> Iterator[Any]:
        """Return the micro-batches of these numbers, in this order."""
        return read(self.data, reads._replace(first=reads.first + self.count))


@final
@dataclass(frozen=True, slots=True)
class _Merged:
    """Data whose micro-batch k is `count` of another, from number k * count on, joined."""

    data: Callable[[int], Iterator[Any]]
    count: int

    def __call__(self, start: int) -> Iterator[Any]:
        return self.picked(ReadNumbers.all_from(start))

    def picked(self, reads: ReadNumbers) -> Iterator[Any]:
        """Return the micro-batches of these numbers, in this order; the last is a whole one."""
        of = tuple(k for p in reads.places for k in range(p * self.count, (p + 1) * self.count))
        wanted = ReadNumbers(
            reads.first * self.count, of, reads.every * self.count, reads.at * self.count
        )
        source = read(self.data, wanted)
        while True:
            # each copied before the next is read, into whose memory that may be
            parts = [on_device(part) for part in itertools.islice(source, self.count)]
            if len(parts) < self.count:
                return
            yield _join(parts)


def _join(parts: list[Any]) -> Any:
    leaves, specs = zip(*map(flatten, parts), strict=True)
    if any(spec != specs[0] for spec in specs):
        raise GraphError("micro-batches of different structure cannot be joined")
    return rebuilt([_joined(row) for row in zip(*leaves, strict=True)], specs[0])


def _joined(leaves: tuple[Any, ...]) -> Any:
    if all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves):
        return torch.cat(leaves)
    if any(isinstance(leaf, Tensor) for leaf in leaves) or any(x != leaves[0] for x in leaves):
        raise GraphError("a batch holds values without a first dimension: it cannot be joined")
    return leaves[0]


def merges(job: Job, graph: Graph, count: int) -> bool:
    """Return whether joining `count` micro-batches gives the same gradient, by trying it.

    A step that draws random numbers or updates buffers is refused untried: its
    micro-batches are not independent of how they are cut.
    """
    if job.micro_batches % count or graph.effects():
        return False
    try:
        whole = _gradient(merged(job, count), 1)
    except (GraphError, RuntimeError, TypeError):  # the model insists on its batch size
        return False
    parts = _gradient(job, count)
    return all(_close(a, b) for a, b in zip(whole, parts, strict=True))


def _gradient(job: Job, count: int) -> list[Tensor | None]:
    """Return the mean gradient of the first `count` micro-batches, and the means of the figures."""
    model, _ = build(job)
    totals: dict[str, Tensor] = {}
    for batch in itertools.islice(started(job.data, 0), count):
        loss, figures = loss_and_figures(job, model, on_device(batch))
        (loss / count).backward()  # pyright: ignore[reportUnknownMemberType]
        for name, value in figures.items():
            totals[name] = totals.get(name, torch.tensor(0.0)) + value.detach().double() / count
    return [*(p.grad for p in model.parameters()), *totals.values()]


def _close(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return not a.numel() or bool((a - b).abs().max() <= _TOLERANCE * b.abs().max())
