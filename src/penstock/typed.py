"""Typed: plain values, as files have them, as the records that their fields are annotated as.

msgspec checks and makes them.  Nothing is converted but a whole number where a number is wanted,
and lists into tuples.  What does not fit is located here, so that the error names its place.
"""

import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from decimal import Decimal
from functools import cache
from inspect import Parameter, signature
from types import MappingProxyType, NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta

from penstock.errors import PenstockError

Made = TypeVar("Made")

Endless: TypeAlias = Annotated[float, Meta(description="a number")]  # inf and nan, too
Number: TypeAlias = Annotated[  # that fits columns of 32 bits
    int, Meta(gt=-(2**31), lt=2**31, description="a whole number of at most 32 bits")
]

_UNIONS = (Union, UnionType)
_MOST = 2**63 - 1  # numbers of files end in columns of 64 bits
_WRITABLE = "\\A[^\ud800-\udfff]*\\Z"  # JSON can write one half of a pair of characters
_CHECKED: dict[Any, Any] = {  # and what an error says is wanted
    str: Annotated[str, Meta(pattern=_WRITABLE, description="a text that can be written")],
    int: Annotated[int, Meta(ge=-_MOST, le=_MOST, description="a whole number below 2 ** 63")],
    float: Annotated[
        float, Meta(ge=-sys.float_info.max, le=sys.float_info.max, description="a number")
    ],
    Decimal: Annotated[int | Decimal, Meta(description="a number")],
    bool: Annotated[bool, Meta(description="true or false")],
    NoneType: Annotated[None, Meta(description="null")],
}


class MisfitError(ValueError):
    """A value that is not of the type it must have: what is wrong, and where."""

    def __init__(self, what: str, place: str = "") -> None:
        super().__init__(what, place)
        self.what, self.place = what, place

    @classmethod
    def of(cls, found: object, wanted: str, place: str = "") -> "MisfitError":
        """Return "place is found, not wanted", long values cut."""
        text = "a huge number"
        if not isinstance(found, int) or abs(found) < 10**50:
            text = str(found) if isinstance(found, Decimal) else repr(found)
        return cls(f"is {text if len(text) <= 60 else f'{text[:57]}...'}, not {wanted}", place)

    def inside(self, outer: str) -> "MisfitError":
        """Return the same, seen from a value that holds the one at fault."""
        joint = "." if self.place and not self.place.startswith("[") else ""
        return MisfitError(self.what, f"{outer}{joint}{self.place}")

    def __str__(self) -> str:
        """Return "place is value, not a number"."""
        return f"{self.place or 'it'} {self.what}"


def typed(
    kind: type[Made],
    value: object,
    *,
    more: bool = False,
    made: Mapping[str, object] = MappingProxyType({}),
) -> Made:
    """Return `value` as a `kind`: a record, text, number, tuple, mapping, Literal or union of them.

    A dataclass is made of an object, a NamedTuple of a list.
    more:   whether objects may have fields that are not known; they are ignored.
    made:   fields of the record that are made already, by name; they are not in `value`.
    Raises:   MisfitError: a part is of another type, missing or unknown; a number is not finite.
              What the records raise.
    """
    without = tuple(made)
    if not _fits(kind, value, more, without):
        raise _misfit(kind, value, more, without)
    if not made:
        return msgspec.convert(value, kind)
    hints, values = get_type_hints(kind), msgspec.convert(value, dict[str, Any])
    rest = {name: msgspec.convert(values[name], hints[name]) for name in values.keys() & hints}
    return kind(**rest, **made)


def typed_flat(kind: type[Made], value: Mapping[str, object], *inner: str) -> Made:
    """Return `value` as a record of records, the fields of all of which stand side by side there.

    inner:    the fields of `kind` that are records, and have no name in `value`.
    Raises:   as `typed`; a place is the one in `value`.
    """
    kinds = {name: _fields(kind)[name] for name in inner}
    of = {own: name for name, each in kinds.items() for own in _fields(each)}
    parts: dict[str, dict[str, object]] = {name: {} for name in inner}
    rest: dict[str, object] = {}
    for name, each in value.items():
        (parts[of[name]] if name in of else rest)[name] = each
    made = {name: typed(each, parts[name]) for name, each in kinds.items()}
    return typed(kind, rest, made=made)


@contextmanager
def damage(place: str, error: type[PenstockError], *, hint: str) -> Generator[None]:
    """Raise what does not fit, and what a record refuses, as an `error` that names the place.

    hint:   where the record itself has none.
    Raises:   `error`: "`place` is damaged: why".
    """
    try:
        yield
    except (MisfitError, PenstockError) as problem:
        raise error(
            f"{place} is damaged: {problem}", hint=getattr(problem, "hint", "") or hint
        ) from problem


