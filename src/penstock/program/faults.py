"""Faults: what verify.py found, in words, with the instructions around it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ProgramError
from penstock.program import reductions, rules
from penstock.program.codes import REDUCE, excerpt
from penstock.program.instructions import (
    BeginReload,
    Collect,
    Compute,
    Reload,
    Send,
    Unshard,
    Update,
)
from penstock.program.reductions import Reduction
from penstock.program.rules import Facts, Finding
from penstock.schedule.orders import KINDS, Action

if TYPE_CHECKING:
    from penstock.program.program import Program

# The name in braces says what the number of a finding means.
WORDS: dict[int, tuple[str, str]] = {
    rules.OUT_OF_RANGE: (
        "an operand is out of range",
        "count from 0; slots stay below the number of micro-batches",
    ),
    rules.TWICE: ("it was done already, on rank {number}", "leave one of the two out"),
    rules.ELSEWHERE: (
        "other actions of the same stage and micro-batch are on rank {number}",
        "a stage keeps what F saved on its rank: give it all its actions",
    ),
    rules.NOT_ITS_TURN: ("before it come {actions}", "a stage runs F, then B, or I and then W"),
    rules.NOT_FIRST: (
        "it is of {number} micro-batches, and not named by the first of them",
        "name it by the first of those that go together",
    ),
    rules.SENT_TWICE: ("{instruction} sends the same message", "leave one of the two out"),
    rules.NOT_MADE_YET: (
        "it uses the value of edge {edge}, which this rank makes only later",
        "compute the source first",
    ),
    rules.NOT_POSTED_YET: (
        "it uses the value of edge {edge}, and no Receive posted before brings it",
        "put the Receive before its first use",
    ),
    rules.WRONG_VERSION: ("the rule {rule} says version {number}", "read that version"),
    rules.VERSION_NOT_THERE: (
        "that version is not there: versions {oldest} to {number} are",
        "put the update before it, or take another rule",
    ),
    rules.STILL_SHARDED: ("the weights of the stage are sharded", "put an Unshard before it"),
    rules.TOO_LATE_FOR_SUM: (
        "its gradient enters step {number}, and a reduction or Update of that step comes before it",
        "put sums and update after the last backward of the step",
    ),
    rules.NOT_THE_EDGE: (
        "its edge does not carry this value",
        "an F edge carries F of its source, a B edge carries B or I of it",
    ),
    rules.NOTHING_TO_SEND: (
        "this rank has not made that value yet",
        "put the Send after its Compute",
    ),
    rules.WRONG_PEER: (
        "the other end is on rank {number}",
        "a message goes from the rank of one stage to another's",
    ),
    rules.NEVER_SENT: ("no rank sends it", "give its source a Send"),
    rules.RECEIVED_TWICE: ("it was received before", "leave one of the two out"),
    rules.POSTED_TOO_LATE: (
        "its stage has used it already",
        "put the Receive before its first use",
    ),
    rules.OTHER_SLOT: (
        "the sender fills another slot: {instruction}",
        "name one slot at both ends",
    ),
    rules.OVERTAKEN: (
        "the sender sends it before {instruction}, which was received earlier",
        "receive in the order in which the peer sends",
    ),
    rules.SLOT_IN_USE: (
        "the slot still holds a value that a later action uses",
        "a slot is free after the last use: B, or W where B is split",
    ),
    rules.UNKNOWN_SUM: (
        "this program needs no such sum on this rank",
        "sums: tied groups, stages on several ranks, norm if `clip`, then `guard`, then `commits`",
    ),
    rules.SUM_OUT_OF_STEP: ("its turn is step {number}", "sum and update each step once, in order"),
    rules.SUM_TOO_EARLY: (
        "an earlier sum of stage {number} is missing",
        "sum tied parameters first, then replicas, then the norm",
    ),
    rules.SUM_TOO_LATE: (
        "a later kind of sum of stage {number} was made already",
        "sum tied parameters first, then replicas, then the norm",
    ),
    rules.NOT_THIS_STAGE: (
        "this rank has no gradients of that stage",
        "leave it to the ranks that compute the stage",
    ),
    rules.UPDATE_OUT_OF_STEP: (
        "the next update of the stage is that of step {number}",
        "update once per step, in order",
    ),
    rules.NOT_SUMMED: (
        "its gradient is not whole: a {how} sum is missing",
        "put every reduction before the Update",
    ),
    rules.GATHERED_AT_UPDATE: (
        "the stage is still gathered, and the copy would be of an old version",
        "put its Reshard before the Update",
    ),
    rules.GATHERED_TWICE: ("the stage is gathered already", "put a Reshard between two Unshards"),
    rules.DROPPED_TWICE: ("the stage is not gathered", "put an Unshard before each Reshard"),
    rules.IS_AWAY: ("it is in far memory", "put its Reload before it"),
    rules.IS_COPIED: (
        "a copy of it is under way",
        "put the Offload or Reload that waits before it",
    ),
    rules.NOT_AWAY: ("it is not in far memory", "put its Offload before it"),
    rules.NOT_APART: (
        "the stage does not begin a step in far memory, or no sum leaves its gradients there",
        "sum it in shards, and put a Reload of its weights before each Update",
    ),
    rules.IS_NEAR: ("its weights are not back in far memory", "put their Offload before it"),
    rules.NOTHING_THERE: (
        "nothing is kept of it then",
        "what F keeps can be away between it and its B or I, on the same rank",
    ),
    rules.NOT_COLLECTED: (
        "it uses the value of edge {edge}, of which ranks have parts",
        "put a Collect of each kind that the edge names behind its source",
    ),
    rules.COLLECTED_TWICE: ("it was collected already", "leave one of the two out"),
    rules.NOT_THIS_COLLECT: (
        "nothing of that edge is collected so on this rank",
        "collect what the edge says, where both of its stages are",
    ),
    rules.NOT_THIS_GROUP: (
        "those are not the ranks that divide the ops of its stage",
        "name the ranks of the same place in so many replicas as `tensor` says",
    ),
    rules.NOT_VALIDATED_YET: (
        "the update may still be undone, which changes that state",
        "clip before the update",
    ),
}


def broken_rule(program: "Program", finding: Finding) -> ProgramError:
    """Return the error for what a walk of rules.py found."""
    rule, row, number = (int(value) for value in finding)
    if (problem := _at_the_end(program, rule, row, number)) is not None:
        return problem
    words, hint = WORDS[rule]
    code = program.code
    rank, (instruction,) = code.rank_at(row), code.between(slice(row, row + 1))
    meanings = {
        "number": number,
        "rule": program.weight_rule.name,
        "oldest": -_history(program, int(code.stage[row])),
        "edge": program.edges[number] if "{edge}" in words else "",
        "how": reductions.WORDS[number] if "{how}" in words else "",
        "instruction": code.between(slice(number, number + 1))[0]
        if "{instruction}" in words
        else "",
        "actions": " ".join(_kinds(number)) or "none",
    }
    head = f"rank {rank} cannot do {instruction}: {words.format(**meanings)}"
    return ProgramError(f"{head}\n{excerpt(code, row)}", hint=hint)


def _at_the_end(program: "Program", rule: int, row: int, number: int) -> ProgramError | None:
    """Return the error for what rank `row` leaves undone of stage `number`; None: it is another."""
    if rule == rules.NOT_UPDATED:
        head = f"rank {row} does not end every step of stage {number} with an update"
        return ProgramError(
            f"{head}; there are {program.num_steps}", hint="give each step its Update"
        )
    if rule == rules.NOT_VALIDATED:
        hint = "put a Validate after the updates of each step"
        message = f"rank {row} ends with an update of stage {number} that is not validated"
        return ProgramError(message, hint=hint)
    if rule == rules.NOT_AVERAGED:
        hint = "put an AverageWeights after the updates of each step"
        message = f"rank {row} ends with weights of stage {number} that are not averaged"
        return ProgramError(message, hint=hint)
    if rule == rules.NOT_DROPPED:
        hint = "put a Reshard after the last use"
        return ProgramError(f"rank {row} ends with stage {number} gathered", hint=hint)
    if rule == rules.NOT_BACK:
        hint = "let it be at the end where it was at the beginning, for the next step begins so"
        what = "optimizer state" if number < program.num_stages else "weights"
        message = (
            f"rank {row} ends with the {what} of stage {number % program.num_stages} elsewhere"
        )
        return ProgramError(message, hint=hint)
    return None


def _kinds(done: int) -> list[str]:
    return [kind for place, kind in enumerate(KINDS) if done >> place & 1]


def missing(program: "Program", at: int, done: int) -> ProgramError:
    """Return the error for missing actions; `at` counts (replica, stage, micro-batch)."""
    window = program.num_micro_batches * program.num_steps
    replica, stage, micro_batch = np.unravel_index(
        at, (program.replicas, program.num_stages, window)
    )
    found = " ".join(f"{kind}{stage}.{micro_batch}" for kind in _kinds(done)) or "nothing"
    where = f"stage {stage}, micro-batch {micro_batch}" + (
        f", replica {replica}" if program.replicas > 1 else ""
    )
    hint = "every stage runs F, then B, or I and W, on every micro-batch; or F only, if all do"
    return ProgramError(f"{where} is not complete: the program has {found}", hint=hint)


def too_many(program: "Program", at: int) -> ProgramError:
    """Return the error for an action on a micro-batch outside a replica's share."""
    window = program.num_micro_batches * program.num_steps
    shape = program.replicas, program.num_stages, window
    replica, stage, micro_batch = map(int, np.unravel_index(at, shape))
    share = program.grid.shares[replica]
    message = f"replica {replica} takes {share} micro-batches of a step, and runs F{stage}"
    return ProgramError(f"{message}.{micro_batch}", hint="give it fewer, or a larger share")


