"""Autopsy: where the first number that is not finite came from.

The weights that ranks left are checked first: a parameter that is not finite already names
itself.  Then the data; then the micro-batch is run once more, eagerly, with every op watched.

Ignores:  what gives infinity on purpose (a mask); an infinity that becomes no NaN and no loss.
"""

import inspect
import linecache
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock import _compat
from penstock.graph.code import SeededRandom, micro_batch_seed
from penstock.graph.lasting import lasting_buffers
from penstock.graph.merge import number_of, unjoined
from penstock.graph.precision import cast_weights
from penstock.graph.trace import build_model, loss_of, on_device
from penstock.job import Job
from penstock.runtime.eager import load_model
from penstock.runtime.finite import NotFinite, NotFiniteError, all_finite

_LOWER = "lower the learning rate, warm it up, or set Job.clip_norm"
_DATA = "leave such samples out, or fix what makes them"
_LINE = "keep that op in its range (an epsilon, a clamp), or lower the learning rate"
_HALF = 'use "bfloat16", whose range is that of float32'
_AGAIN = "does the job's data differ from call to call, or its model keep state of its own?"
_ON_PURPOSE = ("full", "fill", "masked_fill", "where", "scalar_tensor", "lift_fresh", "copy")
_UNSET = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")


def explained(job: Job, found: NotFinite, tensors: Mapping[str, Tensor]) -> NotFiniteError:
    """Return the error to report: what was found, where it came from, and a hint.

    tensors:  what the ranks left, as in a checkpoint; the run's own, its optimizer's left out.
    """
    error = NotFiniteError(found)
    cause = _cause(job, found, tensors)
    words = by_the_data(error.message, job, found, cause.loss_of)
    error.message = f"{words} on rank {found.rank}\n{cause.evidence}"
    error.hint = cause.hint
    error.args = (error.message,)
    return error


def by_the_data(words: str, job: Job, found: NotFinite, loss_of: int | None = None) -> str:
    """Return words that name a micro-batch by the numbers that the author's data gives it.

    job:      with its micro-batches joined: several of the data are computed as one.
    loss_of:  number of the author's whose loss is not finite, where it is known which.
    """
    _, joined = unjoined(job)
    if joined < 1:
        return _by_parts(words, found, int(1 / joined))
    for at in found.indices if joined > 1 else ():
        numbers = f"(numbers {at * joined} to {(at + 1) * joined - 1} of the data, as one)"
        if loss_of is not None and loss_of // joined == at:
            whole = rf"micro-batch (\d+) \(number {at} of the data\)"
            place = re.search(whole, words)
            of_step = 0 if place is None else (int(place[1]) - at) * joined + loss_of
            words = re.sub(whole, f"micro-batch {of_step} (number {loss_of} of the data)", words)
        words = words.replace(f"(number {at} of the data)", numbers)
    return words


def _by_parts(words: str, found: NotFinite, parts: int) -> str:
    """Return words that name the author's micro-batch, and which part of it."""
    for at in found.indices:
        number, part = divmod(at, parts)
        named = f"(number {number} of the data, part {part + 1} of {parts})"
        whole = rf"micro-batch (\d+) \(number {at} of the data\)"
        place = re.search(whole, words)
        if place is not None:
            words = re.sub(whole, f"micro-batch {int(place[1]) // parts} {named}", words)
        words = words.replace(f"(number {at} of the data)", named)
    return words


class _Cause(NamedTuple):
    """What is not finite, and a hint; of which of the author's joined micro-batches the loss is."""

    evidence: str
    hint: str
    loss_of: int | None = None


def _cause(job: Job, found: NotFinite, tensors: Mapping[str, Tensor]) -> _Cause:
    model = build_model(job)
    first = {**dict(model.named_parameters()), **lasting_buffers(model)}
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        if not all_finite(value) and name in first:
            if all_finite(first[name]):
                after = f"since the update of step {found.step}" if found.step else "before step 1"
                text = f"{_what(kind)} {name} is not finite {after}: {_numbers(value)}"
                return _Cause(text, _LOWER)
            if value.isnan().any():
                text = f"{_what(kind)} {name} is so from the start: {_numbers(value)}"
                return _Cause(text, "check what `model` builds, or the file that it loads")
    missing = [name for name in first if not any(key.endswith(f"/{name}") for key in tensors)]
    if missing:
        text = f"the weights of that moment could not be kept: {missing[0]} is missing"
        return _Cause(text, _LOWER)
    load_model(model, tensors)
    author, joined = unjoined(job)
    last = math.ceil(joined)  # of several joined, or 1 of a part
    firsts = dict.fromkeys(number_of(job, at) for at in found.indices)
    indices = [k for first in firsts for k in range(first, first + last)]
    for index in indices:
        cause = _cause_in(author, model, index)
        if cause is not None:
            whose = f"micro-batch {index} of the data: " if joined > 1 else ""
            return cause._replace(evidence=f"{whose}{cause.evidence}")
    where = ", ".join(map(str, indices))
    text = f"micro-batch {where} run once more in one process gives finite numbers"
    return _Cause(text, _AGAIN)


def _what(kind: str) -> str:
    return "buffer" if kind == "buffers" else "parameter"


def _numbers(value: Tensor) -> str:
    """Return how many of a tensor's numbers are not finite."""
    count, nans = int((~torch.isfinite(value)).sum()), int(value.isnan().sum())
    return f"{count} of its {value.numel()} numbers ({nans} nan)"


