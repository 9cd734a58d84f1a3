"""Plain values become records by the types of their fields, or the place of the misfit is told."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import pytest

from penstock.typed import MisfitError, typed


class Point(NamedTuple):
    x: int
    y: float = 2.0


@dataclass(frozen=True)
class Shape:
    name: str
    kind: Literal["open", "closed"]
    points: tuple[Point, ...]
    box: tuple[float, float]
    weights: dict[str, float | None]
    filled: bool = False
    centre: Point | None = None


GOOD = {
    "name": "caf\u00e9",
    "kind": "open",
    "points": [{"x": 1}, [2, 3]],
    "box": [0, 1.5],
    "weights": {"a": 1, "b": None},
    "centre": {"x": -1, "y": 0},
}


def test_values_become_records():
    made = Shape("caf\u00e9", "open", (Point(1), Point(2, 3.0)), (0.0, 1.5), {"a": 1.0, "b": None})
    assert typed(Shape, GOOD) == Shape(*list(vars(made).values())[:5], centre=Point(-1, 0.0))
    assert type(typed(Shape, GOOD).box[0]) is float


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 3}, "name is 3, not a text"),
        ({"name": "\ud800"}, "name is '\\ud800', not a text that can be written"),
        ({"kind": "ajar"}, "kind is 'ajar', not one of open, closed"),
        ({"kind": ["open"]}, "kind is ['open'], not one of open, closed"),
        ({"points": "ab"}, "points is 'ab', not a list"),
        ({"points": [{"x": 1}, {"x": 1.0}]}, "points[1].x is 1.0, not a whole number"),
        ({"points": [{"x": True}]}, "points[0].x is True, not a whole number"),
        ({"points": [{"x": 2**63}]}, "points[0].x is 9223372036854775808, not a whole number"),
        ({"points": [{"x": 1, "z": 1}]}, "points[0].z is 1, not a field that is known"),
        ({"points": [{"y": 1}]}, "points[0] is {'y': 1}, not an object with x"),
        ({"points": [[1]]}, "points[0] is [1], not a list of 2"),
        ({"box": [1]}, "box is [1], not a list of 2"),
        ({"box": [1, float("nan")]}, "box[1] is nan, not a number"),
        ({"box": [1, 10**400]}, "box[1] is a huge number, not a number"),
        ({"weights": [1]}, "weights is [1], not an object"),
        ({"weights": {"a": "b"}}, "weights.a is 'b', not a number or null"),
        ({"filled": 1}, "filled is 1, not true or false"),
        ({"centre": {"x": "1"}}, "centre.x is '1', not a whole number"),
        ({"centre": 3}, "centre is 3, not an object or null"),
    ],
)
def test_misfit_is_told_with_its_place(change, message):
    with pytest.raises(MisfitError) as caught:
        typed(Shape, {**GOOD, **change})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("value", [None, [], "text", 3])
def test_a_record_is_made_of_an_object(value):
    with pytest.raises(MisfitError, match=r"it is .*, not an object"):
        typed(Shape, value)
