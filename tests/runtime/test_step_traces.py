"""Steps under torch's profiler: which they are, and what is written of them."""

import json
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import PlanError
from penstock.runtime.calls import Bound
from penstock.runtime.step_traces import ProfiledSteps, StepTracer, name_of, parse_steps
from tests.cli.training import small


def names(file):
    """Return the names of the calls in a file, in order of their time."""
    events = json.loads(file.read_text())["traceEvents"]
    marks = [event for event in events if event.get("cat") == "user_annotation"]
    return [event["name"] for event in sorted(marks, key=lambda event: event["ts"])]


def test_steps_are_read_and_what_is_none_is_refused():
    assert [parse_steps(text) for text in ("20:25", "7", " 1: 1")] == [(20, 25), (7, 7), (1, 1)]
    for text in ("", ":", "x", "0", "0:3", "5:4", "1:2:3", "-1", "1.5"):
        with pytest.raises(PlanError, match=f'torch_profile is "{re.escape(text)}"') as problem:
            parse_steps(text)
        assert "20:25" in problem.value.hint


@given(st.integers(1, 9), st.integers(0, 4), st.integers(0, 12), st.integers(1, 4))
def test_windows_that_share_a_step_with_those_asked_for_are_seen(first, more, begin, length):
    asked = set(range(first, first + more + 1))
    shared = asked & {step + 1 for step in range(begin, begin + length)}
    steps = ProfiledSteps(first, first + more, None)
    assert steps.has(begin, length) == bool(shared)


def test_a_file_has_the_steps_that_are_asked_for_and_their_ops(tmp_path):
    calls = [
        Bound(lambda: torch.ones(3) + 1, "compute", "F", 1, 3),
        Bound(lambda: None, "data", "F", 1, 3),
        Bound(lambda: None, "collective", "reduce", 1, -1),
    ]
    tracer = StepTracer(ProfiledSteps(3, 4, tmp_path / "traces"), 5)
    for step in range(6):
        with tracer.over(calls, step, 1) as named:
            for call in named:
                call.call()
        if step == 2:
            assert not (tmp_path / "traces").exists()
    [file] = (tmp_path / "traces").iterdir()
    assert file.name == "rank5.step3.json"
    assert names(file) == ["F1.3", "data 1.3", "reduce 1"] * 2
    ops = [event["name"] for event in json.loads(file.read_text())["traceEvents"]]
    assert ops.count("aten::add") == 2


def test_a_profile_that_is_closed_goes_on_in_another_file(tmp_path):
    tracer = StepTracer(ProfiledSteps(1, 9, tmp_path), 0)
    for step in (0, 1):
        with tracer.over([Bound(lambda: None, "compute", "F", step, 0)], step, 1) as [call]:
            call.call()
        tracer.close()
    tracer.close()  # of nothing
    assert names(tmp_path / "rank0.step1.json") == ["F0.0"]
    assert names(tmp_path / "rank0.step2.json") == ["F1.0"]


def test_no_rank_is_profiled_unasked(tmp_path):
    calls = [Bound(lambda: None, "compute", "F", 0, 0)]
    with StepTracer(None, 0).over(calls, 0, 1) as named:
        assert named is calls
    assert not StepTracer(None, 0).sees(0, 1)
    assert name_of(Bound(lambda: None, "tell", "U", 0, -1)) == "tell 0"


@pytest.mark.parametrize("options", [{"stages": 2, "schedule": "gpipe"}, {"eager": True}])
def test_each_rank_of_a_run_writes_its_steps(tmp_path, monkeypatch, options):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    trained = ps.train(
        small(), num_steps=6, ranks=2, torch_profile="4:5", trial=False, check=False,
        out=tmp_path / "run", listener=None, **options,
    )  # fmt: skip
    files = sorted((tmp_path / "run" / "torch_profile").iterdir())
    assert [file.name for file in files] == ["rank0.step4.json", "rank1.step4.json"]
    told = names(files[1])
    if "stages" in options:
        forward = [name for name in told if re.fullmatch(r"F1\.\d+", name)]
        assert len(forward) == 2 * small().micro_batches / trained.plan.terms.joined
        assert max(trained.outcome.peak_bytes) > 0
    assert sum(name.startswith("Optimizer.step") for name in told) == 2


def test_steps_that_are_not_there_and_ranks_that_change_are_refused(tmp_path):
    for more, said in (({"torch_profile": "4"}, "there are 3"), ({"elastic": True}, "is elastic")):
        asked = {"num_steps": 3, "torch_profile": "2", "out": tmp_path / "run", **more}
        with pytest.raises(PlanError, match=said):
            ps.train(small(), listener=None, **asked)
