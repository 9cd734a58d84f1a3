"""Shards: what one rank keeps of a stage that its replicas divide, and how it is made whole.

The whole weights, and the whole gradients, of a stage lie in flat tensors of which every parameter
is a view.  Here these have memory only while they are needed:

    weights     from `make_room` to `drop`; `gather` fills them in, beside the thread
    gradients   from `begin` to `end`; `scatter` leaves their sum over all replicas in the shard,
                where it has memory from `keep` to `forget`, behind the update

What stays is one part of the weights, and the optimizer's state of it.  Parts are cut at cache
lines, not at parameters, so that they are as large as the plan says: all equal, or each as large as
its rank has memory for.  A parameter may lie in several, and a rank may keep nothing.

Where the part is in far memory, it is copied from there and to there, and has memory near only
while it is updated: from `reload` to `offload`.  One rank alone may keep all of a stage so.

Source: ZeRO, arXiv:1910.02054, stage 3; flat parameters: FSDP, arXiv:2304.11277; parts of unlike
size: Cephalo, arXiv:2411.01075.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.device import of
from penstock.errors import JobError
from penstock.far import FarMemory, FarRoom
from penstock.graph.composed import kind_of, parts_of
from penstock.graph.whole_optimizer import whole_optimizer
from penstock.job import Job
from penstock.state.copies import Move
from penstock.state.flat import Flat, all_views, count_of
from penstock.state.unseen_sums import UnseenSums
from penstock.transport.narrow_sums import scatter_over
from penstock.transport.transport import Transport

_ALIGN_BYTES = 64  # a cache line
_BY_ELEMENT = {
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop",
    "Rprop", "SGD",
}  # of torch's optimizers, those that update every number of a parameter by itself  # fmt: skip


class Sharers(NamedTuple):
    """The ranks that divide a stage, this one among them, and how they reach each other.

    parts:   how much each of them keeps, beside the others.
    job:     says in which dtype their gradients travel.
    is_far:  whether each has its part in far memory; it may then be one rank, with all of it.
    """

    transport: Transport
    ranks: tuple[int, ...]
    parts: tuple[int, ...]
    job: Job
    is_far: bool = False

    @property
    def place(self) -> int:
        """Return the place of this rank."""
        return self.ranks.index(self.transport.rank)


class _FarPart(NamedTuple):
    """The part of a rank in far memory: flat tensors, and by node views of them.

    room:    its blocks: weights, then gradients.
    """

    room: FarRoom
    kept: list[Tensor]
    sums: list[Tensor]
    parameters: dict[int, Tensor]
    gradients: dict[int, Tensor]


class Slice(NamedTuple):
    """Where the part of a parameter that lies in this rank's shard begins, and its shape whole."""

    start: int
    shape: tuple[int, ...]


