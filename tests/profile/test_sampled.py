"""Sampled: what runs have told of a step is kept, weighted by steps, and multiplies a profile."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.graph.merge import merged
from penstock.graph.trace import capture
from penstock.profile.kept_profiles import steps_path
from penstock.profile.sampled import StepRatios, keep_sampled, resting_on, sampled_in
from tests.parity.models import captured, job_of
from tests.profile.test_kept_profiles import PROFILE


def kept(path: Path, *runs: StepRatios) -> tuple[float, ...]:
    """Return the seconds after these runs, each predicted with what the ones before told."""
    profile = PROFILE
    for run in runs:
        keep_sampled(path, profile, run)
        profile = resting_on(PROFILE, sampled_in(path, PROFILE))
    return profile.op_s


def test_profile_rests_on_what_runs_took(tmp_path):
    """A run that took twice the predicted seconds, then one that took just those."""
    path = tmp_path / "steps.json"
    once = kept(path, StepRatios({0: 2.0}, 3.0, 38))
    assert once == pytest.approx([each * 2 ** (38 / 40) for each in PROFILE.op_s])  # one for all
    again = kept(path, StepRatios({0: 1.0, 1: 1.0}, None, 400))
    assert again == pytest.approx(once)
    found = resting_on(PROFILE, sampled_in(path, PROFILE))
    assert (found.steps, found.runs) == (438, 2)
    assert found.update_s == pytest.approx(PROFILE.update_s * 3 ** (38 / 40))
    assert found.update_s_per_byte == pytest.approx(PROFILE.update_s_per_byte * 3 ** (38 / 40))
    assert replace(found, op_s=PROFILE.op_s, steps=0, runs=0, update_s=0.1, update_s_per_byte=0.1)
    later = kept(path, StepRatios({0: 0.5, 1: 2.0}, None, 130))  # at most 128 before count
    assert later == pytest.approx([once[0] * 0.5 ** (130 / 260), once[1] * 2 ** (130 / 260)])


def test_what_another_machine_or_version_told_is_not_used(tmp_path, caplog):
    path = tmp_path / "steps.json"
    kept(path, StepRatios({0: 2.0}, None, 10))
    for other in ({"device": "gpu"}, {"versions": "torch 3"}, {"op_s": (1.0,) * 3}):
        changed = replace(PROFILE, **other, workspace_bytes=(1,) * len(other.get("op_s", (1, 2))))
        assert sampled_in(path, changed) is None
    assert resting_on(PROFILE, None) == PROFILE
    with caplog.at_level(logging.WARNING):
        path.write_text('{"sampled": {"device": "cpu"}}')
        assert sampled_in(path, PROFILE) is None
        path.write_text(path.read_text().replace("cpu", "gpu"))
    assert "delete it" not in caplog.text
    assert "cannot be used" in caplog.text


def test_step_is_found_however_its_micro_batches_are_joined_and_no_other_one(tmp_path):
    made, job = captured("gpt", torch.float32), job_of("gpt", torch.float32)
    own = steps_path(tmp_path, made, job, 1)
    pair = merged(job, 2)
    joined = capture(pair)
    assert joined.graph.digest != made.graph.digest
    assert steps_path(tmp_path, joined, pair, 1) == own
    assert steps_path(tmp_path, joined, job, 1) != own  # a step of twice as many samples
    assert steps_path(tmp_path, made, job, 0) != own
    assert steps_path(None, made, job, 1) is None


def test_what_a_run_tells_of_one_step_holds_for_steps_with_other_ops():
    from fractions import Fraction

    from penstock.choose.choose import Joining
    from penstock.choose.prepare import joined_step
    from penstock.listener import SILENT
    from penstock.pilot.replan import corrected
    from tests.parity.models import plan_of

    job, whole = job_of("gpt", torch.float32, micro_batches=4), captured("gpt", torch.float32)
    ways = []
    for count in (1, 2, Fraction(1, 3)):
        own, made = joined_step(job, whole, count, (), SILENT)
        ops = len(made.graph.nodes)
        profile = replace(PROFILE, op_s=(0.5,) * ops, workspace_bytes=(0,) * ops)
        ways.append(Joining(count, own, made, (profile,)))
    ran = plan_of(ways[1].captured.graph, "gpipe", 1, 2).changed(joined=2)
    last = len(ways[1].profiles[0].op_s) - 1
    assert last >= len(ways[0].profiles[0].op_s)  # an op that the others have not
    told = [(ways[1].profiles[0], StepRatios({0: 1.0, last: 4.0}, None, 8))]
    found = [corrected(way, ran, told).profiles[0].op_s for way in ways]
    assert [len(row) for row in found] == [len(way.profiles[0].op_s) for way in ways]
    assert len({*found[0], *found[2]}) == 1  # the mean of what was sampled
    assert found[1][last] > found[0][0] > found[1][0]
