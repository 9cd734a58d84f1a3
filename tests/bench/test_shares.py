"""What the bench of unequal shares compares is what it says."""

import pytest
import torch

from bench.shares import CASES, MICRO_BATCHES, Case, Known, pair_of
from penstock.cluster import Link
from tests.parity.models import captured, job_of
from tests.runtime.test_memory import profile_of


@pytest.fixture(scope="module")
def known():
    link = Link(1e-6, 1e10)
    return Known(
        job_of("gpt", torch.float32, "adamw"),
        captured("gpt", torch.float32),
        profile_of("gpt"),
        link,
    )


@pytest.mark.long
@pytest.mark.parametrize("case", [case for case in CASES if case.how == "sleep"])
def test_what_is_found_is_uneven_and_predicted_to_be_faster(known: Known, case: Case):
    pair = pair_of(known, case)
    for plan in pair[:2]:
        assert plan.total_ranks == len(case.factors)
        assert plan.step_micro_batches == MICRO_BATCHES
    assert pair.predicted_ratio > 1.1
    if case.way == "turns":
        assert pair.even.schedule != pair.ours.schedule
        return
    fast, slow = pair.ours.place.shares[0], pair.ours.place.shares[-1]
    assert fast > slow
    assert not pair.even.place.shares
    if case.way == "parts":
        assert pair.ours.place.parts[0] < pair.ours.place.parts[-1]
        rows = zip(pair.predicted_bytes, pair.room_bytes, strict=True)
        assert all(held <= room for held, room in rows)
