"""By ranks: a step is the mean over the micro-batches of those who are there, and none is lost."""

import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.errors import PlanError
from penstock.graph.code import SeededRandom, micro_batch_seed
from penstock.members.words import Cursor
from penstock.pilot.by_ranks import (
    check_by_ranks,
    cursors_in,
    grown,
    job_at,
    number_at,
    plans_by_ranks,
    save_cursors,
)
from penstock.pilot.losses import PlanBasis
from penstock.plan import Plan
from penstock.training.begin import Begin
from penstock.training.elastic_run import ElasticRun
from tests.members import runs
from tests.members.test_every_kill import some
from tests.members.test_join import newcomer
from tests.parity.models import build, loss_of, plan_of, state_of

SHARE = 2


@pytest.fixture(autouse=True)
def mortal(monkeypatch: pytest.MonkeyPatch) -> None:
    runs.mortal(monkeypatch)


def plans_of(ranks: int, model: str = "dropout") -> tuple[PlanBasis, dict[int, Plan]]:
    """Return plans for up to so many ranks, each of which takes its share."""
    ways = runs.ways_of(model, "adamw", ranks)
    graph = ways.ways[0].captured.graph
    plan = plan_of(graph, "one_f_one_b", 1, SHARE, replicas=ranks)
    return ways, plans_by_ranks(plan, ways)


def trained(model: str, sizes: list[int]) -> tuple[list[float], dict[str, Tensor]]:
    """Train by the definition: step s is the mean over the next `sizes[s]` micro-batches."""
    job = runs.job_of(model)
    module, _ = build(job)
    optimizer, read, losses = job.optimizer([*module.parameters()]), 0, []
    batches = job.data(0)
    for size in sizes:
        parts = []
        for _ in range(size):
            batch = next(batches)
            with SeededRandom(micro_batch_seed(job.seed, read)):
                parts.append(loss_of(job, module, batch))
            read += 1
        optimizer.zero_grad()
        torch.stack(parts).mean().backward()
        optimizer.step()
        losses.append(float(torch.stack(parts).detach().double().mean()))
    return losses, state_of(module)


def check(told: runs.Told, model: str) -> list[int]:
    """Compare a run with the plain loop of the same members; return micro-batches by step."""
    for end in told.ended.values():
        if end.problem and not isinstance(end.problem, runs.Killed):
            raise end.problem
    sizes = [0] * runs.STEPS
    for event in told.events:
        rest = runs.STEPS - event.view.step
        sizes[event.view.step :] = [SHARE * len(event.view.members)] * rest
    losses, state = trained(model, sizes)
    steps = {step.step: step for step in told.steps}
    assert [steps[at].micro_batches for at in range(runs.STEPS)] == sizes
    got = [steps[at].loss for at in range(runs.STEPS)]
    torch.testing.assert_close(got, losses, rtol=1e-10, atol=1e-10)
    for key, value in state.items():
        torch.testing.assert_close(told.weights[key], value, rtol=1e-9, atol=1e-9)
    return sizes


def test_those_who_are_left_train_on_with_their_shares(tmp_path: Path) -> None:
    """Whoever dies before whichever call: a step counts with all three, or is done by two."""
    ways, plans = plans_of(3)
    seen = set[tuple[int, ...]]()
    for who in range(3):
        for call in some(12, 10, who):
            about = ways, plans, 3, tmp_path / f"{who}.{call}"
            told = runs.run(*about, runs.doomed(who, 2, call), by_ranks=True)
            seen.add(tuple(check(told, "dropout")))
    assert seen <= {(6, 6, 4, 4, 4), (6, 6, 6, 4, 4)}


def test_one_that_comes_brings_its_share(tmp_path: Path) -> None:
    ways, plans = plans_of(2)

    def joins(start, where) -> None:
        while not where:
            time.sleep(0.01)
        newcomer(start, where[0], start.token)

    told = runs.run(ways, plans, 1, tmp_path, runs.patient(2), joins=joins, by_ranks=True)
    sizes = check(told, "dropout")
    alone = sizes.count(2)  # it comes as soon as it has connected
    assert sizes == [2] * alone + [4] * (runs.STEPS - alone)
    assert 0 < alone < runs.STEPS
    assert cursors_in(tmp_path) == (Cursor(0, 0, 2), Cursor(alone, 2 * alone, 4))


def test_going_back_to_a_checkpoint_reads_from_where_it_was(tmp_path: Path) -> None:
    """With nothing left of a view but one that lacks state, the cursors before it hold."""
    ways, plans = plans_of(3)
    own = ElasticRun(ways, None, plans, Begin(), 5, tmp_path, by_ranks=True)
    before = (Cursor(0, 0, 6), Cursor(2, 12, 4), Cursor(4, 20, 2))
    assert own.cursors_from(before, 3, plans[1]) == (*before[:2], Cursor(3, 16, 2))
    assert cursors_in(tmp_path) == (*before[:2], Cursor(3, 16, 2))
    assert own.cursors_from(before, 0, plans[2]) == (Cursor(0, 0, 4),)
    still = replace(own, by_ranks=False)
    assert still.cursors_from((), 0, plans[2]) == ()


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=6))
def test_no_sample_is_lost_or_read_twice(stretches) -> None:
    """Of stretches of (steps, size): each step begins where the one before it has ended."""
    cursors, step, sizes = (), 0, list[int]()
    for steps, size in stretches:
        cursors, step = grown(cursors, step, size), step + steps
        sizes += [size] * steps
    for at in range(step):
        assert number_at(cursors, at) == sum(sizes[:at])
    assert all(a.size != b.size for a, b in pairwise(cursors))


def test_cursors_are_kept_in_the_folder_and_damage_is_told(tmp_path: Path) -> None:
    assert cursors_in(tmp_path) == ()
    save_cursors(tmp_path, (Cursor(0, 0, 6), Cursor(7, 42, 4)))
    assert cursors_in(tmp_path) == (Cursor(0, 0, 6), Cursor(7, 42, 4))
    (tmp_path / "batches.json").write_text('{"batches": [[1, 2]]}')
    with pytest.raises(PlanError, match="damaged"):
        cursors_in(tmp_path)


def test_what_cannot_follow_the_ranks_is_refused_by_name() -> None:
    ways, plans = plans_of(2, "gpt")
    graph = ways.ways[0].captured.graph
    staged = plan_of(graph, "one_f_one_b", 2, 2)
    refused = {
        "2 ranks": staged,
        "part of the state": plans[2].changed(shard=("shard",)),
        "far memory": plans[2].changed(offload=("state",)),
        "unlike shares": plans[2].changed(num_micro_batches=3, shares=(3, 2)),
    }
    for words, plan in refused.items():
        with pytest.raises(PlanError, match=words):
            check_by_ranks(plan)
    joined = plans[2].changed(joined=2)
    with pytest.raises(PlanError, match="2 are joined"):
        job_at(runs.job_of("gpt"), joined, (Cursor(0, 0, 3),), 1)
