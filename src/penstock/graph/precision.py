"""Precision: which numbers of a step have 16 bits, where the job asks for that.

    weights      those of float32 are kept so (masters: what the optimizer changes, a checkpoint
                 holds); forward and backward read copies in 16 bits, made after every update.  The
                 scales and shifts of batch, instance, layer and group norms are read as they are
    ops          model and loss run under torch.autocast of that dtype (an LSTM on a CPU:
                 narrow_lstm.py)
    gradients    those of one micro-batch come in the dtype of the copy; their sum is in float32
    buffers      stay as they are

The plain loop is the same without a copy that lasts: the weights are cast in front of every
forward, and autograd casts their gradients back.
"""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import nn

from penstock import _compat
from penstock.device import CPU, here
from penstock.graph.narrow_lstm import narrow_lstm
from penstock.graph.waiting import lent, waits
from penstock.job import Job

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_NORMS = (nn.LayerNorm, nn.GroupNorm, *_BATCH_NORMS, *_INSTANCE_NORMS)


def narrowed(job: Job, model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of which a step reads a copy in 16 bits, by name."""
    if job.precision is None:
        return {}
    norms = (module for module in model.modules() if isinstance(module, _NORMS))
    kept = {id(one) for norm in norms for one in norm.parameters(recurse=False)}
    rows = model.named_parameters()
    return {n: p for n, p in rows if p.dtype == torch.float32 and id(p) not in kept}


@contextmanager
def cast_weights(job: Job, model: nn.Module) -> Generator[None]:
    """Give the model weights in 16 bits; their gradients are those of its own.  May be nested."""
    wide, dtype = narrowed(job, model), dtype_of(job)
    if not wide:
        yield
        return
    copies = {name: parameter.to(dtype) for name, parameter in wide.items()}
    with _compat.reparametrize(model, copies):
        yield


@contextmanager
def computed_in(job: Job, model: nn.Module) -> Generator[None]:
    """Compute the job's loss inside: in its precision, or under its autocast."""
    with cast_weights(job, model), lent(model), _autocast(job, model):
        yield


@contextmanager
def traced_in(job: Job, model: nn.Module) -> Generator[None]:
    """Give the model parameters of the dtypes that a step reads, without values."""
    wide, dtype = narrowed(job, model), dtype_of(job)
    before = {name: parameter.data for name, parameter in wide.items()}
    for name, parameter in wide.items():
        parameter.data = torch.empty_like(before[name], dtype=dtype)
    try:
        yield
    finally:
        for name, parameter in wide.items():
            parameter.data = before[name]


def dtype_of(job: Job) -> torch.dtype:
    """Return the dtype of copies; float32 where there are none."""
    return torch.float32 if job.precision is None else getattr(torch, job.precision)


@contextmanager
def _autocast(job: Job, model: nn.Module) -> Generator[None]:
    name = job.precision or job.autocast
    if name is None:
        yield
        return
    device, dtype = next((p.device.type for p in model.parameters()), CPU), getattr(torch, name)
    if not torch.compiler.is_compiling() and waits(model):
        device = here().kind
    with torch.autocast(device, dtype=dtype), narrow_lstm(model, device, dtype):
        yield
