"""Guard: one rank keeps what another one, or its host, alone has, so that no step is lost with it.

State that lives on one rank only - a stage of a pipeline without replicas, a part of a divided
one - would be lost with it.  So each rank has a guard: another one, `apart` ranks further.  Before
the word of a step goes around, it gives a record there; a step then counts only when its gradients
are in two places.  What is in it, and what the guard does with it, is planned (`Agreement.guard`):

    0    gradients.  When the word is through, the guard makes the same update of a copy as the rank
         does of the original, by the same numbers, so both are equal to the bit
    k    gradients, and weights and state of a part of the parameters as they are before the update:
         in k steps of all.  The guard does nothing, and keeps the records of k steps.  Once the
         rank is lost, it makes the updates that are missing

The first costs an update, the second bytes: k says how many, and how many are kept
(simulate/guards.py).  Where both ranks share memory the record is written there, and read only when
it is needed; elsewhere it is sent.  Of k + 1 places, the one for a step was free since the step
before it counted; so a rank may die while it writes.
"""

from collections.abc import Sequence
from itertools import zip_longest
from operator import is_
from typing import NamedTuple, final

import msgspec
import torch
from torch import Tensor, nn

from penstock.errors import RunError
from penstock.members.moving import PIECE_BYTES, Passing, held_row, receiver, room_for, sender
from penstock.members.record import ALIGN_BYTES, HEAD_BYTES, Head, RecordLayout, Slot, slots_in
from penstock.members.words import HeldTensor
from penstock.program.alone import guarded
from penstock.program.instructions import Guarding
from penstock.program.program import Program
from penstock.program.reductions import Guard
from penstock.runtime.rank import Rank
from penstock.state.optimizer.clearing import LEFT
from penstock.state.optimizer.optimizer import Optimizers
from penstock.state.optimizer.updates import Updates
from penstock.state.tensor_parts import key_in
from penstock.state.weights import GradientPlace
from penstock.transport.transport import untouched

_EDGE = 2**21  # no program has so many, nor are they those of moving
_ROOM = 8  # for weights and state of a group, in weights; what is not used takes no memory
_NEWS_BYTES = 2**10  # of what a tensor is called, and of what else there may be


class Header(msgspec.Struct, frozen=True):
    """What a rank tells its guard when they begin.

    constant:   tensors that no step changes, and buffers that forward writes, as they are.
    flats:      the gradients of a step, as they are in a record; `gradients`: where, by name.
    buffers:    keys of those that forward writes.
    groups:     names of the parameters whose state comes together, by turns.
    slot_bytes: of a record, at most.
    """

    constant: tuple[HeldTensor, ...]
    plain: dict[str, msgspec.Raw]
    flats: tuple[HeldTensor, ...]
    gradients: dict[str, GradientPlace]
    buffers: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]
    slot_bytes: int


class _News(msgspec.Struct, frozen=True):
    """The state of a group: in the order in which its tensors stand in a record."""

    state: tuple[HeldTensor, ...]
    plain: dict[str, msgspec.Raw]


_headers, _news = msgspec.json.Decoder(Header), msgspec.json.Decoder(_News)


def _divided(sizes: dict[str, int], count: int) -> list[tuple[str, ...]]:
    """Return the names in so many groups, or one for each, of about as many bytes."""
    groups = [list[str]() for _ in range(min(count, len(sizes)))]
    filled = [0] * len(groups)
    for name, size in sorted(sizes.items(), key=lambda row: -row[1]):
        at = filled.index(min(filled))
        groups[at].append(name)
        filled[at] += size
    return [tuple(group) for group in groups]


def _raw(plain: dict[str, object]) -> dict[str, msgspec.Raw]:
    return {key: msgspec.Raw(msgspec.json.encode(value)) for key, value in plain.items()}


# -- a record -------------------------------------------------------------------------------------


class _GroupRecord(NamedTuple):
    """What stands in a record with the state of a group, and where.

    seen:  what the optimizer kept of it then; as long as that is the same, so is all of this.
    """

    tensors: Sequence[Tensor]
    news: Tensor
    layout: RecordLayout
    seen: Sequence[object]


