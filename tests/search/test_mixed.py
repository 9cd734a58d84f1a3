"""search.mixed: equal to brute force over cuts, kinds and degrees; layer costs add up."""

import functools
import itertools
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.estimate import load
from penstock.estimate.datasheet import find_device
from penstock.estimate.peak_memory import stage_memory
from penstock.estimate.runs import Runs
from penstock.estimate.transformer import gpt
from penstock.estimate.work_terms import Terms
from penstock.search.transformer.found import Pool, Pools
from penstock.search.transformer.layer_costs import layer_costs
from penstock.search.transformer.mixed import mixed_configurations
from penstock.search.transformer.space import Space, divisors, runs_of
from tests.draws import examples
from tests.estimate.runs import run_of, sizes

CONSTANTS = tuple(pool.of(name) for pool, name in zip(load(), ("vtrain", "simumax"), strict=True))
TIME = CONSTANTS[0]
A100, V100 = find_device("a100-40"), find_device("v100")
GB = 10**9
SPACE = Space(recompute=("none", "full"), sharding=("none", "full"))


def peaks(run):
    """Return the most bytes of every stage, by the closed form of the whole run."""
    array = CONSTANTS[1].array
    return [max(np.array(stage_memory(run, at)) @ array) for at in range(run.pipe)]


@functools.cache
def layers_of(run, device):
    """Return the costs of every layer of a run on `device`."""
    words = ([run.recompute], [run.sharding], [run.sequence_parallel])
    degrees = (run.tensor, run.data, run.micro_batch, run.num_micro_batches, 1)
    alone = Runs(
        run.model, run.stage_blocks, run.devices,
        *(np.array([n]) for n in degrees), *map(np.array, words),
    )  # fmt: skip
    return layer_costs(alone, device, CONSTANTS)


def held_bytes(run, base):
    """Return the bytes of every stage, as the sum of its layers."""
    held, first = [], 0
    for at, (blocks, device) in enumerate(zip(run.stage_blocks, run.devices, strict=True)):
        cost, own = layers_of(base, device), slice(first, first + blocks)
        in_flight = min(run.pipe - at, run.num_micro_batches)
        kept = in_flight * cost.kept_bytes[0, own].sum()
        held.append(cost.fixed_bytes[0] + cost.state_bytes[0, own].sum() + kept)
        first += blocks
    return held


def value_s(run, base, between):
    """Return (M - 1) max + sum of the stages of `run`, which else is as `base`."""
    stages, first = [], 0
    message = 4 * run.tokens * run.model.hidden
    for at, (blocks, device) in enumerate(zip(run.stage_blocks, run.devices, strict=True)):
        seconds = layers_of(base, device).seconds[0][first : first + blocks].sum()
        if at + 1 < run.pipe:
            rate = device.across_bytes_per_s * run.tensor
            if run.devices[at + 1] != device:
                rate = between / run.data
            seconds = max(seconds, message / rate)
        stages.append(seconds)
        first += blocks
    return (run.num_micro_batches - 1) * max(stages) + sum(stages)


