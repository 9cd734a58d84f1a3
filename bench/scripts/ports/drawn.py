"""Data that ports make themselves, in the shapes of the sets that the public scripts download."""

import torch
from torch.utils.data import Dataset


class Drawn(Dataset):
    """Samples that a function makes of a generator seeded by their number."""

    def __init__(self, make, count):
        self.make, self.count = make, count

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        if not 0 <= number < self.count:
            raise IndexError(number)
        return self.make(torch.Generator().manual_seed(number))


def pictures(count=64, channels=1, size=8, classes=4):
    """Return pictures with labels; those of one label are alike."""

    def make(source):
        label = int(torch.randint(classes, (), generator=source))
        picture = torch.randn(channels, size, size, generator=source)
        picture[:, label % size] += 2.0
        return picture, label

    return Drawn(make, count)


def words(count, vocabulary=16, seed=0):
    """Return a text as numbers, in which each word depends on the one before."""
    source = torch.Generator().manual_seed(seed)
    steps = torch.randint(0, 3, (count,), generator=source)
    return steps.cumsum(0) % vocabulary
