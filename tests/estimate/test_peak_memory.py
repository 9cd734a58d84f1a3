"""Memory: what each stage holds, by hand and as properties."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.estimate import MODELS, TrainingRun
from penstock.estimate.constants import terms
from penstock.estimate.peak_memory import MEMORY_TERMS, activation_bytes, stage_memory, state_bytes
from penstock.estimate.priors import usual
from penstock.estimate.work import stage_parameters
from tests.estimate.runs import A100, run_of, sizes

PRIOR = usual("memory")


def peak(run):
    return float(terms("memory", [run]).of(PRIOR)[0])


@given(sizes, st.integers(1, 8))
def test_a_larger_micro_batch_never_takes_less(given_sizes, more):
    less = run_of(**given_sizes)
    larger = replace(less, micro_batch=less.micro_batch + more)
    assert peak(larger) >= peak(less)
    for at in range(less.pipe):
        assert activation_bytes(larger, at) > activation_bytes(less, at)
        assert state_bytes(larger, at) == state_bytes(less, at)


@given(sizes)
def test_peak_is_that_of_the_largest_stage(given_sizes):
    run = run_of(**given_sizes)
    moments = [moment for at in range(run.pipe) for moment in stage_memory(run, at)]
    assert peak(run) == pytest.approx(max(np.array(moments) @ PRIOR))


def test_first_stage_holds_as_many_micro_batches_as_there_are_stages():
    """A pipeline does not divide activations: the first stage holds those of S micro-batches."""
    block = 512 * 1024 * (34 + 5 * 16 * 512 / 1024)
    embedding = 512 * 1024 * 2 * 2
    run = run_of(blocks=8, pipe=4, num_micro_batches=8)
    one = run_of(blocks=8, pipe=4, num_micro_batches=1)
    assert activation_bytes(run, 0) == 4 * (2 * block + embedding)
    assert activation_bytes(one, 0) == 2 * block + embedding
    assert activation_bytes(run, 3) == activation_bytes(one, 3)
    few = replace(run, num_micro_batches=2)
    assert activation_bytes(few, 0) == 2 * activation_bytes(one, 0)


@given(sizes)
def test_the_more_is_recomputed_the_less_is_held(given_sizes):
    none, selective, full = (
        activation_bytes(run_of(**given_sizes | {"recompute": how, "blocks": 24, "pipe": 2}), 0)
        for how in ("none", "selective", "full")
    )
    assert none > selective > 0
    assert none > full > 0


@given(sizes)
def test_the_more_is_sharded_the_less_is_held(given_sizes):
    held = [
        state_bytes(run_of(**given_sizes | {"sharding": how, "data": 8}), 0)
        for how in ("none", "optimizer", "gradients", "full")
    ]
    assert held == sorted(held, reverse=True)
    assert held[3] == pytest.approx(held[0] / 8)


def test_states_by_hand():
    run = run_of(hidden=1024, blocks=8, gradient_bytes=4)
    numbers = 12 * 8 * 1024**2 + 51200 * 1024 + 512 * 1024
    assert stage_parameters(run, 0) == (numbers, 0)
    assert state_bytes(run, 0) == 18 * numbers
    assert state_bytes(replace(run, data=4, sharding="optimizer"), 0) == 9 * numbers


def test_activations_of_a_block_are_34_bytes_and_5_a_score():
    """s b h (34 + 5 a s / h), arXiv:2205.05198, equation 1; the embedding keeps 2 * 2 more."""
    run = run_of(hidden=1024, blocks=1, sequence=512, heads=16, micro_batch=3)
    formula = 512 * 3 * 1024 * (34 + 5 * 16 * 512 / 1024)
    assert activation_bytes(run, 0) == formula + 2 * 2 * 512 * 3 * 1024


def test_experts_are_sharded_by_their_own_degree():
    model = replace(MODELS["deepseekv2"], blocks=2)
    run = TrainingRun(model, "tests", (2,), (A100,), 1, 8, 1, 4, expert=8, sharding="optimizer")
    own, experts = stage_parameters(run, 0)
    assert experts == 160 * 3 * 5120 * 1536 / 8
    assert state_bytes(run, 0) == pytest.approx(own * (6 + 12 / 8) + experts * 18)


def test_terms_are_named():
    (moment,) = stage_memory(run_of(), 0)
    assert len(moment) == len(MEMORY_TERMS)


def test_logits_are_gone_before_a_block_is_repeated():
    loss, repeated = stage_memory(run_of(blocks=8, recompute="full"), 0)
    block = 512 * 1024 * (34 + 5 * 16 * 512 / 1024)
    assert (loss[2], repeated[2]) == (10 * 512 * 51200, 0)
    assert loss[1] == 512 * 1024 * 2 * 8
    assert repeated[1] == loss[1] + block
    first, last = (stage_memory(run_of(blocks=8, pipe=2, recompute="full"), at) for at in (0, 1))
    assert (len(first), len(last)) == (1, 2)


def test_all_that_a_device_has_in_use_is_more_than_what_tensors_are_given():
    """A context, buffers to seven others of the host, and what the allocator keeps."""
    given, used = (stage_memory(run_of(data=16, on_device=on), 0)[0] for on in (False, True))
    moment = dict(zip(MEMORY_TERMS, zip(given, used, strict=True), strict=True))
    assert moment["states"][0] == moment["states"][1]
    assert moment["activations"][1] == pytest.approx(1.06 * moment["activations"][0])
    assert [size / 1e9 for size in moment["buffers"]] == pytest.approx([1.0, 0.6 + 7])
