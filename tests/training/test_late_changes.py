"""What a loss reads in Python and the job's code changes late: one process trains it, rightly."""

from functools import partial
from itertools import count

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import PenstockError
from penstock.job import Job

LATE = 80  # number of the first micro-batch of another weight; two are a step


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def sgd(weights):
    return torch.optim.SGD(weights, lr=0.1)


def job_of(name: str) -> Job:
    """A job whose data changes an entry of a table late, by a method that is not seen to do so."""
    table, notes = {"weights": [1.0, 1.0]}, [0.0, 0.0]
    changed = table["weights"] if name == "weights" else notes
    acts = {"early": lambda: None, "late": partial(changed.__setitem__, 1, 5.0)}

    def data(start):
        for k in count(start):
            acts["late" if k >= LATE else "early"]()
            yield torch.randn(4, 4, generator=torch.Generator().manual_seed(k))

    def loss(model, batch):
        weights = table["weights"]
        print(notes)
        return model(batch).square().mean() * weights[1]

    return Job(lambda: nn.Linear(4, 4), loss, data, sgd, micro_batches=2, num_steps=50)


def plain_weights(job: Job) -> dict[str, torch.Tensor]:
    torch.manual_seed(job.seed)
    model, data = job.model(), job.data(0)
    optimizer = sgd(model.parameters())
    for _ in range(job.num_steps):
        for _ in range(job.micro_batches):
            batch = next(data)
            loss = job.loss(model, batch)
            assert isinstance(loss, torch.Tensor)
            (loss / job.micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {f"weights/{name}": value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("name", ["weights", "notes"])
@pytest.mark.sampled(2)
def test_a_table_that_the_loss_reads_and_the_data_changes_late(tmp_path, name):
    asked = {"ranks": 2, "trial": False, "audit": "0"}
    trained = ps.train(job_of(name), out=tmp_path / "run", **asked)
    assert trained is not None
    assert (trained.plan is None) == (name == "weights")
    for key, value in plain_weights(job_of(name)).items():
        assert torch.allclose(trained.outcome.weights[key], value, atol=1e-6)


def test_where_a_plan_is_required_the_line_is_named(tmp_path):
    asked = {"ranks": 2, "trial": False, "audit": "0", "stages": 1, "strict": True}
    with pytest.raises(PenstockError, match=r"test_late_changes.py:\d+: table\['weights'\]\[1\]"):
        ps.train(job_of("weights"), out=tmp_path / "run", **asked)
