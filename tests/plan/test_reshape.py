"""A plan with other counts: what was decided of the step survives, what cannot is decided anew."""

from dataclasses import fields

from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.plan.decision_words import HOMES, ROWS, Words, value_of
from penstock.plan.plan import Plan, plan_by_hand
from penstock.plan.reshape import Counts, reshaped
from penstock.plan.stage import StagePlan
from penstock.program.instructions import Guarding
from penstock.schedule.grid import evenly
from penstock.schedule.recipe import Recipe
from tests.search.chains import chain

GRAPH = chain([3, 3, 3, 3], [5, 6, 7, 8])

# What a step computes, and what its numbers travel in: no count changes that.
SURVIVE = (
    *("graph", "clip", "commits", "joined", "split", "compiled", "wire", "sums", "early"),
    "topology",
    "tensor",
    "context",
    "decisions",
)
GIVEN = ("cuts", "cut_names", "schedule", "num_micro_batches", "num_ranks", "replicas", "shares")
BY_STAGE = ("recompute", "offload", "shard")
DECIDED = ("beside", "prefetch", "parts", "guard", "post_validation", "buffers", "hosts")

_AWAY = st.sampled_from(("none", "state", "activations", "both", "weights", "all"))
_PARTS = st.sampled_from(("replicate", "shard", "shard_keep"))


def stage_rows(word, stages: int):
    """Return rows of a word for each stage, often the same for all; or nothing said."""
    alike = word.map(lambda one: (one,) * stages)
    return st.one_of(st.just(()), alike, st.tuples(*[word] * stages))


@st.composite
def plans(draw) -> Plan:
    """Draw a plan that can be, with as many decisions as go together."""
    stages, replicas = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    cuts = sorted(draw(st.sets(st.integers(0, 2), min_size=stages - 1, max_size=stages - 1)))
    plan = plan_by_hand(GRAPH, cuts, "one_f_one_b", num_micro_batches=6, replicas=replicas)
    total = stages * replicas
    changes = {
        "clip": draw(st.booleans()),
        "recompute": draw(stage_rows(st.booleans(), stages)),
        "offload": draw(stage_rows(_AWAY, stages)),
        "beside": draw(st.booleans()),
        "shard": draw(stage_rows(_PARTS, stages)),
        "prefetch": draw(stage_rows(st.integers(0, 1), stages)) or 0,
        "parts": draw(st.sampled_from(((), (1,) * (total - 1) + (3,)))),
        "commits": draw(st.booleans()),
        "guard": draw(st.sampled_from((None, Guarding(2)))),
        "post_validation": draw(st.booleans()),
        "joined": draw(st.integers(1, 2)),
        "buffers": draw(st.sampled_from(("exact", "one copy", "per replica"))),
        "early": draw(st.integers(0, 2)),
        "shares": draw(st.sampled_from(((), (6,) * (replicas - 1) + (2,)))),
        "hosts": draw(st.sampled_from(((), ("b", "a")))),
        "split": draw(st.sampled_from(((), (("head.weight", 2),)))),
        "compiled": draw(st.booleans()),
        "wire": draw(st.sampled_from(((32, 32), (8, 16)))),
        "sums": draw(st.sampled_from((None, "bfloat16"))),
        "topology": draw(st.sampled_from((None, "ring"))),
    }
    for name, value in changes.items():
        try:
            plan = plan.changed(**{name: value})
        except PlanError:  # not with what it has so far
            continue
    return plan


@st.composite
def counts(draw, plan: Plan) -> Counts:
    """Draw other counts for the same micro-batches of a step."""
    cuts = draw(st.lists(st.integers(0, 2), unique=True, max_size=3).map(sorted))
    replicas = draw(st.integers(1, min(4, plan.step_micro_batches)))
    shares = evenly(plan.step_micro_batches, replicas)
    return Counts(tuple(cuts), Recipe("one_f_one_b"), len(cuts) + 1, shares)


def test_every_field_of_a_plan_has_its_place_here() -> None:
    names = [*SURVIVE, *GIVEN, *BY_STAGE, *DECIDED, "predicted"]
    assert sorted(names) == sorted(Words.__annotations__)


def test_every_field_of_every_record_of_a_plan_is_said_by_a_word() -> None:
    own = {field.name for field in fields(Plan)}
    rows = {field.name for field in fields(StagePlan)}
    assert rows == {*ROWS.values()}
    assert own - {*HOMES.values(), "stages"} == Words.__annotations__.keys() - {*HOMES, *ROWS}
    plan = plan_by_hand(GRAPH, [0], "one_f_one_b", num_micro_batches=4)
    for record in own & {*HOMES.values()}:
        named = {field.name for field in fields(getattr(plan, record))}
        assert named == {word for word, home in HOMES.items() if home == record}


@given(st.data())
def test_each_field_survives_a_change_of_counts_or_is_decided_by_it(data) -> None:
    plan = data.draw(plans())
    asked = data.draw(counts(plan))
    made = reshaped(plan, GRAPH, asked)
    for name in SURVIVE:
        assert value_of(made, name) == value_of(plan, name), name
    assert (made.cuts, made.num_ranks, made.grid.shares) == (asked.cuts, asked.ranks, asked.shares)
    assert made.job_micro_batches == plan.job_micro_batches
    for name in BY_STAGE:
        words = set(value_of(plan, name))
        is_forced = name == "shard" and (made.replicas == 1 or made.far)
        if len(words) == 1 and not is_forced:
            assert set(value_of(made, name)) == words, name  # the same of all stages: still so
    wanted = {"per replica": made.replicas > 1, "one copy": made.replicas == 1, "exact": True}
    assert made.terms.buffers == (plan.terms.buffers if wanted[plan.terms.buffers] else "exact")
    assert made.predicted is None


@given(plans())
def test_a_plan_with_its_own_counts_is_itself(plan: Plan) -> None:
    own = Counts(plan.cuts, plan.schedule, plan.num_ranks, plan.grid.shares)
    made = reshaped(plan, GRAPH, own)
    one_rank = {"post_validation": False} if plan.num_ranks == 1 else {}
    alone = (
        {"buffers": "exact"} if plan.replicas == 1 and plan.terms.buffers == "per replica" else {}
    )
    assert made == plan.changed(**one_rank, **alone)


def test_single_ops_are_repeated_by_the_stages_that_have_them_and_no_others() -> None:
    plan = plan_by_hand(GRAPH, [0], "one_f_one_b", num_micro_batches=4).changed(
        recompute=((1, 2), True)
    )
    moved = reshaped(plan, GRAPH, Counts((1,), plan.schedule, 2, (4,)))
    assert moved.recompute == (False, True)
    replicas = reshaped(plan, GRAPH, Counts((0,), plan.schedule, 2, (2, 2)))
    assert replicas.recompute == plan.recompute
