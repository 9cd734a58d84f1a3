"""Passes: pure functions from `Program` to `Program`."""

from penstock.program.passes.receive_early import receive_early

__all__ = ["receive_early"]
