"""Garbage: let Python's collector wait while much is made that stays.

It looks through what is new again and again, and through all that there is each time that has grown
by a quarter: where 2,900 modules are loaded that takes a quarter of the time, and finds nothing.
"""

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def collector_waits() -> Generator[None]:
    """Leave garbage in circles alive until the end; who has switched the collector off stays so."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
