"""TOML tables to frozen records of plain values and back; a fault is told with table and key."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from json import dumps
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar, cast

from penstock.errors import ClusterError

Value: TypeAlias = "str | int | float | bool | Mapping[str, Value] | Sequence[Value]"


class Record(Protocol):
    """A dataclass whose fields are str, int, float, bool, or pairs of a name and a number."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


Made = TypeVar("Made", bound=Record)
_MOST = 2**63


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
    """Yield the place and the content of every [[name]] of the document; none is no fault.

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
    table = cast("Mapping[str, Value]", table)
    known = fields(kind)
    check_keys(place, table, [each.name for each in known])
    for each in known:
        if each.name not in table and each.default is MISSING:
            needed = ", ".join(one.name for one in known if one.default is MISSING)
            raise ClusterError(f'{place} has no "{each.name}"', hint=f"needed keys: {needed}")
    values = {
        each.name: _value(each.type, f'"{each.name}" of {place}', table[each.name])
        for each in known
        if each.name in table
    }
    try:
        return kind(**values)
    except ClusterError as problem:
        raise ClusterError(f"{place}: {problem}", hint=problem.hint) from problem


def _value(wanted: object, place: str, value: Value) -> object:
    if type(value) is int and abs(value) >= _MOST:
        raise ClusterError(f"{place} is {value!r:.40}, not below 2 ** 63")
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(wanted, type) and type(value) is wanted:
        return value
    if wanted in (str, int, float, bool):
        words = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
        raise ClusterError(f"{place} is {value!r}, not {words[cast('type', wanted)]}")
    if not isinstance(value, Mapping):
        raise ClusterError(
            f"{place} is {value!r}, not a table", hint="write { name = number, ... }"
        )
    pairs = cast("Mapping[str, Value]", value).items()
    return tuple((name, _value(float, f'"{name}" in {place}', number)) for name, number in pairs)


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
    return "".join(f"{each.name} = {_text(getattr(made, each.name))}\n" for each in fields(made))


def _text(value: object) -> str:
    match value:
        case str():
            return dumps(
                value, ensure_ascii=False
            )  # printable text is written alike in JSON and TOML
        case bool():
            return "true" if value else "false"
        case tuple():
            pairs = cast("tuple[tuple[str, float], ...]", value)
            return f"{{{', '.join(f' {_text(name)} = {number!r}' for name, number in pairs)} }}"
        case _:
            return repr(value)
