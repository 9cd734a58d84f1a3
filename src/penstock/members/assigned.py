"""Assigned: which row takes which column, so that the costs are least in all.

Rows come in one by one; each is let in along the cheapest path of changes to those that are in.

Source:   H. W. Kuhn, "The Hungarian method", 1955, by shortest paths: n rows in n^3 steps.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray


def least_assigned(costs: NDArray[np.float64]) -> list[int]:
    """Return the column of each row, each column once.

    costs:    [row, column], as many of the one as of the other; infinity: never.
    Raises:   ValueError: every way costs infinity.
    """
    count = len(costs)
    of_row, of_column = np.zeros(count + 1), np.zeros(count + 1)  # prices; 0 stands for none
    row_of: NDArray[np.int64] = np.zeros(count + 1, np.int64)  # by column, from 1 on
    for row in range(1, count + 1):
        row_of[0] = row
        _let_in(costs, row_of, of_row, of_column)
    found = np.empty(count, np.int64)
    found[row_of[1:] - 1] = np.arange(count)
    return found.tolist()


def _let_in(costs: NDArray[np.float64], row_of: Any, of_row: Any, of_column: Any) -> None:
    """Give the row at column 0 a column; others change theirs along the way."""
    count = len(costs)
    far, came_from = np.full(count + 1, math.inf), np.zeros(count + 1, np.int64)
    is_done = np.zeros(count + 1, np.bool_)
    column = 0
    while row_of[column]:
        is_done[column] = True
        row = row_of[column]
        reach = costs[row - 1] - of_row[row] - of_column[1:]
        nearer = np.flatnonzero(~is_done[1:] & (reach < far[1:]))
        far[nearer + 1], came_from[nearer + 1] = reach[nearer], column
        column = int(np.argmin(np.where(is_done, math.inf, far)))
        if not (step := far[column]) < math.inf:
            raise ValueError("every way costs infinity")
        of_row[row_of[is_done]] += step
        of_column[is_done] -= step
        far[~is_done] -= step
    while column:
        before = int(came_from[column])
        row_of[column], column = row_of[before], before
