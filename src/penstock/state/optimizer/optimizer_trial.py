"""Optimizer trial: whether an optimizer that is not known can be divided, lent parts, and resumed.

It runs in several ways on the same made-up gradients; any bit of difference is a reason.
"""

import json
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam

from penstock.errors import JobError, PenstockError
from penstock.graph.code import SeededRandom, micro_batch_seed
from penstock.graph.functional import where
from penstock.graph.whole_optimizer import Loan, WholeOptimizer, whole_optimizer
from penstock.job import Job
from penstock.state.optimizer.clearing import LeftError, has_own_zero_grad
from penstock.state.optimizer.coupling import Mixing
from penstock.state.optimizer.cover import Cover
from penstock.state.optimizer.rates import JobScheduler
from penstock.state.optimizer.updates import SEED, Updates, divided, held_by, lent_to
from penstock.state.optimizer_state import digest, nested, state_digests
from penstock.state.python_state import digests, put_back, snapshot

TRYING = threading.RLock()  # a trial lends other values to a module that ranks may share
_tried: WeakKeyDictionary[nn.Module, list[tuple[str, tuple[object, ...], str | None]]]
_tried = WeakKeyDictionary()
_FEW, _MANY = 3, 11  # steps of a trial, for large and for small models
_LONG = 120  # steps, where an arm of a branch was not taken in those
_SMALL = 2_000_000  # elements
NOT: AbstractContextManager[Any] = nullcontext()
_GROUPS = 24  # among which parameters are divided where each part is made anew
Tried = Literal["divided", "lent", "resumed", "made again"]

_AGAIN = "differs when it is made a second time"

Found = list[dict[str, bytes]]  # after each step, by parameter and key: what differs if they do


def tried(what: Tried, job: Job, model: nn.Module, reached: Sequence[str]) -> str | None:
    """Return the result of a trial, which is made once for a job and a model."""
    key = (job.optimizer, job.scheduler, job.learning_rate, job.average, job.clip_norm is None)
    with TRYING:
        known = _tried.setdefault(model, [])
        for kind, old, result in known:
            if kind == what and all(a is b for a, b in zip(old, key, strict=True)):
                return result
        whole = whole_optimizer(job, model)
        if whole.is_plain:
            return None
        trial = _Trial(job, model, reached, whole.model, sparse_in(whole))
        try:
            with torch.no_grad():
                result = _TRIALS[what](trial)
        finally:
            put_back(job, trial.named)
        known.append((what, key, result))
        return result


def sparse_in(whole: WholeOptimizer) -> dict[str, str]:
    """Return the parameters that an optimizer, or one that it holds, takes sparse gradients of, and
    the class of that.
    """
    names = {id(parameter): name for name, parameter in whole.parameters.items()}
    return {
        names[id(parameter)]: type(one).__name__
        for _, one in nested(whole.optimizer)
        if isinstance(one, SparseAdam)
        for group in one.param_groups
        for parameter in group["params"]
        if id(parameter) in names
    }


def _try_divided(trial: "_Trial") -> str | None:
    if mixed := trial.mixed():
        return mixed
    whole, plain = trial.whole(), trial.plainly()
    if whole != plain:
        what = trial.words(whole, plain, _AGAIN)
        hint = "create what it remembers, and what it draws from, where the optimizer is made"
        raise JobError(f"the job's optimizer remembers something outside itself: {what}", hint=hint)
    try:
        parts = trial.divided()
    except Exception as problem:  # noqa: BLE001 - whatever the job's code raises for a part
        return where(problem, "it fails on a part of the model")
    if parts != whole:
        return trial.words(whole, parts, "depends on other parameters")
    return trial.unkept()


def _try_made_again(trial: "_Trial") -> str | None:
    trial.steps = _FEW
    first, second = trial.plainly(), trial.plainly()
    return None if first == second else trial.words(first, second, _AGAIN)


def _try_lent(trial: "_Trial") -> str | None:
    if mixed := trial.mixed():
        return mixed
    whole = trial.whole()
    for groups, first in _partitions(trial.reached):
        try:
            parts = trial.lent(groups, rest=0 if first else -1)
        except Exception as problem:  # noqa: BLE001 - whatever the job's code raises for a part
            return where(problem, "it fails on a part of the model")
        if parts != whole:
            return trial.words(whole, parts, "depends on other parameters")
    return trial.unkept()


