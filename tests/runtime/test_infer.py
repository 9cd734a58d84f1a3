"""A stream through a forward pipeline gives what the plain model returns, in files of tensors."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.errors import JobError, RunError
from penstock.graph.trace import build_model, capture
from penstock.plan import plan_by_hand
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.runtime.infer import BatchStream, apart, file_of, inference_job, returns, stream
from penstock.runtime.launch import run_processes, run_threads
from tests.parity.models import job_of


@cache
def asked():
    """Return a model with dropout and running statistics, for inference, and its trace."""
    job = inference_job(job_of("batch_norm", torch.float32))
    return job, capture(job)


@pytest.mark.parametrize("launcher", [run_threads, run_processes])
def test_files_hold_what_the_model_returns_in_evaluation_mode(launcher, tmp_path):
    job, captured = asked()
    plan = plan_by_hand(captured.graph, (2, 5), "forward_only", num_micro_batches=3)
    parts = stages_of(plan, captured.graph), job, lower_plan(plan, captured.graph)
    found = stream(BatchStream(captured, *parts, 6, tmp_path, 5), launcher)
    assert returns(captured) == ["output"]
    model, batches, losses = build_model(job), job.data(0), []
    assert not model.training
    with torch.no_grad():
        for number in range(6):
            batch = next(batches)
            expected = model(batch["tokens"])
            losses.append(
                torch.nn.functional.cross_entropy(expected.flatten(0, 1), batch["next"].flatten())
            )
            if number < 5:
                assert torch.equal(load_file(file_of(tmp_path, number))["output"], expected)
    assert not file_of(tmp_path, 5).exists()
    assert found.loss == pytest.approx(float(torch.stack(losses).mean()))
    assert found.period_s > 0
    assert apart(job, tmp_path, 5) == (0.0, True)
    wrong = load_file(file_of(tmp_path, 1))["output"]
    save_file({"output": wrong * 1.5}, file_of(tmp_path, 1))
    far, same = apart(job, tmp_path, 2)
    assert (far, same) == (pytest.approx(0.5), False)
    save_file({"output": wrong[:1]}, file_of(tmp_path, 1))
    with pytest.raises(RunError, match="batch 1 has no output"):
        apart(job, tmp_path, 2)


def test_weights_that_are_loaded_give_the_same_on_any_number_of_ranks(tmp_path):
    job, captured = asked()
    for ranks in (1, 2):
        (tmp_path / str(ranks)).mkdir()
        plan = plan_by_hand(
            captured.graph, (1, 3), "forward_only", num_micro_batches=3, num_ranks=ranks
        ).changed(offload=("weights", "none", "weights"), prefetch=(2, 0, 1))
        parts = stages_of(plan, captured.graph), job, lower_plan(plan, captured.graph)
        found = stream(BatchStream(captured, *parts, 6, tmp_path / str(ranks), 6), run_processes)
        assert found.period_s > 0
        assert apart(job, tmp_path / str(ranks), 6) == (0.0, True)


def test_loss_that_does_not_call_the_model_is_refused():
    job = job_of("batch_norm", torch.float32)
    around = replace(job, loss=lambda model, batch: model.head.weight.sum())
    with pytest.raises(JobError, match="does not call the model itself"):
        capture(inference_job(around))


def test_parts_of_what_a_model_returns_have_names():
    class Pair(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 3)

        def forward(self, x):
            y = self.layer(x)
            return {"logits": y, "rest": [y.argmax(1), None, "words"]}

    def loss(model, batch):
        return model(batch)["logits"].square().mean(), {"size": batch.mean()}

    def data(start):
        while True:
            yield torch.ones(2, 3)

    job = replace(job_of("gpt", torch.float32), model=Pair, loss=loss, data=data)
    assert returns(capture(inference_job(job))) == ["output.logits", "output.rest.0"]
