"""Late values: what Python keeps that a traced step has read, and the job's code changes later.

`self.alpha`, an entry of a list, of a dict, of a config, a global: a trace holds it as it was, and
nobody runs the loss again while ranks train.  What the loss can reach is looked at when it has been
traced, and again at the end of a run and before each checkpoint; what is another value then, and is
read by code that the loss can reach, is told.

Ignores:  what the same code sets itself, which the examination judges; elements of tensors.
"""

# Any object may come by here.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false

import itertools
from collections import deque
from collections.abc import Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from penstock import _compat
from penstock.examine.name_reads import reader_of, written_at
from penstock.examine.python_values import Values, Walk
from penstock.examine.queries import is_ours, text_of
from penstock.examine.unsaved import shown
from penstock.examine.value_changes import change, names_of
from penstock.job import Job

_NOT_CALLED = ("__init__", "__new__", "__repr__", "__str__", "extra_repr", "__getstate__")
_MOST = 50_000  # objects that are looked at
_MANY = 1_000  # of what a container holds
_PLAIN = bool | int | float | complex | str | bytes | Tensor | ModuleType | None


class LateValues:
    """The values that a job's loss can reach, as they were when this was made."""

    def __init__(self, job: Job, model: nn.Module) -> None:
        followed = _Followed()
        followed.todo.append(job.loss)
        for module in model.modules():
            followed.module(module)
        followed.go()
        self._loss, self._functions = job.loss, list(followed.functions.values())
        self._codes = followed.codes
        self._before, self._alive = self._look(model)

    def changes(self, model: nn.Module) -> list[str]:
        """Return in words what is another value now, and which line reads it."""
        now, _ = self._look(model)
        found = list[str]()
        for (name, holder, _), (place, before, after) in names_of([self._before, now]).items():
            line = reader_of(name, holder, place, self._codes)
            if line is not None and not written_at(name, self._codes):
                found.append(f"{text_of(line)}: {shown(place)}: changed{change(before, after)}")
        return found

    def _look(self, model: nn.Module) -> tuple[Values, list[object]]:
        """Return the values, and what has to live for their numbers to be its own."""
        walk = Walk(self._codes, tensor=id)
        for path, module in _compat.named_modules(model):
            walk.module(f"model.{path}".rstrip("."), module)
        for function in self._functions:
            walk.function(function)
        for name, value in _given(self._loss):
            walk.put(name, name, value)
        walk.go()
        return walk.values, walk.alive


class _Followed:
    """The functions of a job that its loss can come to, by what they name.

    functions:  by `id`; codes: of these, and of what is written inside of them.
    kinds:      classes of the job's, whose methods are followed once they are named.
    """

    def __init__(self) -> None:
        self.functions: dict[int, FunctionType] = {}
        self.codes: set[CodeType] = set()
        self.names: set[str] = set()
        self.kinds: dict[type, None] = {}
        self.seen: set[int] = set()
        self.todo: deque[Any] = deque()

    def go(self) -> None:
        """Follow what was put here, and the methods that this names, until there are no more."""
        while self.todo and len(self.seen) < _MOST:
            self._visit(self.todo.popleft())
            if not self.todo:
                methods = [f for kind in list(self.kinds) for f in self._named(kind)]
                self.todo += (f for f in methods if id(f) not in self.seen)

    def module(self, module: nn.Module) -> None:
        """Put what a module of the model calls, and the objects that it has."""
        self.kinds.setdefault(type(module))
        self.todo += (value for name, value in vars(module).items() if name[:1] != "_")
        self.todo += _compat.hooks_called(module)

    def _visit(self, value: Any) -> None:
        if isinstance(value, _PLAIN) or id(value) in self.seen:
            return
        self.seen.add(id(value))
        match value:
            case FunctionType():
                self.todo += self._function(value)
            case MethodType():
                self.todo += [value.__func__, value.__self__]
            case partial():
                self.todo += [value.func, *value.args, *value.keywords.values()]
            case nn.Module():
                self.kinds.setdefault(type(value))
            case type():
                self._kind(value)
            case dict():
                self.todo += itertools.islice(list(value.values()), _MANY)
            case list() | tuple():
                self.todo += value[:_MANY]
            case _ if self._kind(type(value)):
                self.todo += list(getattr(value, "__dict__", {}).values())[:_MANY]
            case _:
                pass

    def _kind(self, kind: type) -> bool:
        """Return whether a class is the job's own, whose methods may be called then."""
        is_own = any(f for one in kind.__mro__ for v in list(vars(one).values()) for f in _own(v))
        if is_own:
            self.kinds.setdefault(kind)
        return is_own

    def _function(self, function: FunctionType) -> Iterator[Any]:
        """Note a function of the job, and yield what it names and closes over."""
        yield getattr(function, "__wrapped__", None)
        if not is_ours(function.__code__.co_filename):
            return
        self.functions[id(function)] = function
        codes = list(_inside(function.__code__))
        names = {name for code in codes for name in code.co_names}
        self.codes.update(codes)
        self.names |= names
        for cell in function.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # not bound yet
                continue
        yield from function.__defaults__ or ()
        known = function.__globals__
        yield from [known[name] for name in names if name in known]

    def _named(self, kind: type) -> Iterator[FunctionType]:
        """Yield the methods of a class that code which was followed can call by their names."""
        for owner in kind.__mro__:
            for name, value in list(vars(owner).items()):
                is_named = name in self.names or name == "forward" or name[:2] == "__"
                if is_named and name not in _NOT_CALLED:
                    yield from _own(value)


def _given(loss: Any) -> Iterator[tuple[str, object]]:
    """Yield what a loss that is no plain function brings along, by the names that it has inside."""
    if isinstance(loss, partial):
        function = getattr(loss.func, "__func__", loss.func)
        names = getattr(getattr(function, "__code__", None), "co_varnames", ())
        first = isinstance(loss.func, MethodType)
        yield from zip(names[first:], loss.args, strict=False)
        yield from loss.keywords.items()
        yield from _given(loss.func)
    elif not isinstance(loss, FunctionType):
        yield "loss", loss


def _own(value: object) -> Iterator[FunctionType]:
    """Yield the function of a class's attribute if it is the job's."""
    yield from (f for f in _behind(value) if is_ours(f.__code__.co_filename))


def _behind(value: object) -> Iterator[FunctionType]:
    """Yield the function of a class's attribute: itself, or that of a property or static method."""
    match value:
        case FunctionType():
            yield value
        case staticmethod() | classmethod():
            yield from _behind(value.__func__)
        case property():
            yield from _behind(value.fget)
        case _:
            pass


def _inside(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _inside(constant)
