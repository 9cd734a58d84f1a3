"""Steps of several shapes, where ranks come and go: each step is done once, as a loop does it."""

import json
from dataclasses import asdict, replace
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path

import pytest
import torch

from penstock.choose import keys as keys_module
from penstock.choose.choose import Choice, Joining
from penstock.choose.key_plans import (
    choice_of_keys,
    key_plans,
    read_key_plans,
    text_of_key_plans,
)
from penstock.choose.keys import traced_keys
from penstock.cluster import Cluster
from penstock.errors import PlanError
from penstock.graph.merge import unjoined
from penstock.job import Job
from penstock.listener import SILENT
from penstock.members.words import View
from penstock.pilot.losses import PlanBasis
from penstock.plan.plan import Prediction
from penstock.profile.estimate import estimated
from penstock.search import Fixed
from penstock.training.addresses import Addresses, addresses_in, write_addresses
from penstock.training.begin import Begin
from penstock.training.elastic_run import ElasticRun, RunPilot, text_of
from tests.members import runs
from tests.runtime.test_key_shares import STEPS, Shortest, job_of, plain, planned

CASES = {  # samples of the shapes, micro-batches of a step, whether what is divided is shared
    "in parts": ((4, 3), 1, True),
    "one by each": ((4, 1), 1, True),
    "two a step": ((4, 3), 2, False),
}


@pytest.fixture(autouse=True)
def mortal(monkeypatch: pytest.MonkeyPatch) -> None:
    runs.mortal(monkeypatch)


def made(name: str, ranks: tuple[int, ...], patched: pytest.MonkeyPatch) -> dict[int, Choice]:
    """Return the plans of all shapes for these numbers of ranks, each of whose steps commits."""
    sizes, micro_batches, shared = CASES[name]
    patched.setattr(keys_module, "predicted", Shortest(shared=shared))
    job = job_of(sizes, micro_batches, weight=True)
    return {count: _committing(planned(job, count, 1)) for count in ranks}


def _committing(choice: Choice) -> Choice:
    said = Prediction(1.0, (), 0.0)
    rows = [
        each._replace(plan=each.plan.changed(commits=True, predicted=said))
        for each in (choice, *choice.others)
    ]
    return rows[0]._replace(others=tuple(rows[1:]))


def basis_of(keyed: dict[int, Choice]) -> PlanBasis:
    choice = keyed[max(keyed)]
    cluster = Cluster.here(max(keyed))
    device = replace(cluster.devices[0], flop_per_s=(("float32", 1e10),))
    profile = estimated(choice.captured.graph, device, 2.0)
    way = Joining(choice.plan.terms.joined, choice.job, choice.captured, (profile,))
    return PlanBasis((way,), replace(cluster, devices=(device,)), Fixed())


def check(told: runs.Told, job: Job, *, killed: int) -> None:
    """Compare a run with a loop: each step once, its loss, all weights."""
    died = [end.problem for end in told.ended.values() if end.problem is not None]
    for problem in died:
        if not isinstance(problem, runs.Killed):
            raise problem
    assert len(died) == killed
    losses, weights = plain(job)
    assert {each.step for each in told.steps} == {*range(STEPS)}
    for each in told.steps:  # who dies with a step that it alone knows of has told it
        assert each.loss == pytest.approx(losses[each.step], rel=1e-5)
    order = [step for step, _ in groupby(each.step for each in told.steps)]
    assert all(abs(now - before) == 1 for before, now in pairwise(order))
    counts = {step.micro_batches for step in told.steps}
    assert counts == {job.micro_batches}
    for name, value in weights.items():
        torch.testing.assert_close(told.weights[name], value, rtol=1e-5, atol=2e-6)
    assert {event.view.resume for event in told.events[1:]} <= {""}, "nothing was done twice"


def run(keyed: dict[int, Choice], first: int, folder: Path, killed: runs.Kill) -> runs.Told:
    plans = {count: choice.plan for count, choice in keyed.items()}
    return runs.run(basis_of(keyed), plans, first, folder, killed, keyed=keyed)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(2)
