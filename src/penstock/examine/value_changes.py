"""Value changes: of the values that Python keeps, which are others from one look to the next."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.examine.python_values import Place, Values

_NOTHING = object()


def names_of(
    states: Sequence[Values],
) -> dict[tuple[str, str, bool], tuple[str, object, object]]:
    """Return what changes from one state to the next: by names, where it is, and both values."""
    names: dict[tuple[str, str, bool], tuple[str, object, object]] = {}
    for first, second in itertools.pairwise(states):
        for place, before, after in differences(first, second):
            key = place.name, place.holder, place.theirs
            names.setdefault(key, (place.where, before, after))
    return names


def differences(first: Values, second: Values) -> Iterator[tuple[Place, object, object]]:
    """Yield what is new or another value in `second`, with both values."""
    for place, value in second.items():
        before = first.get(place, _NOTHING)
        if before is _NOTHING:
            if not place.cached:
                yield place, None, value
        elif before != value:
            yield place, before, value


def change(before: object, after: object) -> str:
    """Return both values where they are short."""
    words = [_short(token) for token in (before, after)]
    return "" if None in words or words[0] == words[1] else f" ({words[0]}, then {words[1]})"


def _short(token: Any) -> str | None:
    """Return a token of `held` as one would write the value: text of a number, (type, value)."""
    if isinstance(token, str):
        return f"{float(token):.6g}" if _is_number(token) else token[:24]
    match token:
        case (str(), value) if len(str(value)) <= 24:
            return str(value)
        case int():
            return str(token)
        case _:
            return None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
