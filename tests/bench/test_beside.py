"""bench.beside has the models that it names, and starts its ranks by itself."""

import math
import sys

import pytest
from torch import nn

from bench import beside
from bench.models import Pieces
from penstock.graph.trace import capture
from penstock.plan import plan_by_hand


def test_models_have_what_they_are_named_for():
    _, plain = beside.model_of("gpt")
    size, huge = beside.model_of("embedding")
    _, mixed = beside.model_of("experts")
    count = {name: sum(p.numel() for p in make().parameters()) for name, make in
             (("gpt", plain), ("embedding", huge), ("experts", mixed))}  # fmt: skip
    assert size.vocabulary == 16_384
    assert count["embedding"] > 1.5 * count["gpt"]
    assert count["experts"] > 2.5 * count["gpt"]
    model = mixed()
    assert isinstance(model, Pieces)
    kinds = [m for m in model.modules() if isinstance(m, beside.Experts)]
    assert all(isinstance(m, nn.ModuleList) and len(m) == beside.EXPERTS for m in (kinds[0].up,))


@pytest.mark.long
def test_ranks_are_started_as_a_module_and_tell_of_every_side(monkeypatch: pytest.MonkeyPatch):
    calls: list[list[str]] = []

    def run(command, **_):
        calls.append(command)
        folder = beside.Path(command[-1])
        told = {side: [[1.0], 2, 0.0, [0.5]] for side in ("own", "ddp")}
        assert [path.stem for path in (folder / "plans").iterdir()] == ["own"]
        (folder / "told.json").write_text(beside.json.dumps(told))

    monkeypatch.setattr(beside.subprocess, "run", run)
    graph = capture(beside.job_of("gpt")).graph
    plan = plan_by_hand(graph, (), "gpipe", num_micro_batches=1, replicas=2)
    found = beside.played("gpt", {"own": plan}, (2, math.inf), 1, ["ddp"])
    assert found["own"] == found["ddp"] == beside.Told([1.0], 2, 0.0, [0.5])
    assert calls[0][0] == sys.executable
    assert calls[0][-3:-1] == ["-m", "bench.beside"]
