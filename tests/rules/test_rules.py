"""Rules: rewrites against what is said of each layer; the search against all plans that keep it."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import rules
from penstock.choose.choose import Choice, found_in_units, in_units
from penstock.cluster import Link
from penstock.errors import PlanError
from penstock.graph.graph import Graph
from penstock.plan import Decision, Plan, plan_by_hand, schedule_of
from penstock.rules import Rule, load, rewritten
from penstock.rules.ruled import matched, ruled, slices_asked
from penstock.schedule.refine import refine
from penstock.search import Fixed, evaluate, search
from penstock.search.balance import StageEnds, balanced_cuts
from penstock.search.field import Effort, Field
from penstock.search.judge import Judge
from penstock.search.recompute import as_needed
from tests.search.chains import SIX, chain, chains, cluster_of, profile_of
from tests.search.test_balance import stage_seconds

LAYERS = 6


def layered(graph: Graph) -> Graph:
    """Return a chain whose loss belongs to its last layer, and weights to theirs."""
    last = f"layers.{len(graph.cut_points)}"
    named = [replace(n, module=last) if n.name.endswith("loss") else n for n in graph.nodes]
    rows = {"shape": (8, 2)}
    named = [replace(n, name=owned(n.name), **rows) if n.kind == "parameter" else n for n in named]
    gradients = {owned(name): at for name, at in graph.gradients.items()}
    return replace(graph, nodes=tuple(named), gradients=gradients)


def owned(name: str) -> str:
    return f"layers.{name[1:]}.weight"


GRAPH = layered(chain([1] * LAYERS, [10] * LAYERS))


def layers(numbers: Sequence[int]) -> str:
    return f"layers.[{''.join(map(str, numbers))}]"


def stage_of(plan: Plan) -> list[int]:
    """Return the stage of each layer."""
    return [sum(cut < layer for cut in plan.cuts) for layer in range(LAYERS)]


Said = tuple[dict[int, str], ...]
some = st.sets(st.integers(0, LAYERS - 1), min_size=1).map(sorted)
runs = st.tuples(st.integers(0, LAYERS - 1), st.integers(0, LAYERS - 1)).map(sorted)


@st.composite
def sayings(draw: st.DrawFn, sharding: bool = True) -> tuple[list[Rule], list[int], Said]:
    """Return rules, and what they say: cuts, and of each layer recompute, offload and shard."""
    said: list[Rule] = []
    cuts = draw(st.sets(st.integers(0, LAYERS - 2)))
    said += [Rule("cut", f"layers.{cut}") for cut in cuts]
    again, away = draw(some), draw(some)
    how = draw(st.sampled_from(["yes", "no"]))
    what = draw(st.sampled_from(["none", "state", "activations", "both"]))
    said += [Rule("recompute", layers(again), how), Rule("offload", layers(away), what)]
    parts = draw(some) if sharding and draw(st.booleans()) else []
    verb = draw(st.sampled_from(["shard", "keep", "replicate"]))
    said += [Rule(verb, layers(parts))] if parts else []
    word = {"keep": "shard_keep"}.get(verb, verb)
    rows = dict.fromkeys(again, how), dict.fromkeys(away, what), dict.fromkeys(parts, word)
    return said, sorted(cuts), rows


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    cuts = sorted(draw(st.sets(st.integers(0, LAYERS - 2), max_size=3)))
    count = len(cuts) + 1
    return plan_by_hand(
        GRAPH,
        cuts,
        draw(st.sampled_from(["gpipe", "one_f_one_b", "zb_h1"])),
        num_micro_batches=3,
        replicas=2,
        recompute=draw(st.lists(st.booleans(), min_size=count, max_size=count)),
        offload=draw(st.lists(st.sampled_from(["none", "state"]), min_size=count, max_size=count)),
    )


@given(plans(), sayings())
def test_each_layer_gets_what_is_said_of_it_and_else_keeps_what_it_had(plan, saying) -> None:
    """The order of work is that of the plan, its stages in units; nothing is cut without need."""
    said, cuts, (again, away, parts) = saying
    made = rewritten(plan, GRAPH, said)
    was, now = stage_of(plan), stage_of(made)
    wanted = [
        (
            {"yes": True, "no": False}.get(again.get(layer, ""), plan.recompute[was[layer]]),
            away.get(layer, plan.stages[was[layer]].far),
            parts.get(layer, "replicate"),
        )
        for layer in range(LAYERS)
    ]
    shard = made.shard or ("replicate",) * made.num_stages
    held = [(made.recompute[now[k]], made.stages[now[k]].far, shard[now[k]]) for k in range(LAYERS)]
    assert held == wanted
    borders = {k for k, (a, b) in enumerate(itertools.pairwise(wanted)) if a != b}
    assert set(made.cuts) == {*plan.cuts, *cuts, *borders}
    assert made.cut_names == tuple(f"layers.{cut}".join(["after ", ""]) for cut in made.cuts)
    counts = [len({now[k] for k in range(LAYERS) if was[k] == s}) for s in range(plan.num_stages)]
    assert schedule_of(made).orders == refine(schedule_of(plan), counts).orders
    assert [(d.what, d.by) for d in made.decisions] == [
        (f"{rule.verb} {rule.pattern}", "user") for rule in said
    ]
    assert rewritten(made, GRAPH, said) == made


@given(plans(), runs)
def test_fused_layers_are_one_stage_where_units_are_all_that_divides_them(plan, run) -> None:
    whole = range(run[0], run[1] + 1)
    units = plan.refined(GRAPH, LAYERS)
    inside = [cut for cut in plan.cuts if cut in whole and cut + 1 in whole]
    was = {units.recompute[k] for k in whole}, {units.stages[k].far for k in whole}
    if inside:
        with pytest.raises(PlanError, match=f"cuts 'after layers.{inside[0]}' itself"):
            rules.fuse(units, GRAPH, layers(whole))
        return
    made = rules.fuse(units, GRAPH, layers(whole))
    assert set(made.cuts) == set(range(LAYERS - 1)) - set(whole[:-1])
    own = stage_of(made)[whole[0]]
    assert ({made.recompute[own]}, {made.stages[own].far}) == was


def test_functions_of_the_language_are_rules_of_one_line() -> None:
    plan = plan_by_hand(GRAPH, [2], "gpipe", num_micro_batches=2, replicas=2)
    for made, verb, how in (
        (rules.cut(plan, GRAPH, "layers.1"), "cut", ""),
        (rules.recompute(plan, GRAPH, "layers.1"), "recompute", "yes"),
        (rules.recompute(plan, GRAPH, "layers.1", on=False), "recompute", "no"),
        (rules.offload(plan, GRAPH, "layers.1", "state"), "offload", "state"),
        (rules.offload(plan, GRAPH, "layers.1"), "offload", "both"),
        (rules.shard(plan, GRAPH, "layers.1"), "shard", ""),
        (rules.keep(plan, GRAPH, "layers.1"), "keep", ""),
        (rules.replicate(plan, GRAPH, "layers.1"), "replicate", ""),
        (rules.fuse(plan, GRAPH, "layers.[12]"), "fuse", ""),
    ):
        assert made == rewritten(plan, GRAPH, [Rule(verb, "layers.1", how)]) or verb == "fuse"
        assert made.decisions[-1].why == "asked for"
    named = rules.cut(plan, GRAPH, "after layers.[03]")
    assert named.cut_names == ("after layers.0", "after layers.2", "after layers.3")


# -- search ----------------------------------------------------------------------------------------


@given(chains(3, 6), st.data())
def test_balanced_cuts_end_where_they_must_and_nowhere_they_may_not(pair, data) -> None:
    graph, profile = pair
    points = range(len(graph.cut_points))
    ends = StageEnds(*(frozenset(data.draw(st.sets(st.sampled_from(points)))) for _ in range(2)))
    ends = ends._replace(forbidden=ends.forbidden - ends.required)
    count = data.draw(st.integers(0, len(points)))
    every = [
        cuts
        for cuts in itertools.combinations(points, count)
        if ends.required <= set(cuts) and not ends.forbidden & set(cuts)
    ]
    if not every:
        with pytest.raises(PlanError, match="do not end where rules say"):
            balanced_cuts(graph, profile.op_s, count + 1, ends)
        return

    def cost(cuts: tuple[int, ...]) -> tuple[float, int, tuple[int, ...]]:
        crossing = sum(graph.cut_points[c].forward_bytes for c in cuts)
        return max(stage_seconds(graph, profile.op_s, cuts)), crossing, cuts

    assert balanced_cuts(graph, profile.op_s, count + 1, ends) == min(map(cost, every))[2]


@pytest.mark.parametrize(
    ("said", "keeps"),
    [
        ([Rule("cut", "layers.0")], lambda cuts: 0 in cuts),
        ([Rule("fuse", "layers.[1-3]")], lambda cuts: not {1, 2} & set(cuts)),
        ([Rule("cut", "layers.3"), Rule("fuse", "layers.[01]")], lambda cuts: cuts == (3,)),
    ],
)
def test_search_finds_the_best_of_all_cuts_that_keep_the_rules(said, keeps) -> None:
    graph = layered(SIX)
    profile, cluster = profile_of(graph, [1, 1, 2, 1, 1, 3]), cluster_of(2)
    fixed = Fixed(ranks=2, replicas=1, stages=2, schedule="gpipe", rules=tuple(said))
    found = search(graph, profile, cluster, micro_batches=4, fixed=fixed)
    seconds = {
        cuts: evaluate(
            graph, profile, cluster, plan_by_hand(graph, cuts, "gpipe", num_micro_batches=4)
        )[0].step_s
        for cuts in itertools.combinations(range(5), 1)
    }
    allowed = {cuts: step_s for cuts, step_s in seconds.items() if keeps(cuts)}
    assert found.plan.predicted.step_s == min(allowed.values())
    assert all(keeps(each.plan.cuts) for each in found.candidates if not each.refused)
    assert [d.what for d in found.plan.decisions if d.by == "user" and d.why == "asked for"][-1:]


@given(sayings(), st.sampled_from([10**9, 110, 60]))
def test_search_looks_at_no_plan_that_breaks_a_rule(saying, memory: int) -> None:
    """Also of those that recompute because memory is short, and those whose cuts are moved."""
    said, cuts, (again, away, parts) = saying
    profile = profile_of(GRAPH, [1] * LAYERS)
    is_divided = bool({*parts.values()} - {"replicate"})  # among replicas
    asked = {"stages": 1} if is_divided else {"schedule": "one_f_one_b"}
    fixed = Fixed(ranks=2, **asked, rules=tuple(said))
    cluster = cluster_of(2, memory_bytes=memory)
    try:
        found = search(GRAPH, profile, cluster, micro_batches=4, fixed=fixed)
    except PlanError as problem:
        assert "rank" in problem.message  # noqa: PT017 - it is memory that lacks, no rule
        return
    assert found.plan.replicas == (2 if is_divided else 1)
    for plan in (each.plan for each in found.candidates if not each.refused):
        now = stage_of(plan)
        assert set(cuts) <= set(plan.cuts)
        for layer, how in again.items():
            assert plan.recompute[now[layer]] == (how == "yes")
        for layer, what in away.items():
            assert (plan.offload[now[layer]] if plan.offload else "none") == what
        for layer, word in parts.items():
            assert (plan.shard[now[layer]] if plan.shard else "replicate") == word


def test_memory_that_lacks_is_found_where_no_rule_says_to_keep() -> None:
    profile = profile_of(GRAPH, [1] * LAYERS)
    fixed = Fixed(ranks=1, schedule="gpipe")
    free = search(GRAPH, profile, cluster_of(1), micro_batches=2, fixed=fixed).plan
    tight = cluster_of(1, memory_bytes=free.predicted.peak_bytes[0] - 1)
    said = Rule("recompute", "layers.[0-2]", "no"), Rule("cut", "layers.[0-4]")
    found = search(GRAPH, profile, tight, micro_batches=2, fixed=replace(fixed, rules=said)).plan
    assert found.recompute[:3] == (False, False, False)
    assert any(found.recompute[3:])


def test_recompute_as_needed_stays_off_what_rules_decide() -> None:
    """Layer 0 has to, 1 to 3 must not; one of the others gives the byte that lacks."""
    said = [Rule("recompute", "layers.0", "yes"), Rule("recompute", "layers.[1-3]", "no")]
    profile, keeps = profile_of(GRAPH, [1] * LAYERS), ruled(said, GRAPH)
    plan = plan_by_hand(
        GRAPH,
        range(LAYERS - 1),
        f"gpipe / units {LAYERS}",
        num_micro_batches=3,
        num_ranks=1,
        recompute=[True] + [False] * (LAYERS - 1),
    )
    peak = max(Judge(GRAPH, profile, cluster_of(1)).candidate(plan).peak_bytes)
    tight = Judge(GRAPH, profile, cluster_of(1, memory_bytes=peak - 1), rules=keeps)
    made = Field(tight, [plan], "time", Effort()).made(0)
    assert not made.refused
    assert made.plan.recompute == as_needed(tight, plan).recompute
    assert made.plan.recompute[:4] == (True, False, False, False)
    assert sum(made.plan.recompute[4:]) == 1


def test_units_of_a_found_plan_keep_the_rules() -> None:
    """Where units are asked for, and where they hide the sums of replicas."""
    graph = layered(chain([1_000_000] * 4, [1] * 4))
    profile, cluster = profile_of(graph, (0.01,) * 4), cluster_of(2, link=Link(0.0, 1e8))
    plan = plan_by_hand(graph, [], "gpipe", num_micro_batches=1, replicas=2)
    plan = Judge(graph, profile, cluster).candidate(plan).plan
    choice = Choice(None, SimpleNamespace(graph=graph), plan)  # type: ignore[arg-type]
    fixed = Fixed(rules=(Rule("fuse", "layers.[12]"),))
    about = {"profiles": (profile,), "cluster": cluster}
    for units in (None, "block"):
        assert found_in_units(choice, units, fixed, **about).plan.cuts == (0, 2)
    whole = replace(plan, decisions=(Decision("optimizer", "whole", "only choice", "all"),))
    with pytest.raises(PlanError, match="cannot be divided into units: all"):
        in_units(choice._replace(plan=whole), None, (profile,), cluster, [Rule("cut", "layers.1")])


def test_slices_are_asked_for_by_the_modules_that_own_the_weights() -> None:
    said = [Rule("split", "layers.[13]", "4"), Rule("split", "layers.5", "2")]
    assert slices_asked(said, GRAPH) == {
        f"layers.{k}.weight": n for k, n in ((1, 4), (3, 4), (5, 2))
    }
    assert slices_asked([Rule("cut", "layers.1")], GRAPH) == {}


def test_of_nested_modules_the_outermost_count() -> None:
    assert matched(Rule("cut", "a*"), ["a", "a.b", "ab", "c"]) == ("a", "ab")


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("", "there is no [[rule]] in it", "docs/rules.md"),
        ("[rule]\ncut = 'x'", "rule is {'cut': 'x'}, no list", "[[rule]]"),
        ("rules = 1", 'unknown key "rules"', "[[rule]]"),
        ("[[rule]", "not readable TOML", "docs/rules.md"),
        ("[[rule]]\nblock = 'x'", "rule 1 says nothing", "one of cut, fuse"),
        ("[[rule]]\ncut = 'x'\nfuse = 'y'", "rule 1 says cut and fuse", "one of"),
        ("[[rule]]\ncut = 'x'\non = true", 'cut with an unknown key "on"', "none"),
        ("[[rule]]\ncut = 3", "cut is 3", "pattern"),
        ("[[rule]]\ncut = ' '", "cut of no module", "blocks"),
        ("[[rule]]\nrecompute = 'x'\non = 'y'", "on is 'y'", "true or false"),
        (
            "[[rule]]\noffload = 'x'\nwhat = 'gradients'",
            "offload of x is 'gradients'",
            "none, state",
        ),
        ("[[rule]]\noffload = 'x'\nwhat = 3", "what is 3", "a text"),
        ("[[rule]]\nreplace = 'x'", "replace of x by nothing", "by ="),
        ("[[rule]]\nsplit = 'x'\ninto = 1", "split of x is into 1", "2 or more"),
        ("[[rule]]\nsplit = 'x'\ninto = 'all'", "into is 'all'", "number of slices"),
        ("[[rule]]\nsplit = 'layers.2'\ninto = 3", "layers.2.weight is in no slices", "this rule"),
        (
            "[[rule]]\nsplit = 'layers.2'\n[[rule]]\nsplit = 'layers.*'\ninto = 3",
            "rule 2: split = 'layers.*' (3) contradicts FILE, rule 1: split = 'layers.2' (2)",
            "narrow",
        ),
        (
            "[[rule]]\ncut = 'layers.1'\n[[rule]]\ncut = 'layer.1'",
            "rule 2: cut = 'layer.1' matches no module",
            "layers.1",
        ),
        ("[[rule]]\ncut = 'after layers.9'", "no such cut point", "after layers"),
        ("[[rule]]\ncut = 'layers.5'", "the end of layers.5 is no cut point", "'after layers.4'"),
        (
            "[[rule]]\nrecompute = 'layers.*'\n[[rule]]\nrecompute = 'layers.2'\non = false",
            "rule 2: recompute = 'layers.2' (no) contradicts FILE, rule 1",
            "narrow",
        ),
        (
            "[[rule]]\noffload = 'layers.1'\n[[rule]]\nfuse = 'layers.[1-2]'",
            "rule 2: fuse = 'layers.[1-2]' contradicts FILE, rule 1",
            "fuse less",
        ),
        (
            "[[rule]]\ncut = 'layers.1'\n[[rule]]\nfuse = 'layers.[0-2]'",
            "rule 2: fuse = 'layers.[0-2]' contradicts FILE, rule 1: cut = 'layers.1', of cut",
            "narrow",
        ),
        ("[[rule]]\nfuse = 'layers.[02]'", "between its modules there is layers.1", "each run"),
        ("[[rule]]\nrecompute = 'layers.2.up'", "layers.2.up cannot be divided from", "name both"),
        ("[[rule]]\nshard = 'light'", "shard = 'light' matches no module", "nearest"),
        (
            "[[rule]]\nshard = 'layers.1'\n[[rule]]\nkeep = 'layers.*'",
            "rule 2: keep = 'layers.*' contradicts FILE, rule 1: shard = 'layers.1', of piece 1",
            "narrow",
        ),
        ("[[rule]]\nshard = 'layers.1'", "shards are divided among replicas", "2 replicas"),
        ("[[rule]]\noffload = 'light'", "light has no matrix product of its own", "behind it"),
    ],
)
def test_what_cannot_be_is_refused_with_file_number_and_values(
    text, message, hint, tmp_path
) -> None:
    """Layer 2 has parts that no cut point divides, and one that computes next to nothing."""
    made = {"y2": "layers.2.up", "d2": "layers.2.up"}
    nodes = tuple(replace(n, module=made.get(n.name, n.module)) for n in GRAPH.nodes)
    at = next(k for k, n in enumerate(nodes) if n.name == "y1")
    extra = replace(nodes[at], name="z", module="layers.2", inputs=nodes[at].inputs)
    light = replace(nodes[at], name="light", module="light", flop=0)
    place = next(k for k, n in enumerate(nodes) if n.name == "y2")
    graph = _inserted(replace(GRAPH, nodes=nodes), place, (extra, light))
    file = tmp_path / "rules.toml"
    file.write_text(text)
    plan = plan_by_hand(graph, [], "gpipe", num_micro_batches=2)
    with pytest.raises(PlanError) as refused:
        rewritten(plan, graph, load(file))
    assert str(file) in refused.value.message
    assert message.replace("FILE", str(file)) in refused.value.message
    assert hint in refused.value.hint


def _inserted(graph: Graph, place: int, more) -> Graph:
    """Return `graph` with nodes before `place` that nothing reads."""
    count = len(more)

    def moved(at: int) -> int:
        return at + count if at >= place else at

    def renumbered(node):
        places = {"inputs": tuple(map(moved, node.inputs)), "storage": moved(node.storage)}
        return replace(node, **places, origin=moved(node.origin) if node.origin >= 0 else -1)

    nodes = [renumbered(node) for node in graph.nodes]
    nodes[place:place] = [replace(n, storage=place + k) for k, n in enumerate(more)]
    points = tuple(replace(p, at=moved(p.at) if p.at > place else p.at) for p in graph.cut_points)
    gradients = {name: moved(at) for name, at in graph.gradients.items()}
    return replace(
        graph,
        nodes=tuple(nodes),
        loss=moved(graph.loss),
        gradients=gradients,
        cut_points=points,
    )
