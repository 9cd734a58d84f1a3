"""Judge: the plain loop's side of a proof.

It starts each step from the run's own state after the step before, so that no difference grows:
the gradients of one step are compared, and an update from the very same gradients.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.bits import AS_IT_IS
from penstock.checkpoints import checkpoint
from penstock.errors import CheckpointError
from penstock.files import read_json
from penstock.graph.lasting import lasting_buffers
from penstock.graph.merge import merged
from penstock.graph.stages import Stages
from penstock.graph.trace import Capture
from penstock.job import Job
from penstock.program.program import Program
from penstock.prove.compare import (
    Difference,
    compared,
    compared_gradients,
    compared_updates,
    compared_weights,
    in_widths,
    least_scale,
)
from penstock.prove.in_float64 import judged_finely
from penstock.prove.judge_replicas import AveragedReplicas as AveragedReplicas
from penstock.prove.judge_replicas import LookedAt, steps_of_replicas
from penstock.prove.plain import Plain, PlainStep
from penstock.prove.proof import LOW_PRECISION_TOLERANCE, TOLERANCE, Proof, proof_of
from penstock.prove.read_digest import ReadDigests, recorded
from penstock.prove.rounded import Rounded
from penstock.prove.rounded_sums import RoundedSums
from penstock.prove.sequential import BegunWindow, Weights, sequential
from penstock.prove.step_differences import (
    INFINITY,
    OPTIMIZER,
    data_differences,
    found_step,
    loss_difference,
    part_of,
    state_differences,
    told_by_rank,
)
from penstock.runtime.audited import LATER
from penstock.state.error_feedback import HELD, held_in
from penstock.state.weights import load_model
from penstock.sums import HALVES
from penstock.taken import Taken

_HELD = 100  # times the least scale: what is not sent is the difference of large numbers
_BUFFERS = partial(compared, "buffers")
Earlier = checkpoint.Checkpoint | None


class SequentialParts(NamedTuple):
    """What the sequential definition of a program is made of."""

    program: Program
    stages: Stages
    capture: Capture
    joined: Taken  # of the author's micro-batches that make one of the program's


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Steps of a job, and from where; what the plain loop needs to know of a run.

    job:       the author's, no micro-batches joined.
    resume:    the checkpoint that the first of `steps` begins with; None: the first weights.
    backward:  whether there is any.
    late:      of an asynchronous run; None: every gradient is of the newest weights.
    rounded:   of a run that rounds what goes from rank to rank; None: nothing is rounded.
    owners:    of gradients that are summed over ranks, as `RoundedSums` needs them, by micro-batch
               of the plan, of which each is `joined` of the job's.
    apart:     of replicas that average weights; None: all have the same.
    by_parts:  whether to update and compare one parameter after the other, for want of memory.
    model:     one that the job may hand out again, and that has to stay as it is.
    begun:     of an asynchronous run: whether a window is one of the run, by gradients that it had.
    draws:     whether the step draws random numbers; a traced one tells.
    updates:   whether an update follows from a state; else a step is compared up to it.
    forgets:   asked where an audited step differs: why no update follows from a state; empty: it
               does.
    """

    job: Job
    steps: tuple[int, ...]
    resume: Path | None = None
    backward: bool = True
    late: SequentialParts | None = None
    rounded: SequentialParts | None = None
    owners: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])
    joined: int = 1
    apart: AveragedReplicas | None = None
    by_parts: bool = False
    begun: bool = False
    model: nn.Module | None = None
    draws: bool = True
    updates: bool = True
    forgets: Callable[[], str] = str


@dataclass(frozen=True, slots=True, eq=False)
class PlainLoop:
    """The plain loop of a case, and what it has read."""

    plain: Plain
    reads: ReadDigests


def plain_loop(case: Case, *, digests: bool = True) -> PlainLoop:
    """Return the plain loop of a case; where something is rounded, of the plan's micro-batches.

    digests:  whether it notes what it reads, to be compared with what ranks have read.
    """
    reads = ReadDigests()
    job = replace(case.job, data=recorded(case.job.data, reads)) if digests else case.job
    joined = 1 if case.rounded else case.joined
    owners = {
        name: [rank for rank in row for _ in range(joined)] for name, row in case.owners.items()
    }
    sums = RoundedSums(owners, job.sums) if job.sums in HALVES else None
    if case.rounded is None:
        return PlainLoop(Plain(job, sums=sums, draws=case.draws), reads)
    parts = case.rounded
    rounded = Rounded(parts.capture, parts.stages, parts.program)
    return PlainLoop(Plain(merged(job, parts.joined), rounded, sums), reads)


