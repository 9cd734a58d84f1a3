"""Loaders whose samplers have an order of their own, and data that people make by hand."""

import collections
import csv
import io
import itertools
import random
from typing import NamedTuple

import numpy as np
import torch
from small import WIDTH, classes, deep, entropy, sgd, squares
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import penstock as ps


def _job(model=deep, loss=entropy, data=classes, **options) -> ps.Job:
    options = {"optimizer": sgd, "micro_batches": 2, **options}
    return ps.Job(model=model, loss=loss, data=data, **options)


def _rows(count: int = 96, number: int = 0) -> TensorDataset:
    source = torch.Generator().manual_seed(number)
    x = torch.randn(count, WIDTH, generator=source)
    return TensorDataset(x, x[:, :4].argmax(1))


class _Balanced:
    """Three samples of each class, in an order drawn by Python's own generator."""

    def __init__(self, labels) -> None:
        self.of_class = collections.defaultdict(list)
        for at, label in enumerate(labels.tolist()):
            self.of_class[label].append(at)
        self.epoch = 0

    def __iter__(self):
        source = random.Random(self.epoch)
        self.epoch += 1
        for _ in range(5):
            yield [
                at for key in sorted(self.of_class) for at in source.sample(self.of_class[key], 3)
            ]


def classes_in_balance() -> ps.Job:
    """A batch sampler that counts its own epochs."""
    rows = _rows()
    loader = DataLoader(rows, batch_sampler=_Balanced(rows.tensors[1]))
    return _job(data=ps.from_loader(loader))


def loader_of_weighted_samples() -> ps.Job:
    """WeightedRandomSampler in a loader, over two sets that are one."""
    both = ConcatDataset([_rows(40, 1), _rows(16, 2)])
    sampler = WeightedRandomSampler([1 / 40] * 40 + [1 / 16] * 16, 56)
    return _job(data=ps.from_loader(DataLoader(both, 8, sampler=sampler)))


def samples_with_replacement() -> ps.Job:
    """A RandomSampler with replacement and a generator of its own, read by two processes."""
    sampler = RandomSampler(range(96), replacement=True, generator=torch.Generator().manual_seed(3))
    return _job(data=ps.from_loader(DataLoader(_rows(), 8, sampler=sampler, num_workers=2)))


class _Easy:
    """Samples by what the loss has told of them, the easy ones first."""

    def __init__(self, count: int) -> None:
        self.told = [0.0] * count

    def __iter__(self):
        return iter(sorted(range(len(self.told)), key=self.told.__getitem__))

    def __len__(self) -> int:
        return len(self.told)


def samples_by_what_the_loss_has_told() -> ps.Job:
    """The sampler is changed by the loss: no number tells what it names (refused)."""
    sampler = _Easy(64)

    def loss(model, batch):
        found = entropy(model, batch)
        sampler.told[len(batch[0])] += float(found.detach())
        return found

    return _job(loss=loss, data=ps.from_loader(DataLoader(_rows(64), 8, sampler=sampler)))


class _Stream(IterableDataset):
    def __iter__(self):
        source = np.random.default_rng(5)
        of = source.normal(size=(WIDTH, 4))
        while True:
            x = source.normal(size=WIDTH).astype("float32")
            yield x, (x @ of).astype("float32")


def stream_of_numpy() -> ps.Job:
    """An endless IterableDataset of numpy, collated by torch."""
    return _job(loss=squares, data=ps.from_loader(DataLoader(_Stream(), 8)))


def memory_that_is_replayed() -> ps.Job:
    """A deque is filled while it is drawn from; `start` is reached by going on."""

    def data(start):
        source, memory = np.random.RandomState(11), collections.deque(maxlen=80)
        for number in itertools.count(-32):
            memory.append((source.randn(WIDTH).astype(np.float32), source.randn(4)))
            if number < 0:
                continue
            chosen = [memory[at] for at in source.randint(0, len(memory), 8)]
            if number >= start:
                x, y = zip(*chosen, strict=True)
                yield torch.tensor(np.array(x)), torch.tensor(np.array(y), dtype=torch.float32)

    return _job(loss=squares, data=data)


