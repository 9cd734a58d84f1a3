"""Step traces: what torch.profiler sees of some steps, a file of each rank for a trace viewer.

    OUT/torch_profile/rank0.step20.json    op by op, under the rank's calls: "F1.3", "reduce", ...

It is asked for by the steps, counted from 1.  The profile begins where the first of them does, and
is written once the last is over, or the run is; what lies between its steps, as a checkpoint, is in
it.  A step that is measured for its memory has torch's profiler already: a profile ends before it,
and another begins behind it.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final, get_args

import torch

from penstock import _compat
from penstock.device import here
from penstock.errors import PlanError
from penstock.runtime.calls import Bound, Call, Quiet

FOLDER = "torch_profile"  # of a run's folder


@dataclass(frozen=True, slots=True)
class ProfiledSteps:
    """The first and the last step that is profiled, counted from 1, and where that is written."""

    first: int
    last: int
    folder: Path

    def has(self, first_step: int, num_steps: int) -> bool:
        """Return whether it has some of these steps, of which the first is counted from 0."""
        return first_step < self.last and first_step + num_steps >= self.first


def parse_steps(text: str) -> tuple[int, int]:
    """Return the first and the last step of "20:25" or "20".

    Raises:   PlanError: it is neither.
    """
    first, _, last = text.partition(":")
    numbers = [int(part) for part in (first, last or first) if part.strip().isdecimal()]
    if len(numbers) < 2 or not 1 <= numbers[0] <= numbers[1]:
        hint = "write torch_profile=20:25 for steps 20 to 25, which are counted from 1"
        raise PlanError(f'torch_profile is "{text}", no steps', hint=hint)
    return numbers[0], numbers[1]


@final
class StepTracer:
    """Profiles the steps of one rank that are asked for."""

    def __init__(self, asked: ProfiledSteps | None, rank: int) -> None:
        self._asked, self._rank = asked, rank
        self._profiler: torch.profiler.profile | None = None
        self._file = Path()

    def sees(self, first_step: int, num_steps: int) -> bool:
        """Return whether one of these steps is asked for."""
        return self._asked is not None and self._asked.has(first_step, num_steps)

    def begin(self, first_step: int, num_steps: int) -> bool:
        """Begin a profile, if one of these steps is asked for; return whether one is under way."""
        if self._asked is None or not self.sees(first_step, num_steps):
            return False
        if self._profiler is None:
            self._file = self._asked.folder / f"rank{self._rank}.step{first_step + 1}.json"
            kinds = torch.profiler.supported_activities()
            kinds = {torch.profiler.ProfilerActivity.CPU} if here().is_cpu else kinds
            self._profiler = torch.profiler.profile(activities=kinds)
            with _compat.stderr_closed():
                self._profiler.start()
        return True

    def end(self, first_step: int, num_steps: int) -> None:
        """Write the profile, if the last step that is asked for is over."""
        if self._asked is not None and first_step + num_steps >= self._asked.last:
            self.close()

    def close(self) -> None:
        """Write the profile that is under way, if one is."""
        if self._profiler is None:
            return
        with _compat.stderr_closed():
            self._profiler.stop()
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(self._file))
        self._profiler = None

    @contextmanager
    def over(
        self, calls: Sequence[Bound], first_step: int, num_steps: int
    ) -> Generator[Sequence[Bound]]:
        """Give the calls of a window to run, with their names where they are profiled."""
        if self.begin(first_step, num_steps):
            yield [replace(bound, call=_named(bound)) for bound in calls]
        else:
            yield calls
        self.end(first_step, num_steps)


def _named(bound: Bound) -> Call:
    name, call = name_of(bound), bound.call

    def run() -> None:
        with torch.profiler.record_function(name):
            call()

    return run


def name_of(bound: Bound) -> str:
    """Return how a call is named, as "F1.3" or "data 2.0": of a stage, and of a micro-batch."""
    kind = bound.lane if bound.lane in get_args(Quiet) else bound.kind
    place = ".".join(str(number) for number in (bound.stage, bound.micro_batch) if number >= 0)
    return f"{kind}{place}" if len(kind) == 1 else f"{kind} {place}".rstrip()
