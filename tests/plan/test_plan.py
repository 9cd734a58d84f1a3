"""The Plan as a noun: checks itself, prints itself, is saved, read back and compared."""

import json
import random
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import GraphError, PlanError, ScheduleError
from penstock.plan import (
    Decision,
    Guarding,
    Plan,
    Prediction,
    check_fits,
    decide,
    diff,
    is_asynchronous,
    plan_by_hand,
    schedule_of,
)
from penstock.plan.decision_words import Words, value_of
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.rules.rewrite import made_to_keep
from penstock.rules.rule import Rule
from penstock.rules.ruled import ruled
from penstock.schedule import SCHEDULES, Schedule, Seconds, find, one_f_one_b, refine, zb_greedy
from penstock.schedule.recipe import Recipe, trains
from tests.program.programs import random_schedule
from tests.schedule.test_recipe import recipes
from tests.search.chains import chain

GRAPH = chain([3, 3, 3], [5, 6, 7])
PLAN = plan_by_hand(GRAPH, [1], "one_f_one_b", num_micro_batches=4, replicas=2, clip=True)
REASONED = decide(
    PLAN,
    [
        Decision("ranks", "4", "user", "asked for"),
        Decision("cuts", "after layers.1", "search", "2 s"),
    ],
    Prediction(0.25, (1024, 2048), 0.125),
)


def test_plan_that_is_saved_is_read_back(tmp_path: Path) -> None:
    for plan in (PLAN, REASONED, plan_by_hand(GRAPH, [], "gpipe", num_micro_batches=1)):
        plan.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == plan


def test_every_field_of_a_plan_is_written(tmp_path: Path) -> None:
    more = {"recompute": (True, False), "offload": ("none", "activations"), "joined": 3, "early": 2}
    more |= {
        "post_validation": True,
        "buffers": "per replica",
        "hosts": ("b", "a"),
        "wire": (8, 16),
        "beside": True,
    }
    more |= {"shares": (4, 3), "sums": "bfloat16"}
    plans = (
        REASONED.changed(**more),
        REASONED.changed(compiled=True, commits=True, guard=Guarding(4, 2)),
        REASONED.changed(shard=("shard_keep", "replicate"), prefetch=1, parts=(3, 1, 1, 1)),
        REASONED.changed(shard=("shard", "shard"), prefetch=(0, 2)),
        REASONED.changed(split=(("head.weight", 4),)),
        REASONED.changed(joined=Fraction(1, 4)),
        REASONED.changed(tensor=2),
        REASONED.changed(tensor=2, context=True),
        REASONED.changed(topology="tree"),
    )  # not with a wire that rounds
    plain = Plan.of(graph="", schedule="gpipe", num_ranks=1, num_micro_batches=1)
    unsaid = [
        w for w in Words.__annotations__ if all(value_of(p, w) == value_of(plain, w) for p in plans)
    ]
    assert unsaid == []
    for plan in plans:
        plan.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == plan


def test_str_shows_every_decision_and_the_prediction() -> None:
    assert str(REASONED) == (
        "2 pipelines of 2 stages on 4 processes (one_f_one_b): "
        "250 ms a step, 1.00 KiB to 2.00 KiB each\n"
        "  predicted: 250 ms, 0.125 usd per step; peak 1.00 KiB, 2.00 KiB\n"
        "  ranks: 4 (user): asked for\n"
        "  cuts: after layers.1 (search): 2 s"
    )


def test_plan_by_hand_puts_one_stage_on_each_rank_and_keeps_everything() -> None:
    plan = plan_by_hand(GRAPH, [0, 1], "zb_h1", num_micro_batches=2)
    assert (plan.num_stages, plan.num_ranks, plan.total_ranks) == (3, 3, 3)
    assert plan.cut_names == ("after layers.0", "after layers.1")
    assert plan.recompute == (False, False, False)
    assert plan.graph == GRAPH.digest


