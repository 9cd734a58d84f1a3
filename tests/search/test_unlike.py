"""Search on unlike devices against every order, every cut; memory of each device; reasons."""

import itertools
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster import Cluster, DeviceKind, Host, HostPair, Link
from penstock.cluster.order import host_orders
from penstock.errors import ClusterError, PlanError, ProfileError
from penstock.graph.graph import Graph
from penstock.plan import plan_by_hand
from penstock.plan.of_plan import lower
from penstock.profile import Profile
from penstock.search import Fixed, JobNeeds, evaluate, search
from penstock.search.balance import balanced_cuts
from penstock.search.candidate import Objective
from penstock.search.field import Effort
from penstock.search.judge import Judge
from penstock.search.polish import polish, recut
from penstock.simulate.of_program import simulate
from penstock.timeline import step_s
from tests.draws import examples
from tests.search.chains import chain, chains, profile_of, with_costs

NEAR, FAR = Link(0.01, 200.0, overhead_s=0.01), Link(0.3, 40.0, overhead_s=0.01)


def times(profile: Profile, slower: float, kind: str) -> Profile:
    return replace(profile, op_s=tuple(s * slower for s in profile.op_s), kind=kind)


def unlike(*memory: int, regions: str = "", usd: tuple[float, ...] = (0, 0, 0)) -> Cluster:
    """Return hosts of one device each: "a", "b", ..., of a kind of its own with so much memory."""
    rows = list(zip("abc", memory, usd, regions or "x" * len(memory), strict=False))
    kinds = tuple(DeviceKind(n, size, (), 1.0, price) for n, size, price, _ in rows)
    hosts = tuple(Host(n, n, 1, region) for n, _, _, region in rows)
    return Cluster(kinds, hosts, NEAR, NEAR, FAR)


def everything(
    graph: Graph, profiles: list[Profile], cluster: Cluster, count: int, schedule: str
) -> list[float]:
    """Return the seconds of every plan that fits, on 2 ranks or more: every order and cut."""
    found = []
    names = [host.name for host in cluster.hosts]
    for ranks in range(2, len(names) + 1):
        for hosts in itertools.permutations(names, ranks):
            for cuts in itertools.combinations(range(len(graph.cut_points)), ranks - 1):
                plan = plan_by_hand(graph, cuts, schedule, num_micro_batches=count)
                plan = plan.changed(hosts=hosts, early=4)  # as between hosts
                made, _ = evaluate(graph, profiles, cluster, plan)
                kinds = {kind.name: kind.memory_bytes for kind in cluster.devices}
                memory = {host.name: kinds[host.device] for host in cluster.hosts}
                if all(p <= memory[h] for p, h in zip(made.peak_bytes, hosts, strict=True)):
                    found.append(made.step_s)
    return found


@examples(10)
@given(
    chains(3, 5),
    st.sampled_from([(1, 2), (2, 1), (1, 4), (1, 2, 3), (3, 1, 1), (1, 3, 2)]),
    st.sampled_from(["one_f_one_b", "gpipe"]),
    st.sampled_from([2, 6]),
    st.sampled_from(["xxx", "xyx", "xxy"]),
    st.sampled_from([10**9, 600, 300]),
)
def test_plan_is_the_best_of_all_orders_and_cuts(
    pair, slower, schedule: str, count: int, regions: str, memory: int
) -> None:
    graph, profile = pair
    profiles = [times(profile, k, name) for k, name in zip(slower, "abc", strict=False)]
    cluster = unlike(memory, *(10**9,) * (len(slower) - 1), regions=regions)
    best = min(everything(graph, profiles, cluster, count, schedule), default=None)
    fixed = Fixed(replicas=1, schedule=schedule, recompute=False)
    if best is None:
        with pytest.raises(PlanError, match="no plan is possible"):
            search(graph, profiles, cluster, micro_batches=count, fixed=fixed)
        return
    for prune in (True, False):
        plan, *_ = search(graph, profiles, cluster, micro_batches=count, prune=prune, fixed=fixed)
        assert plan.predicted.step_s == pytest.approx(best)
        made, _ = evaluate(graph, profiles, cluster, plan)
        assert made.step_s == plan.predicted.step_s


def test_device_that_is_twice_as_fast_gets_about_twice_the_layers() -> None:
    graph = chain([1] * 30, [1] * 30)
    profile = profile_of(graph, [1] * 30)
    profiles = [times(profile, 2, "a"), times(profile, 1, "b")]
    fixed = Fixed(schedule="one_f_one_b", ranks=2)
    plan, *_ = search(graph, profiles, unlike(10**9, 10**9), micro_batches=8, fixed=fixed)
    first = plan.cuts[0] + 1
    order = plan.place.hosts or ("a", "b")
    shares = {order[0]: first, order[1]: 30 - first}
    assert 1.7 <= shares["b"] / shares["a"] <= 2.3


