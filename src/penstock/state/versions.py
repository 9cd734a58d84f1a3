"""Versions: which tensors hold which version of a stage's weights, decided before a window runs.

Version v is live (slot 0) until U(v) makes the next one; if it is still read after that, U(v)
first copies it into a stash (slot 1, 2, ...) that no version needs any more.  Weights that are
predicted from a version are made while an action reads them, parameter by parameter; only those
that are read after the version is replaced are made when they are first read, and have places.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from penstock.errors import RunError
from penstock.program.program import Compute, Instruction, Program, Update
from penstock.schedule.schedule import Action


class Read(NamedTuple):
    """Where an action finds its weights.

    slot:     0 the live ones, k the k-th stash; of a prediction its place, from 0 on, or -1: it
              is made from the live ones as the action goes.
    ahead:    0, or how many updates ahead they are predicted.
    is_first: whether the prediction has to be made now.
    """

    slot: int
    ahead: int = 0
    is_first: bool = False


class VersionSlots:
    """The slots of the stages of one rank, for one program.

    count:       by stage, how many stashes it needs.
    predictions: by stage, how many predictions are kept at once.
    stash_at:    by (stage, version), the stash into which its update copies it first.
    moved:       by stage, where each stash has to be taken from at the window's end, so that
                 version -k of the next window is in stash k.

    Raises:   RunError: a prediction is wanted from a version that is not the newest.
    """

    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.num_steps = program, program.num_steps
        self.history: list[int] = program.weight_rule.history(
            program.num_stages, program.num_micro_batches
        ).tolist()
        self.count: dict[int, int] = {}
        self.predictions: dict[int, int] = {}
        self.stash_at: dict[tuple[int, int], int] = {}
        self.moved: dict[int, dict[int, int]] = {}
        self._updated_at: dict[tuple[int, int], int] = {}
        self._last_read: dict[tuple[int, int], int] = {}
        self._predicted: dict[tuple[int, int, int], list[int]] = {}  # key -> [first, last, slot]
        for place, instruction in enumerate(program.code[rank]):
            match instruction:
                case Compute(action, version):
                    ahead = self._ahead(action)
                    if ahead:
                        key = action.stage, version, ahead
                        self._predicted.setdefault(key, [place, place, 0])[1] = place
                    else:
                        self._last_read[action.stage, version] = place
                case Update(stage, step):
                    self._updated_at[stage, step] = place
                case _:
                    pass
        for stage in program.stages_of(rank):
            self._assign(stage)
            self._assign_predictions(stage)

    def of(self, action: Action, version: int, place: int) -> Read:
        """Return where instruction `place`, which does `action`, finds its weights."""
        stage, ahead = action.stage, self._ahead(action)
        if ahead:
            first, _, slot = self._predicted[stage, version, ahead]
            return Read(slot, ahead, is_first=first == place and slot >= 0)
        if version < 0:
            return Read(-version)
        replaced = place > self._updated_at.get((stage, version), place)
        return Read(self.stash_at[stage, version] if replaced else 0)

    def _ahead(self, action: Action) -> int:
        kind, stage, micro_batch = action
        program = self.program
        reads = program.weight_rule.law(
            stage, micro_batch, program.num_stages, program.num_micro_batches
        )
        return reads.forward_ahead if kind == "F" else reads.backward_ahead

    def _assign_predictions(self, stage: int) -> None:
        free_at: list[int] = []  # by slot, the place of the last read
        for (of_stage, version, _), use in self._predicted.items():
            if of_stage != stage:
                continue
            first, last, _ = use
            made = self._updated_at.get((stage, version - 1), -1)
            replaced = self._updated_at.get((stage, version), first)
            if version < 0 or not made < first <= replaced:
                name = self.program.weight_rule.name
                message = f"rule {name} predicts from version {version} of stage {stage}"
                raise RunError(f"{message}, which is not the newest when it is read")
            if last < self._updated_at.get((stage, version), last + 1):
                use[2] = -1
                continue
            slot = next((k for k, end in enumerate(free_at) if end < first), len(free_at))
            free_at[slot : slot + 1] = [last]
            use[2] = slot
        self.predictions[stage] = len(free_at)

    def _assign(self, stage: int) -> None:
        count = self.history[stage]
        holds = {slot: -slot for slot in range(1, count + 1)}  # the version in each stash
        for step in range(self.num_steps):
            place = self._updated_at.get((stage, step))
            if place is None or not self._needed(stage, step, place):
                continue
            dead = [s for s, v in holds.items() if not self._needed(stage, v, place)]
            last = self.num_steps - step  # the stash in which the next window looks for it
            slot = last if last in dead else min(dead, default=count + 1)
            count = max(count, slot)
            holds[slot] = step
            self.stash_at[stage, step] = slot
        found = {version: slot for slot, version in holds.items()}
        moved = {k: found[self.num_steps - k] for k in range(1, self.history[stage] + 1)}
        self.moved[stage] = {to: of for to, of in moved.items() if to != of}
        self.count[stage] = count

    def _needed(self, stage: int, version: int, place: int) -> bool:
        """Return whether `version` is read after `place`, or by the next window."""
        is_read = self._last_read.get((stage, version), -1) > place
        return is_read or version >= self.num_steps - self.history[stage]


class ParkedGradients:
    """Gradients that are made before the update of an earlier step, on one rank.

    They wait in a place of their own until that update is done.

    of:     by action, its place.  slots: by (stage, step), likewise.
    """

    def __init__(self, code: Sequence[Instruction], per_step: int) -> None:
        self.of: dict[Action, int] = {}
        self.slots: dict[tuple[int, int], int] = {}
        updates: Counter[int] = Counter()
        for instruction in code:
            match instruction:
                case Update(stage):
                    updates[stage] += 1
                case Compute(action) if action.kind in "BW":
                    stage, step = action.stage, action.micro_batch // per_step
                    if step > updates[stage]:
                        self.of[action] = self._place(stage, step, updates[stage])
                case _:
                    pass

    def _place(self, stage: int, step: int, now: int) -> int:
        """Return the place of (stage, step): one that no step after `now` has."""
        taken = {at for (of, later), at in self.slots.items() if of == stage and later > now}
        free = next(at for at in count() if at not in taken)
        return self.slots.setdefault((stage, step), free)

    def count(self, stage: int) -> int:
        """Return how many places a stage needs."""
        return max((at + 1 for (of, _), at in self.slots.items() if of == stage), default=0)
