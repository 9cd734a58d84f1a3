"""Job notices: what is said of a job, or refused, before its first step."""

import builtins
import inspect
import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import torch

from penstock._compat import pytree
from penstock.batches.loader import epoch_of
from penstock.batches.reads import Endless
from penstock.best import best_of, sets_of
from penstock.choose.store import keep, kept, key_of
from penstock.errors import JobError, PenstockError, RunError
from penstock.examine.unlike_counts import words_of_counts
from penstock.graph.functional import where
from penstock.graph.summed_loss import sums_over_batch
from penstock.graph.trace import Capture, build, build_model, loss_and_figures, loss_of
from penstock.graph.traced_constants import was_traced
from penstock.graph.without_gradients import without_gradients
from penstock.job import Job, is_users
from penstock.listener import Listener
from penstock.processes.child import Beat, can_fork, in_a_fork
from penstock.runtime.validate import most_of, too_many, validated, without_end

log = logging.getLogger(__name__)

_READ_S = 1.0  # for which the micro-batches of a validation are read beforehand
_DEPTH, _MOST_LOOKED_AT = 4, 10_000  # of what a loss may have filled
_NEAR = 0.02  # relative, of a loss of every sample twice to twice the loss
_MADE_S = 3.0  # for which it may take to be made, or to yield one: then nobody waits for more
_TRIED_S = 30.0  # for which the first micro-batch of each set may take to be validated
_CORRECT = "correct that line; check=False begins without looking"


def check_validation(job: Job, text: str, listener: Listener, *, tries: bool = True) -> None:
    """Raise where a validation has no end, or fails, before any step is made for it.

    It is read for a second in a process of its own, which keeps nothing, and the first micro-batch
    of each set is validated there with the weights that training begins with.
    text:     how the job was named.
    tries:    whether it is validated too.
    Raises:   JobError: it yields more than a validation does, goes on epoch after epoch, or fails.
    """
    if job.validation is None or not can_fork():
        return
    key = key_of(job, text, "validation")
    if kept(_SoonRead, key, "validation") is not None:
        return
    for words, look, limit_s in _LOOKS if tries else _LOOKS[:1]:
        with listener.busy(words):
            try:
                problem = in_a_fork(partial(look, job), limit_s)
            except RunError:  # it takes long, or its process dies: it does so in the run
                return
        if problem:
            raise JobError(problem[0], hint=problem[1])
    if tries:
        keep(key, "validation", {"within_s": _READ_S})


@dataclass(frozen=True, slots=True)
class _SoonRead:
    """No validation without an end was found within so many seconds; its first part is right."""

    within_s: float


def _failing(job: Job, beat: Beat) -> list[str]:
    """Return why the first micro-batch of a set cannot be validated, and the mend; [] if it can."""
    model = build_model(job)
    beat()
    rows = {name: partial(_first_of, made) for name, made in sets_of(job.validation).items()}
    try:
        found = validated(replace(job, validation=rows.get("", rows)), model)
        if found and job.validate_every:
            best_of(job.best).of(found)
    except PenstockError as problem:
        return [problem.message, problem.hint or _CORRECT]
    except Exception as problem:  # noqa: BLE001 - whatever the job's code raises
        return [where(problem, "the validation fails"), _CORRECT]
    return []


def _first_of(made: Callable[[], Iterable[Any]]) -> list[Any]:
    return list(islice(made(), 1))


def _endless(job: Job, beat: Beat) -> list[str]:
    """Return why a validation does not end, and the mend; [] as far as a second tells."""
    try:
        for made in sets_of(job.validation).values():
            if problem := _endless_set(job, made, beat):
                return problem
    except Exception:  # whatever the code of the job raises: the trial names its line
        log.debug("the validation raises", exc_info=True)
    return []


def _endless_set(job: Job, made: Callable[[], Any], beat: Beat) -> list[str]:
    batches = made()
    if isinstance(batches, Endless):
        problem = without_end(batches)
        return [problem.message, problem.hint]
    if hasattr(batches, "__len__"):
        return []
    start_s, most = time.monotonic(), most_of(job)
    for number, _ in enumerate(batches, 1):
        if number >= most:
            problem = too_many(number)
            return [problem.message, problem.hint]
        if time.monotonic() - start_s > _READ_S:
            break
        beat()
    return []


_LOOKS = (
    ("looking for the end of the validation", _endless, _MADE_S),
    ("trying the validation", _failing, _TRIED_S),
)


def words_before(job: Job, captured: Capture, lines: list[str], num_steps: int | None) -> list[str]:
    """Return what a person should know of a traced job before its first step, in lines.

    lines:      what `noticing` has found.
    num_steps:  None: nobody knows.
    """
    return [
        *words_of_step(job, captured.graph.samples, num_steps, None),
        *words_of_sum(job, captured),
        *words_of_counts(job, captured),
        *words_of_lines(
            [*lines, *(f"{name}: what it is filled with" for name in left_behind(job))]
        ),
    ]


