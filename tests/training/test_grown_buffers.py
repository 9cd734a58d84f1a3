"""A buffer that forward makes larger, or late, is in a checkpoint, and a resumed run goes on."""

import itertools

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import SGD

import penstock as ps
from penstock.checkpoints import checkpoint
from penstock.errors import CheckpointError
from penstock.graph.lasting import note_built, resized_buffers
from penstock.job import Job
from penstock.state.grown import built_sizes, resize_buffers
from penstock.state.weights import load_model
from penstock.training.export import chosen, save_state, trained

WIDTH = 4


def rows(start: int):
    for number in itertools.count(start):
        source = torch.Generator().manual_seed(number)
        x = torch.randn(3, WIDTH, generator=source)
        yield x, x.sin()


class Seen(nn.Module):
    """A layer whose outputs are measured by those before: `how` says what of them is kept."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer = how, nn.Linear(WIDTH, WIDTH)
        first = None if how == "late" else torch.zeros(0, WIDTH)
        if how != "registered":
            self.register_buffer("seen", first, persistent=how != "fleeting")

    def forward(self, x):
        y = self.layer(x)
        if self.training:
            self._keep(y.detach())
        return y - 0.1 * self.seen.mean(0)

    def _keep(self, y):
        if self.how == "queue" or self.how == "fleeting":
            self.seen = torch.cat([self.seen, y])[-13:]
        elif self.how == "grows":
            self.seen = torch.cat([self.seen, y.mean(0, keepdim=True)])
        elif self.how == "registered" and not hasattr(self, "seen"):
            self.register_buffer("seen", y)
        elif self.how == "late" and self.seen is None:
            self.seen = y


WAYS = ("grows", "queue", "fleeting", "late", "registered")


def job_of(how: str) -> Job:
    def loss(model, batch):
        return (model(batch[0]) - batch[1]).square().mean()

    return Job(
        lambda: Seen(how), loss, rows, lambda w: SGD(w, lr=0.3, momentum=0.9), micro_batches=2
    )


def tensors_in(folder) -> dict[str, torch.Tensor]:
    return dict(checkpoint.load(chosen(folder)).tensors)


@pytest.mark.parametrize("how", WAYS)
def test_a_resumed_run_ends_as_an_unbroken_one(how, tmp_path):
    ps.train(job_of(how), num_steps=5, ranks=2, out=tmp_path / "whole")
    ps.train(job_of(how), num_steps=2, ranks=2, out=tmp_path / "parts")
    ps.train(job_of(how), num_steps=5, ranks=2, out=tmp_path / "parts", resume=True)
    found, wanted = tensors_in(tmp_path / "parts"), tensors_in(tmp_path / "whole")
    assert found.keys() == wanted.keys()
    assert found["buffers/seen"].numel()
    for name, value in found.items():
        assert torch.equal(value, wanted[name]), name


@pytest.mark.parametrize("how", WAYS)
def test_what_was_trained_goes_into_models_and_files(how, tmp_path):
    ps.train(job_of(how), num_steps=3, ranks=2, out=tmp_path / "run")
    kept = checkpoint.load(chosen(tmp_path / "run"))
    made = trained(job_of(how), kept)
    assert torch.equal(made.seen, kept.tensors["buffers/seen"])
    fresh = Seen(how)
    ps.load_weights(fresh, tmp_path / "run")
    assert torch.equal(fresh.seen, kept.tensors["buffers/seen"])
    assert save_state(made, tmp_path / "m.safetensors") == []
    written = load_file(tmp_path / "m.safetensors")
    assert ("seen" in written) == (how != "fleeting")
    if how != "fleeting":
        assert torch.equal(written["seen"], kept.tensors["buffers/seen"])


def masked(length: int) -> nn.Module:
    model = nn.Module()
    model.layer = nn.Linear(2, 2)
    model.register_buffer("mask", torch.ones(length))
    return model


def test_a_model_that_is_built_with_another_size_is_another_model():
    run = masked(3)
    note_built(run)
    assert resized_buffers(run) == {}
    run.mask = torch.ones(5)
    assert resized_buffers(run) == {"mask": (3,)}
    kept = {f"weights/{n}": p.detach() for n, p in run.named_parameters()}
    kept |= {"buffers/mask": run.mask, **built_sizes(run)}
    load_model(same := masked(3), kept)
    assert same.mask.shape == (5,)
    with pytest.raises(CheckpointError, match=r"buffers/mask is \[5\] in the checkpoint, \[4\] in"):
        load_model(masked(4), kept)


def test_a_buffer_of_a_module_that_is_not_there_is_another_models():
    run = masked(3)
    note_built(run)
    run.layer.register_buffer("late", torch.ones(2))
    kept = {f"weights/{n}": p.detach() for n, p in run.named_parameters()}
    kept |= {"buffers/mask": run.mask, "buffers/layer.late": run.layer.late, **built_sizes(run)}
    other = nn.Module()
    other.register_buffer("mask", torch.ones(3))
    load_model(other, kept)
    assert set(dict(other.named_buffers())) == {"mask"}
    load_model(same := masked(3), kept)
    assert torch.equal(same.layer.late, torch.ones(2))


def test_the_checkpoint_keeps_its_own():
    run = masked(3)
    note_built(run)
    run.mask = torch.ones(5)
    kept = {"buffers/mask": run.mask, **built_sizes(run)}
    resize_buffers(model := masked(3), kept)
    model.mask.zero_()
    assert kept["buffers/mask"].sum() == 5


def test_a_model_that_no_job_has_built_has_none():
    model = masked(3)
    model.mask = torch.ones(5)
    assert resized_buffers(model) == {}
