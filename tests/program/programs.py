"""Programs for the tests: of every schedule there is, of random ones, with every kind of sum."""

import random
from dataclasses import replace
from typing import get_args

from hypothesis import strategies as st

from penstock.errors import ProgramError
from penstock.plan import Offloaded
from penstock.program.codes import Codes
from penstock.program.lower import chain
from penstock.program.passes import offload, shard
from penstock.program.program import (
    Compute,
    Edge,
    Program,
    Reshard,
    TiedGroup,
    Unshard,
    Update,
)
from penstock.program.reductions import Reduction
from penstock.schedule import (
    DOUBLE_BUFFERED,
    SYNCHRONOUS,
    Action,
    Schedule,
    double_buffered,
    gpipe,
    interleaved,
    one_f_one_b,
    zb_h1,
)
from tests.program.lowering import lower_schedule


def random_schedule(chance, num_stages, num_micro_batches, num_ranks, *, fixed, backward):
    """Return a schedule by cutting a random possible order of all actions into ranks."""
    home = [chance.randrange(num_ranks) for _ in range(num_stages)]
    rank_of = {
        (s, m): home[s] if fixed else chance.randrange(num_ranks)
        for s in range(num_stages)
        for m in range(num_micro_batches)
    }
    needs = {}
    for s, m in rank_of:
        needs[Action("F", s, m)] = [Action("F", s - 1, m)] if s else []
    for s, m in rank_of if backward else ():
        split = chance.random() < 0.5
        first = Action("I" if split else "B", s, m)
        needs[first] = [Action("F", s, m)]
        if split:
            needs[Action("W", s, m)] = [first]
    for action, before in needs.items():
        if action.kind in "BI" and action.stage < num_stages - 1:
            later = (Action(kind, action.stage + 1, action.micro_batch) for kind in "BI")
            before.append(next(one for one in later if one in needs))
    orders = _cut(chance, needs, lambda action: rank_of[action[1:]], num_ranks)
    return Schedule(num_stages, num_micro_batches, orders, name="random")


def random_window(chance, num_stages, num_micro_batches, num_ranks):
    """Return a schedule of some steps without a flush, cut from a random possible order."""
    num_steps = chance.randrange(1, 4)
    together = chance.random() < 0.7  # all gradients of a step are whole before its first update
    rule = chance.choice((SYNCHRONOUS, DOUBLE_BUFFERED))
    home = [chance.randrange(num_ranks) for _ in range(num_stages)]
    needs = {}
    for stage in range(num_stages):
        for m in range(num_steps * num_micro_batches):
            step = m // num_micro_batches
            needs[Action("F", stage, m)] = [Action("F", stage - 1, m)] if stage else []
            history = int(rule.history(num_stages, num_micro_batches)[stage])
            if (made := step - 1 - history) >= 0:
                needs[Action("F", stage, m)].append(Action("U", stage, made))
            later = [Action("B", stage + 1, m)] if stage < num_stages - 1 else []
            needs[Action("B", stage, m)] = [Action("F", stage, m), *later]
        for step in range(num_steps):
            own = range(step * num_micro_batches, (step + 1) * num_micro_batches)
            whole = range(num_stages) if together else (stage,)
            before = [Action("U", stage, step - 1)] if step else []
            before += [Action("B", other, m) for other in whole for m in own]
            needs[Action("U", stage, step)] = before
    orders = _cut(chance, needs, lambda action: home[action.stage], num_ranks)
    return Schedule(num_stages, num_micro_batches, orders, num_steps, rule)


def _cut(chance, needs, rank_of, num_ranks):
    """Return the orders of all ranks in a random order of everything that fits `needs`."""
    orders = [[] for _ in range(num_ranks)]
    done = set()
    while len(done) < len(needs):
        ready = [one for one in needs if one not in done and done.issuperset(needs[one])]
        action = chance.choice(ready)
        done.add(action)
        orders[rank_of(action)].append(action)
    return tuple(map(tuple, orders))


def forward_only(num_stages, num_micro_batches):
    orders = [[Action("F", s, m) for m in range(num_micro_batches)] for s in range(num_stages)]
    return Schedule(num_stages, num_micro_batches, tuple(map(tuple, orders)))


def schedule_of(kind, num_stages, num_micro_batches, chance):
    match kind:
        case "gpipe":
            return gpipe(num_stages, num_micro_batches)
        case "one_f_one_b":
            return one_f_one_b(num_stages, num_micro_batches)
        case "interleaved":
            ranks = chance.randrange(1, num_stages + 1)
            return interleaved(num_stages, num_micro_batches, num_ranks=ranks)
        case "zb_h1":
            return zb_h1(num_stages, num_micro_batches)
        case "double_buffered":
            return double_buffered(num_stages, num_micro_batches, num_steps=chance.randrange(1, 4))
        case "forward_only":
            return forward_only(num_stages, num_micro_batches)
        case "window":
            return random_window(chance, num_stages, num_micro_batches, chance.randrange(1, 4))
        case "random" | "scattered":
            ranks, fixed = chance.randrange(1, 4), kind == "random"
            backward = chance.random() < 0.9
            return random_schedule(
                chance, num_stages, num_micro_batches, ranks, fixed=fixed, backward=backward
            )