def words_of_step(
    job: Job, samples: int, num_steps: int | None, ranks: int | None
) -> Iterator[str]:
    """Yield what a step of a job is, and how many epochs its steps are where an end is known.

    samples:  of a micro-batch; 0: nobody knows.
    ranks:    how many replicas without a plan are asked for, at most; None: a plan shares it.
    """
    of_data, per_epoch = epoch_of(job.data)
    size, count = of_data or samples, job.micro_batches
    if not size:
        return
    epochs = num_steps * count / per_epoch if per_epoch and num_steps else 0.0
    total = f"; {num_steps:,} steps = {epochs:,.3g} epochs" if epochs else ""
    yield f"a step: {count} x {size:,} = {count * size:,} samples{total}"
    if of_data and count == 1 and ranks and ranks > 1:
        part, more = divmod(size, ranks)
        how = "smaller batches" if more else f"batches of {part} and micro_batches={ranks}"
        yield f"  without a plan replicas cannot share a micro-batch: {how} are the same step"
        yield "  if the loss is a mean over independent samples"


# -- what a traced loss does not go on doing -------------------------------------------------------


@contextmanager
def noticing() -> Generator[list[str]]:
    """Yield a list to which the lines are added that print, or log, while a loss is traced."""
    found: list[str] = []
    printed, handled = builtins.print, logging.Logger.handle

    def note(what: str) -> None:
        if (line := _line_in_loss()) and f"{line}: {what}" not in found:
            found.append(f"{line}: {what}")

    def noted_print(*args: Any, **kwargs: Any) -> None:
        note("print")
        printed(*args, **kwargs)

    def noted_handle(self: logging.Logger, record: logging.LogRecord) -> None:
        note("a log")
        handled(self, record)

    builtins.print, logging.Logger.handle = noted_print, noted_handle
    try:
        yield found
    finally:
        builtins.print, logging.Logger.handle = printed, handled


def _line_in_loss() -> str:
    """Return the line of the user's code that prints or logs for a loss; "": it is not for one."""
    frame, line = inspect.currentframe(), ""
    while frame is not None:
        file = frame.f_code.co_filename
        if frame.f_code is loss_and_figures.__code__:
            return line
        if not line and file not in (__file__, logging.__file__):
            if not is_users(file):
                return ""
            line = f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def left_behind(job: Job) -> list[str]:
    """Return the names of what the loss has filled while it was traced, and will not in training.

    It still holds a tensor of the trace: in a list, a dict or an attribute of an object that the
    loss, or a function that it calls, names.
    """
    seen, found = set[int](), list[str]()
    waiting: list[tuple[str, Any, int]] = [("", job.loss, 0)]
    while waiting and len(seen) < _MOST_LOOKED_AT:
        name, value, depth = waiting.pop()
        if isinstance(value, torch.Tensor):
            if was_traced(value) and name not in found:
                found.append(name)
            continue
        if id(value) not in seen and depth <= _DEPTH:
            seen.add(id(value))
            waiting += [(name or own, each, depth + 1) for own, each in _inside(value)]
    return found


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a function or object holds, by name."""
    if isinstance(value, MethodType):
        value = value.__func__
    if isinstance(value, FunctionType) and is_users(value.__code__.co_filename):
        for name in _names_of(value.__code__):
            if name in value.__globals__:
                yield name, value.__globals__[name]
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
            with suppress(ValueError):  # it is empty yet
                yield name, cell.cell_contents
    elif isinstance(value, dict):
        yield from (("", each) for each in cast("dict[Any, Any]", value).values())
    elif isinstance(value, list | tuple | set | deque):
        yield from (("", each) for each in cast("Iterable[Any]", value))
    elif hasattr(value, "__dict__") and not isinstance(value, type | ModuleType | FunctionType):
        yield from (("", each) for each in [*cast("dict[str, Any]", vars(value)).values()])


def _names_of(code: CodeType) -> set[str]:
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return {*code.co_names}.union(*map(_names_of, inner))


def words_of_lines(lines: list[str]) -> Iterator[str]:
    """Yield that what a loss prints is not printed in training."""
    if lines:
        more = f"; and {len(lines) - 1} more" if len(lines) > 1 else ""
        yield f"{lines[0]} in the loss runs while the step is traced, not while it trains{more}"
        yield '  figures are shown with every step: return loss, {"name": value}'


# -- a sum over the batch --------------------------------------------------------------------------


def words_of_sum(job: Job, captured: Capture) -> Iterator[str]:
    """Yield what a step is whose loss is a sum over the samples of a micro-batch.

    The graph says that it may be one; the loss of a micro-batch that holds every sample twice, that
    it is.
    """
    count, samples = job.micro_batches, captured.graph.samples
    if count == 1 or not sums_over_batch(captured) or not can_fork():
        return
    try:
        ratio = float(in_a_fork(lambda beat: _ratio_of_double(job, samples), _MADE_S))
    except RunError:
        return
    if abs(ratio - 2.0) < _NEAR:
        yield f"the loss is a sum over the batch: a step's gradient is the mean of {count} sums,"
        yield f"  that of the sum over its {count * samples:,} samples divided by {count}"
        yield "  micro_batches=1, or a loss that is divided by its samples, does not depend on that"


def _ratio_of_double(job: Job, samples: int) -> float:
    model, batch = build(job)
    twice = pytree.tree_map(partial(_twice, samples), batch)
    model.eval()
    losses = (without_gradients(partial(loss_of, job, model, each)) for each in (batch, twice))
    one, two = map(float, losses)
    return two / one if one else 0.0


def _twice(samples: int, leaf: Any) -> Any:
    is_batched = isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == samples
    return torch.cat([leaf, leaf]) if is_batched else leaf
