"""bench.replay gives what its docstring says."""

import json

import numpy as np
import pytest
import torch

from bench import replay as bench
from bench.replay import Case, Later, Source, agreement, rows_of, sources, target
from penstock.graph.trace import capture
from penstock.plan import plan_by_hand
from penstock.plan.lower_plan import lower_plan
from penstock.simulate.what_if import Change, Run
from penstock.transport import TensorSpec
from penstock.transport.threads import thread_transports
from tests.cli import mlp
from tests.search.chains import costless

KEYS = {
    "source", "change", "num_micro_batches", "source_s", "measured_s", "predicted_s", "error",
    "low", "high", "same", "replay_error",
}  # fmt: skip


def test_row_has_what_was_predicted_beside_what_was_run(monkeypatch):
    def one_source(captured, profile, later_s):
        plan = plan_by_hand(captured.graph, (1,), "one_f_one_b", num_micro_batches=2)
        changes = Change(schedule="gpipe"), Change(latency_s=later_s), Change(num_micro_batches=3)
        yield Source(Case("two stages", plan), changes)

    monkeypatch.setitem(bench.JOBS, bench.MODEL, mlp.job())
    monkeypatch.setattr(bench, "sources", one_source)
    rows = rows_of(1, 3, emulated=0.5)
    assert [row["change"] for row in rows] == [
        "gpipe", "messages 2 ms longer under way", "3 micro-batches",
    ]  # fmt: skip
    assert json.loads(json.dumps(rows)) == rows
    for row in rows:
        assert row.keys() == KEYS
        assert row["error"] == pytest.approx(row["predicted_s"] / row["measured_s"] - 1)
        assert row["replay_error"] == pytest.approx(0.0, abs=1e-6)


def test_every_source_and_target_can_be_lowered():
    captured = capture(bench.JOBS[bench.MODEL])
    graph = captured.graph
    count = len(graph.nodes)
    profile = costless(graph.digest, (1.0,) * count)
    found = list(sources(captured, profile, 0.5))
    assert [len(source.changes) for source in found] == [7, 6, 2]
    for source in found:
        for change in source.changes:
            traced = Run(source.case.plan, graph, *(None,) * 5, 1.0, (), np.zeros(0))
            case = target(source.case, change, traced)
            assert lower_plan(case.plan, graph).num_ranks == bench.RANKS
            assert case.latency_s == change.latency_s


def test_later_transport_hands_over_the_same_messages_in_order():
    ends = [Later(end, 0.001) for end in thread_transports(2)]
    specs = (TensorSpec((2,), torch.float32),)
    send = ends[0].bind_send(0, 1, specs)
    _, wait = ends[1].bind_receive(0, 0, specs)
    for number in range(3):
        send([torch.full((2,), float(number))])
    assert [[t.tolist() for t in wait()] for _ in range(3)] == [[[k, k]] for k in (0.0, 1.0, 2.0)]
    assert (ends[0].rank, ends[0].num_ranks) == (0, 2)


def test_agreement_counts_clear_pairs_of_one_source_per_micro_batch():
    def row(source: str, measured_s: float, predicted_s: float, num_micro_batches: int = 1):
        return {
            "source": source, "measured_s": measured_s, "predicted_s": predicted_s,
            "num_micro_batches": num_micro_batches,
        }  # fmt: skip

    assert agreement([row("a", 1.0, 1.0), row("a", 2.0, 1.5)]) == (1, 1)
    assert agreement([row("a", 1.0, 1.5), row("a", 2.0, 1.0)]) == (0, 1)
    assert agreement([row("a", 1.0, 1.5), row("a", 1.02, 1.0)]) == (0, 0)
    assert agreement([row("a", 1.0, 1.5), row("b", 2.0, 1.0)]) == (0, 0)
    assert agreement([row("a", 1.0, 1.0), row("a", 1.5, 1.8, 2)]) == (1, 1)