def _cause_in(job: Job, model: nn.Module, index: int) -> _Cause | None:
    """Return what is not finite in one micro-batch, and a hint; None if nothing is."""
    batch = on_device(next(iter(islice(job.data(index), 1)), None))
    for path, leaf in _compat.pytree.tree_flatten_with_path(batch)[0]:
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.isnan().any():
            name = _compat.pytree.keystr(path)
            return _Cause(f"the data is not finite: leaf {name} has {_numbers(leaf)}", _DATA)
    watch = _FirstNotFinite(model)
    with watch.paths, SeededRandom(micro_batch_seed(job.seed, index)), watch:
        loss = loss_of(job, model, batch).detach()
    if not all_finite(loss):
        return _Cause(*_of_forward(job, watch, float(loss)), loss_of=index)
    of_backward = _of_backward(job, model, batch, index)
    return None if of_backward is None else _Cause(*of_backward)


def _of_forward(job: Job, watch: "_FirstNotFinite", loss: float) -> tuple[str, str]:
    hint = _HALF if "float16" in (job.autocast, job.precision) else _LINE
    lines: list[str] = []
    if watch.infinite is not None:
        lines.append(f"first infinite: {watch.infinite}")
    if watch.nan is not None:
        lines.append(f"first nan: {watch.nan}")
    return "\n".join(lines) or f"run once more it is {loss}, and no single op made it so", hint


def _of_backward(job: Job, model: nn.Module, batch: Any, index: int) -> tuple[str, str] | None:
    """Return what is not finite in the gradients of one micro-batch."""
    hint = _HALF if "float16" in (job.autocast, job.precision) else _LINE
    model.zero_grad()
    with (
        warnings.catch_warnings(record=True) as told,
        SeededRandom(micro_batch_seed(job.seed, index)),
        torch.autograd.set_detect_anomaly(True),
    ):
        warnings.simplefilter("always")
        try:
            with cast_weights(job, model):
                loss_of(job, model, batch).backward()  # pyright: ignore[reportUnknownMemberType]
        except RuntimeError as problem:
            place = _last_of_user("\n".join(str(each.message) for each in told))
            return f"in the backward pass of {place}: {problem}", hint
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not all_finite(parameter.grad):
            return f"the gradient of {name} is not finite: {_numbers(parameter.grad)}", hint
    return None


def _last_of_user(trace: str) -> str:
    """Return the last line of a traceback, as text, that is not torch's or Penstock's own."""
    found = re.findall(r'File "([^"]+)", line (\d+)', trace)
    outside = [(name, int(line)) for name, line in found if _is_users(name)]
    return _line(*outside[-1]) if outside else "an op that is not known"


def _is_users(filename: str) -> bool:
    own = str(Path(__file__).parent.parent), str(Path(torch.__file__).parent), "<"
    return not filename.startswith(own)


def _line(filename: str, line: int) -> str:
    return f"{filename}:{line}: {linecache.getline(filename, line).strip()}"


class _OpPlace(NamedTuple):
    """Where an op was called: the module's path and a line."""

    op: str
    module: str
    line: str

    def __str__(self) -> str:
        module = f"in {self.module}, " if self.module else ""
        return f"{self.op} {module}{self.line}"


class _Paths:
    """While active, knows the path of the module whose forward runs."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.open, self.handles = model, list[str](), list[Any]()

    def __enter__(self) -> None:
        for path, module in _compat.named_modules(self.model):
            enter, leave = self._entering(path), self._leave
            self.handles.append(module.register_forward_pre_hook(enter))
            self.handles.append(module.register_forward_hook(leave, always_call=True))

    def _entering(self, path: str) -> Any:
        return lambda module, inputs: self.open.append(path)  # pyright: ignore

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.open.pop()

    def __exit__(self, *problem: object) -> None:
        for handle in self.handles:
            handle.remove()


class _FirstNotFinite(_compat.DispatchMode):
    """Notes the first op that makes infinity from finite numbers, and the first that makes nan."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.paths = _Paths(model)
        self.infinite: _OpPlace | None = None
        self.nan: _OpPlace | None = None

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = _floats((args, kwargs))
        before = [(_has_nan(value), all_finite(value)) for value in given]
        result = func(*args, **(kwargs or {}))
        name = func.name().partition("::")[2].partition(".")[0].rstrip("_")
        if self.nan is None and name not in _UNSET:
            made = _floats(result)
            if any(map(_has_nan, made)) and not any(nan for nan, _ in before):
                self.nan = self._here(func)
            elif self.infinite is None and name not in _ON_PURPOSE and _first(before, made):
                self.infinite = self._here(func)
        return result

    def _here(self, func: Any) -> _OpPlace:
        frame = inspect.currentframe()
        while frame is not None and not _is_users(frame.f_code.co_filename):
            frame = frame.f_back
        line = _line(frame.f_code.co_filename, frame.f_lineno) if frame else ""
        return _OpPlace(str(func), self.paths.open[-1] if self.paths.open else "", line)


def _floats(values: Any) -> list[Tensor]:
    leaves = _compat.pytree.tree_leaves(values)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _first(before: Sequence[tuple[bool, bool]], made: Sequence[Tensor]) -> bool:
    """Return whether an op gets only finite numbers and returns others."""
    return all(ok for _, ok in before) and not all(map(all_finite, made))


def _has_nan(value: Tensor) -> bool:
    return bool(value.isnan().any())
