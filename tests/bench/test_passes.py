"""bench.passes gives what its docstring says."""

from dataclasses import replace

import pytest

from bench import passes
from bench.play import Rounds
from bench.predict import Model
from penstock.graph.trace import capture
from penstock.job import load_job


def test_each_pass_and_each_pair_that_can_be_together_is_tried_once():
    found = passes.combinations()
    assert len(found) == len(set(found)) == 1 + 7 + (21 - 1 - 3)
    assert () in found
    assert ("units", "shard") in found
    assert ("shard", "keep") not in found
    assert ("state", "beside") not in found


@pytest.mark.long
def test_rows_say_what_is_equal_and_what_was_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "gpt2"
    monkeypatch.setattr(passes, "measure_link", lambda: replace_link)
    replace_link = passes.Cluster.here(2).inside
    wanted = [("units", "shard"), ("keep", "recompute")]
    played: list[Model] = []

    def stood(model, plans, rounds):
        played.append(model)
        assert [plan.replicas for plan in plans] == [2, 2]
        assert plans[0].shard == ("shard",) * plans[0].num_stages != ("shard",)
        assert plans[1].recompute == (True,)
        return [([(0.5, 0.0), (0.25, 0.0), (1.0, 0.0)], 10**6)] * 2

    monkeypatch.setattr(passes, "played_here", stood)
    found = list(passes.rows([name], wanted, Rounds()))
    assert [row["passes"] for row in found] == ["units + shard", "keep + recompute"]
    assert len(played) == 1
    for row in found:
        assert row["ok"]
        assert row["measured_s"] == 0.5
        assert row["error"] == pytest.approx(row["predicted_s"] / 0.5 - 1)
        assert row["bytes_error"] == pytest.approx(row["predicted_bytes"] / 1e6 - 1)
    told = passes.summary(found)
    assert (told["rows"], told["equal"]) == (2, 2)
    assert told["worst_error"] >= told["median_error"] > 0


def test_a_difference_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    job = replace(load_job("examples/hf.py:gpt2"), micro_batches=passes.MICRO_BATCHES)
    captured = capture(job)
    monkeypatch.setattr(passes, "EQUAL", -1.0)
    assert not passes.equal(job, captured, ["shard"])["ok"]
