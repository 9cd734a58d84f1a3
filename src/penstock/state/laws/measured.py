"""Measured: the laws of what forward writes, as two micro-batches show them.

The uncut model runs eagerly, the first time so that it is seen what reads what (flow.py), then with
other values in the buffers: the loss and every gradient must keep all their bits, and c must be the
same everywhere.
"""

import itertools
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import isnan
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock import _compat
from penstock.batches.reads import started
from penstock.errors import JobError, PenstockError
from penstock.graph.caches import remade
from penstock.graph.code import SeededRandom, micro_batch_seed
from penstock.graph.functional import where
from penstock.graph.lasting import lasting_buffers
from penstock.graph.precision import cast_weights
from penstock.graph.trace import build_model, loss_and_figures, on_device
from penstock.graph.waiting import backward_of
from penstock.job import Job
from penstock.state.laws.flow import Dependencies
from penstock.state.laws.norms import STATISTICS, counted, norms_of

_EXACT = (torch.float32, torch.float64)  # what is coarser cannot be summed from parts
_FAR = {torch.float32: 2.0**40, torch.float64: 2.0**100}  # beside which any x is nothing
_NEAR_ENOUGH = 16  # roundings, of differences between two values


@dataclass(frozen=True, slots=True)
class BufferLaw:
    """What forward makes of a buffer: coefficient * old + new; None if the order matters.

    coefficient:  not a number where there is one that was not measured.
    why:    what was found that leaves nothing but the order.
    calls:  of a buffer of one of torch's norms, how often a micro-batch calls the norm; else 0.
    places: of a step, where it has a row for each that no other place reads or writes; else 0.
    """

    coefficient: float | None
    why: str = ""
    calls: int = 0
    places: int = 0

    @property
    def is_ordered(self) -> bool:
        """Return whether it has to see every micro-batch in order, in one place."""
        return self.coefficient is None and not self.places

    def __str__(self) -> str:
        if self.places:
            return f"a row for each of the {self.places} places of a step"
        if self.coefficient is None:
            return f"in order: {self.why}"
        if isnan(self.coefficient):
            return "c * old + new"
        return f"{self.coefficient:.6g} * old + new" if self.coefficient else "the newest"


Laws = Mapping[str, BufferLaw]


def measured_laws(job: Job) -> dict[str, BufferLaw]:
    """Return the laws that two micro-batches follow; `settled` says which hold for all.

    Raises:   JobError: the model or the loss raises, or there is no data.
    """
    return _BufferProbe(job, build_model(job)).laws()


class _Kept:
    """The tensors that a model keeps from step to step, and their first values.

    caches:  buffers that forward has made for itself by now, and that stay as they are.
    """

    def __init__(self, model: nn.Module, caches: AbstractSet[str] = frozenset()) -> None:
        self.model, self.caches = model, caches
        parameters = dict(model.named_parameters())
        self.tensors: dict[str, Tensor] = self.now()
        self.trained = {name for name, value in parameters.items() if value.requires_grad}
        self.first = {name: value.detach().clone() for name, value in self.tensors.items()}

    def now(self) -> dict[str, Tensor]:
        """Return what the model keeps now: forward may put another tensor in a buffer's place."""
        tensors = {**dict(self.model.named_parameters()), **lasting_buffers(self.model)}
        return {name: value for name, value in tensors.items() if name not in self.caches}

    def put(self, values: Mapping[str, Tensor]) -> None:
        """Restore each tensor to its place, with its first value or that of `values`."""
        with torch.no_grad():
            for name, value in {**self.first, **values}.items():
                path, _, leaf = name.rpartition(".")
                setattr(self.model.get_submodule(path), leaf, self.tensors[name])
                self.tensors[name].copy_(value)


class _StepOutput(NamedTuple):
    """What one micro-batch gave: loss, figures and gradients, and what is kept after it.

    calls:  how often forward has called each of torch's norms.
    """

    outputs: Mapping[str, Tensor]
    kept: Mapping[str, Tensor]
    calls: Mapping[str, int]


