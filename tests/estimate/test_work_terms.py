"""Terms: homogeneous, with exact slopes, and cut to any of their runs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.estimate.constants import terms
from penstock.estimate.priors import TIME_PRIORS, usual
from penstock.estimate.training_run import Hiding
from penstock.estimate.work import TIME_TERMS
from tests.draws import examples
from tests.estimate.runs import run_of, sizes

many = st.lists(sizes, min_size=1, max_size=4)
scales = st.lists(st.floats(0.1, 10), min_size=len(TIME_PRIORS), max_size=len(TIME_PRIORS))


@pytest.mark.parametrize("quantity", ["time", "memory"])
@given(many, scales)
@examples(15)
def test_value_is_its_slope_times_the_constants(quantity, found, scale):
    made = terms(quantity, [run_of(**one) for one in found])
    constants = usual(quantity) * np.array(scale)[: len(made.names)]
    value, slope = made.with_slopes(constants)
    assert slope @ constants == pytest.approx(value)
    assert made.of(3 * constants) == pytest.approx(3 * value)


@given(sizes, scales, st.integers(0, len(TIME_PRIORS) - 1))
def test_slope_is_the_derivative(one, scale, at):
    made = terms("time", [run_of(**one)])
    constants = usual("time") * np.array(scale)
    value, slope = made.with_slopes(constants)
    step = np.zeros(len(TIME_PRIORS))
    step[at] = 1e-6 * constants[at]
    higher = made.of(constants + step) - value
    # where two stages are as long, the slope is that of one of them
    assert higher[0] == pytest.approx(slope[0] @ step, rel=1e-2, abs=1e-9 * value[0])


@given(many, st.data())
def test_take_gives_the_terms_of_those_runs(found, data):
    runs = [run_of(**one) for one in found]
    chosen = data.draw(st.lists(st.integers(0, len(runs) - 1), min_size=1))
    constants = usual("time")
    made = terms("time", runs).take(chosen).of(constants)
    assert made == pytest.approx(terms("time", [runs[at] for at in chosen]).of(constants))


@given(sizes)
def test_stage_takes_its_longest_lane_at_least_and_all_of_them_at_most(one):
    made = terms("time", [run_of(**one | {"pipe": 1, "num_micro_batches": 1})])
    constants = usual("time")
    lanes = made.lanes[:, 0] @ constants
    stage = made.of(constants)[0] - made.once_s(constants)[0]
    assert lanes.max() * (1 - 1e-9) <= stage <= lanes.sum() * (1 + 1e-9)


@given(sizes, st.floats(0.001, 1000))
def test_sums_beside_backward_cost_what_it_does_not_hide(one, slower):
    """Never more than alone, and at least what is longer than the last backward."""
    constants = usual("time") * np.where(np.isin(TIME_TERMS, ("inside", "across")), slower, 1.0)
    alone, beside = (
        terms("time", [run_of(**one, overlap=Hiding(gradients=hidden))]) for hidden in (False, True)
    )
    summed = float((alone.beside @ constants)[0])
    assert alone.of(constants) == pytest.approx(alone.once_s(constants) + _steps(alone, constants))
    saved = alone.of(constants)[0] - beside.of(constants)[0]
    longest = beside.stage_s(constants).max()
    assert saved == pytest.approx(min(summed, 2 / 3 * longest), rel=1e-6, abs=1e-12 * longest)


def _steps(made, constants):
    stage = made.stage_s(constants)
    total, most = (stage * made.alike).sum(), stage.max()
    return made.steady * most + made.filling * (total - most)
