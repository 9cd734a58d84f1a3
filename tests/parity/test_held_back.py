"""Sums in few numbers: runs whose ranks hold back what they do not send."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from penstock.checkpoints import checkpoint
from penstock.errors import JobError, PlanError, RunError
from penstock.plan.lower_plan import lower_plan
from penstock.prove.prove import Planned, prove, prove_eager
from penstock.runtime.launch import run_processes
from tests.parity.optimizing import (
    MICRO_BATCHES,
    WIDTH,
    Net,
    data,
    job_of,
    run_of,
    windows_from,
)
from tests.parity.training import differing, train

WAYS = "int8", "sign", "top:0.1", "rank:2", "delayed", "delayed:4"


def adamw(weights):
    return torch.optim.AdamW(weights, lr=3e-3)


def half_net():
    return Net()


class Tied(nn.Module):
    """A weight that the first and the last stage share."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def summing(job, stages=1, schedule="one_f_one_b", **options):
    run = run_of(job, stages, schedule, **options)
    return run._replace(plan=run.plan.changed(sums=job.sums))


@pytest.mark.parametrize("sums", WAYS)
@pytest.mark.parametrize(
    ("model", "schedule", "stages", "options"),
    [
        (half_net, "one_f_one_b", 2, {"replicas": 2, "clip_norm": 0.05}),
        (Tied, "one_f_one_b", 2, {"replicas": 2, "precision": "bfloat16"}),
        (half_net, "chimera", 2, {"num_ranks": 2}),
    ],
)
@pytest.mark.sampled(3)
def test_the_proof_counts_what_is_held_back(sums, model, schedule, stages, options):
    given = {k: options[k] for k in ("precision", "clip_norm") if k in options}
    job = job_of(adamw, model, sums=sums, **given)
    run = summing(job, stages, schedule, **{k: v for k, v in options.items() if k not in given})
    proof = prove(Planned(run.job, run.captured, run.plan), (0, 1, 2, 3))
    assert proof.problem == ""
    assert f"with what ranks hold back of sums as {sums}" in str(proof)
    with pytest.raises(PlanError, match="gradients"):
        prove(Planned(replace(job, sums=None), run.captured, run.plan))


@pytest.mark.parametrize("sums", ["int8", "delayed"])
@pytest.mark.parametrize(
    "words",
    [{"wire": (8, 8)}, {"offload": ("both", "activations"), "beside": True}],
)
def test_the_proof_holds_with_messages_in_8_bits_and_copies_to_far_memory(sums, words):
    job = job_of(adamw, half_net, sums=sums, wire_bits=8 if "wire" in words else None)
    run = summing(job, 2, replicas=2)
    assert prove(Planned(run.job, run.captured, run.plan.changed(**words)), (0, 1)).problem == ""


@pytest.mark.parametrize("sums", WAYS)
@pytest.mark.sampled(2)
def test_a_resumed_run_holds_back_what_the_first_one_did(sums, tmp_path):
    run = summing(job_of(adamw, half_net, sums=sums), 2, replicas=2)
    whole = train(run, tmp_path / "whole", (1,) * 6)
    train(run, tmp_path / "first", (1,) * 3)
    newest = checkpoint.latest(tmp_path / "first")
    state = checkpoint.load(newest)
    assert {f"held-back-{rank}/first.weight" for rank in range(2)} <= state.tensors.keys()
    found = train(run, tmp_path / "then", windows=windows_from(run, 3), resume=newest)
    assert differing(found.weights, whole.weights) == []


def test_what_two_ranks_have_held_back_is_held_back_by_one_place_of_a_sum(tmp_path):
    job = job_of(adamw, half_net, sums="top:0.1")
    train(summing(job, 2, replicas=2), tmp_path / "two", (1,) * 3)
    newest = checkpoint.latest(tmp_path / "two")
    alone = run_of(job_of(adamw, half_net), 1)
    found = train(alone, tmp_path / "one", windows=windows_from(alone, 3), resume=newest)
    assert all(value.isfinite().all() for value in found.weights.values())


