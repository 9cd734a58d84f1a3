"""The proof of replicas that average weights: which steps it looks at, and what it notices."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from penstock.errors import PlanError
from penstock.examine.buffer_terms import check_chosen
from penstock.plan import plan_by_hand
from penstock.prove.averaging import averaged, first_memory
from penstock.prove.prove import Planned, prove, steps_to_prove
from penstock.state.averaged import Averaged
from penstock.sums import sums_way
from tests.parity.optimizing import Net
from tests.parity.test_averages import averaging, captured_of


def test_the_proof_looks_at_steps_behind_which_it_averages():
    assert steps_to_prove(0, 100) == (0, 5)
    assert steps_to_prove(0, 100, averages="local:8") == (0, 5, 7, 15)
    assert steps_to_prove(16, 100, averages="gossip:4") == (16, 19, 21, 23)
    assert steps_to_prove(0, 10, averages="local:500") == (0, 5)


def drifting(self, transport, group):
    for flat in self.flats:
        flat.mul_(1.001)


@pytest.mark.parametrize("way", ["local:2", "diloco:2", "easgd:2", "gossip:2"])
def test_the_proof_notices_another_average(way, monkeypatch):
    run = averaging(way, model=Net)
    planned = Planned(run.job, run.captured, run.plan)
    monkeypatch.setattr(Averaged, "average", lambda *_: None)
    assert "the update of" in prove(planned, (0, 1)).problem
    monkeypatch.setattr(Averaged, "average", drifting)
    assert "the update of" in prove(planned, (0, 1)).problem


def test_an_average_of_equal_weights_leaves_them_as_they_are():
    weights = {"a": torch.randn(5, generator=torch.Generator().manual_seed(1))}
    for text in ("local:1", "diloco:1", "easgd:1", "gossip"):
        way = sums_way(text)
        rows, memory = averaged(way, 0, [weights] * 3, first_memory(way, weights))
        assert all(torch.equal(row["a"], weights["a"]) for row in rows)
        assert all(
            torch.equal(memory[place]["a"], weights["a"]) for place in memory if place != "outer"
        )


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 6)

    def forward(self, x):
        return self.last(self.norm(x))


def normed():
    return Normed().double()


def test_buffers_of_replicas_that_differ_are_their_own_or_refused():
    captured, job = captured_of(normed), averaging("local:2", model=normed).job
    plan = plan_by_hand(captured.graph, [], "gpipe", num_micro_batches=2, replicas=2)
    with pytest.raises(PlanError, match="with buffers that forward writes"):
        check_chosen(plan.changed(sums="local:2"), job, captured.graph)
    own = replace(job, buffers="per replica")
    plan = plan.changed(sums="local:2", buffers="per replica")
    check_chosen(plan, own, captured.graph)
    proof = prove(Planned(own, captured, plan), (0, 1))
    assert proof.problem == ""
