"""Data by ps.batches and ps.from_loader: shuffled, augmented, read by processes, of any kind."""

import random

import numpy as np
import torch
import transformers as hf
from small import WIDTH, deep, pair, sgd, squares
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import penstock as ps

THIRD = {"*": "replicas"}


def _job(data, **options) -> ps.Job:
    options = {"model": deep, "loss": squares, "optimizer": sgd, "micro_batches": 4, **options}
    return ps.Job(data=data, **options)


class _Rows(Dataset):
    """Sixty samples, made when they are asked for."""

    def __len__(self) -> int:
        return 58

    def __getitem__(self, index: int):
        x, y = pair(index, rows=1)
        return x[0], y[0]


def shuffled() -> ps.Job:
    """ps.batches, shuffled; 58 samples in batches of four, so two are left over."""
    return _job(ps.batches(_Rows(), 4, seed=1))


def read_by_two_processes() -> ps.Job:
    """The same, read ahead by two worker processes."""
    return _job(ps.batches(_Rows(), 4, workers=2))


class _Augmented(_Rows):
    def __getitem__(self, index: int):
        x, y = super().__getitem__(index)
        x = x + 0.3 * torch.randn(WIDTH) if random.random() > 0.5 else x
        return x * float(1 + 0.1 * np.random.randn()), y


def augmented() -> ps.Job:
    """The dataset draws from torch, numpy and random, and seeds none of them."""
    return _job(ps.batches(_Augmented(), 4, seed=3, last="wrap"))


class _Stream(IterableDataset):
    def __iter__(self):
        return (pair(index, rows=1) for index in range(50))


def stream() -> ps.Job:
    """An IterableDataset that ends, and is gone through again."""

    def collate(rows):
        return torch.cat([x for x, _ in rows]), torch.cat([y for _, y in rows])

    return _job(ps.batches(_Stream(), 4, shuffle=False, collate=collate))


def collated_for_a_trainer() -> ps.Job:
    """A collator that pads words to one length and makes a BatchEncoding."""
    rows = [torch.randint(1, 16, (3 + k % 5,), generator=_seeded(k)) for k in range(40)]

    def collate(samples):
        ids = torch.stack([F.pad(ids, (0, 8 - len(ids))) for ids in samples])
        labels = ids.masked_fill(ids == 0, -100)
        return hf.BatchEncoding({"input_ids": ids, "attention_mask": ids != 0, "labels": labels})

    config = hf.GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=2, n_head=2)
    return _job(
        ps.batches(rows, 2, collate=collate, seed=2),
        model=lambda: hf.GPT2LMHeadModel(config),
        loss=lambda model, batch: model(**batch).loss,
        optimizer=lambda weights: torch.optim.AdamW(weights, lr=0.01, eps=1e-2),
    )


def _seeded(index: int) -> torch.Generator:
    return torch.Generator().manual_seed(index)


def from_a_loader() -> ps.Job:
    """A DataLoader as it is, shuffled by its seeded generator, last samples dropped."""
    made = [pair(index, rows=1) for index in range(58)]
    rows = TensorDataset(torch.cat([x for x, _ in made]), torch.cat([y for _, y in made]))
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(rows, 4, shuffle=True, generator=generator, drop_last=True)
    return _job(ps.from_loader(loader))


def from_a_loader_with_workers() -> ps.Job:
    """A DataLoader with two workers, whose dataset draws random numbers."""
    return _job(ps.from_loader(DataLoader(_Augmented(), 4, num_workers=2, drop_last=True)))


def with_figures_beside_the_loss() -> ps.Job:
    """The loss returns its parts beside itself."""

    def loss(model, batch):
        found = squares(model, batch)
        return found, {"error": found.detach().sqrt(), "size": model(batch[0]).abs().mean()}

    return _job(ps.batches(_Rows(), 4, seed=1), loss=loss)
