"""Plain: the training loop that a job's author means, in one process, without a plan.

Every run is compared with it, so it calls nothing that a run is made of: the uncut model,
eager autograd, torch's own clipping, the job's optimizer on the whole model.  Only the seeds of
random ops are Penstock's (`graph/code.py`): they belong to micro-batches, not to a process.
But where numbers are rounded between ranks, there is no such loop: then gradients are those of
`prove/rounded.py`, of the traced step; and sums over ranks in 16 bits those of `rounded_sums.py`.
Where ranks hold back what they do not send, its sum is what they send and hold back together.
"""

import itertools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from penstock import _compat
from penstock.batches.reads import started
from penstock.device import here
from penstock.errors import RunError
from penstock.graph.code import SeededRandom, micro_batch_seed
from penstock.graph.contents import seen
from penstock.graph.lasting import lasting_buffers
from penstock.graph.merge import parts_of
from penstock.graph.precision import cast_weights
from penstock.graph.trace import build_model, loss_of
from penstock.graph.waiting import backward_of
from penstock.graph.whole_optimizer import whole_optimizer
from penstock.job import Job
from penstock.prove.rounded import Rounded, StepInputs
from penstock.prove.rounded_sums import RoundedSums
from penstock.runtime.eager import load_model
from penstock.state.optimizer.clearing import LEFT, clear, has_own_zero_grad
from penstock.state.optimizer.rates import options_of, put_options
from penstock.state.optimizer.updates import SEED
from penstock.state.optimizer_state import ExtraState, put_state, take_state
from penstock.state.python_state import take_named

NOTHING: AbstractContextManager[Any] = nullcontext()
State = tuple[dict[str, Tensor], dict[str, object]]  # tensors and plain values by key


class PlainStep(NamedTuple):
    """A step before its update: the mean loss and the gradients."""

    loss: float
    gradients: dict[str, Tensor]


