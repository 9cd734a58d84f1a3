"""penstock export: what a run has trained, for programs that know nothing of Penstock."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import penstock as ps
from penstock.checkpoints import checkpoint
from tests.cli import mlp
from tests.cli.conftest import MLP, Call

JOB = f"{MLP}:job"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a folder as `penstock train` leaves it, with two checkpoints."""
    torch.manual_seed(0)
    for step in (2, 5):
        weights = {f"weights/{n}": value + step for n, value in mlp.model().named_parameters()}
        checkpoint.write_part(tmp_path / "run" / "checkpoints", step, 0, (weights, {}))
        checkpoint.finish(tmp_path / "run" / "checkpoints", step)
    return tmp_path / "run"


def test_what_training_leaves_is_exported_without_naming_the_job(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor has it to be done from the folder in which the job was named."""
    monkeypatch.chdir(MLP.parent)
    done = call("train", f"{MLP.name}:job", "--out", tmp_path / "run", "--ranks", 1)
    assert done.code == 0, done.err
    monkeypatch.chdir(tmp_path)
    done = call("export", "run", "--to", "out/model.safetensors", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out) == {
        "written": "out/model.safetensors",
        "checkpoint": "run/checkpoints/step-000004",
        "step": 4,
        "left_out": [],
    }
    fresh, again = mlp.model(), mlp.model()
    fresh.load_state_dict(load_file("out/model.safetensors"), strict=True)
    assert ps.load_weights(again, "run") == 4
    for key, value in fresh.state_dict().items():
        assert torch.equal(value, again.state_dict()[key])


@pytest.mark.parametrize(("which", "step"), [((), 5), (("--checkpoint", "2"), 2)])
def test_a_checkpoint_is_chosen_by_its_step(call: Call, run: Path, which, step) -> None:
    done = call("export", run, "--to", run / "a.safetensors", "--job", JOB, *which)
    assert done.code == 0, done.err
    assert f"after step {step}" in done.out
    kept = checkpoint.load(run / "checkpoints" / f"step-{step:06d}").tensors
    found = load_file(run / "a.safetensors")
    assert {f"weights/{key}" for key in found} == kept.keys()
    assert all(torch.equal(value, kept[f"weights/{key}"]) for key, value in found.items())


@pytest.mark.parametrize(("which", "step"), [("average", 5), ("2,average", 2)])
def test_the_average_of_the_weights_is_exported_in_their_place(
    call: Call, tmp_path: Path, which, step
) -> None:
    for at in (2, 5):
        named = dict(mlp.model().named_parameters())
        weights = {f"weights/{n}": value for n, value in named.items()}
        averages = {f"optimizer/{n}/average": torch.full_like(v, at) for n, v in named.items()}
        checkpoint.write_part(tmp_path / "checkpoints", at, 0, (weights | averages, {}))
        checkpoint.finish(tmp_path / "checkpoints", at)
    to = tmp_path / "a.safetensors"
    done = call("export", tmp_path, "--to", to, "--job", JOB, "--checkpoint", which)
    assert done.code == 0, done.err
    assert f"the average of the weights after step {step}" in done.out
    assert all((value == step).all() for value in load_file(to).values())
    model = mlp.model()
    ps.load_weights(model, tmp_path, average=True)
    assert (model[4].weight == 5).all()


def test_a_checkpoint_without_averages_is_refused(call: Call, run: Path) -> None:
    to = run / "a.safetensors"
    done = call("export", run, "--to", to, "--job", JOB, "--checkpoint", "average")
    assert done.code == 2
    assert "holds no average of weights" in done.err


def test_what_a_job_prints_is_no_result(call: Call, run: Path) -> None:
    place = run / "a.safetensors"
    done = call("export", run, "--to", place, "--job", f"{MLP}:talks", "--json")
    assert (done.code, json.loads(done.out)["written"]) == (0, str(place))
    assert "this is for stdout" in done.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--to", "a.safetensors"), "does not say which job"),
        (("--to", "a.safetensors", "--job", f"{MLP}:wider"), "weights/"),
        (("--to", "a.safetensors", "--job", JOB, "--checkpoint", "3"), "after step 3"),
        (("--to", "a.safetensors", "--job", JOB, "--checkpoint", "best"), "no best checkpoint"),
        (("--to", "a.pt", "--job", JOB), "neither a safetensors file nor a folder"),
        (("--to", "hf", "--job", JOB), "Sequential, has no save_pretrained"),
        (("--to", "run/job.json", "--job", JOB), "neither a safetensors file nor a folder"),
    ],
)
def test_what_cannot_be_exported_is_refused_and_nothing_is_written(
    call: Call, run: Path, monkeypatch: pytest.MonkeyPatch, arguments, said
) -> None:
    monkeypatch.chdir(run.parent)
    if arguments[1] == "run/job.json":
        (run / "job.json").write_text("{}")
    before = sorted(path for path in run.parent.rglob("*"))
    error, _ = call("export", "run", *arguments).refusal(2)
    assert said in error
    assert sorted(path for path in run.parent.rglob("*")) == before


@pytest.mark.parametrize("text", ["{}", "[]", '{"job": 3, "from": "/"}', "{"])
def test_a_damaged_name_of_the_job_is_told(call: Call, run: Path, text: str) -> None:
    (run / "job.json").write_text(text)
    error, hint = call("export", run, "--to", run / "a.safetensors").refusal(2)
    assert "job.json" in error
    assert hint


def test_a_job_that_is_gone_is_told(call: Call, run: Path) -> None:
    (run / "job.json").write_text(json.dumps({"job": "gone.py:job", "from": "/nowhere"}))
    error, hint = call("export", run, "--to", run / "a.safetensors", "--yes").refusal(2)
    assert "gone.py:job, cannot be loaded" in error
    assert "--job JOB" in hint


def test_the_job_of_a_folder_that_others_wrote_is_shown_and_not_run(call: Call, run: Path) -> None:
    (run / "weights.py").write_text(f"open({str(run / 'stolen')!r}, 'w')\n")
    (run / "job.json").write_text(json.dumps({"job": "weights.py", "from": str(run)}))
    error, hint = call("export", run, "--to", run / "a.safetensors").refusal(2)
    assert f"{run}/weights.py, which is not run unasked" in error
    assert "--yes" in hint
    assert not (run / "stolen").exists()


GRAPH = """
import torch
import penstock as ps

class Graph(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.register_buffer("near", torch.eye(2).to_sparse())

    def forward(self, x):
        return self.near @ self.layer(x)

def data(start):
    while True:
        yield torch.ones(2, 2)

def loss(model, batch):
    return model(batch).square().mean()

def job() -> ps.Job:
    return ps.Job(Graph, loss, data, lambda w: torch.optim.SGD(w, lr=0.1))
"""


def test_sparse_buffers_that_are_left_out_are_named(call: Call, tmp_path: Path) -> None:
    (tmp_path / "graph.py").write_text(GRAPH)
    done = call("train", tmp_path / "graph.py:job", "--out", tmp_path / "run", "--steps", 2)
    assert done.code == 0, done.err
    done = call("export", tmp_path / "run", "--to", tmp_path / "m.safetensors")
    assert done.code == 0, done.err
    assert "left out: near, sparse, as the model builds it: load with strict=False" in done.out
    done = call("export", tmp_path / "run", "--to", tmp_path / "m.safetensors", "--json")
    assert json.loads(done.out)["left_out"] == ["near"]
