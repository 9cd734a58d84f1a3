"""Batch: what a micro-batch must be to fit a traced step.

A trace has no guards: it would take a batch of another shape, or another number beside the
tensors, and silently give a wrong result.  So every batch is compared with the traced one.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from penstock.errors import BatchMisfitError, GraphError
from penstock.graph.answers import Answers
from penstock.graph.contents import as_tensor, attributes_of, flatten
from penstock.graph.shared_memory_views import SharedMemory, describe_overlaps, overlaps_with
from penstock.graph.unread import AnyKey, UnlikeValues, any_key

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class TensorKey(NamedTuple):
    """What of a tensor is fixed by the trace."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...]

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


LeafKey: TypeAlias = "TensorKey | AnyKey | str"  # a plain value that is read is kept as text
Take: TypeAlias = Callable[[Any, Callable[[Any], None]], bool]


@dataclass(frozen=True, slots=True, eq=False)
class BatchKey:
    """Structure and leaves of the batch that a step was traced for.

    written:   places of the leaves that the loss writes into.
    overlaps:  which leaves have elements in common with these; otherwise that does not matter.
    answers:   what the step has asked of their values.
    division:  of the micro-batch of which this is a part; None: it is a whole one.
    """

    spec: Any
    leaves: tuple[LeafKey, ...]
    written: tuple[int, ...] = ()
    overlaps: tuple[SharedMemory, ...] = ()
    answers: Answers | None = None
    division: "Division | None" = None
    _take: "Take | None" = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_take", _taker(self.spec, iter(self.leaves)))

    def leaves_of(self, batch: object) -> list[Any]:
        """Return the leaves of a batch that fits, laid out as they were traced.

        Raises:   BatchMisfitError: another structure, shape, dtype or plain value; other leaves
                  overlap; it answers otherwise than the traced one.
        """
        taken: list[Any] = []
        if self._take is not None and self._take(batch, taken.append):
            return self._checked(taken)
        leaves, spec = flatten(batch)
        free = {at for at, key in enumerate(self.leaves) if isinstance(key, AnyKey)}
        found = keys_of(leaves, free) if spec == self.spec else None
        if found is None or any(map(_differ, found, self.leaves)):
            raise self._misfit(found or (), spec)
        pairs = zip(self._checked(leaves), self.leaves, found, strict=True)
        return [
            with_strides(leaf, k.strides) if k != own and isinstance(k, TensorKey) else leaf
            for leaf, k, own in pairs
        ]

    def _checked(self, leaves: list[Any]) -> list[Any]:
        if self.answers is not None:
            self.answers.check(leaves)
        return self._overlapping(leaves)

    def _overlapping(self, leaves: list[Any]) -> list[Any]:
        """Return the leaves, if they overlap where the loss writes as those of the trace do."""
        if self.written and (found := overlaps_with(self.written, leaves)) != self.overlaps:
            message = (
                "the loss writes into the batch, and in this one "
                f"{describe_overlaps(found)}; the step was traced for one where "
                f"{describe_overlaps(self.overlaps)}"
            )
            raise BatchMisfitError(message, hint="let the loss write into a clone()")
        return leaves

    def _misfit(self, found: Sequence[LeafKey], spec: Any) -> BatchMisfitError:
        hint = "let `data` yield micro-batches of one shape (drop_last=True, or pad the last one)"
        if spec != self.spec:
            message = f"this batch is {spec}; the step was traced for {self.spec}"
            return BatchMisfitError(message, hint="let `data` yield batches of one structure")
        rows = enumerate(zip(found, self.leaves, strict=True))
        wrong = [(i, *pair) for i, pair in rows if _differ(*pair)]
        if not all(isinstance(key, TensorKey) for _, key, _ in wrong):
            hint = "all but tensors are fixed when the step is traced: make it a tensor"
        parts = [f"{got} as leaf {i}, the step was traced for {key}" for i, got, key in wrong]
        return BatchMisfitError(f"this batch holds {'; '.join(parts)}", hint=hint)


class Division(NamedTuple):
    """How a micro-batch is divided: into parts, each with some of its samples.

    parts:  how many; a part has as many rows as any other.
    rows:   the leaves of which a part has its rows, by number.
    whole:  those that it has whole, too.
    key:    what a micro-batch has to be.
    """

    parts: int
    rows: tuple[int, ...]
    whole: tuple[int, ...]
    key: BatchKey

    def part_of(self, leaves: Sequence[Any], number: int) -> tuple[Tensor, ...]:
        """Return a part of a micro-batch, by its number: rows, whole leaves, the number."""
        found: list[Tensor] = []
        for at in self.rows:
            size = len(leaves[at]) // self.parts
            found.append(leaves[at][number * size : (number + 1) * size])
        return (*found, *(leaves[at] for at in self.whole), torch.tensor([number]))

    def part_key(self) -> BatchKey:
        """Return the key that a part of the batch has to fit."""
        leaves = [
            torch.empty_strided(leaf.shape, leaf.strides, dtype=leaf.dtype, device="meta")
            if isinstance(leaf, TensorKey)
            else leaf
            for leaf in self.key.leaves
        ]
        return replace(key_of(self.part_of(leaves, 0)), division=self)


