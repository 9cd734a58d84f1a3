"""Moving: the state after a step, by parameter name, from those who hold it to those who need it.

A member holds the tensors of its stages, or its parts of them, under the keys of a checkpoint.  A
plan for other ranks, other cuts or other parts needs other keys: each of them comes from the first
member that has it whole, or in parts from as few as together make it.  Who needs what, and from
whom, every member computes from the catalogs alone, so nobody asks.
"""

import math
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.device import here
from penstock.members.words import HeldTensor
from penstock.state.tensor_parts import key_in
from penstock.transport.transport import TensorSpec, Transport

PIECE_BYTES = 2**22  # that go at once
_PART = re.compile(r"part (\d+) of ([\dx]*)/.+", re.DOTALL)
_EDGE = 2**20  # number of the first edge that moves state; no program has so many

Catalogs = Mapping[int, Sequence[HeldTensor]]  # by member
Needs = Callable[[str], bool]  # key of a tensor, parts put together -> whether it is needed here


class Transfer(NamedTuple):
    """A tensor that goes from one member to another, or stays where both are one."""

    key: str
    of: HeldTensor
    source: int


def held_row(key: str, value: Tensor) -> HeldTensor:
    """Return the row of a catalog for a tensor."""
    return HeldTensor(key, str(value.dtype).removeprefix("torch."), tuple(value.shape))


def room_for(row: HeldTensor) -> Tensor:
    """Return a tensor for what a row of a catalog names."""
    return torch.empty(row.shape, dtype=getattr(torch, row.dtype))


def missing_of(names: Sequence[str], catalogs: Catalogs) -> list[str]:
    """Return those of some keys that no members have, even together."""
    held = _holders(catalogs)
    return [key for key in names if key not in held or _cover(key, held[key], -1) is None]


def moves_to(member: int, needs: Needs, catalogs: Catalogs) -> list[Transfer]:
    """Return which tensors `member` takes, from whom; its own where it has them.

    A key that no members can put together is left out.
    """
    found: list[Transfer] = []
    for key, holders in sorted(_holders(catalogs).items()):
        if needs(key):
            found += _cover(key, holders, member) or []
    return found


def _holders(catalogs: Catalogs) -> dict[str, list[tuple[int, HeldTensor]]]:
    """Return who holds what of each key, parts of it included, in the order of the catalogs."""
    found: defaultdict[str, list[tuple[int, HeldTensor]]] = defaultdict(list)
    for member, rows in catalogs.items():
        for held in rows:
            found[key_in(held.key)].append((member, held))
    return found


def _cover(
    key: str, holders: Sequence[tuple[int, HeldTensor]], member: int
) -> list[Transfer] | None:
    """Return what makes a key whole: what `member` has itself where it can, else of the first."""
    ordered = sorted(holders, key=lambda row: row[0] != member)
    for holder, held in ordered:
        if held.key == key:
            return [Transfer(key, held, holder)]
    parts: defaultdict[int, list[tuple[int, Transfer]]] = defaultdict(
        list
    )  # by start: end and move
    total = 0
    for holder, held in ordered:
        found = _PART.fullmatch(held.key)
        assert found is not None, "a key that is not whole is that of a part"
        start, shape = int(found[1]), found[2]
        total = math.prod(map(int, shape.split("x"))) if shape else 1
        parts[start].append((start + math.prod(held.shape), Transfer(key, held, holder)))
    return _chain(parts, 0, total)


def _chain(
    parts: Mapping[int, Sequence[tuple[int, Transfer]]], start: int, total: int
) -> list[Transfer] | None:
    """Return parts that lie one behind the other from `start` to `total`; None: there are none."""
    if start == total:
        return []
    for end, transfer in parts.get(start, ()):
        rest = _chain(parts, end, total) if end > start else None
        if rest is not None:
            return [transfer, *rest]
    return None


class Moved(NamedTuple):
    """What a member has after moving, by key, and the bytes that came from others."""

    tensors: dict[str, Tensor]
    received_bytes: int


