"""bench.gpu gives what its docstring says, on a CPU too."""

import pytest
import torch

from bench.gpu import one
from bench.models import TINY
from penstock.graph.trace import capture


def test_every_way_is_another_plan_of_one_rank():
    captured = capture(one.job_of(TINY))
    plans = {way: one.plan_of(captured, way) for way in one.PEERS}
    assert {plan.total_ranks for plan in plans.values()} == {1}
    assert len(set(map(str, map(repr, plans.values())))) == len(plans)
    assert plans["whole"].num_stages == 1
    assert plans["both"].overlap.beside
    assert all(plans["recompute"].recompute)


@pytest.mark.long
def test_rows_have_both_sides_and_what_was_predicted():
    found = one.figures(TINY, ["state"], 1, None)
    (row,) = found["rows"]
    assert row["ratio"] == row["ours_s"] / row["peer_s"] > 0
    assert row["predicted_s"] > 0
    assert row["predicted_bytes"] > row["ours_bytes"] > 0
    assert all(each["measured_s"] > 0 for each in found["classes"])
    assert bool(found["overlap"]) == torch.cuda.is_available()


def test_peers_train_as_the_usual_loop_does():
    job = one.job_of(TINY)
    seen = []
    for kind in ("loop", "checkpoint", "save_on_cpu"):
        torch.manual_seed(0)
        step = one.peer(job, TINY, kind)
        model = next(
            c.cell_contents for c in step.__closure__ if hasattr(c.cell_contents, "pieces")
        )
        step()
        seen.append([p.detach().clone() for p in model.parameters()])
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))
