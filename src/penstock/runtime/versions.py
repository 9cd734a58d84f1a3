"""Versions: which tensors hold which version of a stage's weights, decided before a window runs.

Version v is live (slot 0) until U(v) makes the next one; if it is still read after that, U(v)
first copies it into a stash (slot 1, 2, ...) that no version needs any more.
"""

from penstock.errors import RunError
from penstock.program.program import Compute, Program, Update


class VersionSlots:
    """The slots of the stages of one rank, for one program.

    count:     by stage, how many stashes it needs.
    stash_at:  by (stage, version), the stash into which its update copies it first.

    A window leaves version -k of the next one in stash k.
    Raises:   RunError: that cannot be arranged.
    """

    def __init__(self, program: Program, rank: int) -> None:
        self.history, self.num_steps = program.weight_rule.history, program.num_steps
        self.count: dict[int, int] = {}
        self.stash_at: dict[tuple[int, int], int] = {}
        self._updated_at: dict[tuple[int, int], int] = {}
        self._last_read: dict[tuple[int, int], int] = {}
        for place, instruction in enumerate(program.code[rank]):
            match instruction:
                case Compute(action, version):
                    self._last_read[action.stage, version] = place
                case Update(stage, step):
                    self._updated_at[stage, step] = place
                case _:
                    pass
        for stage in program.stages_of(rank):
            self._assign(stage)

    def of(self, stage: int, version: int, place: int) -> int:
        """Return the slot in which instruction `place` finds `version`; 0 is the live weights."""
        if version < 0:
            return -version
        replaced = place > self._updated_at.get((stage, version), place)
        return self.stash_at[stage, version] if replaced else 0

    def _assign(self, stage: int) -> None:
        count = self.history
        holds = {slot: -slot for slot in range(1, count + 1)}  # the version in each stash
        for step in range(self.num_steps):
            place = self._updated_at[stage, step]
            if not self._needed(stage, step, place):
                continue
            dead = [s for s, v in holds.items() if not self._needed(stage, v, place)]
            last = self.num_steps - step  # the stash in which the next window looks for it
            slot = last if last in dead else min(dead, default=count + 1)
            count = max(count, slot)
            holds[slot] = step
            self.stash_at[stage, step] = slot
        moved = [k for k in range(1, self.history + 1) if holds[k] != self.num_steps - k]
        if moved:
            raise RunError(f"stage {stage}: older versions {moved} end in other stashes")
        self.count[stage] = count

    def _needed(self, stage: int, version: int, place: int) -> bool:
        """Return whether `version` is read after `place`, or by the next window."""
        is_read = self._last_read.get((stage, version), -1) > place
        return is_read or version >= self.num_steps - self.history
