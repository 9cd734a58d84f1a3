"""Plain values become records by the types of their fields, or the place of the misfit is told."""

from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.typed import MisfitError, Number, typed, typed_flat


@dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: float = 2.0


class Pair(NamedTuple):
    first: int
    second: float


@dataclass(frozen=True)
class Shape:
    name: str
    kind: Literal["open", "closed"]
    points: tuple[Point, ...]
    box: tuple[float, float]
    pairs: tuple[Pair, ...]
    weights: dict[str, float | None]
    filled: bool = False
    centre: Point | None = None


GOOD = {
    "name": "caf\u00e9",
    "kind": "open",
    "points": [{"x": 1}, {"x": 2, "y": 3}],
    "box": [0, 1.5],
    "pairs": [[1, 2]],
    "weights": {"a": 1, "b": None},
    "centre": {"x": -1, "y": 0},
}


def test_values_become_records():
    made, points = typed(Shape, GOOD), (Point(1), Point(2, 3.0))
    head = "caf\u00e9", "open", points, (0.0, 1.5), (Pair(1, 2.0),)
    assert made == Shape(*head, {"a": 1.0, "b": None}, centre=Point(-1, 0.0))
    assert [type(value) for value in (made.box[0], made.pairs[0].second)] == [float, float]


def test_what_is_made_already_is_taken_as_it_is():
    rest = {name: value for name, value in GOOD.items() if name != "points"}
    assert typed(Shape, rest, made={"points": (Point(9),)}).points == (Point(9),)
    with pytest.raises(MisfitError, match=r"points is .*, not a field that is known"):
        typed(Shape, GOOD, made={"points": ()})
    with pytest.raises(MisfitError, match="box is missing"):
        typed(Shape, {"name": "a", "kind": "open", "pairs": [], "weights": {}}, made={"points": ()})


def test_more_fields_pass_where_they_may():
    more = {**GOOD, "colour": "red", "points": [{"x": 1, "z": [float("nan")]}]}
    assert typed(Shape, more, more=True).points == (Point(1),)
    with pytest.raises(MisfitError, match=r"points\[0\].x is '1'"):
        typed(Shape, {**more, "points": [{"x": "1", "z": 1}]}, more=True)
    with pytest.raises(MisfitError, match=r"points\[0\]..ud800 is 3, not a field that is known"):
        typed(Shape, {**more, "points": [{"x": 1, "\ud800": 3}]}, more=True)
    with pytest.raises(MisfitError, match=r"points\[0\].x is missing"):
        typed(Shape, {**more, "points": [{"z": 1}]}, more=True)


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
        ({"points": [{"y": 1}]}, "points[0].x is missing"),
        ({"points": [[1]]}, "points[0] is [1], not an object"),
        ({"pairs": [[1]]}, "pairs[0] is [1], not a list of 2"),
        ({"pairs": [[1, 2], [1, 2, 3]]}, "pairs[1] is [1, 2, 3], not a list of 2"),
        ({"pairs": [[1, True]]}, "pairs[0][1] is True, not a number"),
        ({"weights": {"\ud800": 1}}, "weights.\\ud800 is '\\ud800', not a text that can be"),
        ({"box": [1]}, "box is [1], not a list of 2"),
        ({"box": [1, float("nan")]}, "box[1] is nan, not a number"),
        ({"box": [1, 10**400]}, "box[1] is a huge number, not a number"),
        ({"weights": [1]}, "weights is [1], not an object"),
        ({"weights": {"a": "b"}}, "weights.a is 'b', not a number or null"),
        ({"filled": 1}, "filled is 1, not true or false"),
        ({"centre": {"x": "1"}}, "centre.x is '1', not a whole number"),
        ({"centre": 3}, "centre is 3, not an object or null"),
        ({"centre": {"x": 1, "z": 3}}, "centre.z is 3, not a field that is known"),
        ({"colour": 3}, "colour is 3, not a field that is known"),
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


@pytest.mark.parametrize("value", [2**31 - 1, 1 - 2**31])
def test_a_number_is_one_that_fits_32_bits(value):
    assert typed(Number, value) == value
    with pytest.raises(MisfitError, match=r"not a whole number of at most 32 bits"):
        typed(Number, value + (1 if value > 0 else -1))


@dataclass(frozen=True)
class Size:
    width: int
    height: float = 1.0


@dataclass(frozen=True)
class Drawn:
    name: str
    at: Point
    size: Size
    filled: bool = False


@given(st.builds(Drawn, st.text(), st.builds(Point), st.builds(Size), st.booleans()), st.data())
def test_records_of_a_record_stand_flat(drawn, data):
    flat = {"name": drawn.name, "filled": drawn.filled, **asdict(drawn.at), **asdict(drawn.size)}
    names = data.draw(st.permutations(list(flat)))
    assert typed_flat(Drawn, {name: flat[name] for name in names}, "at", "size") == drawn


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"width": "wide"}, "width is 'wide'"),
        ({"depth": 1}, "depth is 1, not a field that is known"),
        ({"at": {"x": 1}}, "at is .*, not a field that is known"),
        ({"name": 3}, "name is 3"),
    ],
)
def test_a_misfit_of_a_flat_record_is_told_by_its_own_name(changed, said):
    with pytest.raises(MisfitError, match=said):
        typed_flat(Drawn, {"name": "a", "x": 1, "width": 2, **changed}, "at", "size")
    with pytest.raises(MisfitError, match="x is missing"):
        typed_flat(Drawn, {"name": "a", "width": 2}, "at", "size")
