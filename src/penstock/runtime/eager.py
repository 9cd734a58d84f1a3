"""Eager: plain data parallelism for a model that cannot be traced.

Every rank holds the whole module, runs its share of the micro-batches through autograd, and
sums gradients over all ranks.  What forward writes is carried as by a plan's copies; where it
cannot be, there is one rank.  No plan, no prediction; checkpoints have the same format.
"""

import itertools
import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from penstock.batches.in_order import InOrder
from penstock.batches.reads import ReadNumbers
from penstock.checkpoints import checkpoint
from penstock.checkpoints.control import Board, Control, Do
from penstock.checkpoints.saver import SavePolicy, Saver, Saves, State, is_due, saving
from penstock.device import here
from penstock.errors import AloneError, CheckpointError, JobError, PenstockError
from penstock.graph.code import SeededRandom, micro_batch_seed
from penstock.graph.contents import own, seen
from penstock.graph.functional import where
from penstock.graph.lasting import is_dense, lasting_buffers
from penstock.graph.precision import cast_weights
from penstock.graph.trace import build_model, loss_and_figures, newest_beside
from penstock.graph.waiting import nearby
from penstock.heap import keep_freed_memory
from penstock.job import Job
from penstock.runtime.audited import Audits, StepKeeper, WatchedOptimizer
from penstock.runtime.calls import Bound, StepResult
from penstock.runtime.digest import digest_of
from penstock.runtime.finite import (
    all_finite,
    check_loss,
    check_weights,
    forget,
    leaving,
    refuse_norm,
)
from penstock.runtime.meter import Meter
from penstock.runtime.reader import Reader, ReadOrder
from penstock.runtime.shared_cores import CoreTerms, in_turns
from penstock.runtime.step_traces import ProfiledSteps, StepTracer
from penstock.runtime.validate import is_out_of_patience, lent, validate, weights_of
from penstock.runtime.worker import RankResult, Report, is_validated
from penstock.state.carried_buffers import Carried, in_order
from penstock.state.grown import built_sizes
from penstock.state.laws.buffers import Laws, buffer_laws
from penstock.state.laws.norms import ALONE, as_often
from penstock.state.loss_scale import LEAST, LossScale
from penstock.state.optimizer.clearing import clear
from penstock.state.optimizer.optimizer import Optimizers, eager_updates, hooks_a_gradient
from penstock.state.python_state import (
    chance,
    is_moved,
    put_chance,
    put_named,
    saved_chance,
    take_chance,
    take_named,
)
from penstock.state.weights import load_model as load_model
from penstock.sums import sums_way
from penstock.timeline.spans import LANES, Span
from penstock.transport.narrow_sums import sum_over
from penstock.transport.transport import Transport


@dataclass(frozen=True, slots=True, eq=False)
class EagerTask:
    """What every rank of an eager data-parallel run has to do.

    audits:   where steps are kept that the plain loop makes again; None: none is.
    laws:     of what forward writes; where they are needed and None, every rank finds them.
    forgets:  whether it goes on without what the checkpoint does not hold.
    turns:    how it shares the cores of its ranks with another run; None: with none.
    profiled: steps that torch's profiler watches; None: none.
    beside:   tells by place what the job keeps elsewhere, for its checkpoints to be compared.
    """

    job: Job
    first_step: int
    num_steps: int
    resume: Path | None = None
    laws: Laws | None = None
    board: Board | None = None
    policy: SavePolicy = SavePolicy()  # noqa: RUF009 - a frozen record
    audits: Audits | None = None
    forgets: bool = False
    turns: CoreTerms | None = None
    beside: Callable[[], Mapping[str, str]] | None = None
    profiled: ProfiledSteps | None = None


