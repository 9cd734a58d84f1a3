"""Unlike devices in one run: each by its own rates, links by their slower end, sums by all."""

from dataclasses import replace

import pytest

from penstock.estimate.datasheet import find_device
from penstock.estimate.priors import TIME_PRIORS
from penstock.estimate.training_run import Hiding
from penstock.estimate.unlike import beside_mean
from penstock.estimate.work import LANES, once_a_step, stage_parameters, stage_work, sums
from tests.estimate.runs import run_of

T4, V100 = find_device("t4"), find_device("v100")
FAST = replace(V100, across_bytes_per_s=12e9, ranks_per_host=4)
SLOW = replace(V100, name="slow", across_bytes_per_s=1e9, ranks_per_host=4)


def of_stage(run, at, name):
    work = stage_work(run, at)
    return sum(work[lane, name] for lane in LANES)


def mixed(*devices, **more):
    run = run_of(pipe=len(devices), blocks=8, **more)
    return replace(run, devices=devices)


def test_devices_that_are_alike_reach_the_share_of_their_mean():
    assert beside_mean((V100, V100), 0) == {}


def test_a_flop_with_fewer_watts_is_reached_less_than_the_mean_by_the_trend_of_any_device():
    shares = [beside_mean((V100, T4), at) for at in (0, 1)]
    prior = next(prior for prior in TIME_PRIORS if prior.name == "products")
    per_watt = [each.peak_flop_per_s / each.power_w / 0.78e12 for each in (V100, T4)]
    middle = (per_watt[0] * per_watt[1]) ** 0.5
    inverses = [1 + 0.35 * each ** prior.slope[0] for each in (*per_watt, middle)]
    assert prior.value == 1.35
    for share, inverse in zip(shares, inverses, strict=False):
        assert share["products"] == pytest.approx(inverse / inverses[2])
    assert shares[0]["products"] < 1 < shares[1]["products"]
    assert shares[0].keys() == {"products", "attention", "bytes"}


def test_a_stage_takes_what_its_own_device_reaches():
    both, alone = mixed(V100, T4), mixed(T4, T4)
    more = beside_mean((V100, T4), 1)["products"]
    assert of_stage(both, 1, "products") == pytest.approx(more * of_stage(alone, 1, "products"))


def test_a_message_is_as_slow_as_the_slower_end_and_others_keep_their_own():
    run = mixed(FAST, FAST, SLOW, data=4)
    size = 2 * 2 * 512 * 1024  # there and back
    own, turn, far = (of_stage(run, at, "across") for at in (0, 1, 2))
    assert own == pytest.approx(size / 12e9)
    assert turn == far == pytest.approx(size / 1e9)


def test_stages_of_one_kind_in_one_host_send_inside_it_though_others_are_elsewhere():
    run = mixed(FAST, FAST, SLOW, SLOW, data=2)
    assert of_stage(run, 0, "across") == 0 < of_stage(run, 0, "inside")
    assert of_stage(run, 1, "inside") == 0 < of_stage(run, 1, "across")


def test_sums_take_as_long_as_those_of_the_stage_that_is_slowest():
    run = mixed(FAST, SLOW, data=8)
    sent = 2 * 7 / 8 * 4 * stage_parameters(run, 1)[0]
    assert sums(run)["across"] == pytest.approx(sent / (4 * 1e9))


def test_the_update_is_that_of_the_stage_that_is_slowest():
    slow = replace(V100, name="slow", bytes_per_s=9e9)
    run = mixed(V100, slow)
    share = beside_mean(run.devices, 1)["bytes"]
    expected = share * 34 * sum(stage_parameters(run, 1)) / 9e9
    assert once_a_step(run)["bytes"] == pytest.approx(expected)


def test_messages_beside_compute_are_hidden_only_where_a_rank_has_chunks():
    """Of two stages the first waits for one of two micro-batches in flight, the last for none."""
    run = mixed(V100, V100, overlap=Hiding(pipe=True), data=8)
    first, last = (stage_work(run, at) for at in (0, 1))
    size = 2 * 2 * 512 * 1024
    assert first["device", "across"] == pytest.approx(size / 12.5e9 / 2)
    assert last["device", "across"] == 0 < last["wire", "across"]
    chunks = stage_work(replace(run, interleave=2), 0)
    assert chunks["device", "across"] == 0
    assert chunks["wire", "across"] == pytest.approx(2 * size / 12.5e9)
    waiting = stage_work(replace(run, overlap=Hiding()), 0)
    assert waiting["wire", "across"] == 0
    assert waiting["device", "across"] == pytest.approx(size / 12.5e9)
