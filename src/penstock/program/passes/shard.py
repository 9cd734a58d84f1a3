"""Shard: each replica keeps a part of a stage, and gathers the whole while it is used.

    before   F0.0 F1.0 B1.0 replicas:stage1.0 B0.0 replicas:stage0.0 U0.0 U1.0
    after    unshard0 unshard1 F0.0 reshard0 F1.0 unshard0 B1.0 reshard1 shards:stage1.0
             B0.0 reshard0 shards:stage0.0 U0.0 U1.0

Weights are gathered for each run of computes of one stage, and dropped behind it; `shard_keep`
gathers once a step.  A gather begins `prefetch` runs before its own, beside their computes.  A sum
leaves each rank the gradients of its shard, which alone it updates.  Replicas with fewer
micro-batches have fewer such runs: they gather along with the others, and drop it at once.

A stage whose weights are in far memory (`Plan.offload`) is gathered and dropped likewise, and its
gradients are left there, by one replica or by several: what it gathers is loaded.

Keeps:   every action, message and update, and their order; the gradients.
Gains:   of weights, gradients and optimizer state of a stage on n replicas, all but an n-th, less
         what is gathered at once: `prefetch` + 1 runs, and the whole gradients of two stages.
Costs:   two gathers and half a sum a step (`shard_keep`: one gather) where there was one sum; more
         where the computes of a stage do not follow each other.
When:    a plan says so (`Plan.shard`, `Plan.offload`).
Source:  ZeRO, arXiv:1910.02054 (stage 3); breadth-first gathers, arXiv:2211.05953;
         prefetching under a schedule, DeepCompile, arXiv:2504.09983; weights that are loaded for
         all micro-batches at once, COMPASS, arXiv:2501.06780.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from difflib import SequenceMatcher
from typing import Literal, NamedTuple

from penstock.errors import ProgramError
from penstock.program.codes import Codes
from penstock.program.program import (
    Code,
    Compute,
    Instruction,
    Program,
    Receive,
    Reshard,
    Send,
    TiedGroup,
    Unshard,
    Update,
)
from penstock.program.reductions import Norm, Reduction, Sum, Validate
from penstock.schedule.weight_rule import SYNCHRONOUS

Sharding = Literal["replicate", "shard", "shard_keep"]


class _WholeSpan(NamedTuple):
    """Computes of one stage that follow each other on a rank, by their places in its code.

    begin:   the place before which the weights begin to be gathered.
    last:    the place behind which they are dropped; before `begin`: at once.
    """

    stage: int
    begin: int
    last: int


def shard(
    program: Program,
    what: Sequence[Sharding],
    *,
    prefetch: int | Sequence[int] = 0,
    parts: Sequence[int] = (),
    far: AbstractSet[int] = frozenset(),
) -> Program:
    """Return `program` with sharded stages; `what` is by stage.

    prefetch: how many runs of computes before its own a gather begins: all, or those of each stage.
    parts:    by rank, how much it keeps beside the others with which it divides; empty: as much.
    far:      stages whose weights, or parts of them, are in far memory.
    Raises:   ProgramError: nobody to share with; copies inside a replica; older weights are read.
    """
    kept = {stage: word == "shard_keep" for stage, word in enumerate(what) if word != "replicate"}
    kept |= dict.fromkeys(far - kept.keys(), False)
    _check(program, kept, far)
    everybody, names = tuple(range(program.num_ranks)), {f"stage{stage}" for stage in kept}

    def rewritten(code: Code, runs: Sequence[_WholeSpan]) -> Iterator[Instruction]:
        for place, instruction in enumerate(code):
            for run in runs:
                if run.begin == place:
                    yield Unshard(run.stage)
                    yield from [Reshard(run.stage)] * (run.last < place)
            match instruction:
                case Sum("replicas", bucket) if bucket in names:
                    yield replace(instruction, how="shards")
                case Norm():
                    yield replace(instruction, ranks=everybody)
                case _:
                    yield instruction
            yield from (Reshard(run.stage) for run in runs if run.last == place)

    if not kept:
        return program
    runs: dict[int, tuple[_WholeSpan, ...]] = {}
    for first in program.grid.ranks_of(0):
        ranks = program.grid.column_of(first)
        column = _in_company([program.code[rank] for rank in ranks], kept, prefetch)
        runs.update(zip(ranks, column, strict=True))
    code = Codes.of(
        _behind_gathers(tuple(rewritten(each, runs[rank])), program.graph.tied)
        for rank, each in enumerate(program.code)
    )
    return replace(program, code=code, parts=tuple(parts))


def _behind_gathers(code: Code, tied: Sequence[TiedGroup]) -> Code:
    """Return the code with sums of tied parameters over ranks behind the last gather.

    A rank begins what it sums and gathers in turn.  A gather behind the sum of a parameter whose
    other stage still waits for this rank's gradients would wait for ever.  What is summed of these
    stages afterwards stays behind it.
    """
    others = Compute, Send, Receive, Unshard, Reshard
    last = max((at for at, each in enumerate(code) if isinstance(each, others)), default=-1)
    late: list[Instruction] = []
    kept: list[Instruction] = []
    names = set[str]()
    for instruction in code[: last + 1]:
        if isinstance(instruction, Reduction):
            if instruction.word == "tied" and len(instruction.ranks) > 1:
                stages = next(group.stages for group in tied if group.name == instruction.bucket)
                names |= {instruction.bucket, *(f"stage{stage}" for stage in stages)}
            if instruction.bucket in names:
                late.append(instruction)
                continue
        kept.append(instruction)
    return (*kept, *late, *code[last + 1 :])


def _check(program: Program, kept: Mapping[int, bool], far: AbstractSet[int]) -> None:
    """Raise unless the stages can be sharded, or loaded."""
    if not kept:
        return
    if program.weight_rule != SYNCHRONOUS or program.num_steps > 1:
        message = f"weights of {program.weight_rule.name} cannot be sharded: older ones are read"
        raise ProgramError(message, hint="take a synchronous schedule, or replicate its stages")
    if any(isinstance(one, Validate) for one in program.code.reductions):
        message = "an update that may be taken back cannot be that of a shard"
        raise ProgramError(message, hint="clip before the update, or replicate all stages")
    if program.replicas == 1 and kept.keys() - far:
        message = f"stage {min(kept.keys() - far)} has one copy: there is nobody to share it with"
        raise ProgramError(message, hint="give the plan 2 replicas or more")
    words = "replicas", "shards"
    sums = {one.bucket: one.ranks for one in program.code.reductions if one.word in words}
    trains = any(isinstance(one, Update) for code in program.code for one in code)
    for stage in kept if trains or kept.keys() - far else ():  # else what is loaded stays there
        if len(ranks := sums.get(f"stage{stage}", ())) != program.replicas:
            message = f"stage {stage} lives on {len(ranks)} ranks of {program.replicas} replicas"
            hint = "shard stages that live on one rank of each replica"
            raise ProgramError(message, hint=hint)


def _runs(
    code: Code, kept: Mapping[int, bool], prefetch: int | Sequence[int]
) -> tuple[_WholeSpan, ...]:
    """Return when each sharded stage of a rank is whole, in the order in which it is gathered."""
    computes = [(at, each.action) for at, each in enumerate(code) if isinstance(each, Compute)]
    firsts: list[int] = []  # of all runs, of sharded stages or not
    runs: list[_WholeSpan] = []
    latest: dict[int, int] = {}  # by stage, the place of its last run in `runs`
    before, was_forward = -1, True
    for place, (kind, stage, _) in computes:
        if stage != before or was_forward != (kind == "F"):
            firsts.append(place)
        ahead = prefetch if isinstance(prefetch, int) else prefetch[stage]
        begin = firsts[max(0, len(firsts) - 1 - ahead)]
        known = latest.get(stage)
        if known is not None and (kept[stage] or stage == before or runs[known].last >= begin):
            runs[known] = runs[known]._replace(last=place)
        elif stage in kept:
            latest[stage] = len(runs)
            runs.append(_WholeSpan(stage, begin, place))
        before, was_forward = stage, kind == "F"
    return tuple(runs)


def _in_company(
    column: Sequence[Code], kept: Mapping[int, bool], prefetch: int | Sequence[int]
) -> list[tuple[_WholeSpan, ...]]:
    """Return the runs of ranks that divide stages, so that all gather the same in one order.

    Between two of their sums, one that lacks a gather of another gathers along, before its own next
    one or the sum; then no gather is early, as one might fall into a run of its stage.
    """
    rows = [list(_between_sums(code, _runs(code, kept, prefetch))) for code in column]
    told = [[[run.stage for run in part] for part, _ in row] for row in rows]
    if all(row == told[0] for row in told):
        return [tuple(run for part, _ in row for run in part) for row in rows]
    if prefetch if isinstance(prefetch, int) else any(prefetch):
        return _in_company(column, kept, 0)
    commons = [_merged(parts) for parts in zip(*told, strict=True)]
    found: list[tuple[_WholeSpan, ...]] = []
    for row in rows:
        made: list[_WholeSpan] = []
        for (own, end), common in zip(row, commons, strict=True):
            left = list(own)
            for stage in common:
                at = left[0].begin if left else end
                is_own = left and left[0].stage == stage
                made.append(left.pop(0) if is_own else _WholeSpan(stage, at, -1))
        found.append(tuple(made))
    return found


def _between_sums(code: Code, runs: Sequence[_WholeSpan]) -> Iterator[tuple[list[_WholeSpan], int]]:
    """Yield the runs that begin before each reduction, or Update, and its place; then the rest."""
    left = list(runs)
    for place, instruction in enumerate(code):
        if isinstance(instruction, Reduction | Update):
            count = sum(run.begin <= place for run in left)
            yield left[:count], place
            del left[:count]
    yield left, len(code)


def _merged(rows: Iterable[Sequence[int]]) -> list[int]:
    """Return stages in an order that holds every row, with gaps."""
    merged: list[int] = []
    for row in rows:
        same = SequenceMatcher(None, merged, row, autojunk=False).get_matching_blocks()
        both, a, b = list[int](), 0, 0
        for block in same:
            both += [*merged[a : block.a], *row[b : block.b + block.size]]
            a, b = block.a + block.size, block.b + block.size
        merged = both
    return merged
