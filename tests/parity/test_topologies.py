"""Sums along the rounds of a topology train what the plain loop trains, in float64 to rounding."""

from dataclasses import replace

import pytest
import torch

from penstock.errors import PlanError
from penstock.prove.prove import Planned, prove
from penstock.runtime.launch import run_processes
from penstock.state.replica_keys import own_of
from penstock.transport import narrow_sums, routed_sums
from tests.parity.optimizing import job_of
from tests.parity.test_averages import (
    Oracle,
    assert_close,
    averaging,
    captured_of,
    momentum,
    plan_of,
    tied,
    wide,
)
from tests.parity.test_averages import data_of as batches_of
from tests.parity.training import Run, differing, train

WORDS = "ring", "tree", "halving", "doubling", "direct", "server", "server:2", "hierarchical:2"


def routed(word, replicas=3, stages=1, model=wide, sums=None, **options):
    given = {k: options.pop(k) for k in ("clip_norm",) if k in options}
    job = job_of(momentum, model, sums=sums, **given)
    job = replace(job, data=batches_of(model), micro_batches=2 * replicas)
    captured = captured_of(model)
    plan = plan_of(job, captured, replicas, stages, **options)
    return Run(plan.changed(topology=word), job, captured)


def plain(job, steps):
    """Return the weights of the plain loop of torch: momentum, clipped where the job says so."""
    torch.manual_seed(job.seed)
    model, batches = job.model(), job.data(0)
    optimizer = momentum(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(job.micro_batches):
            (job.loss(model, next(batches)) / job.micro_batches).backward()
        if job.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
        optimizer.step()
    return {f"weights/{name}": p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("replicas", [2, 3, 5])
def test_a_run_trains_what_the_plain_loop_does(word, replicas, tmp_path):
    run = routed(word, replicas)
    assert_close(train(run, tmp_path, (1,) * 3).weights, plain(run.job, 3))


def test_sums_go_along_the_rounds_that_the_plan_says(tmp_path, monkeypatch):
    """And what is not a sum of gradients, such as a norm, does not."""
    made, asked = routed_sums.sum_along, []

    def noted(transport, tensor, ranks, topology=""):
        asked.append((topology, len(ranks)))
        made(transport, tensor, ranks, topology)

    monkeypatch.setattr(narrow_sums, "sum_along", noted)
    train(routed("tree", clip_norm=0.05), tmp_path, (1,) * 2)
    assert {*asked} == {("tree", 3)}


@pytest.mark.parametrize(
    ("word", "options"),
    [
        ("tree", {"stages": 2, "clip_norm": 0.05}),
        ("halving", {"stages": 2, "model": tied, "schedule": "zb_h1"}),
        ("direct", {"stages": 2, "replicas": 2, "schedule": "chimera", "num_ranks": 2}),
    ],
)
def test_so_do_pipelines_tied_weights_and_clipping(word, options, tmp_path):
    run = routed(word, **options)
    assert_close(train(run, tmp_path, (1,) * 3).weights, plain(run.job, 3))


@pytest.mark.parametrize("way", ["local:2", "diloco:2", "easgd:2"])
@pytest.mark.parametrize("word", ["tree", "server:2"])
def test_averages_of_weights_go_along_it(way, word, tmp_path):
    run = averaging(way, 3)
    run = run._replace(plan=run.plan.changed(topology=word))
    found, oracle = train(run, tmp_path, (1,) * 5).weights, Oracle(run.job, 3, 5)
    for replica in range(3):
        assert_close(own_of(found, replica), oracle.weights(replica))


@pytest.mark.parametrize("sums", ["delayed", "rank:2"])
def test_what_is_held_back_is_proved_along_it(sums):
    run = routed("halving", 3, sums=sums)
    assert prove(Planned(run.job, run.captured, run.plan), (0, 1, 2)).problem == ""


def test_processes_sum_as_threads_do(tmp_path):
    run = routed("hierarchical:2", 3)
    threads = train(run, tmp_path / "threads", (1,) * 3)
    processes = train(run, tmp_path / "processes", (1,) * 3, run_processes)
    assert differing(processes.weights, threads.weights) == []


@pytest.mark.parametrize("sums", ["bfloat16", "int8", "sign", "top:0.1", "gossip"])
def test_ways_that_go_between_ranks_by_themselves_are_refused(sums):
    run = routed(None, 2)
    with pytest.raises(PlanError, match=f"sums by ring, and {sums}, which"):
        run.plan.changed(sums=sums, topology="ring")