def _taker(spec: Any, keys: Iterator[LeafKey]) -> Take | None:
    """Return a function that takes the leaves out of a batch, and says whether the batch fits.

    It is an order of magnitude faster than flattening, since every step checks a batch.
    None: the batch is not made of tensors in tuples, lists and dicts.
    """
    if spec.is_leaf():
        key = next(keys)
        if isinstance(key, AnyKey):
            return partial(_take_any, key)
        return None if isinstance(key, str) else _tensor_taker(key)
    parts = [_taker(part, keys) for part in spec.children()]
    takers = [part for part in parts if part is not None]
    if spec.type not in (tuple, list, dict) or len(takers) < len(parts):
        return None
    kind = spec.type
    names: list[Any] = spec.context if kind is dict else list(range(len(takers)))
    pairs = list(zip(names, takers, strict=True))

    def take(batch: Any, add: Callable[[Any], None]) -> bool:
        if batch.__class__ is not kind or len(batch) != len(pairs):
            return False
        if kind is dict and list(batch) != names:
            return False
        return all(taker(batch[name], add) for name, taker in pairs)

    return take


def _tensor_taker(key: TensorKey) -> Take:
    shape, dtype, strides = torch.Size(key.shape), key.dtype, key.strides

    def take(leaf: Any, add: Callable[[Any], None]) -> bool:
        leaf = leaf if isinstance(leaf, Tensor) else as_tensor(leaf)
        if not isinstance(leaf, Tensor) or leaf.shape != shape or attributes_of(leaf):
            return False
        add(leaf)
        return leaf.dtype == dtype and leaf.stride() == strides

    return take


def _take_any(key: AnyKey, leaf: Any, add: Callable[[Any], None]) -> bool:
    add(leaf)
    return any_key(leaf) == key


def key_of(batch: object, *, unread: bool = False) -> BatchKey:
    """Return the key of `batch`.

    unread:   whether what may have any value, if a step does not look at it, does have any.
    Raises:   GraphError: a leaf is neither a tensor nor a plain value that can be compared.
    """
    leaves, spec = flatten(batch)
    return BatchKey(spec, keys_of(leaves, range(len(leaves) if unread else 0)))


def keys_of(leaves: Sequence[Any], unread: Collection[int] = ()) -> tuple[LeafKey, ...]:
    """Return the keys of leaves, some of which are unread.

    Raises:   GraphError: as `key_of` does.
    """
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and (names := list(attributes_of(leaf))):
            message = f"leaf {place} of the batch has the attribute {names[0]}, which a trace loses"
            hint = "let `data` yield it beside the tensor, in a tuple or a dict"
            raise GraphError(message, hint=hint)
    return tuple((at in unread and any_key(x)) or leaf_key(x) for at, x in enumerate(leaves))


def leaf_key(leaf: object) -> LeafKey:
    """Return the part of one leaf that the trace has fixed.

    Raises:   GraphError: it is neither a tensor nor a plain value.
    """
    if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
        return TensorKey(tuple(leaf.shape), leaf.dtype, leaf.stride())
    if isinstance(leaf, UnlikeValues):
        return f"{leaf.values[0]!r}, then others"
    if isinstance(leaf, PLAIN):
        return repr(leaf)
    what = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
    if isinstance(leaf, Tensor):
        what = f"tensor of layout {leaf.layout}"
    elif (dtype := getattr(leaf, "dtype", None)) is not None:
        what += f" of {dtype}"
    raise GraphError(
        f"the batch holds a {what}, which is no {'dense ' * isinstance(leaf, Tensor)}tensor, "
        "number or text",
        hint="let `data` yield tensors in lists, tuples, dicts and dataclasses",
    )


def describe(leaves: Sequence[LeafKey]) -> str:
    """Return the tensors of a batch in words: "int64[4, 64], float32[4]"."""
    return ", ".join(str(key) for key in leaves if isinstance(key, TensorKey)) or "no tensors"


def count(leaves: Sequence[object]) -> tuple[int, int]:
    """Return samples (first dimension) and tokens (largest integer matrix) of a micro-batch."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    samples = tensors[0].shape[0] if tensors else 1
    whole = [t.numel() for t in tensors if not t.is_floating_point() and t.dim() == 2]
    return samples, max(whole, default=0)


def _differ(found: LeafKey, wanted: LeafKey) -> bool:
    if isinstance(found, TensorKey) and isinstance(wanted, TensorKey):
        return found[:2] != wanted[:2]
    return found != wanted


def with_strides(leaf: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return a copy of `leaf` that is laid out with `strides`."""
    copy = torch.empty_strided(leaf.shape, strides, dtype=leaf.dtype, device=leaf.device)
    return copy.copy_(leaf)
