"""Rows of bench.instructions: every call of a step once, and none that did nothing."""

from collections import Counter

import pytest
import torch

from bench.instructions import rows_of
from bench.models import TINY
from bench.ours import lowered
from penstock.graph.trace import capture
from penstock.program.program import Compute, Send, Update


@pytest.mark.long
def test_rows_count_every_call_of_a_step():
    torch.set_num_threads(1)
    program = lowered(capture(TINY.job()), TINY, "one_f_one_b", 2).program
    rows = rows_of("one_f_one_b", 2, steps=4)
    for rank in range(2):
        code, own = program.code[rank], [row for row in rows if row["rank"] == rank]
        wanted = Counter(i.action.kind for i in code if isinstance(i, Compute))
        wanted |= {"send": sum(isinstance(i, Send) for i in code), "take": 2, "data": 2}
        wanted |= {"update": sum(isinstance(i, Update) for i in code)}
        assert {row["call"]: row["count"] for row in own} == wanted
        for row in own:
            assert row["low_us"] <= row["us"] <= row["high_us"]
            assert row["us_per_action"] == row["us"] * row["count"] / 4
