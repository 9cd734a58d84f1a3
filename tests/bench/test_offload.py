"""bench.offload gives what its docstring says."""

import pytest

from bench import offload
from tests.parity.test_far_weights import profile_of, wide, wide_job


def test_each_case_holds_its_cap_and_has_its_keys(monkeypatch):
    monkeypatch.setattr(offload, "setting", lambda job: made)
    made = offload.Setting(wide_job(), wide(), profile_of("wide"))
    weights, all_ = offload.sizes(made)
    assert all_ == pytest.approx(4 * weights, rel=0.01)
    assert offload.cap_of("weights", made) < weights < offload.cap_of("activations", made)
    one = offload.row("state", made, 2, 1)
    assert one["ours_peak_bytes"] <= one["cap_bytes"]
    assert one["ours_peak_bytes"] <= 1.01 * one["predicted_bytes"]
    named = "case", "free_s", "ours_s", "all_or_nothing_s", "predicted_s", "slower", "plan"
    named += "slower_awake", "far_bytes_per_s", "ours_awake_s", "ours_cpu_s"
    assert all(one[name] is not None for name in named)
    assert 0 < one["ours_awake_s"] <= one["ours_s"] * 1.5
    assert offload.shown(one).startswith("state")
