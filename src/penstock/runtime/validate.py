"""Validate: the mean loss over the validation micro-batches, in a way that changes nothing else.

During a run the first rank does it, of the checkpoint that was just written; the others wait.
"""

import json
import math
import random
import statistics
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import nn

from penstock.graph.trace import loss_and_figures, on_device
from penstock.job import Job
from penstock.runtime import checkpoint
from penstock.runtime.transport import Transport

_ALIVE_S = 60.0  # after which ranks that wait are told that it goes on: torch gives up on silence
_MORE = b"more"

Told = Callable[[int, int], None]  # (done, total)


def validated(
    job: Job, model: nn.Module, told: Told = lambda done, total: None
) -> dict[str, float]:
    """Return "val_loss" and the figures as "val_NAME", means over the job's validation.

    The model is in evaluation mode meanwhile.  Afterwards its modes and buffers, and the random
    states, are restored.  Empty where the validation is.
    """
    assert job.validation is not None, "the job has one"
    rows: list[dict[str, float]] = []
    with _unchanged(model), torch.no_grad():
        batches = list(job.validation())
        for number, batch in enumerate(batches, 1):
            loss, figures = loss_and_figures(job, model, on_device(batch))
            found = {"loss": loss, **figures}
            rows.append({f"val_{name}": float(value) for name, value in found.items()})
            told(number, len(batches))
    names = rows[0] if rows else ()
    return {name: statistics.fmean(row[name] for row in rows) for name in names}


@contextmanager
def _unchanged(model: nn.Module) -> Generator[None]:
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        random.setstate(state[0])
        np.random.set_state(state[1])
        torch.set_rng_state(state[2])
        if devices:
            torch.cuda.set_rng_state_all(devices)


def validate(
    job: Job,
    transport: Transport,
    checkpoints: Path,
    step: int,
    model: Callable[[], nn.Module],
    *,
    keeps_best: bool = True,
) -> Mapping[str, float]:
    """Return the validation of the checkpoint after `step` steps; every rank calls it.

    keeps_best:  whether the best one so far is kept as `checkpoints`/best.
    model:    returns the model with the weights of the checkpoint; called by the first rank.
    """
    everyone = tuple(range(transport.num_ranks))
    if transport.rank != 0:
        while (word := transport.broadcast_bytes(b"", everyone)) == _MORE:
            pass
        return json.loads(word)
    start_s = last_s = time.monotonic()

    def told(done: int, total: int) -> None:
        nonlocal last_s
        if time.monotonic() - last_s > _ALIVE_S:
            transport.broadcast_bytes(_MORE, everyone)
            last_s = time.monotonic()

    found = validated(job, model(), told)
    if keeps_best and math.isfinite(found.get("val_loss", math.nan)):
        checkpoint.keep_best(checkpoints, step, found["val_loss"])
    found = {**found, "val_seconds": time.monotonic() - start_s}
    return json.loads(transport.broadcast_bytes(json.dumps(found).encode(), everyone))