def test_a_rank_dies_before_any_call_of_a_step_of_either_shape(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyed, calls = made(name, (1, 2), monkeypatch), [0, 0]
    author, _ = unjoined(keyed[2].job)
    noted = runs.counting(lambda who, count: calls.__setitem__(who, max(count, calls[who])))
    check(run(keyed, 2, tmp_path / "whole", noted), author, killed=0)
    shapes = [author.data.of.key_of(author.micro_batches * step) for step in range(STEPS)]
    first = [shapes.index(key) for key in dict.fromkeys(shapes)]
    for step in first:
        for who in (0, 1):
            for call in range(who, calls[who], 3):
                folder = tmp_path / f"{step}.{who}.{call}"
                told = run(keyed, 2, folder, runs.doomed(who, step, call))
                check(told, author, killed=int(told.events[-1].what == "lost"))


def test_two_of_three_ranks_are_lost_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyed = made("in parts", (1, 2, 3), monkeypatch)
    author, _ = unjoined(keyed[3].job)
    told = run(keyed, 3, tmp_path, runs.doomed_all({1: (1, 4), 2: (3, 2)}))
    check(told, author, killed=2)
    assert [len(event.view.members) for event in told.events[-2:]] == [2, 1]


# -- plans that others have made ------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_plans_of_all_shapes_are_read_back_as_the_choice_they_were(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (choice,) = made(name, (2,), monkeypatch).values()
    author, _ = unjoined(choice.job)
    shapes = traced_keys(author, SILENT, ())
    plans = read_key_plans(text_of_key_plans(key_plans(choice)))
    again = choice_of_keys(author, shapes, plans, SILENT)
    for one, other in zip((choice, *choice.others), (again, *again.others), strict=True):
        assert (one.key, one.plan) == (other.key, other.plan)
        assert one.captured.graph.digest == other.captured.graph.digest
        divisions = one.captured.batch.division, other.captured.batch.division
        assert len({each and (each.parts, each.rows) for each in divisions}) == 1
        assert unjoined(one.job)[1] == unjoined(other.job)[1]


def test_plans_of_another_job_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    (choice,) = made("in parts", (2,), monkeypatch).values()
    other = job_of((5, 3), 1, weight=True)
    plans = key_plans(choice)
    with pytest.raises(PlanError, match=r"of another job|is for graph|cannot be"):
        choice_of_keys(other, traced_keys(other, SILENT, ()), plans, SILENT)
    author, _ = unjoined(choice.job)
    shapes = traced_keys(author, SILENT, ())
    with pytest.raises(PlanError, match="1 kinds of steps; those of the job are 2"):
        choice_of_keys(author, shapes, plans[:1], SILENT)
    with pytest.raises(PlanError, match="the plans of several shapes is damaged"):
        read_key_plans("[[1]]")


def test_who_joins_is_told_the_plans_of_all_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyed = made("in parts", (1, 2), monkeypatch)
    plans = {count: choice.plan for count, choice in keyed.items()}
    task = partial(runs.keyed_task, folder=tmp_path)
    own = ElasticRun(basis_of(keyed), task, plans, Begin(), STEPS, tmp_path, b"0", keyed=keyed)
    write_addresses(own.addresses, {})
    known = addresses_in(tmp_path)
    author, _ = unjoined(keyed[2].job)
    found = known.keyed_by(author, traced_keys(author, SILENT, ()), SILENT)
    assert sorted(found) == [1, 2]
    theirs = ElasticRun(basis_of(found), task, known.by_count, Begin(), STEPS, keyed=found)
    view = View(2, 1, text_of(plans[1]), (1,))
    assert RunPilot(own).facts(view) == RunPilot(theirs).facts(view)
    assert json.loads(json.dumps(asdict(known)))["keyed"] == list(known.keyed)
    assert Addresses("", "", {}, (), 1).keyed_by(author, (), SILENT) == {}


def test_a_plan_that_was_not_made_ahead_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyed = made("in parts", (1, 2), monkeypatch)
    plans = {count: choice.plan for count, choice in keyed.items()}
    own = ElasticRun(basis_of(keyed), None, plans, Begin(), STEPS, tmp_path, keyed=keyed)  # type: ignore
    with pytest.raises(PlanError, match="none of those that were made ahead"):
        own.choice_of(plans[2].changed(commits=False))