class _Table(nn.Module):
    def __init__(self, cities: int) -> None:
        super().__init__()
        self.city, self.norm, self.net = nn.Embedding(cities, 6), nn.BatchNorm1d(2), deep(outputs=1)

    def forward(self, numbers, city):
        return self.net(torch.cat([self.norm(numbers), self.city(city)], 1)).squeeze(1)


def table_of_words_and_numbers() -> ps.Job:
    """Rows of a csv file: numbers are normalised, words are embedded, positives count thrice."""
    source, text = random.Random(4), io.StringIO()
    writer = csv.DictWriter(text, ["age", "city", "income", "bought"])
    writer.writeheader()
    for _ in range(64):
        age, city = source.randint(18, 80), source.choice("ABCDE")
        bought = int(age > 40 and city in "AB")
        income = round(source.gauss(50, 10), 2)
        writer.writerow({"age": age, "city": city, "income": income, "bought": bought})
    rows = list(csv.DictReader(io.StringIO(text.getvalue())))
    cities = {city: at for at, city in enumerate(sorted({row["city"] for row in rows}))}

    def data(start):
        for number in itertools.count(start):
            part = [rows[(number * 8 + at) % len(rows)] for at in range(8)]
            yield {
                "numbers": torch.tensor([[float(r["age"]), float(r["income"])] for r in part]),
                "city": torch.tensor([cities[row["city"]] for row in part]),
                "bought": torch.tensor([float(row["bought"]) for row in part]),
            }

    def loss(model, batch):
        found, weight = model(batch["numbers"], batch["city"]), torch.tensor(3.0)
        return F.binary_cross_entropy_with_logits(found, batch["bought"], pos_weight=weight)

    return _job(lambda: _Table(len(cities)), loss, data)


class _Interaction(NamedTuple):
    user: torch.Tensor
    item: torch.Tensor
    others: torch.Tensor


class _Factors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(20, WIDTH), nn.Embedding(30, WIDTH)
        self.popular = nn.Embedding(30, 1)

    def forward(self, user, item):
        both = (self.users(user) * self.items(item)).sum(-1)
        return both + self.popular(item).squeeze(-1)


def items_against_items_that_are_drawn() -> ps.Job:
    """Bayesian personalised ranking: three items that were not bought beside each that was."""

    def data(start):
        for number in itertools.count(start):
            source = np.random.default_rng([9, number])
            user, item = source.integers(0, 20, 16), source.integers(0, 30, 16)
            others = torch.from_numpy(source.integers(0, 30, (16, 3)))
            yield _Interaction(torch.from_numpy(user), torch.from_numpy(item), others)

    def loss(model, batch):
        bought = model(batch.user, batch.item)
        others = model(batch.user[:, None].expand(-1, 3), batch.others)
        size = model.users(batch.user).square().sum(-1).mean()
        return -F.logsigmoid(bought[:, None] - others).mean() + 1e-3 * size

    return _job(_Factors, loss, data)


def sums_that_grow_longer() -> ps.Job:
    """A curriculum: sets of numbers, padded and masked, longer ones later."""

    class Sets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.each, self.all = deep(inputs=1, outputs=WIDTH), deep(outputs=1)

        def forward(self, x, mask):
            held = self.each(x.unsqueeze(-1)) * mask.unsqueeze(-1)
            return self.all(held.sum(1) / mask.sum(1, keepdim=True)).squeeze(-1)

    def data(start):
        for number in itertools.count(start):
            source, most = random.Random(number), min(6, 2 + number // 3)
            x, mask = torch.zeros(8, 6), torch.zeros(8, 6)
            for row in range(8):
                count = source.randint(1, most)
                x[row, :count] = torch.tensor([source.uniform(-1, 1) for _ in range(count)])
                mask[row, :count] = 1
            yield x, mask

    def loss(model, batch):
        return F.mse_loss(model(*batch), batch[0].sum(1))

    return _job(Sets, loss, data)
