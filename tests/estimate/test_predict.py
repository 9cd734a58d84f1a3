"""Predict: whose constants are used, where it extrapolates, how wide the interval is."""

import math
from dataclasses import replace

import pytest
from hypothesis import given

from penstock.errors import EstimateError
from penstock.estimate import Sample, fit, predict
from penstock.estimate.constants import terms
from penstock.estimate.datasheet import find_device
from penstock.estimate.priors import usual
from penstock.estimate.shipped import SHIPPED, load, save
from tests.estimate.runs import run_of, sizes


def sample(run, factor=1.0):
    return Sample(run, factor * float(terms("time", [run]).of(usual("time"))[0]), None)


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
    assert any(word.startswith(feature) for word in found.outside)
    narrow = math.log(one(inside).high / one(inside).value)
    assert math.log(found.high / found.value) > narrow * 1.02


def test_how_far_it_extrapolates_is_said_and_what_it_rests_on():
    found = one(run_of(hidden=8192, data=4, micro_batch=1))
    assert found.outside == ("hidden size 4x larger",)
    assert found.rests_on == "8 runs on a100-80, nearest hidden size 4x smaller"
    few = one(run_of(hidden=512, data=4, device=find_device("h100"), cluster="new"))
    assert few.outside == ("cluster", "hidden size 2x smaller", "device")
    assert few.rests_on == "8 runs on a100-80, none on h100, nearest hidden size 2x larger"
    wide = [math.log(e.high / e.value) for e in (one(RUNS[0]), found, few)]
    assert wide == sorted(wide)


def test_between_what_was_seen_nothing_is_said():
    assert one(run_of(hidden=1536, data=3)).outside == ()


@given(sizes)
def test_interval_holds_the_value(given_sizes):
    found = one(run_of(**given_sizes))
    assert 0 < found.low <= found.value <= found.high < math.inf


def test_own_constants_are_preferred():
    twice = [sample(replace(run, cluster="other"), 2.0) for run in RUNS]
    pools = fit([*(sample(run) for run in RUNS), *twice])
    own, other, new = (
        one(replace(RUNS[0], cluster=name), pools) for name in ("tests", "other", "new")
    )
    assert (own.cluster, other.cluster) == ("tests", "other")
    assert new.cluster == "other + tests"
    assert own.value < new.value < other.value


def test_without_constants_there_is_no_prediction():
    with pytest.raises(EstimateError, match="no constants of memory"):
        predict("memory", [RUNS[0]], CONSTANTS)


def test_many_are_predicted_as_one_by_one():
    runs = [RUNS[3], run_of(cluster="another"), RUNS[0]]
    assert predict("time", runs, CONSTANTS) == tuple(one(run) for run in runs)


def test_constants_survive_a_file(tmp_path):
    path = tmp_path / "constants.json"
    save(CONSTANTS, path)
    assert load(path) == CONSTANTS


@pytest.mark.parametrize("text", ["", "{}", '{"pools": [{}]}', '{"pools": 3}'])
def test_damaged_constants_are_refused(tmp_path, text):
    path = tmp_path / "constants.json"
    path.write_text(text)
    with pytest.raises(EstimateError):
        load(path)


@pytest.mark.parametrize(("name", "least"), [("products", 1), ("step", 0)])
def test_constants_beyond_what_is_physical_are_refused(name, least):
    made = CONSTANTS[0].of("tests")
    with pytest.raises(EstimateError, match=f"no value of {least} or more for {name}"):
        replace(made, values=made.values | {name: least - 0.1})


@pytest.mark.parametrize("seen", [(1.0,), (1.0, "a"), (1.0, 2.0, 3.0)])
def test_constants_are_seen_between_two_numbers_or_with_words(seen):
    made = CONSTANTS[0].of("tests")
    with pytest.raises(EstimateError, match="ranks is seen in"):
        replace(made, seen=made.seen | {"ranks": seen})


def test_constants_come_with_the_package_and_are_few():
    time, memory = load()
    assert SHIPPED.name == "constants.json"
    assert (time.quantity, memory.quantity) == ("time", "memory")
    assert time.count + memory.count < 100


def test_every_shipped_efficiency_is_between_0_and_1():
    for pool in load():
        for one_cluster in pool.clusters:
            pool.of(one_cluster.name)  # refuses others
