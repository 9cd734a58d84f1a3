"""Files of plans as they were written before a plan had records are read as the same plans."""

import json
from pathlib import Path

import pytest

from penstock.errors import PlanError
from penstock.plan import Decision, Guarding, Plan, Prediction
from penstock.plan.decision_words import HOMES, ROWS, Words
from penstock.plan.tried import Tried

FLAT = """{
  "penstock": "plan", "graph": "e360825c7da03ea8", "cuts": [1], "cut_names": ["after layers.1"],
  "schedule": "one_f_one_b / units 1 1", "num_micro_batches": 4, "num_ranks": 1, "replicas": 2,
  "recompute": [true, [4, 7]], "offload": ["state", "none"], "beside": true,
  "shard": ["shard_keep", "replicate"], "prefetch": 1, "parts": [3, 1], "clip": true,
  "commits": true, "guard": [4, 1, []], "post_validation": false, "joined": 2,
  "buffers": "per replica", "early": 2, "shares": [], "hosts": ["b", "a"],
  "split": [["head.weight", 4]], "compiled": false, "wire": [8, 16], "sums": "bfloat16",
  "decisions": [{"what": "ranks", "value": "2", "by": "user", "why": "asked for"}],
  "predicted": {"step_s": 0.25, "peak_bytes": [1024, 2048], "usd": 0.125,
    "tried": [{"what": "one process", "ranks": 1, "step_s": 0.5, "peak_bytes": 4096, "usd": 0.0}]}
}"""
PLAN = Plan.of(
    graph="e360825c7da03ea8",
    cuts=(1,),
    cut_names=("after layers.1",),
    schedule="one_f_one_b / units 1 1",
    num_micro_batches=4,
    num_ranks=1,
    replicas=2,
    recompute=(True, (4, 7)),
    offload=("state", "none"),
    beside=True,
    shard=("shard_keep", "replicate"),
    prefetch=1,
    parts=(3, 1),
    clip=True,
    commits=True,
    guard=Guarding(4, 1),
    joined=2,
    buffers="per replica",
    early=2,
    hosts=("b", "a"),
    split=(("head.weight", 4),),
    wire=(8, 16),
    sums="bfloat16",
    decisions=(Decision("ranks", "2", "user", "asked for"),),
    predicted=Prediction(0.25, (1024, 2048), 0.125, (Tried("one process", 1, 0.5, 4096),)),
)


def test_flat_file_is_the_plan_whose_words_it_has(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(FLAT)
    assert Plan.load(tmp_path / "plan.json") == PLAN
    assert Plan.from_text(FLAT) == PLAN
    later = {"tensor", "context", "topology"}  # words that no flat file has
    assert json.loads(FLAT).keys() - {"penstock"} == Words.__annotations__.keys() - later


def test_flat_file_that_leaves_out_what_is_default_is_read() -> None:
    words = "penstock", "graph", "cuts", "cut_names", "schedule", "num_micro_batches", "num_ranks"
    content = json.loads(FLAT)
    plan = Plan.from_text(json.dumps({word: content[word] for word in words}))
    own = {word: content[word] for word in words[1:]}
    assert plan == Plan.of(**own)


@pytest.mark.parametrize(
    ("word", "value", "problem"),
    [
        ("cuts", 5, "cuts is 5, not a list"),
        ("cuts", ["one"], r"stages\[0\].cut is 'one'"),
        ("cut_names", [], "cut_names says 0 of 1"),
        ("recompute", [True], "recompute says 1 of 2 stages"),
        ("shard", ["shard", "half"], r"stages\[1\].weights is 'half'"),
        ("num_micro_batches", "4", "place.num_micro_batches is '4'"),
        ("joined", "half", "terms.joined is 'half'"),
        ("colour", "red", "colour is 'red', not a field that is known"),
    ],
)
def test_damaged_flat_file_is_refused_with_the_name_of_what_is_wrong(
    tmp_path: Path, word: str, value: object, problem: str
) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({**json.loads(FLAT), word: value}))
    with pytest.raises(PlanError, match=problem):
        Plan.load(tmp_path / "plan.json")


def test_file_is_written_with_its_records() -> None:
    content = PLAN.to_json()
    assert content["stages"] == [
        {
            "cut": 1,
            "name": "after layers.1",
            "recompute": True,
            "far": "state",
            "weights": "shard_keep",
        },
        {"cut": None, "name": "", "recompute": [4, 7], "far": "none", "weights": "replicate"},
    ]
    own = ("graph", "schedule", "decisions", "predicted")
    assert sorted([*HOMES, *ROWS, *own]) == sorted(Words.__annotations__)
    for word, home in HOMES.items():
        assert word in content[home], word  # type: ignore[operator]
