"""Ledger: the level of every rank after each of its actions, and its peak.

For activations or bytes, actions or instructions: whatever says what a rank holds adds it up
here.
"""

from typing import NamedTuple

import numpy as np

from penstock.schedule.orders import IntArray


class Changes(NamedTuple):
    """The changes that actions make to a rank's level, one rank after the other."""

    before: IntArray  # held more, or less, as it begins
    during: IntArray  # held above that while it lasts
    after: IntArray  # held above that when it is over; may be negative


class Levels(NamedTuple):
    """What is held while each of these things lasts, and when it is over."""

    during: IntArray
    after: IntArray


def levels(changes: Changes, offsets: IntArray, start: IntArray) -> Levels:
    """Return the levels after and during each change; `start` is what each rank holds at first.

    The changes of rank r lie from `offsets[r]` to `offsets[r + 1]`.
    """
    total = np.cumsum(changes.before + changes.after)
    ends = np.append(0, total)[offsets]
    after = total + np.repeat(start - ends[:-1], np.diff(offsets))
    return Levels(after - changes.after + changes.during, after)


def peaks(held: Levels, offsets: IntArray, start: IntArray) -> IntArray:
    """Return the highest level of each rank."""
    nothing = np.iinfo(np.int64).min  # at the end, where the last ranks begin if they do nothing
    most = np.append(np.maximum(held.during, held.after), nothing)
    peaks = np.maximum(start, np.maximum.reduceat(most, offsets[:-1]))
    return np.where(np.diff(offsets) > 0, peaks, start)
