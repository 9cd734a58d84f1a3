"""Sampled: what runs have told of a step is kept, weighted by steps, and multiplies a profile."""

import logging
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.graph.merge import merged
from penstock.graph.trace import capture
from penstock.profile.kept_profiles import files_of_step
from penstock.profile.profile import Profile
from penstock.profile.sampled import StepFiles, StepRatios, keep_sampled, resting_on, sampled_in
from tests.parity.models import captured, job_of
from tests.profile.test_kept_profiles import PROFILE
from tests.search.chains import with_costs


def files_in(folder: Path, way: str = "own") -> StepFiles:
    return StepFiles(folder / f"{way}.json", folder / "every.json")


def kept(files: StepFiles, *runs: StepRatios, profile: Profile = PROFILE) -> tuple[float, ...]:
    """Return the seconds after these runs, each predicted with what the ones before told."""
    resting = resting_on(profile, sampled_in(files, profile))
    for run in runs:
        keep_sampled(files, resting, run)
        resting = resting_on(profile, sampled_in(files, profile))
    return resting.op_s


def test_profile_rests_on_what_runs_took(tmp_path):
    """A run that took twice the predicted seconds, then one that took just those."""
    path = files_in(tmp_path)
    once = kept(path, StepRatios({0: 2.0}, 3.0, 38))
    assert once == pytest.approx([each * 2 ** (38 / 40) for each in PROFILE.op_s])  # one for all
    again = kept(path, StepRatios({0: 1.0, 1: 1.0}, None, 400))
    assert again == pytest.approx(once)
    found = resting_on(PROFILE, sampled_in(path, PROFILE))
    assert (found.basis.steps, found.basis.runs) == (438, 2)
    assert found.update.update_s == pytest.approx(PROFILE.update.update_s * 3 ** (38 / 40))
    assert found.update.update_s_per_byte == pytest.approx(
        PROFILE.update.update_s_per_byte * 3 ** (38 / 40)
    )
    assert with_costs(
        found, op_s=PROFILE.op_s, steps=0, runs=0, update_s=0.1, update_s_per_byte=0.1
    )
    later = kept(path, StepRatios({0: 0.5, 1: 2.0}, None, 130))  # at most 128 before count
    assert later == pytest.approx([once[0] * 0.5 ** (130 / 260), once[1] * 2 ** (130 / 260)])


def test_what_another_machine_or_version_told_is_not_used(tmp_path, caplog):
    path = files_in(tmp_path)
    kept(path, StepRatios({0: 2.0}, None, 10))
    for other in ({"device": "gpu"}, {"versions": "torch 3"}):
        assert sampled_in(path, with_costs(PROFILE, **other)) is None
    assert resting_on(PROFILE, None) == PROFILE
    with caplog.at_level(logging.WARNING):
        path.every.write_text('{"sampled": {"device": "cpu"}}')
        assert sampled_in(path, PROFILE) is None
        path.every.write_text(path.every.read_text().replace("cpu", "gpu"))
    assert "delete it" not in caplog.text
    assert "cannot be used" in caplog.text


def test_step_is_found_however_its_micro_batches_are_joined_and_no_other_one(tmp_path):
    made, job = captured("gpt", torch.float32), job_of("gpt", torch.float32)
    own = files_of_step(tmp_path, made, job, 1)
    pair = merged(job, 2)
    joined = capture(pair)
    assert joined.graph.digest != made.graph.digest
    assert files_of_step(tmp_path, joined, pair, 1) == own
    more = files_of_step(tmp_path, joined, job, 1)  # a step of twice as many samples
    apart = files_of_step(tmp_path, made, job, 0)
    assert len({*own, *more, *apart}) == 6
    assert files_of_step(None, made, job, 1) is None


ratios = st.floats(0.2, 5.0)


@given(st.lists(st.tuples(st.booleans(), ratios, ratios), min_size=1, max_size=5))
def test_all_ways_to_join_are_at_the_speed_that_the_last_run_has_told(tmp_path_factory, runs):
    """Of a step with an op more, or as it is: a busy day makes neither look faster."""
    folder = tmp_path_factory.mktemp("runs")
    more = replace(PROFILE, op_s=(0.3, 0.5, 0.1), workspace_bytes=(0,) * 3)
    ways = [(files_in(folder, "one"), PROFILE), (files_in(folder, "two"), more)]

    def speeds() -> list[float]:
        """Return the mean logarithm of each way's seconds over those that were measured."""
        return [mean_of(kept(files, profile=profile), profile.op_s) for files, profile in ways]

    for way, first, other in runs:
        files, profile = ways[way]
        before = speeds()[way]
        rested = resting_on(profile, sampled_in(files, profile))
        keep_sampled(files, rested, StepRatios({0: first, 1: other}, None, 10_000))
        one, two = speeds()
        assert one == pytest.approx(two)
        if not way:
            told = mean_of((first, other), (1.0, 1.0), profile.op_s)
            assert one == pytest.approx(before + told, rel=0.05, abs=0.05)


def mean_of(seconds, alone, weights=None):
    weights = weights or alone
    rows = zip(seconds, alone, weights, strict=True)
    return sum(w * math.log(s / a) for s, a, w in rows) / sum(weights)


def test_a_run_tells_of_the_ways_to_join_that_it_has_not_run(tmp_path):
    more = replace(PROFILE, op_s=(0.3, 0.5, 0.1), workspace_bytes=(0,) * 3)
    kept(files_in(tmp_path, "one"), StepRatios({0: 4.0, 1: 4.0}, 2.0, 10_000))
    found = resting_on(more, sampled_in(files_in(tmp_path, "two"), more))
    assert found.op_s == pytest.approx([4 * each for each in more.op_s], rel=0.01)
    assert found.update.update_s == pytest.approx(2 * more.update.update_s, rel=0.01)
    files_in(tmp_path).every.unlink()
    assert sampled_in(files_in(tmp_path, "one"), PROFILE) is None, "all is forgotten"


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