def every_run(model, pools, batch):
    for tensor, data in itertools.product(divisors(model.heads), divisors(batch)):
        room = [pool.count // (tensor * data) for pool in pools]
        for micro_batch, *words in itertools.product(
            divisors(batch // data), SPACE.recompute, SPACE.sharding, (False, True)
        ):
            if words[2] and tensor == 1:
                continue
            one = (tensor, data, micro_batch, batch // data // micro_batch, 1, *words)
            base = runs_of(model, (model.blocks,), (pools[0].device,), [one]).one(0)
            for pipe in range(1, min(sum(room), model.blocks) + 1):
                for kinds in itertools.product(range(len(pools)), repeat=pipe):
                    if any(kinds.count(k) > room[k] for k in range(len(pools))):
                        continue
                    for cuts in itertools.combinations(range(1, model.blocks), pipe - 1):
                        ends = (0, *cuts, model.blocks)
                        blocks = tuple(b - a for a, b in itertools.pairwise(ends))
                        devices = tuple(pools[k].device for k in kinds)
                        yield base, replace(base, stage_blocks=blocks, devices=devices)


@examples(20)
@given(
    st.integers(2, 4),
    st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (4, 1)]),
    st.sampled_from([2, 4, 8]),
    st.sampled_from([1e8, 3e8, 1e9, 1e10]),
    st.floats(1.3, 4),
    st.floats(1.3, 4),
)
def test_best_equals_brute_force(blocks, counts, batch, between, first_gb, second_gb):
    model = gpt(1024, blocks, 2, sequence=512, vocabulary=8192)
    pools = [Pool(A100, counts[0], first_gb * GB, 3.0), Pool(V100, counts[1], second_gb * GB, 1.0)]
    limit = {A100: first_gb * GB, V100: second_gb * GB}
    values = [
        value_s(run, base, between)
        for base, run in every_run(model, pools, batch)
        if all(h <= limit[d] for h, d in zip(held_bytes(run, base), run.devices, strict=True))
    ]
    more = {"batch": batch, "constants": (TIME, CONSTANTS[1]), "most": 1, "space": SPACE}
    if not values:
        with pytest.raises(PlanError, match="fits the memory"):
            mixed_configurations(model, Pools(pools, between), **more)
        return
    # what is done once a step is added to the best cut of each candidate; here it is nothing
    with mock.patch.object(Terms, "once_s", lambda made, _: np.zeros(len(made.starts))):
        found = mixed_configurations(model, Pools(pools, between), **more)
    run = found.best.run
    base = replace(run, cluster="", stage_blocks=(blocks,), devices=(A100,))
    assert value_s(run, base, between) == pytest.approx(min(values), rel=1e-6)
    assert sum(count for _, count in found.rejected) == found.candidates - 1
    held = zip(peaks(run), run.devices, strict=True)
    assert all(peak <= limit[device] * (1 + 1e-9) for peak, device in held)


@examples(12)
@given(sizes)
def test_bytes_of_layers_add_up_to_those_of_a_stage(given_sizes):
    run = run_of(**given_sizes | {"interleave": 1})
    # counted twice by layers: a tied head beside its embedding, buffers of ranks that are not there
    head = 18 * run.model.head_matrix / run.tensor if run.pipe == 1 else 0.0
    slack = CONSTANTS[1].values["states"] * head + CONSTANTS[1].values["buffers"] * GB * 8
    for held, peak in zip(held_bytes(run, run), peaks(run), strict=True):
        assert peak * (1 - 1e-9) <= held <= peak * (1 + 1e-9) + slack


def test_the_slower_device_has_fewer_blocks():
    model = gpt(2048, 16, 16, sequence=1024, vocabulary=1024)
    pools = [Pool(A100, 1, 40 * GB, 3.0), Pool(V100, 1, 32 * GB, 1.0)]
    space = Space(sharding=("none",), recompute=("selective",))
    found = mixed_configurations(
        model, Pools(pools, 1e12), batch=64, constants=CONSTANTS, space=space
    )
    run = found.best.run
    blocks = dict(zip(run.devices, run.stage_blocks, strict=True))
    assert blocks[A100] > 1.5 * blocks[V100]
    assert found.best.usd == pytest.approx(found.best.seconds * 4 / 3600)


def test_a_slow_link_between_zones_is_not_crossed():
    model = gpt(2048, 16, 16, sequence=1024, vocabulary=1024)
    pools = [Pool(A100, 4, 40 * GB), Pool(V100, 4, 32 * GB)]
    for between, kinds in ((1e6, 1), (1e12, 2)):
        found = mixed_configurations(model, Pools(pools, between), batch=64, constants=CONSTANTS)
        assert len(set(found.best.run.devices)) == kinds


def test_pools_that_cannot_be_told_apart_are_refused():
    model = gpt(1024, 4, 2, sequence=512, vocabulary=1024)
    with pytest.raises(PlanError, match="2 pools"):
        mixed_configurations(model, Pools([Pool(A100, 1, GB)] * 2, 1), batch=1, constants=CONSTANTS)
