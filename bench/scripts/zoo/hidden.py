"""Counters that no attribute of a module or a closure shows; each is at work from call 26 on."""

import functools
import itertools
import json
import logging
import mmap
import tempfile
import threading
import types

import numpy as np
import torch
from small import WIDTH, deep, pairs, sgd, squares

import penstock as ps

LATE = 25


def _job(loss=squares, **options) -> ps.Job:
    options = {"data": pairs, "optimizer": sgd, "micro_batches": 4, **options}
    return ps.Job(model=deep, loss=loss, **options)


def _counted(count) -> ps.Job:
    return _job(lambda model, batch: squares(model, batch) * (0.3 if count() > LATE else 1.0))


def counter_of_the_thread() -> ps.Job:
    """threading.local has it."""
    local = threading.local()
    local.calls = 0

    def count():
        local.calls += 1
        return local.calls

    return _counted(count)


def counter_on_a_dispatching_function() -> ps.Job:
    """It hangs on what functools.singledispatch returns."""

    @functools.singledispatch
    def scale(value):
        return value

    scale.calls = 0

    def count():
        scale.calls += 1
        return scale.calls

    return _counted(count)


def counter_on_a_module_of_others() -> ps.Job:
    """`json.calls`: the shortest global there is."""
    json.calls = 0

    def count():
        json.calls += 1
        return json.calls

    return _counted(count)


class _Warned(logging.Handler):
    calls = 0

    def emit(self, record):
        self.calls += 1


def records_of_a_log() -> ps.Job:
    """A handler counts what is logged, and the loss asks it."""
    handler, log = _Warned(), logging.getLogger("penstock.zoo")
    log.handlers, log.propagate = [handler], False

    def count():
        log.warning("another one")
        return handler.calls

    return _counted(count)


class _Calls:
    def __init__(self) -> None:
        self.calls = 0

    def __get__(self, owner, kind):
        self.calls += 1
        return self.calls


class _Described:
    count = _Calls()


def counter_of_a_descriptor() -> ps.Job:
    """A class attribute counts how often it is read."""
    described = _Described()
    return _counted(lambda: described.count)


class _Meta(type):
    calls = 0

    def count(cls):
        type(cls).calls += 1
        return type(cls).calls


class _Made(metaclass=_Meta):
    pass


def counter_of_a_class_of_classes() -> ps.Job:
    """A metaclass has it."""
    return _counted(lambda: _Made.count())


class _Turn:
    def __init__(self, value) -> None:
        self.value = value

    def __await__(self):
        yield self.value


def turns_of_a_coroutine() -> ps.Job:
    """A coroutine that is sent on."""

    async def waits():
        for call in itertools.count(1):
            await _Turn(call)

    waiting = waits()
    return _counted(lambda: waiting.send(None))


def numbers_behind_a_proxy() -> ps.Job:
    """A read-only view of a dict that a method changes."""

    class Settings:
        def __init__(self) -> None:
            self._own = {"calls": 0}
            self.shown = types.MappingProxyType(self._own)

        def next(self) -> None:
            self._own["calls"] += 1

    settings = Settings()
    shown, go_on = settings.shown, settings.next

    def count():
        go_on()
        return shown["calls"]

    return _counted(count)


def counter_among_objects() -> ps.Job:
    """An array of numpy that holds objects."""
    row = np.array([0, None], dtype=object)

    def count():
        row[0] += 1
        return row[0]

    return _counted(count)


def cursor_that_is_called_as_the_model() -> ps.Job:
    """Data seeks in a map called `m`, as the loss calls its model: a plan is right."""
    rows = torch.randn(96, WIDTH, generator=torch.Generator().manual_seed(9))
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the script's own, to its end
    file.write(rows.numpy().tobytes())
    file.flush()
    m = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    size = 6 * WIDTH * 4

    def data(start):
        for k in itertools.count(start):
            m.seek(k % 16 * size)
            x = torch.frombuffer(bytearray(m.read(size)), dtype=torch.float32).view(6, WIDTH)
            yield x, x.tanh()

    return _job(lambda m, b: (m(b[0]) - b[1][:, :4]).square().mean(), data=data)
