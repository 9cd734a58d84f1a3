"""A plan is compiled where a run is long enough for it, and its ranks then were faster."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

import penstock as ps
from penstock.choose import compiling, fuse
from penstock.choose.choose import Choice, Machines, predicted
from penstock.choose.compiling import compiled
from penstock.cluster import Cluster
from penstock.errors import PlanError
from penstock.graph import fused_runs as graph_fuse
from penstock.graph.trace import Capture
from penstock.plan import plan_by_hand
from penstock.plan.lower_plan import stages_of
from penstock.profile import Profile, fused, kept_profiles
from penstock.profile.profile import FusedCost
from penstock.prove.prove import Planned, prove
from penstock.search.judge import Judge
from penstock.training.view import Terminal
from tests.cli.training import small
from tests.graph.test_fused_runs import StandIn, compiler  # noqa: F401 - a fixture
from tests.parity.models import captured, job_of, plan_of
from tests.search.chains import profile_of, with_costs

FLOAT = torch.float32
THERE = Machines(Cluster.here(1))


@cache
def made() -> Capture:
    return captured("tied", FLOAT)


@cache
def seconds() -> Profile:
    graph = made().graph
    return with_costs(profile_of(graph, ()), op_s=(1e-3,) * len(graph.nodes), how="measured")


def choice() -> Choice:
    plan = plan_of(made().graph, "gpipe", 1, 1)
    plan = predicted(plan, made().graph, (seconds(),), THERE.cluster)
    return Choice(job_of("tied", FLOAT, micro_batches=1), made(), plan)


def decided(monkeypatch, num_steps: int, *, ratio: float = 0.5, took: float = 0.5):
    """Return the choice and its reason, of ops that take `ratio`, in a run that takes `took`."""

    def known(job, made, plan, profiles):
        assert plan.terms.compiled
        stages = stages_of(plan, made.graph).stages
        rows = (FusedCost(s.segment(k).digest, ratio, 1) for s in stages for k in "FB")
        return (replace(profiles[0], fused=tuple(rows)),)

    monkeypatch.setattr(compiling, "known", known)
    found, profiles = compiled(
        choice(),
        (seconds(),),
        THERE,
        num_steps,
        lambda tried, count: [took if tried.plan.terms.compiled else 1.0] * (count - 1),
    )
    (decision,) = (each for each in found.plan.decisions if each.what == "compiled")
    assert found.plan.terms.compiled == (decision.value == "yes")
    assert found.plan.predicted is not None
    return found.plan, decision, profiles[0]


def test_a_long_run_is_compiled_and_says_what_it_gained_beside_what_was_predicted(monkeypatch):
    plan, decision, profile = decided(monkeypatch, 10_000)
    assert plan.terms.compiled
    assert plan.predicted.step_s == pytest.approx(0.5 * choice().plan.predicted.step_s, rel=0.02)
    assert "500 ms measured, not compiled 1.00 s measured" in decision.why
    assert "predicted in place of" in decision.why
    assert "10,000 steps take 83.3 min less" in decision.why
    assert len(profile.fused) == 2


@pytest.mark.parametrize(
    ("num_steps", "options", "says"),
    [
        (1, {}, "s of compiling"),  # at most so much of the run
        (10_000, {"ratio": 0.99}, "predicted in place of"),
        (10_000, {"took": 0.98}, "980 ms measured"),  # turns do not settle so little
    ],
)
def test_what_does_not_pay_is_not_compiled(monkeypatch, num_steps, options, says):
    plan, decision, _ = decided(monkeypatch, num_steps, **options)
    assert not plan.terms.compiled
    assert decision.by == "search"
    assert says in decision.why
    assert plan.predicted == choice().plan.predicted


def test_schedule_built_for_seconds_is_built_again_for_those_of_compiled_stages(monkeypatch):
    """F of compiled ops takes half as long, I a quarter, W as long as before."""
    ratios, there = {"F": 0.5, "I": 0.25, "W": 1.0}, Machines(Cluster.here(2))
    assert there.cluster is not None
    profile = replace(seconds(), kind="cpu")
    plan = plan_of(made().graph, "zb_greedy", 2, 4)
    plan = Judge(made().graph, profile, there.cluster).suited(plan)
    start = Choice(job_of("tied", FLOAT, micro_batches=4), made(), plan)
    start = start._replace(plan=predicted(plan, made().graph, (profile,), there.cluster))

    def known(job, made, plan, profiles):
        stages = stages_of(plan, made.graph).stages
        rows = (FusedCost(s.segment(k).digest, ratios[k], 1) for s in stages for k in "FIW")
        return (replace(profiles[0], fused=tuple(rows)),)

    monkeypatch.setattr(compiling, "known", known)
    run = lambda tried, count: [0.5 if tried.plan.terms.compiled else 1.0] * (count - 1)  # noqa: E731
    before, call_s = plan.schedule.seconds, profile.call_s
    found, _ = compiled(start, (profile,), there, 10_000, run)
    again = found.plan.schedule.seconds
    assert call_s < 1e-6
    for kind, ratio in enumerate(ratios.values()):
        assert again[kind] == pytest.approx([ratio * s for s in before[kind]], rel=0.01)
    kept, _ = compiled(start, (profile,), there, 10_000, run, suits=False)
    assert kept.plan.schedule.seconds == before


def test_without_a_compiler_a_plan_is_run_op_by_op_and_says_so(monkeypatch):
    monkeypatch.setattr(fuse, "no_compiler", lambda: "no C++ compiler")
    monkeypatch.setattr(compiling, "no_compiler", fuse.no_compiler)
    plan, decision, _ = decided(monkeypatch, 10_000)
    assert (decision.by, decision.why, plan.terms.compiled) == (
        "only choice",
        "no C++ compiler",
        False,
    )
    asked = fuse.usable(choice().plan.changed(compiled=True))
    assert not asked.terms.compiled
    assert asked.decisions[-1].why == "no C++ compiler"


def test_what_is_measured_of_a_compiled_plan_is_kept(monkeypatch, tmp_path, compiler):  # noqa: F811
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fused, "_BUDGET_S", 0.0)
    plan, job = choice().plan.changed(compiled=True), job_of("tied", FLOAT, micro_batches=1)
    (profile,) = fuse.known(job, made(), plan, (seconds(),))
    (stage,) = stages_of(plan, made().graph).stages
    assert [r.segment for r in profile.fused] == [stage.forward.digest, stage.backward.digest]
    assert all(row.ratio > 0 and row.peak_bytes > 0 for row in profile.fused)
    (kept,) = (tmp_path / "penstock" / "profiles").iterdir()
    assert stage.forward.digest in kept.read_text()
    assert fuse.known(job, made(), plan, (profile,)) == (profile,)
    path = tmp_path / "penstock" / "profiles" / kept.name
    measured = replace(profile, kind="", fused=())
    measured.save(path)  # what `measured` would have kept, before runs told anything
    resting = with_costs(profile, op_s=(9.0,) * len(profile.op_s), fused=(), steps=40, runs=1)
    resting = replace(resting, kind="cpu")
    monkeypatch.setattr(kept_profiles, "find", lambda folder, wanted: Profile.load(path))
    (resting,) = fuse.known(job, made(), plan, (resting,))
    assert (resting.op_s[0], len(resting.fused)) == (9.0, 2)
    again = Profile.load(path)
    assert (again.op_s, again.basis.steps, len(again.fused)) == (profile.op_s, 0, 2)


def test_ranks_of_a_compiled_plan_run_what_was_compiled(compiler: StandIn) -> None:  # noqa: F811
    exact = torch.float64
    graph = captured("dropout", exact).graph
    plan = plan_of(graph, "zb_h1", 2, 2).changed(compiled=True)
    job = job_of("dropout", exact, "adamw")
    proof = prove(Planned(job, captured("dropout", exact), plan))
    assert proof.problem == ""
    assert all(row.bitwise for row in proof.differences)
    assert compiler.calls >= 4 * len(compiler.modules)  # 2 steps of 2 micro-batches
    assert len(compiler.modules) == len(graph_fuse._made) == len(compiler.used)


def test_a_plan_whose_compiled_ops_are_wrong_is_trained_op_by_op(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compiler: StandIn,  # noqa: F811
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fused, "_BUDGET_S", 0.0)
    job, said, out = small(), list[str](), tmp_path / "run"
    count = job.micro_batches
    plan = plan_by_hand(ps.trace(job), [], "gpipe", num_micro_batches=count, clip=True)
    compiler.error = 1e-3
    monkeypatch.setattr(Terminal, "say", lambda self, words: said.append(words))
    found = ps.train(job, num_steps=1, plan=plan.changed(compiled=True), out=out)
    assert compiler.modules
    assert "training by the same plan, its ops not compiled" in said
    assert said[-1].startswith("equal to the plain loop")
    assert not found.plan.terms.compiled
    assert ps.Plan.load(out / "plan.json") == found.plan


def test_a_wire_that_rounds_and_ops_that_round_otherwise_are_refused() -> None:
    with pytest.raises(PlanError, match="round in the last bit"):
        choice().plan.changed(compiled=True, wire=(8, 8))
