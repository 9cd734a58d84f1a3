"""Offload: keep in far memory what is not needed for a while, and bring it back before its use.

    before   F0.0 F0.1 ... B0.0                        U0.0
    after    F0.0 F0.0>far F0.1 ... F0.0<far B0.0      U0.0<far U0.0 U0.0>far

Weights, with gradients and state, of a stage whose sum leaves them there (passes/shard.py):

    before   unshard0 F0.0 reshard0 unshard0 B0.0 reshard0 shards:stage0.0 U0.0
    after    unshard0 ... shards:stage0.0  U0.0<far W0.0<far U0.0 W0.0>far U0.0>far

With `beside`, copies run beside one compute of the rank, or one update, each:

    after    F0.0 F0.0>>far F0.1 F0.0>far ... F0.0<<far B0.1 F0.0<far B0.0

Keeps:   every action, message and sum, and their order.
Gains:   the bytes of the optimizer's state but for one stage at a time; what F keeps of a
         micro-batch while other computes of its rank come between it and its backward; weights and
         gradients but for one stage at a time.
Costs:   two copies of each of these bytes a step (state; weights and gradients, besides what it
         takes to load them for F and for backward) or a micro-batch (activations); beside
         computes, room for one more of them on its way out, and one on its way in.
When:    a plan says so (`Plan.offload`), because there is no room otherwise.
Source:  ZeRO-Offload, arXiv:2101.06840 (state); vDNN, arXiv:1602.08124 (activations).
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from penstock.program.program import (
    BeginOffload,
    BeginReload,
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
from penstock.program.reductions import Reduction
from penstock.schedule.schedule import Action, Kind

Offloaded = Literal["none", "state", "activations", "both", "weights", "all"]
AWAY: dict[Offloaded, frozenset[str]] = {  # what each says is in far memory
    "none": frozenset(),
    "state": frozenset({"state"}),
    "activations": frozenset({"activations"}),
    "both": frozenset({"state", "activations"}),
    "weights": frozenset({"state", "weights"}),
    "all": frozenset({"state", "activations", "weights"}),
}


def offload(program: Program, what: Sequence[Offloaded], *, beside: bool = False) -> Program:
    """Return `program` with copies to far memory and back; `what` is by stage.

    What the next compute of the rank uses again stays.
    beside:   whether copies are begun early, and run beside a compute or an update; those that
              the program has already stay where they are.
    Raises:   ProgramError: updates that may be undone need their state.
    """
    far = _Far(
        frozenset(s for s, word in enumerate(what) if word in ("state", "both", "weights", "all")),
        frozenset(s for s, word in enumerate(what) if word in ("activations", "both", "all")),
        frozenset(s for s, word in enumerate(what) if word in ("weights", "all")),
    )

    def rewritten(code: Code) -> Iterator[Instruction]:
        copied = _rewritten(code, far, program.together)
        return _begun_early(tuple(copied)) if beside else copied

    return program.map_ranks(rewritten)


class _Far(NamedTuple):
    """Stages, by what of them is in far memory."""

    state: frozenset[int]
    kept: frozenset[int]  # by F
    weights: frozenset[int]


def _rewritten(code: Code, far: _Far, together: int) -> Iterator[Instruction]:
    """Yield the instructions of a rank with the copies among them."""
    away, left = _away(code, far.kept, together), Action("F", -1, -1)  # its Sends are to come
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
            case Update(stage, step) if stage in far.state:
                kinds: tuple[Kind, ...] = ("U", "W") if stage in far.weights else ("U",)
                yield from (Reload(Action(kind, stage, step)) for kind in kinds)
                yield instruction
                yield from (Offload(Action(kind, stage, step)) for kind in kinds[::-1])
            case _:
                yield instruction


def _begun_early(code: Code) -> Iterator[Instruction]:
    """Yield the instructions, copies begun one compute or update earlier than they are waited for.

    A copy to far memory begins where its Offload was, which comes after what the rank does next.  A
    copy back begins before what the rank does before its Reload; that of weights, with gradients,
    after all sums.  What would then not be away while anything is done is copied as it was.
    """
    summed = max((at for at, one in enumerate(code) if isinstance(one, Reduction)), default=-1)
    works = [at for at, one in enumerate(code) if isinstance(one, Compute | Update)]
    left: dict[Action, int] = {}  # of what is away, after how many of `works` it went
    back: dict[Action, int] = {}  # and is wanted back
    before: defaultdict[int, list[Instruction]] = defaultdict(list)
    behind: defaultdict[int, list[Instruction]] = defaultdict(list)
    later = set[int]()
    listed = {one.of for one in code if isinstance(one, BeginOffload | BeginReload)}
    copies = [(at, one) for at, one in enumerate(code) if isinstance(one, Offload | Reload)]
    copies = [(at, one) for at, one in copies if one.of not in listed]
    for at, one in copies:
        if isinstance(one, Reload):
            back[_offloaded(one)] = bisect_left(works, at)
    for at, one in copies:
        done = bisect_left(works, at)
        if isinstance(one, Offload):
            left[one.of] = done
            if back.get(one.of, len(works) + 1) - done > 1 and done < len(works):
                before[at].append(BeginOffload(one.of))
                behind[_sent(code, works[done])].append(one)
                later.add(at)
        elif done and done - left.get(_offloaded(one), -2) > 2:
            if one.of.kind == "W" and summed > works[done - 1]:
                continue
            before[works[done - 1]].append(BeginReload(one.of))
    for at, one in enumerate(code):
        yield from before[at]
        if at not in later:
            yield one
        yield from behind[at]


def _offloaded(reload: Reload) -> Action:
    """Return what was offloaded: the state as the update before left it."""
    of = reload.of
    return of if of.kind == "F" else of._replace(micro_batch=of.micro_batch - 1)


def _sent(code: Code, at: int) -> int:
    """Return the last of the Sends and Receives right behind a place."""
    while at + 1 < len(code) and isinstance(code[at + 1], Send | Receive):
        at += 1
    return at


def _away(code: Code, kept: frozenset[int], together: int) -> set[Action]:
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
