"""Schedules: the order of work on every rank.

>>> print(text(one_f_one_b(2, 3)))  # doctest: +SKIP
"""

from penstock.schedule.one_f_one_b import one_f_one_b
from penstock.schedule.orders import KINDS, Action, Kind, Orders
from penstock.schedule.schedule import Schedule
from penstock.schedule.weight_rule import (
    DOUBLE_BUFFERED,
    SYNCHRONOUS,
    Reads,
    VersionTable,
    WeightRule,
    versions,
)

__all__ = [
    "DOUBLE_BUFFERED",
    "KINDS",
    "SYNCHRONOUS",
    "Action",
    "Kind",
    "Orders",
    "Reads",
    "Schedule",
    "VersionTable",
    "WeightRule",
    "one_f_one_b",
    "versions",
]
