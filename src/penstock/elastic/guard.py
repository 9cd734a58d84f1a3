"""Guard: one rank keeps what another one alone has, so that no step is lost with that one.

State that lives on one rank only - a stage of a pipeline without replicas, a part of a divided
one - would be lost with it.  So each rank has a guard: another one, `apart` ranks further.  Before
the word of a step goes around, it gives a record there; a step then counts only when its gradients
are in two places.  What is in it, and what the guard does with it, is planned (`Plan.guard`):

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

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple, final

import msgspec
import torch
from torch import Tensor, nn

from penstock.elastic.moving import PIECE_BYTES, Passing, held_row, receiver, room_for, sender
from penstock.elastic.words import HeldTensor
from penstock.errors import RunError
from penstock.graph.cut_points import written_buffers
from penstock.program.alone import alone
from penstock.program.program import Program, Reduce
from penstock.runtime.optimizer import Optimizers
from penstock.runtime.parts import key_in
from penstock.runtime.rank import Rank
from penstock.runtime.transport.transport import untouched
from penstock.runtime.updates import Updates
from penstock.runtime.weights import GradientPlace

_EDGE = 2**21  # no program has so many, nor are they those of moving
_ALIGN_BYTES = 64
_HEAD_WORDS = 8  # step, steps before its state, left out, bytes of the news, of all
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


def _split(memory: Tensor, count: int) -> list[Tensor]:
    """Return so many equal parts."""
    size = len(memory) // count
    return [memory[at * size : (at + 1) * size] for at in range(count)]


# -- a record -------------------------------------------------------------------------------------


class _Head(NamedTuple):
    """The beginning of a record.

    step:     whose gradients it has; `before`: the steps that its state has behind it, or -1.
    size:     bytes of all.
    """

    step: int
    before: int
    is_left_out: bool
    news_bytes: int
    size: int

    @property
    def has_gradients(self) -> bool:
        """Return whether it is that of a step; those that a guard begins with are not."""
        return self.before <= self.step


def _head_of(slot: Tensor) -> _Head:
    words: list[int] = slot[: 8 * _HEAD_WORDS].view(torch.int64).tolist()  # pyright: ignore
    return _Head(words[0], words[1], bool(words[2]), words[3], words[4])


def _rooms(slot: Tensor) -> Iterator[Tensor]:
    """Yield where a record is put: its head says how long it is."""
    start = 8 * _HEAD_WORDS
    yield slot[:start]
    yield slot[start : _head_of(slot).size]


def _views(slot: Tensor, start: int, rows: Sequence[HeldTensor]) -> tuple[list[Tensor], int]:
    """Return where tensors lie in a slot, one behind the other, and where the last one ends."""
    found = list[Tensor]()
    for row in rows:
        dtype = getattr(torch, row.dtype)
        size = torch.Size(row.shape).numel() * dtype.itemsize
        found.append(slot[start : start + size].view(dtype).view(row.shape))
        start += -(-size // _ALIGN_BYTES) * _ALIGN_BYTES
    return found, start


@final
class _Giver:
    """What this rank alone has, as it is written for its guard."""

    def __init__(self, rank: Rank, program: Program, every: int) -> None:
        self.weights = [rank.weights[stage] for stage in alone(program)[rank.rank]]
        written = written_buffers(rank.capture.graph)
        self.buffers = {
            f"buffers/{w.buffer_names[node]}": value
            for w in self.weights
            for node, value in sorted(w.buffers.items())
            if node in written
        }
        sizes = {w.names[n]: v.nbytes for w in self.weights for n, v in w.trained().items()}
        self.groups = _divided(sizes, max(1, every))
        self.every, self._gradients = every, self._rows()
        most = max((sum(sizes[name] for name in group) for group in self.groups), default=0)
        names = max(map(len, self.groups), default=0)
        given = sum(value.nbytes + _ALIGN_BYTES for value in self._given())
        size = 8 * _HEAD_WORDS + given + _ROOM * (most + (names + 1) * _NEWS_BYTES)
        self.slot_bytes = -(-size // _ALIGN_BYTES) * _ALIGN_BYTES

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

    def write(self, slot: Tensor, head: _Head, *, gradients: bool = True) -> int:
        """Write the record of a step, with the state of the group whose turn it is; its bytes."""
        rows, news = list[HeldTensor](), b""
        given = self._given() if gradients else []
        if self.groups and head.before >= 0:
            tensors, plain = self._state(self.groups[head.step % len(self.groups)])
            rows = [held_row(key, value) for key, value in tensors.items()]
            news = msgspec.json.encode(_News(tuple(rows), _raw(plain)))
            given += tensors.values()
        start = 8 * _HEAD_WORDS
        text = HeldTensor("", "uint8", (len(news),))
        rows = [text, *(self._gradients if gradients else ()), *rows]
        try:
            (told, *views), size = _views(slot, start, rows)
        except RuntimeError:
            message = f"the optimizer keeps more than {_ROOM - 1} times the weights"
            hint = "begin without --elastic, or take one such as AdamW"
            raise RunError(message, hint=hint) from None
        if news:
            told.copy_(torch.frombuffer(bytearray(news), dtype=torch.uint8))
        if views:
            torch._foreach_copy_(views, given)  # pyright: ignore
        words = [head.step, head.before, int(head.is_left_out), len(news), size, 0, 0, 0]
        slot[:start].view(torch.int64).copy_(torch.tensor(words))
        return size

    def _state(self, names: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, object]]:
        tensors: dict[str, Tensor] = {}
        plain: dict[str, object] = {}
        for weights in self.weights:
            more, values = weights.state_of(frozenset(names))
            tensors |= more
            plain |= values
        return tensors, plain


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

    def __init__(self, header: Header, optimizers: Optimizers, slots: Sequence[Tensor]) -> None:
        self.header, self.optimizers, self.slots = header, optimizers, slots
        self.constant = {row.key: room_for(row) for row in header.constant}
        self.state = dict(self.constant)
        self.plain = dict(header.plain)
        self.done = -1
        self._live: list[tuple[dict[str, nn.Parameter], Updates]] = []

    def record(self, step: int) -> Tensor | None:
        """Return the record of a step, if it is there."""
        slot = self.slots[step % len(self.slots)]
        return slot if _head_of(slot).step == step else None

    def newest(self, at: int, done: int) -> Tensor | None:
        """Return the last record with the state of a group, of those of steps that have counted."""
        count = len(self.header.groups)
        last = done - 1 - (done - 1 - at) % count
        return self.record(last)

    def size_bytes(self) -> int:
        """Return the bytes that are held."""
        kept = (value for _, updates in self._live for value in updates.held())
        own = {value.data_ptr(): value.nbytes for value in (*self.state.values(), *kept)}
        return sum(own.values()) + sum(_head_of(slot).size for slot in self.slots)

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
        start = 8 * _HEAD_WORDS
        text = slot[start : start + _head_of(slot).news_bytes]
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
            for step in range(_head_of(slot).before, done):
                self._step(live, updates, step)
            self._put(live, updates, tensors)
        self._take_buffers(done)
        self.optimizers.release()
        self.done = done

    def _take(self, at: int, done: int) -> dict[str, Tensor]:
        """Return the state of a group as a record has it, a copy."""
        slot, news = self.newest(at, done), self._news(at, done)
        assert slot is not None, "a group comes every so many steps"
        head, start = _head_of(slot), 8 * _HEAD_WORDS
        given = self._given() if head.has_gradients else []
        text = HeldTensor("", "uint8", (head.news_bytes,))
        views, _ = _views(slot, start, [text, *given, *news.state])
        kept = views[1 + len(given) :]
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
        head, count = _head_of(slot), len(self.header.flats)
        text = HeldTensor("", "uint8", (head.news_bytes,))
        (_, *views), _ = _views(slot, 8 * _HEAD_WORDS, [text, *self._given()])
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
        if last is not None and _head_of(last).has_gradients:
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
class Guard:
    """What a rank keeps of another one, and gives to the one that guards it."""

    def __init__(self, rank: Rank, program: Program) -> None:
        assert program.guard is not None, "the plan says how"
        self.rank, (self._every, self._apart) = rank, program.guard
        self._giver = _Giver(rank, program, self._every)
        self._copy: _Ward | None = None
        self._own = list[Tensor]()  # where this rank writes
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
        theirs = _headers.decode(told[ward])
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
        self._own = _split(mine, slots)
        self._copy = copy = _Ward(theirs, rank.optimizers, _split(kept, slots))
        self._exchange(tensors, list(copy.state.values()), (ward, guard))
        for each in range(step - max(1, len(giver.groups)), step):
            giver.write(self._slot(each), _Head(each, step, False, 0, 0), gradients=False)
            self._pass(copy, each)
        if not self._every:
            transport.barrier()
            copy.begin(step)
        return copy.size_bytes()

    def _slot(self, step: int) -> Tensor:
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
        out = self._give([own[: _head_of(own).size]]) if self._give else ()
        for _ in zip_longest(out, self._take(_rooms(kept)) if self._take else ()):
            pass  # piece by piece, so that none waits for room

    def exchange(self, reduce: Reduce) -> None:
        """Give what this rank alone has of a step to its guard.

        Raises:   TransportError: one of the ranks is lost.
        """
        assert self._copy is not None, "they have begun"
        rank, scale = self.rank, self.rank.loss_scale
        step = rank.progress.first_step + reduce.step
        rank.join_buffers(step + 1)
        is_left_out = scale is not None and scale.leaves_out(step)
        before = step if self._every else -1
        self._giver.write(self._slot(step), _Head(step, before, is_left_out, 0, 0))
        self._pass(self._copy, step)

    def counts(self, done: int) -> None:
        """Note that so many steps of the run have happened."""
        if self._copy is not None and not self._every and self._copy.done == done - 1:
            self._copy.count(done)

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