class _BufferProbe:
    """Runs a model with several values in its buffers."""

    def __init__(self, job: Job, model: nn.Module) -> None:
        self.job, self.model, self.kept = job, model, _Kept(model)
        self.norms = dict(norms_of(model))
        batches = [on_device(batch) for batch in itertools.islice(started(job.data, 0), 2)]
        if not batches:
            raise JobError("the job's data yields no micro-batch", hint="check `data(0)`")
        self.batches = batches[0], batches[-1]

    def laws(self) -> dict[str, BufferLaw]:
        """Return the law of what forward writes."""
        flow, plain = self._first_beside_caches()
        now = self.kept.now()
        written = {name for name in now if self._is_written(name, flow, now)}
        found: dict[str, BufferLaw] = {}
        for name in sorted(written | self.kept.tensors.keys() - now.keys()):
            why = self._why_ordered(name, flow, plain, {n: now[n] for n in written})
            if why:
                found[name] = BufferLaw(None, why)
        for name in sorted(written - found.keys()):
            before = flow.of(now[name]) & found.keys()
            if before:
                found[name] = BufferLaw(None, f"it depends on {min(before)}")
        rest = sorted(written - found.keys())
        found |= self._measured(rest, plain) if rest else {}
        self.kept.put({})  # the job may hand this model out again
        return found

    def _first_beside_caches(self) -> tuple[Dependencies, _StepOutput]:
        """Run the first micro-batch, and once more if it makes caches: if it then makes none."""
        flow = Dependencies(self.kept.tensors)
        plain, whole = self._first(flow), self.kept
        caches = remade(self.model, whole.tensors)
        if not caches:
            return flow, plain
        made = {**whole.tensors, **_compat.unsaved_buffers(self.model)}
        self.kept = _Kept(self.model, caches)
        self.kept.first |= {n: v for n, v in whole.first.items() if n not in caches}
        flow = Dependencies(self.kept.tensors)
        plain = self._first(flow)
        if remade(self.model, made):
            self.kept, flow = whole, Dependencies(whole.tensors)
            plain = self._first(flow)
        return flow, plain

    def _first(self, flow: Dependencies) -> _StepOutput:
        try:
            return self._run(0, {}, flow)
        except PenstockError:
            raise
        except Exception as problem:  # whatever the job's code raises
            message = where(problem, "the job's model or loss fails")
            raise JobError(message, hint="does it run without Penstock?") from problem

    def _run(
        self, at: int, values: Mapping[str, Tensor], flow: Dependencies | None = None
    ) -> _StepOutput:
        """Run micro-batch `at` with `values` in the buffers, the others as they were first.

        The second one without its backward: the first one shows the gradients.
        """
        self.kept.put(values)
        self.model.zero_grad(set_to_none=True)
        seeded = SeededRandom(micro_batch_seed(self.job.seed, at))
        with (
            counted(self.norms) as calls,
            seeded,
            flow or nullcontext(),
            cast_weights(self.job, self.model),
        ):
            loss, figures = loss_and_figures(self.job, self.model, self.batches[at])
            forward = dict(calls)  # a checkpointed block calls them again
            if at == 0:
                backward_of(loss, self.model)
        outputs = {"the loss": loss.detach()}
        outputs |= {f"the figure {name}": value.detach() for name, value in figures.items()}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                outputs[f"the gradient of {name}"] = parameter.grad
        self.model.zero_grad(set_to_none=True)
        untrained = self.kept.first.keys() - self.kept.trained
        kept = {n: v.detach().clone() for n, v in self.kept.now().items() if n in untrained}
        return _StepOutput(outputs, kept, forward)

    # -- what reads what -------------------------------------------------------------------------

    def _is_written(self, name: str, flow: Dependencies, now: Mapping[str, Tensor]) -> bool:
        if name in flow.written or now[name] is not self.kept.tensors.get(name):
            return True
        return not _same(self.kept.first[name], now[name])

    def _why_ordered(
        self, name: str, flow: Dependencies, plain: _StepOutput, written: Mapping[str, Tensor]
    ) -> str:
        """Return what rules out that `name` is linear; nothing if it may be."""
        if name in self.kept.trained:
            return "forward writes into this weight, which the optimizer changes"
        if name not in self.kept.first or name not in written:
            return "forward makes or removes it"
        first, now = self.kept.first[name], written[name]
        if (first.shape, first.dtype, first.layout) != (now.shape, now.dtype, torch.strided):
            return "forward changes its shape or dtype"
        if name in flow.shared:
            return "it shares its memory with another one"
        if first.dtype not in (*_EXACT, torch.bool) and not _is_whole_number(first.dtype):
            return f"{str(first.dtype).removeprefix('torch.')} is too coarse for sums of parts"
        if name in flow.seen:
            return "forward looks at its value"
        for what, value in plain.outputs.items():
            if name in flow.of(value):
                return f"{what} depends on it"
        others = (other for other in written if other != name and name in flow.of(written[other]))
        other = next(others, None)
        return "" if other is None else f"{other} depends on it"

    # -- linear or not ---------------------------------------------------------------------------

    def _measured(self, names: Sequence[str], plain: _StepOutput) -> dict[str, BufferLaw]:
        """Return the laws of buffers on which, as far as was seen, nothing else depends.

        Then all can be given other values at once.
        """
        first = {name: self.kept.first[name] for name in names}
        source = torch.Generator().manual_seed(0)
        near, far, opposite = dict[str, Tensor](), dict[str, Tensor](), dict[str, Tensor]()
        for name, value in first.items():
            near[name], far[name], opposite[name] = _others(value, source)
        try:
            steps = [self._run(0, near), self._run(1, far), self._run(1, opposite)]
            told = not _same_outputs(plain, steps[0]) or not _same_outputs(*steps[1:])
            if told and _same_outputs(plain, self._run(0, {})):  # else they differ by themselves
                return dict.fromkeys(names, BufferLaw(None, "the loss or a gradient depends on it"))
        except Exception as problem:  # noqa: BLE001 - whatever the job's code raises
            why = f"with another value in it forward fails: {type(problem).__name__}: {problem}"
            return dict.fromkeys(names, BufferLaw(None, " ".join(why.split())))
        laws: dict[str, BufferLaw] = {}
        for name in names:
            old = first[name], near[name], far[name], opposite[name]
            law = _law(old, tuple(step.kept[name] for step in (plain, *steps)))
            path, _, leaf = name.rpartition(".")
            if path in self.norms and leaf in STATISTICS:
                law = _as_called(law, {step.calls[path] for step in (plain, *steps)})
            laws[name] = law
        return laws


