"""Predict: whose constants are used, where it extrapolates, how wide the interval is."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import EstimateError
from penstock.estimate import Sample, fit, predict
from penstock.estimate.constants import SHIPPED, load, prior, save, terms
from penstock.estimate.device import find_device
from tests.estimate.runs import run_of, sizes


def sample(run, factor=1.0):
    return Sample(run, factor * float(terms("time", [run]).of(prior("time").values)[0]), None)


RUNS = [run_of(hidden=h, data=d) for h in (1024, 2048) for d in (1, 2, 4, 8)]
CONSTANTS = fit([sample(run, 1 + 0.01 * at) for at, run in enumerate(RUNS)])


def one(run, constants=CONSTANTS):
    (found,) = predict("time", [run], constants)
    return found


@pytest.mark.parametrize(
    ("changed", "feature"),
    [
        ({"hidden": 4096}, "hidden size"),
        ({"blocks": 16}, "blocks"),
        ({"sequence": 1024}, "sequence"),
        ({"tensor": 2}, "tensor"),
        ({"data": 16}, "data"),
        ({"pipe": 2}, "pipe"),
        ({"micro_batch": 2}, "micro-batch"),
        ({"num_micro_batches": 99}, "micro-batches"),
        ({"device": find_device("h100")}, "device"),
        ({"recompute": "full"}, "recompute"),
        ({"sharding": "full"}, "sharding"),
        ({"cluster": "another"}, "cluster"),
    ],
)
def test_extrapolation_is_said_and_widens_the_interval(changed, feature):
    inside = run_of(**{"hidden": 1024, "data": 2})
    outside = run_of(**{"hidden": 1024, "data": 2} | changed)
    assert one(inside).outside == ()
    found = one(outside)
    assert feature in found.outside
    narrow = math.log(one(inside).high / one(inside).value)
    assert math.log(found.high / found.value) == pytest.approx(2 * narrow)


def test_between_what_was_seen_nothing_is_said():
    assert one(run_of(hidden=1536, data=3)).outside == ()


@given(sizes)
def test_interval_holds_the_value(given_sizes):
    found = one(run_of(**given_sizes))
    assert 0 < found.low <= found.value <= found.high < math.inf


def test_own_constants_are_preferred_then_those_most_alike():
    twice = [sample(replace(run, cluster="other"), 2.0) for run in RUNS]
    wide = [sample(run_of(hidden=8192, cluster="wide"), 4.0)]
    constants = fit([*(sample(run) for run in RUNS), *twice, *wide])
    assert one(replace(RUNS[0], cluster="other"), constants).cluster == "other"
    assert one(RUNS[0], constants).cluster == "tests"
    assert one(run_of(hidden=8192, cluster="new"), constants).cluster == "wide"


def test_without_constants_there_is_no_prediction():
    with pytest.raises(EstimateError, match="no constants of memory"):
        predict("memory", [RUNS[0]], CONSTANTS)


def test_many_are_predicted_as_one_by_one():
    runs = [RUNS[3], run_of(cluster="another"), RUNS[0]]
    assert predict("time", runs, CONSTANTS) == tuple(one(run) for run in runs)


def test_constants_survive_a_file(tmp_path):
    path = tmp_path / "constants.json"
    save(CONSTANTS, path)
    (found,) = load(path)
    (made,) = CONSTANTS
    assert (found.cluster, found.runs, found.groups, found.seen) == (
        made.cluster, made.runs, made.groups, made.seen,
    )  # fmt: skip
    assert found.array == pytest.approx(made.array, rel=1e-3)
    assert found.spread == pytest.approx(made.spread, abs=1e-4)


@pytest.mark.parametrize("text", ["", "{}", '{"constants": [{}]}', '{"constants": 3}'])
def test_damaged_constants_are_refused(tmp_path, text):
    path = tmp_path / "constants.json"
    path.write_text(text)
    with pytest.raises(EstimateError):
        load(path)


@given(st.sampled_from(["products", "step"]))
def test_constants_below_zero_are_refused(name):
    (made,) = CONSTANTS
    with pytest.raises(EstimateError, match=f"no value of 0 or more for {name}"):
        replace(made, values=made.values | {name: -0.1})


@pytest.mark.parametrize("seen", [(1.0,), (1.0, "a"), (1.0, 2.0, 3.0)])
def test_constants_are_seen_between_two_numbers_or_with_words(seen):
    (made,) = CONSTANTS
    with pytest.raises(EstimateError, match="ranks is seen in"):
        replace(made, seen=made.seen | {"ranks": seen})


def test_constants_come_with_the_package():
    found = load()
    assert SHIPPED.name == "constants.json"
    assert {c.quantity for c in found} == {"time", "memory"}
    assert len({(c.quantity, c.cluster) for c in found}) == len(found)
