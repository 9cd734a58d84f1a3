"""In float64: gradients further apart than sums in another order usually are, judged in 64 bits.

A sum of many terms that nearly cancel out has few correct digits in 32 bits, in whatever order it
is made: a convolution's bias sums all places of all samples, and joined micro-batches make such a
sum longer.  So the plain loop's step is made once more in 64 bits: a gradient that is as near to
that one as the plain loop's own is, but for a factor, differs by rounding.

Gradients of 16 bits are rounded in each micro-batch and each time one is added: of these only the
sum is made in 64 bits, and they may be no more than twice as far from it as the plain loop's own.

Ignores:  jobs that compute in 16 bits with wider weights, and what cannot be made in 64 bits;
          they are judged as they stand.
"""

import copy
import itertools
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.batches.reads import started
from penstock.graph.code import SeededRandom, micro_batch_seed
from penstock.graph.contents import mapped
from penstock.graph.trace import loss_of, on_device
from penstock.graph.waiting import backward_of
from penstock.job import Job
from penstock.prove.compare import (
    Difference,
    apart_of,
    compared_gradients,
    greatest,
    in_widths,
    is_narrow,
    least_scale,
)
from penstock.prove.plain import Plain

_WORSE = 64.0  # how much farther from 64 bits than the plain loop a longer sum, or another, may be
_MOST = 3e-4  # of the greatest number: rounding in 32 bits is less, or the step is not the same
_CANCELLED = 30.0  # times the least scale of a gradient: 1e-5 of the greatest, with _MOST
_NARROW = 2.0, 1e-1  # both for gradients of 16 bits, each micro-batch's of which is rounded

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
    exact = None if _is_rounded(plain) else _exact(plain, job, step, state, expected.values())
    if exact is None:
        return list(in_widths(compared_gradients, found, expected))
    least = least_scale(expected)
    near = partial(_is_rounding, exact=exact, least=least)
    rounded = {n for n in expected if n in found and near(n, found[n], expected[n])}
    rest = [{n: g for n, g in each.items() if n not in rounded} for each in (found, expected)]
    only = [{n: g for n, g in each.items() if n in rounded} for each in (found, expected)]
    compare = partial(compared_gradients, least=least)
    rows = in_widths(compare, *rest) if any(rest) else ()
    most = compared_gradients(*only)
    return [*rows, Difference("rounding", most.where, most.value, most.bitwise)]


def _is_rounding(
    name: str, found: Tensor, expected: Tensor, *, exact: Tensors, least: float
) -> bool:
    """Return whether a gradient is as near to that in 64 bits as the plain loop's own, but for a
    factor.

    least:    the scale of one that is less, as where all its terms cancel out.
    """
    if name not in exact:
        return False
    off, own = apart_of(found, exact[name]), apart_of(expected, exact[name])
    scale = max(greatest(exact[name]), _CANCELLED * least)
    if off is None or own is None or not scale:
        return False
    worse, most = _NARROW if is_narrow(expected) else (_WORSE, _MOST)
    return off <= min(worse * own, most * scale) and own <= most * scale


def _is_rounded(plain: Plain) -> bool:
    job = plain.job
    is_whole = plain.rounded is None and plain.sums is None
    return not is_whole or any((job.precision, job.autocast, job.sums))


def _exact(
    plain: Plain, job: Job, step: int, state: Tensors, expected: Iterable[Tensor]
) -> dict[str, Tensor] | None:
    """Return the gradients of a step as they would be without rounding.

    Those of 16 bits of the model as it is, which the author may hold to that; only their sum over
    micro-batches is made in 64.  None: the model or its loss cannot be so.
    """
    widths = {is_narrow(each) for each in expected}
    found: dict[str, Tensor] = {}
    for narrow in sorted(widths):
        try:
            made = _gradients(plain, job, step, state, widely=not narrow)
        except Exception:  # noqa: BLE001 - whatever the author's model or loss raises in 64 bits
            continue
        own = {n for n, p in plain.parameters.items() if is_narrow(p) == narrow}
        found |= {name: gradient for name, gradient in made.items() if name in own}
    return found or None


def _gradients(
    plain: Plain, job: Job, step: int, state: Tensors, *, widely: bool
) -> dict[str, Tensor]:
    """Return the gradients of a step, summed in 64 bits; of a model in 64 bits if `widely`."""
    model = copy.deepcopy(plain.model)
    model = model.double() if widely else model
    _put(model, state)
    first, sums = step * job.micro_batches, dict[str, Tensor]()
    batches = itertools.islice(started(job.data, first), job.micro_batches)
    for index, batch in enumerate(batches, first):
        batch = on_device(batch)
        with SeededRandom(micro_batch_seed(job.seed, index)):
            loss = loss_of(job, model, mapped(batch, _wide) if widely else batch)
            backward_of(loss / job.micro_batches, model)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                part = parameter.grad.double()
                sums[name] = sums[name] + part if name in sums else part
                parameter.grad = None
    if job.clip_norm is not None:
        norm = sum(float(total.square().sum()) for total in sums.values()) ** 0.5
        sums = {n: total * min(1.0, job.clip_norm / (norm + 1e-6)) for n, total in sums.items()}
    return sums


def _put(model: nn.Module, state: Tensors) -> None:
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if name in state:  # forward makes the others
                value.copy_(state[name])
            if isinstance(value, nn.Parameter):
                value.grad = None


def _wide(leaf: Any) -> Any:
    is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return leaf.double() if is_float else leaf