class StageShard:
    """This rank's part of the trainable parameters of one stage.

    parameters:  by node, the numbers of each that lie here, of one dimension.
    gradients:   theirs, likewise.
    reads:       by node, the whole parameters as a step reads them, while they have memory.
    views:       by node, the whole gradients, likewise.
    saved:       by node, the numbers of each that lie here, wherever they are between updates.
    """

    def __init__(
        self,
        layouts: Sequence[Flat],
        flats: Sequence[Tensor],
        whole: Sequence[Tensor],
        sharers: Sharers,
    ) -> None:
        """Keep a part of `flats`, which have no memory from now on; `whole` is what is read."""
        self.sharers, self.whole, self.is_open = sharers, whole, False
        self.places: list[dict[int, slice]] = []  # of parameters, in what is in far memory
        self.unseen: UnseenSums | None = None  # of sums in far memory that nobody can look at
        self.cuts = [cuts_of(layout, sharers.parts) for layout in layouts]
        at = sharers.place
        self.mine = [slice(cuts[at], cuts[at + 1]) for cuts in self.cuts]
        self.kept = [flat[mine].clone() for flat, mine in zip(flats, self.mine, strict=True)]
        self.reads = all_views(layouts, whole)  # none can be made later, of what has no memory
        for flat in (*flats, *whole):
            _free(flat)  # before others are made: the stage is here at most twice
        self.sums, self.views = _without_memory(layouts)  # whole gradients
        self.kept_sums = [torch.zeros_like(kept) for kept in self.kept]
        self.slices: dict[int, Slice] = {}
        self.parameters: dict[int, nn.Parameter] = {}
        self.gradients: dict[int, Tensor] = {}
        for rows in zip(layouts, self.mine, self.kept, self.kept_sums, strict=True):
            self._add_slices(*rows)
        self.saved = {node: value.detach() for node, value in self.parameters.items()}
        self.far = self._go_far(layouts) if sharers.is_far else None
        for flat in self.kept_sums:
            _free(flat)

    def _add_slices(self, layout: Flat, mine: slice, kept: Tensor, summed: Tensor) -> None:
        """Note which parameters of a layout lie, in part or whole, in the part of this rank."""
        for node, start, shape in zip(layout.nodes, layout.starts, layout.shapes, strict=True):
            low, high = max(start, mine.start), min(start + count_of(shape), mine.stop)
            if low < high:
                own = slice(low - mine.start, high - mine.start)
                self.slices[node] = Slice(low - start, shape)
                self.parameters[node] = nn.Parameter(kept[own])
                self.gradients[node] = summed[own]

    def _go_far(self, layouts: Sequence[Flat]) -> _FarPart:
        """Copy the part to far memory, and free it."""
        flats = (*self.kept, *self.kept_sums)
        device = next((flat.device for flat in flats), torch.device("cpu"))
        room = FarMemory(device).room([flat.nbytes for flat in flats])
        blocks = zip(room.blocks, flats, strict=True)
        there = [block.view(flat.dtype) for block, flat in blocks]
        far = _FarPart(room, there[: len(self.kept)], there[len(self.kept) :], {}, {})
        self.places = list(map(self._places_in, layouts, self.mine))
        for there, own, summed in zip(self.places, far.kept, far.sums, strict=True):
            for node, part in there.items():
                far.parameters[node], far.gradients[node] = own[part], summed[part]
        self.saved = far.parameters
        if of(device).is_queued and self.sharers.job.awaits_all:
            self.unseen = UnseenSums(self.kept_sums, self.places)
        self._copy_out(far)
        for flat in self.kept:
            _free(flat)
        return far

    def _places_in(self, layout: Flat, mine: slice) -> dict[int, slice]:
        """Return by node where the parameters of a layout lie in the part of this rank."""
        places: dict[int, slice] = {}
        for node, start in zip(layout.nodes, layout.starts, strict=True):
            if node in self.slices:
                first = start + self.slices[node].start - mine.start
                places[node] = slice(first, first + self.parameters[node].numel())
        return places

    # -- the part of this rank, in far memory ----------------------------------------------------

    def reload(self) -> Move:
        """Return the move of weights and summed gradients from far memory; room is made here."""
        far = self._far_part()
        flats = (*self.kept, *self.kept_sums)
        for flat in flats:
            _fill(flat)
        nears = {number: flat.view(torch.uint8) for number, flat in enumerate(flats)}
        return Move(lambda: far.room.take(nears), self._came)

    def _came(self) -> None:
        """Do to the gradients that are back what was to be done to them meanwhile."""
        if self.unseen is not None:
            self.unseen.came(self.kept_sums)

    def offload(self) -> Move:
        """Return the move of the weights to far memory."""
        far = self._far_part()

        def end() -> None:
            for flat in self.kept:
                _free(flat)

        return Move(lambda: self._copy_out(far), end)

    def _far_part(self) -> _FarPart:
        assert self.far is not None, "a program copies only what a plan says"
        return self.far

    def _copy_out(self, far: _FarPart) -> None:
        far.room.put({number: flat.view(torch.uint8) for number, flat in enumerate(self.kept)})

    # -- weights ---------------------------------------------------------------------------------

    def make_room(self) -> None:
        """Give the whole weights memory."""
        for flat in self.whole:
            _fill(flat)

    def gather(self) -> None:
        """Make the weights whole."""
        transport, ranks = self.sharers.transport, self.sharers.ranks
        rows = zip(self.whole, self.mine, self.kept, self.cuts, strict=True)
        for number, (flat, mine, kept, cuts) in enumerate(rows):
            if self.far is None or flat.dtype != kept.dtype:
                flat[mine].copy_(kept if self.far is None else self.far.kept[number])
            else:
                self.far.room.take({number: flat[mine].view(torch.uint8)})
            if len(ranks) > 1:
                transport.all_gather(flat, cuts, ranks)

    def drop(self) -> None:
        """Free all weights but the own part."""
        for flat in self.whole:
            _free(flat)

    # -- gradients -------------------------------------------------------------------------------

    def begin(self) -> None:
        """Give the whole gradients of a step memory, all zeros; nothing where they have it."""
        if not self.is_open:
            for flat in self.sums:
                _fill(flat)
                flat.zero_()
        self.is_open = True

    def keep(self) -> None:
        """Give the gradients of the own part memory."""
        if self.far is None:
            for kept in self.kept_sums:
                _fill(kept)

    def forget(self) -> None:
        """Free the gradients of the own part, once it is updated."""
        for kept in self.kept_sums:
            _free(kept)

    def scatter(self, watch: Callable[[int, Tensor], None] | None = None) -> None:
        """Sum the gradients over all replicas, each the part that it keeps.

        watch:  looks at the part of each flat tensor before it leaves for far memory.
        """
        transport, ranks, _, job, _ = self.sharers
        rows = zip(self.sums, self.mine, self.kept_sums, self.cuts, strict=True)
        for number, (flat, mine, kept, cuts) in enumerate(rows):
            if len(ranks) > 1:
                scatter_over(transport, flat, cuts, ranks, job)
            if self.far is None:
                kept.copy_(flat[mine])
            else:
                if self.unseen is not None:
                    self.unseen.leave(number, flat[mine])
                if watch is not None:
                    watch(number, flat[mine])
                self.far.room.put({len(self.kept) + number: flat[mine].view(torch.uint8)})

    @property
    def summed(self) -> list[Tensor]:
        """Return where the sums of the own part are, until they are updated with."""
        return self.kept_sums if self.far is None else self.far.sums

    @property
    def summed_by_node(self) -> dict[int, Tensor]:
        """Return the same by node."""
        return self.gradients if self.far is None else self.far.gradients

    def end(self) -> None:
        """Free all gradients but those of the own part."""
        for flat in self.sums:
            _free(flat)
        self.is_open = False

    @property
    def far_memory(self) -> FarMemory | None:
        """Return the far memory in which its part is; None: it is near."""
        return None if self.far is None else self.far.room.memory

    def held(self) -> list[Tensor]:
        """Return all tensors that are kept, those that have no memory now included."""
        return [*self.kept, *self.kept_sums, *self.sums]


