"""Attribute reads: plain values of the job's own modules that a step reads while it is traced.

`self.alpha` in forward is a constant of the trace.  What is set there, too, as a count of calls, is
not taken for granted.
"""

import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any, cast

from torch import nn

from penstock import _compat
from penstock.job import is_users

PLAIN = (bool, int, float, str, type(None))
_one_at_a_time = threading.RLock()  # classes are shared by the threads of a process
_GET, _SET = "__getattribute__", "__setattr__"


class AttributeReads:
    """While active, notes which attributes of a model's modules are read, and which are set."""

    def __init__(self, model: nn.Module) -> None:
        self.paths = {id(module): path for path, module in _compat.named_modules(model)}
        self.kinds = {type(each) for each in model.modules() if _is_of_the_job(type(each))}
        self._read, self._set = set[tuple[int, str]](), set[tuple[int, str]]()
        self._before: list[tuple[type, str, Any]] = []

    def __enter__(self) -> "AttributeReads":
        _one_at_a_time.acquire()
        for kind in self.kinds:
            for name, watched in ((_GET, self._getting(kind)), (_SET, self._setting(kind))):
                self._before.append((kind, name, vars(kind).get(name)))
                setattr(kind, name, watched)
        return self

    def __exit__(self, *problem: object) -> None:
        for kind, name, before in reversed(self._before):
            if before is None:
                delattr(kind, name)
            else:
                setattr(kind, name, before)
        self._before.clear()
        _one_at_a_time.release()

    def _getting(self, kind: type) -> Callable[[object, str], object]:
        get, read = cast(Callable[[object, str], object], getattr(kind, _GET)), self._read

        def getting(module: object, name: str) -> object:
            if not name.startswith("_"):
                read.add((id(module), name))
            return get(module, name)

        return getting

    def _setting(self, kind: type) -> Callable[[object, str, object], None]:
        put, written = cast(Callable[[object, str, object], None], getattr(kind, _SET)), self._set

        def setting(module: object, name: str, value: object) -> None:
            written.add((id(module), name))
            put(module, name, value)

        return setting

    @property
    def found(self) -> frozenset[tuple[str, str]]:
        """Return path and name of what was read, and not set."""
        only = self._read - self._set
        return frozenset((self.paths[key], name) for key, name in only if key in self.paths)


def plain_attribute(module: nn.Module, name: str) -> tuple[object, ...]:
    """Return the value of a plain attribute, of the module or its class; nothing if it has none."""
    value = inspect.getattr_static(module, name, ())
    return (value,) if isinstance(value, PLAIN) else ()


def _is_of_the_job(kind: type) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and is_users(file)
