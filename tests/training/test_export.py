"""What a run has trained is what `load_state_dict` and `from_pretrained` are given, bit for bit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import penstock as ps
from penstock.checkpoints import checkpoint
from penstock.choose.imported import beginning_with
from penstock.errors import CheckpointError, JobError
from penstock.job import Job
from penstock.plan import plan_by_hand
from penstock.state.python_state import take_extra
from penstock.state.values import put_value
from penstock.training.export import chosen, save_pretrained, save_state, trained
from tests.examples.test_hf import job_of
from tests.parity.training import Run, train

WIDTH, WORDS, MICRO_BATCHES, STEPS = 8, 11, 2, 3


class Tied(nn.Module):
    """A tied weight, buffers that are persistent and not, an unused weight, a frozen one."""

    def __init__(self, width: int = WIDTH, mask: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.norm = nn.BatchNorm1d(width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.unused = nn.Parameter(torch.randn(3))
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(mask), persistent=False)
        self.register_buffer("unread", torch.arange(4))

    def forward(self, x):
        return self.head(self.frozen(self.norm(self.embed(x)))) * self.mask.sum()


def data(start):
    while True:
        yield torch.randint(WORDS, (6,), generator=torch.Generator().manual_seed(start))
        start += 1


def loss(model, x):
    return nn.functional.cross_entropy(model(x), x.flip(0))


def sgd(weights):
    return torch.optim.SGD(weights, lr=0.05, momentum=0.9)


JOB = ps.Job(Tied, loss, data, sgd, micro_batches=MICRO_BATCHES, num_steps=STEPS, seed=3)


def run(job: ps.Job, folder: Path, cuts: list[int]) -> None:
    """Train by the product, one thread per stage."""
    graph = ps.trace(job)
    plan = plan_by_hand(graph, cuts, "gpipe", num_micro_batches=job.micro_batches)
    train(Run(plan, job, graph.capture), folder / "checkpoints", (job.num_steps,))


def plain_loop(job: ps.Job) -> nn.Module:
    torch.manual_seed(job.seed)
    model = job.model()
    optimizer = job.optimizer([p for p in model.parameters() if p.requires_grad])
    batches = job.data(0)
    for _ in range(job.num_steps):
        optimizer.zero_grad()
        for _ in range(job.micro_batches):
            (job.loss(model, next(batches)) / job.micro_batches).backward()
        optimizer.step()
    return model


def same(found, expected) -> bool:
    return list(found) == list(expected) and all(
        found[key].dtype == value.dtype and torch.equal(found[key], value)
        for key, value in expected.items()
    )


def loss_of(job: ps.Job, model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return job.loss(model.eval(), next(job.data(1000)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    run(JOB, folder, [])
    return folder


@pytest.fixture(scope="module")
def eager():
    return plain_loop(JOB)


def test_exported_file_is_the_state_dict_of_the_plain_loop(folder, eager, tmp_path):
    model = trained(JOB, checkpoint.load(chosen(folder)))
    assert save_state(model, tmp_path / "new" / "model.safetensors") == []
    found = load_file(tmp_path / "new" / "model.safetensors")
    assert same({key: found[key] for key in eager.state_dict()}, eager.state_dict())
    assert len(found) == len(eager.state_dict())
    fresh = Tied()
    fresh.load_state_dict(found, strict=True)
    assert torch.equal(loss_of(JOB, fresh), loss_of(JOB, eager))
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model.safetensors"]


def test_weights_of_a_run_are_loaded_into_a_model(folder, eager):
    fresh = Tied()
    assert ps.load_weights(fresh, folder) == STEPS
    assert same(fresh.state_dict(), eager.state_dict())
    assert fresh.head.weight is fresh.embed.weight
    assert torch.equal(loss_of(JOB, fresh), loss_of(JOB, eager))


def test_weights_of_several_stages_are_loaded_too(tmp_path):
    """A tied weight is on both; what nothing reads is somewhere."""
    run(JOB, tmp_path, [0])
    fresh, expected = Tied(), plain_loop(JOB)
    ps.load_weights(fresh, str(tmp_path))
    found = fresh.state_dict()
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-7)  # order of a sum


def test_a_buffer_that_is_not_persistent_is_taken_where_it_fits(folder):
    short, long = Tied(), Tied(mask=7)
    short.mask.zero_()
    ps.load_weights(short, folder)
    ps.load_weights(long, folder)
    assert torch.equal(short.mask, torch.ones(5))
    assert torch.equal(long.mask, torch.ones(7))


def test_values_are_converted_to_the_dtype_of_the_model_that_loads(folder, eager):
    half = Tied().bfloat16()
    ps.load_weights(half, folder)
    assert torch.equal(half.embed.weight, eager.embed.weight.bfloat16())


def write(folder: Path, model: nn.Module, step: int = 1, place: str = "checkpoints") -> Path:
    """Write what the ranks of a run would: every parameter and buffer by its first name."""
    tensors = {f"weights/{name}": value for name, value in model.named_parameters()}
    tensors |= {f"buffers/{name}": value for name, value in model.named_buffers()}
    checkpoint.write_part(folder / place, step, 0, (tensors, {}))
    return checkpoint.finish(folder / place, step)


def test_a_file_has_the_dtypes_that_were_trained(tmp_path):
    """The job builds float32 still; what was trained was something else."""
    model = Tied().bfloat16()
    write(tmp_path, model)
    save_state(trained(JOB, checkpoint.load(chosen(tmp_path))), tmp_path / "model.safetensors")
    found = load_file(tmp_path / "model.safetensors")
    assert found["embed.weight"].dtype == torch.bfloat16
    assert torch.equal(found["embed.weight"], model.embed.weight)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_from_pretrained_reads_what_was_trained(name, tmp_path):
    job = job_of(name)
    model = job.model()
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.randn_like(value) / 4)
    write(tmp_path, model)
    exported = trained(job, checkpoint.load(chosen(tmp_path)))
    save_pretrained(exported, tmp_path / "hf")
    again = type(model).from_pretrained(tmp_path / "hf")
    assert same(again.state_dict(), model.state_dict())
    assert torch.equal(loss_of(job, again), loss_of(job, model))
    assert {path.name for path in (tmp_path / "hf").iterdir()} >= {
        "config.json",
        "model.safetensors",
    }
    save_state(exported, tmp_path / "model.safetensors")
    fresh = job.model()
    fresh.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    assert same(fresh.state_dict(), model.state_dict())


def test_a_folder_is_exported_to_again(tmp_path):
    """What is no weight stays; weights of another split go."""
    job = job_of("llama")
    write(tmp_path, model := job.model())
    place = tmp_path / "hf"
    place.mkdir()
    (place / "tokenizer.json").write_text("{}")
    (place / "model-00001-of-00002.safetensors").write_text("old")
    (place / "model.safetensors.index.json").write_text("old")
    for _ in range(2):
        save_pretrained(trained(job, checkpoint.load(chosen(tmp_path))), place)
    names = {path.name for path in place.iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert same(type(model).from_pretrained(place).state_dict(), model.state_dict())
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".part")] == []


def test_the_best_checkpoint_is_the_one_that_a_run_kept_as_such(tmp_path):
    place = write(tmp_path, best := Tied(), 3)
    place.rename(place.with_name("best"))
    write(tmp_path, Tied(), 9)
    fresh = Tied()
    assert ps.load_weights(fresh, tmp_path, "best") == 3
    assert torch.equal(fresh.embed.weight, best.embed.weight)


# -- what is refused -----------------------------------------------------------------------------


class Other(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("model", "key"),
    [
        (lambda: Tied(width=9), r"weights/unused|weights/embed\.weight"),
        (Other, "weights/more.weight"),
    ],
)
def test_weights_of_another_model_are_refused_and_nothing_is_loaded(folder, model, key):
    own = model()
    before = {name: value.clone() for name, value in own.state_dict().items()}
    with pytest.raises(CheckpointError, match=key) as caught:
        ps.load_weights(own, folder)
    assert caught.value.hint
    assert same(own.state_dict(), before)
    with pytest.raises(CheckpointError, match=key):
        trained(replace(JOB, model=model), checkpoint.load(chosen(folder)))


@pytest.mark.parametrize("where", ["weights", "buffers"])
def test_more_than_the_model_has_is_refused(where, tmp_path):
    model = Tied()
    if where == "weights":
        model.other = nn.Parameter(torch.zeros(2))
    else:
        model.register_buffer("other", torch.zeros(2))
    write(tmp_path, model)
    with pytest.raises(CheckpointError, match=f"{where}/other"):
        ps.load_weights(Tied(), tmp_path)


def test_steps_are_chosen_by_number_and_what_is_not_there_is_listed(tmp_path):
    for step in (3, 12):
        write(tmp_path, Tied(), step)
    write(tmp_path, Tied(), 7, "others")
    assert chosen(tmp_path).name == "step-000012"
    assert chosen(tmp_path, "3").name == chosen(tmp_path, 3).name == "step-000003"
    assert chosen(tmp_path / "checkpoints" / "step-000003").name == "step-000003"
    for which in ("5", "best", "newest", "-3"):
        with pytest.raises(CheckpointError) as caught:
            chosen(tmp_path, which)
        assert "3, 12" in caught.value.hint
    with pytest.raises(CheckpointError, match="no checkpoint"):
        chosen(tmp_path / "nowhere")


def test_a_model_without_save_pretrained_is_refused(tmp_path):
    with pytest.raises(JobError, match="Tied, has no save_pretrained"):
        save_pretrained(Tied(), tmp_path / "hf")
    assert list(tmp_path.iterdir()) == []


class Counted(nn.Linear):
    """Keeps a count, a tensor and a text beside its weights."""

    def __init__(self) -> None:
        super().__init__(2, 1)
        self.kept: object = None

    def get_extra_state(self):
        return self.kept

    def set_extra_state(self, state):
        self.kept = state


COUNTED = Job(lambda: nn.Sequential(Counted()), lambda model, batch: 0.0, iter, torch.optim.SGD)
KEPT = [{"calls": 7, "mean": torch.arange(3.0), "why": ["a", (1, 2.5)]}, torch.ones(2), 5]


@pytest.mark.parametrize("kept", KEPT, ids=["dict", "tensor", "number"])
def test_extra_state_comes_out_of_an_export_and_goes_back_in(kept, tmp_path):
    model = nn.Sequential(Counted())
    model[0].kept = kept
    save_state(model, tmp_path / "model.safetensors")
    again = beginning_with(COUNTED, tmp_path / "model.safetensors").model()
    assert torch.equal(again[0].weight, model[0].weight)
    assert repr(again[0].kept) == repr(kept)


def test_extra_state_of_a_checkpoint_is_loaded_with_its_weights(tmp_path):
    model, other = nn.Sequential(Counted()), nn.Sequential(Counted())
    model[0].kept = KEPT[0]
    tensors = {f"weights/{name}": p.detach() for name, p in model.named_parameters()}
    plain: dict[str, object] = {}
    put_value("extra/0", model[0].kept, tensors, plain)
    kept = checkpoint.Checkpoint(3, tensors, plain)
    for target in (other, trained(COUNTED, kept)):
        take_extra(target, tensors, plain)
        assert repr(target[0].kept) == repr(KEPT[0])


def test_a_state_that_is_no_tensor_is_refused(tmp_path):
    class Extra(Tied):
        def get_extra_state(self):
            return {"epoch": object()}

    with pytest.raises(JobError, match="_extra_state, and in it a object"):
        save_state(Extra(), tmp_path / "model.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_keeps_what_it_held(tmp_path):
    (tmp_path / "model.safetensors").mkdir()
    (tmp_path / "model.safetensors" / "kept").touch()
    with pytest.raises(OSError, match="directory"):
        save_state(Tied(), tmp_path / "model.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert (tmp_path / "model.safetensors" / "kept").exists()
