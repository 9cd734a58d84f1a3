"""Validate: the mean loss over the validation micro-batches, in a way that changes nothing else.

During a run the first rank does it, of the checkpoint that was just written; the others wait.
"""

import json
import math
import random
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from penstock._compat import pytree
from penstock.batches.reads import Endless
from penstock.best import best_of, out_of_patience, sets_of
from penstock.checkpoints import checkpoint
from penstock.device import here
from penstock.errors import JobError, PenstockError
from penstock.graph.batch import count
from penstock.graph.composed import averaged
from penstock.graph.functional import where
from penstock.graph.trace import computed_in, loss_and_figures, on_device
from penstock.graph.without_gradients import without_gradients
from penstock.in_turn import LossTurns, TurnBatch
from penstock.job import Batch, Job
from penstock.runtime.means import Means
from penstock.step_places import PlacedBatch
from penstock.transport.transport import Transport
from penstock.weighted import WeightedBatch, number_as_tensor, weight_of

_ALIVE_S = 60.0  # after which ranks that wait are told that it goes on: torch gives up on silence
_MORE = b"more"
_SAID_AFTER_S = 10.0  # without an end of what has no length
_FEW = 10_000  # micro-batches that any validation may have
_TIMES = 20  # those of training, that a longer one has at most, unless it has a length

Told = Callable[[int, int], None]  # (done, total), 0 where nobody knows the total
Say = Callable[[str], None]


def _silent(words: str) -> None:
    """Nobody listens."""


def validated(
    job: Job, model: nn.Module, told: Told = lambda done, total: None, say: Say = _silent
) -> dict[str, float]:
    """Return "val_loss" and figures and metrics as "val_NAME", means over all of the validation.

    A micro-batch counts by its samples, so that a short last one counts less than a whole one; a
    metric that is a pair, by its own count.  Of a set by name also "val_SET_loss" and so on.
    The model is in evaluation mode meanwhile.  Afterwards its modes and buffers, and the random
    states, are restored.  Empty where the validation is.
    Raises:   EndlessError: it does not end.
    """
    whole, found = Means(), dict[str, float]()
    with _unchanged(model):
        for name, batches in sets_of(job.validation).items():
            tally = Means()
            for batch in _counted(job, batches, told, say):
                own = on_device(batch)
                figures = without_gradients(partial(_figures, job, model, own))
                tally.add(figures, _counts_for(job, own))
            whole.take(tally)
            if name:
                found |= {f"val_{name}_{key}": value for key, value in tally.means().items()}
    return {**{f"val_{key}": value for key, value in whole.means().items()}, **found}


