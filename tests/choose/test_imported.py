"""A model begins with the weights of a file, by its own names, or the names at fault are told."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import penstock as ps
from penstock.choose.imported import beginning_with
from penstock.errors import CheckpointError
from penstock.training.export import save_pretrained, save_state
from tests.examples.test_hf import job_of
from tests.training.test_export import JOB, Tied, same


def built(job: ps.Job, seed: int = 9) -> nn.Module:
    torch.manual_seed(seed)
    return job.model()


def written(model: nn.Module, path, without=(), **more):
    """Write the model's state, each tensor in memory of its own."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state = {name: value for name, value in state.items() if name not in without}
    save_file({**state, **more}, path)
    return path


def test_what_was_exported_is_what_a_run_begins_with(tmp_path):
    source = built(JOB, seed=1)
    save_state(source, tmp_path / "a.safetensors")
    found = beginning_with(JOB, tmp_path / "a.safetensors")
    assert same(built(found).state_dict(), source.state_dict())
    assert not same(built(JOB).state_dict(), source.state_dict())


@pytest.mark.parametrize("left_out", ["head.weight", "embed.weight"])
def test_of_tied_weights_one_name_is_enough(left_out, tmp_path):
    source = built(JOB, seed=1)
    path = written(source, tmp_path / "a.safetensors", without=(left_out,))
    model = built(beginning_with(JOB, path))
    assert same(model.state_dict(), source.state_dict())
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_folder_of_hugging_face_is_read_as_from_pretrained_reads_it(name, tmp_path):
    """Also in several files, with an index; the names are transformers' own."""
    job = job_of(name)
    source = built(job, seed=1)
    save_pretrained(source, tmp_path / "one")
    source.save_pretrained(tmp_path / "many", max_shard_size="40KB")
    assert (tmp_path / "many" / "model.safetensors.index.json").is_file()
    for place in ("one", "many"):
        model = built(beginning_with(job, tmp_path / place))
        assert same(model.state_dict(), source.state_dict())
        theirs = type(source).from_pretrained(tmp_path / place)
        assert same(model.state_dict(), theirs.state_dict())


def test_values_have_the_dtypes_of_the_model(tmp_path):
    source = built(JOB, seed=1)
    narrow = {name: value.clone() for name, value in source.state_dict().items()}
    narrow = {n: v.bfloat16() if v.is_floating_point() else v for n, v in narrow.items()}
    save_file(narrow, tmp_path / "a.safetensors")
    state = built(beginning_with(JOB, tmp_path / "a.safetensors")).state_dict()
    for name, value in narrow.items():
        assert state[name].dtype == source.state_dict()[name].dtype
        assert torch.equal(state[name], value.to(state[name].dtype))


def test_on_the_meta_device_nothing_is_read(tmp_path):
    path = written(built(JOB), tmp_path / "a.safetensors")
    found = beginning_with(JOB, path)
    with torch.device("meta"):
        assert all(value.is_meta for value in found.model().state_dict().values())


def test_names_that_are_missing_or_too_many_are_listed_with_a_hint(tmp_path):
    source = built(JOB)
    stray = {"model.norm.weight": torch.ones(8), "other": torch.ones(1)}
    path = written(source, tmp_path / "a.safetensors", without=("norm.weight", "unused"), **stray)
    with pytest.raises(CheckpointError) as caught:
        built(beginning_with(JOB, path))
    assert "missing:  unused, norm.weight" in caught.value.message
    assert "not of the model:  model.norm.weight, other" in caught.value.message
    assert caught.value.hint.startswith("model.norm.weight may be norm.weight")


def test_a_long_list_of_names_is_cut(tmp_path):
    save_file({f"a{n}": torch.ones(1) for n in range(20)}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="and 14 more"):
        built(beginning_with(JOB, tmp_path / "a.safetensors"))


def test_another_shape_is_refused(tmp_path):
    path = written(Tied(width=16), tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"is \[.*16\] in .*, \[.*8\] in the model"):
        built(beginning_with(JOB, path))


def test_what_is_no_file_of_weights_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "many").mkdir()
    for name in "ab":
        written(built(JOB), tmp_path / "many" / f"{name}.safetensors")
    (tmp_path / "torn.safetensors").write_bytes(b"no weights")
    torch.save({}, tmp_path / "weights.bin")
    for place, words in {
        "empty": "holds no weights",
        "many": "holds 2 files",
        "torn.safetensors": "cannot read",
        "weights.bin": "is pickled",
        "none": "there are no weights",
    }.items():
        with pytest.raises(CheckpointError, match=words):
            beginning_with(JOB, tmp_path / place)


@pytest.mark.parametrize(
    "index",
    [{"weight_map": {"a": "../x.safetensors"}}, {"weight_map": {"a": "gone.safetensors"}}, {}],
)
def test_an_index_of_files_that_are_not_there_is_refused(index, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"index\.json"):
        beginning_with(JOB, tmp_path)


def test_a_run_trains_on_from_them(tmp_path):
    """Its first loss is that of the weights; what it exports begins another run."""
    source = built(JOB, seed=1)
    path = written(source, tmp_path / "a.safetensors")
    rows = []
    fixed = {"schedule": "gpipe", "stages": 2, "check": False, "num_steps": 1}
    ps.train(JOB, weights=path, out=tmp_path / "run", on_step=rows.append, **fixed)
    batches = JOB.data(0)
    source.train()
    losses = [float(JOB.loss(source, next(batches)).detach()) for _ in range(JOB.micro_batches)]
    assert rows[0]["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)
