"""The collector of garbage waits while much is made that stays, and is as before then."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from penstock.garbage import collector_waits


class Circle:
    """Refers to itself, so that the collector alone frees it."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    was_enabled = gc.isenabled()
    yield
    (gc.enable if was_enabled else gc.disable)()


def test_nothing_is_collected_until_the_end() -> None:
    gc.enable()
    with collector_waits():
        gone = weakref.ref(Circle())
        kept = [[] for _ in range(gc.get_threshold()[0] * 20)]
        assert kept
        assert gone() is not None
    assert gc.isenabled()
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("on", [True, False])
def test_it_is_as_before_then_after_an_error_too(on: bool) -> None:
    (gc.enable if on else gc.disable)()
    with pytest.raises(KeyError), collector_waits():
        raise KeyError
    assert gc.isenabled() is on


def test_nested_ones_wait_for_the_outer() -> None:
    gc.enable()
    with collector_waits():
        with collector_waits():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