def judged(case: Case, folder: Path, loop: PlainLoop | None = None) -> Proof:
    """Return what comparing `folder`, where a run left its steps, with the plain loop finds.

    loop:     that of the case; None: it is made, and forgotten.
    It calls the job's functions, which may change what they like in this process.
    Raises:   RunError: the data ended.  JobError, CheckpointError: as in a run.
    """
    start = time.perf_counter()
    with _Untouched(case.model):
        left_out = list(_left_out(case))
        if case.late is not None and case.begun:
            rows = list(_begun_window(case.late, case, folder))
        elif case.late is not None:
            rows = list(_window(case.late, case, folder))
        elif case.apart is not None:
            rows = list(steps_of_replicas(case.job, case.apart, _looked_at(case), folder))
        elif case.by_parts and case.backward:
            rows = list(_steps_by_parts(case, folder, left_out, loop or plain_loop(case)))
        else:
            rows = list(_steps(case, folder, left_out, loop or plain_loop(case)))
    seconds = time.perf_counter() - start
    parts = case.rounded or case.late
    bits = () if parts is None else tuple(sorted({*parts.program.graph.bits} - {AS_IT_IS}))
    return proof_of(case.job, case.steps, rows, tuple(left_out), seconds, bits)


def _looked_at(case: Case) -> LookedAt:
    return LookedAt(case.steps, case.resume, case.updates)


class _Untouched:
    """While active, a model may be trained; then it is as it was."""

    def __init__(self, model: nn.Module | None) -> None:
        self.state = [] if model is None else [*model.parameters(), *model.buffers()]

    def __enter__(self) -> None:
        self.before = [value.detach().clone() for value in self.state]

    def __exit__(self, *problem: object) -> None:
        with torch.no_grad():
            for value, before in zip(self.state, self.before, strict=True):
                value.copy_(before)
                value.grad = None


def _steps(case: Case, folder: Path, left_out: list[str], loop: PlainLoop) -> Iterator[Difference]:
    """Yield the differences of each step of a synchronous run.

    left_out:  gets the steps that overflow, of which there is little to compare.
    """
    losses = read_json(folder / "losses.json", CheckpointError, "losses")
    plain, reads = loop.plain, loop.reads
    last: Mapping[str, Tensor] = dict[str, Tensor]()
    if case.resume is not None:
        state = checkpoint.load(case.resume)
        plain.load(state.tensors, state.plain)
        last = state.tensors
    for step in case.steps:
        found, state = found_step(folder, step), {**plain.weights(), **plain.buffers()}
        plain.released, last = _released(last, found.tensors), found.tensors
        made, rows = _made(case, plain, step)
        yield from rows
        left_out += _overflow(plain, step)
        given, before = part_of(found.tensors, "gradients/"), state
        if case.backward and case.updates:
            plain.update(step, given)
        yield from data_differences(found, reads.taken())
        yield loss_difference(plain, "loss", losses.get(str(step)), made.loss)
        if (buffers := plain.buffers()) and case.job.buffers == "exact" and case.updates:
            # an update may write them, too
            yield from in_widths(_BUFFERS, _buffers_of(found, plain), buffers)
        if not case.backward:
            continue
        yield from _gradient_differences(case, plain, step, state, (given, made.gradients))
        if not case.updates:
            yield from _copy_differences(found)
            continue
        update = partial(compared_updates, before=before)
        yield from in_widths(update, part_of(found.tensors, "weights/"), plain.weights())
        yield from state_differences(plain, found)
        yield from _scale_differences(plain, found)
        yield from _copy_differences(found)
        plain.load(found.tensors, found.plain)