def _figures(job: Job, model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return the loss of a micro-batch, the figures beside it, and the job's metrics.

    Raises:   JobError: the metrics are none, or fail.
    """
    whole = batch if job.weight is None else WeightedBatch(batch, number_as_tensor(1.0))
    whole = whole if job.carry is None else PlacedBatch(whole, None)
    if isinstance(job.loss, LossTurns):
        whole = TurnBatch(batch, job.loss.validates)
    loss, figures = loss_and_figures(job, model, whole)
    found: dict[str, Any] = {"loss": loss, **figures}
    if job.metrics is None:
        return found
    try:
        with computed_in(job, model):
            metrics: Any = job.metrics(model, batch)
    except PenstockError:
        raise
    except Exception as problem:  # whatever the job's code raises
        message = where(problem, "the job's metrics fail")
        raise JobError(message, hint="do they run on this micro-batch alone?") from problem
    if not isinstance(metrics, Mapping):
        message = f"the job's metrics are a {type(metrics).__name__}, not figures by name"
        raise JobError(message, hint='return {"accuracy": (correct, answers)}')
    given = cast("Mapping[str, Any]", metrics)
    if twice := [name for name in given if name in found]:
        message = f"the job's metrics have {twice[0]}, which its loss gives too"
        raise JobError(message, hint="give it another name")
    return found | dict(given)


def _counts_for(job: Job, batch: Batch) -> float:
    """Return how much a micro-batch counts: its samples, or what the job's weight says."""
    if job.weight is None:
        return count(pytree.tree_leaves(batch))[0]
    return weight_of(job.weight, batch, 0)


def _counted(
    job: Job, made: Callable[[], Iterable[Batch]], told: Told, say: Say
) -> Iterator[Batch]:
    """Yield the micro-batches of a set of the validation, and tell how many are done once each is.

    Raises:   EndlessError: they do not end.
    """
    batches, start_s, is_said = made(), time.monotonic(), False
    total = len(batches) if isinstance(batches, Sized) else 0
    most = most_of(job)
    if isinstance(batches, Endless):
        raise without_end(batches)
    for number, batch in enumerate(batches, 1):
        yield batch
        told(number, total)
        if not total and number >= most:
            raise too_many(number)
        if not (total or is_said) and time.monotonic() - start_s > _SAID_AFTER_S:
            is_said = True
            say(f"validation has yielded {number:,} micro-batches so far: is it endless? {_END}")


def most_of(job: Job) -> int:
    """Return how many micro-batches a validation may yield that has no length."""
    return max(_FEW, _TIMES * job.num_steps * job.micro_batches)


_END = "itertools.islice(..., N) ends it after N"


class EndlessError(JobError):
    """A validation that does not end."""


def without_end(batches: Endless) -> EndlessError:
    """Return what is wrong with a validation that is made as data for training is, and the mend."""
    epoch = f"; an epoch has {batches.epoch:,}" if batches.epoch else ""
    words = f"Job.validation yields micro-batches without end: they go on epoch after epoch{epoch}"
    hint = f"end it: validation=lambda: itertools.islice(..., {batches.epoch or 'N'})"
    return EndlessError(words, hint=hint)


def too_many(number: int) -> EndlessError:
    """Return what is wrong with a validation that has yielded so many, and the mend."""
    words = f"Job.validation has yielded {number:,} micro-batches, and does not end"
    hint = f"{_END}; one that ends may be longer if it has a length, as a list has"
    return EndlessError(words, hint=hint)


@contextmanager
def _unchanged(model: nn.Module) -> Generator[None]:
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    device = here()
    drawn = device.random_state()
    model.eval()
    try:
        yield
    finally:
        model.train(modes[0][1])  # which may be the author's own, and undo what eval() has done
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        random.setstate(state[0])
        np.random.set_state(state[1])
        torch.set_rng_state(state[2])
        device.set_random_state(drawn)


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

    found = validated(job, model(), told, _say)
    if keeps_best and found and math.isfinite(value := best_of(job.best).of(found)):
        checkpoint.keep_best(checkpoints, step, value, job.best)
    found = {**found, "val_seconds": time.monotonic() - start_s}
    return json.loads(transport.broadcast_bytes(json.dumps(found).encode(), everyone))


def is_out_of_patience(job: Job, checkpoints: Path, step: int) -> bool:
    """Return whether the run is to end after a step that was validated; alike on all ranks.

    Raises:   CheckpointError: the note of the best checkpoint is damaged.
    """
    if job.patience is None or job.validate_every is None:
        return False
    known = checkpoint.best(checkpoints, job.best)
    about = {"every": job.validate_every, "patience": job.patience}
    return known is not None and out_of_patience(known[0], step, **about)


def weights_of(job: Job, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the tensors of a checkpoint that are validated: averages, where that is wanted."""
    validates = job.average is not None and job.average.validates
    return averaged(tensors) if validates else tensors


@contextmanager
def lent(model: nn.Module, tensors: Mapping[str, Tensor]) -> Generator[nn.Module]:
    """Let a model that trains have other weights while it is validated; by "weights/NAME"."""
    rows = [(p, p.data, tensors.get(f"weights/{n}", p.data)) for n, p in model.named_parameters()]
    for parameter, _, other in rows:
        parameter.data = other
    try:
        yield model
    finally:
        for parameter, own, _ in rows:
            parameter.data = own


def _say(words: str) -> None:
    """Tell whoever started this rank."""
    sys.stderr.write(f"{words}\n")
