"""Offload as listed: the copies that a schedule lists among its actions (`Schedule.far`).

    schedule  F0.0                    F0.1                    F0.0>far F0.2          F0.0<<far B0.1
    after     F0.0 F0.0>r1 F0.0>>far  F0.1 F0.1>r1            F0.0>far F0.2 F0.2>r1  F0.0<<far B0.1
              F0.0<far B0.0

Keeps:   every action, message, sum and update, and their order; the order of the copies each way.
Gains:   what F keeps of these micro-batches, from where its copy to far memory is waited for to
         where the one back begins: a rank never holds more than the schedule says.
Costs:   two copies of each, beside computes where there is time between the ends that are listed.
When:    a schedule lists copies, as those of `penstock schedule --find exact` with their seconds.
Source:  OptPipe, arXiv:2510.05186 (copies timed along with the order of actions).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from penstock.program.codes import Codes
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
from penstock.schedule.far_words import FarCopy, by_place
from penstock.schedule.schedule import Action, Schedule


def offload_listed(program: Program, schedules: Sequence[Schedule]) -> Program:
    """Return `program` with the copies of the schedule of each replica; as it is, without any."""
    if not any(schedule.far for schedule in schedules):
        return program
    codes: list[Sequence[Instruction]] = []
    for schedule in schedules:
        before = by_place(schedule.far)
        for rank in range(schedule.num_ranks):
            code = program.code[len(codes)]
            listed = [before[rank, at] for at in range(len(schedule.orders[rank]) + 1)]
            with_updates = schedule.has_updates
            codes.append([*_with_copies(code, listed, program, updates=with_updates)])
    return replace(program, code=Codes.of(codes))


def _with_copies(
    code: Code, listed: Sequence[Sequence[FarCopy]], program: Program, *, updates: bool
) -> Iterator[Instruction]:
    """Yield the instructions of a rank with the copies that stand before each of its actions."""
    away = {Action("F", *copy[2:4]) for row in listed for copy in row}
    at, behind = 0, dict[int, list[Instruction]]()
    for row, one in enumerate(code):
        begun: list[Instruction] = []
        if isinstance(one, Compute):
            kind, stage, _ = one.action
            for number in program.group_of(one.action) if kind in ("B", "I") else ():
                if (of := Action("F", stage, number)) in away:
                    yield Reload(of)
            begun = [BeginOffload(one.action)] if one.action in away else []
        yield one
        if isinstance(one, Compute) or (updates and isinstance(one, Update)):
            at += 1
            behind[_last_send(code, row)] = [*begun, *map(_instruction, listed[at])]
        yield from behind.pop(row, ())


def _instruction(copy: FarCopy) -> Instruction:
    of = Action("F", copy.stage, copy.micro_batch)
    return BeginReload(of) if copy.back else Offload(of)


def _last_send(code: Code, at: int) -> int:
    """Return the place of the last Send of an action: no message waits for a copy."""
    last = at
    while at + 1 < len(code) and isinstance(code[at + 1], Send | Receive):
        at += 1
        last = at if isinstance(code[at], Send) else last
    return last
