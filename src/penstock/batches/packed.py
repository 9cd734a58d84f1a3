"""Packed: rows of one length, each of several whole documents, and little padding.

    documents  aaaa  bbb  cccccc  dd         rows of 8   c c c c c c d d
                                                         a a a a b b b .
    document_ids   1 1 1 1 1 1 2 2           position_ids   0 1 2 3 4 5 0 1
                   1 1 1 1 2 2 2 0                          0 1 2 3 0 1 2 0

Which lengths stand together in a row is found once, by best fit over the longest first, so an
epoch has always as many rows.  Which documents of those lengths they are, and in which order the
rows come, is drawn in each epoch anew.

All rows have one shape, so a step is traced once, and any plan runs it.

Source: "Efficient Sequence Packing without Cross-contamination", arXiv:2107.02027 (lengths, and
not documents, are packed).
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, Literal, cast, final, get_args

import torch
from torch import Tensor

from penstock.batches.by_number import order_of, picked
from penstock.batches.how import Batching, named, own_random, same, seed_all
from penstock.batches.lengths import IGNORED, Length, Pad, as_row, lengths_of, pad_of
from penstock.batches.reads import ReadNumbers
from penstock.errors import JobError
from penstock.job import Batch

Rest = Literal["drop", "pad"]
TOKENS, TARGETS = "input_ids", "targets"
DOCUMENTS, POSITIONS = "document_ids", "position_ids"


@final
@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Micro-batches of rows into which documents are packed.

    length:  places of a row.
    rows:    the lengths of the documents of each row.
    own:     the length of each document.
    """

    step_micro_batches: ClassVar[int] = 1
    dataset: Any = field(repr=False)
    how: Batching
    shuffle: bool
    length: int
    rows: tuple[tuple[int, ...], ...] = field(repr=False)
    own: tuple[int, ...] = field(repr=False)
    pad: Pad
    first: Mapping[str, float]

    def __len__(self) -> int:
        """Return how many micro-batches an epoch has."""
        whole, rest = divmod(len(self.rows), self.how.batch_size)
        return whole + (self.how.last == "pad" and rest > 0)

    def __call__(self, start: int) -> Iterator[Batch]:
        return self.picked(ReadNumbers.all_from(start))

    def picked(self, reads: ReadNumbers) -> Iterator[Batch]:
        """Return the micro-batches of these numbers, in this order."""
        return picked(self, reads)

    @property
    def filled(self) -> float:
        """Return the part of all places that holds tokens."""
        return sum(self.own) / (len(self.rows) * self.length)

    def documents(self, number: int) -> list[list[int]]:
        """Return the numbers of the documents of each row of micro-batch `number`."""
        epoch, at = divmod(number, len(self))
        size = self.how.batch_size
        rows = _rows_of(self, epoch)[at * size : (at + 1) * size]
        return [*rows, *([] for _ in range(size - len(rows)))]

    def indices(self, number: int) -> list[int]:
        """Return the numbers of the documents of micro-batch `number`."""
        return [index for row in self.documents(number) for index in row]

    def batch(self, number: int) -> Batch:
        """Return micro-batch `number`: tensors [rows, length] by the names of their fields."""
        rows = self.documents(number)
        read: list[list[dict[str, Tensor]]] = []
        with own_random():
            for place, documents in enumerate(rows):
                row: list[dict[str, Tensor]] = []
                for at, index in enumerate(documents):
                    seed_all(self.how.seed, "sample", number, place, at)
                    row.append(self._fields(self.dataset[index], index))
                read.append(row)
        shown = next(row[0] for row in read if row)
        made = {name: [self._row(name, row, like) for row in read] for name, like in shown.items()}
        return {name: torch.stack(values) for name, values in made.items()}

    def _fields(self, sample: Any, index: int) -> dict[str, Tensor]:
        """Return the fields of a document, each as long as it.

        Raises:   JobError: one of them is not.
        """
        if isinstance(sample, Mapping):
            named_fields = cast("Mapping[str, Any]", sample)
            fields = {name: as_row(value) for name, value in named_fields.items()}
        else:
            tokens = as_row(sample)
            ends = tokens.new_full((1,), IGNORED)
            fields = {TOKENS: tokens, TARGETS: torch.cat([tokens[1:], ends])}
        count = self.own[index]
        for name, row in fields.items():
            if row.dim() != 1 or len(row) != count:
                message = f"{name} of sample {index} has the shape {list(row.shape)}, the sample"
                hint = "give fields with one place for each token, and nothing else"
                raise JobError(f"{message} {count} tokens", hint=hint)
            if name in self.first:
                fields[name] = torch.cat([row.new_full((1,), self.first[name]), row[1:]])
        fields[DOCUMENTS] = torch.ones(count, dtype=torch.long)
        fields[POSITIONS] = torch.arange(count)
        return fields

    def _row(self, name: str, row: list[dict[str, Tensor]], like: Tensor) -> Tensor:
        """Return one row of a field; documents are numbered from 1, and 0 is padding."""
        value = 0 if name in (DOCUMENTS, POSITIONS) else pad_of(self.pad, name)
        whole, at = like.new_full((self.length,), value), 0
        for number, fields in enumerate(row, 1):
            values = fields[name] * number if name == DOCUMENTS else fields[name]
            whole[at : at + len(values)] = values
            at += len(values)
        return whole