SHARED = {
    "gpipe": gpipe,
    "one_f_one_b": one_f_one_b,
    "interleaved": interleaved,
    "zb_h1": zb_h1,
    "forward_only": forward_only,
}
FAR = "weights", "all"  # words of Offloaded
KINDS = (
    "gpipe",
    "one_f_one_b",
    "interleaved",
    "zb_h1",
    "double_buffered",
    "forward_only",
    "window",
    "random",
    "scattered",
)


def skips(num_stages, chance):
    """Return a chain with some skip connections, forward ones now and then without a way back."""
    edges = list(chain(num_stages))
    for source in range(num_stages):
        for target in range(source + 2, num_stages):
            if chance.random() < 0.5:
                edges.append(Edge("F", source, target, 8))
                if chance.random() < 0.7:
                    edges.append(Edge("B", target, source, 8))
    chance.shuffle(edges)
    return tuple(edges)


@st.composite
def programs(draw, *, kinds=KINDS, max_stages=4, max_micro_batches=4):
    """Draw a program of any schedule, small, with any of skips, tied groups, replicas, clipping."""
    kind = draw(st.sampled_from(kinds))
    num_stages = draw(st.integers(1, max_stages))
    num_micro_batches = draw(st.integers(1, max_micro_batches))
    chance = random.Random(draw(st.integers(0, 999)))
    schedule = schedule_of(kind, num_stages, num_micro_batches, chance)
    tied = []
    if num_stages > 1 and kind != "scattered" and chance.random() < 0.4:
        stages = chance.sample(range(num_stages), chance.randrange(2, num_stages + 1))
        tied.append(TiedGroup("wte", tuple(stages), 64))
        if chance.random() < 0.3:
            tied.append(TiedGroup("norm.weight", (0, num_stages - 1), 4))
    edges = skips(num_stages, chance) if chance.random() < 0.4 else None
    replicas, clip = 2 if chance.random() < 0.3 else 1, chance.random() < 0.3
    side_by_side = [schedule] * replicas
    if replicas == 2 and kind in SHARED:
        other = chance.randrange(1, max_micro_batches + 1)
        ranks = {"num_ranks": schedule.num_ranks} if kind == "interleaved" else {}
        side_by_side[chance.randrange(2)] = SHARED[kind](num_stages, other, **ranks)
    try:
        program = lower_schedule(side_by_side, edges=edges, tied=tied, clip=clip)
    except ProgramError:  # a random window may have no place for sums over several stages
        assert kind == "window"
        program = lower_schedule(schedule, edges=edges, replicas=replicas)
    if kind in SHARED and kind != "forward_only" and replicas == 1 and chance.random() < 0.3:
        own = {"edges": edges, "tied": tied, "clip": clip}
        return with_far_weights(schedule, own, chance)
    if chance.random() < 0.3:
        program = with_copies(program, chance)
    return with_shards(program, chance) if chance.random() < 0.3 else program


def with_far_weights(schedule, own, chance):
    """Return the program of a schedule with the weights of some stages in far memory."""
    words = [chance.choice(get_args(Offloaded)) for _ in range(schedule.num_stages)]
    far = {stage for stage, word in enumerate(words) if word in FAR}
    program = lower_schedule(schedule, far=far, **own)
    program = shard(program, (), prefetch=[chance.randrange(3) for _ in words], far=far)
    return offload(program, words, beside=chance.random() < 0.5)


def with_copies(program, chance):
    """Return `program` with copies to far memory and back, of some stages."""
    near = [word for word in get_args(Offloaded) if word not in FAR]
    words = [chance.choice(near) for _ in range(program.num_stages)]
    has_updates = any(isinstance(one, Update) for code in program.code for one in code)
    beside = chance.random() < 0.5
    return offload(program, words, beside=beside) if has_updates else program


def with_shards(program, chance):
    """Return `program` with the weights of some stages gathered around some of their computes.

    Not where shares differ: the replicas of a rank gather as often as each other.
    """
    if program.shares:
        return program
    sharded = {s for s in range(program.num_stages) if chance.random() < 0.6}
    seed = chance.randrange(1000)
    try:
        return unsharded(
            program, lambda rank: random.Random(seed + rank % program.grid.num_ranks), sharded
        )
    except ProgramError:  # a gather may come behind a sum that waits for what is behind the gather
        return program


def unsharded(program, chance_of, sharded):
    codes = []
    for rank, code in enumerate(program.code):
        chance, new, gathered = chance_of(rank), [], set()
        for one in code:
            if isinstance(one, Compute) and one.action.stage in sharded - gathered:
                new.append(Unshard(one.action.stage))
                gathered.add(one.action.stage)
            if isinstance(one, Update | Reduction):
                new += [Reshard(stage) for stage in sorted(gathered)]
                gathered.clear()
            new.append(one)
            for stage in sorted(gathered):
                if isinstance(one, Compute) and chance.random() < 0.5:
                    new.append(Reshard(stage))
                    gathered.discard(stage)
        codes.append([*new, *(Reshard(stage) for stage in sorted(gathered))])
    return rebuilt(program, codes)


def rebuilt(program, codes):
    """Return `program` with other instructions.  Raises ProgramError where they are not sound."""
    return replace(program, code=Codes.of(codes))


def unchecked(program, codes):
    """Return a program that nobody verified, to run it anyway."""
    copy = object.__new__(Program)
    for name in Program.__slots__:
        object.__setattr__(copy, name, getattr(program, name))
    object.__setattr__(copy, "code", Codes.of(codes))
    return copy
