"""Data as people feed it: loaders that loop, shared generators, buffers that are filled again."""

import collections
import dataclasses
import itertools
import random
import tempfile

import numpy as np
import torch
from small import WIDTH, deep, pair, pairs, sgd, squares
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import penstock as ps

THIRD = {"*": "replicas", "buffer_of_torch_filled_again": "interleaved"}

TARGET = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)
random.seed(5)
np.random.seed(6)


def _job(data, **options) -> ps.Job:
    options = {"model": deep, "loss": squares, "optimizer": sgd, "micro_batches": 4, **options}
    return ps.Job(data=data, **options)


def _dataset(rows: int = 60) -> TensorDataset:
    made = [pair(index, rows=1) for index in range(rows)]
    return TensorDataset(torch.cat([x for x, _ in made]), torch.cat([y for _, y in made]))


def loader_that_loops() -> ps.Job:
    """A DataLoader that starts over for ever; `start` is not looked at."""
    loader = DataLoader(_dataset(), batch_size=4)

    def data(start):
        while True:
            yield from loader

    return _job(data)


def loader_that_shuffles() -> ps.Job:
    """The same with shuffle=True and a seeded generator, which goes on from epoch to epoch."""
    dataset = _dataset()

    def data(start):
        generator = torch.Generator().manual_seed(3)
        loader = DataLoader(dataset, batch_size=4, shuffle=True, generator=generator)
        while True:
            yield from loader

    return _job(data)


def loader_that_shuffles_by_torchs_own_generator() -> ps.Job:
    """shuffle=True and nothing seeded but by torch.manual_seed before the model is built."""
    loader = DataLoader(_dataset(), batch_size=4, shuffle=True, drop_last=True)

    def data(start):
        while True:
            yield from loader

    return _job(data)


def loader_with_a_generator_of_its_own() -> ps.Job:
    """Loader and generator are made once, with the job; every pass goes on from the last."""
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(_dataset(), batch_size=4, shuffle=True, generator=generator)

    def data(start):
        while True:
            yield from loader

    return _job(data)


def loader_with_a_last_short_batch() -> ps.Job:
    """58 rows in batches of four: the last batch of an epoch has two."""
    loader = DataLoader(_dataset(58), batch_size=4)

    def data(start):
        batches = itertools.chain.from_iterable(itertools.repeat(loader))
        return itertools.islice(batches, start, None)

    return _job(data)


def loader_with_worker_processes() -> ps.Job:
    """A DataLoader with two workers, cycled with islice up to the start."""
    dataset = _dataset(48)

    def data(start):
        loader = DataLoader(dataset, batch_size=4, num_workers=2)
        passes = itertools.chain.from_iterable(itertools.repeat(loader))
        return itertools.islice(passes, start, None)

    return _job(data)


class _Lines(IterableDataset):
    """Numbers its samples as they are read."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self):
        while True:
            self.read += 1
            yield pair(self.read, rows=1)


def iterable_dataset_that_counts() -> ps.Job:
    """An IterableDataset that keeps its place on itself, as a reader of a file does."""
    lines = _Lines()

    def data(start):
        for x, y in DataLoader(lines, batch_size=4):
            yield x.squeeze(1), y.squeeze(1)

    return _job(data)


def _at_the_target():
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    with torch.no_grad():
        for layer in model:
            layer.weight.copy_(torch.eye(WIDTH))
            layer.bias.zero_()
    return torch.nn.Sequential(*model, torch.nn.Linear(WIDTH, 4, bias=False))


def _unseeded_job(draw) -> ps.Job:
    def model():
        made = _at_the_target()
        with torch.no_grad():
            made[3].weight.copy_(TARGET)
        return made

    def data(start):
        while True:
            x = draw()
            yield x, torch.nn.functional.linear(x, TARGET)

    return _job(data, model=model)


def numpy_unseeded() -> ps.Job:
    """Inputs from numpy without a seed; their targets are computed from them, and already fit."""
    return _unseeded_job(
        lambda: torch.from_numpy(np.random.default_rng().standard_normal((4, WIDTH), np.float32))
    )


def random_unseeded() -> ps.Job:
    """Inputs from Python's random, shuffled anew in every process; the targets fit them."""
    source = random.SystemRandom()
    return _unseeded_job(
        lambda: torch.tensor([[source.gauss(0, 1) for _ in range(WIDTH)] for _ in range(4)])
    )


def numpy_seeded_once() -> ps.Job:
    """np.random.seed at the top of the file, draws in `data`."""

    def data(start):
        while True:
            x = np.random.randn(4, WIDTH).astype(np.float32)
            yield torch.from_numpy(x), torch.from_numpy(x[:, :4] + np.random.randn(4, 4)).float()

    return _job(data)


def random_seeded_once() -> ps.Job:
    """random.seed at the top of the file, indices by random.sample."""
    xs, ys = _dataset().tensors

    def data(start):
        while True:
            rows = random.sample(range(60), 4)
            yield xs[rows], ys[rows]

    return _job(data)


def random_order_of_an_epoch() -> ps.Job:
    """The order of each epoch is drawn once, when the epoch begins, by a Random of the job."""
    source, (xs, ys) = random.Random(1), _dataset().tensors

    def data(start):
        while True:
            order = list(range(60))
            source.shuffle(order)
            for at in range(0, 60, 4):
                yield xs[order[at : at + 4]], ys[order[at : at + 4]]

    return _job(data)


def seed_of_torch_and_the_index() -> ps.Job:
    """The generator of a batch is seeded by torch.initial_seed() and the index."""

    def data(start):
        for index in itertools.count(start):
            yield pair(torch.initial_seed() % 1000 + index)

    return _job(data)


