"""A last micro-batch with the samples that are left over: a step and a plan of its own."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import penstock as ps
from penstock.errors import JobError
from penstock.keyed import keyed


@given(st.integers(1, 40), st.integers(1, 9), st.booleans())
def test_an_epoch_has_every_sample_once_and_its_keys_tell_each_micro_batch(length, size, shuffle):
    if size > length:
        return
    data: Any = ps.batches(list(range(length)), size, shuffle=shuffle, seed=3, last="short")
    epoch = -(-length // size)
    assert len(data) == epoch
    known: Any = keyed(data)
    assert (known is None) == (length % size == 0)
    source = data(0)
    for turn in range(3):
        held = [next(source).tolist() for _ in range(epoch)]
        samples = [sample for batch in held for sample in batch]
        assert sorted(samples) == list(range(length))
        assert shuffle or samples == sorted(samples)
        assert [next(data(turn * epoch + k)).tolist() for k in range(epoch)] == held
        sizes = [len(each) for each in held]
        assert sizes == [size] * (length // size) + [length % size] * (length % size > 0)
        if known is not None:
            assert [known.key_of(turn * epoch + k).samples for k in range(epoch)] == sizes
            assert {key.samples: steps for key, steps in known.keys.items()} == {
                size: length // size,
                length % size: 1,
            }


def test_data_that_has_no_length_cannot_tell_its_last_micro_batch() -> None:
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(7))

    with pytest.raises(JobError, match="does not say where its last micro-batch is"):
        ps.batches(Endless(), 3, shuffle=False, last="short")


def job_of(**options) -> ps.Job:
    g = torch.Generator().manual_seed(0)
    rows = TensorDataset(torch.randn(22, 4, generator=g), torch.randn(22, 2, generator=g))
    data = ps.from_loader(DataLoader(rows, 8, shuffle=True), last="short")
    loss = lambda model, batch: (model(batch[0]) - batch[1]).square().mean()  # noqa: E731
    layers = nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)
    model = lambda: nn.Sequential(*copy.deepcopy(layers))  # noqa: E731
    return ps.Job(model, loss, data, lambda w: torch.optim.Adam(w, lr=1e-2), num_steps=8, **options)


def test_micro_batches_of_several_sizes_are_no_step() -> None:
    with pytest.raises(JobError, match="micro_batches is 2") as told:
        job_of(micro_batches=2)
    assert 'last="drop"' in told.value.hint


def test_steps_are_those_of_a_loop_over_the_loader(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    job = job_of()
    trained = ps.train(job, ranks=2, stages=2, trial=False, audit="0", out=tmp_path / "run")
    assert trained is not None
    assert trained.plan is not None
    torch.manual_seed(job.seed)
    model, batches, sizes = job.model(), job.data(0), []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(8):
        batch = next(batches)
        sizes.append(len(batch[0]))
        loss: Any = job.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert sizes == [8, 8, 6, 8, 8, 6, 8, 8]
    for name, value in model.named_parameters():
        assert torch.allclose(trained.outcome.weights[f"weights/{name}"], value, atol=1e-6)
