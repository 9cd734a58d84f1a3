"""Candidate: a plan and what its simulation says."""

from dataclasses import dataclass
from typing import Literal

from penstock.plan.plan import Plan

Objective = Literal["time", "cost", "memory"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan, what its simulation says, and why it cannot be used (empty if it can)."""

    plan: Plan
    step_s: float
    peak_bytes: tuple[int, ...]
    usd: float
    refused: str = ""

    def score(self, objective: Objective) -> tuple[float, float]:
        """Return what is to be small: the objective, then the other of time and memory."""
        peak = float(max(self.peak_bytes, default=0))
        match objective:
            case "time":
                return self.step_s, peak
            case "cost":
                return self.usd or self.step_s * self.plan.total_ranks, self.step_s
            case "memory":
                return peak, self.step_s
