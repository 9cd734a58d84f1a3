"""A forward-only run gives the losses and buffers of the plain model, and changes nothing else."""

from dataclasses import replace

import pytest
import torch

from penstock.cluster import Cluster
from penstock.graph.trace import build
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.prove.plain import Plain
from penstock.prove.prove import Planned, prove
from penstock.runtime.launch import run_processes, run_threads
from penstock.search import evaluate
from tests.parity.models import MODELS, captured, job_of, plan_of
from tests.parity.training import Run, differing, train
from tests.runtime.test_memory import profile_of

FLOAT = torch.float32


def inference(name: str, stages: int, micro_batches: int, **options: object) -> Run:
    made = captured(name, FLOAT)
    plan = plan_of(made.graph, "forward_only", stages, micro_batches, **options)
    return Run(plan, job_of(name, FLOAT, "adamw"), made)


def outcome_and_plain(run: Run, folder, launcher):
    outcome = train(run, folder, lengths=(1,), launcher=launcher)
    count = run.plan.num_micro_batches * run.plan.replicas
    plain = Plain(replace(run.job, micro_batches=count))
    step = plain.gradients(0, backward=False)
    return outcome, step.loss, plain.buffers()


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 1), (4, 5), (8, 3)])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(3)
def test_losses_and_buffers_are_those_of_the_plain_forward_pass(
    name, stages, micro_batches, tmp_path
):
    if stages - 1 > len(captured(name, FLOAT).graph.cut_points):
        pytest.skip("the model has not so many cut points")
    run = inference(name, stages, micro_batches)
    outcome, loss, buffers = outcome_and_plain(run, tmp_path, run_threads)
    assert [step.loss for step in outcome.steps] == [loss]
    found = {k: v for k, v in outcome.weights.items() if k.startswith("buffers/")}
    assert differing(found, {f"buffers/{k}": v for k, v in buffers.items()}) == []


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("launcher", [run_threads, run_processes])
def test_ranks_of_their_own_give_the_losses_of_the_plain_forward_pass(launcher, replicas, tmp_path):
    run = inference("dropout", 2 // replicas, 4, replicas=replicas)
    outcome, loss, _ = outcome_and_plain(run, tmp_path, launcher)
    assert [step.loss for step in outcome.steps] == pytest.approx([loss])


def test_steps_of_inference_are_reported_each_and_leave_the_weights_alone(tmp_path):
    run = inference("dropout", 4, 2)
    outcome = train(run, tmp_path, lengths=(3,))
    model, _ = build(run.job)
    weights = {f"weights/{name}": value for name, value in model.named_parameters()}
    assert [step.step for step in outcome.steps] == [0, 1, 2]
    assert len({step.loss for step in outcome.steps}) == 3
    assert differing({k: outcome.weights[k] for k in weights}, weights) == []


def test_job_that_clips_is_checked_without_its_clipping():
    job = job_of("dropout", FLOAT, "adamw", clip_norm=0.1)
    run = inference("dropout", 2, 3)
    _, loss = prove(Planned(job, run.captured, run.plan)).differences
    assert (loss.what, loss.bitwise) == ("loss", True)


def test_job_that_clips_can_be_run_forward_only(tmp_path):
    run = inference("dropout", 2, 3)._replace(job=job_of("dropout", FLOAT, "sgd", clip_norm=0.1))
    assert len(train(run, tmp_path, lengths=(2,)).steps) == 2


def test_stages_of_inference_keep_nothing_and_send_only_forward():
    run = inference("tied", 4, 2)
    stages = stages_of(run.plan, run.captured.graph)
    assert not stages.has_gradients
    assert {edge.kind for edge in stages.edges} == {"F"}
    for stage in stages.stages:
        assert (stage.forward.keeps, stage.backward.ops, stage.forward.change_bytes) == ((), (), 0)
    program = lower_plan(run.plan, run.captured.graph)
    assert program.num_stages == 4


def test_inference_is_predicted_to_hold_weights_and_what_one_micro_batch_needs():
    run = inference("dropout", 2, 6)
    graph, cluster = run.captured.graph, Cluster.here(2)
    found, _ = evaluate(graph, profile_of("dropout"), cluster, run.plan)
    trained = plan_of(graph, "gpipe", 2, 6)
    other, _ = evaluate(graph, profile_of("dropout"), cluster, trained)
    weights = sum(node.size_bytes for node in graph.nodes if node.kind == "parameter")
    assert weights <= sum(found.peak_bytes) < sum(other.peak_bytes) / 2
    assert found.step_s < other.step_s
