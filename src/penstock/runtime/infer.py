"""Infer: a stream of batches through a forward pipeline; what the model returns for each.

The job's own model, in evaluation mode, and its own data.  The last rank has what the model
returns, and writes it as safetensors, a file for each micro-batch.
"""

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor, nn

from penstock.batches.reads import started
from penstock.errors import JobError, RunError
from penstock.graph.code import function_of
from penstock.graph.precision import computed_in
from penstock.graph.stages import Stages
from penstock.graph.trace import OUTPUT, Capture, ModelOutput, is_output, on_device
from penstock.job import Job
from penstock.profile.profile import Profile
from penstock.program.program import Program
from penstock.runtime.emulate import sleeping
from penstock.runtime.launch import Launcher
from penstock.runtime.rank import Rank
from penstock.runtime.rank_terms import RankTerms
from penstock.runtime.run import Steps
from penstock.runtime.worker import RankResult, Report
from penstock.step_places import PlacedBatch
from penstock.transport.transport import Transport

WARM_UP = 3  # of so many parts of a stream, one is not timed


def inference_job(job: Job, load: Callable[[nn.Module], object] = lambda model: None) -> Job:
    """Return `job` with its model in evaluation mode, and a loss that tells what it returns.

    load:     puts weights into the model.
    Where micro-batches hand tensors on (`Job.carry`), each begins anew.
    """

    def model() -> nn.Module:
        made = author.model()
        load(made)
        return made.eval()

    author = replace(job, carry=None)
    loss = partial(_told, job)
    return replace(author, model=model, loss=loss, clip_norm=None, wire_bits=None, sums=None)


def _told(job: Job, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Any]]:
    """Return the job's loss, and all tensors that the model returns, by name.

    Raises:   JobError: the loss does not call the model, or the model returns no tensor.
    """
    with _returned(model) as found:
        told: Any = job.loss(model, batch if job.carry is None else PlacedBatch(batch, None))
    if not found:
        message = "the loss does not call the model itself, so what that returns is not known"
        raise JobError(message, hint="call model(...) in the loss, not only its parts")
    outputs = dict(_tensors("output", found[-1]))
    if not outputs:
        raise JobError("the model returns no tensor", hint="let forward return one")
    loss: Tensor = cast("tuple[Any, ...]", told)[0] if isinstance(told, tuple) else told
    return loss, {OUTPUT + name: ModelOutput(value) for name, value in outputs.items()}


@contextmanager
def _returned(model: nn.Module) -> Generator[list[Any]]:
    """Give what the model returns each time that it is called meanwhile."""
    found: list[Any] = []
    handle = model.register_forward_hook(lambda module, given, result: found.append(result))
    try:
        yield found
    finally:
        handle.remove()


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of what a model returns: "output", "output.0", "output.logits"."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in cast("Mapping[Any, Any]", value).items():
            yield from _tensors(f"{name}.{key}", inner)
    elif isinstance(value, list | tuple):
        for at, inner in enumerate(cast("list[Any]", value)):
            yield from _tensors(f"{name}.{at}", inner)


@dataclass(frozen=True, slots=True, eq=False)
class BatchStream:
    """A stream of `count` batches for the ranks of a pipeline.

    program:  of one window; windows follow one another without a pause.
    folder:   where what the model returns is written; batches from number `kept` on: it is not.
    sleeps:   profiles of the ranks' devices, where computing is only rehearsed; empty: it is done.
    """

    capture: Capture
    stages: Stages
    job: Job
    program: Program
    count: int
    folder: Path
    kept: int
    sleeps: tuple[Profile, ...] = ()


@dataclass(frozen=True, slots=True)
class Inferred:
    """What a stream gave: its mean loss, and the seconds between two batches where it is in swing.

    Without a loss, where nothing was computed.
    """

    loss: float | None
    period_s: float


def stream(what: BatchStream, launcher: Launcher) -> Inferred:
    """Run the stream on ranks of `launcher`.

    Raises:   RunError: a rank failed.
    """
    told = Steps(what.program.num_micro_batches)
    results = launcher(partial(_work, what), what.program.num_ranks, told.add)
    done_s = max((one.window_s for one in results), key=len)  # of the rank with the last stage
    first = (len(done_s) - 1) // WARM_UP
    period_s = (done_s[-1] - done_s[first]) / max(1, len(done_s) - 1 - first)
    losses = [step.loss for step in told.finished if step.loss is not None]
    mean = sum(losses) / len(losses) if losses and not what.sleeps else None
    return Inferred(mean, period_s)


def _work(what: BatchStream, transport: Transport, report: Report) -> RankResult:
    """Run the stream as one rank; return when each batch was done on this one."""
    job, make = what.job, function_of
    if what.sleeps:
        job, make = sleeping(job, what.sleeps[transport.rank])
    done_s: list[float] = []

    def put(number: int, found: dict[str, Tensor]) -> None:
        if number < what.kept:
            plain = {k.removeprefix(OUTPUT): v.detach().contiguous() for k, v in found.items()}
            save_file(plain, file_of(what.folder, number))
        done_s.append(time.perf_counter())

    terms = RankTerms(make=make, report=report, put_outputs=put)
    rank = Rank(what.capture, what.stages, job, transport, terms)
    rank.expect(what.program)
    calls = rank.bind(what.program)
    transport.barrier()
    with torch.no_grad():
        for window in range(what.count // what.program.num_micro_batches):
            rank.run(calls, window)
    return RankResult(transport.rank, (), (), 0, tuple(done_s or [0.0]), 0.0, {})


def file_of(folder: Path, number: int) -> Path:
    """Return the file of what the model returns for a micro-batch."""
    return folder / f"{number:08d}.safetensors"


def apart(job: Job, folder: Path, count: int) -> tuple[float, bool]:
    """Return how far the first `count` files are from what the plain model returns.

    The largest difference, relative to the greatest number of its tensor; whether all bits are
    the same.

    Raises:   RunError: the data ended; a tensor is missing, or of another shape.
    """
    from penstock.graph.trace import build_model

    model, batches = build_model(job), started(job.data, 0)
    worst, same = 0.0, True
    for number in range(count):
        with torch.no_grad(), computed_in(job, model):
            _, expected = job.loss(model, on_device(next(batches)))
        found = load_file(file_of(folder, number))
        for name, told in cast("Mapping[str, ModelOutput]", expected).items():
            key, right = name.removeprefix(OUTPUT), told.value.cpu()
            if key not in found or found[key].shape != right.shape:
                raise RunError(f"what the pipeline returns for batch {number} has no {key}")
            same &= torch.equal(found[key], right)
            if right.numel() and right.is_floating_point():
                far = float((found[key].double() - right.double()).abs().max())
                worst = max(worst, far / max(float(right.double().abs().max()), 1e-30))
    return worst, same


def returns(capture: Capture) -> list[str]:
    """Return the names of what the model returns."""
    names = (name for name, _ in capture.graph.figures)
    return [name.removeprefix(OUTPUT) for name in names if is_output(name)]
