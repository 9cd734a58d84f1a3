"""Optimizer: the job's optimizer, made once for the whole model, and lent the tensors of a run.

What the job's function is given are the parameters of a module, in its order and with their names,
so that groups by index, name or identity, closures over the module and attributes on parameters
mean what they mean in a plain loop.  The module keeps its own values: a run lends it others.
"""

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from penstock import _compat
from penstock.device import here
from penstock.errors import JobError, PenstockError, RunError
from penstock.graph.composed import ByName, is_known, parts_of, with_average
from penstock.graph.functional import where
from penstock.graph.lasting import lasting_buffers
from penstock.graph.trace import built_by, newest_beside
from penstock.job import Job, Parameters

_alone = threading.RLock()  # modules may be shared by the threads of a process


@dataclass(frozen=True, slots=True, eq=False)
class WholeOptimizer:
    """An optimizer and the module whose parameters it was made from.

    hooked:   a parameter on whose gradient it has put a hook; empty if there is none.
    """

    optimizer: Optimizer
    model: nn.Module
    hooked: str = ""

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the module by name."""
        return dict(self.model.named_parameters())

    @property
    def is_plain(self) -> bool:
        """Whether every parameter is known to be updated by itself: one of torch's, unmodified."""
        return is_known(self.optimizer)


def whole_optimizer(job: Job, model: nn.Module, *, is_new: bool = False) -> WholeOptimizer:
    """Return the job's optimizer of all parameters of `model`.

    A function that may look at the model itself is called again for a module that is built right
    before, with the same values: one that keeps the last module it has built then finds this one.
    is_new:   says that `model` is the last that was built.

    Raises:   JobError: it is not one, cannot run here, or holds parameters that it was not given.
    """
    with _alone:
        whole = _made(job, model)
        if not is_new and (_foreign(whole) or not whole.is_plain or not _is_alike(job, model)):
            whole = _made(job, _built(job, model))
    if foreign := _foreign(whole):
        what = "parameter that is" if foreign == 1 else "parameters that are"
        message = f"the job's optimizer holds {foreign} {what} not among those it was given"
        hint = (
            "build it from those: optimizer=lambda parameters: AdamW(parameters); see docs/job.md"
        )
        raise JobError(message, hint=hint)
    return whole


_alike: WeakKeyDictionary[nn.Module, list[tuple[object, bool]]] = WeakKeyDictionary()


def _is_alike(job: Job, model: nn.Module) -> bool:
    """Return whether groups are the same for a module that is, or is not, the last that was built.

    Of a function that refers to nothing that holds a module this is known.
    """
    if is_closed(job.optimizer):
        return True
    known = _alike.setdefault(model, [])
    for function, is_alike in known:
        if function is job.optimizer:
            return is_alike
    newest = _made(job, _built(job, model))
    known.append((job.optimizer, _groups(newest) == _groups(_made(job, model))))
    return known[-1][1]


def _groups(whole: WholeOptimizer) -> list[tuple[list[str | None], str]]:
    """Return names and options of every group."""
    names = {id(p): name for name, p in whole.parameters.items()}
    return [
        (
            [names.get(id(p)) for p in group["params"]],
            repr({k: v for k, v in group.items() if k != "params"}),
        )
        for group in whole.optimizer.param_groups
    ]


_CLOSED = {"builtins", "functools", "itertools", "math", "operator", "re", "torch", "transformers"}


def is_closed(value: object, seen: tuple[object, ...] = ()) -> bool:
    """Return whether a function, and all that it refers to, holds nothing that could be a module.

    That is numbers, text, classes, and what torch and the like offer.
    """
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return True
    if isinstance(value, tuple | frozenset):
        return all(is_closed(one, seen) for one in list[object](value))  # pyright: ignore
    if isinstance(value, functools.partial):
        return all(is_closed(one, seen) for one in _parts(value))
    if isinstance(value, ByName):
        return all(is_closed(maker, seen) for _, maker in value.makers)
    home = getattr(value, "__name__" if isinstance(value, ModuleType) else "__module__", None)
    if str(home).partition(".")[0] in _CLOSED or any(value is one for one in seen):
        return isinstance(value, ModuleType | type | BuiltinFunctionType | FunctionType)
    if not isinstance(value, FunctionType):
        return False
    held = [_contents(cell) for cell in value.__closure__ or ()]
    held += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    held += [
        value.__globals__[name] for name in _names(value.__code__) if name in value.__globals__
    ]
    return all(is_closed(one, (*seen, value)) for one in held)


def _parts(partial: Any) -> list[object]:
    return [partial.func, *partial.args, *partial.keywords.values()]


