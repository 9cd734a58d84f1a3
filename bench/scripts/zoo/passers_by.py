"""State where few look: keywords of a partial, a deque that turns, what a cache has met."""

import bisect
import collections
import ctypes
import enum
import functools
import heapq
import multiprocessing
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from small import WIDTH, classes, deep, entropy, pairs, sgd, squares
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import penstock as ps

STEPS = {
    "counter_that_processes_share": 60,
    "array_that_processes_share": 60,
    "keywords_of_a_partial": 60,
    "model_of_another_class_from_25_on": 60,
    "hits_of_a_cache": 60,
    "member_of_an_enum_that_counts": 60,
    "weights_that_turn_in_a_deque": 60,
    "number_of_c": 60,
    "heap_of_the_hardest_from_twenty_on": 60,
    "augmented_once_and_kept": 60,
    "generator_of_a_collator": 60,
    "warned_once": 60,
    "files_in_a_folder": 60,
    "parameter_of_its_own_class": 60,
    "seeded_by_what_is_in_the_batch": 60,
    "frequencies_of_labels_so_far": 60,
    "median_of_sorted_losses": 60,
}


def _job(model=deep, loss=squares, data=pairs, **options) -> ps.Job:
    options = {"optimizer": sgd, "micro_batches": 2, **options}
    return ps.Job(model=model, loss=loss, data=data, **options)


def counter_that_processes_share() -> ps.Job:
    """A number in shared memory that each call of the loss raises."""
    calls = multiprocessing.Value("i", 0)

    def loss(model, batch):
        with calls.get_lock():
            calls.value += 1
        return squares(model, batch) * (1 + 0.01 * calls.value)

    return _job(loss=loss)


def array_that_processes_share() -> ps.Job:
    """Shares in an array of shared memory, of which each call makes one smaller."""
    shares = multiprocessing.RawArray("d", [1.0, 1.0])

    def loss(model, batch):
        shares[1] *= 0.98
        return squares(model, batch) * shares[1]

    return _job(loss=loss)


def keywords_of_a_partial() -> ps.Job:
    """A partial whose keyword the loss makes smaller."""
    smooth = functools.partial(F.smooth_l1_loss, beta=2.0)

    def loss(model, batch):
        x, y = batch
        smooth.keywords["beta"] = max(0.1, smooth.keywords["beta"] * 0.97)
        return smooth(model(x), y)

    return _job(loss=loss)


