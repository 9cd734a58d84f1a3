"""Runs: the formulas of many runs at once give what they give of each."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.estimate.constants import terms
from penstock.estimate.priors import usual
from penstock.estimate.runs import Runs, memory_terms_of, time_terms_of
from tests.estimate.runs import run_of, sizes

ARRAYS = (
    "tensor", "data", "micro_batch", "num_micro_batches",
    "interleave", "recompute", "sharding", "sequence_parallel",
)  # fmt: skip
COMMON = ("hidden", "blocks", "pipe", "device")


def alike(found):
    """Return runs with the stages of the first, and the same as `Runs`."""
    runs = [run_of(**one | {name: found[0][name] for name in COMMON}) for one in found]
    arrays = {name: np.array([getattr(run, name) for run in runs]) for name in ARRAYS}
    first = runs[0]
    return runs, Runs(first.model, first.stage_blocks, first.devices, **arrays)


@pytest.mark.parametrize("quantity", ["time", "memory"])
@settings(deadline=None)
@given(st.lists(sizes, min_size=1, max_size=6))
def test_arrays_give_the_values_of_each_run(quantity, found):
    runs, many = alike(found)
    constants = usual(quantity)
    made = time_terms_of(many) if quantity == "time" else memory_terms_of(many)
    expected = terms(quantity, runs).of(constants)
    assert made.of(constants) == pytest.approx(expected, rel=1e-12)
    assert made.take(range(len(runs))).of(constants) == pytest.approx(expected, rel=1e-12)


@given(st.lists(sizes, min_size=1, max_size=6), st.data())
def test_one_is_the_run(found, data):
    runs, many = alike(found)
    at = data.draw(st.integers(0, len(runs) - 1))
    assert many.one(at, "tests") == runs[at]
    assert many.take(np.array([at])).one(0, "tests") == runs[at]
