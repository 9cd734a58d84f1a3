"""The Hugging Face jobs: each builds, trains eagerly, and draws its data by index alone."""

from itertools import islice
from pathlib import Path

import pytest
import torch

from penstock.job import Job, load_job

NAMES = ["gpt2", "llama", "bert", "t5", "vit", "resnet", "mixtral", "whisper", "mamba"]
FILE = Path(__file__).parents[2] / "examples" / "hf.py"

each = pytest.mark.parametrize("name", NAMES)


def job_of(name: str) -> Job:
    return load_job(f"{FILE}:{name}")


@each
def test_one_eager_step_gives_a_finite_loss_and_a_gradient_everywhere(name: str) -> None:
    job = job_of(name)
    torch.manual_seed(0)
    model = job.model()
    loss = job.loss(model, next(job.data(0)))
    loss.backward()
    assert loss.shape == ()
    assert loss.isfinite()
    trained = {key: weight for key, weight in model.named_parameters() if weight.requires_grad}
    assert [key for key, weight in trained.items() if weight.grad is None] == []


@each
def test_model_trains_and_its_optimizer_changes_it(name: str) -> None:
    job = job_of(name)
    torch.manual_seed(0)
    model = job.model()
    assert model.training
    before = {key: weight.clone() for key, weight in model.named_parameters()}
    optimizer = job.optimizer(model.parameters())
    job.loss(model, next(job.data(0))).backward()
    optimizer.step()
    assert any(not weight.equal(before[key]) for key, weight in model.named_parameters())


@each
def test_micro_batch_depends_on_its_index_alone(name: str) -> None:
    job = job_of(name)
    third = list(islice(job.data(0), 4))[3]
    again, other = islice(job.data(3), 2)
    assert third.keys() == again.keys() == other.keys()
    assert all(third[key].equal(again[key]) for key in third)
    assert not all(third[key].equal(other[key]) for key in third)
    assert all(third[key].shape == other[key].shape for key in third)


@each
def test_model_has_enough_blocks_for_four_stages(name: str) -> None:
    model = job_of(name).model()
    lists = [len(module) for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    assert max(lists) >= 4


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5"])
def test_dropout_is_on_where_the_library_has_it(name: str) -> None:
    job = job_of(name)
    torch.manual_seed(0)
    model, batch = job.model(), next(job.data(0))
    assert job.loss(model, batch) != job.loss(model, batch)


@each
def test_model_builds_on_the_meta_device_with_the_same_names(name: str) -> None:
    job = job_of(name)
    with torch.device("meta"):
        empty = job.model()
    assert all(weight.is_meta for weight in empty.parameters())
    assert list(empty.state_dict()) == list(job.model().state_dict())