def mixed_up(
    ranks: tuple[int, ...], one: tuple[int, list[str]], other: tuple[int, list[str]]
) -> ProgramError:
    """Return the error for two members of a group whose collectives come in different orders."""
    at = next((at for at, (a, b) in enumerate(zip(one[1], other[1], strict=False)) if a != b), None)
    at = min(len(one[1]), len(other[1])) if at is None else at
    lines = (
        f"  rank {rank}  {' '.join(order[max(0, at - 2) : at + 4]) or '(nothing)'}"
        for rank, order in (one, other)
    )
    group = " ".join(map(str, ranks))
    head = f"ranks {group} do not reach their collectives in one order; the first difference:"
    return ProgramError(
        "\n".join((head, *lines)), hint="give all members of a group the same order"
    )


def deadlock(program: "Program", facts: Facts, stopped: NDArray[np.int64]) -> ProgramError:
    """Return the error for ranks that stop forever: who waits for whom, and in which code."""
    code = program.code
    waiting = np.flatnonzero(stopped < code.offsets[1:]).tolist()
    chain: list[int] = [waiting[0]]
    while (after := _waits_for(program, facts, stopped, chain[-1])) not in chain:
        chain.append(after)
    chain = chain[chain.index(after) :]
    stops = [f"rank {rank} at {code.between(_row(stopped, rank))[0]}" for rank in chain]
    head = f"{stops[0]} waits for {', which waits for '.join([*stops[1:], f'rank {chain[0]}'])}"
    shown = [excerpt(code, int(stopped[rank])) for rank in chain[:8]]
    more = [f"  and {len(chain) - 8} more ranks"] if len(chain) > 8 else []
    hint = "post the Receive earlier, or make the ranks reach their collectives in one order"
    return ProgramError("\n".join((f"deadlock: {head}", *shown, *more)), hint=hint)


