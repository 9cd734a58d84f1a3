"""Finer: gradients that differ by more than sums in another order usually do, judged in 64 bits.

A sum of many terms that nearly cancel out has few correct digits in 32 bits, in whatever order it
is made: a convolution's bias sums all places of all samples, and joined micro-batches make such a
sum longer.  So the plain loop's step is made once more in 64 bits: a gradient that is as near to
that one as the plain loop's own is, but for a factor, differs by rounding.

Ignores:  jobs in 16 bits, and what cannot be made in 64; they are judged as they stand.
"""

import copy
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.batches import started
from penstock.graph.code import SeededRandom, micro_batch_seed
from penstock.graph.contents import mapped
from penstock.graph.trace import loss_of, on_device
from penstock.job import Job
from penstock.training.compare import Difference, apart_of, compared_gradients, greatest
from penstock.training.plain import Plain

_WORSE = 64.0  # how much farther from 64 bits than the plain loop a longer sum, or another, may be
_MOST = 3e-4  # of the greatest number: rounding in 32 bits is less, or the step is not the same

Tensors = Mapping[str, Tensor]


def judged_finely(
    plain: Plain, job: Job, step: int, state: Tensors, pair: tuple[Tensors, Tensors]
) -> list[Difference]:
    """Return how the gradients of a step differ, and apart from that what is rounding.

    job:      whose data is read once more.
    state:    weights and buffers before the step, by name.
    pair:     the gradients that were found, and those of the plain loop.
    """
    found, expected = pair
    exact = None if _is_narrow(plain) else _in_64_bits(plain, job, step, state)
    if exact is None:
        return [compared_gradients(found, expected)]
    rounded = {n for n in expected if n in found and _is_rounding(found[n], expected[n], exact, n)}
    rest = [{n: g for n, g in each.items() if n not in rounded} for each in (found, expected)]
    only = [{n: g for n, g in each.items() if n in rounded} for each in (found, expected)]
    rows = [compared_gradients(*rest)] if any(rest) else []
    least = compared_gradients(*only)
    return [*rows, Difference("rounding", least.where, least.value, least.bitwise)]


def _is_rounding(found: Tensor, expected: Tensor, exact: Tensors, name: str) -> bool:
    if name not in exact:
        return False
    off, own = apart_of(found, exact[name]), apart_of(expected, exact[name])
    scale = greatest(exact[name])
    if off is None or own is None or not scale:
        return False
    return off <= min(_WORSE * own, _MOST * scale) and own <= _MOST * scale


def _is_narrow(plain: Plain) -> bool:
    job = plain.job
    is_whole = plain.rounded is None and plain.sums is None
    return not is_whole or any((job.precision, job.autocast, job.sums))


def _in_64_bits(plain: Plain, job: Job, step: int, state: Tensors) -> dict[str, Tensor] | None:
    """Return the gradients of a step in 64 bits; None: the model or its loss cannot be so."""
    try:
        model = copy.deepcopy(plain.model).double()
        _put(model, state)
        first = step * job.micro_batches
        batches = itertools.islice(started(job.data, first), job.micro_batches)
        for index, batch in enumerate(batches, first):
            with SeededRandom(micro_batch_seed(job.seed, index)):
                loss = loss_of(job, model, mapped(on_device(batch), _wide))
                (loss / job.micro_batches).backward()  # pyright: ignore[reportUnknownMemberType]
    except Exception:  # noqa: BLE001 - whatever the author's model or loss raises in 64 bits
        return None
    if job.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _put(model: nn.Module, state: Tensors) -> None:
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            value.copy_(state[name])
            if isinstance(value, nn.Parameter):
                value.grad = None


def _wide(leaf: Any) -> Any:
    is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return leaf.double() if is_float else leaf
