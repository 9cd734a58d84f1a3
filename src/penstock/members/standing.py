"""Standing: a rank whose step does not go on, though nobody keeps it waiting, is told, then leaves.

Its lines go on beating, so the others would wait for ever: for data that sleeps, a lock, a disk.
The thread of its lines looks where the rank stands.  As long as it waits for the others, or writes,
or validates, that is no fault of its own.

    stands     longer than 5 s, and 5 times as long as the generation's longest step: it says so
    leaves     longer than 20 s, and 20 times as long, while another one waits for it

It leaves as a rank that dies would, so that the others go on for certain; when it wakes it joins
them again.  Before a generation's first step - where steps are compiled - none leaves.  Nor does
one that validates, for which the others wait: after a minute it says where it is, once.

Ignores:  ranks that all stand at once: nobody would go on.
"""

import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Literal, NamedTuple, final

import penstock

TOLD_S, LEAVES_S = 5.0, 20.0
TIMES_TOLD, TIMES_LEAVES = 5, 20  # the longest step
_ROOT = str(Path(penstock.__file__).parent)
_STEP = f"{_ROOT}/members/steps.py", "_step"
_VALIDATES = f"{_ROOT}/runtime/validate.py", "validated"
VALIDATES_S = 60.0
_WAITS = tuple(  # code that waits for others
    f"{_ROOT}/{place}" for place in ("transport/", "runtime/lane.py", "members/")
)

Stands = Literal["goes", "stands", "leaves"]


class Spot(NamedTuple):
    """Where a thread is inside a step, and whether it waits for other ranks there.

    validates:  it is in no step, but validates what one has made.
    """

    words: str
    waits: bool
    validates: bool = False


def spot_of(frame: FrameType | None) -> Spot | None:
    """Return where a thread with this innermost frame is; None: in no step."""
    words, waits = "", None
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        is_own = file.startswith(_ROOT)
        if (file, name) == _STEP:
            return Spot(words or "in a step", bool(waits))
        if (file, name) == _VALIDATES:
            return Spot(words or "in the model", waits=False, validates=True)
        if waits is None and is_own:
            waits = file.startswith(_WAITS)
        if not words and not is_own and "/torch/" not in file and file.startswith("/"):
            words = f"{file}:{frame.f_lineno} in {name}"
        frame = frame.f_back
    return None


@final
class StepWatch:
    """How long the step of one rank takes, as the thread of its lines sees it.

    thread:  that computes.
    says:    takes words for people.
    """

    def __init__(
        self,
        thread: int,
        says: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._thread, self._says, self._clock = thread, says, clock
        self._since_s, self._longest_s = clock(), 0.0
        self._count, self._is_told = 0, False

    def begins(self) -> None:
        """Note that a generation begins."""
        self._since_s, self._longest_s, self._count = self._clock(), 0.0, 0
        self._is_told = False

    def goes_on(self) -> None:
        """Note that a step begins: what was done since the one before is no part of it."""
        self._since_s, self._is_told = self._clock(), False

    def counts(self) -> None:
        """Note that a step is done."""
        now = self._clock()
        self._longest_s = max(self._longest_s, now - self._since_s)
        self._since_s, self._is_told = now, False
        self._count += 1

    @property
    def stood_s(self) -> float:
        """Return for how long the step has gone on that the rank is in."""
        return self._clock() - self._since_s

    def look(self) -> Stands:
        """Return whether the rank stands, and whether it has for too long."""
        stood_s = self.stood_s
        if not self._count or stood_s < max(TOLD_S, TIMES_TOLD * self._longest_s):
            return "goes"
        from penstock import _compat  # with torch, which who only asks a rank does without

        spot = spot_of(_compat.frame_of(self._thread))
        if spot is not None and spot.validates and stood_s > VALIDATES_S and not self._is_told:
            self._is_told = True
            self._says(f"validation has gone on for {stood_s:.0f} s, and is at {spot.words}")
        if spot is None or spot.waits or spot.validates:
            return "goes"
        limit_s = max(LEAVES_S, TIMES_LEAVES * self._longest_s)
        if not self._is_told:
            self._is_told = True
            self._says(
                f"the step of this rank has stood for {stood_s:.0f} s at {spot.words}; "
                f"after {limit_s:.0f} s the others go on without it"
            )
        return "stands" if stood_s < limit_s else "leaves"
