"""What a batch is: views of one memory, records, packed and longer sequences, numbers of numpy."""

import dataclasses
import itertools
import random
from typing import NamedTuple

import numpy as np
import torch
from small import WIDTH, deep, pair, sgd, squares
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_sequence

import penstock as ps


def _job(data, loss=squares, model=deep, **options) -> ps.Job:
    options = {"optimizer": sgd, "micro_batches": 4, **options}
    return ps.Job(model=model, loss=loss, data=data, **options)


def labels_that_view_the_inputs() -> ps.Job:
    """Inputs and labels are views of one row; the loss masks inputs in place, labels see it."""

    def data(start):
        for index in itertools.count(start):
            source = torch.Generator().manual_seed(index)
            row = torch.randint(1, 16, (2, 9), generator=source)
            yield {"inputs": row[:, :-1], "labels": row[:, 1:]}

    def loss(model, batch):
        batch["inputs"][:, ::3] = 0
        return F.cross_entropy(model(batch["inputs"]).flatten(0, 1), batch["labels"].flatten())

    def model():
        return nn.Sequential(nn.Embedding(16, WIDTH), deep(outputs=16))

    return _job(data, loss, model)


def one_tensor_twice() -> ps.Job:
    """Input and target are one object; the loss adds noise to the input in place."""

    def data(start):
        for index in itertools.count(start):
            x = pair(index)[0]
            yield [x, x]

    def loss(model, batch):
        batch[0].mul_(0.9)
        return F.mse_loss(model(batch[0]), batch[1])

    return _job(data, loss, lambda: deep(outputs=WIDTH))


def row_of_a_matrix_in_the_batch() -> ps.Job:
    """A batch has all rows and every second one as a view; the loss centres all in place."""

    def data(start):
        for index in itertools.count(start):
            x, y = pair(index)
            yield {"all": x, "some": x[::2], "y": y}

    def loss(model, batch):
        batch["all"].sub_(batch["all"].mean(1, keepdim=True))
        return squares(model, (batch["all"], batch["y"])) + model(batch["some"]).square().mean()

    return _job(data, loss)


class _Inner(NamedTuple):
    x: Tensor
    name: str


@dataclasses.dataclass
class _Outer:
    inner: _Inner
    targets: dict[str, list[Tensor]]
    note: None = None


def records_in_records() -> ps.Job:
    """A dataclass of a named tuple and a dict of lists (nothing is wrong)."""

    def data(start):
        for index in itertools.count(start):
            x, y = pair(index)
            yield _Outer(_Inner(x, "four rows"), {"parts": [y[:, :2], y[:, 2:]]})

    def loss(model, batch):
        return F.mse_loss(model(batch.inner.x), torch.cat(batch.targets["parts"], 1))

    return _job(data, loss)


def numbers_of_numpy() -> ps.Job:
    """Every batch carries a weight as np.float32 and a count as np.int64, both constant."""

    def data(start):
        for index in itertools.count(start):
            yield *pair(index), np.float32(0.5), np.int64(4)

    return _job(data, lambda m, b: squares(m, b[:2]) * b[2] * b[3])


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.head(self.lstm(x)[1][0][-1])


def sentences_of_many_lengths() -> ps.Job:
    """Sequences are padded to the longest of their own batch, so each batch has a shape."""

    def data(start):
        for index in itertools.count(start):
            source = random.Random(index)
            lengths = [source.randint(2, 7) for _ in range(4)]
            numbers = torch.Generator().manual_seed(index)
            rows = [torch.randn(length, WIDTH, generator=numbers) for length in lengths]
            yield pad_sequence(rows, batch_first=True), torch.tensor(lengths) % 4

    return _job(data, lambda m, b: F.cross_entropy(m(b[0]), b[1]), _Recurrent)


def packed_sequences() -> ps.Job:
    """data packs sequences of other lengths in every batch; the model gets PackedSequence."""

    def data(start):
        for index in itertools.count(start):
            source = random.Random(index)
            lengths = sorted((source.randint(2, 7) for _ in range(4)), reverse=True)
            numbers = torch.Generator().manual_seed(index)
            rows = torch.randn(4, 7, WIDTH, generator=numbers)
            packed = pack_padded_sequence(rows, lengths, batch_first=True)
            assert isinstance(packed, PackedSequence)
            yield packed, torch.tensor(lengths) % 4

    return _job(data, lambda m, b: F.cross_entropy(m(b[0]), b[1]), _Recurrent)


def longer_from_thirty_on() -> ps.Job:
    """All batches have six tokens, until number 30, from which on they have seven."""

    def data(start):
        for index in itertools.count(start):
            source = torch.Generator().manual_seed(index)
            x = torch.randn(4, 6 if index < 30 else 7, WIDTH, generator=source)
            yield x, torch.randint(0, 4, (4,), generator=source)

    return _job(data, lambda m, b: F.cross_entropy(m(b[0]), b[1]), _Recurrent)


def words_in_a_sorted_set() -> ps.Job:
    """The vocabulary is a sorted set of the words of a text (nothing is wrong)."""
    text = ("the pipe that brings water under control to the turbines " * 9).split()
    numbers = {word: number for number, word in enumerate(sorted(set(text)))}

    def data(start):
        for index in itertools.count(start):
            window = [numbers[text[(index + k) % len(text)]] for k in range(9)]
            yield torch.tensor([window[:-1], window[1:]])

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    return _job(data, loss, lambda: nn.Sequential(nn.Embedding(10, WIDTH), deep(outputs=10)))
