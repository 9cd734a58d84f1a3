"""Search against all its candidates, worked out again; wishes, memory, reasons."""

import inspect
import itertools
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster import Cluster, Link
from penstock.errors import PlanError, ProfileError, ScheduleError
from penstock.graph.graph import Graph
from penstock.plan import Plan, Prediction, plan_by_hand
from penstock.profile import Profile
from penstock.schedule import SCHEDULES, Builder, find, one_f_one_b
from penstock.schedule.layer_pipe import layer_pipe
from penstock.schedule.recipe import name_of
from penstock.search import Candidate, Fixed, JobNeeds, evaluate, search
from penstock.search.balance import balanced_cuts, balanced_cuts_on
from penstock.search.judge import Judge
from penstock.search.one_plan import search as search_one
from penstock.search.search import SearchResult
from penstock.search.shapes import _divided
from penstock.search.shapes import shapes as all_shapes
from penstock.search.simplest import ERROR
from tests.draws import examples
from tests.search.chains import (
    SIX,
    SIX_PROFILE,
    SLOW,
    chain,
    chains,
    cluster_of,
    figures,
    profile_of,
)

TRAINING = [
    make
    for make in SCHEDULES
    if make.__name__ != "forward_only" and "num_steps" not in inspect.signature(make).parameters
]

micro_batches = st.sampled_from([1, 2, 4, 6])


