"""TOML tables to frozen records of plain values and back; errors name table and key."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, fields
from json import dumps
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar, cast, get_args, get_origin

from penstock.errors import ClusterError
from penstock.typed import MisfitError, typed

Value: TypeAlias = "str | int | float | bool | Mapping[str, Value] | Sequence[Value]"


class Record(Protocol):
    """A dataclass of str, int, float, bool, lists of names or whole numbers, or named numbers."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


Made = TypeVar("Made", bound=Record)


def parse(content: bytes) -> dict[str, Value]:
    """Return the document that a file with this content holds.

    Raises:   ClusterError: not UTF-8, or not TOML.
    """
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as problem:  # also of numbers with too many digits
        raise ClusterError(
            f"not readable TOML: {problem}", hint="docs/cluster.md shows what it looks like"
        ) from problem


def check_keys(place: str, table: Mapping[str, Value], known: Sequence[str]) -> None:
    """Raise a ClusterError when `table` has a key that is not `known`."""
    for key in table:
        if key not in known:
            raise ClusterError(
                f'{place} has an unknown key "{key}"', hint=f"known keys: {', '.join(known)}"
            )


def tables(document: Mapping[str, Value], name: str) -> Iterator[tuple[str, Value]]:
    """Yield the place and the content of every [[name]] of the document; none is fine.

    Raises:   ClusterError: `name` is not a list.
    """
    found = document.get(name, [])
    if not isinstance(found, list):
        raise ClusterError(
            f"{name} is {found!r}, not a list of tables", hint=f"write [[{name}]], not [{name}]"
        )
    for at, table in enumerate(found):
        yield f"[[{name}]] number {at + 1}", table


def record(kind: type[Made], place: str, table: Value) -> Made:
    """Return the record that `table` describes.

    Raises:   ClusterError: a key that is unknown or missing, a value of another type, or one
              that `kind` refuses.
    """
    if not isinstance(table, Mapping):
        raise ClusterError(
            f"{place} is {table!r}, not a table", hint=f"write it as {place} with lines key = value"
        )
    own = fields(kind)
    names = [each.name for each in own if _has_pairs(each) and each.name in table]
    try:
        pairs = {name: _pairs(name, table[name]) for name in names}
        return typed(kind, {k: v for k, v in table.items() if k not in pairs}, made=pairs)
    except MisfitError as problem:
        hint = f"known keys: {', '.join(each.name for each in own)}"
        raise ClusterError(f"{place}: {problem}", hint=hint) from problem
    except ClusterError as problem:
        raise ClusterError(f"{place}: {problem}", hint=problem.hint) from problem


def _has_pairs(each: Field[Any]) -> bool:
    return get_origin(each.type) is tuple and get_origin(get_args(each.type)[0]) is tuple


def _pairs(name: str, value: Value) -> tuple[tuple[str, float], ...]:
    if not isinstance(value, Mapping):
        raise MisfitError.of(value, "a table like { name = number, ... }", name)
    try:
        return tuple(typed(dict[str, float], value).items())
    except MisfitError as problem:
        raise problem.inside(name) from None


def to_text(document: Mapping[str, Record | Sequence[Record]]) -> str:
    """Return the TOML text of a document of records and lists of records."""
    parts: list[str] = []
    for name, content in document.items():
        if isinstance(content, Sequence):
            parts += [f"[[{name}]]\n{_lines(each)}" for each in content]
        else:
            parts.append(f"[{name}]\n{_lines(content)}")
    return "\n".join(parts)


def _lines(made: Record) -> str:
    rows = ((each, getattr(made, each.name)) for each in fields(made))
    told = ((each.name, value) for each, value in rows if value != () or each.default != ())
    return "".join(f"{name} = {_text(value)}\n" for name, value in told)


def _text(value: object) -> str:
    match value:
        case str():
            return dumps(
                value, ensure_ascii=False
            )  # printable text is written alike in JSON and TOML
        case bool():
            return "true" if value else "false"
        case tuple():
            items = cast("tuple[object, ...]", value)
            if any(isinstance(each, str | int) for each in items):
                return f"[{', '.join(map(_text, items))}]"
            pairs = cast("tuple[tuple[str, float], ...]", value)
            return f"{{{', '.join(f' {_text(name)} = {number!r}' for name, number in pairs)} }}"
        case _:
            return repr(value)
