"""Eager memory: what a replica holds that no plan divides, beside the most that a rank may hold.

    weights and buffers + gradients + the optimizer's state + what a micro-batch saves for backward

The last two are measured: one micro-batch and one update, in a process of its own.

Ignores:  workspace of ops; what sums over ranks copy; whatever the job's code holds besides.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from penstock._compat import pytree
from penstock.device import here
from penstock.errors import PlanError, RunError
from penstock.graph.trace import build, build_model, loss_of
from penstock.graph.waiting import backward_of, has_to_wait, waits
from penstock.job import Job
from penstock.processes.child import apart
from penstock.state.optimizer.optimizer import eager_updates
from penstock.units import format_bytes

Parts = dict[str, int]


def check_memory(job: Job, memory: int | tuple[int, ...] | None, ranks: int, why: str) -> None:
    """Raise where a whole replica does not fit what a rank may hold.

    memory:   of each rank, or of one after the other; None: what an accelerator has.
    why:      there is no plan.
    Raises:   PlanError: it does not fit.
    """
    is_asked, memory = memory is not None, _room(job) if memory is None else memory
    if memory is None:
        return
    try:
        parts: Parts = apart(lambda: parts_of_replica(job))
    except RunError:  # the job's own code fails: it does so in the run, and is reported there
        return
    total, caps = sum(parts.values()), memory if isinstance(memory, tuple) else (memory,)
    least = min(caps[:ranks])
    if total <= least:
        return
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
    message = f"a replica holds {format_bytes(total)}, and a rank may hold {format_bytes(least)}"
    needs = f"allow {format_bytes(total)}" if is_asked else "take a larger accelerator"
    hint = f"{needs}; only a plan divides a replica: change what keeps it away"
    raise PlanError(f"{message}\n{listed}\nno plan: {why or 'it is trained eagerly'}", hint=hint)


def _room(job: Job) -> int | None:
    """Return what an accelerator has for a replica; None: there is none, or plainly enough."""
    is_small = here().is_cpu or not has_to_wait(build_model(job))
    return None if is_small else here().usable_bytes


def parts_of_replica(job: Job) -> Parts:
    """Return the bytes of what a replica holds in a step, by name.

    Of a model that waits for an accelerator, without activations.
    """
    model, batch = build(job)
    parameters = list(model.parameters())
    weights = _bytes([*parameters, *model.buffers()])
    known = {_key(tensor) for tensor in [*parameters, *model.buffers(), *pytree.tree_leaves(batch)]}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if _key(tensor) not in known:
            saved[_key(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    updates = eager_updates(job, model)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(job, model, batch)
    activations = sum(saved.values())
    backward_of(loss, model)
    given = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    updates.step(0, given)
    state = _bytes(pytree.tree_leaves(dict(updates.optimizer.state)))
    gradients = _bytes(given.values())
    parts = {"weights": weights, "gradients": gradients, "optimizer state": state}
    return parts if waits(model) else {**parts, "activations": activations}


def _key(value: Any) -> int:
    return value.untyped_storage().data_ptr() if isinstance(value, Tensor) else 0


def _bytes(values: Iterable[Any]) -> int:
    """Return the bytes of tensors, those of one storage once."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return sum({_key(t): t.untyped_storage().nbytes() for t in tensors}.values())