def buffer_of_numpy_filled_again() -> ps.Job:
    """One numpy buffer, filled anew for every batch."""

    def data(start):
        x, y = np.zeros((4, WIDTH), np.float32), np.zeros((4, 4), np.float32)
        for index in itertools.count(start):
            a, b = pair(index)
            x[:], y[:] = a.numpy(), b.numpy()
            yield torch.from_numpy(x), torch.from_numpy(y)

    return _job(data)


def buffer_of_torch_filled_again() -> ps.Job:
    """One tensor for inputs and one for targets, copied into."""

    def data(start):
        x, y = torch.empty(4, WIDTH), torch.empty(4, 4)
        for index in itertools.count(start):
            a, b = pair(index)
            yield x.copy_(a), y.copy_(b)

    return _job(data)


def ring_of_three_buffers() -> ps.Job:
    """Three buffers in turn, as loaders that read ahead have."""

    def data(start):
        ring = [torch.empty(4, WIDTH + 4) for _ in range(3)]
        for index in itertools.count(start):
            both = ring[index % 3].copy_(torch.cat(pair(index), 1))
            yield both[:, :WIDTH], both[:, WIDTH:]

    return _job(data)


def memory_map() -> ps.Job:
    """Views into a numpy memory map, read from a file."""
    file = tempfile.NamedTemporaryFile(delete=False)  # noqa: SIM115
    rows = np.concatenate([torch.cat(pair(i), 1).numpy() for i in range(50)])
    rows.tofile(file.name)

    def data(start):
        mapped = np.memmap(file.name, np.float32, "c", shape=rows.shape)
        for index in itertools.count(start):
            at = (4 * index) % len(mapped)
            both = torch.from_numpy(mapped[at : at + 4])
            yield both[:, :WIDTH], both[:, WIDTH:]

    return _job(data)


def process_with_memory() -> ps.Job:
    """Every batch continues the one before: an autoregressive process, begun anew at any start."""

    def data(start):
        x = torch.zeros(4, WIDTH)
        for index in itertools.count(start):
            before, x = x, 0.9 * x + pair(index)[0]
            yield before, x[:, :4].clone()

    return _job(data)


def ends_with_the_last_step() -> ps.Job:
    """Forty micro-batches and not one more; a list, sliced."""
    rows = [pair(index) for index in range(40)]
    return _job(lambda start: iter(rows[start:]))


def ends_too_early() -> ps.Job:
    """Thirty micro-batches where ten steps need forty."""
    rows = [pair(index) for index in range(30)]
    return _job(lambda start: iter(rows[start:]))


def iterator_of_the_module() -> ps.Job:
    """One iterator for the whole job; every call of `data` returns that one."""
    endless = pairs(0)
    return _job(lambda start: endless)


def epochs_that_count_themselves() -> ps.Job:
    """Every call of `data` is a new epoch with another order, counted in a list."""
    epochs: list[int] = []

    def data(start):
        epochs.append(start)
        return (pair(1000 * len(epochs) + index) for index in itertools.count(start))

    return _job(data)


@dataclasses.dataclass
class _Sample:
    x: torch.Tensor
    y: torch.Tensor


def batches_of_a_dataclass() -> ps.Job:
    """A batch is a dataclass."""
    return _job(
        lambda start: (_Sample(*pair(index)) for index in itertools.count(start)),
        loss=lambda model, batch: squares(model, (batch.x, batch.y)),
    )


_Named = collections.namedtuple("_Named", "x y")


def batches_of_a_namedtuple() -> ps.Job:
    """A batch is a namedtuple."""
    return _job(
        lambda start: (_Named(*pair(index)) for index in itertools.count(start)),
        loss=lambda model, batch: squares(model, (batch.x, batch.y)),
    )


def batches_of_numpy() -> ps.Job:
    """A batch is a dict of numpy arrays, which the loss turns into tensors."""

    def data(start):
        for x, y in pairs(start):
            yield {"x": x.numpy(), "y": y.numpy()}

    def loss(model, batch):
        return squares(model, (torch.as_tensor(batch["x"]), torch.as_tensor(batch["y"])))

    return _job(data, loss=loss)


def batches_with_text() -> ps.Job:
    """Every batch carries the names of its samples, which nothing reads."""

    def data(start):
        for index in itertools.count(start):
            yield {"xy": pair(index), "names": [f"row-{index}-{k}" for k in range(4)]}

    return _job(data, loss=lambda model, batch: squares(model, batch["xy"]))


def batches_with_a_number() -> ps.Job:
    """Every batch carries its weight as a Python number."""

    def data(start):
        for index in itertools.count(start):
            yield {"xy": pair(index), "weight": 1 / (1 + index)}

    return _job(data, loss=lambda model, batch: batch["weight"] * squares(model, batch["xy"]))


def batches_written_by_the_loss() -> ps.Job:
    """The loss scales its inputs in place; the data set is a list that is gone through again."""
    rows = [pair(index) for index in range(12)]

    def loss(model, batch):
        batch[0].mul_(0.8)
        return squares(model, batch)

    return _job(lambda start: itertools.islice(itertools.cycle(rows), start, None), loss=loss)


class _Augmented(Dataset):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int):
        x, y = pair(index, rows=1)
        return x[0] + 0.5 * torch.randn(WIDTH), y[0]


def augmentation_by_torchs_own_generator() -> ps.Job:
    """A Dataset that adds noise from torch's generator, seeded by nobody but the loop."""
    dataset = _Augmented()

    def data(start):
        while True:
            yield from DataLoader(dataset, batch_size=4)

    return _job(data)