@final
class _Giver:
    """What this rank alone has, as it is written for its guard."""

    def __init__(self, rank: Rank, program: Program, guard: Guarding) -> None:
        stages, every = guarded(program, guard.shared)[rank.rank], guard.every
        self.weights = [rank.weights[stage] for stage in stages]
        written = rank.capture.graph.written
        self.buffers = {
            f"buffers/{w.buffer_names[node]}": value
            for w in self.weights
            for node, value in sorted(w.buffers.items())
            if node in written
        }
        sizes = {w.names[n]: v.nbytes for w in self.weights for n, v in w.trained().items()}
        self.groups = _divided(sizes, max(1, every))
        self.every, self._gradients = every, self._rows()
        self._turns: dict[int, _GroupRecord] = {}
        most = max((sum(sizes[name] for name in group) for group in self.groups), default=0)
        names = max(map(len, self.groups), default=0)
        given = sum(value.nbytes + ALIGN_BYTES for value in self._given())
        size = HEAD_BYTES + given + _ROOM * (most + (names + 1) * _NEWS_BYTES)
        self.slot_bytes = -(-size // ALIGN_BYTES) * ALIGN_BYTES

    def _given(self) -> list[Tensor]:
        """Return the summed gradients of a step, and buffers behind it."""
        flats = (flat for weights in self.weights for flat in weights.summed())
        return [*flats, *self.buffers.values()]

    def _rows(self) -> tuple[HeldTensor, ...]:
        return tuple(held_row("", value) for value in self._given())

    def header(self) -> tuple[Header, list[Tensor]]:
        """Return what the guard is told, and the tensors that are constant."""
        tensors: dict[str, Tensor] = {}
        plain: dict[str, object] = {}
        trained = {name for group in self.groups for name in group}
        for weights in self.weights:
            more, values = weights.state()
            tensors |= {k: v for k, v in more.items() if not _is_of(key_in(k), trained)}
            plain |= values
        rows = tuple(held_row(key, value) for key, value in tensors.items())
        count = len(self._gradients) - len(self.buffers)
        about = self._gradients[:count], self._places(), tuple(self.buffers), tuple(self.groups)
        return Header(rows, _raw(plain), *about, self.slot_bytes), list(tensors.values())

    def _places(self) -> dict[str, GradientPlace]:
        found, first = dict[str, GradientPlace](), 0
        for weights in self.weights:
            for node, place in weights.places().items():
                name = weights.names[node]
                if name in weights.given:
                    found[name] = GradientPlace(first + place.flat, place.start, place.shape)
            first += len(weights.summed())
        return found

    def write(self, slot: Slot, head: Head, *, gradients: bool = True) -> None:
        """Write the record of a step, with the state of the group whose turn it is."""
        has_state = bool(self.groups) and head.before >= 0
        turn = self._turn(head.step % len(self.groups) if has_state else -1, gradients=gradients)
        layout, news = turn.layout, turn.news
        if layout.end > len(slot.memory):
            message = f"the optimizer keeps more than {_ROOM - 1} times the weights"
            hint = "begin without elastic, or take one such as AdamW"
            raise RunError(message, hint=hint)
        given = self._given() if gradients else ()
        torch._foreach_copy_(slot.views(layout), [news, *given, *turn.tensors])  # pyright: ignore
        slot.head = head._replace(news_bytes=len(news), size=layout.end)

    def _turn(self, at: int, *, gradients: bool) -> _GroupRecord:
        """Return what stands in a record with the state of a group, or of none (-1).

        It is kept for the next turn, but for those without gradients, which come once: what they
        hold may be replaced, as where state goes to far memory.
        """
        names = self.groups[at] if at >= 0 else ()
        seen = [one for weights in self.weights for one in weights.seen_of(names)]
        kept = self._turns.get(at)
        if gradients and kept is not None and _are_same(kept.seen, seen):
            return kept
        tensors, plain = self._state(names) if names else ({}, {})
        rows = [held_row(key, value) for key, value in tensors.items()]
        text = msgspec.json.encode(_News(tuple(rows), _raw(plain))) if names else b""
        news = torch.tensor(list(text), dtype=torch.uint8)
        layout = RecordLayout.of([*(self._gradients if gradients else ()), *rows], len(text))
        made = _GroupRecord([*tensors.values()], news, layout, seen)
        if gradients:
            self._turns[at] = made
        return made

    def _state(self, names: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, object]]:
        tensors: dict[str, Tensor] = {}
        plain: dict[str, object] = {}
        for weights in self.weights:
            more, values = weights.state_of(frozenset(names))
            tensors |= more
            plain |= values
        return tensors, plain


def _are_same(one: Sequence[object], other: Sequence[object]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))


