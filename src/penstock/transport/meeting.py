"""Meeting: ranks of one host that wait for each other, gather bytes and sum tensors.

Each member has a count of arrivals and two regions, used in turn.  A member that writes into a
region a second time has met all others since they read what it held the first
time, so no second barrier guards it.

An all-reduce goes chunk by chunk; part i of a chunk belongs to member i:

    copy the parts of others into my region | meet | add my part of all regions, in the
    order of the ranks, into my region and my tensor | meet | copy their parts from theirs

Where each member keeps its own part only, of which it may have more or less than others, that ends
before the second meeting.  A gather is the rest: my part into my region | meet | copy the others'.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import final

import torch
from torch import Tensor

from penstock.transport.roster import Roster
from penstock.transport.segment import (
    FIRST_COUNT,
    LINE_WORDS,
    WORD_MASK,
    SharedSegment,
    wake,
)
from penstock.transport.transport import TransportError

_REGION_BYTES = 2**21  # 28 MiB over 2 ranks: 6.0 ms, against 6.4 with half and 6.6 with twice
_WHOLE_BYTES = 2**14  # tensors up to this size are added in one piece
_COUNT, _SUMMAND = 0, 1  # words of a member's line; a summand takes two words, for each turn


@final
class Meeting:
    """The members `ranks`, seen from one of them; all build it at their first meeting."""

    def __init__(self, roster: Roster, ranks: tuple[int, ...]) -> None:
        self._roster = roster
        self._ranks = ranks
        self._me = ranks.index(roster.rank)
        self._count = FIRST_COUNT
        self._turn = 0
        self._lines = [self._line(member) for member in range(len(ranks))]
        num_lines = 1 + len(ranks) + -(-len(ranks) // LINE_WORDS)
        self._segment = roster.share(
            f"meeting of {ranks}",
            num_lines * LINE_WORDS + 2 * len(ranks) * _REGION_BYTES // 4,
            maker=min(ranks),
            agreed=f"regions of {_REGION_BYTES} bytes",
            prepare=self._zero_counts,
        )
        self._sleeps = LINE_WORDS * (1 + len(ranks))  # a word for each member
        self._sleepers = self._segment.words[self._sleeps : self._sleeps + len(ranks)]
        self._nobody = bytes(4 * len(ranks))
        first = num_lines * LINE_WORDS * 4
        places = [first + _REGION_BYTES * place for place in range(2 * len(ranks))]
        # the byte at which each member's region starts, by turn
        self._starts = places[: len(ranks)], places[len(ranks) :]
        self._regions: dict[torch.dtype, list[list[Tensor]]] = {}
        self._small: dict[tuple[torch.dtype, int, int], list[Tensor]] = {}  # what is added whole
        self._fence = threading.Lock()

    def _zero_counts(self, segment: SharedSegment) -> None:
        for member in range(len(self._ranks)):
            segment.words[self._line(member) + _COUNT] = FIRST_COUNT

    def _line(self, member: int) -> int:
        return LINE_WORDS * (1 + member)

    def meet(self) -> None:
        """Return once all members have called it as often as this one.

        Raises:   TransportError: a rank failed or died, or a member left.
        """
        if self._roster.words[self._roster.failed_word]:
            self._roster.look()
        words, before = self._segment.words, self._count
        self._count = (before + 1) & WORD_MASK
        mine = self._line(self._me) + _COUNT
        words[mine] = self._count
        with self._fence:  # see segment.py
            pass
        if self._sleepers.tobytes() != self._nobody:
            wake(self._segment.address_of(mine))
        for member, rank in enumerate(self._ranks):
            word = self._line(member) + _COUNT
            if words[word] == before:
                what = f"rank {self._roster.rank} waits for it among {self._ranks}"
                sleeps = self._sleeps + self._me
                self._roster.wait_while(
                    self._segment, word, before, sleeps=sleeps, peer=rank, what=what
                )

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Return the payload of every member, in the order of the ranks."""
        data = struct.pack("<Q", len(payload)) + payload
        memory, gathered = self._segment.memory, [bytearray() for _ in self._ranks]
        sizes, at = [1], 0
        while at < max(sizes):
            starts = self._starts[self._turn]
            piece = data[at : at + _REGION_BYTES]
            memory[starts[self._me] : starts[self._me] + len(piece)] = piece
            self.meet()
            if at == 0:
                sizes = [8 + struct.unpack_from("<Q", memory, start)[0] for start in starts]
            for start, size, bytes_so_far in zip(starts, sizes, gathered, strict=True):
                bytes_so_far += memory[start : start + max(0, min(_REGION_BYTES, size - at))]
            at += _REGION_BYTES
            self._turn ^= 1
        return [bytes(data[8:]) for data in gathered]

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace `tensor` by the sum over the members, added in the order of the ranks."""
        if len(self._ranks) == 1:
            return
        flat = tensor.detach().contiguous().view(-1)
        if flat.numel() * flat.itemsize <= _WHOLE_BYTES:
            self._reduce_whole(flat)
        else:
            step = _REGION_BYTES // flat.itemsize
            for at in range(0, flat.numel(), step):
                self._reduce_parts(flat[at : at + step], None if at else flat)
        if not tensor.is_contiguous():
            tensor.detach().copy_(flat.view(tensor.shape))

    def _reduce_whole(self, flat: Tensor) -> None:
        """Add all of a small tensor on every member, which takes one meeting instead of two."""
        key = flat.dtype, flat.numel(), self._turn
        regions = self._small.get(key)
        if regions is None:
            regions = [region[: flat.numel()] for region in self._regions_of(flat.dtype)]
            self._small[key] = regions
        regions[self._me].copy_(flat)
        self._meet_about(flat)
        torch.add(regions[0], regions[1], out=flat)
        for region in regions[2:]:
            flat += region
        self._turn ^= 1

    def _reduce_parts(self, flat: Tensor, about: Tensor | None) -> None:
        num, me = len(self._ranks), self._me
        cuts = [flat.numel() * member // num for member in range(num + 1)]
        parts = [slice(cuts[member], cuts[member + 1]) for member in range(num)]
        regions = self._regions_of(flat.dtype)
        regions[me][: cuts[me]].copy_(flat[: cuts[me]])
        regions[me][cuts[me + 1] : flat.numel()].copy_(flat[cuts[me + 1] :])
        self._meet_about(about)
        mine = flat[parts[me]]
        operands = [mine if member == me else regions[member][parts[me]] for member in range(num)]
        total = torch.add(operands[0], operands[1], out=regions[me][parts[me]])
        for operand in operands[2:]:
            total += operand
        mine.copy_(total)
        self.meet()
        for member, part in enumerate(parts):
            if member != me:
                flat[part].copy_(regions[member][part])
        self._turn ^= 1

    def gather_parts(self, whole: Tensor, cuts: Sequence[int]) -> None:
        """Fill in the parts of all members, each of which brings its own."""
        step = _REGION_BYTES // whole.itemsize
        for at in range(0, _longest(cuts), step):
            parts = [slice(min(a + at, b), min(a + at + step, b)) for a, b in pairwise(cuts)]
            regions = self._regions_of(whole.dtype)
            mine = whole[parts[self._me]]
            regions[self._me][: len(mine)].copy_(mine)
            self._meet_about(None if at else whole)
            for member, part in enumerate(parts):
                if member != self._me:
                    whole[part].copy_(regions[member][: part.stop - part.start])
            self._turn ^= 1

    def scatter_sums(self, whole: Tensor, cuts: Sequence[int]) -> None:
        """Replace the part of this member by its sum over all, in the order of the ranks."""
        num, me = len(self._ranks), self._me
        step = _REGION_BYTES // whole.itemsize // num
        for at in range(0, _longest(cuts), step):
            parts = [slice(min(a + at, b), min(a + at + step, b)) for a, b in pairwise(cuts)]
            regions = self._regions_of(whole.dtype)
            for member, part in enumerate(parts):
                if member != me:
                    first = member * step
                    regions[me][first : first + part.stop - part.start].copy_(whole[part])
            self._meet_about(None if at else whole)
            mine = whole[parts[me]]
            first, end = me * step, me * step + len(mine)
            operands = [mine if k == me else regions[k][first:end] for k in range(num)]
            if me == 0:
                for operand in operands[1:]:
                    mine += operand
            else:
                total = torch.add(operands[0], operands[1])
                for operand in operands[2:]:
                    total += operand
                mine.copy_(total)
            self._turn ^= 1

    def swap(self, gives: Sequence[Tensor], takes: Sequence[Tensor]) -> None:
        """Give each other member a tensor and take one from each, piece by piece.

        Members with less than others, or nothing, meet as often as the others do.
        """
        given, taken = ([tensor.view(torch.uint8) for tensor in row] for row in (gives, takes))
        size = _REGION_BYTES // len(self._ranks)
        places = [slice(size * member, size * (member + 1)) for member in range(len(self._ranks))]
        others = [member for member in range(len(self._ranks)) if member != self._me]
        own = max(len(row[member]) for row in (given, taken) for member in others)
        words, pieces, at = self._segment.words, 1, 0
        while at < pieces:
            regions, first = self._regions_of(torch.uint8), at * size
            for member in others:
                piece = given[member][first : first + size]
                regions[self._me][places[member]][: len(piece)].copy_(piece)
            word = _SUMMAND + 2 * self._turn
            words[self._line(self._me) + word] = -(-own // size)
            self.meet()
            pieces = max(words[line + word] for line in self._lines)
            for member in others:
                piece = taken[member][first : first + size]
                piece.copy_(regions[member][places[self._me]][: len(piece)])
            self._turn, at = self._turn ^ 1, at + 1

    def _meet_about(self, whole: Tensor | None) -> None:
        """Meet, and see that all members sum as many numbers as this one, of as many bytes."""
        if whole is None:
            self.meet()
            return
        words, first = self._segment.words, _SUMMAND + 2 * self._turn
        line = self._line(self._me) + first
        words[line], words[line + 1] = whole.numel() & WORD_MASK, whole.itemsize
        self.meet()
        own = words[line], words[line + 1]
        places = [at + first for at in self._lines]
        if any((words[at], words[at + 1]) != own for at in places):
            self._refuse([f"{words[at]} numbers of {words[at + 1]} bytes" for at in places])

    def _refuse(self, brought: Sequence[str]) -> None:
        """Raise for the first member that brings something else than the first one does."""
        first = self._ranks[0]
        rank, text = next(row for row in zip(self._ranks, brought) if row[1] != brought[0])  # noqa: B905
        raise TransportError(rank, f"sums {text}, rank {first} sums {brought[0]}")

    def _regions_of(self, dtype: torch.dtype) -> list[Tensor]:
        """Return the region of each member whose turn it is."""
        if dtype not in self._regions:
            self._regions[dtype] = [
                [self._segment.bytes[start : start + _REGION_BYTES].view(dtype) for start in starts]
                for starts in self._starts
            ]
        return self._regions[dtype][self._turn]


def _longest(cuts: Sequence[int]) -> int:
    """Return the numbers of the longest part."""
    return max(end - start for start, end in pairwise(cuts))