def test_slow_device_is_left_idle_where_it_does_not_help() -> None:
    graph = chain([1, 1], [1, 1])
    profile = profile_of(graph, [1, 1])
    profiles = [times(profile, 100, "a"), times(profile, 1, "b")]
    plan, *_ = search(graph, profiles, unlike(10**9, 10**9), micro_batches=4)
    assert (plan.place.hosts, plan.total_ranks) == (("b",), 1)
    by_name = {decision.what: decision for decision in plan.decisions}
    assert by_name["hosts"].value == "b (rank 0 on b), idle a (1 a)"
    assert "on a" in by_name["hosts"].why


def test_cheap_device_is_taken_where_cost_is_the_objective() -> None:
    graph = chain([1, 1], [1, 1])
    profile = profile_of(graph, [1, 1])
    profiles = [times(profile, 1, "a"), times(profile, 2, "b")]
    cluster = unlike(10**9, 10**9, usd=(10.0, 1.0))
    plan, *_ = search(graph, profiles, cluster, micro_batches=4, objective="cost")
    assert plan.place.hosts == ("b",)
    assert plan.predicted.usd == pytest.approx(plan.predicted.step_s / 3600)
    by_name = {decision.what: decision for decision in plan.decisions}
    assert " usd, " in by_name["hosts"].why


def test_each_device_is_held_to_its_own_memory() -> None:
    graph = chain([50] * 6, [1] * 6)
    profile = profile_of(graph, [1] * 6)
    profiles = [times(profile, 1, "a"), times(profile, 1, "b")]
    fixed = Fixed(schedule="one_f_one_b", ranks=2, recompute=False)
    for small in (170, 270, 370):
        cluster = unlike(small, 10**9)
        plan, *_ = search(graph, profiles, cluster, micro_batches=4, fixed=fixed)
        order = plan.place.hosts or ("a", "b")
        assert plan.predicted.peak_bytes[order.index("a")] <= small
    with pytest.raises(PlanError, match=r"rank \d would hold"):
        search(graph, profiles, unlike(90, 90), micro_batches=4, fixed=fixed)


def test_rank_is_held_to_the_memory_of_the_host_that_the_plan_puts_it_on() -> None:
    graph = chain([50, 50], [1, 1])
    judge = Judge(graph, profile_of(graph, [1, 1]), unlike(10, 10**9))
    plan = plan_by_hand(graph, (0,), "gpipe", num_micro_batches=2)
    refused = [judge.candidate(plan.changed(hosts=hosts)).refused for hosts in ((), ("b", "a"))]
    assert [why[:6] for why in refused] == ["rank 0", "rank 1"]


def test_plan_that_does_not_fit_anywhere_near_is_moved_until_it_does() -> None:
    graph = chain([50] * 68, [1] * 68)
    profile = profile_of(graph, [1] * 68)
    profiles = [times(profile, 1, "a"), times(profile, 2, "b"), times(profile, 2, "c")]
    fixed = Fixed(schedule="one_f_one_b", ranks=3, recompute=False)
    cluster = unlike(900, 10**9, 10**9)
    plan, *_ = search(graph, profiles, cluster, micro_batches=4, fixed=fixed)
    order = plan.place.hosts or ("a", "b", "c")
    assert plan.predicted.peak_bytes[order.index("a")] <= 900


def test_alike_devices_of_two_names_get_the_plan_of_one_kind() -> None:
    graph = chain([3, 4, 5, 6], [2, 3, 1, 2])
    profile = profile_of(graph, [1, 2, 1, 3])
    kind = DeviceKind("a", 10**9, (), 1.0)
    hosts = (Host("h", "a", 1), Host("i", "a", 1))
    one = Cluster((kind,), hosts, NEAR, NEAR, FAR)
    two = Cluster(
        (kind, replace(kind, name="b")), (hosts[0], replace(hosts[1], device="b")), NEAR, NEAR
    )
    fixed = Fixed(schedule="one_f_one_b", ranks=2)
    alike, *_ = search(graph, profile, one, micro_batches=4, fixed=fixed)
    other, *_ = search(graph, profile, two, micro_batches=4, fixed=fixed)
    assert (other.cuts, other.place.hosts, other.predicted) == (alike.cuts, (), alike.predicted)