def _is_of(key: str, names: set[str]) -> bool:
    """Return whether a tensor is that of a parameter, or of the optimizer's state of one."""
    kind, _, rest = key.partition("/")
    return kind != "buffers" and (rest if kind == "weights" else rest.rpartition("/")[0]) in names


# -- what a guard keeps ---------------------------------------------------------------------------


@final
class _Ward:
    """What is known of another rank: records of steps, and what is made of them.

    slots:    where records are; that of a step in the place of its number.
    constant: by key, what is in no record, and buffers.
    state:    by key, as it is after `done` steps.
    """

    def __init__(self, header: Header, optimizers: Optimizers, slots: Sequence[Slot]) -> None:
        self.header, self.optimizers, self.slots = header, optimizers, slots
        self.constant = {row.key: room_for(row) for row in header.constant}
        self.state = dict(self.constant)
        self.plain = dict(header.plain)
        self.done = -1
        self._live: list[tuple[dict[str, nn.Parameter], Updates]] = []

    def record(self, step: int) -> Slot | None:
        """Return the record of a step, if it is there."""
        slot = self.slots[step % len(self.slots)]
        return slot if slot.head.step == step else None

    def newest(self, at: int, done: int) -> Slot | None:
        """Return the last record with the state of a group, of those of steps that have counted."""
        count = len(self.header.groups)
        last = done - 1 - (done - 1 - at) % count
        return self.record(last)

    def size_bytes(self) -> int:
        """Return the bytes that are held."""
        kept = (value for _, updates in self._live for value in updates.held())
        own = {value.data_ptr(): value.nbytes for value in (*self.state.values(), *kept)}
        return sum(own.values()) + sum(slot.head.size for slot in self.slots)

    def catalog(self, done: int) -> dict[str, HeldTensor]:
        """Return what tensors there are after so many steps."""
        if self.done != done and self._is_changed(done):
            self.bring(done)
        if self.done == done:
            return {key: held_row(key, value) for key, value in self._whole().items()}
        rows = {key: held_row(key, value) for key, value in self.state.items()}
        for at in range(len(self.header.groups)):
            rows |= {row.key: row for row in self._news(at, done).state}
        return rows

    def _is_changed(self, done: int) -> bool:
        """Return whether updates change what there is, and not only its numbers."""
        known, plain = set[str](), False
        for at in range(len(self.header.groups)):
            news = self._news(at, done)
            known |= {key_in(row.key) for row in news.state}
            plain = plain or bool(news.plain.keys() - {"optimizer-kind"})
        kept = (key.partition("/") for key in known)
        named = {rest.rpartition("/")[0] for kind, _, rest in kept if kind.startswith("optimizer")}
        return plain or bool(self.header.gradients.keys() - named)

    def _news(self, at: int, done: int) -> _News:
        slot = self.newest(at, done)
        assert slot is not None, "a group comes every so many steps"
        text, *_ = slot.views(RecordLayout.of([], slot.head.news_bytes))
        return _news.decode(text.numpy().tobytes())

    def begin(self, done: int) -> None:
        """Take the state from the records; it is updated from now on."""
        for at in range(len(self.header.groups)):
            tensors = self._take(at, done)
            self._live.append(self._made(at, done, tensors))
        self.optimizers.release()
        self.done = done

    def count(self, done: int) -> None:
        """Make the update of the step that has come to count."""
        for live, updates in self._live:
            self._step(live, updates, done - 1)
        self._take_buffers(done)
        self.done = done

    def bring(self, done: int) -> None:
        """Make all updates that the records ask for, until so many steps are done."""
        if self.done == done:
            return
        for at in range(len(self.header.groups)):
            slot, tensors = self.newest(at, done), self._take(at, done)
            assert slot is not None, "a group comes every so many steps"
            live, updates = self._made(at, done, tensors)
            for step in range(slot.head.before, done):
                self._step(live, updates, step)
            self._put(live, updates, tensors)
        self._take_buffers(done)
        self.optimizers.release()
        self.done = done

    def _take(self, at: int, done: int) -> dict[str, Tensor]:
        """Return the state of a group as a record has it, a copy."""
        slot, news = self.newest(at, done), self._news(at, done)
        assert slot is not None, "a group comes every so many steps"
        head = slot.head
        given = self._given() if head.has_gradients else []
        kept = slot.views(RecordLayout.of([*given, *news.state], head.news_bytes))[1 + len(given) :]
        self.plain |= news.plain
        rows = zip(news.state, kept, strict=True)
        return {row.key: value.clone() for row, value in rows}

    def _given(self) -> list[HeldTensor]:
        buffers = (held_row(key, self.state[key]) for key in self.header.buffers)
        return [*self.header.flats, *buffers]

    def _gradients(self, step: int) -> tuple[list[Tensor], list[Tensor], bool]:
        """Return gradients of a step, buffers behind it, and whether it was left out."""
        slot = self.record(step)
        assert slot is not None, "its record is kept until its state is"
        head, count = slot.head, len(self.header.flats)
        _, *views = slot.views(RecordLayout.of(self._given(), head.news_bytes))
        return views[:count], views[count:], head.is_left_out

    def _made(
        self, at: int, done: int, tensors: dict[str, Tensor]
    ) -> tuple[dict[str, nn.Parameter], Updates]:
        """Return parameters that are those of a group, and what updates them."""
        whole = {key_in(key): value for key, value in tensors.items()}
        self.state |= {k: v for k, v in tensors.items() if key_in(k).startswith("weights/")}
        names = self.header.groups[at]
        live = {name: nn.Parameter(whole[f"weights/{name}"]) for name in names}
        updates = self.optimizers.of(live, {})
        assert updates is not None, "a group has parameters"
        raw = {**self.header.plain, **self._news(at, done).plain}
        plain = {key: msgspec.json.decode(value) for key, value in raw.items()}
        updates.take({**self.constant, **whole}, plain)  # nothing of an earlier state
        return live, updates

    def _step(self, live: dict[str, nn.Parameter], updates: Updates, step: int) -> None:
        flats, _, is_left_out = self._gradients(step)
        if is_left_out:
            updates.leave_out()
            return
        reached = dict[str, Tensor]()
        for name, parameter in live.items():
            place = self.header.gradients.get(name)
            if place is not None:
                size = torch.Size(place.shape).numel()
                part = flats[place.flat].view(-1)[place.start : place.start + size]
                reached[name] = parameter.grad = part.view(place.shape)
        updates.step(step, reached)
        for parameter in live.values():
            parameter.grad = None

    def _take_buffers(self, done: int) -> None:
        last = self.record(done - 1)
        if last is not None and last.head.has_gradients:
            _, buffers, _ = self._gradients(done - 1)
            for key, value in zip(self.header.buffers, buffers, strict=True):
                self.state[key].copy_(value)

    def _put(
        self, live: dict[str, nn.Parameter], updates: Updates, tensors: dict[str, Tensor]
    ) -> None:
        """Put the state of an optimizer where a checkpoint has it; numbers are not divided."""
        made: dict[str, Tensor] = {}
        plain: dict[str, object] = {}
        updates.put(made, plain)
        weights = (key for key in tensors if key_in(key).startswith("weights/"))
        full = {key_in(key).removeprefix("weights/"): key for key in weights}
        for name in live:  # of a step before
            self.state.pop(LEFT.format(name), None)
        for key, value in made.items():
            name = key.partition("/")[2].rpartition("/")[0]
            part = full.get(name, "").removesuffix(f"weights/{name}") if value.dim() else ""
            self.state[part + key] = value
        self.plain |= _raw(plain)

    def _whole(self) -> dict[str, Tensor]:
        """Return all tensors by key, those of optimizers that are kept as they are now."""
        for live, updates in self._live:
            names = {f"weights/{name}" for name in live}
            self._put(live, updates, {k: v for k, v in self.state.items() if key_in(k) in names})
        return self.state

    def whole(self, done: int) -> dict[str, Tensor]:
        """Return all tensors by key, as they are after so many steps."""
        self.bring(done)
        return self._whole()


