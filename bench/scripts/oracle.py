"""The plain loop that a script means, written apart from the product.

Nothing of Penstock is used but what the job's own file uses, and the public definition of what
random ops draw (`SeededRandom`, `micro_batch_seed`): what torch's own generator gives in the model
and in the optimizer is the one thing that it defines, and a loop leaves to the order of calls.
"""

import importlib.util
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._pytree import tree_flatten, tree_unflatten

from penstock.graph.code import SeededRandom, micro_batch_seed

FLOAT32 = torch.finfo(torch.float32)
UPDATES = 0x6A09E667  # added to the job's seed for what an optimizer draws

OF_CHECKPOINT = {"use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug"}

State = dict[str, Tensor]


class Found(NamedTuple):
    """Tensors and plain values by the keys of a checkpoint, and the loss of every step."""

    tensors: State
    plain: dict[str, object]
    losses: list[float]


class DataEndedError(Exception):
    """The data ended before the steps did."""


class Weights(list[nn.Parameter]):
    """What the optimizer is given: what model.parameters() gives; they also know their names."""

    names: list[str]

    def named(self) -> list[tuple[str, nn.Parameter]]:
        return list(zip(self.names, self, strict=True))


def load(path: Path, name: str) -> Any:
    """Return what function `name` of a file returns, imported as a script beside its neighbours.

    Activations are not computed twice in the plain loop: `checkpoint` means the plain call.
    """
    torch.utils.checkpoint.checkpoint = lambda function, *args, **options: function(
        *args, **{key: x for key, x in options.items() if key not in OF_CHECKPOINT}
    )
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)()


def plain_loop(job: Any, steps: int, *, delay: int = 0, moved: float = 0.0) -> Found:
    """Train for some steps; with a delay, gradients are those of the weights `delay` steps ago.

    moved:    by how much of itself each weight is moved before the first step, if it is a float32;
              others likewise, as their numbers are rounded.
    Raises:   DataEndedError: the data ended.
    """
    torch.manual_seed(job.seed)
    model = job.model()
    named = dict(model.named_parameters())
    weights = Weights(named.values())
    weights.names = list(named)
    with torch.no_grad():
        for weight in weights if moved else ():
            weight.mul_(1 + moved * torch.finfo(weight.dtype).eps / FLOAT32.eps)
    optimizer = job.optimizer(weights)
    make = getattr(job, "scheduler", None)
    scheduler = make(optimizer) if make is not None else None
    rates = [group["lr"] for group in optimizer.param_groups]
    older = [[p.detach().clone() for p in weights]] * delay
    averaged = _average_of(job, model)
    data, losses = iter(job.data(0)), list[float]()
    for step in range(steps):
        now = [p.detach().clone() for p in weights] if delay else []
        if delay:
            _put(weights, older[0])
        losses.append(_gradients(job, model, data, step))
        if delay:
            _put(weights, now)
            older = [*older[1:], now]
        if job.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(weights, job.clip_norm)
        if job.learning_rate is not None:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * job.learning_rate(step)
        with SeededRandom(micro_batch_seed(job.seed + UPDATES, step)):
            optimizer.step()
        optimizer.zero_grad()
        if averaged is not None and step + 1 >= job.average.start:
            averaged.update_parameters(model)
        if scheduler is not None:
            scheduler.step()
    found = _state(model, named, optimizer, losses)
    if averaged is not None:
        rows = averaged.module.named_parameters()
        for name, average in rows:
            found.tensors[f"optimizer/{name}/average"] = average.detach()
            found.plain[f"optimizer/{name}/average_step"] = steps
    return found


def _average_of(job: Any, model: nn.Module) -> AveragedModel | None:
    """Return torch's own average of the weights, where the job asks for one at each step."""
    if getattr(job, "average", None) is None:
        return None
    assert job.average.every == 1, "the loop takes the weights of each step"
    decay = job.average.decay
    return AveragedModel(model, multi_avg_fn=decay and get_ema_multi_avg_fn(decay))


def _gradients(job: Any, model: nn.Module, data: Iterator[Any], step: int) -> float:
    """Leave the step's gradient in `.grad`; return its mean loss."""
    total = 0.0
    for number in range(job.micro_batches):
        try:
            batch = _tensors(next(data))
        except StopIteration:
            raise DataEndedError from None
        with SeededRandom(micro_batch_seed(job.seed, step * job.micro_batches + number)):
            cast = job.autocast and torch.autocast("cpu", dtype=getattr(torch, job.autocast))
            with cast or nullcontext():
                loss = _loss_of(job.loss(model, batch))
            (loss / job.micro_batches).backward()
        total += loss.item()
    return total / job.micro_batches


def _tensors(batch: Any) -> Any:
    """Return the batch as it is, but numpy's arrays and numbers as tensors (docs/job.md)."""
    leaves, structure = tree_flatten(batch)
    if not any(isinstance(leaf, np.ndarray | np.generic) for leaf in leaves):
        return batch
    return tree_unflatten(
        [torch.as_tensor(x) if isinstance(x, np.ndarray | np.generic) else x for x in leaves],
        structure,
    )


def _loss_of(value: Any) -> Tensor:
    """Return the loss where figures stand beside it."""
    return value[0] if isinstance(value, tuple) else value


def _put(parameters: list[nn.Parameter], values: list[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)


def is_strided(tensor: Tensor) -> bool:
    """Return whether it is no sparse tensor, which no checkpoint holds (docs/job.md)."""
    return tensor.layout is torch.strided


def _put_state(place: str, value: Any, tensors: State, plain: dict[str, object]) -> None:
    """Add a value of an optimizer's state; the tensors in lists and dicts are numbered, as met."""
    if isinstance(value, Tensor):
        tensors[place] = value
        return
    plain[place] = value
    inside = tree_flatten(list(value) if isinstance(value, deque) else value)[0]
    found = [leaf for leaf in inside if isinstance(leaf, Tensor)]
    tensors |= {f"{place}/{number}": leaf for number, leaf in enumerate(found)}


def _state(
    model: nn.Module, named: dict[str, nn.Parameter], optimizer: Any, losses: list[float]
) -> Found:
    tensors = {f"weights/{name}": value.detach() for name, value in model.named_parameters()}
    buffers = ((name, value) for name, value in model.named_buffers())
    tensors |= {f"buffers/{name}": value for name, value in buffers if is_strided(value)}
    plain: dict[str, object] = {}
    for name, parameter in named.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            _put_state(f"optimizer/{name}/{key}", value, tensors, plain)
    return Found({key: value.clone() for key, value in tensors.items()}, plain, losses)