class _Cold(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.calls = deep(), 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 25:
            self.__class__ = _Warm
        return self.body(x)


class _Warm(_Cold):
    def forward(self, x):
        return self.body(x) * 1.5


def model_of_another_class_from_25_on() -> ps.Job:
    """A model that gives itself another class at its call 25."""
    return _job(_Cold)


def hits_of_a_cache() -> ps.Job:
    """A share that follows how often a cache was hit."""

    @functools.lru_cache(maxsize=4)
    def scale_of(size):
        return 1.0 / size

    def loss(model, batch):
        scale = scale_of(len(batch[0]))
        return squares(model, batch) * (1 + scale * scale_of.cache_info().hits / 50)

    return _job(loss=loss)


class _Phase(enum.Enum):
    WARM = "warm"


def member_of_an_enum_that_counts() -> ps.Job:
    """An attribute of a member of an enumeration."""
    _Phase.WARM.seen = 0

    def loss(model, batch):
        _Phase.WARM.seen += 1
        return squares(model, batch) * (2.0 if _Phase.WARM.seen > 30 else 1.0)

    return _job(loss=loss)


def weights_that_turn_in_a_deque() -> ps.Job:
    """Weights of two parts of the loss, turned by one place at each call."""
    shares = collections.deque([1.0, 0.5, 0.25])

    def loss(model, batch):
        x, y = batch
        shares.rotate(1)
        out = model(x)
        return shares[0] * F.mse_loss(out, y) + shares[1] * out.abs().mean()

    return _job(loss=loss)


def number_of_c() -> ps.Job:
    """A counter that is a number of C."""
    calls = ctypes.c_long(0)

    def loss(model, batch):
        calls.value += 1
        return squares(model, batch) / (1 + 0.01 * calls.value)

    return _job(loss=loss)


def heap_of_the_hardest_from_twenty_on() -> ps.Job:
    """Losses of the past in a heap; from call 40 on its least is a floor."""
    heap, calls = list[float](), [0]

    def loss(model, batch):
        value = squares(model, batch)
        calls[0] += 1
        heapq.heappush(heap, float(value.detach()))
        if calls[0] > 40:
            value = value.clamp(min=heap[0] * 1.05)
        return value

    return _job(loss=loss)


class _Kept(Dataset):
    def __init__(self):
        drawn = torch.Generator().manual_seed(3)
        self.x = torch.randn(24, WIDTH, generator=drawn)
        self.made = {}

    def __len__(self):
        return len(self.x)

    def __getitem__(self, at):
        if at not in self.made:
            self.made[at] = self.x[at] + 0.1 * torch.randn(WIDTH)
        row = self.made[at]
        return row, row[:4].argmax()


def augmented_once_and_kept() -> ps.Job:
    """A dataset that changes each sample once, when it is first asked for, and keeps that."""
    return _job(loss=entropy, data=ps.from_loader(DataLoader(_Kept(), 8)), micro_batches=1)


def generator_of_a_collator() -> ps.Job:
    """A collator that mixes rows by a generator of its own, which goes on from batch to batch."""
    source = np.random.default_rng(5)

    def mixed(rows):
        x, y = (torch.stack(each) for each in zip(*rows, strict=True))
        share = float(source.beta(0.4, 0.4))
        order = torch.from_numpy(source.permutation(len(x)))
        return share * x + (1 - share) * x[order], y

    drawn = torch.Generator().manual_seed(4)
    rows = [
        (torch.randn(WIDTH, generator=drawn), torch.randn(4, generator=drawn)) for _ in range(48)
    ]
    loader = DataLoader(rows, 8, collate_fn=mixed)
    return _job(data=ps.from_loader(loader), micro_batches=1)


def warned_once() -> ps.Job:
    """A loss that is larger where it has just warned, which it does once a place."""

    def loss(model, batch):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("default")
            warnings.warn("large", stacklevel=1)
        return squares(model, batch) * (1 + len(told))

    return _job(loss=loss)


def files_in_a_folder() -> ps.Job:
    """A loss that leaves a file for each call, and counts them."""
    folder = Path(tempfile.mkdtemp())

    def loss(model, batch):
        count = len(list(folder.iterdir()))
        (folder / str(count)).touch()
        return squares(model, batch) / (1 + 0.02 * count)

    return _job(loss=loss)


class _Noted(nn.Parameter):
    """A parameter that notes how often functions were asked of it."""

    asked = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.asked += 1
        return super().__torch_function__(func, types, args, kwargs or {})


def parameter_of_its_own_class() -> ps.Job:
    """A scale of a class of its own, which sees each function that is called with it."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.scale = deep(), _Noted(torch.ones(4))

        def forward(self, x):
            return self.body(x) * self.scale

    return _job(Scaled)


def seeded_by_what_is_in_the_batch() -> ps.Job:
    """Noise of a generator that is made anew, its seed a sum over the batch."""

    def loss(model, batch):
        x, y = batch
        seed = int(x.abs().sum().item() * 1000) % 2**31
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
        return F.mse_loss(model(x + 0.1 * noise), y)

    return _job(loss=loss)


def frequencies_of_labels_so_far() -> ps.Job:
    """Logits moved by how often each label was met so far."""
    met = collections.Counter(dict.fromkeys(range(4), 1))

    def loss(model, batch):
        x, y = batch
        met.update(y.tolist())
        moved = torch.tensor([met[k] / met.total() for k in range(4)]).log()
        return F.cross_entropy(model(x) + moved, y)

    return _job(loss=loss, data=classes)


def median_of_sorted_losses() -> ps.Job:
    """A loss that counts for half where it is above the median of all before, from call 50 on."""
    sorted_losses = list[float]()

    def loss(model, batch):
        value = squares(model, batch)
        bisect.insort(sorted_losses, float(value.detach()))
        is_late = len(sorted_losses) > 50
        middle = sorted_losses[len(sorted_losses) // 2]
        return value * torch.where(value.detach() > middle, 0.5, 1.0) if is_late else value

    return _job(loss=loss)
