"""The ledger against one that goes through the ranks step by step."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.schedule.ledger import Changes, levels, peaks

small = st.integers(-9, 9)
ranks = st.lists(st.tuples(small, st.lists(st.tuples(small, small, small), max_size=4)), min_size=1)


@given(ranks)
def test_what_is_held_is_what_was_held_and_all_changes_so_far(given):
    during, after, most = list[int](), list[int](), list[int]()
    for start, changes in given:
        held, seen = start, [start]
        for before, above, kept in changes:
            held += before
            during.append(held + above)
            held += kept
            after.append(held)
            seen += during[-1], held
        most.append(max(seen))
    rows = np.array([row for _, changes in given for row in changes], np.int64).reshape(-1, 3)
    offsets = np.cumsum([0, *(len(changes) for _, changes in given)])
    start = np.array([start for start, _ in given])
    found = levels(Changes(*rows.T), offsets, start)
    assert (found.during.tolist(), found.after.tolist()) == (during, after)
    assert peaks(found, offsets, start).tolist() == most
