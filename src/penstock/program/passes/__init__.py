"""Passes: pure functions from `Program` to `Program`."""

from penstock.program.passes.prefetch import prefetch
from penstock.program.passes.receive_early import receive_early

PASSES = (prefetch, receive_early)

__all__ = ["PASSES", "prefetch", "receive_early"]