@final
class Guardian:
    """What a rank keeps of another one, and gives to the one that guards it."""

    def __init__(self, rank: Rank, program: Program) -> None:
        assert program.end.guard is not None, "the plan says how"
        self.rank, (self._every, self._apart, _) = rank, program.end.guard
        self._giver = _Giver(rank, program, program.end.guard)
        self._copy: _Ward | None = None
        self._own = list[Slot]()  # where this rank writes
        self._give: Passing | None = None  # where no memory is shared
        self._take: Passing | None = None

    def begin(self, step: int) -> int:
        """Give the state after so many steps, and take that of the other rank; return its bytes.

        All ranks call it together.
        Raises:   TransportError: one of them is lost.
        """
        rank, transport, giver = self.rank, self.rank.transport, self._giver
        count = transport.num_ranks
        ward, guard = (rank.rank - self._apart) % count, (rank.rank + self._apart) % count
        header, tensors = giver.header()
        told = transport.all_gather_bytes(msgspec.json.encode(header), tuple(range(count)))
        headers = [_headers.decode(text) for text in told]
        theirs = headers[ward]
        turns = max(1, *(len(each.groups) for each in headers))  # of all, as all pass in step
        slots = max(2, self._every + 1)
        own, other = (slots * each.slot_bytes for each in (header, theirs))
        mine = transport.bind_memory(_EDGE, rank.rank, guard, own)
        kept = transport.bind_memory(_EDGE, ward, rank.rank, other)
        if mine is None:  # it is sent
            mine = untouched(own)
            self._give = sender(transport, _EDGE + 2, guard, min(header.slot_bytes, PIECE_BYTES))
        if kept is None:
            kept = untouched(other)
            self._take = receiver(transport, _EDGE + 2, ward, min(theirs.slot_bytes, PIECE_BYTES))
        self._own = slots_in(mine, slots)
        self._copy = copy = _Ward(theirs, rank.optimizers, slots_in(kept, slots))
        if transport.is_queued:  # else each would open its own channel first, and wait
            transport.barrier()
        self._exchange(tensors, list(copy.state.values()), (ward, guard))
        for each in range(step - turns, step):
            giver.write(self._slot(each), Head(each, step, is_left_out=False), gradients=False)
            self._pass(copy, each)
        if not self._every:
            transport.barrier()
            copy.begin(step)
        return copy.size_bytes()

    def _slot(self, step: int) -> Slot:
        return self._own[step % len(self._own)]

    def _exchange(
        self, out: Sequence[Tensor], into: Sequence[Tensor], ranks: tuple[int, int]
    ) -> None:
        """Send tensors to the guard, and take those of the ward: its and the other's rank."""
        (ward, guard), transport = ranks, self.rank.transport
        sizes = [sum(value.nbytes for value in row) for row in (out, into)]
        give = sender(transport, _EDGE + 1, guard, sizes[0])
        take = receiver(transport, _EDGE + 1, ward, sizes[1])
        for _ in zip_longest(give(out), take(into)):
            pass  # piece by piece, so that none waits for room

    def _pass(self, copy: _Ward, step: int) -> None:
        """Send the record of a step, and take another, where no memory is shared."""
        own, kept = self._slot(step), copy.slots[step % len(copy.slots)]
        out = self._give([own.memory[: own.head.size]]) if self._give else ()
        for _ in zip_longest(out, self._take(kept.rooms()) if self._take else ()):
            pass  # piece by piece, so that none waits for room

    def exchange(self, guard: Guard) -> None:
        """Give what this rank alone has of a step to its guard.

        Raises:   TransportError: one of the ranks is lost.
        """
        assert self._copy is not None, "they have begun"
        rank, scale = self.rank, self.rank.loss_scale
        step = rank.progress.first_step + guard.step
        rank.join_buffers(step + 1)
        is_left_out = scale is not None and scale.leaves_out(step)
        before = step if self._every else -1
        self._giver.write(self._slot(step), Head(step, before, is_left_out))
        self._pass(self._copy, step)

    def counts(self, done: int) -> None:
        """Note that so many steps of the run have happened."""
        if self._copy is not None and not self._every and self._copy.done == done - 1:
            self._copy.count(done)

    def may_count(self, done: int) -> bool:
        """Note that so many steps have happened, unless the update of the copy fails, too."""
        try:
            self.counts(done)
        except Exception:  # noqa: BLE001 - the job's own optimizer may raise anything
            self._copy = None
        return self._copy is not None

    def catalog(self, done: int) -> tuple[dict[str, HeldTensor], dict[str, object]]:
        """Return what there is of the other rank's state after so many steps, by key."""
        if self._copy is None:
            return {}, {}
        rows = self._copy.catalog(done)
        return rows, {key: msgspec.json.decode(raw) for key, raw in self._copy.plain.items()}

    def tensors(self, done: int) -> dict[str, Tensor]:
        """Return the other rank's state after so many steps, by key."""
        return {} if self._copy is None else self._copy.whole(done)

    def size_bytes(self) -> int:
        """Return the bytes that are held of the other rank."""
        return 0 if self._copy is None else self._copy.size_bytes()