class Plain:
    """The whole model, its optimizer, and the micro-batches in order.

    draws:  whether forward and backward may draw random numbers.  Seeing to it that they are those
            of the run is looking at each op, which takes longer than a small op does.
    """

    def __init__(
        self,
        job: Job,
        rounded: Rounded | None = None,
        sums: RoundedSums | None = None,
        *,
        draws: bool = True,
    ) -> None:
        self.job, self.rounded, self.sums, self.draws = job, rounded, sums, draws
        self.model = build_model(job)
        self.parameters = dict(self.model.named_parameters())
        whole = whole_optimizer(job, self.model, is_new=True)
        self.optimizer, self.is_plain = whole.optimizer, whole.is_plain
        self.rates: list[Any] = [group.get("lr") for group in self.optimizer.param_groups]
        self.own = ExtraState(self.optimizer, self.parameters, is_whole=True)
        self.options = options_of(self.optimizer)
        self.scheduler = None if job.scheduler is None else job.scheduler(self.optimizer)
        self.scheduled = 0  # steps that the scheduler has been told of
        self.loss_scale, self.good = 2.0**16 if job.precision == "float16" else None, 0
        self.leaves_out = False  # the step that is under way: its gradients overflow
        self.left: dict[str, Tensor] = {}  # gradients that an own zero_grad has not cleared
        self.clears = has_own_zero_grad(self.optimizer)
        self.released: Mapping[str, Tensor] = {}  # by which ranks hold back less after the step
        self.share = range(job.micro_batches)  # of the micro-batches of a step, which it takes
        self._data: Iterator[Any] = iter(())
        self._next = -1

    def gradients(self, step: int, *, backward: bool = True) -> PlainStep:
        """Return step number `step`, up to its update.

        Raises:   RunError: the data ended.
        """
        losses: list[Tensor] = []
        clear(self.model, self.parameters)
        for index, batch in self._micro_batches(step):
            if self.rounded is None:
                loss = self._eagerly(index, batch, backward=backward)
            else:
                loss = self._rounded(self.rounded, index, batch, backward=backward)
            losses.append(loss.detach().double().reshape(()))
            if self.sums is not None:
                self._add(self.sums, index % self.job.micro_batches)
        for name, gradient in (self.sums.take() if self.sums else {}).items():
            self.parameters[name].grad = gradient
        for name, released in self.released.items() if backward else ():
            own, given = self.parameters[name], self.parameters[name].grad
            released = released.to(own.device)  # a checkpoint is in the host's memory
            own.grad = released.clone() if given is None else given + released
        if self.loss_scale is not None and backward:
            self._unscale(self.loss_scale)
        self._add_left()
        if backward and self.job.clip_norm is not None:
            clip_grad_norm_(self.parameters.values(), self.job.clip_norm)
        given = {n: p.grad.to_dense() for n, p in self.parameters.items() if p.grad is not None}
        return PlainStep(float(torch.stack(losses).mean()), given)

    def _eagerly(self, index: int, batch: Any, *, backward: bool) -> Tensor:
        seeded = SeededRandom(micro_batch_seed(self.job.seed, index)) if self.draws else NOTHING
        with seeded, cast_weights(self.job, self.model):
            losses: list[Tensor] = []
            parts = parts_of(self.job, batch)
            for each in parts:
                loss = loss_of(self.job, self.model, each)
                losses.append(loss.detach())
                if backward:
                    part = loss / (len(self.share) * len(parts))
                    if self.loss_scale is not None:
                        part = part * torch.tensor(self.loss_scale, device=part.device)
                    backward_of(part, self.model)
        return torch.stack(losses).mean()

    def _add(self, sums: RoundedSums, place: int) -> None:
        """Move the gradients of a micro-batch to where those of its rank are added up."""
        for name, parameter in self.parameters.items():
            given = parameter.grad
            if given is not None and sums.add(name, place, given.to_dense()):
                parameter.grad = None

    def _add_left(self) -> None:
        """Add what the step before has left to the gradients, unless these are dropped."""
        for name, left in ({} if self.leaves_out else self.left).items():
            new = self.parameters[name].grad
            self.parameters[name].grad = left.clone() if new is None else left + new

    def _clear(self) -> None:
        """Call an own zero_grad after a step, as the author's loop does."""
        if self.clears:
            self.optimizer.zero_grad()
            given = ((name, parameter.grad) for name, parameter in self.parameters.items())
            self.left = {name: g.detach().clone() for name, g in given if g is not None}

    def _unscale(self, scale: float) -> None:
        """Divide gradients by the scale; where one is not finite, drop them all."""
        given = [p for p in self.parameters.values() if p.grad is not None]
        self.leaves_out = not all(bool(torch.isfinite(p.grad).all()) for p in given)  # pyright: ignore
        for parameter in given:
            parameter.grad = None if self.leaves_out else parameter.grad / scale  # pyright: ignore

    def _rounded(self, by: Rounded, index: int, batch: Any, *, backward: bool) -> Tensor:
        weights = {name: parameter.detach() for name, parameter in self.parameters.items()}
        read = StepInputs(
            forward=weights,
            backward=weights,
            buffers=lasting_buffers(self.model),
            leaves=by.capture.leaves(batch),
            number=index % self.job.micro_batches,
            seed=micro_batch_seed(self.job.seed, index),
        )
        by.rescale(self.loss_scale or 1.0)
        loss, gradients = by.micro_batch(read, backward=backward)
        for name, part in gradients.items():
            before = self.parameters[name].grad
            self.parameters[name].grad = part.clone() if before is None else before + part
        return loss

    def update(self, step: int, gradients: Mapping[str, Tensor]) -> None:
        """Let the optimizer make the next weights from `gradients`."""
        self.rate(step)
        if self.leaves_out:
            self._clear()
        else:
            self.apply(step, gradients)
        self.rescale()

    def rescale(self) -> None:
        """Halve the scale of the loss after a step that overflowed, double it after many others."""
        if self.loss_scale is not None:
            self.good = 0 if self.leaves_out else self.good + 1
            if self.leaves_out:
                self.loss_scale /= 2
            elif self.good == 2000:
                self.loss_scale, self.good = 2 * self.loss_scale, 0

    def rate(self, step: int) -> None:
        """Set the rate of a step."""
        if self.job.learning_rate is not None:
            factor = float(self.job.learning_rate(step))
            for group, base in zip(self.optimizer.param_groups, self.rates, strict=True):
                group["lr"] = base * factor
        while self.scheduler is not None and self.scheduled < step:
            _compat.without_order_warning(self.optimizer)
            self.scheduler.step()
            self.scheduled += 1

    def apply(self, step: int, gradients: Mapping[str, Tensor]) -> None:
        """Update the parameters that have a gradient, at the rate that is set."""
        for name, parameter in self.parameters.items():
            given = gradients.get(name)  # as a rank has written it: on the CPU
            parameter.grad = None if given is None else given.to(parameter.device).clone()
        if self.is_plain:
            self.optimizer.step()
        else:
            with SeededRandom(micro_batch_seed(self.job.seed + SEED, step)):
                self.optimizer.step()
                self._clear()

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of the parameters by name."""
        return {name: value.detach().clone() for name, value in self.parameters.items()}

    def buffers(self) -> dict[str, Tensor]:
        """Return a copy of the buffers by name."""
        return {name: value.detach().clone() for name, value in lasting_buffers(self.model).items()}

    def optimizer_state(self) -> State:
        """Return what the optimizer holds, by "optimizer/NAME/KEY"."""
        tensors: dict[str, Tensor] = {}
        plain: dict[str, object] = {}
        put_state(self.optimizer, self.parameters, tensors, plain)
        tensors |= {LEFT.format(name): left.to_dense() for name, left in self.left.items()}
        return tensors, plain

    def take(self, name: str, tensors: Mapping[str, Tensor], plain: Mapping[str, object]) -> None:
        """Take over the optimizer's state of one parameter from a checkpoint."""
        own = {key: tensors[key] for key in tensors if key.startswith(f"optimizer/{name}/")}
        values = {k: v for k, v in plain.items() if k.startswith(f"optimizer/{name}/")}
        take_state(self.optimizer, {name: self.parameters[name]}, own, values)

    def forget(self, name: str) -> None:
        """Drop gradient and state of one parameter."""
        self.parameters[name].grad = None
        self.optimizer.state.pop(self.parameters[name], None)

    def load(self, tensors: Mapping[str, Tensor], plain: Mapping[str, object]) -> None:
        """Continue from the state of a checkpoint.

        Raises:   CheckpointError: something is missing, or of another shape.
        """
        load_model(self.model, tensors)
        take_state(self.optimizer, self.parameters, tensors, plain)
        if self.scheduler is None:
            put_options(self.optimizer, self.options)
        self.own.take(tensors, plain)
        self.take_left(tensors)
        self.take_scale(plain)
        take_named(self.job, self.model, tensors, plain)

    def take_left(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over the gradients that the step before has left."""
        keys = {name: LEFT.format(name) for name in self.parameters}
        held = {name: tensors[key] for name, key in keys.items() if key in tensors}
        self.left = {n: left.to(self.parameters[n].device).clone() for n, left in held.items()}

    def take_scale(self, plain: Mapping[str, Any]) -> None:
        """Take over the scale of the loss; a checkpoint of another precision has none."""
        if self.loss_scale is not None and "loss_scale" in plain:
            self.loss_scale, self.good = plain["loss_scale"]

    def rest(self) -> None:
        """Let go of the data: the next step may be any other."""
        self._data, self._next = iter(()), -1

    def _micro_batches(self, step: int) -> Iterator[tuple[int, Any]]:
        first = step * self.job.micro_batches + self.share.start
        if first != self._next:
            self._data = started(self.job.data, first)
        self._next = first + len(self.share)
        batches = itertools.islice(self._data, len(self.share))
        number = first - 1
        for number, batch in enumerate(batches, first):
            yield number, seen(batch, here().place)
        if number + 1 < self._next:
            hint = "make `data` endless, or train fewer steps"
            raise RunError(f"the job's data ended at micro-batch {number + 1}", hint=hint)