def test_slow_link_is_crossed_once_and_where_few_bytes_cross() -> None:
    graph = chain([1] * 4, [9, 1, 9, 9])
    profile = profile_of(graph, [1] * 4)
    kinds = (DeviceKind("a", 10**9, (), 1.0),)
    hosts = tuple(Host(f"h{k}", "a", 1, region) for k, region in enumerate("xyxy"))
    cluster = Cluster(kinds, hosts, NEAR, Link(0.0, 1e6), Link(0.2, 5.0))
    fixed = Fixed(schedule="one_f_one_b", ranks=4, replicas=1)
    plan, *_ = search(graph, profile, cluster, micro_batches=8, fixed=fixed)
    assert plan.place.hosts in (("h0", "h2", "h1", "h3"), ("h1", "h3", "h0", "h2"))


def test_seconds_rest_on_what_the_decision_says() -> None:
    graph = chain([1, 1], [1, 1])
    profile = profile_of(graph, [1, 1])
    profiles = [with_costs(times(profile, 2, "a"), how="measured"), times(profile, 1, "b")]
    plan, *_ = search(graph, profiles, unlike(10**9, 10**9), micro_batches=4)
    (seconds,) = [d for d in plan.decisions if d.what == "seconds"]
    assert seconds.value == "a measured, b estimated"
    assert seconds.why == "a micro-batch: 10.0 s on a, 5.00 s on b"


def test_device_without_a_profile_is_refused_by_name() -> None:
    graph = chain([1, 1], [1, 1])
    profile = times(profile_of(graph, [1, 1]), 1, "a")
    with pytest.raises(ProfileError, match='no profile is of device "b"; there are profiles of a'):
        search(graph, profile, unlike(10**9, 10**9), micro_batches=4)


def test_program_of_a_plan_is_simulated_on_the_hosts_that_the_plan_names() -> None:
    graph = chain([5, 5, 5], [1, 1, 1])
    profile = profile_of(graph, [1, 1, 1])
    profiles = [times(profile, 3, "a"), times(profile, 1, "b")]
    cluster = unlike(10**9, 10**9)
    plan = plan_by_hand(graph, (0,), "gpipe", num_micro_batches=4)
    for hosts in ((), ("a", "b"), ("b", "a"), ("b",)):
        there = plan.changed(hosts=hosts)
        made, _ = evaluate(graph, profiles, cluster, there)
        again = simulate(lower(there, graph), profiles, cluster)
        assert step_s(again) == made.step_s
    with pytest.raises(ClusterError, match='"z"'):
        evaluate(graph, profiles, cluster, plan.changed(hosts=("z",)))
    with pytest.raises(ProfileError, match="2 profiles, but no cluster"):
        simulate(lower(plan, graph), profiles)


def shown_plan() -> str:
    graph = chain([3, 4, 5, 6], [2, 3, 1, 2])
    p = profile_of(graph, [1, 2, 1, 3])
    ps = [times(p, k, n) for k, n in ((1, "a"), (2, "b"), (2, "c"))]
    machines = unlike(10**9, 10**9, 10**9, regions="xyx")
    return str(search(graph, ps, machines, micro_batches=2)[0])


def test_plan_does_not_depend_on_the_hash_seed() -> None:
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    program = "from tests.search.test_unlike import shown_plan; print(shown_plan())"
    there = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert there == shown_plan() + "\n"


@pytest.mark.parametrize(
    ("slower", "count"), [((3, 1), 8), ((1, 1), 8), ((1, 4, 2), 9), ((1, 1, 1), 8)]
)
@pytest.mark.sampled(2)
def test_replicas_share_a_step_as_the_best_of_all_shares(slower, count: int) -> None:
    """Those on faster devices take more; where a step cannot be divided, some take one more."""
    graph = chain([1] * 3, [1] * 3)
    profile = profile_of(graph, [1] * 3)
    profiles = [times(profile, k, name) for k, name in zip(slower, "abc", strict=False)]
    cluster, replicas = unlike(*(10**9,) * len(slower)), len(slower)
    fixed = Fixed(replicas=replicas, ranks=replicas)
    plan, *_ = search(graph, profiles, cluster, micro_batches=count, fixed=fixed)
    shares = [s for s in itertools.product(range(1, count), repeat=replicas) if sum(s) == count]
    ways = [
        plan.changed(shares=s, num_micro_batches=max(s), hosts=plan.place.hosts) for s in shares
    ]
    found = {way.grid.shares: evaluate(graph, profiles, cluster, way)[0].step_s for way in ways}
    assert plan.step_micro_batches == count
    assert found[plan.grid.shares] == pytest.approx(min(found.values()))
    reasons = {decision.what: decision for decision in plan.decisions}["micro-batches"]
    assert reasons.value == plan.share_words
    assert ("faster devices take more" in reasons.why) == (len(set(slower)) > 1)


# -- links of their own ---------------------------------------------------------------------------


