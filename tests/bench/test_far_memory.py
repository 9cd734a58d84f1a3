"""bench.far_memory gives what its docstring says."""

from dataclasses import replace

import pytest
import torch

from bench import far_memory
from penstock.search.judge import Judge
from tests.parity.models import captured, job_of
from tests.runtime.test_memory import profile_of


@pytest.mark.long
def test_only_what_fits_is_chosen_and_copies_last_as_long_as_they_are_said_to(monkeypatch):
    monkeypatch.setattr(far_memory, "MICRO_BATCH_S", 0.01)
    monkeypatch.setattr(far_memory, "RANKS", 2)
    name, dtype = "gpt", torch.float32
    job = replace(job_of(name, dtype, "adamw"), micro_batches=4)
    made = far_memory.setting(captured(name, dtype), job, profile_of(name), 0.5)
    cap, plans = far_memory.ways(made)
    judge = Judge(made.captured.graph, made.profile, made.cluster(10**12, 4))
    found = {way: judge.candidate(plan) for way, plan in plans.items()}
    fits = {way: max(each.peak_bytes) <= cap for way, each in found.items()}
    assert list(fits) == ["1F1B", "1F1B, copied", "1F1B, beside", "best without copies", "best"]
    assert not fits["1F1B"]
    assert fits["best"]
    assert fits["best without copies"]
    assert found["best"].step_s <= found["best without copies"].step_s
    assert not plans["best without copies"].offloads
    copied = far_memory.step_s(made, plans["1F1B, copied"], 2)
    assert copied > 0.9 * (found["1F1B, copied"].step_s - found["1F1B"].step_s)
