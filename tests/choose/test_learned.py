"""What a run tells of its devices is kept, and the next plan for such devices rests on it."""

from dataclasses import replace

import pytest
import torch

from penstock.choose.choose import Choice
from penstock.choose.device_kinds import profiled
from penstock.choose.learned import learn, learn_step, segments_of
from penstock.cluster import Cluster, DeviceKind, Host, Link
from penstock.listener import SILENT
from penstock.plan.lower_plan import stages_of
from penstock.plan.of_plan import lower
from penstock.profile.estimate import estimated
from penstock.profile.kept_profiles import files_of_step, samples_of
from penstock.profile.latency import learned
from penstock.profile.measure import measure
from penstock.profile.profile import FusedCost
from penstock.profile.sampled import resting_on, sampled_in
from penstock.runtime.sampler import ActionSeconds, Samples
from penstock.schedule.orders import KINDS
from penstock.search import Fixed, search
from penstock.simulate.of_program import simulate
from penstock.simulate.price import Ways, costs_of
from tests.parity.models import captured, job_of, plan_of

BOARD = DeviceKind("board", 10**9, (("float32", 1e8),), 1e8)
OTHER = DeviceKind("other", 10**9, (("int8", 1e8),), 1e8)


def cluster_of(*kinds: DeviceKind) -> Cluster:
    hosts = tuple(Host(f"h{at}", kind.name, 1) for at, kind in enumerate(kinds))
    return Cluster(tuple(dict.fromkeys(kinds)), hosts, between=Link(1e-5, 1e9))


@pytest.mark.parametrize("schedule", ["one_f_one_b", "zb_h1"])
def test_run_tells_of_its_devices_and_a_plan_for_them_rests_on_it(schedule, tmp_path, monkeypatch):
    """A board that takes 3 times what its peaks say; it runs two stages, and no op is profiled."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made, job = captured("gpt", torch.float32), job_of("gpt", torch.float32)
    plan, cluster = plan_of(made.graph, schedule, 2, 3), cluster_of(BOARD, BOARD)
    (before,) = profiled(made, job, cluster, SILENT)
    assert (before.basis.how, before.basis.samples, before.basis.error) == ("estimated", 0, 0.0)
    truth = replace(before, op_s=tuple(3 * s for s in before.op_s))
    timeline = simulate(lower(plan, made.graph), truth, cluster)
    folder = tmp_path / "penstock" / "profiles"
    learn(Choice(job, made, plan), cluster, timeline, folder)
    assert len(samples_of(folder, BOARD)) == (4 if schedule == "one_f_one_b" else 5)
    (after,) = profiled(made, job, cluster, SILENT)
    assert after.micro_batch_s == pytest.approx(truth.micro_batch_s, rel=0.03)
    assert 0.1 < after.basis.error < 0.4
    found = search(made.graph, after, cluster, micro_batches=2, fixed=Fixed(ranks=1))
    (seconds,) = (each for each in found.plan.decisions if each.what == "seconds")
    assert seconds.value == "board estimated"
    count = len(samples_of(folder, BOARD))
    assert f"on board (learned from {count} measured segments of runs, may be off by" in seconds.why


def test_devices_are_told_apart_and_one_that_cannot_be_estimated_tells_nothing():
    made, job = captured("gpt", torch.float32), job_of("gpt", torch.float32)
    plan, kinds = plan_of(made.graph, "gpipe", 2, 3), (BOARD, OTHER)
    rows = [replace(estimated(made.graph, BOARD, 0.0), kind=kind.name) for kind in kinds]
    cluster = cluster_of(*kinds)
    timeline = simulate(lower(plan, made.graph), rows, cluster)
    found = segments_of(Choice(job, made, plan), cluster, timeline)
    assert [(kind.name, len(row)) for kind, row in found.items()] == [("board", 2)]
    known = learned(found[BOARD])
    assert known.factors == pytest.approx([1.0] * 7, abs=0.1)  # B adds gradients up too
    learn(Choice(job, made, plan), cluster, timeline, None)


@pytest.mark.parametrize(
    ("schedule", "changes"),
    [
        ("one_f_one_b", {}),
        ("one_f_one_b", {"recompute": (True, False)}),
        ("one_f_one_b", {"compiled": True}),
        ("zb_h1", {}),
    ],
)
def test_sampled_steps_teach_what_each_segment_takes(schedule, changes, tmp_path):
    """A machine on which F takes three times what was measured, all else half, and updates four.

    What B repeats of F takes three times, too; compiled, what compiled ops take.
    """
    made, job = captured("gpt", torch.float32), job_of("gpt", torch.float32)
    plan = plan_of(made.graph, schedule, 2, 3).changed(**changes)
    cluster = Cluster((BOARD,), (Host("here", "board", 2),), inside=Link(1e-5, 1e9))
    profile = replace(measure(made, job), kind="board", call_s=0.0, accumulate_s_per_byte=0.0)
    rows = (s.segment("F") for s in stages_of(plan, made.graph).stages)
    profile = replace(profile, fused=tuple(FusedCost(row.digest, 0.4, 1) for row in rows))
    phases = [3.0 if node.phase == "F" else 0.5 for node in made.graph.nodes]
    truth = replace(
        profile,
        op_s=tuple(s * ratio for s, ratio in zip(profile.op_s, phases, strict=True)),
        update=profile.update.times(4),
    )
    stages = stages_of(plan, made.graph)
    ways = Ways(compiled=plan.terms.compiled)
    kinds = ["F", "B", "U"] if schedule == "one_f_one_b" else ["F", "I", "W", "U"]

    def seconds_of(known):
        seconds = costs_of(made.graph, stages, known, ways=ways).action_s[:, :, 0]
        return {(kind, at): seconds[KINDS.index(kind), at] for kind in kinds for at in range(2)}

    took = seconds_of(truth)
    rows = [
        Samples(
            tuple(ActionSeconds(k, at, s) for (k, at), s in took.items() if at == rank and s > 0),
            998, 998, 1000, 0.1, 1.0, 0, 0.1,
        )
        for rank in range(2)
    ]  # fmt: skip
    learn_step(Choice(job, made, plan), [profile], cluster, rows, tmp_path)
    files = files_of_step(tmp_path, made, job, profile.basis.beside)
    assert files is not None
    known = resting_on(profile, sampled_in(files, profile))
    assert (known.basis.steps, known.basis.runs) == (998, 1)
    for action, seconds in seconds_of(known).items():
        assert seconds == pytest.approx(took[action], rel=0.01), action
    learn_step(Choice(job, made, plan), [profile], cluster, rows, None)  # nowhere to be kept
