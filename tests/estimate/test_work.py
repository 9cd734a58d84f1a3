"""Work: FLOP, bytes and messages of a stage, by hand and as properties."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.estimate import MODELS
from penstock.estimate.datasheet import DEVICES, find_device
from penstock.estimate.priors import usual
from penstock.estimate.training_run import Hiding
from penstock.estimate.work import LANES, TIME_TERMS, stage_parameters, stage_work, sums
from penstock.estimate.work_terms import time_terms
from tests.estimate.runs import A100, run_of, sizes

PRIOR = usual("time")
COMMUNICATION = ("inside", "across")


def seconds(run, constants=PRIOR):
    return float(time_terms([run]).of(constants)[0])


def total(run, *names):
    """Return the work of all stages for one micro-batch, under some names."""
    works = (stage_work(run, at) for at in range(run.pipe))
    return sum(work[lane, name] for work in works for lane in LANES for name in names)


@given(sizes)
def test_flop_is_the_formula_of_megatron(given_sizes):
    run = run_of(**given_sizes | {"recompute": "full", "context": 1})
    h, s, blocks = run.model.hidden, run.model.sequence, run.model.blocks
    formula = 96 * run.micro_batch * s * blocks * h**2
    formula *= 1 + s / (6 * h) + 51200 / (16 * blocks * h)
    flop = total(run, "products", "attention") * run.devices[0].peak_flop_per_s
    assert run.tensor * flop == pytest.approx(formula)


@given(sizes, st.sampled_from(["hidden", "blocks", "micro_batch", "num_micro_batches", "sequence"]))
def test_more_flop_is_never_faster(given_sizes, name):
    less = {"sequence": 512} | given_sizes
    more = less | {name: less[name] * 2}
    # the fused softmax of Megatron depends on the micro-batch, not on the FLOP
    if less["micro_batch"] * 16 // less["tensor"] % 4:
        return
    assert seconds(run_of(**more)) >= seconds(run_of(**less)) * (1 - 1e-12)


@given(sizes)
def test_twice_as_fast_links_halve_all_that_is_sent(given_sizes):
    slow = run_of(**given_sizes)
    device = slow.devices[0]
    fast = run_of(
        **given_sizes
        | {
            "device": replace(
                device,
                inside_bytes_per_s=2 * device.inside_bytes_per_s,
                across_bytes_per_s=2 * device.across_bytes_per_s,
            )
        }
    )
    assert total(fast, *COMMUNICATION) == pytest.approx(total(slow, *COMMUNICATION) / 2)
    for name in COMMUNICATION:
        assert sums(fast)[name] == pytest.approx(sums(slow)[name] / 2)


@given(sizes)
def test_degrees_of_one_send_nothing(given_sizes):
    run = run_of(**given_sizes | {"tensor": 1, "data": 1, "pipe": 1})
    assert total(run, *COMMUNICATION, "hops") == 0
    assert sum(sums(run).values()) == 0


@given(sizes, st.sampled_from([2, 4, 8]))
def test_tensor_ranks_divide_products_scores_and_parameters(given_sizes, tensor):
    whole = run_of(**given_sizes | {"tensor": 1})
    cut = run_of(**given_sizes | {"tensor": tensor})
    for name in ("products", "attention"):
        assert total(cut, name) == pytest.approx(total(whole, name) / tensor)
    positions = whole.model.positions * whole.model.hidden
    own, divided = stage_parameters(whole, 0)[0], stage_parameters(cut, 0)[0]
    assert divided - positions == pytest.approx((own - positions) / tensor)


@given(sizes)
def test_step_is_no_shorter_than_its_longest_stage_times_its_micro_batches(given_sizes):
    run = run_of(**given_sizes)
    terms = time_terms([run])
    stage = (terms.lanes @ PRIOR).max()
    assert seconds(run) >= run.num_micro_batches * stage * (1 - 1e-12)


def test_bubble_of_equal_stages_is_that_of_1f1b_and_interleaving_divides_it():
    only_products = PRIOR * [name == "products" for name in TIME_TERMS]
    run = run_of(pipe=4, blocks=8, num_micro_batches=6)
    headless = replace(run, model=replace(run.model, vocabulary=1))  # then stages are equal
    one, two = (seconds(replace(headless, interleave=n), only_products) for n in (1, 2))
    stage = one / (6 + 3)
    assert two == pytest.approx(stage * (6 + 3 / 2), rel=1e-4)


def test_sum_over_ranks_of_one_host_and_of_several_by_hand():
    run = run_of(hidden=1024, tensor=8, sequence=512)
    size = 2 * 512 * 1024
    one = 2 * 7 / 8 * size / A100.inside_bytes_per_s
    forward_and_backward = 8 * 4 + 2  # four a block; embedding and head
    assert total(run, "inside") == pytest.approx(forward_and_backward * one)
    wide = run_of(tensor=1, data=16, gradient_bytes=2)
    gradients = 2 * stage_parameters(wide, 0)[0]
    slowest = 8 * A100.across_bytes_per_s  # eight shares of the network, or NVLink
    assert slowest < A100.inside_bytes_per_s
    assert sums(wide)["across"] == pytest.approx(2 * 15 / 16 * gradients / slowest)
    alone = replace(wide, tensor=8)
    gradients = 2 * stage_parameters(alone, 0)[0]
    own = 2 * 15 / 16 * gradients / A100.across_bytes_per_s
    assert sums(alone)["across"] == pytest.approx(own)


def test_ranks_on_a_bus_share_its_rate():
    bus = replace(A100, shared=True)
    switch, shared = run_of(tensor=4), run_of(tensor=4, device=bus)
    assert total(shared, "inside") == pytest.approx(4 * total(switch, "inside"))


def test_softmax_takes_more_launches_where_heads_and_samples_are_no_multiple_of_four():
    counts = {
        (tensor, micro_batch): total(
            run_of(heads=16, tensor=tensor, micro_batch=micro_batch), "launches"
        )
        for tensor, micro_batch in ((4, 1), (8, 1), (8, 2))
    }
    assert counts[8, 2] == counts[4, 1] < counts[8, 1]


def test_full_recompute_costs_a_forward_of_the_products_and_selective_none():
    runs = {how: run_of(recompute=how, blocks=8) for how in ("none", "selective", "full")}
    products = {how: total(run, "products") for how, run in runs.items()}
    head = 6 * 512 * 1024 * 51200 / A100.peak_flop_per_s
    assert products["none"] == products["selective"]
    assert products["full"] - head == pytest.approx((products["none"] - head) * 4 / 3)
    scores = [total(runs[how], "attention") for how in ("none", "selective", "full")]
    assert scores[0] < scores[1] == scores[2]


def test_attention_of_before_hopper_is_slower_there_than_its_own_kernels():
    old, own = (
        run_of(device=find_device("h100"), scores=scores) for scores in ("fused", "flash 3")
    )
    assert total(old, "attention") == pytest.approx(1.6 * total(own, "attention"))
    assert total(old, "products") == total(own, "products")
    before = [total(run_of(scores=scores), "attention") for scores in ("fused", "flash 3")]
    assert before[0] == before[1]


def test_recompute_that_stops_early_leaves_out_the_last_product_of_a_block():
    """Of 24 h^2 FLOP a token the last product has 8."""
    whole, early = (run_of(recompute="full", stops_early=stops) for stops in (False, True))
    saved = total(whole, "products") - total(early, "products")
    assert saved == pytest.approx(8 * 512 * 8 * 1024**2 / A100.peak_flop_per_s)


def test_selective_recompute_repeats_the_part_of_products_that_its_framework_does():
    none, some, full = (
        total(run_of(recompute=how, selective=0.5), "products")
        for how in ("none", "selective", "full")
    )
    assert some - none == pytest.approx((full - none) / 2)


def test_products_in_8_bits_are_twice_as_fast_and_nothing_else_is():
    slow, fast = (run_of(product_speed=speed) for speed in (1.0, 2.0))
    head = 6 * 512 * 1024 * 51200 / A100.peak_flop_per_s
    halved = total(slow, "products") - head
    assert total(fast, "products") - head == pytest.approx(halved / 2)
    for name in ("attention", "inside", "across", "launches"):
        assert total(fast, name) == total(slow, name)
    assert total(fast, "bytes") > 0


@given(sizes, st.sampled_from(Hiding._fields))
def test_what_is_sent_beside_compute_is_not_sent_twice(given_sizes, name):
    alone = run_of(**given_sizes, overlap=Hiding(gathers=False))
    beside = replace(alone, overlap=Hiding(gathers=False)._replace(**{name: True}))
    assert total(beside, *COMMUNICATION) == pytest.approx(total(alone, *COMMUNICATION))
    assert seconds(beside) <= seconds(alone) * (1 + 1e-12)


PUBLISHED = {
    "mpt-125m": 125311488,
    "mpt-7b": 6658859008,
    "mpt-70b": 64862437376,
    "llama3-8b": 8.03e9,
    "llama3-70b": 70.6e9,
    "llama3-405b": 405.9e9,
    "mixtral-8x7b": 46.7e9,
    "deepseekv2": 236e9,
    "gpt-neo": 2.65e9,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_known_models_are_those_published(name):
    assert MODELS[name].parameters == pytest.approx(PUBLISHED[name], rel=0.015)


def test_stages_hold_all_parameters_and_a_tied_head_twice():
    run = run_of(hidden=1024, blocks=8, pipe=4)
    held = sum(sum(stage_parameters(run, at)) for at in range(4))
    assert held == run.model.parameters + run.model.head_matrix


def test_device_without_a_rate_is_refused():
    with pytest.raises(Exception, match="bytes_per_s is 0"):
        replace(DEVICES[0], bytes_per_s=0)
