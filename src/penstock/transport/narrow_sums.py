"""Narrow sums: gradients summed over ranks, of which the numbers travel in 16 bits.

    each rank    rounds its gradients to 16 bits, and gives each other one that one's part
    of its part  adds up all in float32, in the order of the ranks, and rounds the sum to 16 bits
    then         all have the rounded sums of all parts, in float32; in shards, of their own

A number travels 2 (n - 1) / n times, as in a ring, in half the bytes; and it is rounded twice,
however many ranks there are, where a ring in 16 bits would round at each of them.

Source:  Theano-MPI, arXiv:1605.08325, section 3.2 (alltoall-sum-allgather, float16).
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from penstock.job import Job
from penstock.sums import HALVES
from penstock.transport.routed_sums import sum_along
from penstock.transport.transport import Transport

_BLOCK = 2**20  # numbers at once: it bounds what is held besides


def sum_over(
    transport: Transport, gradient: Tensor, ranks: tuple[int, ...], job: Job, topology: str = ""
) -> None:
    """Replace a gradient by its sum over ranks, bitwise the same on all.

    topology:  along whose rounds numbers go that travel as they are.
    Raises:    TransportError.
    """
    dtype = narrow_of(gradient, job)
    if dtype is None:
        sum_along(transport, gradient, ranks, topology)
        return
    own, flat = ranks.index(transport.rank), gradient.detach().contiguous().view(-1)
    for first in range(0, flat.numel(), _BLOCK):
        block = flat[first : first + _BLOCK]
        cuts = [len(block) * at // len(ranks) for at in range(len(ranks) + 1)]
        _scatter(transport, block, cuts, ranks, dtype)
        narrow, mine = block.to(dtype), slice(cuts[own], cuts[own + 1])
        narrow[mine] = block[mine]
        transport.all_gather(narrow, cuts, ranks)
        block.copy_(narrow)
    if not gradient.is_contiguous():
        gradient.detach().copy_(flat.view(gradient.shape))


def scatter_over(
    transport: Transport, whole: Tensor, cuts: Sequence[int], ranks: tuple[int, ...], job: Job
) -> None:
    """Replace this rank's part of a flat gradient by its sum, as Transport.reduce_scatter does.

    Raises:   TransportError.
    """
    dtype = narrow_of(whole, job)
    if dtype is None:
        transport.reduce_scatter(whole, cuts, ranks)
    else:
        _scatter(transport, whole, cuts, ranks, dtype)


def narrow_of(gradient: Tensor, job: Job) -> torch.dtype | None:
    """Return the dtype in which the numbers of a gradient travel; None: in its own."""
    if job.sums not in HALVES or gradient.dtype != torch.float32:
        return None
    return getattr(torch, job.sums)


def _scatter(
    transport: Transport,
    whole: Tensor,
    cuts: Sequence[int],
    ranks: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    own, step = ranks.index(transport.rank), _BLOCK // len(ranks)
    for at in range(0, max(end - start for start, end in pairwise(cuts)), step):
        parts = [whole[min(a + at, b) : min(a + at + step, b)] for a, b in pairwise(cuts)]
        given = [part.to(dtype) for part in parts]
        came = [torch.empty_like(given[own]) for _ in ranks]
        came[own] = given[own]
        transport.swap(given, came, ranks)
        total = came[0].float()
        for other in came[1:]:
            total += other
        parts[own].copy_(total.to(dtype))
