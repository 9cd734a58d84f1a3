"""bench.shard gives what its docstring says."""

import math

import pytest
import torch.distributed as dist
from torch import nn

from bench import shard
from bench.measure import in_ranks
from bench.models import TINY, Pieces
from penstock.runtime.transport.shared_memory import SharedMemoryTransport

NAMES = (
    "model, ranks, link, way, plan, cap_bytes, peer, ours_s, peer_s, ratio, ours_peak_bytes, "
    "peer_peak_bytes, ours_sent_bytes, peer_sent_bytes, predicted_s, predicted_bytes"
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "GPT", TINY)

    def played(name, plans, where, rounds):
        def work(rank, folder):
            store = dist.FileStore(str(folder / "store"), 2)
            own = dist.PrefixStore("gloo", store)
            dist.init_process_group("gloo", store=own, rank=rank, world_size=2)
            end = SharedMemoryTransport(rank, 2, dist.PrefixStore("ours", store))
            return shard.by_turns(end, name, plans, rounds)

        return {side: shard.Told(*row) for side, row in in_ranks(work)[0].items()}

    monkeypatch.setattr(shard, "played", played)


def test_rows_are_of_all_sides_which_come_to_the_same_weights_in_the_bytes_predicted(tiny):
    found = list(shard.rows(("gpt",), (2,), (math.inf,), 1))
    assert all(", ".join(row) == NAMES for row in found)
    sides = [(row["way"], row["peer"]) for row in found]
    assert sides == [(way, peer) for way in (*shard.WAYS, shard.PLANNED) for peer in shard.PEERS]
    for row in found:
        assert row["ratio"] == row["ours_s"] / row["peer_s"] > 0
        assert row["ours_peak_bytes"] == pytest.approx(row["predicted_bytes"], rel=0.01)
        assert row["ours_sent_bytes"] == 0
    (cap,) = {row["cap_bytes"] for row in found if row["way"] == shard.PLANNED}
    held = {row["way"]: row["predicted_bytes"] for row in found}
    assert held[shard.PLANNED] <= cap == held["shard"] < held["shard_keep"]


def test_models_have_what_they_are_named_for():
    _, plain = shard.model_of("gpt")
    size, huge = shard.model_of("embedding")
    _, mixed = shard.model_of("experts")
    count = {name: sum(p.numel() for p in make().parameters()) for name, make in
             (("gpt", plain), ("embedding", huge), ("experts", mixed))}  # fmt: skip
    assert size.vocabulary == 16_384
    assert count["embedding"] > 1.5 * count["gpt"]
    assert count["experts"] > 2.5 * count["gpt"]
    model = mixed()
    assert isinstance(model, Pieces)
    kinds = [m for m in model.modules() if isinstance(m, shard.Experts)]
    assert all(isinstance(m, nn.ModuleList) and len(m) == shard.EXPERTS for m in (kinds[0].up,))
