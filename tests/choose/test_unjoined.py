"""Where a joined plan differs, one without joined micro-batches takes its place."""

import itertools
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from penstock.choose.choose import Machines, best
from penstock.choose.settle import Checked, CheckOptions
from penstock.choose.unjoined import unjoined_choice
from penstock.cluster import Cluster
from penstock.errors import RunError
from penstock.examine.examine import Examined
from penstock.graph.trace import capture
from penstock.listener import SILENT
from penstock.pilot.replan import SearchBasis
from penstock.search import Fixed
from penstock.training import torchrun
from penstock.training.begin import Begin
from penstock.training.rendezvous import Rendezvous
from penstock.training.run_asked import JobLearned, RunAsked
from penstock.training.session import Session
from tests.graph.zoo import JOBS


@pytest.fixture(scope="module")
def searched():
    there = Machines(Cluster.here(2))
    fixed = Fixed(ranks=2)
    job = replace(JOBS["blocks"], micro_batches=4)
    found = best(job, fixed, capture(job), there)
    ways = tuple(option.way for option in found.options)
    return there, SearchBasis(ways, fixed, None, 1.0), found


class Pretend(SimpleNamespace):
    """A session of which a test says what it asks for; it notes what it is told as any does."""

    needs_plan, among, knows = Session.needs_plan, Session.among, Session.knows
    divides_unasked = Session.divides_unasked

    def __init__(self, **about):
        super().__init__(**{"asked": RunAsked(), "learned": JobLearned(), **about})

    may_replan_by, runs_on = Session.may_replan_by, Session.runs_on
    was_checked, was_audited = Session.was_checked, Session.was_audited


def test_plan_that_differs_is_made_again_without_joining(searched, tmp_path):
    there, basis, found = searched
    session = Pretend(basis=basis, there=there, folder=tmp_path, listener=SILENT)
    joined = next(o.choice for o in found.options if o.way.joined > 1)
    choice = unjoined_choice(session, joined, Examined(), "the gradient of x differs")
    assert choice.plan.terms.joined == 1
    assert choice.plan.total_ranks == joined.plan.total_ranks
    assert "the gradient of x differs" in str(choice.plan.decisions)
    assert (tmp_path / "plan.json").exists()
    assert unjoined_choice(session, choice, Examined(), "") is None
    assert {way.joined for way in session.basis.ways} == {1}  # one made again joins none either


def asked(searched, folder, **more):
    """Return a session whose plan somebody gave, or that goes on by that of its folder."""
    there, _, found = searched
    first = next(o.way for o in found.options if o.way.joined == 1)
    about = {"there": there, "folder": folder, "listener": SILENT, "fixed": Fixed(), "key": ""}
    return Pretend(job=first.job, basis=None, trace=lambda: first.captured, **about, **more)


def joined_in(searched):
    return next(o.choice for o in searched[2].options if o.way.joined > 1)


def test_a_given_plan_that_differs_gives_way_to_one_of_its_counts(searched, tmp_path):
    session, joined = asked(searched, tmp_path), joined_in(searched)
    plan = unjoined_choice(session, joined, Examined(), "a gradient differs").plan
    assert plan.terms.joined == 1
    for counts in ("total_ranks", "replicas", "num_stages", "job_micro_batches"):
        assert getattr(plan, counts) == getattr(joined.plan, counts)
    assert session.basis is None  # it is not made again


@pytest.mark.parametrize("differs", [(True, False), (True, True)], ids=["joined", "both"])
def test_a_plan_that_is_required_is_tried_unjoined_before_the_run_is_refused(
    searched, tmp_path, differs, monkeypatch
):
    joined, apart = joined_in(searched), unjoined_of(searched)
    tried, begun = [], []

    def prove(choice, *_):
        tried.append(choice.plan.terms.joined)
        return Checked("it differs", "a gradient") if differs[choice is apart] else Checked("equal")

    monkeypatch.setattr("penstock.training.session.unjoined_choice", lambda *_: apart)
    session = Pretend(
        choose=lambda *_: joined,
        prove=prove,
        elastic=False,
        is_strict=lambda: True,
        train_on=lambda choice, *_: begun.append(choice),
    )
    if differs[1]:
        with pytest.raises(RunError, match="it differs"):
            Session._lead_plan(session, joined.captured, Begin(), Examined())
    else:
        Session._lead_plan(session, joined.captured, Begin(), Examined())
        assert begun == [apart]
    assert tried == [joined.plan.terms.joined, 1]


def test_a_difference_is_an_error_at_once_only_where_nothing_is_joined(searched, monkeypatch):
    def proved(planned, key, steps, care, *_):
        return Checked(f"{care.strict}")

    monkeypatch.setattr("penstock.training.session.proved", proved)
    about = {"author": None, "key": "", "num_steps": 4, "listener": SILENT}
    session = Pretend(care=CheckOptions(), is_strict=lambda: True, **about)
    for choice, is_strict in ((joined_in(searched), "False"), (unjoined_of(searched), "True")):
        assert Session.prove(session, choice, Begin(), None, Examined()).words == is_strict


def unjoined_of(searched):
    return next(o.choice for o in searched[2].options if o.way.joined == 1)


@pytest.mark.parametrize("is_right", [True, False])
def test_all_ranks_of_torchrun_go_on_by_the_plan_that_joins_none(
    searched, tmp_path, monkeypatch, is_right
):
    """Rank 0 alone proves; the others take the second plan from it, or end."""
    joined, apart, store = joined_in(searched), unjoined_of(searched), dist.HashStore()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("penstock.training.rendezvous.on_one_host", lambda: True)
    found, ends, sessions = [None, None], [], []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        ends.append(Rendezvous(store))
        one = asked(searched, tmp_path)
        one.knows(None if rank else Examined())
        one.author, one.num_steps = one.job, 4
        one.windows = lambda *_: SimpleNamespace(programs=())
        sessions.append(one)

    def prove(start, choice, *_):
        differs = choice.plan.terms.joined != 1 or not is_right
        return Checked("it differs", "a gradient") if differs else Checked("equal")

    monkeypatch.setattr(torchrun, "_led", lambda *_: joined)
    monkeypatch.setattr(torchrun, "_prove", prove)
    monkeypatch.setattr(torchrun, "unjoined_choice", lambda *_: apart)

    def live(rank):
        about = sessions[rank], ends[rank], sessions[rank].trace(), Begin(), searched[0].cluster
        try:
            start = torchrun._Outset(*about, itertools.count())
            found[rank] = torchrun._settled(start)[0].plan
        except RunError as problem:
            ends[rank].fail(problem)
            found[rank] = problem

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    if is_right:
        assert [plan.terms.joined for plan in found] == [1, 1]
        assert found[0].schedule == found[1].schedule
    else:
        assert all("it differs" in str(problem) for problem in found)