def _partitions(names: Sequence[str]) -> Iterator[tuple[list[set[str]], bool]]:
    """Yield two ways to divide names among few groups, and whether it is the first.

    Any two names, up to the square of the number of groups, are apart in one of them.
    """
    count = min(len(names), _GROUPS)
    yield [set(names[first::count]) for first in range(count)], True
    size = -(-len(names) // max(1, count))
    yield [set(names[first : first + size]) for first in range(0, len(names), size)], False


def _try_resumed(trial: "_Trial") -> str | None:
    unbroken, resumed = trial.whole(), trial.resumed()
    if unbroken == resumed:
        return None
    return trial.words(unbroken, resumed, "is not as in an unbroken run")


_TRIALS: Mapping[Tried, Callable[["_Trial"], str | None]] = {
    "divided": _try_divided,
    "lent": _try_lent,
    "resumed": _try_resumed,
    "made again": _try_made_again,
}


class _Trial:
    """Runs a job's optimizer on made-up gradients.

    newest:  the module that was built last.
    sparse:  the parameters whose gradients are.
    """

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        reached: Sequence[str],
        newest: nn.Module,
        sparse: Mapping[str, str],
    ) -> None:
        self.job, self.model, self.reached, self.newest = job, model, reached, newest
        self.sparse = sparse
        self.parameters = dict(model.named_parameters())
        self.size = sum(self.parameters[name].numel() for name in self.reached)
        self.steps = (_MANY if self.size < _SMALL else _FEW) + 1
        self.named = snapshot(job)  # of what a hook may move beside
        self.attributes = _attributes(newest)  # that parameters have, before a step sets others
        self.lost: list[dict[str, str]] = []  # by the runs: what could not be saved, and its kind

    def gradients(self, step: int) -> dict[str, Tensor]:
        """Return gradients of norm 0.1, then 100, then one of both for each second parameter, by
        turns; in the last step one has an inf.
        """
        source = torch.Generator().manual_seed(step)
        found: dict[str, Tensor] = {}
        for at, name in enumerate(self.reached):
            like, is_large = self.parameters[name], step + at * (step % 4 > 1)
            scale = (0.1, 100.0)[is_large % 2] / max(1, self.size) ** 0.5
            drawn = torch.randn(like.shape, generator=source) * scale
            found[name] = drawn.to(like.device, like.dtype)
        if step == self.steps - 1 and self.reached:
            found[self.reached[0]].view(-1)[:1] = torch.inf
        return {name: g.to_sparse(1) if name in self.sparse else g for name, g in found.items()}

    def whole(self) -> Found:
        """Return what the very optimizer does, on loan."""
        put_back(self.job, self.named)
        updates, values = self._on_loan(self._values())
        self.lost.clear()
        return self._run([updates], values, range(self.steps))

    def mixed(self) -> str | None:
        """Return what the first steps make of several parameters together; None: nothing."""
        steps, found, cover = self.steps, list[str](), Cover()
        try:
            for count in (_FEW, _MANY, _LONG if self.size < _SMALL else _MANY):
                self.steps = count
                self.plainly(found.append, cover)
                if found or cover.unreached() is None:
                    break
            late = cover.unreached()
            more = f"is not reached in {self.steps} steps, and may look at any parameter"
        finally:
            self.steps = steps
        return next(iter(found), late and f"{late} {more}")

    def plainly(
        self, tell: Callable[[str], None] | None = None, cover: AbstractContextManager[Any] = NOT
    ) -> Found:
        """Return what a plain loop does.

        tell:    is told what its steps make of several parameters together, if anything.
        cover:   is open while they run.
        """
        put_back(self.job, self.named)
        whole = whole_optimizer(self.job, self.model)
        self.newest, self.attributes = whole.model, _attributes(whole.model)
        optimizer, found = whole.optimizer, Found()
        clears = has_own_zero_grad(optimizer)
        with _own_values(whole):
            watch = None if tell is None else Mixing(whole.parameters)
            rates: list[Any] = [group.get("lr") for group in optimizer.param_groups]
            scheduler: Any = self.job.scheduler and self.job.scheduler(optimizer)
            for step in range(self.steps):
                for name, gradient in self.gradients(step).items():
                    old = whole.parameters[name].grad if clears else None
                    whole.parameters[name].grad = gradient if old is None else old + gradient
                try:
                    if scheduler is not None and step > 0:
                        scheduler.step()
                    self._rate(optimizer, rates, step)
                    seeded = SeededRandom(micro_batch_seed(self._seed, step))
                    with torch.enable_grad(), seeded, _watched(watch, whole), cover:
                        optimizer.step()
                        if clears:
                            optimizer.zero_grad()
                except Exception as problem:  # noqa: BLE001 - whatever the job's code raises
                    found.append(self._failure(step, problem))
                    break
                weights = {name: tensor.detach() for name, tensor in held_by(whole.model).items()}
                own = [(optimizer, whole.parameters)]
                found.append(_digests(weights, own) | self._named())
            if tell is not None and watch is not None and (mixed := watch.words()):
                tell(mixed)
        return found

    def _named(self) -> dict[str, bytes]:
        return {f"state {name}": told for name, told in digests(self.job).items()}

    def _rate(self, optimizer: Optimizer, rates: list[Any], step: int) -> None:
        if self.job.learning_rate is not None:
            for group, rate in zip(optimizer.param_groups, rates, strict=False):
                group["lr"] = rate * float(self.job.learning_rate(step))

    def divided(self) -> Found:
        """Return what an optimizer for each parameter does."""
        put_back(self.job, self.named)
        self._forget()
        whole = whole_optimizer(self.job, self.newest, is_new=True)
        schedule = None if self.job.scheduler is None else JobScheduler(self.job, whole.optimizer)
        values = self._values()
        live = {name: nn.Parameter(values[name]) for name in self.trainable}
        parts = [
            Updates(self.job, divided(whole, {name: parameter}), schedule, {name: parameter})
            for name, parameter in live.items()
        ]
        with _own_values(whole):  # hooks may write into the module
            return self._run(parts, {**values, **self._buffers()}, range(self.steps))

    def lent(self, groups: Sequence[set[str]], *, rest: int) -> Found:
        """Return what optimizers do of which each is lent some parameters.

        Buffers are others: a rank has only those of its stages as they are.
        rest:    the group to which all that has no gradient belongs, too.
        """
        put_back(self.job, self.named)
        self._forget()
        whole, values = whole_optimizer(self.job, self.newest, is_new=True), self._values()
        schedule = None if self.job.scheduler is None else JobScheduler(self.job, whole.optimizer)
        others, buffers = values.keys() - set(self.reached), self._buffers()
        with _own_values(whole):
            for buffer in whole.model.buffers():
                buffer.copy_(~buffer if buffer.dtype == torch.bool else buffer + 1)
            parts: list[Updates] = []
            for names in groups:
                held = names | others if names is groups[rest] else names
                lent = schedule, {name: values[name] for name in held}
                parts.append(lent_to(self.job, whole.model, held & {*self.trainable}, lent))
            return self._run(parts, {**values, **buffers}, range(self.steps))

    def resumed(self) -> Found:
        """Return what optimizers do of which each makes one step, and then the next goes on."""
        put_back(self.job, self.named)
        values, found = self._values(), Found()
        tensors: dict[str, Tensor] = {}
        plain: dict[str, object] = {}
        for step in range(self.steps):
            updates, values = self._on_loan(values)
            updates.take(tensors, json.loads(json.dumps(plain)))
            found += self._run([updates], values, range(step, step + 1))
            tensors, plain = {}, {}
            updates.put(tensors, plain)
        return found

    def words(self, one: Found, other: Found, what: str) -> str:
        """Return where two runs first differ."""
        for step, (left, right) in enumerate(zip(one, other, strict=False)):
            keys = [key for key in {**left, **right} if left.get(key) != right.get(key)]
            if keys:
                name, _, key = min(keys, key=lambda key: "/" in key).partition("/")
                kept = f"{key.rpartition('/')[2]} of " if key else ""
                last = ", when one gradient is not finite" if step == self.steps - 1 else ""
                return f"{kept}{name or 'whether it fails'} {what} (step {step}{last})"
        return f"it {what}"

    @property
    def trainable(self) -> list[str]:
        """Return the names of what is trained."""
        return [name for name, parameter in self.parameters.items() if parameter.requires_grad]

    @property
    def _seed(self) -> int:
        return self.job.seed + SEED

    def _values(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    def _buffers(self) -> dict[str, Tensor]:
        return {name: b.detach().clone() for name, b in self.model.named_buffers()}

    def _forget(self) -> None:
        """Take from parameters what steps have set on them, as on those of a new process."""
        for name, parameter in self.newest.named_parameters():
            vars(parameter).clear()
            vars(parameter).update(self.attributes.get(name, {}))

    def _on_loan(self, values: dict[str, Tensor]) -> tuple[Updates, dict[str, Tensor]]:
        self._forget()
        whole = whole_optimizer(self.job, self.newest, is_new=True)
        schedule = None if self.job.scheduler is None else JobScheduler(self.job, whole.optimizer)
        values = {**self._buffers(), **values}
        loan = Loan(whole, values)
        return Updates(self.job, whole, schedule, whole.parameters, loan), values

    def _run(self, updates: Sequence[Updates], values: Mapping[str, Tensor], steps: range) -> Found:
        found = Found()
        for step in steps:
            gradients = self.gradients(step)
            try:
                for one in updates:
                    one.step(step, gradients)
            except PenstockError as problem:
                found.append(self._failure(step, problem))
                break
            held = [(one.optimizer, one.parameters) for one in updates]
            found.append(_digests(values, held) | self._named())
        self.lost.append({name: kind for one in updates for name, kind in one.lost().items()})
        return found

    def unkept(self) -> str | None:
        """Return what the parts of the last run could not save, though the whole could, if any."""
        whole, parts = self.lost[0], self.lost[-1]
        unkept = next(iter(parts.keys() - whole.keys()), None)
        return unkept and f"its {unkept}, a {parts[unkept]}, changes, and no part has all of it"

    def _failure(self, step: int, problem: Exception) -> dict[str, bytes]:
        """Return what stands for a step that fails.

        It may after some steps, as at the end of a schedule, and where a gradient is not finite.
        """
        if step < _FEW - 1 or isinstance(problem, LeftError):
            if isinstance(problem, PenstockError):
                raise problem
            message = where(problem, "a step of the job's optimizer fails")
            raise JobError(message, hint="does it run without Penstock?") from problem
        return {"": b"fails"}


def _attributes(model: nn.Module) -> dict[str, dict[str, Any]]:
    return {name: dict(vars(parameter)) for name, parameter in model.named_parameters()}


def _watched(watch: Mixing | None, whole: WholeOptimizer) -> AbstractContextManager[object]:
    if watch is None:
        return nullcontext()
    grads = {name: p.grad for name, p in whole.parameters.items() if p.grad is not None}
    watch.given(grads)
    return watch


@contextmanager
def _own_values(whole: WholeOptimizer) -> Generator[None]:
    """Let parameters and buffers have copies of their values, and put the values back."""
    held = list(held_by(whole.model).values())
    before = [tensor.data for tensor in held]
    for tensor in held:
        tensor.data = tensor.data.clone()
    try:
        yield
    finally:
        for tensor, value in zip(held, before, strict=True):
            tensor.grad = None
            tensor.data = value


def _digests(
    weights: Mapping[str, Tensor],
    optimizers: Sequence[tuple[Optimizer, Mapping[str, nn.Parameter]]],
) -> dict[str, bytes]:
    """Return what differs where weights, or states of trainable ones, differ, by name and key."""
    found = {name: digest(value) for name, value in weights.items()}
    for optimizer, parameters in optimizers:
        trainable = {name: p for name, p in parameters.items() if p.requires_grad}
        for name, key, value in state_digests(optimizer, trainable):
            found[f"{name}/{key}"] = value
    return found