def linked(speeds: dict[tuple[int, int], int]) -> Cluster:
    """Return hosts of one device of one kind, with bytes per second from each to each other."""
    names = sorted({a for pair in speeds for a in pair})
    kind = DeviceKind("d", 10**9, (), 1.0)
    pairs = tuple(HostPair(str(a), str(b), 0.01, speed) for (a, b), speed in speeds.items())
    return Cluster((kind,), tuple(Host(str(name), "d", 1) for name in names), pairs=pairs)


@st.composite
def matrices(draw: st.DrawFn, count: int) -> Cluster:
    speeds = st.sampled_from([2, 5, 20, 200])
    return linked({pair: draw(speeds) for pair in itertools.permutations(range(count), 2)})


@examples(4)
@given(chains(3, 5), matrices(3), st.integers(2, 4))
def test_any_links_are_planned_for(pair, cluster: Cluster, count: int) -> None:
    """No slower than 1F1B and GPipe on hosts as listed; near the best of all orders and cuts."""
    graph, profile = pair
    fixed = Fixed(replicas=1)
    plan, *_ = search(graph, profile, cluster, micro_batches=count, fixed=fixed)
    ours = plan.predicted.step_s
    for schedule, ranks in itertools.product(("one_f_one_b", "gpipe"), (1, 2, 3)):
        cuts = balanced_cuts(graph, profile.op_s, ranks)
        naive = plan_by_hand(graph, cuts, schedule, num_micro_batches=count)
        made, _ = evaluate(graph, profile, cluster, naive.changed(early=4 if ranks > 1 else 0))
        assert ours <= made.step_s * (1 + 1e-9)
    rows = (everything(graph, [profile], cluster, count, s) for s in ("one_f_one_b", "gpipe"))
    assert ours <= 1.1 * min(itertools.chain.from_iterable(rows))


def test_hosts_are_put_where_slow_links_are_crossed_once() -> None:
    """Two groups of three, fast inside, listed by turns: the search puts each together."""
    groups = {0: "even", 1: "odd"}
    speeds = {
        (a, b): 200 if groups[a % 2] == groups[b % 2] else 5
        for a, b in itertools.permutations(range(6), 2)
    }
    cluster = linked(speeds)
    assert ("0", "2", "4", "1", "3", "5") in host_orders(cluster)
    graph = chain([1] * 6, [20] * 6)
    fixed = Fixed(ranks=6, replicas=1, stages=6, schedule="list_schedule")
    plan, found, *_ = search(
        graph, profile_of(graph, [1] * 6), cluster, micro_batches=4, fixed=fixed
    )
    crossed = sum(int(a) % 2 != int(b) % 2 for a, b in itertools.pairwise(plan.place.hosts))
    assert crossed == 1
    listed = min(c.step_s for c in found if not c.plan.place.hosts)
    assert plan.predicted.step_s < 0.6 * listed
    asked = plan.schedule.seconds
    slow = asked.there_s.index(max(asked.there_s))
    assert (slow, asked.there_s[0] < asked.there_s[slow]) == (2, True)


def test_sums_of_replicas_are_minded_by_a_list_schedule() -> None:
    graph = chain([100, 1, 1], [1, 1, 1])
    fixed = Fixed(replicas=2, stages=2, schedule="list_schedule", needs=JobNeeds(state_stays=True))
    cluster = linked(dict.fromkeys(itertools.permutations(range(4), 2), 20))
    plan, *_ = search(graph, profile_of(graph, [1] * 3), cluster, micro_batches=4, fixed=fixed)
    sums = plan.schedule.seconds.sums_s
    first = 100 + plan.cuts[0]
    expected = [2 * (0.01 + size / 2 / 20) for size in (first, 102 - first)]
    assert sums == pytest.approx(expected, rel=0.01)


objectives: st.SearchStrategy[Objective] = st.sampled_from(["time", "cost", "memory"])


@examples(10)
@given(chains(3, 6), st.sampled_from(["one_f_one_b", "zb_h1"]), st.integers(1, 4), objectives)
def test_cuts_that_bounds_rule_out_are_no_better(
    pair, schedule: str, count: int, objective: Objective
) -> None:
    graph, profile = pair
    profiles = [times(profile, 1.0, "a"), times(profile, 2.5, "b")]
    judge = Judge(graph, profiles, unlike(10**9, 10**9, usd=(3.0, 1.0, 0.0)))
    plan = plan_by_hand(graph, (0,), schedule, num_micro_batches=count)
    plan = plan.changed(recompute=(True, True))
    for start in (judge.candidate(plan), judge.candidate(plan.changed(hosts=("b", "a")))):
        for change in (polish, recut):
            pruned, whole = (
                change(judge, start, objective, Effort(prune=prune)) for prune in (True, False)
            )
            assert pruned == whole