def _contents(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is in it yet
        return None


def _names(code: CodeType) -> set[str]:
    """Return the names that a piece of code, or one inside it, refers to."""
    inside = (one for one in code.co_consts if isinstance(one, CodeType))
    return {*code.co_names}.union(*map(_names, inside))


def _made(job: Job, model: nn.Module) -> WholeOptimizer:
    before = {p: _compat.num_gradient_hooks(p) for p in model.parameters()}
    try:
        optimizer = job.optimizer(Parameters(model.named_parameters()))
        if job.average is not None and isinstance(cast("object", optimizer), Optimizer):
            optimizer = with_average(optimizer, job.average)
    except PenstockError:
        raise
    except Exception as problem:  # whatever the job's code raises
        message = where(problem, "the job's optimizer fails")
        raise JobError(message, hint="does it run without Penstock?") from problem
    _check(optimizer)
    for one in {id(each): each for each in (*parts_of(optimizer), optimizer)}.values():
        _check(one)
        _compat.give_hooks(one)
    named = model.named_parameters()
    hooked = (name for name, p in named if _compat.num_gradient_hooks(p) > before.get(p, 0))
    return WholeOptimizer(optimizer, model, next(hooked, ""))


def _check(optimizer: object) -> None:
    if not isinstance(optimizer, Optimizer):
        found = type(optimizer).__name__
        raise JobError(f"the job's optimizer is a {found}", hint="return a torch optimizer")
    name = type(optimizer).__name__
    step = _compat.without_scheduler(vars(optimizer)).get("step")
    needed = needed_arguments(step) if step else needed_arguments(type(optimizer).step)[1:]
    if isinstance(optimizer, LBFGS) or "closure" in needed:
        message = f"a step of the job's optimizer, {name}, computes the loss anew with a closure"
        hint = (
            "a step here has one loss, of each micro-batch: use one that needs only its gradients"
        )
        raise JobError(message, hint=f"{hint}, as AdamW does")
    if needed:
        message = f"a step of the job's optimizer, {name}, is to be given {', '.join(needed)}"
        raise JobError(message, hint="use one whose step() can be called without arguments")


def needed_arguments(function: Callable[..., object]) -> list[str]:
    """Return the names of the arguments without which it cannot be called."""
    arguments = inspect.signature(function).parameters.values()
    gathers = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one.name for one in arguments if one.default is one.empty and one.kind not in gathers]


def _foreign(whole: WholeOptimizer) -> int:
    """Return the number of parameters in the optimizer that are not the module's."""
    own = {id(parameter) for parameter in whole.model.parameters()}
    held = [p for group in whole.optimizer.param_groups for p in group["params"]]
    return sum(id(parameter) not in own for parameter in held)


def _built(job: Job, model: nn.Module) -> nn.Module:
    """Return a module that the job's model function builds now, with the values of `model`."""
    with _compat.GENERATOR, here().random_kept():
        torch.manual_seed(job.seed)  # pyright: ignore[reportUnknownMemberType]
        new = built_by(job)
    if new is not model:
        for own, other in (
            (new.parameters(), model.parameters()),
            (lasting_buffers(new).values(), lasting_buffers(model).values()),
        ):
            for value, wanted in zip(own, other, strict=True):
                value.data = wanted.detach().clone()
    return new


class Loan:
    """Lends other tensors to the module of a whole optimizer for the time of a step.

    Values by name, of parameters or buffers; those of parameters are what a step changes.  The
    module that was built last, if that is another one, has them too: a hook may look at that.
    stays:   whether the module keeps them after a step: nobody else looks at it.
    """

    def __init__(
        self, whole: WholeOptimizer, values: Mapping[str, Tensor], *, stays: bool = False
    ) -> None:
        self.stays, self.model, self.values = stays, whole.model, values
        known = _held(whole.model)
        self.names = [name for name in known if name in values]
        self.rows = [(known[name], values[name], values[name].data_ptr()) for name in self.names]
        self.seen = weakref.ref(whole.model)
        self.seen_rows: tuple[list[str], Rows] = [], []

    def run(self, gradients: Mapping[str, Tensor], step: Callable[[], object]) -> None:
        """Call `step` while the module has the values lent, and these gradients or none.

        Raises:   RunError: it gave a parameter another shape or dtype.
        """
        given = [gradients.get(name) for name in self.names]
        with _alone:
            names, seen = self._seen_elsewhere()
            before = [tensor.data for tensor, _, _ in (*self.rows, *seen)]
            try:
                for (tensor, value, _), gradient in zip(self.rows, given, strict=True):
                    tensor.data = value
                    if gradient is not None:
                        tensor.grad = gradient
                for tensor, value, _ in seen:
                    tensor.data = value
                step()
                take_over(names, seen)
                take_over(self.names, self.rows)
            finally:
                both = (*self.rows, *seen)
                for at, ((tensor, _, _), old) in enumerate(zip(both, before, strict=True)):
                    tensor.grad = None
                    if at >= len(self.rows) or not self.stays:
                        tensor.data = old

    def _seen_elsewhere(self) -> "tuple[list[str], Rows]":
        """Return names and rows of the module that was built last, where that is another one."""
        newest = newest_beside(self.model)
        if newest is not self.seen():
            own, there = _held(self.model), _held(newest)
            alike = all(n in there and there[n].shape == t.shape for n, t in own.items())
            lends = alike and newest is not self.model
            values = {n: self.values.get(n, t.data) for n, t in own.items()} if lends else {}
            rows = [(there[name], value, value.data_ptr()) for name, value in values.items()]
            self.seen, self.seen_rows = weakref.ref(newest), (list(values), rows)
        return self.seen_rows


Rows = Sequence[tuple[Tensor, Tensor, int]]  # a tensor, its place, the address of that


def _held(model: nn.Module) -> dict[str, Tensor]:
    return {**lasting_buffers(model), **dict(model.named_parameters())}


def take_over(names: Sequence[str], rows: "Rows") -> None:
    """Copy new data of a tensor to the memory where its data belongs.

    Raises:   RunError: it has another shape or dtype.
    """
    for name, (tensor, value, address) in zip(names, rows, strict=True):
        if tensor.data_ptr() == address:
            continue
        new = tensor.data
        if (new.shape, new.dtype) != (value.shape, value.dtype):
            message = f"the optimizer makes {name} a {new.dtype}{list(new.shape)}"
            hint = f"it has to stay {value.dtype}{list(value.shape)}"
            raise RunError(message, hint=hint)
        value.copy_(new)
        tensor.data = value
