"""search.configurations: nothing is missed, and what is found is what simulation says."""

import itertools
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.estimate import TrainingRun, load
from penstock.estimate.constants import terms
from penstock.estimate.datasheet import DEVICES, find_device
from penstock.estimate.training_run import even
from penstock.estimate.transformer import gpt
from penstock.search.transformer.configurations import configurations
from penstock.search.transformer.exact_step import best_steps
from penstock.search.transformer.found import Pool, pareto
from penstock.search.transformer.space import Space
from tests.draws import examples

CONSTANTS = tuple(pool.of(name) for pool, name in zip(load(), ("vtrain", "simumax"), strict=True))
GB = 10**9
degrees = st.integers(1, 8)


def every_run(model, device, devices, batch):
    """Yield all runs, from the rules in the docs and no code of the search."""
    for tensor, pipe, data, micro_batch, interleave in itertools.product(
        range(1, devices + 1), range(1, model.blocks + 1), range(1, devices + 1),
        range(1, batch + 1), range(1, model.blocks + 1),
    ):  # fmt: skip
        if tensor * pipe * data != devices or model.heads % tensor:
            continue
        if batch % (data * micro_batch):
            continue
        count = batch // data // micro_batch
        if interleave > 1 and (pipe == 1 or model.blocks % (pipe * interleave) or count % pipe):
            continue
        for recompute, sharding, parallel in itertools.product(
            ("none", "selective", "full"), ("none", "optimizer", "gradients", "full"), (0, 1)
        ):
            if not parallel or tensor > 1:
                yield TrainingRun(
                    model, device.name, even(model.blocks, pipe), (device,) * pipe, tensor, data,
                    micro_batch, count, interleave=interleave, recompute=recompute,
                    sharding=sharding, sequence_parallel=bool(parallel),
                )  # fmt: skip


@examples(6)
@given(
    st.sampled_from([2, 3, 4]),
    st.sampled_from([1, 2, 4, 6]),
    st.sampled_from([1, 4, 6]),
    st.sampled_from(DEVICES),
    st.floats(1, 12),
)
def test_search_equals_brute_force(blocks, devices, batch, device, memory_gb):
    model = gpt(1024, blocks, 8, sequence=512, vocabulary=4096)
    runs = list(every_run(model, device, devices, batch))
    held = terms("memory", runs).of(CONSTANTS[1].array) if runs else []
    fitting = [run for run, size in zip(runs, held, strict=True) if size <= memory_gb * GB]
    pool = Pool(device, devices, memory_gb * GB)
    if not fitting:
        with pytest.raises(PlanError, match=f"none of {len(runs)} candidates fits"):
            configurations(model, pool, batch=batch, constants=CONSTANTS)
        return
    found = configurations(model, pool, batch=batch, constants=CONSTANTS, most=len(runs))
    steps = best_steps(fitting, CONSTANTS[0])
    assert found.best.seconds == pytest.approx(min(step.seconds for step in steps))
    assert found.candidates == len(runs)
    assert {each.run for each in found.simulated} == set(fitting)
    assert found.rejected[0][1] == len(runs) - len(fitting)
    assert sum(count for _, count in found.rejected) == len(runs) - len(fitting)


@examples(12)
@given(st.sampled_from([1, 2, 4]), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_simulated_step_is_the_closed_form_where_stages_are_alike(pipe, groups, chunks, again):
    """With no embedding, head and links to speak of, both are M t + (S - 1) t / v, or ZB-H1's."""
    model = gpt(1024, 12, 8, sequence=512, vocabulary=1)
    chunks = chunks if pipe > 1 else 1
    run = TrainingRun(
        model, "", even(12, pipe), (find_device("a100-80"),) * pipe, 1, 1, 1, pipe * groups,
        interleave=chunks, recompute="full" if again else "none",
    )  # fmt: skip
    made = terms("time", [run])
    closed = float(made.of(CONSTANTS[0].array)[0])
    (step,) = best_steps([run], CONSTANTS[0])
    if chunks > 1:
        assert step.schedule == "interleaved"
        assert step.seconds == pytest.approx(closed, rel=0.01)
    elif pipe == 1:
        assert step.seconds == pytest.approx(closed, rel=1e-6)
    else:
        assert step.schedule == "zb_h1"
        stage_s = made.stage_s(CONSTANTS[0].array).max()
        saved = 2 * (pipe - 1) * stage_s / (4 if again else 3)
        assert closed - 1.02 * saved <= step.seconds < closed


@given(st.lists(st.tuples(degrees, degrees, degrees), min_size=1, max_size=12))
def test_front_is_what_nothing_is_better_than(rows):
    def beats(a, b):
        return a != b and all(x <= y for x, y in zip(a, b, strict=True))

    kept = [rows[at] for at in pareto(np.array(rows, float))]
    assert len(kept) == len(set(kept))
    assert set(kept) == {b for b in rows if not any(beats(a, b) for a in rows)}


def small(**more):
    model = gpt(2048, 8, 16, sequence=1024, vocabulary=51200)
    pool = Pool(find_device("a100-80"), 16, 30 * GB, usd_per_hour=2.0)
    return configurations(model, pool, batch=64, constants=CONSTANTS, **more)


def test_result_says_what_was_rejected_and_what_it_costs():
    found = small()
    best = found.best
    assert best.usd == pytest.approx(best.seconds * 16 * 2 / 3600)
    assert best == found.simulated[0] == found.front[0]
    assert all(each.peak_bytes <= 30 * GB for each in found.simulated)
    assert f"of {found.candidates:,} candidates" in str(found)
    count, reason = found.rejected[0][1], "need more than 27.9 GiB a device"
    assert found.rejected[0][0] == reason
    assert f"{count:,} {reason}" in str(found)
    assert sum(count for _, count in found.rejected) + len(found.simulated) == found.candidates


def test_fewer_devices_are_on_the_front_where_they_are_cheaper():
    found = small(space=Space(devices=(4, 16)))
    ranks = {each.run.ranks for each in found.front}
    assert ranks == {4, 16}
    assert min(found.front, key=lambda each: each.usd).run.ranks == 4


def test_a_narrower_space_is_kept():
    space = Space(recompute=("full",), sharding=("none",), most_interleave=1, most_pipe=2)
    for each in small(space=space).simulated:
        assert (each.run.recompute, each.run.sharding) == ("full", "none")
        assert each.run.interleave == 1
        assert each.run.pipe <= 2


def test_more_memory_is_never_slower():
    model = gpt(2048, 8, 16, sequence=1024, vocabulary=51200)
    best_s = math.inf
    for memory_gb in (12, 16, 24, 40, 80):
        pool = Pool(find_device("a100-80"), 8, memory_gb * GB)
        found = configurations(model, pool, batch=32, constants=CONSTANTS, most=10_000)
        assert found.best.seconds <= best_s
        best_s = found.best.seconds


def test_result_does_not_depend_on_the_hash_seed():
    seed = "7" if os.environ.get("PYTHONHASHSEED") != "7" else "0"
    program = (
        "from tests.search.test_configurations import small\n"
        "for each in small().simulated: print(each)\n"
    )
    environment = os.environ | {"PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout == "".join(f"{each}\n" for each in small().simulated), done.stderr


def test_pools_that_cannot_be_are_refused():
    with pytest.raises(PlanError, match="a pool of 0 devices"):
        Pool(find_device("a100-80"), 0, 1)
