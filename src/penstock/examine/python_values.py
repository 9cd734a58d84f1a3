"""Python values: what Python keeps between micro-batches, where the code of the job can read it.

Found from the modules of the model and from the functions that ran: their closures, defaults and
attributes, the globals and attributes of modules that they name, and all that hangs on these.
What tensors hold is left to `flow`: they are read by ops.
"""

# Any object may come by here.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeArgument=false

import ctypes
import dis
import gc
import inspect
import io
import itertools
import linecache
import logging
import os
import re
import sys
import threading
import types
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import _lru_cache_wrapper, cache  # pyright: ignore[reportPrivateUsage]
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any

from torch import Tensor, nn

from penstock import _compat
from penstock.examine.name_reads import CHANGES
from penstock.examine.queries import is_ours
from penstock.examine.referents import (
    Suspended,
    attributes,
    behind,
    frame_of,
    is_a,
    is_iterator_of_c,
    names_in,
    names_set,
    parts,
    referents,
    waits_for,
)
from penstock.examine.tokens import (
    LONG,
    Moving,
    key_of,
    plain,
    position_of,
    settings,
    state_of,
    whole,
)

_MOST = 200_000  # values that are looked at
_SKIPPED = (
    logging.Logger,
    logging.Handler,
    re.Pattern,
    threading.Thread,
    type(threading.Lock()),
    type(threading.RLock()),
    ctypes.Structure,
    types.FrameType,
    types.TracebackType,
    types.CodeType,
)
# What the interpreter keeps of what was imported, compiled or warned of: memory of its own, that
# another module which is imported changes, and nothing that a job computes.
_KEPT_BY_THE_INTERPRETER = (
    sys.modules,
    sys.path,
    sys.path_hooks,
    sys.path_importer_cache,
    sys.meta_path,
    sys.warnoptions,
    warnings.filters,
    linecache.cache,
)
_OF_THE_INTERPRETER = {id(one) for one in _KEPT_BY_THE_INTERPRETER}
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR")
_OF_MODULES = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_NOT_IN_FORWARD = ("__init__", "__repr__", "__setstate__", "extra_repr", "reset_parameters")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value is kept: "model.count", and the name by which code reads it: "count".

    holder:  the name of what has it, if code of others may read it for the job's: a queue.
    theirs:  code of torch reads it, in the forward of one of its modules.
    cached:  which result of a function with a cache has it; 0 for none.  A new one is no change.
    """

    where: str
    name: str
    holder: str = ""
    theirs: bool = False
    cached: int = 0


Values = Mapping[Place, object]


def has_extra_state(module: nn.Module) -> bool:
    """Return whether a module tells what it keeps beside tensors."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def held(
    model: nn.Module,
    functions: Iterable[FunctionType],
    codes: Collection[CodeType],
    selves: Iterable[object] | None = None,
    saved: Iterable[object] | None = None,
    others: Iterable[object] = (),
) -> tuple[Values, Collection[int]]:
    """Return every value that Python keeps there, as something that can be compared.

    selves:  more objects to look at; then also which tensors there are, and how often written.
    saved:   objects that are left out, and modules that tell their own extra state.
    others:  more objects to look at, as far as no function holds them.

    Also the `id` of all objects that were met.
    """
    walk = Walk(codes, tensor=None if selves is None else _version_of)
    if saved is not None:
        walk.seen |= {id(one) for one in saved}
        own = (m for m in model.modules() if has_extra_state(m))
        walk.seen |= {id(module) for module in own}
    for own in selves or ():
        walk.put(type(own).__qualname__, type(own).__qualname__, own)
    for path, module in _compat.named_modules(model):
        walk.module(f"model.{path}".rstrip("."), module)
    for function in functions:
        walk.function(function)
    for own in others:
        walk.put(type(own).__qualname__, type(own).__qualname__, own)
    for where, name, other, value in settings():
        walk.values[Place(where, name, other)] = value
    walk.go()
    return walk.values, walk.seen


def _version_of(tensor: Tensor) -> object:
    return id(tensor), tensor._version  # pyright: ignore[reportPrivateUsage]