def replicas_of(job: Job, most: int, laws: Laws | None = None) -> int:
    """Return the largest number of ranks that share the job's micro-batches evenly.

    One, if forward writes what has to see all of them in order.
    laws:  of what it writes; found by trying where they are not given.
    """
    count = max(n for n in range(1, most + 1) if job.micro_batches % n == 0)
    if count == 1 or job.buffers == "per replica":
        return count
    laws = buffer_laws(job) if laws is None else laws
    return 1 if any(law.coefficient is None for law in laws.values()) else count


def why_alone(job: Job, most: int, laws: Laws | None = None) -> str:
    """Return why one process trains a job without a plan, of `most` that may.

    laws:  of what forward writes, where they are known.
    """
    count = job.micro_batches
    if most == 1:
        return "there is one rank"
    if count == 1:
        return "a step is one micro-batch, which replicas cannot share"
    if all(count % n for n in range(2, most + 1)):
        return f"{most} replicas cannot share the {count} micro-batches of a step evenly"
    ordered = ((name, law) for name, law in (laws or {}).items() if law.coefficient is None)
    for name, law in ordered:
        return f"forward writes {name}, which has to see all micro-batches {law}"
    return "forward writes what has to see all micro-batches in order"


def work_eagerly(task: EagerTask, transport: Transport, report: Report) -> RankResult:
    """Train as one of `transport.num_ranks` replicas, each a process, and return what was measured.

    Raises:   JobError: no trainable parameter, or no optimizer.  RunError: the data ended.
    """
    keep_freed_memory()
    rank = EagerRank(task, transport, is_guarded=True)
    transport.barrier()
    meter = Meter(transport)
    with (
        leaving(task.policy.folder, transport, (rank.rank,), rank.held),
        saving(task.policy, transport, rank.control) as rank.saver,
    ):
        spans, seconds = _run_steps(task, rank, meter, report)
        rank.tracer.close()
    tells = not here().is_queued and meter.num_steps > 0
    spent = meter.spent(time.perf_counter(), (), (), 1) if tells else None
    answers = transport.all_gather_bytes(json.dumps(seconds).encode(), rank.everyone)
    slowest = [max(row) for row in zip(*map(json.loads, answers), strict=True)]
    typical = statistics.median(slowest[min(2, len(slowest) - 1) :])
    saves = rank.saver.told if rank.saver else Saves()
    return RankResult(transport.rank, spans, (), 0, tuple(seconds), typical, {}, spent, saves=saves)


def _run_steps(
    task: EagerTask, rank: "EagerRank", meter: Meter, report: Report
) -> tuple[tuple[Span, ...], list[float]]:
    """Run all steps; return the spans of the last one, and the seconds of each."""
    spans: tuple[Span, ...] = ()
    seconds: list[float] = []
    until = task.first_step + task.num_steps
    keeper = None if task.audits is None else _keeper_of(rank, task.audits)
    is_audited = keeper is not None and keeper.affords()
    for step in range(task.first_step, until):
        done = rank.result(step) if not is_audited else _kept(keeper, rank, meter, step)
        spans = rank.spans()
        seconds.append(done.seconds)
        if step == task.first_step < until - 1:
            meter.once(seconds[-1])
        else:
            meter.window(rank.calls, rank.marks, 1)
        report(done)
        do = _done(task, rank, meter, report, step + 1)
        if keeper is not None:
            keeper.look(waits=do == "stop")
        if do == "stop":
            break
        is_audited = do == "audit" or (
            step == until - 2 and keeper is not None and keeper.affords()
        )
    return spans, seconds


def _kept(keeper: StepKeeper | None, rank: "EagerRank", meter: Meter, step: int) -> StepResult:
    """Run a step and keep it for an audit."""
    assert keeper is not None, "who else could ask for it"
    start = time.perf_counter()
    keeper.before(step)
    meter.once(time.perf_counter() - start)
    done = rank.result(step)
    keeper.hear(done)
    start = time.perf_counter()
    keeper.after(step + 1)
    meter.once(time.perf_counter() - start)
    return done


