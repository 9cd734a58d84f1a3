"""Rules on the command line: plans that keep them, modules replaced, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from torch import addmm, nn, tanh

from penstock.plan import Plan
from tests.cli.conftest import MLP, Call

JOB = f"{MLP}:job"
RULES = """
[[rule]]
cut = "1"

[[rule]]
recompute = "[0-1]"

[[rule]]
offload = "3"
what = "state"

[[rule]]
replace = "2"
by = "BY"
"""


class Fused(nn.Module):
    """The same as a layer of the job, in other ops."""

    def __init__(self, old: nn.Module, *, scale: float = 1.0, twice: bool = False) -> None:
        super().__init__()
        self.add_module("0", old[0])
        self.scale, self.twice = scale, twice

    def forward(self, x):
        layer = self.get_submodule("0")
        weight = layer.weight.detach() if self.twice else layer.weight
        return tanh(addmm(layer.bias, x, weight.t())) * self.scale


def fused(old: nn.Module) -> nn.Module:
    return Fused(old)


def fresh(old: nn.Module) -> nn.Module:
    """Give a layer with weights of its own, which it has to lose."""
    return nn.Sequential(nn.Linear(*old[0].weight.shape), nn.Tanh())


def louder(old: nn.Module) -> nn.Module:
    return Fused(old, scale=1.001)


def frozen(old: nn.Module) -> nn.Module:
    """Give what the other gives, and no gradient of its weight."""
    return Fused(old, twice=True)


def narrow(old: nn.Module) -> nn.Module:
    return nn.Linear(3, 3)


def nothing(old: nn.Module) -> int:
    return 3


def rules(folder: Path, by: str = "fused", text: str = RULES) -> Path:
    path = folder / "rules.toml"
    path.write_text(text.replace("BY", f"{__file__}:{by}"))
    return path


def test_rules_are_kept_by_check_plan_and_train(call: Call, tmp_path: Path) -> None:
    """A plan that is given is rewritten; one that is searched for is found so, and run so."""
    for by in ("fresh", "fused"):
        given = "--set", f"rules={rules(tmp_path, by)}"
        done = call("check", JOB, *given, "--json")
        found = json.loads(done.out)
        assert (done.code, found["ok"], found["bitwise"], found["stages"]) == (0, True, True, 4)
    out = tmp_path / "run"
    assert call("train", JOB, *given, "--ranks", 2, "--set", "stages=2", "--out", out).code == 0
    plan = Plan.load(out / "plan.json")
    assert plan.cut_names == ("after 1.0", "after 2", "after 3.0")
    assert (plan.recompute, plan.offload) == (
        (True, False, False, False),
        ("none", "none", "state", "none"),
    )
    said = {d.what: (d.value, d.by, d.why) for d in plan.decisions}
    place = f"{tmp_path / 'rules.toml'}, rule"
    assert said["cut 1"] == ("yes", "user", f"{place} 1")
    assert said["replace 2"] == (f"{__file__}:fused", "user", f"{place} 4")
    bare = replace(plan, decisions=(), predicted=None)
    bare.changed(recompute=(), offload=()).save(tmp_path / "other.json")
    done = call(
        "train",
        JOB,
        *given,
        "--plan",
        tmp_path / "other.json",
        "--out",
        out,
        "--set",
        "trial=false",
    )
    assert done.code == 0
    assert "equal to the plain loop at step 1" in done.err
    assert replace(Plan.load(out / "plan.json"), decisions=(), predicted=None) == bare
    again = call("train", JOB, *given, "--steps", 6, "--resume", "--out", out)
    assert again.code == 0
    assert "resuming after step 4" in again.err
    more = rules(tmp_path, text=RULES.replace('"[0-1]"', '"[0-2]"'))
    again = call(
        "train", JOB, "--set", f"rules={more}", "--steps", 8, "--ranks", 2, "--resume", "--out", out
    )
    assert again.code == 0
    kept = Plan.load(out / "plan.json")
    assert {d.what for d in kept.decisions} >= {"recompute [0-2]"}


SLICED = """
[[rule]]
split = "[03].0"
into = 3

[[rule]]
recompute = "0.0.slice*"

[[rule]]
shard = "3.0"
"""


def test_slices_are_checked_planned_trained_and_resumed(call: Call, tmp_path: Path) -> None:
    given = "--set", f"rules={rules(tmp_path, text=SLICED)}"
    done = call("check", JOB, *given, "--replicas", 2, "--set", "stages=1", "--json")
    found = json.loads(done.out)
    assert (done.code, found["ok"], found["stages"]) == (0, True, 8)
    assert found["max_relative_difference"] < 1e-6
    out = tmp_path / "run"
    asked = (
        "train",
        JOB,
        *given,
        "--ranks",
        2,
        "--set",
        "stages=1",
        "--out",
        out,
        "--set",
        "trial=false",
    )
    done = call(*asked)
    assert done.code == 0, done.err
    assert "equal to the plain loop at step 1" in done.err
    plan = Plan.load(out / "plan.json")
    rows = [("0.0.bias", 3), ("0.0.weight", 3), ("3.0.bias", 3), ("3.0.weight", 3)]
    assert list(plan.terms.split) == rows
    assert ("split [03].0", "3", "user") in {(d.what, d.value, d.by) for d in plan.decisions}
    assert plan.shard.count("shard") >= 3  # of the rule; the search may add others
    again = call(*asked, "--steps", 6, "--resume")
    assert (again.code, "resuming after step 4" in again.err) == (0, True)
    assert Plan.load(out / "plan.json").terms.split == plan.terms.split
    exported = call("export", out, "--to", tmp_path / "weights.safetensors")
    assert exported.code == 0
    given = "--plan", out / "plan.json"
    assert call("train", JOB, *given, "--out", tmp_path / "other", "--set", "trial=false").code == 0
    done = call("check", JOB, *given, "--json")
    assert (done.code, json.loads(done.out)["ok"]) == (0, True)
    whole = rules(tmp_path, text='[[rule]]\nsplit = "2"\n')
    error, hint = call("check", JOB, *given, "--set", f"rules={whole}").refusal(2)
    assert "split = '2' (2): 2.0.weight is in no slices" in error
    assert "make the plan with this rule" in hint


@pytest.mark.parametrize(
    ("by", "message"),
    [
        ("louder", "the output of 2 differs by 0.001"),
        ("frozen", "gradients of 2.0.weight differs by"),
        ("narrow", "only 2 has 0.bias of (32,)"),
        ("nothing", "for 2 it is the int 3"),
        ("none", "has no function none"),
    ],
)
def test_module_that_computes_something_else_replaces_none(
    by: str, message: str, call: Call, tmp_path: Path
) -> None:
    error, _ = call("check", JOB, "--set", f"rules={rules(tmp_path, by)}").refusal(2)
    assert message in error
    assert by == "none" or "rule 4" in error


def test_rules_that_no_plan_can_keep_are_refused(call: Call, tmp_path: Path) -> None:
    path = rules(tmp_path, text='[[rule]]\nfuse = "*"\n')
    error, hint = call(
        "plan", JOB, "--ranks", 2, "--set", "stages=2", "--set", f"rules={path}"
    ).refusal(2)
    assert "no plan fits ranks 2, stages 2, the rules: 2 ranks, 4 cut points" in error
    assert "leave more to the search" in hint
    error, hint = call("check", JOB, "--set", f"rules={path}").refusal(2)
    assert "2 stages do not end where rules say" in error
    error, _ = call(
        "train", JOB, "--set", f"rules={tmp_path / 'no.toml'}", "--set", "eager=true"
    ).refusal(2)
    assert "eager trains without a plan" in error