def _as_called(law: BufferLaw, counts: AbstractSet[int]) -> BufferLaw:
    """Return the law of a norm's buffer, where each micro-batch calls the norm so often."""
    if law.coefficient is None:
        return law
    if len(counts) > 1:
        return BufferLaw(None, "forward calls its norm in some micro-batches only")
    return replace(law, calls=next(iter(counts)))


def _is_whole_number(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool


def _same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same numbers, bit for bit but for signs of zeros."""
    if (a.shape, a.dtype, a.layout) != (b.shape, b.dtype, b.layout):
        return False
    a, b = (x if x.layout == torch.strided else x.to_dense() for x in (a, b))
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _same_outputs(a: _StepOutput, b: _StepOutput) -> bool:
    pairs = ((value, b.outputs.get(name)) for name, value in a.outputs.items())
    same = all(other is not None and _same(value, other) for value, other in pairs)
    return same and len(a.outputs) == len(b.outputs)


def _others(value: Tensor, source: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return a near value, a distant one, and one as distant on the other side."""
    dtype = value.dtype
    if dtype == torch.bool:
        return ~value, torch.ones_like(value), torch.zeros_like(value)
    if _is_whole_number(dtype):
        most = torch.iinfo(dtype).max
        far = torch.randint(most // 8, most // 4, value.shape, generator=source).to(value)
        near = torch.randint(1, 8, value.shape, generator=source).to(value)
        return value + near, far, -far
    numbers = 1 + torch.rand(value.shape, generator=source, dtype=torch.float64)
    signs = 1 - 2 * torch.randint(0, 2, value.shape, generator=source)
    far = (numbers * _FAR[dtype]).to(value)
    return value + (numbers * signs).to(value), far, -far


Four = tuple[Tensor, ...]  # as first, near, far and opposite; the first two after one micro-batch


def _law(old: Four, new: Four) -> BufferLaw:
    """Return the law by which `old` became `new`."""
    crooked = BufferLaw(None, "its next value is not a constant * old + new")
    if not old[0].is_floating_point():
        return _whole_law(old, new) or crooked
    if old[0].numel() == 0:
        return BufferLaw(1.0)
    first, near, far, opposite = (value.double() for value in old)
    after_first, after_near, after_far, after_opposite = (value.double() for value in new)
    eps = torch.finfo(old[0].dtype).eps
    ratios = (after_far - after_opposite) / (far - opposite)
    found = _rounded(float(ratios.mean()), old[0].dtype)
    if not bool(((ratios - found).abs() <= _NEAR_ENOUGH * eps).all()) or not 0 <= found <= 1:
        return crooked
    apart = (after_near - after_first) - found * (near - first)
    sizes = sum(value.abs() for value in (first, near, after_first, after_near))
    if not bool((apart.abs() <= _NEAR_ENOUGH * eps * sizes).all()):
        return crooked
    return BufferLaw(found)


def _whole_law(old: Four, new: Four) -> BufferLaw | None:
    """Return the law of integers, which may wrap around, or of truths."""
    pairs = ((0, 1), (2, 3))
    if all(torch.equal(new[a], new[b]) for a, b in pairs):
        return BufferLaw(0.0)
    if old[0].dtype == torch.bool:
        return None
    same = all(torch.equal(new[a] - new[b], old[a] - old[b]) for a, b in pairs)
    return BufferLaw(1.0) if same else None


def _rounded(ratio: float, dtype: torch.dtype) -> float:
    """Return the number meant: a short decimal if one is within rounding of `ratio`.

    Or what it becomes in `dtype`, if that is nearer: which of them is used is up to the op.
    """
    eps = torch.finfo(dtype).eps
    digits = 6 if dtype == torch.float32 else 14
    for count in range(digits + 1):
        short = round(ratio, count)
        if abs(short - ratio) <= eps:
            rounded = float(torch.tensor(short, dtype=dtype))
            return min((short, rounded), key=lambda value: abs(value - ratio))
    return ratio