class Walk:
    """Goes through objects, each once.

    tensor:  what stands for a tensor; None: any for each other.
    values:  where to note what is found.
    inside:  whether to look at the tensors of modules, too.
    """

    def __init__(
        self,
        codes: Collection[CodeType],
        *,
        tensor: Callable[[Tensor], object] | None = None,
        values: dict[Place, object] | None = None,
        inside: bool = False,
    ) -> None:
        self.codes, self.tensor, self.inside = codes, tensor, inside
        self.set, self.names = names_set(codes), names_in(codes)
        self.values: dict[Place, object] = {} if values is None else values
        self.seen: set[int] = set()
        self.alive: list[object] = []  # so that no number is given twice
        self.todo: deque[tuple[Place, object]] = deque()

    def go(self) -> None:
        while self.todo and len(self.values) < _MOST:
            place, value = self.todo.popleft()
            self.visit(place, behind(value) if type(value) in weakref.ProxyTypes else value)

    def put(self, where: str, name: str, value: object, holder: str = "") -> None:
        self.todo.append((Place(where, name, holder), value))

    # -- roots ------------------------------------------------------------------------------------

    def module(self, path: str, module: nn.Module) -> None:
        """Note the attributes of one module of the model, and of its class."""
        if self._again(module):
            return
        theirs = _read_by_torch(type(module))
        for name, value in vars(module).items():
            if name not in _OF_MODULES:
                self.todo.append((Place(f"{path}.{name}", name, theirs=name in theirs), value))
        self.values[Place(f"the class of {path}", "__class__", theirs=True)] = type(module)
        for name, value in [*module._parameters.items(), *module._buffers.items()]:  # pyright: ignore
            for attribute, one in vars(value).items() if value is not None else ():
                self.put(f"{path}.{name}.{attribute}", attribute, one)
            if self.inside:
                self.put(f"{path}.{name}", name, value)
        self.class_of(type(module))

    def function(self, function: FunctionType) -> None:
        """Note what a function of the job that ran can reach."""
        if self._again(function):
            return
        code, name = function.__code__, function.__qualname__
        file = f"{code.co_filename}:{code.co_firstlineno}"
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                self.put(f"{variable} in {file}", variable, cell.cell_contents)
            except ValueError:  # not bound yet
                continue
        for at, value in enumerate(function.__defaults__ or ()):
            variable = code.co_varnames[code.co_argcount - len(function.__defaults__ or ()) + at]
            self.put(f"{variable} in {file}", variable, value)
        for variable, value in (function.__kwdefaults__ or {}).items():
            self.put(f"{variable} in {file}", variable, value)
        for attribute, value in vars(function).items():
            self.put(f"{name}.{attribute}", attribute, value)
        for where, variable, value in _globals(function, self.set):
            self.put(where, variable, value)

    def class_of(self, kind: type) -> None:
        """Note the attributes of a class of the job, and of those that it comes from."""
        for owner in (*kind.__mro__, *inspect.getmro(type(kind))):
            if self._again(owner):
                continue
            known = vars(owner)
            is_own, where = _is_class_of_job(owner), owner.__qualname__
            for name in known if is_own else self.set & known.keys():
                value = known[name]
                is_state = isinstance(value, _lru_cache_wrapper) or not _is_code(value)
                if is_state and (name in self.set or not name.startswith("__")):
                    self.put(f"{where}.{name}", name, value)

    # -- values -----------------------------------------------------------------------------------

    def visit(self, place: Place, value: Any) -> None:
        """Note one value, or put what it holds on the list."""
        if _is_empty(value):  # most of what torch's modules have
            if not (_is_of_others(value) or self._again(value)):
                self._keys_of(place, ())
            return
        token = plain(value)
        if self.tensor is not None and isinstance(value, Tensor):
            self.alive.append(value)
            token = self.tensor(value)
        if token is not None:
            self.values[place] = token
            if getattr(value, "__dict__", None) and not self._again(value):
                self._attributes_of(place, value)
        elif _is_of_others(value) or self._again(value):
            return
        elif isinstance(value, (*_SKIPPED, ModuleType)):
            self._of_others(place, value)
        elif isinstance(value, dict):
            self._items(place, value)
        elif isinstance(value, list | tuple | deque | set | frozenset):
            self._elements(place, value)
        elif is_a(value, io.IOBase):
            self._stream(place, value)
        elif isinstance(value, _lru_cache_wrapper):
            self._cache(place, value)
        elif isinstance(value, nn.Module):
            self.seen.discard(id(value))
            for name, child in value.named_modules():
                self.module(f"{place.where}.{name}".rstrip("."), child)
        elif isinstance(value, FunctionType | type):
            self._code(place, value)
        elif isinstance(value, Suspended):
            self._suspended(place, value)
        elif (held_by := parts(value)) is not None:
            for at, part in enumerate(held_by):
                where = f"{place.where}.{at}" if at else place.where
                self.todo.append((replace(place, where=where), part))
        else:
            self._object(place, value)

    def _code(self, place: Place, value: FunctionType | type) -> None:
        if isinstance(value, type):
            self.values[place] = value.__qualname__
            self.seen.discard(id(value))
            self.class_of(value)
            return
        self.values[place] = value.__code__
        if value.__code__ in self.codes:
            self.seen.discard(id(value))
            self.function(value)
        else:  # a wrapper of others: what was set on it
            self._named(place, vars(value), vars(value))

    def _items(self, place: Place, value: dict[Any, Any]) -> None:
        self._attributes_of(place, value)
        is_ordered = isinstance(value, OrderedDict)
        rows = list(OrderedDict[Any, Any].items(value) if is_ordered else dict.items(value))
        keys = tuple(key_of(key) for key, _ in rows) if len(rows) <= LONG else len(rows)
        self._keys_of(place, keys)
        for key, one in rows[:LONG]:
            shown = repr(key) if isinstance(key, str | int | float) else type(key).__qualname__
            self.todo.append((replace(place, where=f"{place.where}[{shown}]"[:200]), one))

    def _keys_of(self, place: Place, keys: object) -> None:
        where = f"the keys of {place.where}"
        self.values[Place(where, place.name, place.holder, place.theirs, place.cached)] = keys

    def _elements(self, place: Place, value: Collection[Any]) -> None:
        self._attributes_of(place, value)
        self.values[replace(place, where=f"the length of {place.where}")] = len(value)
        if isinstance(value, set | frozenset):
            tokens = [plain(one) for one in value]
            self.values[place] = frozenset(token for token in tokens if token is not None)
            return
        if len(value) > LONG:
            self.values[place] = whole(value)
            return
        for at, one in enumerate(value):
            self.todo.append((replace(place, where=f"{place.where}[{at}]"), one))

    def _suspended(self, place: Place, value: object) -> None:
        frame = frame_of(value)
        self.values[place] = None if frame is None else (frame.f_lasti, frame.f_lineno)
        for name, local in list(frame.f_locals.items()) if frame is not None else ():
            self.put(f"{place.where}.{name}", place.name, local)
        if (inner := waits_for(value)) is not None:  # `yield from`, of which no variable tells
            self.todo.append((replace(place, where=f"{place.where}.yield from"), inner))

    def _object(self, place: Place, value: Any) -> None:
        state = state_of(value)
        kind = type(value).__qualname__
        self.values[place] = kind if state is None else ("the state of", kind, state)
        if state is None and is_iterator_of_c(value):  # it can be taken from, and not looked at
            self.values[place] = Moving(value)
        self._attributes_of(place, value)
        if state is None and not attributes(value):
            for one in referents(value):
                self.todo.append((place, one))
        self.class_of(type(value))

    def _of_others(self, place: Place, value: Any) -> None:
        """Note what a job has set on a module, a logger, a thread; of its own, all that it names.

        Of what is none of the job's the rest is what its authors keep.
        """
        if isinstance(value, ModuleType):
            file = getattr(value, "__file__", None)
            is_own = (file is not None and is_ours(file)) or value.__spec__ is None
            self._named(place, vars(value), self.names if is_own else self.set)
        elif _is_class_of_job(type(value)):
            self._attributes_of(place, value)
        else:
            self._named(place, dict(attributes(value)), self.set)

    def _named(self, place: Place, values: Mapping[str, Any], names: Collection[str]) -> None:
        for name in [name for name in values if name in names]:
            self.put(f"{place.where}.{name}", name, values[name])

    def _attributes_of(self, place: Place, value: Any) -> None:
        holder = "" if _is_class_of_job(type(value)) else place.holder or place.name
        for name, one in attributes(value):
            where = f"{place.where}.{name}"
            self.todo.append((Place(where, name, holder, cached=place.cached), one))

    def _stream(self, place: Place, value: Any) -> None:
        if _is_class_of_job(type(value)):
            self._object(place, value)
        if (token := position_of(value)) is not None:
            self.values[place] = token

    def _cache(self, place: Place, value: Any) -> None:
        """Note what a function keeps of its results, as far as somebody may change them."""
        if any("cache_info" in code.co_names for code in self.codes):
            where = f"what {place.where} tells of its cache"
            self.values[Place(where, "cache_info")] = tuple(value.cache_info())
        self._attributes_of(place, value)
        known = gc.get_referents(value)
        *tables, cache_of = (d for d in known if type(d) is dict and d is not vars(value))
        others = (one for one in known if not isinstance(one, FunctionType | type | dict))
        where = f"what {place.where} has returned"
        for one in itertools.islice((*others, *tables, *cache_of.values()), LONG):
            self.todo.append((replace(place, where=where, cached=id(one)), one))

    def _again(self, value: object) -> bool:
        if id(value) in self.seen:
            return True
        self.seen.add(id(value))
        self.alive.append(value)
        return False