def updates_by_number(job: Job, model: nn.Module) -> bool:
    """Return whether the job's optimizer is known to update each number by itself."""
    whole = whole_optimizer(job, model)
    return _is_known(whole.optimizer, is_plain=whole.is_plain)


def _is_known(optimizer: Optimizer, *, is_plain: bool) -> bool:
    kinds = [type(part) for part in parts_of(optimizer)]
    known = (k.__name__ in _BY_ELEMENT or getattr(k, "penstock_plain", False) for k in kinds)
    return is_plain and all(known)


def check_optimizer(optimizer: Optimizer, *, is_plain: bool) -> None:
    """Raise where an update of a part of a parameter is not known to be a part of the update.

    Raises:   JobError.
    """
    if not _is_known(optimizer, is_plain=is_plain):
        name = kind_of(optimizer)
        message = f"the job's optimizer, {name}, is not known to update each number by itself"
        hint = "make the plan without shards and slices, or use one such as AdamW"
        raise JobError(message, hint=hint)


def cuts_of(layout: Flat, parts: Sequence[int]) -> tuple[int, ...]:
    """Return where the parts of a flat tensor begin, and where the last one ends.

    They are as large as `parts`, one beside the other, but for a cache line; of few numbers the
    last ones may have none.
    """
    step = _ALIGN_BYTES // layout.dtype.itemsize
    ends = (-(-layout.size * end // (sum(parts) * step)) * step for end in accumulate(parts))
    return (0, *(min(end, layout.size) for end in ends))


def _without_memory(layouts: Sequence[Flat]) -> tuple[list[Tensor], dict[int, Tensor]]:
    """Return a flat tensor for each layout, and its parts by node; each has no memory yet."""
    flats: list[Tensor] = []
    views: dict[int, Tensor] = {}
    for layout in layouts:
        flats.append(layout.new())
        views |= layout.views(flats[-1])
        _free(flats[-1])
    return flats, views


def _free(flat: Tensor) -> None:
    flat.untyped_storage().resize_(0)


def _fill(flat: Tensor) -> None:
    flat.untyped_storage().resize_(flat.numel() * flat.itemsize)