def late_loop(job, model, batches, late, steps):
    """Train by w(t) = w(t - 1) - rate * g(w(t - K)), of torch alone; K = late + 1.

    All weights of the past are in a list, and step t's gradients are those of model t - K, on the
    micro-batches that were read then.
    """
    past, read = [copy.deepcopy(model)], []
    for t in range(1, steps + 1):
        read.append([next(batches) for _ in range(MICRO_BATCHES)])
        newest = copy.deepcopy(past[-1])
        if t > late:
            old = past[t - 1 - late]
            for batch in read[t - 1 - late]:
                (job.loss(old, batch) / MICRO_BATCHES).backward()
            rows = [p for p in old.parameters() if p.grad is not None]
            if job.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(rows, job.clip_norm)
            with torch.no_grad():
                for p, q in zip(newest.parameters(), old.parameters(), strict=True):
                    p -= 0 if q.grad is None else 0.05 * q.grad
        newest.zero_grad()
        past.append(newest)
    return past[-1]


@pytest.mark.parametrize(
    ("sums", "late", "stages", "clip"),
    [
        ("delayed", 1, 1, None),
        ("delayed", 1, 2, 0.05),
        ("delayed:2", 1, 1, None),
        ("delayed:3", 2, 1, 0.05),
        ("delayed:4", 3, 2, None),
        ("delayed:9", 8, 1, None),
    ],
)
def test_a_delayed_run_is_that_of_pipe_sgd(sums, late, stages, clip, tmp_path):

    def sgd(weights):
        return torch.optim.SGD(weights, lr=0.05)

    def wide():
        return half_net().double()

    def doubles(start):
        return (x.double() for x in data(start))

    job = replace(job_of(sgd, wide, sums=sums, clip_norm=clip), data=doubles)
    found = train(summing(job, stages, replicas=2), tmp_path, (1,) * 7).weights
    torch.manual_seed(job.seed)
    model = late_loop(job, wide(), doubles(0), late, 7)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(found[f"weights/{name}"], weight.data, rtol=1e-12, atol=1e-12)


def test_what_is_under_way_for_longer_goes_on_sooner_and_nothing_is_lost(tmp_path):
    """K = 4 is gone on with by K = 2: all that is under way is in the one update that is late."""

    def sgd(weights):
        return torch.optim.SGD(weights, lr=0.05)

    run = summing(job_of(sgd, half_net, sums="delayed:4"), 1, replicas=2)
    before = train(run, tmp_path / "four", (1,) * 3).weights  # none of which is updated by any
    newest = checkpoint.latest(tmp_path / "four")
    kept = checkpoint.load(newest).tensors
    name = "first.weight"
    parts = [kept[f"held-back-{at}/{name}"] for at in ("0", "1", "0.1", "1.1", "0.2", "1.2")]
    two = summing(job_of(sgd, half_net, sums="delayed"), 1, replicas=2)
    after = train(two, tmp_path / "two", windows=windows_from(two, 3)[:1], resume=newest).weights
    moved = before[f"weights/{name}"] - after[f"weights/{name}"]
    torch.testing.assert_close(moved, 0.05 * sum(parts))


@pytest.mark.parametrize("sums", ["int8", "delayed:3"])
def test_processes_hold_back_what_threads_do(sums, tmp_path):
    run = summing(job_of(adamw, half_net, sums=sums), 1, replicas=2)
    threads = train(run, tmp_path / "threads", (1,) * 4)
    processes = train(run, tmp_path / "processes", (1,) * 4, run_processes)
    assert differing(processes.weights, threads.weights) == []


@pytest.mark.parametrize(
    ("sums", "size_bytes"),
    [
        (None, 4 * 64 * 65),
        ("int8", 17 * 260),
        ("sign", 17 * 36),
        ("top:0.1", 2 * 4 * 416),
        ("rank:4", 4 * (4 * 128 + 64)),
    ],
)
def test_a_program_says_as_how_large_a_tensor_is_summed(sums, size_bytes):
    def wide():
        return nn.Sequential(nn.Linear(64, 64))

    def ones(start):
        while True:
            yield torch.ones(2, 64)

    job = replace(job_of(adamw, wide, sums=sums), data=ones)
    run = summing(job, 1, replicas=MICRO_BATCHES)
    (reduce,) = lower_plan(run.plan, run.captured.graph).code.reductions
    assert reduce.size_bytes == size_bytes


def test_jobs_without_a_plan_and_in_float16_are_refused():
    job = job_of(adamw, half_net, sums="int8")
    with pytest.raises(RunError, match="sums as int8 need a plan"):
        prove_eager(job, 2, (0,))
    with pytest.raises(JobError, match="where a step may be left out"):
        replace(job, precision="float16")