@lru_cache(maxsize=4)
def _rows_of(data: Packed, epoch: int) -> list[list[int]]:
    """Return the documents of each row of an epoch, in the order in which the rows come."""
    by_length: dict[int, list[int]] = {}
    for number, own in enumerate(data.own):
        by_length.setdefault(own, []).append(number)
    if data.shuffle:
        for own, members in by_length.items():
            order = order_of(len(members), data.how.seed, "documents", epoch, own)
            by_length[own] = [members[place] for place in order]
    queues = {own: iter(members) for own, members in by_length.items()}
    rows = [[next(queues[own]) for own in row] for row in data.rows]
    if not data.shuffle:
        return rows
    return [rows[at] for at in order_of(len(rows), data.how.seed, "rows", epoch)]


def packed(  # noqa: PLR0913 - as a DataLoader is told
    dataset: Any,
    length: int,
    rows: int = 1,
    *,
    lengths: Length | Sequence[int] | None = None,
    pad: Pad = 0,
    first: Mapping[str, float] | None = None,
    shuffle: bool = True,
    seed: int = 0,
    workers: int = 0,
    last: Rest = "drop",
) -> Packed:
    """Return data for a Job: whole documents in rows of one length, to be kept apart by a mask.

    A micro-batch is a dict of tensors [rows, length]: the fields of the samples one after the
    other, `document_ids` (from 1; 0 is padding) and `position_ids` (from 0 in each document).

    dataset:  indexed samples: a document's tokens, which become `input_ids` and, moved by one,
              `targets`, with -100 where a document ends; or a dict of fields as long as it.
    length:   places of a row.
    rows:     of a micro-batch.
    lengths:  of the documents: a function of one, or a number for each; None: of the first field.
    pad:      in places without a document: a number, or numbers by field.  "labels" and
              "targets" have -100 there.
    first:    what stands at the first place of each document instead, by field: {"labels": -100}
              for a model that moves labels by one itself, as those of transformers do.
    shuffle:  the documents and the rows, in each epoch anew.
    last:     rows left over at the end of an epoch are dropped, or filled up with empty ones.

    Raises:   JobError: an invalid argument; a document is longer than a row, or empty.
    """
    own = lengths_of(dataset, lengths, seed)
    for number, count in enumerate(own):
        if not 0 < count <= length:
            hint = f"raise length, or cut it into pieces of {length} in the dataset"
            raise JobError(f"sample {number} has {count} tokens, a row {length}", hint=hint)
    if last not in get_args(Rest):
        raise JobError(f"last is {last!r}", hint='rows that are left over: "drop" or "pad"')
    how = Batching(rows, seed, workers, same, last)
    together = fitted(own, length)
    if len(together) < rows and last == "drop":
        message = f"{named(dataset)} fills {len(together)} rows; a micro-batch has {rows}"
        raise JobError(message, hint=f"set rows to {len(together)} or less")
    return Packed(dataset, how, shuffle, length, together, tuple(own), pad, first or {})


def fitted(lengths: Sequence[int], room: int) -> tuple[tuple[int, ...], ...]:
    """Return lengths in rows of `room` places, by best fit over the longest first.

    Never more than 11/9 of the fewest rows that can be, plus one.
    """
    rows: list[list[int]] = []
    free: list[int] = []  # the rooms that rows have left, sorted
    of: dict[int, list[int]] = {}  # room left -> those rows
    for own, count in sorted(Counter(lengths).items(), reverse=True):
        for _ in range(count):
            at = bisect_left(free, own)
            if at == len(free):
                left, row = room, len(rows)
                rows.append([])
            else:
                left = free[at]
                row = of[left].pop()
                if not of[left]:
                    del free[at], of[left]
            rows[row].append(own)
            left -= own
            if left:
                if left not in of:
                    insort(free, left)
                of.setdefault(left, []).append(row)
    return tuple(map(tuple, rows))


def document_mask(document_ids: Tensor, *, causal: bool = True) -> Tensor:
    """Return which places attend to which: [rows, 1, length, length], True where one does.

    Places of one document; of these only those before where it is causal.  Padding attends to
    padding, so that no place attends to nothing.  It is what `scaled_dot_product_attention` takes
    as `attn_mask`, over all heads.
    """
    mask = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    if not causal:
        return mask
    places = torch.arange(document_ids.shape[-1], device=document_ids.device)
    return mask & (places[:, None] >= places[None, :])
