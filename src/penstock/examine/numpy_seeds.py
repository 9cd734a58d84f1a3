"""Numpy seeds: whether a generator of numpy is given its seed where it is made.

`np.random.RandomState(0)` asks the system for chance like one without a seed, and then takes the
seed.  Nothing that is called tells the two apart, so the call is read from its source.
"""

import ast
import inspect
import itertools
import linecache
from types import FrameType, ModuleType
from typing import Any

import numpy as np

_UNKNOWN = object()


def makes_a_seeded_generator(frame: FrameType) -> bool:
    """Return whether what `frame` calls just now is numpy's `RandomState` with a seed.

    Ignores:  seeds that a call returns: it might return None.
    """
    call = _call_at(frame)
    if call is None or _value(call.func, frame) is not np.random.RandomState:
        return False
    named = [keyword.value for keyword in call.keywords if keyword.arg == "seed"]
    seeds = [_value(seed, frame) for seed in [*call.args[:1], *named]]
    return any(seed is not None and seed is not _UNKNOWN for seed in seeds)


def _call_at(frame: FrameType) -> ast.Call | None:
    """Return the call that a frame is at; None where its source is not there."""
    code = frame.f_code
    at = next(itertools.islice(code.co_positions(), frame.f_lasti // 2, None), None)
    if at is None or None in at:
        return None
    first, last, start, end = (int(each or 0) for each in at)
    lines = [linecache.getline(code.co_filename, n).encode() for n in range(first, last + 1)]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    try:
        found = ast.parse(b"(" + b"".join(lines) + b")", mode="eval").body
    except SyntaxError:
        return None
    return found if isinstance(found, ast.Call) else None


def _value(node: ast.expr, frame: FrameType) -> Any:
    """Return what a name, an attribute or a number is; of arithmetic that it is no None."""
    match node:
        case ast.Constant(value):
            return value
        case ast.Name(name):
            return frame.f_locals.get(name, frame.f_globals.get(name, _UNKNOWN))
        case ast.Attribute(owner, name):
            inside = _value(owner, frame)
            if isinstance(inside, ModuleType):
                return getattr(inside, name, _UNKNOWN)
            found = inspect.getattr_static(inside, name, _UNKNOWN)  # asks for no property
            is_own = name in getattr(inside, "__dict__", ()) or isinstance(found, int)
            return found if is_own else _UNKNOWN
        case ast.BinOp() | ast.List() | ast.Tuple():
            return ast.unparse(node)
        case _:
            return _UNKNOWN
