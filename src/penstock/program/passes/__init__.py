"""Passes: pure functions from `Program` to `Program`."""

from penstock.program.passes.offload import offload
from penstock.program.passes.receive_early import receive_early
from penstock.program.passes.shard import shard

__all__ = ["offload", "receive_early", "shard"]