def _keeper_of(rank: "EagerRank", audits: Audits) -> StepKeeper:
    def part(step: int) -> State | None:
        rank.join_buffers(step)
        return rank.state() if rank.rank == 0 else None

    def given() -> dict[str, Tensor]:
        grads = ((name, p.grad) for name, p in rank.parameters.items())
        return {f"gradients/{name}": grad for name, grad in grads if grad is not None}

    def held() -> dict[str, list[Tensor]]:
        return {"0": [value.detach() for value in rank.model.parameters()]}

    watched = [WatchedOptimizer(rank.updates.optimizer, given)] if rank.rank == 0 else []
    return StepKeeper(audits, rank.transport, part, lambda: watched, held)


def _done(task: EagerTask, rank: "EagerRank", meter: Meter, report: Report, step: int) -> Do:
    """Write the checkpoint that is due after `step` steps; return what comes then."""
    is_last = step == task.first_step + task.num_steps
    do: Do = "go" if is_last else rank.control.after(step - task.first_step)
    is_over = is_last or do == "stop"
    if do == "audit":
        rank.control.audited()
    if task.policy.folder is None or rank.saver is None:
        return "stop" if is_over else do
    rank.saver.check()
    validates = do != "stop" and is_validated(step, task.policy.validate_every, is_last=is_last)
    if is_over or validates or do == "save" or is_due(step, task.policy.every):
        with meter.checkpoint(is_last=is_over), rank.saver.timed():
            rank.join_buffers(step)
            check_weights(rank.parameters, step)
            state = rank.state() if rank.rank == 0 else None
            rank.saver.save(step, state, waits=is_over or validates)
            if validates:
                own = task.job, rank.transport, task.policy.folder, step
                best = task.policy.keep.best
                with lent(rank.model, weights_of(task.job, state[0] if state else {})) as model:
                    found = validate(*own, lambda: model, keeps_best=best)
                if rank.rank == 0:
                    report(StepResult(step - 1, None, 0.0, 0, validated=found))
                is_over = is_over or is_out_of_patience(task.job, task.policy.folder, step)
        rank.control.saved()
    if step == task.first_step + 1 and _is_saved_on_the_way(task):
        with meter.checkpoint(is_last=True):
            rank.saver.begin(rank.state() if rank.rank == 0 else None)
    return "stop" if is_over else do


def _is_saved_on_the_way(task: EagerTask) -> bool:
    """Return whether a checkpoint is due before the last step, for which nothing waits."""
    due = range(task.first_step + 1, task.first_step + task.num_steps)
    return task.policy.writes_aside(due)


def _trained(task: EagerTask) -> nn.Module:
    """Return the module that is trained, and that hooks see: none is built after it.

    Raises:   CheckpointError: no checkpoint holds all that the optimizer keeps.
    """
    model = nearby(build_model(task.job))
    goes_on = task.resume is not None and not task.forgets
    if goes_on and not hooks_a_gradient(task.job, model):  # what those keep, whole steps have shown
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        Optimizers(task.job, model, trained).may_resume()
    return model if newest_beside(model) is model else nearby(build_model(task.job))


