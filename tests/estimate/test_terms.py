"""Terms: homogeneous, with exact slopes, and cut to any of their runs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.estimate.constants import prior, terms
from tests.draws import examples
from tests.estimate.runs import run_of, sizes

many = st.lists(sizes, min_size=1, max_size=4)
scales = st.lists(st.floats(0.1, 10), min_size=19, max_size=19)


@pytest.mark.parametrize("quantity", ["time", "memory"])
@given(many, scales)
@examples(15)
def test_value_is_its_slope_times_the_constants(quantity, found, scale):
    made = terms(quantity, [run_of(**one) for one in found])
    constants = prior(quantity).values * np.array(scale)[: len(made.names)]
    value, slope = made.with_slopes(constants)
    assert slope @ constants == pytest.approx(value)
    assert made.of(3 * constants) == pytest.approx(3 * value)


@given(sizes, scales, st.integers(0, 18))
def test_slope_is_the_derivative(one, scale, at):
    made = terms("time", [run_of(**one)])
    constants = prior("time").values * np.array(scale)
    value, slope = made.with_slopes(constants)
    step = np.zeros(19)
    step[at] = 1e-6 * constants[at]
    higher = made.of(constants + step) - value
    # where two stages are as long, the slope is that of one of them
    assert higher[0] == pytest.approx(slope[0] @ step, rel=1e-2, abs=1e-9 * value[0])


@given(many, st.data())
def test_take_gives_the_terms_of_those_runs(found, data):
    runs = [run_of(**one) for one in found]
    chosen = data.draw(st.lists(st.integers(0, len(runs) - 1), min_size=1))
    constants = prior("time").values
    made = terms("time", runs).take(chosen).of(constants)
    assert made == pytest.approx(terms("time", [runs[at] for at in chosen]).of(constants))


@given(sizes)
def test_stage_takes_its_longest_lane_at_least_and_all_of_them_at_most(one):
    made = terms("time", [run_of(**one | {"pipe": 1, "num_micro_batches": 1})])
    constants = prior("time").values
    lanes = made.lanes[:, 0] @ constants
    stage = made.of(constants)[0] - made.once[0] @ constants
    assert lanes.max() * (1 - 1e-9) <= stage <= lanes.sum() * (1 + 1e-9)
