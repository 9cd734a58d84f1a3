"""Proof: what comparing some steps of a run with the plain loop found."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from penstock.files import Json
from penstock.graph.wire import error_bound
from penstock.job import Job
from penstock.prove.compare import Difference, worst_of
from penstock.sums import HALVES, sums_way

TOLERANCE = 1e-5  # relative, of sums made in another order
LOW_PRECISION_TOLERANCE = 2e-2  # in 16 bits: bfloat16 has 8
_WINDOW_ROUNDINGS = 8
_SAME_INPUTS = ("update", "optimizer", "data", "copies")  # nothing was rounded on the way to them


@dataclass(frozen=True, slots=True)
class Proof:
    """What comparing a run with the plain loop found.

    steps:        the numbers of the steps that were compared.
    differences:  the largest of each group.
    problem:      what differs by more than rounding, and where; empty if nothing does.
    left_out:     what was not compared, and why.
    seconds:      that it took.
    bits:         of numbers that go rounded from rank to rank; empty: none does.
    sums:         dtype in which gradients travel that ranks sum; empty: as they are.
    """

    steps: tuple[int, ...]
    differences: tuple[Difference, ...]
    problem: str
    left_out: tuple[str, ...]
    seconds: float
    bits: tuple[int, ...] = ()
    sums: str = ""

    def __str__(self) -> str:
        if self.problem:
            return self.problem
        steps = " and ".join(str(step + 1) for step in self.steps)
        groups = ", ".join(map(str, self.differences))
        rest = f"; not compared: {'; '.join(self.left_out)}" if self.left_out else ""
        loop = "the plain loop"
        if self.bits:
            bits = " or ".join(map(str, self.bits))
            loop += f" that rounds to {bits} bits what goes from rank to rank"
        if sums_way(self.sums or None).averages:
            loop = f"{loop} of each replica, with weights averaged as {self.sums} says,"
        elif sums_way(self.sums or None).holds_back:
            loop += f", with what ranks hold back of sums as {self.sums},"
        elif self.sums and not sums_way(self.sums).served:
            loop += f"{' and' if self.bits else ' that'} rounds what ranks sum to {self.sums}"
        return f"equal to {loop} at step {steps}: {groups}{rest}"

    def to_json(self) -> dict[str, Json]:
        """Return the proof as JSON values; what is infinitely far apart is null."""
        content = json.loads(json.dumps(asdict(self)))
        for row in content["differences"]:
            row["value"] = row["value"] if math.isfinite(row["value"]) else None
        return content

    def to_text(self) -> str:
        """Return the proof as the text of a JSON file."""
        return json.dumps(self.to_json(), indent=2) + "\n"


def proof_of(
    job: Job,
    steps: tuple[int, ...],
    rows: Sequence[Difference],
    left_out: tuple[str, ...],
    seconds: float,
    bits: tuple[int, ...] = (),
) -> Proof:
    """Return the proof that all these differences make."""
    groups = dict.fromkeys((row.what, row.narrow) for row in rows)
    worst = tuple(worst_of(r for r in rows if (r.what, r.narrow) == group) for group in groups)
    too_far = [row for row in worst if not row.value <= _tolerance(row, job, bits)]
    problem = "; ".join(map(_words, too_far))
    return Proof(steps, worst, problem, left_out, seconds, bits, job.sums or "")


def _tolerance(row: Difference, job: Job, bits: tuple[int, ...]) -> float:
    if row.what == "rounding":
        return math.inf
    if row.what == "weights" and bits:  # of a window: a last bit may round the other way meanwhile
        return _WINDOW_ROUNDINGS * error_bound(min(bits))
    if row.narrow:  # whatever it comes of: numbers of 16 bits are rounded where they are kept
        return LOW_PRECISION_TOLERANCE
    is_whole = job.precision is job.autocast is None and job.sums not in HALVES
    exact = row.what in _SAME_INPUTS or is_whole
    return TOLERANCE if exact else LOW_PRECISION_TOLERANCE


_MEANT: dict[str, Callable[[str], str]] = {
    "data": lambda where: f"{where} differs from the one the plain loop reads",
    "loss": lambda where: "the loss",
    "gradients": lambda where: f"the gradient of {where}",
    "buffers": lambda where: f"the buffer {where}",
    "update": lambda where: f"the update of {where}, from the same gradients,",
    "optimizer": lambda where: f"the optimizer's state {where.removeprefix('optimizer/')}",
    "weights": lambda where: f"the weight {where}",
    "average": lambda where: f"{where}, which replicas average with,",
    "traced loss": lambda where: "the loss of the traced step",
    "traced gradients": lambda where: f"the traced step's gradient of {where}",
    "rounding": lambda where: f"rounding moves the gradient of {where}, which",
    "copies": lambda where: f"{where} has other weights than its copies",
}


def _words(row: Difference) -> str:
    text = _MEANT[row.what](row.where)
    if row.what in ("data", "copies"):
        return text
    how = "is not a number, or is on one side only" if math.isinf(row.value) else None
    return f"{text} {how or f'differs by {row.value:.3g}'}"
