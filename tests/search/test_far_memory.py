"""Where memory is short, as much waits in far memory as is needed, and nothing else is better."""

import re
from dataclasses import replace
from functools import cache

import pytest

from penstock.cluster import Cluster
from penstock.errors import PlanError
from penstock.plan import Plan, plan_by_hand
from penstock.search import Fixed, search
from penstock.search.judge import Judge
from penstock.search.recompute import as_needed
from tests.parity.test_far_weights import profile_of, wide
from tests.search.chains import with_costs

PROFILE = {"far_s_per_byte": 1e-9}
WORDS = ("state", "activations", "both", "weights", "all")


@cache
def machine(cap: int, ranks: int, cores: int, *, copies: bool = False) -> Cluster:
    here = Cluster.here(ranks)
    kind = replace(here.devices[0], memory_bytes=cap, copy_engine=copies)
    return replace(here, devices=(kind,), hosts=(replace(here.hosts[0], cores=cores),))


def planned(cap: int, ranks: int = 1, cores: int = 2, **fixed: object) -> Plan:
    profile = with_costs(
        profile_of("wide"), op_s=tuple(1e-5 for _ in wide().graph.nodes), **PROFILE
    )
    asked = Fixed(ranks=ranks, **fixed)
    there = machine(cap, ranks, cores)
    return search(wide().graph, profile, there, micro_batches=4, fixed=asked).plan


def everything(cap: int, cores: int) -> list[float]:
    """Return the seconds of plans with all of one kind in far memory, or repeated, that fit."""
    profile = with_costs(
        profile_of("wide"), op_s=tuple(1e-5 for _ in wide().graph.nodes), **PROFILE
    )
    judge, found = Judge(wide().graph, profile, machine(cap, 1, cores)), []
    for cuts, schedule in (((), "one_f_one_b"), (range(5), "breadth_first")):
        bare = plan_by_hand(wide().graph, cuts, schedule, num_micro_batches=4, num_ranks=1)
        count, needed = bare.num_stages, as_needed(judge, bare)
        plans = [bare.changed(recompute=(True,) * count), *([needed] if needed else [])]
        for word in WORDS:
            away = bare.changed(offload=(word,) * count)
            plans += [away, *([away.changed(beside=True)] if cores > 1 else [])]
        found += [judge.candidate(plan) for plan in plans]
    return [each.step_s for each in found if not each.refused]


@cache
def whole_bytes() -> int:
    return planned(10**9).predicted.peak_bytes[0]


@pytest.mark.parametrize(("cores", "parts"), [(1, (0.4,)), (2, (0.6, 0.3))])
@pytest.mark.sampled(2)
def test_no_all_or_nothing_plan_is_better_and_the_cap_holds(cores, parts):
    whole = whole_bytes()
    for part in parts:
        plan = planned(int(part * whole), cores=cores)
        assert plan.predicted.peak_bytes[0] <= part * whole
        assert plan.predicted.step_s <= min(everything(int(part * whole), cores)) * (1 + 1e-9)
        assert plan.overlap.beside <= (cores > 1)
        (why,) = (each.why for each in plan.decisions if each.what == "offload")
        assert "a rank in place of" in why
    assert plan.far, "the last one has less room than weights, gradients and state take"


def test_copies_run_beside_computes_where_a_device_copies_by_itself():
    cap = int(0.6 * whole_bytes())
    profile = with_costs(
        profile_of("wide"), op_s=tuple(1e-5 for _ in wide().graph.nodes), **PROFILE
    )
    plans = [
        search(wide().graph, profile, there, micro_batches=4, fixed=Fixed(ranks=1)).plan
        for there in (machine(cap, 1, 0, copies=True), machine(cap, 1, 1))
    ]
    assert [plan.overlap.beside for plan in plans] == [True, False]
    assert plans[0].predicted.step_s < plans[1].predicted.step_s


def test_as_much_is_taken_as_is_needed_and_no_more():
    whole = whole_bytes()
    plan = planned(int(0.93 * whole), cores=1)
    profile = with_costs(
        profile_of("wide"), op_s=tuple(1e-5 for _ in wide().graph.nodes), **PROFILE
    )
    judge = Judge(wide().graph, profile, machine(int(0.93 * whole), 1, 1))
    for stage, word in enumerate(plan.offload):
        if word != "none":
            less = tuple("none" if at == stage else each for at, each in enumerate(plan.offload))
            some = any(each != "none" for each in less)
            near = plan.changed(offload=less if some else (), prefetch=0)
            other = judge.candidate(near, as_said=True)
            assert other.refused or other.step_s > plan.predicted.step_s


@pytest.mark.long
def test_several_ranks_and_an_optimizer_that_stays():
    whole = whole_bytes()
    parts = planned(int(0.25 * whole), ranks=2, cores=2, replicas=2)
    assert parts.total_ranks == 2
    assert max(parts.predicted.peak_bytes) <= 0.25 * whole
    stays = planned(int(0.9 * whole), state_stays=True)
    assert not {"state", "both", "weights", "all"} & {*stays.offload}
    with pytest.raises(PlanError, match=r"rank 0 would hold .* of 1.00 KiB, the least") as caught:
        planned(1024)
    allowed, unit = re.search(r"allow ([\d.]+) KiB( or more)", str(caught.value.hint)).groups()
    assert planned(int(1024 * float(allowed))).predicted, unit


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.sampled(2)
def test_what_is_fixed_of_recompute_leaves_the_rest_to_the_search(recompute: bool):
    cap = int(0.4 * whole_bytes())
    plan = planned(cap, recompute=recompute)
    assert plan.predicted.peak_bytes[0] <= cap
    assert set(plan.recompute) == {recompute}
    assert plan.offloads
