"""What Python keeps is found without a word to the objects that keep it."""

import itertools
import weakref

import numpy as np
import pytest

from penstock.examine.python_values import Walk


class AnswersAll:
    """Looks every name up elsewhere, as `f` of what np.load returns, and as lazy modules do."""

    def __init__(self, known):
        object.__setattr__(self, "known", known)

    def __getattribute__(self, name):
        raise AttributeError(name)


class Slotted:
    __slots__ = ("count", "unset")


class Counter:
    def __init__(self):
        self.count = 1


def walked(value: object) -> dict[str, object]:
    walk = Walk(())
    walk.put("it", "it", value)
    walk.go()
    return {place.where: token for place, token in walk.values.items()}


def test_an_object_that_answers_to_no_name_is_looked_at() -> None:
    assert walked(AnswersAll(3))["it.known"] == walked(3)["it"]


@pytest.mark.parametrize("value", [None, 7])
def test_slots_are_attributes_and_none_of_them_is_no_more_than_that(value) -> None:
    slotted = Slotted()
    slotted.count = value
    found = walked(slotted)
    assert found["it.count"] == walked(value)["it"]
    assert "it.unset" not in found


def test_an_archive_of_numpy_is_looked_at(tmp_path) -> None:
    np.savez(tmp_path / "a.npz", x=np.ones(2))
    with np.load(tmp_path / "a.npz") as archive:
        assert any(where.startswith("it.zip") for where in walked(archive))


def test_a_weak_proxy_is_what_it_stands_for() -> None:
    counter = Counter()
    proxy = weakref.proxy(counter)
    assert walked(proxy)["it.count"] == walked(1)["it"]
    assert walked([proxy, counter])["it[0].count"] == walked(1)["it"]
    del counter
    assert walked(proxy) == walked(None)


def test_a_generator_that_hands_on_from_another_is_where_that_one_is() -> None:
    def factors():
        yield from (1.0, 0.5, 0.25)

    source, values = factors(), []
    for _ in range(3):
        next(source)
        values.append(walked(source))
    assert all(one != other for one, other in itertools.pairwise(values))