def _released(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return by how much less ranks hold back of each gradient than before, all together."""
    found: dict[str, Tensor] = {}
    for name in {key.partition("/")[2] for key in (*before, *after) if key.startswith(HELD)}:
        rows = [part.tensor.double() for part in held_in(before, name)]
        rows += [-part.tensor.double() for part in held_in(after, name)]
        found[name] = torch.stack(rows).sum(0).to(next(held_in(after, name)).tensor.dtype)
    return found


def _least(plain: Plain, gradients: Mapping[str, Tensor]) -> float:
    """Return the least scale of a difference of gradients: more, where ranks hold back some."""
    if not plain.released:
        return least_scale(gradients)
    times = 10 * _HELD if plain.job.precision or plain.job.autocast else _HELD
    return times * max(least_scale(gradients), least_scale(plain.released))


def _gradient_differences(
    case: Case,
    plain: Plain,
    step: int,
    state: Mapping[str, Tensor],
    pair: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
) -> list[Difference]:
    """Return how gradients differ; where that may be rounding, as 64 bits tell."""
    compare = partial(compared_gradients, least=_least(plain, pair[1]))
    rows = list(in_widths(compare, *pair))
    far = [r for r in rows if r.value > (LOW_PRECISION_TOLERANCE if r.narrow else TOLERANCE)]
    if not far or math.isinf(far[0].value) or plain.leaves_out or plain.released:
        return rows
    return judged_finely(plain, case.job, step, state, pair)


def _steps_by_parts(
    case: Case, folder: Path, left_out: list[str], loop: PlainLoop
) -> Iterator[Difference]:
    """Yield what `_steps` does, holding weights and gradients, and of all else one parameter's.

    left_out:  gets what cannot be compared so: updates by an optimizer that may look at several
               parameters together.
    """
    losses = read_json(folder / "losses.json", CheckpointError, "losses")
    plain, reads = loop.plain, loop.reads
    before = None if case.resume is None else checkpoint.unread(case.resume)
    if not plain.is_plain:
        left_out.append("updates: all of the optimizer's state at once needs more memory")
    for step in case.steps:
        if before is not None:
            load_model(plain.model, before.tensors)
            plain.take_left(before.tensors)
            plain.take_scale(before.plain)
        found = found_step(folder, step, checkpoint.unread)
        plain.released = _released({} if before is None else before.tensors, found.tensors)
        made, rows = _made(case, plain, step)
        yield from rows
        left_out += _overflow(plain, step)
        yield from data_differences(found, reads.taken())
        yield loss_difference(plain, "loss", losses.get(str(step)), made.loss)
        if (buffers := plain.buffers()) and case.job.buffers == "exact":
            yield from in_widths(_BUFFERS, _buffers_of(found, plain), buffers)
        compare = partial(compared_gradients, least=_least(plain, made.gradients))
        yield from in_widths(compare, _Part(found.tensors, "gradients/"), made.gradients)
        plain.model.zero_grad()
        if plain.is_plain and case.updates:
            plain.rate(step)
            for name in plain.parameters:
                yield from _update_of(name, plain, step, found, before)
        plain.rescale()
        yield from _scale_differences(plain, found)
        yield from _copy_differences(found)
        before = found


def _overflow(plain: Plain, step: int) -> list[str]:
    if not plain.leaves_out:
        return []
    return [f"gradients of step {step + 1}: they overflow at a loss scale of {plain.loss_scale:g}"]


def _made(case: Case, plain: Plain, step: int) -> tuple[PlainStep, list[Difference]]:
    """Return the plain loop's step before its update.

    Where numbers are rounded, also how far the traced step is from the plain loop without rounding,
    which has to be as near as ever, and how far rounding has moved the gradients.
    """
    backward, parts, rounding = case.backward, case.rounded, plain.rounded
    if parts is None:
        return plain.gradients(step, backward=backward), []
    made, buffers = list[PlainStep](), plain.buffers()
    exact = Rounded(parts.capture, parts.stages, parts.program, exactly=True)
    for by in (None, exact, rounding):
        for name, buffer in lasting_buffers(plain.model).items():
            if name in buffers and buffers[name].shape == buffer.shape:  # else forward has made it
                buffer.copy_(buffers[name])
        plain.rounded = by
        made.append(plain.gradients(step, backward=backward))
    plainly, traced, rounded = made
    rows = [loss_difference(plain, "traced loss", traced.loss, plainly.loss)]
    if backward:
        near = in_widths(compared_gradients, traced.gradients, plainly.gradients)
        far = compared_gradients(rounded.gradients, plainly.gradients)
        rows += [replace(row, what="traced gradients") for row in near]
        rows.append(replace(far, what="rounding"))
    return rounded, rows


def _update_of(
    name: str, plain: Plain, step: int, found: checkpoint.Checkpoint, earlier: Earlier
) -> Iterator[Difference]:
    """Yield how the update of one parameter and its state differ; then give both up."""
    if earlier is not None:
        plain.take(name, earlier.tensors, earlier.plain)
    parameter, gradient = plain.parameters[name], found.tensors.get(f"gradients/{name}")
    before = {name: parameter.detach().clone()}
    plain.apply(step, {} if gradient is None else {name: gradient})
    weight = found.tensors.get(f"weights/{name}")
    weights = {} if weight is None else {name: weight}
    update = partial(compared_updates, before=before)
    yield from in_widths(update, weights, {name: parameter.detach()})
    tensors, values = plain.optimizer_state()
    own = f"optimizer/{name}/"
    held = {key: found.tensors[key] for key in found.tensors if key.startswith(own)}
    if held or tensors:
        yield from in_widths(OPTIMIZER, held, tensors)
    for key, value in values.items():
        if found.plain.get(key) != value:
            yield Difference("optimizer", key, INFINITY, bitwise=False)
    plain.forget(name)


class _Part(Mapping[str, Tensor]):
    """The tensors whose names begin with a prefix, without it; each is read when asked for."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str) -> None:
        self.tensors, self.prefix = tensors, prefix

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[self.prefix + name]

    def __iter__(self) -> Iterator[str]:
        return (k.removeprefix(self.prefix) for k in self.tensors if k.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _window(late: SequentialParts, case: Case, folder: Path) -> Iterator[Difference]:
    """Yield the differences of a window of an asynchronous run."""
    program, reads = late.program, ReadDigests()
    watched = replace(case.job, data=recorded(case.job.data, reads))
    job = merged(watched, late.joined)
    expected = sequential(job, program, program.num_steps, late.stages, late.capture)
    found = found_step(folder, case.steps[0])
    yield from data_differences(found, reads.taken())
    if wanted := part_of(expected, "weights/"):
        yield from in_widths(compared_weights, part_of(found.tensors, "weights/"), wanted)
    if case.job.buffers == "exact" and (wanted := part_of(expected, "buffers/")):
        yield from in_widths(_BUFFERS, part_of(found.tensors, "buffers/"), wanted)
    yield from _copy_differences(found)


def _begun_window(late: SequentialParts, case: Case, folder: Path) -> Iterator[Difference]:
    """Yield the differences of the first steps of a window, from the state that it began with.

    Each step's gradients are compared, and weights are updated by those that the run had.
    """
    assert case.resume is not None, "the run has kept it"
    state, found = checkpoint.load(case.resume), found_step(folder, case.steps[0])
    rows = list[Difference]()

    def given(step: int, made: Weights) -> Weights:
        own = part_of(found.tensors, LATER.format(step, "gradients/") if step else "gradients/")
        rows.extend(in_widths(partial(compared_gradients, least=least_scale(made)), own, made))
        return own

    job, begun = merged(case.job, late.joined), BegunWindow(case.steps[0], *state[1:3], given)
    own = late.program, len(case.steps), late.stages, late.capture, begun
    expected = sequential(job, *own)
    yield from rows
    if case.updates:
        before, had = (part_of(each.tensors, "weights/") for each in (state, found))
        wanted = {  # what is frozen has no update, and need not be there
            name: value
            for name, value in part_of(expected, "weights/").items()
            if name in had or not torch.equal(value, before[name])
        }
        yield from in_widths(partial(compared_updates, before=before), had, wanted)
    had, wanted = (part_of(each, "buffers/") for each in (found.tensors, expected))
    if case.job.buffers == "exact" and had and wanted:  # else later steps have written them
        yield from in_widths(_BUFFERS, had, wanted)
    yield from _copy_differences(found)


def _scale_differences(plain: Plain, found: checkpoint.Checkpoint) -> Iterator[Difference]:
    """Yield a difference if the run's scale of the loss is not the plain loop's."""
    if plain.loss_scale is not None and found.plain.get("loss_scale") != [
        plain.loss_scale,
        plain.good,
    ]:
        yield Difference("optimizer", "loss_scale", INFINITY, bitwise=False)


def _copy_differences(found: checkpoint.Checkpoint) -> Iterator[Difference]:
    """Yield whether all copies of a stage have the same weights; nothing where each has one."""
    digests: dict[str, str] = {}
    several = False
    for rank, held in told_by_rank(found, "held"):
        for stage, digest in held.items():
            several = several or stage in digests
            if digests.setdefault(stage, digest) != digest:
                where = f"stage {stage} on rank {rank}"
                yield Difference("copies", where, INFINITY, bitwise=False)
                return
    if several:
        yield Difference("copies", "", 0.0, bitwise=True)


def _buffers_of(found: checkpoint.Checkpoint, plain: Plain) -> dict[str, Tensor]:
    """Return the buffers of a run without those that forward has made for itself in the loop."""
    own = set(dict(plain.model.named_buffers())) - lasting_buffers(plain.model).keys()
    named = part_of(found.tensors, "buffers/").items()
    return {name: value for name, value in named if name not in own}


def _left_out(case: Case) -> Iterable[str]:
    if case.late is not None and not case.begun:
        yield "the job's own optimizer and rate: SGD with momentum takes their place"
    if case.job.buffers == "per replica":
        yield "buffers: each replica follows its own micro-batches, as Job.buffers says"
    if not case.backward:
        yield "gradients and updates: the schedule makes none"