def shapes(graph: Graph, ranks: int, count: int) -> list[tuple[int, int, int, str, int]]:
    """Return every (replicas, ranks of a pipeline, stages, schedule, micro-batches) there is."""
    found = []
    for replicas, depth in itertools.product(range(1, ranks + 1), repeat=2):
        if replicas * depth > ranks or count < replicas:
            continue
        shares = {count // replicas, -(-count // replicas)}
        for make in TRAINING if depth > 1 else (one_f_one_b,):  # alone, all orders are the same
            several = "num_ranks" in inspect.signature(make).parameters
            counts = [2 * depth, 3 * depth] if several else [depth]
            for stages in counts + [depth] * (make.__name__ == "list_schedule"):
                built = [builds(make, stages, share, depth) for share in shares]
                if stages <= len(graph.cut_points) + 1 and all(built):
                    found.append((replicas, depth, stages, make.__name__, max(shares)))
        for stages in {depth + 1, 2 * depth} if depth > 1 else ():
            made = [layer_pipe(stages, share, processors=depth).num_ranks for share in shares]
            if stages <= len(graph.cut_points) + 1 and {*made} == {depth}:
                name = f"layer_pipe(processors={depth})"
                found.append((replicas, depth, stages, name, max(shares)))
        for ways in on_several(depth):
            if len(ways) <= len(graph.cut_points) + 1 and max(ways) <= min(shares):
                for policy in "AB":
                    name = f"dapple(policy={policy}, ranks={'-'.join(map(str, ways))})"
                    found.append((replicas, depth, len(ways), name, max(shares)))
    return found


def on_several(ranks: int) -> list[tuple[int, ...]]:
    """Return the numbers of ranks of two stages or more, one of which has several."""
    rows = (itertools.product(range(1, ranks), repeat=count) for count in range(2, ranks))
    return [row for row in itertools.chain(*rows) if sum(row) == ranks]


def builds(make: Builder, stages: int, count: int, ranks: int) -> bool:
    """Return whether a schedule puts so many stages on so many ranks, and trains."""
    several = "num_ranks" in inspect.signature(make).parameters
    if stages < (ranks if several else 1):
        return False
    try:
        made = make(stages, count, **({"num_ranks": ranks} if several else {}))
    except ScheduleError:
        return False
    return made.num_ranks == ranks and make.__name__ != "forward_only"


def shape_of(plan: Plan) -> tuple[int, int, int, str, int]:
    name = re.sub(", work=[0-9-]+", "", name_of(plan.schedule))
    return (plan.replicas, plan.num_ranks, plan.num_stages, name, plan.num_micro_batches)


WHOLE = Fixed(needs=JobNeeds(state_stays=True))  # no replica divides what it has


@examples(10)
@given(chains(2, 5), st.integers(1, 3), micro_batches)
def test_every_shape_is_tried_with_and_without_recompute(pair, ranks: int, count: int) -> None:
    graph, profile = pair
    cluster = cluster_of(ranks, link=SLOW)
    _, found, *_ = search(graph, profile, cluster, micro_batches=count, prune=False)
    expected = [*itertools.product(shapes(graph, ranks, count), (False, True))]
    simulated = found[-len(expected) :]  # before them, the best ones polished
    tried = [(shape_of(c.plan), c.plan.recompute[0]) for c in simulated]
    assert sorted(tried) == sorted(expected)
    for candidate in simulated:
        ranks_of = candidate.plan.schedule.name.partition("ranks=")[2].rstrip(")")
        parts = [1 / int(word) for word in ranks_of.split("-") if word]
        on = ((0,),) * candidate.plan.num_stages
        cuts = balanced_cuts_on(graph, [profile.op_s], on, parts)
        assert candidate.plan.cuts == cuts


@examples(10)
@given(chains(2, 5), st.integers(1, 3), micro_batches, st.sampled_from(["time", "cost", "memory"]))
def test_best_is_no_worse_than_any_candidate_and_its_figures_are_its_simulation(
    pair, ranks: int, count: int, objective
) -> None:
    graph, profile = pair
    cluster = cluster_of(ranks, link=SLOW, usd_per_hour=3.0)
    fixed = {"micro_batches": count, "objective": objective, "prune": False}
    plan, found, *_ = search(graph, profile, cluster, **fixed)
    assert found[0].score(objective) == min(c.score(objective) for c in found)
    assert plan == replace(found[0].plan, decisions=plan.decisions, predicted=plan.predicted)
    for candidate in found:
        again, timeline = evaluate(graph, profile, cluster, candidate.plan)
        assert again == candidate
        assert timeline.num_ranks == candidate.plan.total_ranks
        usd = 3.0 / 3600 * candidate.plan.total_ranks * candidate.step_s
        assert candidate.usd == pytest.approx(usd)
    expected = Prediction(found[0].step_s, found[0].peak_bytes, found[0].usd)
    assert plan.predicted is not None
    assert replace(plan.predicted, tried=()) == expected


@examples(5)
@given(chains(2, 5), st.integers(2, 3), micro_batches)
def test_best_is_never_better_than_brute_force_and_no_neighbour_is_better(
    pair, ranks: int, count: int
) -> None:
    graph, profile = pair
    cluster = cluster_of(ranks, link=SLOW)
    judge = Judge(graph, profile, cluster)

    def seconds(shape, cuts, recompute: bool) -> float:
        replicas, depth, stages, name, number = shape
        plan = plan_by_hand(
            graph,
            cuts,
            name,
            num_micro_batches=number,
            num_ranks=depth,
            replicas=replicas,
            recompute=(recompute,) * stages,
        )
        return min(judge.candidate(plan, as_said=told).step_s for told in (False, True))

    plan, *_ = search(graph, profile, cluster, micro_batches=count, fixed=WHOLE)
    points = range(len(graph.cut_points))
    everything = [
        seconds(shape, cuts, recompute)
        for shape in shapes(graph, ranks, count)
        for cuts in itertools.combinations(points, shape[2] - 1)
        for recompute in (False, True)
    ]
    best = plan.predicted.step_s
    assert best >= min(everything)
    for at, by in itertools.product(range(len(plan.cuts)), (-1, 1)):
        cuts = [*plan.cuts[:at], plan.cuts[at] + by, *plan.cuts[at + 1 :]]
        if cuts == sorted(set(cuts)) and cuts[0] >= 0 and cuts[-1] < len(points):
            assert seconds(shape_of(plan), cuts, plan.recompute[0]) >= best


@examples(8)
@given(
    chains(2, 5),
    st.integers(1, 4),
    micro_batches,
    st.sampled_from(["time", "cost", "memory"]),
    st.sampled_from([SLOW, Link(0.0, 1e12), Link(2.0, 1e12)]),
    st.booleans(),
    st.sampled_from([10**9, 400, 300, 200]),
)
def test_plan_and_its_reasons_are_those_of_simulating_everything(  # noqa: PLR0913 - drawn
    pair, ranks: int, count: int, objective, link: Link, priced: bool, memory_bytes: int
) -> None:
    graph, profile = pair
    usd_per_hour = 3.0 * priced
    cluster = cluster_of(ranks, link=link, usd_per_hour=usd_per_hour, memory_bytes=memory_bytes)

    def found(prune: bool) -> SearchResult | None:
        try:
            return search(
                graph,
                profile,
                cluster,
                micro_batches=count,
                objective=objective,
                prune=prune,
                clip=True,
                with_front=True,
            )
        except PlanError:
            return None

    one, two = found(True), found(False)
    assert (one is None) == (two is None)
    if one is not None and two is not None:
        assert one.plan == two.plan
        assert set(one.candidates) <= set(two.candidates)
        assert list(map(figures, one.front)) == list(map(figures, two.front))


def test_what_cannot_be_the_best_is_not_simulated() -> None:
    found = [
        search(SIX, SIX_PROFILE, cluster_of(3), micro_batches=6, prune=prune)[1]
        for prune in (True, False)
    ]
    assert 2 * len(found[0]) < len(found[1])


def polished(graph: Graph, profile: Profile, cluster: Cluster, start: Candidate) -> Candidate:
    """Return `start` with one cut after the other moved, as long as the step gets shorter."""
    points, best = len(graph.cut_points), start
    moves = itertools.product(range(len(start.plan.cuts)), (-1, 1))
    for at, by in moves:
        cuts = [*best.plan.cuts[:at], best.plan.cuts[at] + by, *best.plan.cuts[at + 1 :]]
        if cuts == sorted(set(cuts)) and cuts[0] >= 0 and cuts[-1] < points:
            names = tuple(graph.cut_points[cut].name for cut in cuts)
            plan = best.plan.changed(cuts=tuple(cuts), cut_names=names)
            other = evaluate(graph, profile, cluster, plan)[0]
            if other.score("time") < best.score("time"):
                return polished(graph, profile, cluster, other)
    return best


@examples(5)
@given(chains(2, 5), st.integers(1, 3), micro_batches)
def test_alike_devices_get_the_best_of_balanced_cuts_polished(pair, ranks: int, count: int) -> None:
    graph, profile = pair
    cluster = cluster_of(ranks, link=SLOW)
    everything = []
    for replicas, depth, stages, name, number in shapes(graph, ranks, count):
        for recompute in (False, True):
            plan = plan_by_hand(
                graph,
                balanced_cuts(graph, profile.op_s, stages),
                name,
                num_micro_batches=number,
                num_ranks=depth,
                replicas=replicas,
                recompute=(recompute,) * stages,
            )
            everything.append(evaluate(graph, profile, cluster, plan)[0])
    ranked = sorted(everything, key=lambda c: c.score("time"))
    three = (polished(graph, profile, cluster, c) for c in ranked[:3])
    best = min(c.score("time") for c in three)
    plan, *_ = search(graph, profile, cluster, micro_batches=count, fixed=WHOLE)
    assert (plan.predicted.step_s, max(plan.predicted.peak_bytes)) == best
    assert plan.place.hosts == ()


def test_search_is_deterministic() -> None:
    cluster = cluster_of(3, link=SLOW)
    one, two = (search(SIX, SIX_PROFILE, cluster, micro_batches=6) for _ in range(2))
    assert one == two


def test_more_ranks_never_make_the_best_slower() -> None:
    best = [
        search(SIX, SIX_PROFILE, cluster_of(n, link=SLOW), micro_batches=6)[0].predicted.step_s
        for n in (1, 2, 3)
    ]
    assert best == sorted(best, reverse=True)
    assert best[0] == 9 * 3 * 6 - 6  # F and both halves of B, but no gradient for the batch


# -- by hand ------------------------------------------------------------------------------------


def test_free_links_and_equal_layers_give_replicas() -> None:
    graph = chain([1, 1], [1, 1])
    plan, *_ = search(graph, profile_of(graph, [1, 1]), cluster_of(2), micro_batches=4)
    assert (plan.replicas, plan.num_stages) == (2, 1)
    assert plan.predicted.step_s == pytest.approx(2 * 5)


def test_expensive_sums_of_gradients_give_a_pipeline() -> None:
    graph = chain([1000, 1000], [1, 1])
    cluster = cluster_of(2, link=Link(0.0, 100.0))
    plan, *_ = search(graph, profile_of(graph, [1, 1]), cluster, micro_batches=8)
    assert (plan.replicas, plan.num_stages) == (1, 2)


def test_one_micro_batch_cannot_be_shared_by_replicas() -> None:
    plan, found, *_ = search(SIX, SIX_PROFILE, cluster_of(2), micro_batches=1)
    assert all(c.plan.replicas == 1 for c in found)
    assert plan.num_micro_batches == 1


def test_step_of_an_asynchronous_schedule_is_what_one_more_step_adds() -> None:
    graph = chain([1, 1, 1], [1, 1, 1])
    profile = profile_of(graph, [1, 1, 1])
    fixed = Fixed(schedule="double_buffered", ranks=3, stages=3)
    plan, *_ = search(graph, profile, cluster_of(3), micro_batches=4, fixed=fixed)
    assert plan.predicted.step_s == pytest.approx(4 * 3)  # no bubble between steps
    _, timeline = evaluate(graph, profile, cluster_of(3), plan)
    assert {span.micro_batch for span in timeline.spans if span.kind == "F"} == set(range(8 * 4))


def test_round_robin_divides_ranks_among_stages_as_is_best() -> None:
    """Layers take 4 s and 3 s: the first stage gets two of three ranks, the other never waits."""
    graph = chain([1, 1], [1, 1])
    profile, cluster = profile_of(graph, [2, 1]), cluster_of(3)
    fixed = Fixed(schedule="round_robin", ranks=3, stages=2)
    plan, found, *_ = search(graph, profile, cluster, micro_batches=1, fixed=fixed)
    assert name_of(plan.schedule) == "round_robin(ranks=2-1)"
    (said,) = (each for each in plan.decisions if each.what == "schedule")
    assert (said.by, said.why[:16]) == ("search", "best alternative")
    assert plan.predicted.step_s == pytest.approx(3)
    assert {name_of(c.plan.schedule) for c in found} == {
        "round_robin(ranks=2-1)",
        "round_robin(ranks=1-2)",
    }
    said = replace(fixed, schedule="round_robin(ranks=1-2)")
    other, *_ = search(graph, profile, cluster, micro_batches=1, fixed=said)
    assert other.predicted.step_s == pytest.approx(4)


def test_ranks_of_stages_that_are_not_there_are_asked_for() -> None:
    fixed = Fixed(schedule="round_robin(ranks=1-2)")
    with pytest.raises(PlanError, match="no plan fits schedule") as caught:
        search(SIX, SIX_PROFILE, cluster_of(2), micro_batches=4, fixed=fixed)
    assert caught.value.hint == "round_robin(ranks=1-2) puts 2 stages on 3 ranks: give ranks=3"


@pytest.mark.parametrize(("ranks", "ways"), [(3, 4), (6, 32), (7, 22)])
def test_ranks_are_divided_in_every_way_or_one_stage_gets_more(ranks: int, ways: int) -> None:
    found = list(_divided(ranks, ranks))
    assert len({*found}) == len(found) == ways
    assert {sum(own) for own in found} == {ranks}


@pytest.mark.parametrize(
    ("layers", "ranks", "micro_batches", "cuts", "step_s"),
    [
        (4, "2-1", 2, (2,), 8),  # layers of 2, 3, 3 and 3 s: two ranks do 8 s, one 3 s
        (1, "3", 1, (), 2 / 3),  # a window is of whole rounds
    ],
)
def test_layers_are_cut_for_the_ranks_of_each_stage(
    layers: int, ranks: str, micro_batches: int, cuts: tuple[int, ...], step_s: float
) -> None:
    graph = chain([1] * layers, [1] * layers)
    fixed = Fixed(schedule=f"round_robin(ranks={ranks})", ranks=3)
    profile = profile_of(graph, [1] * layers)
    plan, found, *_ = search(
        graph, profile, cluster_of(3), micro_batches=micro_batches, fixed=fixed
    )
    assert {candidate.plan.cuts for candidate in found[1:]} >= {cuts}
    assert (plan.cuts, plan.predicted.step_s) == (cuts, pytest.approx(step_s))
    assert found[-1].plan.cuts == cuts


# -- memory -------------------------------------------------------------------------------------

# One layer of 10 bytes makes 100 bytes of activations from 1 byte.
WIDE = chain([10, 10], [100, 100])
WIDE_PROFILE = profile_of(WIDE, [1, 1])


def peak(memory_bytes: int, **fixed) -> Candidate:
    cluster = cluster_of(1, memory_bytes=memory_bytes)
    return search(WIDE, WIDE_PROFILE, cluster, micro_batches=2, fixed=Fixed(**fixed))[1][0]


def test_plan_that_does_not_fit_is_refused_with_its_bytes() -> None:
    needed = max(peak(10**9, recompute=False).peak_bytes)
    assert max(peak(needed, recompute=False).peak_bytes) == needed
    with pytest.raises(PlanError, match=rf"rank 0 would hold {needed} B of {needed - 1} B"):
        peak(needed - 1, recompute=False)


def test_nothing_fits_in_too_little_memory() -> None:
    with pytest.raises(PlanError, match="no plan is possible: rank 0 would hold"):
        peak(10)


# -- wishes -------------------------------------------------------------------------------------


def shapes_of_wish(fixed: Fixed) -> list[tuple[int, int]]:
    """Return the (replicas, ranks of a pipeline) that a wish leaves, on 3 ranks."""
    found = []
    for replicas, depth in itertools.product(range(1, 4), repeat=2):
        makes = (
            [find(fixed.schedule)] if fixed.schedule else TRAINING if depth > 1 else [one_f_one_b]
        )
        fits = replicas * depth in ((fixed.ranks,) if fixed.ranks else (1, 2, 3))
        if not fits or fixed.replicas not in (None, replicas):
            continue
        if fixed.schedule and depth == 1 and (fixed.ranks or 3) // (fixed.replicas or 1) > 1:
            continue  # who wants a schedule wants a pipeline
        tried = itertools.product(makes, [fixed.stages] if fixed.stages else range(1, 7))
        several = {make for make in makes if "num_ranks" in inspect.signature(make).parameters}
        if any(
            (stages >= 2 * depth or fixed.stages or make not in several)
            and stages <= 6
            and builds(make, stages, 6 // replicas, depth)
            for make, stages in tried
        ):
            found.append((replicas, depth))
        elif fixed.schedule is None:
            found += [(replicas, depth)] * any(
                fixed.stages in (None, len(ways)) for ways in on_several(depth)
            )
    return found


@given(
    st.none() | st.integers(1, 3),
    st.none() | st.integers(1, 3),
    st.none() | st.integers(1, 6),
    st.none() | st.sampled_from([make.__name__ for make in SCHEDULES]),
    st.none() | st.booleans(),
)
def test_wishes_are_kept_or_refused(ranks, replicas, stages, schedule, recompute) -> None:
    fixed = Fixed(ranks, replicas, stages, schedule, recompute)
    if schedule == "forward_only":
        with pytest.raises(PlanError, match="cannot train"):
            search(SIX, SIX_PROFILE, cluster_of(3), micro_batches=6, fixed=fixed)
        return
    if not shapes_of_wish(fixed):
        with pytest.raises(PlanError, match=r"no plan fits |stages need \d+ cut points"):
            search(SIX, SIX_PROFILE, cluster_of(3), micro_batches=6, fixed=fixed)
        return
    plan, found, *_ = search(SIX, SIX_PROFILE, cluster_of(3), micro_batches=6, fixed=fixed)
    for each in (plan, *(candidate.plan for candidate in found)):
        assert ranks in (None, each.total_ranks)
        assert replicas in (None, each.replicas)
        assert stages in (None, each.num_stages)
        assert schedule in (None, name_of(each.schedule))
        assert recompute is None or each.recompute == (recompute,) * each.num_stages
    asked = {"ranks": ranks, "replicas": replicas, "stages": stages, "schedule": schedule}
    takers = {decision.what: decision.by for decision in plan.decisions}
    for what, wanted in {**asked, "recompute": recompute}.items():
        assert takers[what] == ("search" if wanted is None else "user")


@pytest.mark.parametrize(
    "fixed",
    [
        Fixed(ranks=4),
        Fixed(ranks=0),
        Fixed(replicas=4),
        Fixed(ranks=3, replicas=1, stages=1),
    ],
)
def test_wish_that_cannot_be_is_refused_with_its_values(fixed: Fixed) -> None:
    with pytest.raises(PlanError, match=r"no plan fits .*: 3 ranks, 5 cut points, 6 micro"):
        search(SIX, SIX_PROFILE, cluster_of(3), micro_batches=6, fixed=fixed)


@pytest.mark.parametrize(
    ("fixed", "message", "hint"),
    [
        (Fixed(stages=7), "7 stages need 6 cut points; the model has 5", "at most 6 stages"),
        (
            Fixed(schedule="gpipe", stages=4),
            "no plan fits stages 4, schedule gpipe",
            "ranks=4",
        ),
    ],
)
def test_refusal_says_what_would_fit(fixed: Fixed, message: str, hint: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        search(SIX, SIX_PROFILE, cluster_of(3), micro_batches=6, fixed=fixed)
    assert hint in caught.value.hint


def test_wish_for_a_schedule_that_does_not_train_is_refused() -> None:
    with pytest.raises(PlanError, match="forward_only has no backward pass: it cannot train"):
        search(
            SIX,
            SIX_PROFILE,
            cluster_of(2),
            micro_batches=2,
            fixed=Fixed(schedule="forward_only"),
        )


def test_wish_for_a_schedule_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ScheduleError, match="two_f"):
        search(SIX, SIX_PROFILE, cluster_of(2), micro_batches=2, fixed=Fixed(schedule="two_f"))


@pytest.mark.parametrize(
    "fixed",
    [Fixed(needs=JobNeeds(buffers="one copy")), Fixed(replicas=2, needs=JobNeeds(in_order=True))],
)
def test_stages_have_one_copy_if_that_is_wished(fixed: Fixed) -> None:
    cluster = cluster_of(4)
    made = list(all_shapes(SIX, cluster, 4, Fixed(replicas=fixed.replicas)))
    kept = list(all_shapes(SIX, cluster, 4, fixed))
    left = {name_of(shape.schedule) for shape in made} - {name_of(s.schedule) for s in kept}
    assert {"chimera", "bitpipe", "dual_pipe"} <= left
    assert {"one_f_one_b", "interleaved", "zb_h1", "dual_pipe_v"} <= {
        name_of(s.schedule) for s in kept
    }
    assert {shape.replicas for shape in kept} == {fixed.replicas or 1}
    plan = search(SIX, SIX_PROFILE, cluster, micro_batches=4, fixed=fixed).plan
    assert plan.terms.buffers == fixed.needs.buffers
    asked = replace(fixed, schedule="chimera")
    with pytest.raises(PlanError, match=r"schedule chimera, (one copy of each|micro-batches in)"):
        search(SIX, SIX_PROFILE, cluster, micro_batches=4, fixed=asked)


def test_asynchronous_schedules_are_tried_only_if_wished() -> None:
    _, found, *_ = search(SIX, SIX_PROFILE, cluster_of(3), micro_batches=6)
    assert "double_buffered" not in {name_of(candidate.plan.schedule) for candidate in found}


def test_profile_of_another_graph_is_refused() -> None:
    other = replace(SIX_PROFILE, graph="0" * 16)
    with pytest.raises(ProfileError, match="the profile is of graph 0000"):
        search(SIX, other, cluster_of(2), micro_batches=2)


# -- reasons ------------------------------------------------------------------------------------


def test_every_decision_has_a_reason_with_values() -> None:
    cluster = cluster_of(3, link=SLOW)
    plan, *_ = search(SIX, SIX_PROFILE, cluster, micro_batches=6, fixed=WHOLE)
    assert [decision.what for decision in plan.decisions] == [
        "ranks",
        "replicas",
        "stages",
        "cuts",
        "schedule",
        "micro-batches",
        "recompute",
        "seconds",
    ]
    by_name = {decision.what: decision for decision in plan.decisions}
    for what in ("ranks", "schedule", "recompute"):
        assert "best alternative (" in by_name[what].why
        assert " s, " in by_name[what].why
        assert re.search(r"(x of this|a tie), and ", by_name[what].why)
    assert by_name["cuts"].why.startswith("per micro-batch: ")
    assert by_name["cuts"].why.count(",") == plan.num_stages - 1
    assert plan.predicted is not None
    rows = 2 + len(plan.predicted.tried)  # with a head, and the plan itself
    assert str(plan).count("\n") == 1 + rows + len(plan.decisions)


def test_what_could_not_be_otherwise_says_so() -> None:
    graph = chain([1], [1])
    plan, *_ = search(graph, profile_of(graph, [1]), cluster_of(1), micro_batches=3)
    by_name = {decision.what: decision for decision in plan.decisions}
    assert by_name["replicas"].why == "nothing else is possible"
    assert by_name["cuts"].value == "uncut"


def test_progress_is_told_of_all_candidates() -> None:
    told: list[tuple[int, int]] = []
    search(
        SIX,
        SIX_PROFILE,
        cluster_of(2),
        micro_batches=2,
        progress=lambda done, total: told.append((done, total)),
    )
    count = 2 * len(shapes(SIX, 2, 2))
    assert {total for _, total in told} == {0, count}  # 0 while plans are listed
    assert told[-1] == (count, count)
    assert all(0 <= done <= count for done, _ in told)


def test_search_for_one_plan_is_the_best_of_all() -> None:
    plan, *_ = search(SIX, SIX_PROFILE, cluster_of(2), micro_batches=4, error=ERROR)
    assert search_one(SIX, SIX_PROFILE, cluster_of(2), micro_batches=4) == plan
    with pytest.raises(PlanError, match="does not know how many micro-batches"):
        search_one(SIX, SIX_PROFILE, cluster_of(2))


def test_time_of_nothing_is_compared_with_nothing() -> None:
    graph = chain([1, 1], [1, 1])
    free: Profile = profile_of(graph, [0, 0])
    plan, *_ = search(graph, free, cluster_of(2), micro_batches=2)
    assert any("against none" in decision.why for decision in plan.decisions)