def _fits(kind: Any, value: object, more: bool, without: tuple[str, ...] = ()) -> bool:
    try:
        msgspec.convert(value, _form(kind, more, without), builtin_types=(Decimal,))
    except (msgspec.ValidationError, UnicodeEncodeError, RecursionError):
        return False
    return True


@cache
def _form(kind: Any, more: bool, without: tuple[str, ...] = ()) -> Any:
    """Return the type that a value is checked by before a `kind` is made of it."""
    origin, args = get_origin(kind), get_args(kind)
    if kind in _CHECKED:
        return _CHECKED[kind]
    if is_dataclass(kind):
        own = {name: _form(of, more) for name, of in _fields(kind).items() if name not in without}
        rows = [(n, of) if n in _needed(kind) else (n, of, None) for n, of in own.items()]
        return msgspec.defstruct(str(kind), rows, kw_only=True, forbid_unknown_fields=not more)
    if own := _fields(kind):
        return tuple[tuple(_form(of, more) for of in own.values())]
    if origin in _UNIONS:
        return Union[tuple(_form(each, more) for each in args)]  # noqa: UP007 - not known before
    if origin in (None, Annotated, Literal):
        return kind
    return origin[tuple(each if each is ... else _form(each, more) for each in args)]


@cache
def _fields(kind: Any) -> dict[str, Any]:
    """Return the types of the fields of which a record is made, by name; none of what is none."""
    if not (hasattr(kind, "__dataclass_fields__") or hasattr(kind, "_fields")):
        return {}
    hints = get_type_hints(kind, include_extras=True)
    return {name: hints[name] for name in signature(kind).parameters}


@cache
def _needed(kind: Any) -> tuple[str, ...]:
    """Return the fields of a record that have no default."""
    own = signature(kind).parameters
    return tuple(name for name in own if own[name].default is Parameter.empty)


# -- what does not fit ----------------------------------------------------------------------------


def _misfit(kind: Any, value: Any, more: bool, without: tuple[str, ...] = ()) -> MisfitError:
    """Return what is wrong with a value that does not fit, as deep inside as can be."""
    arms = get_args(kind) if get_origin(kind) in _UNIONS else ()
    kind = next((each for each in arms if _shape(each) is type(value)), kind)
    for place, inner, part in _parts(kind, value):
        if not _fits(inner, part, more):
            return _misfit(inner, part, more).inside(_writable(place))
    if is_dataclass(kind) and isinstance(value, dict):
        given = cast("dict[str, object]", value)
        for name in given:
            is_known = more or (name in _fields(kind) and name not in without)
            if not is_known or not _fits(str, name, more):
                return MisfitError.of(given[name], "a field that is known", _writable(name))
        missing = (name for name in _needed(kind) if name not in given and name not in without)
        return MisfitError("is missing", next(missing))
    return MisfitError.of(value, _words(kind, value))


def _parts(kind: Any, value: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield place, type and value of what is inside a value, if it has the shape of its type."""
    shape, args = _shape(kind), get_args(kind)
    if shape is not type(value):
        return
    if shape is list:
        kinds = args[:1] * len(value) if args[1:] in ((), (...,)) else args
        kinds = tuple(_fields(kind).values()) or kinds
        for at, (inner, part) in enumerate(zip(kinds, value, strict=False)):
            yield f"[{at}]", inner, part
    elif is_dataclass(kind):
        for name, inner in _fields(kind).items():
            if name in value:
                yield name, inner, value[name]
    else:
        for key, part in value.items():
            yield key, args[0], key
            yield key, args[1], part


def _shape(kind: Any) -> type | None:
    """Return dict or list, if values of a type are made of one."""
    origin = get_origin(kind)
    if is_dataclass(kind) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return dict
    return list if origin in (list, tuple) or _fields(kind) else None


def _words(kind: Any, value: Any) -> str:
    """Return what is wanted where a value stands."""
    kind = _CHECKED.get(kind, kind)
    origin, args, shape = get_origin(kind), get_args(kind), _shape(kind)
    if origin in _UNIONS:
        return " or ".join(_words(each, value) for each in args)
    if origin is Annotated:
        return args[1].description
    if shape is list and isinstance(value, list):
        return f"a list of {len(_fields(kind) or args)}"
    if shape is not None:
        return "a list" if shape is list else "an object"
    return f"one of {', '.join(map(str, args))}"


def _writable(key: str) -> str:
    return key.encode("ascii", "backslashreplace").decode()[:60]