def move(
    transport: Transport,
    members: Sequence[int],
    own: Mapping[str, Tensor],
    wanted: Sequence[Sequence[Transfer]],
) -> Moved:
    """Return the tensors that this rank wants; all ranks call it together.

    members:  by rank.  A source that is none of them has nothing to give any more.
    wanted:   by rank, what it takes.
    own:      what this rank holds.
    """
    me, found = members[transport.rank], dict[str, Tensor]()
    came = 0
    for mine in wanted[transport.rank]:
        if mine.source == me:
            found[mine.of.key] = own[mine.of.key]
    for sender, receiver, rows in _routes(members, wanted):
        edge = _EDGE + sender * len(members) + receiver
        if sender == transport.rank:
            _send(transport, edge, receiver, [own[each.of.key] for each in rows])
        elif receiver == transport.rank:
            tensors = _receive(transport, edge, sender, [each.of for each in rows])
            found |= zip((each.of.key for each in rows), tensors, strict=True)
            came += sum(tensor.nbytes for tensor in tensors)
    return Moved(found, came)


def _routes(
    members: Sequence[int], wanted: Sequence[Sequence[Transfer]]
) -> Iterator[tuple[int, int, list[Transfer]]]:
    """Yield sender, receiver and what goes between them, in one order on all ranks.

    A pair after the other, as each sends before the next receives nothing waits for itself.
    """
    for receiver, rows in enumerate(wanted):
        for sender, member in enumerate(members):
            between = [row for row in rows if row.source == member and sender != receiver]
            if between:
                yield sender, receiver, between


def _send(transport: Transport, edge: int, peer: int, tensors: Sequence[Tensor]) -> None:
    give = sender(transport, edge, peer, sum(tensor.nbytes for tensor in tensors))
    deque(give([tensor.to("cpu") for tensor in tensors]), maxlen=0)


def _receive(
    transport: Transport, edge: int, peer: int, rows: Sequence[HeldTensor]
) -> list[Tensor]:
    made = list(map(room_for, rows))
    take = receiver(transport, edge, peer, sum(tensor.nbytes for tensor in made))
    deque(take(made), maxlen=0)
    return made


# -- the bytes of many tensors as one stream ------------------------------------------------------

Passing = Callable[[Iterable[Tensor]], Iterator[None]]  # yields behind each piece


def sender(transport: Transport, edge: int, peer: int, size_bytes: int) -> Passing:
    """Return what sends tensors of so many bytes in all, as they lie one after another, in pieces.

    All pieces are as long as the first; what is behind the end of the last says nothing.
    """
    if not size_bytes:
        return lambda tensors: iter(())
    most = min(PIECE_BYTES, size_bytes)
    send_near = transport.bind_send(edge, peer, (TensorSpec((most,), torch.uint8),))
    device = here() if transport.is_queued else None

    def send(pieces: Sequence[Tensor]) -> None:
        send_near(pieces if device is None else [device.taken(piece) for piece in pieces])

    def give(tensors: Iterable[Tensor]) -> Iterator[None]:
        room, filled = torch.empty(0, dtype=torch.uint8), 0
        for view in _views(tensors, most):
            if not filled and len(view) == most:
                send([view])
                yield
                continue
            if not filled:
                room = torch.empty(most, dtype=torch.uint8)  # threads hand it over
            room[filled : filled + len(view)].copy_(view)
            filled = (filled + len(view)) % most
            if not filled:
                send([room])
                yield
        if filled:
            send([room])
            yield

    return give


def receiver(transport: Transport, edge: int, peer: int, size_bytes: int) -> Passing:
    """Return what fills tensors with what such a `sender` sends.

    The next one is asked for when the one before is full.
    """
    if not size_bytes:
        return lambda tensors: iter(())
    most = min(PIECE_BYTES, size_bytes)
    post, wait = transport.bind_receive(edge, peer, (TensorSpec((most,), torch.uint8),))
    device = here() if transport.is_queued else None

    def take(tensors: Iterable[Tensor]) -> Iterator[None]:
        at, came = 0, torch.empty(0, dtype=torch.uint8)
        for view in _views(tensors, most):
            if not at:
                if post is not None:
                    post()
                (came,) = wait()
                came = came if device is None else device.on_host(came)
            view.copy_(came[at : at + len(view)])
            at = (at + len(view)) % most
            if not at:
                yield
        if at:
            yield

    return take


def _views(tensors: Iterable[Tensor], most: int) -> Iterator[Tensor]:
    """Yield the bytes of tensors one after another, as views none of which is in two pieces."""
    at = 0
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        start = 0
        while start < flat.numel():
            end = min(flat.numel(), start + most - at % most)
            yield flat[start:end]
            at, start = at + end - start, end