def _row(stopped: NDArray[np.int64], rank: int) -> slice:
    return slice(int(stopped[rank]), int(stopped[rank]) + 1)


def _waits_for(program: "Program", facts: Facts, stopped: NDArray[np.int64], rank: int) -> int:
    """Return a rank that `rank`, which stopped, waits for."""
    (instruction,) = program.code.between(_row(stopped, rank))
    column = program.grid.column_of(rank)
    match instruction:
        case Send(_, _, peer, _):
            return peer
        case Compute(action, _):
            return _late_source(program, facts, stopped, (rank, action))
        case Unshard():
            late = _late_member(program, stopped, rank)
            return late if late != rank else _absent(program, stopped, tuple(column), instruction)
        case Collect(_, _, ranks, _):
            late = _late_member(program, stopped, rank)
            return late if late != rank else _absent(program, stopped, ranks, instruction)
        case Update() | Reload() | BeginReload():
            return _late_member(program, stopped, rank)
        case _ if isinstance(instruction, Reduction):
            return _late_member(program, stopped, rank)
        case _:
            raise AssertionError(f"{instruction} never waits")


def _absent(
    program: "Program", stopped: NDArray[np.int64], ranks: tuple[int, ...], at: Unshard | Collect
) -> int:
    """Return the first member that has not reached an Unshard or a Collect."""
    for rank in ranks:
        if program.code.between(_row(stopped, rank)) != (at,):
            return rank
    raise AssertionError(f"all members wait in {at}")


