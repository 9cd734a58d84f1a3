"""Typed: plain values, as JSON has them, as the records that their fields are annotated as.

One reader for the nouns that are kept in files.  Nothing is converted but a whole number where a
number is wanted, and lists into tuples; what does not fit is told with its place.
"""

import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

Reader = Callable[[Any], Any]
Made = TypeVar("Made")

_MOST = 2**63  # numbers of files end in columns of 64 bits
_WORDS = {
    str: "a text",
    int: "a whole number below 2 ** 63",
    float: "a number",
    bool: "true or false",
}


class MisfitError(ValueError):
    """A value that is not of the type it must have: where, what and of which type."""

    def __init__(self, found: object, wanted: str, place: str = "") -> None:
        super().__init__(found, wanted, place)
        self.found, self.wanted, self.place = found, wanted, place

    def inside(self, outer: str) -> "MisfitError":
        """Return the same, seen from a value that holds the one at fault."""
        joint = "." if self.place and not self.place.startswith("[") else ""
        return MisfitError(self.found, self.wanted, f"{outer}{joint}{self.place}")

    def __str__(self) -> str:
        """Return "place is value, not a number"."""
        return f"{self.place or 'it'} is {_short(self.found)}, not {self.wanted}"


def typed(kind: type[Made], value: object) -> Made:
    """Return `value` as a `kind`: a record, text, number, tuple, mapping, Literal or union of them.

    Raises:   MisfitError: a part is of another type, missing or unknown; a number is not finite.
              What the records raise.
    """
    return _reader(kind)(value)


def _short(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**50 else "a huge number"
    return text if len(text) <= 60 else f"{text[:57]}..."


@cache
def _reader(kind: Any) -> Reader:
    """Return what reads values of a type."""
    origin, args = get_origin(kind), get_args(kind)
    if kind in _PLAIN:
        return _PLAIN[kind]
    if origin is list:
        return _list
    if origin is Literal:
        return lambda value: _one_of(args, value)
    if origin in (Union, types.UnionType):
        readers = [_reader(each) for each in args]
        return lambda value: _any_of(readers, value)
    if origin is tuple and args[-1] is Ellipsis:
        item = _reader(args[0])
        return lambda value: tuple(_items(item, value))
    if origin is tuple:
        parts = [_reader(each) for each in args]
        return lambda value: _fixed(parts, value)
    if origin is not None and issubclass(origin, Mapping):
        item = _reader(args[1])
        return lambda value: _mapping(item, value)
    return lambda value: _record(kind, value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise MisfitError(value, _WORDS[str])
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:  # half of a pair, which JSON can write
            raise MisfitError(value, "a text that can be written") from None
    return value


def _whole(value: object) -> int:
    if type(value) is not int or not -_MOST < value < _MOST:
        raise MisfitError(value, _WORDS[int])
    return value


def _number(value: object) -> float:
    if type(value) is float and math.isfinite(value):
        return value
    if type(value) is int and -_MOST < value < _MOST:
        return float(value)
    raise MisfitError(value, _WORDS[float])


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise MisfitError(value, _WORDS[bool])
    return value


def _none(value: object) -> None:
    if value is not None:
        raise MisfitError(value, "null")


_PLAIN: dict[Any, Reader] = {
    str: _text,
    int: _whole,
    float: _number,
    bool: _flag,
    types.NoneType: _none,
}


def _one_of(names: tuple[object, ...], value: object) -> object:
    if not isinstance(value, str) or value not in names:
        raise MisfitError(value, f"one of {', '.join(map(str, names))}")
    return value


def _any_of(readers: Sequence[Reader], value: object) -> object:
    problems: list[MisfitError] = []
    for read in readers:
        try:
            return read(value)
        except MisfitError as problem:
            problems.append(problem)
    deepest = max(problems, key=lambda problem: len(problem.place))
    if deepest.place:
        raise deepest
    raise MisfitError(value, " or ".join(problem.wanted for problem in problems))


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise MisfitError(value, "a list")
    return cast("list[object]", value)


def _items(read: Reader, value: object) -> list[object]:
    items = _list(value)
    try:
        return list(map(read, items))
    except MisfitError:
        for at, item in enumerate(items):  # again, to say where
            try:
                read(item)
            except MisfitError as problem:
                raise problem.inside(f"[{at}]") from None
        raise


def _fixed(readers: Sequence[Reader], value: object) -> tuple[object, ...]:
    items = _list(value)
    if len(items) != len(readers):
        raise MisfitError(value, f"a list of {len(readers)}")
    found: list[object] = []
    for at, (read, item) in enumerate(zip(readers, items, strict=True)):
        try:
            found.append(read(item))
        except MisfitError as problem:
            raise problem.inside(f"[{at}]") from None
    return tuple(found)


def _object(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise MisfitError(value, "an object")
    return cast("dict[str, object]", value)


def _mapping(read: Reader, value: object) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, item in _object(value).items():
        try:
            found[_text(key)] = read(item)
        except MisfitError as problem:
            raise problem.inside(_key(key)) from None
    return found


def _key(key: str) -> str:
    return key.encode("ascii", "backslashreplace").decode()[:60]


@cache
def _readers(kind: Any) -> dict[str, Reader]:
    hints = get_type_hints(kind)
    names = [each.name for each in fields(kind) if each.init] if is_dataclass(kind) else list(hints)
    return {name: _reader(hints[name]) for name in names}


@cache
def _needed(kind: Any) -> tuple[str, ...]:
    """Return the fields of a record that have no default."""
    if not is_dataclass(kind):
        return tuple(name for name in _readers(kind) if name not in kind._field_defaults)
    own = (each for each in fields(kind) if each.init)
    return tuple(e.name for e in own if e.default is MISSING and e.default_factory is MISSING)


def _record(kind: Any, value: object) -> Any:
    if isinstance(value, kind):  # read before
        return value
    readers = _readers(kind)
    if isinstance(value, list) and issubclass(cast("type[object]", kind), tuple):
        return kind(*_fixed(list(readers.values()), cast("list[object]", value)))
    values = _object(cast("object", value))
    for name in values:
        if name not in readers:
            raise MisfitError(values[name], "a field that is known", _key(name))
    for name in _needed(kind):
        if name not in values:
            raise MisfitError(values, f"an object with {name}")
    found: dict[str, Any] = {}
    for name, item in values.items():
        try:
            found[name] = readers[name](item)
        except MisfitError as problem:
            raise problem.inside(name) from None
    return kind(**found)
