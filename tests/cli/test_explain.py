"""penstock explain and penstock diff: decisions with what they gain, of plans and of runs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.cluster import Link
from penstock.plan import Decision, Plan, plan_by_hand
from penstock.search import evaluate
from penstock.timeline import breakdown_of
from penstock.training.saved import Basis, save_plan
from tests.cli.conftest import Call
from tests.search.chains import SIX, SIX_PROFILE, cluster_of

CLUSTER = cluster_of(2, link=Link(0.1, 100.0))
WHY = Decision("recompute", "stages 0", "search", "there was no room")
RULE = Decision("offload layers.[01]", "state", "user", "rules.toml, rule 1")
PLAN = replace(
    plan_by_hand(
        SIX,
        [1],
        "one_f_one_b",
        num_micro_batches=4,
        recompute=(True, False),
        offload=("state", "none"),
    ),
    decisions=(WHY, RULE),
)
OTHER = PLAN.changed(schedule="gpipe", recompute=(False, False), decisions=())


def given(plan: Plan) -> tuple[float, int]:
    found, _ = evaluate(SIX, SIX_PROFILE, CLUSTER, plan)
    return found.step_s, max(found.peak_bytes)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a folder with a plan and what is left of its run: all took twice as long."""
    save_plan(tmp_path / "plan.json", PLAN, Basis(SIX, (SIX_PROFILE,), CLUSTER))
    candidate, timeline = evaluate(SIX, SIX_PROFILE, CLUSTER, PLAN)
    timeline.save(tmp_path / "predicted.trace.json")
    parts = breakdown_of(timeline, candidate.step_s)
    twice = [tuple(2 * s for s in row) for row in parts.seconds]
    slow = replace(parts, wall_s=tuple(2 * s for s in parts.wall_s), seconds=tuple(twice))
    summary = {
        "step_s_measured": 2 * candidate.step_s,
        "peak_bytes_measured": list(candidate.peak_bytes),
        "breakdown": slow.to_json(),
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    return tmp_path


def test_each_decision_is_told_with_its_gain_and_what_was_measured(run: Path, call: Call) -> None:
    step_s, peak = given(PLAN)
    done = call("explain", run, "--json")
    found = json.loads(done.out)
    assert (found["step_s_predicted"], found["step_s_measured"]) == (step_s, 2 * step_s)
    rows = {row["what"]: row for row in found["decisions"]}
    first = rows["recompute"]
    other_s, other = given(PLAN.changed(recompute=(False, False)))
    assert (first["by"], first["why"]) == ("search", "there was no room")
    assert first["without"]["gain_s"] == other_s - step_s < 0
    assert first["without"]["gain_bytes"] == other - peak
    assert first["measured"]["measured_s"] == pytest.approx(2 * first["measured"]["predicted_s"])
    assert rows["offload layers.[01]"]["without"]["step_s"] == given(PLAN.changed(offload=()))[0]
    assert "offload" not in rows  # a rule says it
    assert len(rows) == len(found["decisions"])
    assert rows["schedule"]["why"] == "no reason is given"
    text = call("explain", run)
    assert "otherwise  in none:" in text.out
    assert "there was no room" in text.out
    assert "penstock replay" in text.err
    alone = json.loads(call("explain", run / "plan.json", "--json").out)
    assert all(row["measured"] is None for row in alone["decisions"])


def test_difference_of_two_plans_is_told_decision_by_decision(run: Path, call: Call) -> None:
    file = run / "other.json"
    save_plan(file, OTHER, Basis(SIX, (SIX_PROFILE,), CLUSTER))
    found = json.loads(call("diff", run, file, "--json").out)
    rows = {row["what"]: row for row in found["differences"]}
    assert set(rows) == {"schedule", "recompute"}
    assert rows["schedule"]["values"] == ["one_f_one_b", "gpipe"]
    assert rows["schedule"]["alone"]["step_s"] == given(PLAN.changed(schedule="gpipe"))[0]
    assert rows["recompute"]["decided"][0]["why"] == "there was no room"
    assert rows["recompute"]["decided"][1] is None
    told = [plan["step_s_predicted"] for plan in found["plans"]]
    assert told == [given(PLAN)[0], given(OTHER)[0]]
    assert [plan["step_s_measured"] for plan in found["plans"]] == [2 * told[0], None]
    assert "schedule: one_f_one_b -> gpipe" in call("diff", run, file).out
    assert call("diff", run, run).out.startswith("no difference")


def test_what_cannot_be_explained_is_refused(run: Path, call: Call, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "holds no plan.json" in call("explain", tmp_path / "empty").refusal(2)[0]
    (run / "graph.json").unlink()
    assert "cannot be simulated" in call("explain", run).refusal(2)[0]
    assert "no.json" in call("diff", run / "no.json", run).refusal(2)[0]