def _is_of_others(value: object) -> bool:
    """Return whether it is no state of a job: code of C, what the interpreter keeps."""
    if isinstance(value, MethodWrapperType | BuiltinFunctionType):  # those of `next`, of `tell`
        return value.__name__ in CHANGES or not is_a(value.__self__, Iterator, io.IOBase)
    return id(value) in _OF_THE_INTERPRETER


def _is_empty(value: object) -> bool:
    """Return whether it is a dict that holds nothing, nor has anybody set something on it."""
    if type(value) is dict:
        return not value
    return type(value) is OrderedDict and not value and not vars(value)


# -- what others have to do with a value ----------------------------------------------------------


@cache
def _read_by_torch(kind: type) -> frozenset[str]:
    """Return the attributes that code of torch may read in the forward of such a module."""
    names = {"training", "forward", *_HOOKS}
    for owner in kind.__mro__:
        if owner is nn.Module or not owner.__module__.startswith(("torch.nn.", "torch.ao.")):
            continue
        for name, function in vars(owner).items():
            if isinstance(function, FunctionType) and name not in _NOT_IN_FORWARD:
                names |= {*function.__code__.co_names}
    return frozenset(names)


def _is_code(value: object) -> bool:
    if isinstance(value, FunctionType | staticmethod | classmethod | property | type):
        return True
    is_descriptor = hasattr(type(value), "__get__") and not isinstance(value, MethodType)
    return is_descriptor and not _is_class_of_job(type(value))


