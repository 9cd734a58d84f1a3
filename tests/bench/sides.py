"""Sides of bench.beside, with a tiny model, as processes of this test."""

import pytest
import torch.distributed as dist

from bench import beside
from bench.measure import in_ranks
from bench.models import TINY
from penstock.transport.shared_memory import SharedMemoryTransport


def play_tiny(patched: pytest.MonkeyPatch, bench: object) -> None:
    """Let a bench play plans of a tiny model on two ranks that are forked."""
    patched.setattr(beside, "GPT", TINY)

    def played(name, plans, where, rounds, peers=beside.PEERS):
        def work(rank, folder):
            store = dist.FileStore(str(folder / "store"), 2)
            own = dist.PrefixStore("gloo", store)
            dist.init_process_group("gloo", store=own, rank=rank, world_size=2)
            end = SharedMemoryTransport(rank, 2, dist.PrefixStore("ours", store))
            return beside.by_turns(end, name, plans, (rounds, 3), peers)

        return {side: beside.Told(*row) for side, row in in_ranks(work)[0].items()}

    patched.setattr(bench, "played", played)
