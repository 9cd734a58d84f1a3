"""A sparse buffer is built with the model, read by forward, and stands in no checkpoint."""

import itertools

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

import penstock as ps
from penstock.checkpoints import checkpoint
from penstock.examine.examine import examine
from penstock.graph.lasting import is_dense, lasting_buffers
from penstock.job import Job
from penstock.training.export import save_state

NODES = 6


def features(start: int):
    for number in itertools.count(start):
        source = torch.Generator().manual_seed(number)
        x = torch.randn(NODES, 3, generator=source)
        yield x, torch.randn(NODES, 2, generator=source)


class Graph(nn.Module):
    """Two layers over the neighbours of each node, with a batch norm between them."""

    def __init__(self, layout: torch.layout = torch.sparse_coo, keep: float = 1.0) -> None:
        super().__init__()
        near = torch.rand(NODES, NODES).gt(0.5).float() + torch.eye(NODES)
        near = near / near.sum(1, keepdim=True)
        self.keep = keep
        self.register_buffer(
            "near", near if layout is torch.strided else near.to_sparse(layout=layout)
        )
        self.into, self.norm, self.out = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x):
        if self.keep < 1:
            self.near = self.near * self.keep
        return self.near @ self.out(self.norm(self.near @ self.into(x)).tanh())


def loss(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def job_of(model) -> Job:
    return Job(model, loss, features, lambda w: SGD(w, lr=0.1, momentum=0.9), micro_batches=2)


def trained(job: Job, folder) -> dict[str, torch.Tensor]:
    ps.train(job, num_steps=3, ranks=2, out=folder)
    ps.train(job, num_steps=5, ranks=2, out=folder, resume=True)
    newest = checkpoint.latest(folder / "checkpoints")
    assert newest is not None
    return dict(checkpoint.load(newest).tensors)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_it_trains_as_a_dense_one_does_and_goes_on(layout, tmp_path):
    found = trained(job_of(lambda: Graph(layout)), tmp_path / "sparse")
    wanted = trained(job_of(lambda: Graph(torch.strided)), tmp_path / "dense")
    assert wanted.keys() - found.keys() == {"buffers/near"}
    for name, value in found.items():
        assert torch.allclose(value.double(), wanted[name].double(), rtol=1e-5, atol=1e-6), name


def test_one_that_forward_replaces_is_refused_by_name():
    found = examine(job_of(lambda: Graph(keep=0.9)))
    assert "forward writes buffer near, which is sparse" in found.failed
    assert "to_sparse()" in found.mend


def test_it_is_no_state():
    model = Graph()
    assert not is_dense(model.near)
    assert "near" not in lasting_buffers(model)
    assert {"norm.running_mean", "norm.running_var"} < lasting_buffers(model).keys()


def test_exported_files_leave_it_out_and_say_so(tmp_path):
    model = Graph()
    assert save_state(model, tmp_path / "m.safetensors") == ["near"]
    found = load_file(tmp_path / "m.safetensors")
    assert found.keys() == model.state_dict().keys() - {"near"}
    other = Graph()
    assert other.load_state_dict(found, strict=False).missing_keys == ["near"]
    assert torch.equal(other.into.weight, model.into.weight)
