"""Mutants: a sound program with one thing changed."""

from dataclasses import replace

from penstock.program.program import (
    BeginOffload,
    BeginReload,
    Compute,
    Offload,
    Receive,
    Reload,
    Reshard,
    Send,
    Unshard,
    Update,
)
from penstock.program.reductions import Reduction

MUTATIONS = (
    "drop",
    "duplicate",
    "swap",
    "move",
    "exile",
    "retag",
    "slot",
    "both slots",
    "peer",
    "edge",
    "version",
    "kind",
    "step",
    "drop sum",
    "stage",
)


def mutate(program, how, chance):
    """Return the codes of `program` with one change of kind `how`, or None where none can be."""
    codes = [list(code) for code in program.code]
    ranks = [rank for rank, code in enumerate(codes) if code]
    rank = chance.choice(ranks)
    code = codes[rank]
    at = chance.randrange(len(code))
    match how:
        case "drop":
            del code[at]
        case "duplicate":
            code.insert(chance.randrange(len(code) + 1), code[at])
        case "swap":
            other = min(at + chance.choice((1, 1, 2, 5)), len(code) - 1)
            code[at], code[other] = code[other], code[at]
        case "move":
            code.insert(chance.randrange(len(code)), code.pop(at))
        case "exile":
            other = codes[chance.choice(ranks)]
            other.insert(chance.randrange(len(other) + 1), code.pop(at))
        case "both slots":
            return _both_slots(codes, chance)
        case "drop sum":
            return _drop_sum(codes, chance)
        case _:
            changed = [(at, _change(program, one, how, chance)) for at, one in enumerate(code)]
            changed = [(at, new) for at, new in changed if new not in (None, code[at])]
            if not changed:
                return None
            at, new = chance.choice(changed)
            code[at] = new
    return None if codes == [list(code) for code in program.code] else codes


def _change(program, one, how, chance):
    """Return `one` with another operand, or None where it has none of that kind."""
    window = program.num_micro_batches * program.num_steps
    message, near = isinstance(one, Send | Receive), chance.choice((-1, 1))
    match how:
        case "retag" if message:
            return replace(one, of=one.of._replace(micro_batch=chance.randrange(window)))
        case "retag" if isinstance(one, Compute):
            return replace(one, action=one.action._replace(micro_batch=chance.randrange(window)))
        case "slot" if message:
            return replace(one, slot=max(0, one.slot + near))
        case "peer" if message:
            return replace(one, peer=chance.randrange(program.num_ranks))
        case "edge" if message:
            return replace(one, edge=chance.randrange(len(program.edges)))
        case "version" if isinstance(one, Compute):
            return replace(one, version=one.version + near)
        case "kind" if isinstance(one, Compute):
            return replace(one, action=one.action._replace(kind=chance.choice("FBIW")))
        case "kind" if message:
            return replace(one, of=one.of._replace(kind=chance.choice("FBI")))
        case "kind" if isinstance(one, Unshard):
            return Reshard(one.stage)
        case "kind" if isinstance(one, Offload | Reload) and one.of.kind in "UW":
            return replace(one, of=one.of._replace(kind=chance.choice("UW")))
        case "kind" if isinstance(one, Offload):
            return Reload(one.of)
        case "kind" if isinstance(one, BeginOffload):
            return BeginReload(one.of)
        case "retag" if isinstance(one, Offload | Reload | BeginOffload | BeginReload):
            return replace(one, of=one.of._replace(micro_batch=chance.randrange(window)))
        case "stage" if isinstance(one, Offload | Reload | BeginOffload | BeginReload):
            return replace(one, of=one.of._replace(stage=chance.randrange(program.num_stages)))
        case "step" if isinstance(one, Update | Reduction):
            return replace(one, step=chance.randrange(program.num_steps))
        case "stage" if isinstance(one, Update | Unshard | Reshard):
            return replace(one, stage=chance.randrange(program.num_stages))
        case "stage" if isinstance(one, Compute):
            return replace(
                one, action=one.action._replace(stage=chance.randrange(program.num_stages))
            )
    return None


def _both_slots(codes, chance):
    """Give one message another slot at both of its ends."""
    sends = [one for code in codes for one in code if isinstance(one, Send)]
    if not sends:
        return None
    send = chance.choice(sends)
    slot = max(0, send.slot + chance.choice((-1, 1)))
    for rank, code in enumerate(codes):
        for at, one in enumerate(code):
            is_other_end = isinstance(one, Receive) and rank == send.peer
            if one == send or (is_other_end and (one.of, one.edge) == (send.of, send.edge)):
                code[at] = replace(one, slot=slot)
    return codes


def _drop_sum(codes, chance):
    """Leave one sum out on all of its ranks."""
    sums = [one for code in codes for one in code if isinstance(one, Reduction)]
    if not sums:
        return None
    chosen = chance.choice(sums)
    return [[one for one in code if one != chosen] for code in codes]


def later(program, chance):
    """Return the codes of `program` with Sends and Receives put off as their own rank allows.

    No rank misses anything; but some may wait for each other.
    """
    put_off = {Send: chance.choice((0, 0, 0.4)), Receive: chance.choice((0.5, 0.95))}
    return [_later(code, program, chance, put_off) for code in program.code]


def _later(code, program, chance, put_off):
    new, held = [], []
    for one in code:
        if isinstance(one, Send | Receive) and chance.random() < put_off[type(one)]:
            held.append(one)
            continue
        if isinstance(one, Send | Receive):  # keep each channel in order
            out = [h for h in held if (type(h), h.peer) == (type(one), one.peer)]
        elif isinstance(one, Compute):
            out = _needed(one, held, program)
        else:
            out = held if isinstance(one, Reduction) or chance.random() < 0.3 else []
        new += out
        held = [h for h in held if h not in out]
        new.append(one)
    return new + held


def _needed(compute, held, program):
    """Return the Receives that a Compute uses, and all held before them on their channels."""
    used = [
        at
        for at, one in enumerate(held)
        if isinstance(one, Receive)
        and one.of.micro_batch == compute.action.micro_batch
        and program.edges[one.edge].target == compute.action.stage
    ]
    last = {held[at].peer: at for at in used}
    return [
        one
        for at, one in enumerate(held)
        if isinstance(one, Receive) and at <= last.get(one.peer, -1)
    ]