def _is_class_of_job(kind: type) -> bool:
    file = getattr(_module_of(kind), "__file__", None)
    return file is not None and is_ours(file)


def _module_of(kind: type) -> ModuleType | None:
    return sys.modules.get(kind.__module__)


def _globals(function: FunctionType, names: frozenset[str]) -> Iterator[tuple[str, str, object]]:
    """Yield (where, name, value) of the globals that a function names, and what modules hold.

    names:    that code of the job sets, be it on what is none of its own.
    """
    known = function.__globals__
    file = function.__code__.co_filename
    instructions = list(dis.get_instructions(function.__code__))
    for at, instruction in enumerate(instructions):
        name = instruction.argval
        if instruction.opname == "IMPORT_NAME":
            package = known.get("__package__") or ""
            found = (sys.modules.get(one) for one in (name, f"{package}.{name}"))
            yield from ((f"{name} in {file}", name, one) for one in found if one is not None)
        if instruction.opname not in ("LOAD_GLOBAL", "LOAD_NAME") or name not in known:
            continue
        where, value = f"{name} in {file}", known[name]
        following = itertools.takewhile(
            lambda row: row.opname in _ATTRIBUTE, instructions[at + 1 :]
        )
        chain = [row.argval for row in following]
        if value is os and chain[:1] in (["environ"], ["getenv"]):
            yield f"os.environ in {file}", chain[0], dict(os.environ)
        yield _end_of(where, name, value, chain, names)
    if "globals" in function.__code__.co_names:
        for text in function.__code__.co_consts:
            if isinstance(text, str) and text in known:
                yield f"{text} in {file}", text, known[text]


def _end_of(
    where: str, name: str, value: object, chain: Sequence[str], names: frozenset[str]
) -> tuple[str, str, object]:
    """Return what a chain of attributes leads to through modules of the job.

    And through those of others, and their classes, to what has an attribute that the job sets.
    """
    for at, attribute in enumerate(chain):
        inside = getattr(value, "__file__", None) or ""
        is_own = isinstance(value, ModuleType) and is_ours(inside)
        is_on_way = isinstance(value, ModuleType | type) and not names.isdisjoint(chain[at + 1 :])
        if not (is_own or is_on_way) or not hasattr(value, attribute):
            break
        name, value = attribute, getattr(value, attribute)
        where = f"{name} in {inside}"
    return where, name, value
