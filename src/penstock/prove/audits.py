"""Audits: what was asked of them, and what they have found.  No torch."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from penstock.errors import PlanError
from penstock.units import format_bytes

AUDITS, KEPT = "audits.jsonl", "differs"  # a row for each audit; the step that differs
ALONE = "the plain loop itself trains it"
SHORT = "the run was too short for its share"

Otherwise: TypeAlias = Literal["return", "stop", "warn"]


class AuditTerms(NamedTuple):
    """How much of a run's processor time audits may take, and what becomes of a difference.

    otherwise:  "return" to the last audited checkpoint, and go on by what is right; "stop" the run;
                or "warn" and go on.
    """

    share: float = 0.01
    otherwise: Otherwise = "return"


def parse_audit(text: str) -> AuditTerms:
    """Return what "1%", "0" or "2%,stop" means.

    Raises:   PlanError: something else.
    """
    number, _, word = (part.strip() for part in text.partition(","))
    word, share = word or "return", _share(number)
    if share is None or word not in ("return", "stop", "warn"):
        hint = (
            "write 1%, or 0 to leave audits out; 1%,stop ends a run that differs, 1%,warn does not"
        )
        raise PlanError(f'audit is "{text}"', hint=hint)
    return AuditTerms(share, word)


def _share(text: str) -> float | None:
    with suppress(ValueError):
        share = float(text.removesuffix("%")) / 100
        if 0 <= share <= 1 and (text.endswith("%") or not share):
            return share
    return None


@dataclass(frozen=True, slots=True)
class Audit:
    """One audit: of which step (counted from 0), and what differs; empty: nothing does.

    found:    the differences of each group, in words.
    cpu_s:    processor time that it took, of ranks and of the plain loop.
    steps:    that were made again, from `step` on.
    is_late:  whether what differs follows from more than a checkpoint has: the job's code has
              changed its model, and counts in Python when.
    """

    step: int
    problem: str
    found: str
    cpu_s: float
    steps: int = 1
    is_late: bool = False


@dataclass(frozen=True, slots=True)
class Audited:
    """What the audits of a run have found.

    cpu_s:    processor time of all, and `of_s` that of the run with all that came before it.
    failed:   why the plain loop could not make a step, after which there were no more audits.
    left_out: why there were none at all.
    back:     the differences before, from which the run has gone back and on otherwise.
    but:      why updates were not compared; empty: they were.
    room_bytes:  of an accelerator that the plan left for them, and `most_bytes` that they held;
                 0: they had none.
    """

    audits: tuple[Audit, ...] = ()
    cpu_s: float = 0.0
    of_s: float = 0.0
    failed: str = ""
    left_out: str = ""
    back: tuple[Audit, ...] = ()
    but: str = ""
    room_bytes: int = 0
    most_bytes: int = 0

    @property
    def is_plain(self) -> bool:
        """Return whether there is nothing to audit: the plain loop itself is the run."""
        return self.left_out == ALONE

    @property
    def problem(self) -> Audit | None:
        """Return the first audit that found a difference."""
        return next((one for one in self.audits if one.problem), None)

    @property
    def steps_proved(self) -> int:
        """Return up to which step the run is proved: of the audits before a difference the last."""
        equal = 0
        for one in sorted(self.audits, key=lambda one: one.step):
            if one.problem:
                break
            equal = one.step + one.steps
        return equal

    def __str__(self) -> str:
        words = [f"went back: step {one.step + 1} differed: {one.problem}" for one in self.back]
        return "; ".join([*words, self._now])

    @property
    def _now(self) -> str:
        if self.left_out:
            return f"not audited: {self.left_out}"
        if not self.audits:
            return f"not audited: {self.failed or SHORT}"
        count = sum(one.steps for one in self.audits)
        share = f"{100 * self.cpu_s / self.of_s:.1f} % of the processor time" if self.of_s else ""
        words = f"audited at {count} step{'s' * (count > 1)}"
        problem = self.problem
        if problem is None:
            words += f", the last of them step {self.steps_proved}: equal to the plain loop"
        else:
            words += f"; step {problem.step + 1} differs: {problem.problem}"
        but = f"updates were not compared: {self.but}" if self.but else ""
        return "; ".join(filter(None, (words, but, share, self._held, self.failed)))

    @property
    def _held(self) -> str:
        if not self.room_bytes:
            return ""
        most, room = format_bytes(self.most_bytes), format_bytes(self.room_bytes)
        return f"beside the run in {most} of the {room} that the plan left"


def audit_rows(audited: Audited, num_steps: int) -> dict[str, object]:
    """Return what a summary says of audits: up to which step the plain loop has found a run equal,
    in how many of them, and what they took.
    """
    to = num_steps if audited.is_plain else audited.steps_proved or None
    counted: dict[str, object] = {"count": len(audited.audits), "cpu_s": audited.cpu_s}
    if audited.room_bytes:
        counted |= {"room_bytes": audited.room_bytes, "most_bytes": audited.most_bytes}
    counted |= {"of_s": audited.of_s, "went_back": [one.step + 1 for one in audited.back]}
    return {"audited": str(audited), "audited_to": to, "audits": counted}
