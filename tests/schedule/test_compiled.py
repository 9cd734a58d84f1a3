import numba

import penstock.schedule.compiled as room
from penstock.schedule.compiled import compiled


def test_function_is_compiled_also_where_no_cache_can_be_written(monkeypatch):
    def njit(function=None, *, cache=False):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return numba.njit(function)

    monkeypatch.setattr(room, "njit", njit)
    assert compiled(lambda number: number + 1)(2) == 3
