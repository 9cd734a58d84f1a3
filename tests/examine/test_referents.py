"""What hangs on a value is found whatever keeps it: C, a module of others, a class of a class."""

import ctypes
import functools
import logging
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import pytest
from torch import nn

from penstock.examine.python_values import Walk


class Descriptor:
    def __init__(self):
        self.count = 0

    def __get__(self, owner, kind):
        self.count += 1
        return self.count


class Described:
    scale = Descriptor()


class Meta(type):
    count = 0


class Made(metaclass=Meta):
    pass


class Steps(threading.Thread):
    count = 0


class Warned(logging.Handler):
    count = 0


def dispatching():
    @functools.singledispatch
    def scale(value):
        return value

    scale.count = 0
    return scale


async def waits():
    for _ in range(9):
        await Turn()


class Turn:
    def __await__(self):
        yield 1


def local():
    made = threading.local()
    made.count = 0
    return made


def partial_with_a_count():
    made = functools.partial(int)
    made.count = 0
    return made


def module():
    made = types.ModuleType("made")
    made.count = 0
    return made


def proxied():
    return (known := {"count": 0}), types.MappingProxyType(known)


def pointing():
    return ctypes.pointer(ctypes.c_int(0))


def counted(value):
    value.count += 1


def counted_on_its_class(value):
    type(type(value)).count += 1


def failing_again(value):
    value.args = (value.args[0] + 1,)


def next_turn(value):
    value.send(None)


def moved_to_the_end(value):
    value.move_to_end("a")


def first_of_objects(value):
    value[0] = 8


def behind_a_pointer(value):
    value.contents.value += 1


def behind_a_proxy(value):
    value[0]["count"] += 1


def asked(value):
    assert value.scale


def set_on_a_module_of_others(value):
    logging.count = getattr(logging, "count", 0) + 1


def set_on_a_class_of_torch(value):
    nn.Linear.count = getattr(nn.Linear, "count", 0) + 1


KEPT = (
    (local, counted),
    (dispatching, counted),
    (partial_with_a_count, counted),
    (module, counted),
    (Steps, counted),
    (Warned, counted),
    (lambda: logging.getLogger("penstock.test"), counted),
    (Made, counted_on_its_class),
    (Described, asked),
    (proxied, behind_a_proxy),
    (pointing, behind_a_pointer),
    (lambda: ValueError(0), failing_again),
    (waits, next_turn),
    (lambda: OrderedDict(a=1, b=2), moved_to_the_end),
    (lambda: np.array([7, None], dtype=object), first_of_objects),
    (lambda: None, set_on_a_module_of_others),
    (lambda: None, set_on_a_class_of_torch),
)


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    logging.getLogger("penstock.test").count = 0
    monkeypatch.setattr(logging, "count", 0, raising=False)
    monkeypatch.setattr(nn.Linear, "count", 0, raising=False)


def held(value: object, act: Callable[[object], object]) -> dict[str, object]:
    """Return what a walk finds of a value, and of what a function that changes it names."""
    walk = Walk({act.__code__})
    walk.put("it", "it", value)
    walk.function(act)
    walk.go()
    return {place.where: token for place, token in walk.values.items()}


@pytest.mark.filterwarnings("ignore:coroutine")
@pytest.mark.parametrize(("make", "act"), KEPT, ids=lambda one: one.__name__)
def test_what_is_changed_is_seen_whatever_keeps_it(make, act) -> None:
    value = make()
    before = held(value, act)
    assert held(value, act) == before
    act(value)
    assert held(value, act) != before


def test_what_others_keep_in_their_modules_and_classes_is_none_of_the_jobs() -> None:
    found = held(types.SimpleNamespace(module=logging, kind=nn.Linear), counted)
    assert {where for where in found if where.startswith("it.module")} == {"it.module.count"}
    assert not any("root" in where for where in found)
    assert "it.module.root" not in held(weakref.ref(Described), counted)


def test_what_a_thread_has_to_itself_has_its_name() -> None:
    assert "it.count" in held(local(), counted)
