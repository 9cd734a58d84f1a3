"""Hosts lost: state that one host alone has is kept on another, where that costs a step little."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from penstock.cluster import Host
from penstock.cluster.order import placed
from penstock.errors import PlanError
from penstock.members.mesh import Mesh
from penstock.members.views import Left
from penstock.members.words import Halt, HeldTensor, View, Where
from penstock.pilot import redundancy
from penstock.pilot.losses import PlanBasis
from penstock.pilot.redundancy import costly_hosts
from penstock.plan import Guarding, Plan
from penstock.plan.lower_plan import lower_plan
from penstock.plan.reshape import Counts, reshaped
from penstock.program.alone import fewest_holders, guarded
from penstock.training.begin import Begin
from penstock.training.elastic_run import ElasticRun, RunPilot
from penstock.training.torchrun import _members, _plan_rank
from tests.members import runs
from tests.members.test_kills import check

TURNS = "dapple(ranks=2-2)"  # both replicas of a stage are neighbours


@pytest.fixture(autouse=True)
def mortal(monkeypatch: pytest.MonkeyPatch) -> None:
    runs.mortal(monkeypatch)


def on_two_hosts(bytes_per_s: float) -> PlanBasis:
    """Return four ranks on two hosts; between them so many bytes a second."""
    ways = runs.ways_of("gpt", "adamw", 4)
    hosts = tuple(Host(name, ways.cluster.devices[0].name, 2) for name in "ab")
    between = replace(ways.cluster.inside, latency_s=1e-6, bytes_per_s=bytes_per_s)
    return replace(ways, cluster=replace(ways.cluster, hosts=hosts, between=between))


def turns(ways: PlanBasis, **options) -> Plan:
    return runs.plan_for(ways, 2, 1, TURNS, **options)


def why(plan: Plan) -> str:
    return next(each.why for each in plan.decisions if each.what == "redundancy")


def kept(plan: Plan) -> Plan:
    """Return the plan with its ranks host by host, the state of each host kept on the other one."""
    return plan.changed(hosts=(), guard=Guarding(1, 2, (0, 1)))


def test_ranks_are_dealt_to_hosts_by_turns_where_that_costs_little() -> None:
    """So that the first generation, too, has a copy of each stage on the other host."""
    ways = on_two_hosts(1e12)
    near = turns(ways)
    assert near.place.hosts == ("a", "b", "a", "b")
    assert near.agreement.guard is None
    assert "and of any host" in why(near)
    assert redundancy.at_risk(near) == ""
    (decision,) = (each for each in near.decisions if each.what == "hosts")
    assert "dealt by turns, so that any host may be lost" in decision.why
    assert near.predicted is not None
    usual = turns(runs.ways_of("gpt", "adamw", 4)).predicted
    assert usual is not None
    assert near.predicted.step_s != usual.step_s  # sums cross hosts, and that is predicted
    there = placed(ways.cluster, near.place.hosts)
    assert [there.host_of(rank).name for rank in range(4)] == ["a", "b", "a", "b"]
    assert [_plan_rank(ways.cluster, near, rank) for rank in range(4)] == [0, 2, 1, 3]
    assert _members(ways.cluster, 4, near) == (0, 2, 1, 3)
    assert Plan.from_text(runs.text_of(near)).place == near.place


def test_replicas_of_one_host_are_kept_on_another_where_that_costs_least(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    far = turns(on_two_hosts(1e6))
    assert (far.agreement.guard, far.place.hosts) == (None, ())
    assert "with a, b the run goes back to its last checkpoint" in why(far)
    assert "a copy on another host would take" in why(far)
    assert "dealt to hosts by turns would take" in why(far)
    assert redundancy.at_risk(far) == f"the plan {why(far)}"  # said before the start
    monkeypatch.setattr(redundancy, "_by_turns", lambda bare, way, cluster, kept: kept)
    near = turns(on_two_hosts(1e12))
    assert near.agreement.guard is not None
    assert near.agreement.guard.shared == (0, 1)
    assert near.agreement.guard.apart == 2
    assert "and of any host" in why(near)
    alone = turns(runs.ways_of("gpt", "adamw", 4))  # on one host nothing can be done
    assert alone.agreement.guard is None


def test_only_the_first_of_the_replicas_gives_what_they_share() -> None:
    ways = on_two_hosts(1e12)
    program = lower_plan(turns(ways), ways.ways[0].captured.graph)
    assert guarded(program, (0, 1)) == [(0,), (), (1,), ()]
    assert guarded(program, ()) == [()] * 4


def test_a_host_with_all_replicas_of_a_stage_may_be_lost(tmp_path: Path) -> None:
    ways = on_two_hosts(1e12)
    plans = {4: kept(turns(ways)), 2: runs.plan_for(ways, 1, 2)}
    told = runs.run(ways, plans, 4, tmp_path, runs.doomed_all({0: (2, 3), 1: (2, 3)}, at_once=True))
    check(told, "gpt", killed=2)
    assert [event.view.resume for event in told.events] == ["start", ""]


def test_a_host_may_be_lost_in_the_first_generation_whose_ranks_are_dealt(tmp_path: Path) -> None:
    ways = on_two_hosts(1e12)
    plans = {4: turns(ways), 2: runs.plan_for(ways, 1, 2)}
    dealt = _members(ways.cluster, 4, plans[4])
    dies = runs.doomed_all({2: (2, 3), 3: (2, 3)}, at_once=True)  # all of host b
    told = runs.run(ways, plans, 4, tmp_path, dies, members=dealt)
    check(told, "gpt", killed=2)
    assert [event.view.resume for event in told.events] == ["start", ""]


def test_how_many_losses_take_state_along_counts_replicas_and_guards() -> None:
    ways = runs.ways_of("gpt", "adamw", 4)
    graph = ways.ways[0].captured.graph

    def fewest(plan: Plan, guard: Guarding | None) -> int:
        return fewest_holders(lower_plan(plan.changed(guard=guard), graph))

    line, grid, pairs = runs.plan_for(ways, 4, 1), runs.plan_for(ways, 2, 2), turns(ways)
    assert (fewest(line, None), fewest(line, Guarding(1))) == (1, 2)
    assert (fewest(grid, None), fewest(pairs, None)) == (2, 2)
    assert fewest(pairs, Guarding(1, 2, (0, 1))) == 3
    assert fewest(pairs, Guarding(1, 2, (0,))) == 2


def test_a_plan_names_stages_that_it_has_and_drops_them_with_other_counts() -> None:
    ways = on_two_hosts(1e12)
    plan = kept(turns(ways))
    with pytest.raises(PlanError, match="guard is of stages 2 of 2"):
        plan.changed(guard=Guarding(1, 2, (2,)))
    assert Plan.from_text(runs.text_of(plan)).agreement.guard == plan.agreement.guard
    graph, line = ways.ways[0].captured.graph, runs.plan_for(ways, 4, 1)
    counts = Counts(line.cuts, line.schedule, 4, (runs.MICRO_BATCHES,))
    assert plan.agreement.guard is not None
    assert reshaped(plan, graph, counts).agreement.guard == plan.agreement.guard._replace(shared=())


def pilot_of(ways: PlanBasis, plans: dict[int, Plan], folder: Path) -> RunPilot:
    return RunPilot(ElasticRun(ways, partial(runs.task_of, folder=folder), plans, Begin(), 9))


def test_who_comes_back_is_placed_so_that_any_host_may_be_lost_again(tmp_path: Path) -> None:
    """Two of one host hold all, as each guards the other; two newcomers of another hold nothing."""
    ways = on_two_hosts(1e12)
    grid, line = runs.plan_for(ways, 2, 2), runs.plan_for(ways, 2, 1)
    pilot = pilot_of(ways, {4: grid, 2: line}, tmp_path)
    named = [HeldTensor(key, "float64", (1,)) for key in pilot._everything()]
    named[0] = named[0]._replace(shape=(9999,))  # one stage is the larger one
    holds, members = {0: named, 1: named}, (0, 1, 8, 9)
    where = {m: Where("ab"[m > 1], 0, "") for m in members}
    view = View(2, 3, runs.text_of(line), (0, 1))
    (option, *_) = pilot._options_for(view, where, members, 3, holds)
    program = lower_plan(grid, ways.ways[0].captured.graph)
    homes = [where[member].host for member in option.members]
    assert costly_hosts(program, homes, program.end.guard) == []
    assert pilot._at_risk(option, where) == ""
    pair = option._replace(plan=line, members=(0, 8))
    assert pilot._at_risk(pair, where) == ""  # each guards the other
    bare = option._replace(plan=line.changed(guard=None), members=(0, 8))
    told = pilot._at_risk(bare, where)
    assert told == "; with a, b the run would go back to its last checkpoint"
    near = dict.fromkeys(members, Where("a", 0, ""))
    assert pilot._at_risk(bare, near) == ""
    (option, *_) = pilot._options_for(view, near, members, 3, holds)
    homes = [where[member].host for member in option.members]
    assert costly_hosts(program, homes, program.end.guard)  # what moves least would not do


def test_ranks_that_are_left_stay_in_the_order_in_which_they_were(tmp_path: Path) -> None:
    """Whatever their numbers are: they have read micro-batches of a step that is done again."""
    ways = runs.ways_of("gpt", "adamw", 3)
    three, two = runs.plan_for(ways, 1, 3), runs.plan_for(ways, 1, 2)
    pilot = pilot_of(ways, {3: three, 2: two}, tmp_path)
    holds = tuple(HeldTensor(key, "float64", (9,)) for key in pilot._everything())
    stopped = {member: Halt(1, 3, holds, {}, None, (5,)) for member in (3, 7)}
    mesh = cast(Mesh, SimpleNamespace(stopped=stopped, lost={5: "died"}, where={}))
    left = Left((3, 7), 3, {5: "died"}, None)
    view = View(1, 0, runs.text_of(three), (7, 5, 3))
    assert pilot.decide(view, left, mesh, (9,)).members == (7, 3, 9)


@pytest.mark.parametrize(("bytes_per_s", "is_priced"), [(1e12, False), (1.0, True)])
def test_rerouting_is_priced_where_moving_takes_longer_than_that(
    bytes_per_s: float, is_priced: bool, tmp_path: Path
) -> None:
    """All wait while it is; what it saves is the moving."""
    ways = runs.ways_of("gpt", "adamw", 4)
    grid, line = runs.plan_for(ways, 2, 2), runs.plan_for(ways, 1, 3)
    pilot = pilot_of(ways, {4: grid, 3: line}, tmp_path)
    pilot._rate = bytes_per_s
    view = View(1, 0, runs.text_of(grid), (0, 1, 2, 3))
    named = [HeldTensor(key, "float64", (9,)) for key in pilot._everything()]
    holds = {0: named[::2], 1: named[1::2], 2: named[::2]}
    options = pilot._options_for(view, {}, (0, 1, 2), 3, holds)
    assert [option.what for option in options] == ["reshape", *["reroute"] * is_priced]
    alone = pilot_of(ways, {4: grid}, tmp_path)
    options = alone._options_for(view, {}, (0, 1, 2), 3, holds)
    assert [option.what for option in options] == ["reroute"]  # there is no other way
