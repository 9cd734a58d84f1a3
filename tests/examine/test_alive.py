"""Alive: what a job has is found wherever it was made, and whoever has frozen what."""

import gc
import weakref

import pytest
import torch

from penstock.examine import alive


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def seen(self) -> int:
        return self.count


class Finer(Counter):
    pass


class Slotted:
    __slots__ = ("count",)

    def seen(self) -> int:
        return self.count


class Unhashable(type):
    def __eq__(cls, other: object) -> bool:
        raise AssertionError("nobody asks a class")


class Odd(metaclass=Unhashable):
    def seen(self) -> int:
        return 1


def maker():
    def made_for_this_alone() -> None: ...

    return made_for_this_alone


def test_functions_are_found_that_were_made_before_and_after() -> None:
    before = maker()
    alive.set_apart()
    after = maker()
    assert {*alive.functions_of([before.__code__])} >= {before, after}
    assert alive.functions_of([maker.__code__]) == [maker]


def test_what_is_set_apart_is_passed_over() -> None:
    here = Counter()
    alive.set_apart()
    assert not any(one is here for one in gc.get_objects())
    assert alive.functions_of([Counter.seen.__code__]) == [Counter.seen]
    assert alive.instances_of([Counter]) == [here]
    assert not any(one is here for one in gc.get_objects())  # still


def test_what_has_gone_since_is_not_found() -> None:
    made, counter = maker(), Counter()
    code = made.__code__
    alive.set_apart()
    gone = weakref.ref(counter)
    del made, counter
    assert gone() is None
    assert alive.functions_of([code]) == []
    assert alive.instances_of([Counter]) == []


@pytest.mark.parametrize("kind", [Counter, Finer, Slotted, Odd])
@pytest.mark.sampled(2)
def test_objects_are_found_that_were_made_before_and_after(kind: type) -> None:
    before = kind()
    alive.set_apart()
    after = kind()
    found = alive.instances_of([Counter if kind is Finer else kind])
    assert {id(one) for one in found} == {id(before), id(after)}


def test_a_class_whose_objects_nobody_noted_is_looked_for_in_all() -> None:
    kind = type("Plain", (), {})
    here = kind()
    alive.set_apart()
    assert alive.instances_of([kind]) == [here]


def test_functions_of_torch_are_found_too() -> None:
    alive.set_apart()
    wanted = torch.nn.Linear.forward
    assert alive.functions_of([wanted.__code__]) == [wanted]


def test_what_a_job_freezes_itself_is_found() -> None:
    alive.set_apart()
    made, counter = maker(), Counter()
    gc.freeze()
    assert made in alive.functions_of([made.__code__])
    gc.freeze()
    assert counter in alive.instances_of([Counter])
    gc.freeze()
    assert made.__code__ in alive.codes_that(lambda code: code.co_name == "made_for_this_alone")
    gc.freeze()
    alive.set_apart()
    assert counter in alive.instances_of([Counter])


def test_code_is_found_of_what_was_made_before_and_after() -> None:
    before = maker()
    alive.set_apart()
    assert alive.codes_that(lambda code: code.co_name == "made_for_this_alone") == {before.__code__}
    assert alive.codes_that(lambda code: False) == set()

    def since_then_alone() -> None: ...

    assert alive.codes_that(lambda code: code.co_name == "since_then_alone") == {
        since_then_alone.__code__
    }


def test_classes_are_found_by_a_method_of_whatever_name() -> None:
    def method(self) -> None: ...

    class Here:
        other = method

    alive.set_apart()

    class There(Here):
        again = method

    assert {*alive.classes_with([method])} == {Here, There}
    assert alive.classes_with([]) == []