@pytest.mark.parametrize("cuts", [[2], [-1], [0, 5]])
def test_plan_by_hand_refuses_cuts_that_are_not_there(cuts: list[int]) -> None:
    with pytest.raises(PlanError, match="the graph has 2 cut points"):
        plan_by_hand(GRAPH, cuts, "gpipe", num_micro_batches=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"cuts": (1, 0), "cut_names": ("a", "b"), "recompute": ()},
            r"cuts \(1, 0\) are not increasing",
        ),
        ({"cuts": (1, 1), "cut_names": ("a", "b"), "recompute": ()}, "not increasing"),
        ({"cuts": (-1,)}, "not increasing"),
        ({"cut_names": ()}, "0 names for 1 cuts"),
        ({"num_micro_batches": 0}, "num_micro_batches is 0; it must be 1 or more"),
        ({"num_ranks": 0}, "num_ranks is 0"),
        ({"replicas": 0}, "replicas is 0"),
        ({"joined": 0}, "joined is 0"),
        ({"joined": Fraction(2, 3)}, "joined is 2/3"),
        ({"joined": Fraction(3, 2)}, "joined is 3/2"),
        ({"joined": Fraction(1, 3)}, "micro-batches of 1/3 are no whole ones"),
        ({"joined": Fraction(1, 2), "sums": "bfloat16"}, "in 2 parts, with sums in bfloat16"),
        ({"joined": Fraction(1, 2), "wire": (8, 8)}, "in 2 parts, with rounded messages"),
        ({"joined": Fraction(1, 2), "schedule": "double_buffered"}, "an asynchronous schedule"),
        ({"recompute": (True,)}, "recompute says 1 of 2 stages"),
        ({"recompute": (True, (4, 2))}, r"recompute of a stage is \[4, 2\], no increasing"),
        ({"recompute": ((), False)}, r"recompute of a stage is \[\], no increasing"),
    ],
)
def test_decisions_that_contradict_each_other_are_refused(change: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        PLAN.changed(**change)


@pytest.mark.parametrize("joined", ["1/0", "half", 0.5, [1, 2]])
def test_file_that_says_no_part_of_a_micro_batch_is_refused(joined: object, tmp_path: Path) -> None:
    content = PLAN.to_json()
    content["terms"]["joined"] = joined
    (tmp_path / "plan.json").write_text(json.dumps(content))
    with pytest.raises(PlanError, match=r"joined is .*a part of one"):
        Plan.load(tmp_path / "plan.json")


def leaves(value: object, path: tuple = ()) -> list[tuple]:
    """Return the paths of all values of a JSON document."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [path, *(leaf for key, item in items for leaf in leaves(item, (*path, key)))]
    return [path]


def changed(document: object, path: tuple, value: object) -> object:
    copy = json.loads(json.dumps(document))
    if not path:
        return value
    place = copy
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return copy


junk = st.sampled_from([None, "x", -1, 0.5, [], {}, ["x"], [None], {"a": 1}, True, 10**30])
SECONDS = {"schedule": Recipe("zb_greedy", (("limit", 3),), Seconds((1.0, 2.0), 1.0, 1.0))}
documents = st.sampled_from(
    [
        REASONED.to_json(),
        REASONED.changed(**SECONDS).to_json(),
        REASONED.changed(schedule=one_f_one_b(2, 4)).to_json(),
    ]
)


@given(documents, st.data(), junk)
def test_file_with_a_changed_value_is_refused_with_its_name_or_is_a_plan(
    tmp_path_factory: pytest.TempPathFactory, document: dict, data, value: object
) -> None:
    file = tmp_path_factory.getbasetemp() / "plan.json"
    path = data.draw(st.sampled_from(leaves(document)))
    file.write_text(json.dumps(changed(document, path, value)))
    try:
        plan = Plan.load(file)
    except PlanError as problem:
        named = str(file) in problem.message
        assert named, problem.message  # noqa: PT017 - either is right
        return
    assert " on " in str(plan).splitlines()[0]
    assert Plan.load(file) == plan


@given(st.integers(0, 2000))
def test_truncated_file_is_refused_with_its_name(
    tmp_path_factory: pytest.TempPathFactory, length: int
) -> None:
    file, text = tmp_path_factory.getbasetemp() / "short.json", json.dumps(REASONED.to_json())
    file.write_text(text[: min(length, len(text) - 1)])
    with pytest.raises(PlanError, match=r"short\.json"):
        Plan.load(file)


def test_unknown_decisions_are_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({**PLAN.to_json(), "colour": "red"}))
    with pytest.raises(PlanError, match="colour"):
        Plan.load(tmp_path / "plan.json")


def test_plan_fits_the_graph_that_it_was_made_for_and_no_other() -> None:
    check_fits(PLAN, GRAPH)
    other = chain([3, 3, 3], [5, 6, 8])
    with pytest.raises(PlanError, match=f"is for graph {GRAPH.digest}; this job traces to graph"):
        check_fits(PLAN, other)
    with pytest.raises(PlanError, match="cuts 'elsewhere', which is not cut point 1"):
        check_fits(PLAN.changed(cut_names=("elsewhere",)), GRAPH)
    with pytest.raises(PlanError, match="which is not cut point 1"):
        check_fits(PLAN, replace(GRAPH, cut_points=GRAPH.cut_points[:1]))


def test_diff_names_each_decision_that_differs() -> None:
    assert diff(PLAN, REASONED) == ()
    other = PLAN.changed(schedule="gpipe", replicas=1)
    assert diff(PLAN, other) == ("schedule: one_f_one_b -> gpipe", "replicas: 2 -> 1")


# -- lowered ------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", SCHEDULES)
@pytest.mark.parametrize("replicas", [1, 2])
def test_plan_is_lowered_to_its_ranks_stages_and_edges(make, replicas: int) -> None:
    ranks = make(2, 3).num_ranks
    plan = plan_by_hand(
        GRAPH, [1], make.__name__, num_micro_batches=3, num_ranks=ranks, replicas=replicas
    )
    program = lower_plan(plan, GRAPH, num_steps=2)
    steps = 2 if is_asynchronous(plan) else 1
    assert (program.num_ranks, program.num_stages) == (ranks * replicas, 2)
    assert (program.num_micro_batches, program.num_steps) == (3, steps)
    whole = 3 if make.__name__ == "timeprest" else 1  # micro-batches of a B, and so of its message
    both = [("F", 0, 1, 6), ("B", 1, 0, 6 * whole)]
    assert [e[:4] for e in program.edges] == (both if trains(plan.schedule) else both[:1])
    assert [stage.weights for stage in program.graph.stage_bytes] == [6, 3]
    assert program == lower_plan(plan, GRAPH, num_steps=2, stages=stages_of(plan, GRAPH))


def test_asynchronous_are_those_that_have_updates() -> None:
    for make in SCHEDULES:
        plan = PLAN.changed(schedule=make.__name__)
        assert is_asynchronous(plan) == make(2, 2).has_updates


def test_plan_for_another_number_of_ranks_than_its_schedule_has_is_refused() -> None:
    with pytest.raises(PlanError, match="gpipe puts 2 stages on 2 ranks, the plan on 3"):
        lower_plan(PLAN.changed(schedule="gpipe", num_ranks=3), GRAPH)


def test_window_is_that_of_an_asynchronous_schedule_only() -> None:
    assert schedule_of(PLAN, num_steps=5).num_steps == 1
    assert schedule_of(PLAN.changed(schedule="double_buffered"), num_steps=5).num_steps == 5


def test_schedule_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ScheduleError, match="fast"):
        lower_plan(PLAN.changed(schedule="fast"), GRAPH)


def test_buffers_that_ask_for_one_copy_are_refused_copies() -> None:
    plan = plan_by_hand(GRAPH, [1], "one_f_one_b", num_micro_batches=4).changed(buffers="one copy")
    assert schedule_of(plan).is_in_order
    with pytest.raises(PlanError, match="one copy of each stage, the plan has 2 replicas"):
        plan.changed(replicas=2)
    with pytest.raises(PlanError, match="takes its micro-batches in order; chimera does not"):
        schedule_of(plan.changed(schedule="chimera"))
    with pytest.raises(PlanError, match="buffers are 'many'"):
        plan.changed(buffers="many")


def test_file_from_before_plans_spoke_of_buffers_is_read(tmp_path: Path) -> None:
    plan = plan_by_hand(GRAPH, [1], "one_f_one_b", num_micro_batches=4)
    content = plan.to_json()
    del content["terms"]["buffers"]
    (tmp_path / "plan.json").write_text(json.dumps(content))
    assert Plan.load(tmp_path / "plan.json") == plan


def test_plan_for_another_graph_is_not_lowered() -> None:
    with pytest.raises(PlanError, match="is for graph"):
        lower_plan(PLAN, chain([1], [1]))
    with pytest.raises((PlanError, GraphError)):
        stages_of(PLAN.changed(cut_names=("x",)), GRAPH)


# -- its schedule -------------------------------------------------------------------------------


@st.composite
def plans(draw) -> Plan:
    """Return a plan of three stages with any schedule."""
    if draw(st.booleans()):
        return plan_by_hand(GRAPH, [0, 1], draw(recipes(3)), num_micro_batches=4)
    sizes = 3, draw(st.integers(1, 4)), draw(st.integers(1, 3))
    chance = random.Random(draw(st.integers(0, 999)))
    schedule = random_schedule(chance, *sizes, fixed=draw(st.booleans()), backward=True)
    name = draw(st.sampled_from(["", "by hand"]))
    return plan_by_hand(GRAPH, [0, 1], replace(schedule, name=name), replicas=2)


@given(plans(), plans())
def test_plan_with_any_schedule_is_read_back_and_told_from_others(plan: Plan, other: Plan) -> None:
    again = Plan.from_text(json.dumps(plan.to_json()))
    assert again == plan
    assert hash(again) == hash(plan)
    assert diff(plan, again) == ()
    lines = [line for line in diff(plan, other) if line.startswith("schedule: ")]
    assert (plan.schedule == other.schedule) == (lines == [])
    assert all(" -> " in line and line.split(" -> ")[0] != line.split(" -> ")[1] for line in lines)


def test_schedule_of_a_plan_is_the_one_that_stands_in_it() -> None:
    schedule = Schedule.parse("rank 0  F0.1 F0.0 I0.0 B0.1 W0.0\nrank 1  F1.1 F1.0 B1.1 B1.0")
    plan = plan_by_hand(GRAPH, [0], schedule)
    assert (plan.num_micro_batches, plan.num_ranks) == (2, 2)
    assert schedule_of(plan) is schedule
    assert lower_plan(plan, GRAPH) == lower_plan(plan, GRAPH, schedule=schedule)
    assert str(plan) == "pipeline of 2 stages on 2 processes (a written schedule)"


def test_recipe_of_a_plan_is_built_with_all_that_it_says() -> None:
    seconds = Seconds((1.0, 3.0), 1.0, 2.0)
    plan = plan_by_hand(
        GRAPH, [0], Recipe("zb_greedy", (("limit", 3),), seconds), num_micro_batches=4
    )
    assert schedule_of(plan) == zb_greedy(2, 4, seconds=seconds, limit=3)
    assert str(plan).splitlines()[0].endswith("on 2 processes (zb_greedy(limit=3))")
    assert plan.changed(schedule="zb_greedy").schedule == Recipe("zb_greedy")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedule": one_f_one_b(3, 4)}, "of 3 stages and 4 micro-batches on 3 ranks, not of 2"),
        ({"schedule": one_f_one_b(2, 3)}, "not of 2 stages and 4 micro-batches on 2 ranks"),
        ({"schedule": one_f_one_b(2, 4), "num_ranks": 1}, "micro-batches on 1 ranks"),
        ({"schedule": find("pipedream")(2, 4)}, "pipedream is written out for 4 steps, weights"),
    ],
)
def test_schedule_of_other_sizes_or_of_several_steps_is_refused(change: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        PLAN.changed(**change)
    assert caught.value.hint


def test_seconds_for_another_number_of_stages_are_refused() -> None:
    with pytest.raises(ScheduleError, match="for 2 stages"):
        PLAN.changed(schedule=Recipe("zb_greedy", seconds=Seconds((1.0, 2.0, 3.0))))


def test_recipe_does_not_say_how_many_micro_batches_there_are() -> None:
    with pytest.raises(PlanError, match="gpipe can have any number of micro-batches"):
        plan_by_hand(GRAPH, [0], "gpipe")


def test_misfit_in_a_schedule_is_told_with_its_place(tmp_path: Path) -> None:
    wrong = {"builder": "zb_greedy", "seconds": {"forward_s": ["x"]}}
    (tmp_path / "plan.json").write_text(json.dumps({**PLAN.to_json(), "schedule": wrong}))
    with pytest.raises(PlanError, match=r"is damaged: schedule\.seconds"):
        Plan.load(tmp_path / "plan.json")


def test_stages_in_units_are_cut_at_every_block_and_built_by_the_same_recipe() -> None:
    graph = chain([1] * 6, [1] * 6)
    again = (True, False)
    plan = plan_by_hand(graph, [1], "gpipe", num_micro_batches=2, recompute=again, replicas=2)
    cut = decide(plan, [], Prediction(1.0, (1,))).refined(graph)
    assert cut.cuts == (0, 1, 2, 3, 4)
    assert cut.cut_names == tuple(point.name for point in graph.cut_points)
    assert cut.recompute == (True, True, False, False, False, False)
    assert cut.schedule == Recipe("gpipe", units=(2, 4))
    assert schedule_of(cut) == refine(schedule_of(plan), (2, 4))
    assert (cut.num_ranks, cut.replicas, cut.predicted) == (2, 2, None)
    assert [each.value for each in cut.decisions if each.what == "units"] == ["2 4"]
    assert Plan.from_text(json.dumps(cut.to_json())) == cut
    assert cut.refined(graph) == cut
    assert "schedule: gpipe -> gpipe / units 2 4" in diff(plan, cut)


def test_units_repeat_those_ops_of_their_stage_that_are_theirs() -> None:
    graph = chain([1] * 6, [1] * 6)
    ops = [graph.cut_points[k].at for k in range(5)]  # of the layers 1 to 5
    again = tuple(ops[:1]), (ops[1], ops[3])
    plan = plan_by_hand(graph, [1], "gpipe", num_micro_batches=2, recompute=again)
    units = plan.refined(graph)
    assert units.recompute == (False, (ops[0],), (ops[1],), False, (ops[3],), False)
    assert Plan.from_text(json.dumps(units.to_json())) == units
    joined = made_to_keep(units, graph, ruled([Rule("fuse", "layers.[2-4]")], graph))
    assert joined.recompute == (False, *again, False)


@pytest.mark.parametrize(
    ("units", "cuts"), [(1, (1,)), (2, (0, 1, 3)), (3, (0, 1, 2, 3)), (9, (0, 1, 2, 3, 4))]
)
def test_at_most_so_many_units_are_spread_over_a_stage(units: int, cuts: tuple[int, ...]) -> None:
    graph = chain([1] * 6, [1] * 6)
    cut = plan_by_hand(graph, [1], "gpipe", num_micro_batches=2).refined(graph, units)
    assert cut.cuts == cuts


def test_units_that_cannot_be_are_refused() -> None:
    with pytest.raises(PlanError, match="0 units per stage"):
        PLAN.refined(GRAPH, 0)
    with pytest.raises(PlanError, match="the plan is for graph"):
        PLAN.refined(chain([1, 2, 3], [1, 2, 3]))
    with pytest.raises(ScheduleError, match="units 2 1 is of 3 stages, not of 2"):
        PLAN.changed(schedule="gpipe / units 2 1")


def test_written_schedule_and_recipe_of_units_are_refined_again() -> None:
    graph = chain([1] * 6, [1] * 6)
    plan = plan_by_hand(graph, [1], one_f_one_b(2, 3))
    twice = plan.refined(graph, 2).refined(graph)
    assert schedule_of(twice).orders == refine(one_f_one_b(2, 3), (2, 4)).orders
    named = plan_by_hand(graph, [1], "gpipe", num_micro_batches=3)
    assert named.refined(graph, 2).refined(graph).schedule == Recipe("gpipe", units=(2, 4))