class EagerRank:
    """One replica: the module, its optimizer and its place in the data."""

    def __init__(self, task: EagerTask, transport: Transport, *, is_guarded: bool = False) -> None:
        self.job, self.transport, self.rank = task.job, transport, transport.rank
        self.chance, self.forgets, self.beside = chance(), task.forgets, task.beside
        self.alone = transport.num_ranks == 1 or task.job.buffers == "per replica"
        laws = task.laws  # trying them builds a model, which is not to be the newest
        laws = buffer_laws(task.job) if laws is None and not self.alone else laws
        self.everyone = tuple(range(transport.num_ranks))
        way = sums_way(task.job.sums)
        if (way.holds_back or way.averages or way.served) and transport.num_ranks > 1:
            message = f"sums as {task.job.sums} need a plan, and the job is trained without one"
            raise JobError(message, hint="take sums in bfloat16, or 1 rank")
        self.control = Control(task.board, task.policy.every_s)
        self.saver: Saver | None = None
        self.model, self.tracer = _trained(task), StepTracer(task.profiled, self.rank)
        self.named = dict(self.model.named_parameters())
        self.parameters = {n: p for n, p in self.named.items() if p.requires_grad}
        self.frozen = {n: p for n, p in self.named.items() if not p.requires_grad}
        if not self.parameters:
            raise JobError("the model has no trainable parameter", hint="unfreeze some")
        self.updates = eager_updates(task.job, self.model)
        self.loss_scale = LossScale() if task.job.scales_loss else None
        self.share = task.job.micro_batches // transport.num_ranks
        is_plain = len(self.everyone) == 1  # then it is the plain loop, to the batch's memory
        self.reader = Reader(task.job, here().place, take=seen if is_plain else own)
        per_step, first = task.job.micro_batches, self.rank * self.share
        self.order = ReadOrder(list(range(first, first + self.share)), per_step, per_step)
        self.now = self.next_index = 0  # the step that is under way, and the next micro-batch
        self.batch: Any = None
        self.losses: list[float] = []
        self.figures: defaultdict[str, list[float]] = defaultdict(list)
        self.is_guarded = is_guarded  # whether a loss or norm that is not finite ends the run
        self.calls, self.marks = in_turns(self._bind(), task.turns, self.rank), list[float]()
        if task.resume is not None:
            self._load(checkpoint.load(task.resume), task.first_step)
        self.others: list[str] = []  # what forward is not to write
        self.norms: dict[str, int] = {}  # whose calls are what the laws of buffers rest on
        self.written = None if self.alone else self._carried(laws or {})
        if task.policy.folder is not None and self.rank == 0:
            checkpoint.discard(task.policy.folder)
            forget(task.policy.folder)

    def step(self, step: int) -> float:
        """Return the mean loss of this rank's micro-batches; `marks` are then those of the step."""
        self.now, self.next_index = step, step * self.job.micro_batches + self.rank * self.share
        self.losses = []
        self.figures.clear()
        if self.written is not None:
            self.written.begin(step * self.job.micro_batches)
        clear(self.model, self.named)
        self.updates.begin(step)
        self.marks = [time.perf_counter()]
        with self.tracer.over(self.calls, step, 1) as calls:
            for bound in calls:
                bound.call()
                self.marks.append(time.perf_counter())
        return statistics.fmean(self.losses)

    def _thaw(self) -> None:
        """Take to the parameters those that the job's code lets learn by now."""
        if any(parameter.requires_grad for parameter in self.frozen.values()):
            learns = {n for n, p in self.frozen.items() if p.requires_grad} | self.parameters.keys()
            self.parameters = {n: p for n, p in self.named.items() if n in learns}
            self.frozen = {n: p for n, p in self.named.items() if n not in learns}

    def result(self, step: int) -> StepResult:
        """Run one step; return what this rank knows of it."""
        loss = self.step(step)
        figures = {name: sum(values) / len(values) for name, values in self.figures.items()}
        if self.loss_scale is not None:
            figures |= self.loss_scale.figures()
        return StepResult(step, loss, self.marks[-1] - self.marks[0], self.share, figures)

    def spans(self) -> tuple[Span, ...]:
        """Return the spans of the last step, in seconds from its start."""
        times = (mark - self.marks[0] for mark in self.marks)
        pairs = zip(self.calls, itertools.pairwise(times), strict=True)
        return tuple(
            Span(self.rank, b.lane, b.kind, b.stage, b.micro_batch, *pair)
            for b, pair in pairs
            if b.lane in LANES
        )

    def _bind(self) -> list[Bound]:
        calls: list[Bound] = []
        for number in range(self.share):
            calls.append(Bound(partial(self._read, number), "data", "B", 0, number))
            calls.append(Bound(self._micro_batch, "compute", "B", 0, number))
        calls.append(Bound(self._reduce, "collective", "reduce", 0, 0, ranks=self.everyone))
        return [*calls, Bound(self._update, "update", "U", 0, 0)]

    def _read(self, at: int) -> None:
        first = self.now * self.order.per_step
        reads = ReadNumbers(first, self.order.places, self.order.every, at)
        self.batch = self.reader.read(reads, lambda batch: batch)

    def _micro_batch(self) -> None:
        if self.written is not None:
            self.written.before(self.next_index)
        try:
            loss, figures = self._backward()
        except PenstockError:
            raise
        except Exception as problem:  # whatever the job's code raises
            message = where(problem, f"the job's model or loss fails in step {self.now}")
            raise JobError(message, hint="does it run without Penstock?") from problem
        if self.written is not None:
            self.written.after(self.next_index)
        self.losses.append(float(loss.detach()))
        for name, value in figures.items():
            self.figures[name].append(float(value.detach()))
        self.next_index += 1

    def _backward(self) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Leave the gradients of a micro-batch in the parameters; return loss and figures."""
        seed = micro_batch_seed(self.job.seed, self.next_index)
        with SeededRandom(seed), cast_weights(self.job, self.model):
            with as_often(self.norms, self.model, self.next_index):
                loss, figures = loss_and_figures(self.job, self.model, self.batch)
            if self.is_guarded:
                place = self.next_index - self.now * self.job.micro_batches
                check_loss(float(loss.detach()), self.now, place, self.next_index)
            part = loss / self.job.micro_batches
            if self.loss_scale is not None:
                part = part * torch.tensor(self.loss_scale.scale, device=loss.device)
            part.backward()  # pyright: ignore[reportUnknownMemberType]
        return loss, figures

    def _reduce(self) -> None:
        """Sum gradients over all ranks; a parameter that no rank has used keeps none."""
        self._thaw()
        if len(self.everyone) == 1:
            return
        own = bytes(parameter.grad is not None for parameter in self.parameters.values())
        used = zip(*self.transport.all_gather_bytes(own, self.everyone), strict=True)
        for parameter, by_rank in zip(self.parameters.values(), used, strict=True):
            if any(by_rank):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                elif parameter.grad.layout != torch.strided:  # the same sum, row by row
                    parameter.grad = parameter.grad.to_dense()
                sum_over(self.transport, parameter.grad, self.everyone, self.job)

    def _update(self) -> None:
        if self.loss_scale is not None and self._overflows(self.loss_scale):
            self.updates.leave_out()
            return
        if self.job.clip_norm is not None:
            norm = float(clip_grad_norm_(self.parameters.values(), self.job.clip_norm))
            if self.is_guarded and not math.isfinite(norm):
                self._refuse(norm)
        if self.written is not None and self.updates.shows_model:
            self.written.join((self.now + 1) * self.job.micro_batches, self.transport)
        given = {n: p.grad for n, p in self.parameters.items() if p.grad is not None}
        self.updates.step(self.now, given)

    def _overflows(self, scale: LossScale) -> bool:
        """Divide the gradients by the scale of the loss; return whether one is not finite.

        The sums are the same on all ranks, and so is what comes of them.
        """
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        overflowed = not bool(scale.unscale(grads))
        if overflowed and self.is_guarded and scale.scale <= LEAST:
            self._refuse(math.nan)
        scale.end(self.now, overflowed=overflowed)
        return overflowed

    def _refuse(self, norm: float) -> None:
        grads = ((name, parameter.grad) for name, parameter in self.parameters.items())
        names = [name for name, grad in grads if not all_finite(grad)]
        count = self.job.micro_batches
        refuse_norm(norm, self.now, range(self.now * count, (self.now + 1) * count), names)

    def _carried(self, laws: Laws) -> Carried | None:
        """Return what carries what forward writes; None if that is nothing.

        Raises:   PlanError: a buffer has to see all micro-batches in order.
        """
        for name, law in laws.items():
            if law.coefficient is None:
                raise in_order(name, law, f"{len(self.everyone)} replicas share them")
        self.others = [name for name in self._kept() if name not in {*laws, *self.parameters}]
        split = [name.rpartition(".") for name in laws]
        calls = zip(split, laws.values(), strict=True)
        self.norms = {path: law.calls for (path, _, _), law in calls if law.calls}
        places = [(self.model.get_submodule(path), leaf) for path, _, leaf in split]
        coefficients = [law.coefficient or 0.0 for law in laws.values()]

        def tensors() -> list[Tensor]:
            return [getattr(module, leaf).detach() for module, leaf in places]

        return Carried(tensors, coefficients, self.everyone, self.rank == 0) if laws else None

    def _kept(self) -> dict[str, Tensor]:
        return {**dict(self.model.named_parameters()), **lasting_buffers(self.model)}

    def join_buffers(self, step: int) -> None:
        """Give what forward writes its value after so many steps; all ranks call it together.

        Raises:   AloneError: a buffer was written that forward did not write when that was tried.
        """
        if self.alone:
            return
        if self.written is not None:
            self.written.join(step * self.job.micro_batches, self.transport)
        kept = self._kept()
        own = json.dumps([digest_of([kept[name].detach()]) for name in self.others])
        told = self.transport.all_gather_bytes(own.encode(), self.everyone)
        for name, *digests in zip(self.others, *map(json.loads, told), strict=True):
            if len(set(digests)) > 1:
                who = "forward, or a hook after steps,"
                raise AloneError(f"{who} writes {name} in some steps only", hint=ALONE)

    def state(self) -> State:
        """Return what a checkpoint keeps."""
        tensors = self.held()
        plain: dict[str, object] = {}
        self.updates.put(tensors, plain)
        if self.loss_scale is not None:
            self.loss_scale.put(plain)
        put_named(self.job, self.model, tensors, plain)
        if len(self.everyone) == 1 and is_moved(self.chance):
            put_chance(tensors, plain)
        if self.beside is not None:
            plain |= self.beside()
        return tensors, plain

    def held(self) -> dict[str, Tensor]:
        """Return weights and buffers by key, also the caches that forward has filled."""
        weights = {f"weights/{name}": value for name, value in self.model.named_parameters()}
        buffers = ((name, value) for name, value in self.model.named_buffers() if is_dense(value))
        held = weights | {f"buffers/{name}": value for name, value in buffers}
        return held | built_sizes(self.model)

    def _load(self, state: checkpoint.Checkpoint, step: int) -> None:
        """Go on from a checkpoint: what acts by itself comes to `step` first, then all is put back.

        Raises:   CheckpointError: it is of another model or optimizer, or data that is read from
                  its beginning draws numbers from a generator that others draw from, too.
        """
        if isinstance(self.job.data, InOrder):
            self.job.data.begin(step * self.job.micro_batches)
            drew = self.job.data.drew and is_moved(saved_chance(state.tensors, state.plain))
            if drew and not self.forgets:
                raise CheckpointError(_BOTH_DRAW, hint=_OWN_GENERATOR)
        self.updates.begin(step)
        with checkpoint.putting_back(state.step):
            load_model(self.model, state.tensors)
            self.updates.take(state.tensors, state.plain)
            if self.loss_scale is not None:
                self.loss_scale.take(state.plain)
        take_named(self.job, self.model, state.tensors, state.plain)
        if len(self.everyone) == 1:
            take_chance(state.tensors, state.plain)


_BOTH_DRAW = "the data and what else the job runs draw from the same generator of random numbers"
_OWN_GENERATOR = "let the data draw from a random.Random of its own, or give forget_state=True"
