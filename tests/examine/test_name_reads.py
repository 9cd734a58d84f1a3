"""Where code reads a name so that it may matter, and where it only tells."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.examine.name_reads import read_at

held: Any = SimpleNamespace(calls=0, loud=True, scale=1.0)


def printed() -> None:
    if held.calls % 10 == 0:
        print(held.calls)


def printed_if_loud() -> None:
    if held.calls % 10 == 0:
        if held.loud:
            print(held.calls)
        else:
            pass


def printed_for_each() -> None:
    if held.calls > 3:
        for row in range(3):
            print(row, held.calls)


def sets_what_is_read() -> float:
    if held.calls % 10 == 0:
        if held.loud:
            held.scale = 2.0
        print(held.calls)
    return held.scale


def returned_in_a_loop() -> int:
    if held.calls > 3:
        for row in range(3):
            return row
    return 0


@pytest.mark.parametrize(
    ("function", "is_read"),
    [
        (printed, False),
        (printed_if_loud, False),
        (printed_for_each, False),
        (sets_what_is_read, True),
        (returned_in_a_loop, True),
    ],
)
def test_a_count_that_decides_only_what_is_told_is_not_read(
    function: Callable[[], object], is_read: bool
) -> None:
    assert (read_at("calls", [function.__code__]) is not None) == is_read