def _late_member(program: "Program", stopped: NDArray[np.int64], rank: int) -> int:
    """Return the rank that the first sum on the lane of `rank` waits for.

    A member that has issued no more, or one that is itself behind another sum, and so in a circle.
    """
    code = program.code
    in_sum = code.op[np.minimum(stopped, len(code.op) - 1)] == REDUCE
    stopped = stopped + (in_sum & (stopped < code.offsets[1:]))
    ends: list[int] = stopped.tolist()
    starts: list[int] = code.offsets[:-1].tolist()
    issued = [code.between(slice(*part)) for part in zip(starts, ends, strict=True)]
    lanes = [[one for one in rows if isinstance(one, Reduction)][::-1] for rows in issued]
    firsts = {lane[-1] for lane in lanes if lane}
    while whole := [one for one in firsts if all(lanes[r][-1:] == [one] for r in one.ranks)]:
        for member in whole[0].ranks:
            lanes[member].pop()
        firsts = {lane[-1] for lane in lanes if lane}
    late, seen = rank, set[int]()
    while lanes[late] and late not in seen:
        seen.add(late)
        late = _not_there(lanes, lanes[late][-1])
    return late


def _not_there(lanes: Sequence[Sequence[Reduction]], reduction: Reduction) -> int:
    """Return the first member of a sum for which it is not the next one."""
    return next(rank for rank in reduction.ranks if list(lanes[rank][-1:]) != [reduction])


def _late_source(
    program: "Program", facts: Facts, stopped: NDArray[np.int64], waiting: tuple[int, Action]
) -> int:
    """Return the rank that has not sent yet what a Compute waits for."""
    (rank, action), sizes = waiting, facts.sizes
    replica = sizes.replica[rank]
    for number, edge in enumerate(program.edges):
        if edge.target == action.stage and (edge.kind == "F") == (action.kind == "F"):
            source = (
                replica * sizes.stages + edge.source
            ) * sizes.micro_batches + action.micro_batch
            message = (replica * sizes.edges + number) * sizes.micro_batches + action.micro_batch
            peer = int(facts.places.where[source])
            if peer != rank and facts.places.send_at[message] >= stopped[peer]:
                return peer
    raise AssertionError(f"rank {rank} has all that {action} needs")


def _history(program: "Program", stage: int) -> int:
    history = program.weight_rule.history(program.num_stages, program.num_micro_batches)
    return int(history[stage]) if 0 <= stage < len(history) else 0
