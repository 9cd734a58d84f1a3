"""Offload: keep in far memory what is not needed for a while, and bring it back before its use.

    before   F0.0 F0.1 ... B0.0                        U0.0
    after    F0.0 F0.0>far F0.1 ... F0.0<far B0.0      U0.0<far U0.0 U0.0>far

Keeps:   every action, message and sum, and their order.
Gains:   the bytes of the optimizer's state but for one stage at a time; what F keeps of a
         micro-batch while other computes of its rank come between it and its backward.
Costs:   two copies of each of these bytes a step (state) or a micro-batch (activations).
When:    a plan says so (`Plan.offload`), because there is no room otherwise.
Source:  ZeRO-Offload, arXiv:2101.06840 (state); vDNN, arXiv:1602.08124 (activations).
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from penstock.plan import Offloaded
from penstock.program.program import (
    Code,
    Compute,
    Instruction,
    Offload,
    Program,
    Receive,
    Reload,
    Send,
    Update,
)
from penstock.schedule.schedule import Action


def offload(program: Program, what: Sequence[Offloaded]) -> Program:
    """Return `program` with copies to far memory and back; `what` is by stage.

    What the next compute of the rank uses again stays.
    Raises:   ProgramError: updates that may be undone need their state.
    """
    state = {stage for stage, word in enumerate(what) if word in ("state", "both")}
    kept = {stage for stage, word in enumerate(what) if word in ("activations", "both")}
    return program.map_ranks(lambda code: _rewritten(code, state, kept, program.together))


def _rewritten(code: Code, state: set[int], kept: set[int], together: int) -> Iterator[Instruction]:
    """Yield the instructions of a rank with the copies among them."""
    away, left = _away(code, kept, together), Action("F", -1, -1)  # its Sends are still to come
    for instruction in code:
        if left.stage >= 0 and not isinstance(instruction, Send | Receive):
            yield Offload(left)
            left = Action("F", -1, -1)
        match instruction:
            case Compute(Action("F", _, _) as action) if action in away:
                yield instruction
                left = action
            case Compute(Action("B" | "I" as kind, stage, number)):
                for each in range(number, number + (together if kind == "B" else 1)):
                    if Action("F", stage, each) in away:
                        yield Reload(Action("F", stage, each))
                yield instruction
            case Update(stage, step) if stage in state:
                yield Reload(Action("U", stage, step))
                yield instruction
                yield Offload(Action("U", stage, step))
            case _:
                yield instruction


def _away(code: Code, kept: set[int], together: int) -> set[Action]:
    """Return each F for which the rank computes something else before its backward."""
    computes = [one.action for one in code if isinstance(one, Compute)]
    trained = {
        (stage, number + each)
        for kind, stage, number in computes
        if kind in ("B", "I")
        for each in range(together if kind == "B" else 1)
    }
    own = {
        action
        for action in computes
        if action.kind == "F" and action.stage in kept and action[1:] in trained
    }
    follows = dict(pairwise(computes))
    return {
        action
        for action in own
        if not (
            (after := follows.get(action))
            and after.kind in ("B", "I")
            and after.stage == action.stage
            and action.micro_batch - after.micro_batch
            in range(together if after.kind == "B" else 1)
        )
    }
