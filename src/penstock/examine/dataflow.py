"""Dataflow: what the loss and the gradients of one micro-batch were computed from, op by op.

Every tensor is named by the ops that made it, down to parameters, buffers, the batch, numbers and
values from elsewhere.  Two micro-batches are one function of weights and batch if the names of
their results are equal, whatever the tensors hold; a trace is that function, once.

What an earlier micro-batch made is an input of its own kind, with its own name.  A constant that
the first one computed and kept (a mask, rotary angles) goes by the ops that made it, as long as
the buffers and frozen parameters that it was computed from hold what they held.
"""

import ctypes
import hashlib
import sys
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from penstock import _compat
from penstock.device import of
from penstock.graph.functional import HIDDEN_MUTATIONS

Line = tuple[str, int]  # file and number
Token = Any  # nested tuples of text and numbers
Pair = tuple[Token, ...]

_INDEXED = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default}
_SEQUENCES = (list, tuple)
_PLAIN = (type(None), bool, int, float, complex, str)
_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_MADE = "what an earlier micro-batch made"
_ELSEWHERE = "values from outside model and batch"
_SUM = "the gradient so far"
_MOVING = ""  # the root of what parameters, the batch, gradients or random numbers are in


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One ATen op that ran; its name stands for all that it was computed from."""

    name: int
    target: str
    tokens: Token
    line: Line | None


@dataclass(slots=True, eq=False)
class RecordedMicroBatch:
    """One micro-batch: the names of its results, its ops, and the values that Python read.

    generators:      lines at which an op draws from a generator of its own, and its state then.
    data_dependent:  an op or a size may depend on the values of the batch.
    writes_weights:  forward changes a parameter, as a teacher's.
    """

    results: dict[str, Token] = field(default_factory=dict[str, Token])
    ops: list[Op] = field(default_factory=list[Op])
    asked: list[Token] = field(default_factory=list[Token])
    generators: list[tuple[Line | None, str]] = field(
        default_factory=list[tuple["Line | None", str]]
    )
    data_dependent: bool = False
    writes_weights: bool = False

    def is_one_function_with(self, other: "RecordedMicroBatch") -> bool:
        """Return whether both compute the same from weights and batch."""
        return self.results == other.results and self.asked == other.asked


@dataclass(frozen=True, slots=True, eq=False)
class _LiveStorage:
    """What a living storage holds.

    roots:    the inputs that it was computed from; _MOVING for all that change with every step.
    made:     by an op.
    carried:  from an earlier micro-batch.
    """

    name: int
    roots: frozenset[str]
    made: bool
    alive: Any
    carried: bool = False


class Recorder(_compat.DispatchMode):
    """Names what runs under it; `recording` makes a micro-batch of it."""

    supports_higher_order_operators = True

    def __init__(
        self, model: nn.Module, line_of: Callable[[FrameType | None], Line | None]
    ) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.model, self.line_of = model, line_of
        self.buffers = tuple(name for name, _ in model.named_buffers())
        self.held: dict[int, _LiveStorage] = {}
        self.opaque: dict[int, tuple[Tensor, _LiveStorage]] = {}  # tensors without a storage
        self.words: dict[int, str] = {}
        self.fixed: dict[str, str] = {}  # the digests of inputs that something kept was made of
        self.relied: set[str] = set()  # of these, those whose product was read again
        self.origins: dict[int | None, int] = {}  # of storages of the batch, its first byte there
        self.of_batch: dict[int, int] = {}  # leaves of the batch, by the names that they begin with
        self.written: set[int] = set()  # of these
        self.now, self.count, self.random = RecordedMicroBatch(), 0, 0

    @contextmanager
    def recording(self, leaves: Sequence[Any]) -> Generator[RecordedMicroBatch]:
        """Record one micro-batch, forward and backward, whose batch has these leaves."""
        self.now, self.random = RecordedMicroBatch(), 0
        self._forget()
        self._name_inputs(leaves)
        handles: list[Any] = [
            parameter.register_hook(self._noting(name))  # pyright: ignore
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        ]
        try:
            with self:
                yield self.now
        finally:
            for handle in handles:
                handle.remove()
        for name, parameter in self.model.named_parameters():
            if self._held(parameter).made:
                self.now.writes_weights = True
                self.now.results[f"parameter {name}"] = self.token(parameter)
        present = dict(self.model.named_buffers())
        for name in self.buffers:
            self.now.results[f"buffer {name}"] = (
                self.token(present[name]) if name in present else None
            )
        self.count += 1

    def token(self, tensor: Tensor) -> Token:
        """Return the name of what a tensor holds, and how it looks at it."""
        held = self._held(tensor)
        if tensor.layout is not torch.strided:
            return ("tensor", held.name, _shape_of(tensor), str(tensor.dtype))
        first = self.origins.get(_key(tensor), 0)
        offset = tensor.storage_offset() * tensor.element_size() - first
        place = offset, tuple(tensor.shape), tensor.stride()
        return ("tensor", held.name, *place, str(tensor.dtype), tensor.is_conj(), tensor.is_neg())

    # -- between micro-batches --------------------------------------------------------------------

    def _forget(self) -> None:
        """Mark what the last micro-batch left behind; what only Python changes is read anew."""
        inputs = self._fixed_inputs()
        moved = {_MOVING, *(name for name, tensor in inputs.items() if self._held(tensor).made)}
        kept: dict[int, _LiveStorage] = {}
        for key, held in self.held.items():
            if held.alive.expired() or not held.made:
                continue
            kept[key] = held
            name, roots = held.name, held.roots
            if not roots.isdisjoint(moved) or not roots <= self._unmoved(roots):
                name, roots = hash((_MADE, self.count, held.name)), frozenset((_MOVING,))
                self.words[name] = _MADE
            kept[key] = _LiveStorage(name, roots, True, held.alive, carried=True)
        self.held, self.opaque = kept, {}

    def is_cache(self, name: str) -> bool:
        """Return whether forward has made a buffer that nobody saves, and of what stays alone."""
        tensor = _compat.unsaved_buffers(self.model).get(name)
        held = None if tensor is None else self.held.get(_key(tensor) or 0)
        if held is None or not held.made or held.alive.expired():
            return False
        return held.roots.isdisjoint((_MOVING, f"buffer {name}"))

    def _fixed_inputs(self) -> dict[str, Tensor]:
        """Return the buffers and frozen parameters by their names as roots."""
        found = {f"buffer {n}": b for n, b in self.model.named_buffers() if n in self.buffers}
        named = self.model.named_parameters()
        return {**found, **{f"parameter {n}": p for n, p in named if not p.requires_grad}}

    def _unmoved(self, roots: Collection[str]) -> set[str]:
        """Return those of these inputs that hold what they held when first asked for."""
        present = {name: t for name, t in self._fixed_inputs().items() if name in roots}
        found = {name: _digest(tensor) for name, tensor in present.items()}
        return {n for n, digest in found.items() if self.fixed.setdefault(n, digest) == digest}

    def moved(self) -> list[str]:
        """Return the inputs that have changed since something of theirs was kept and read again."""
        return sorted(self.relied - self._unmoved(self.relied))

    def _name_inputs(self, leaves: Sequence[Any]) -> None:
        rows: list[tuple[str, str, Tensor]] = []
        rows += [("buffer", n, b) for n, b in self.model.named_buffers() if n in self.buffers]
        for name, parameter in self.model.named_parameters():
            rows.append(("parameter", name, parameter))
            if parameter.grad is not None:
                rows.append(("gradient", name, parameter.grad))
                self.words[hash(("gradient", name))] = _SUM
        rows += [("batch", str(k), leaf) for k, leaf in enumerate(leaves) if _is_tensor(leaf)]
        for kind, name, tensor in rows:
            if kind == "buffer" and self.is_cache(name):
                continue  # it goes by the ops that made it
            is_fixed = kind == "buffer" or (kind == "parameter" and not tensor.requires_grad)
            roots = frozenset((f"{kind} {name}" if is_fixed else _MOVING,))
            self._hold(tensor, hash((kind, name)), roots, made=kind == "batch")
        self.of_batch, self.origins = {}, {}
        for place, leaf in enumerate(leaves):
            if _is_tensor(leaf) and (key := _key(leaf)) is not None:
                first = leaf.storage_offset() * leaf.element_size()
                self.origins[key] = min(first, self.origins.get(key, first))
                self.of_batch[self.held[key].name] = place

    def _noting(self, name: str) -> Callable[[Tensor], None]:
        def note(gradient: Tensor) -> None:
            self.now.results[f"gradient {name}"] = self.token(gradient)

        return note

    # -- names ------------------------------------------------------------------------------------

    def _hold(
        self, tensor: Tensor, name: int, roots: frozenset[str], *, made: bool
    ) -> _LiveStorage:
        key = _key(tensor)
        if key is None:
            held = _LiveStorage(name, roots, made, None)
            self.opaque[id(tensor)] = tensor, held
        else:
            held = _LiveStorage(name, roots, made, StorageWeakRef(tensor.untyped_storage()))
            self.held[key] = held
        return held

    def _held(self, tensor: Tensor) -> _LiveStorage:
        key = _key(tensor)
        if key is None:
            if id(tensor) in self.opaque:
                return self.opaque[id(tensor)][1]
        elif key in self.held and not self.held[key].alive.expired():
            return self.held[key]
        name = hash((_ELSEWHERE, _digest(tensor)))
        self.words[name] = _ELSEWHERE
        return self._hold(tensor, name, frozenset(), made=False)

    def _token(self, value: Any) -> Token:
        if isinstance(value, Tensor):
            return self.token(value)
        if isinstance(value, _SEQUENCES):
            return tuple(map(self._token, value))  # pyright: ignore[reportUnknownArgumentType]
        if type(value) in _PLAIN:
            return repr(value)
        if isinstance(value, torch.Generator):
            if value is torch.default_generator:
                return ("generator", value.device.type)
            state = hashlib.blake2b(value.get_state().numpy().tobytes(), digest_size=16).hexdigest()
            self.now.generators.append((self.line_of(sys._getframe(1)), state))  # pyright: ignore
            return ("generator", value.device.type, state)
        return str(value) if isinstance(value, _TORCH) else type(value).__qualname__

    # -- ops --------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        profile = sys.getprofile()
        sys.setprofile(None)
        try:
            return self._run(func, args, kwargs or {})
        finally:
            sys.setprofile(profile)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        given = list(_tensors((args, tuple(kwargs.values()))))
        held = [self._held(tensor) for tensor in given]
        roots, drawn = frozenset[str]().union(*(one.roots for one in held)), 0
        self.relied.update(*(one.roots for one in held if one.carried))
        law = _law(func)
        if law.may_draw and _compat.draws_random(func, args, kwargs):
            self.random += 1
            roots, drawn = roots | {_MOVING}, self.random
        tokens = (self._token(args), tuple((k, self._token(v)) for k, v in kwargs.items()), drawn)
        name = hash((law.text, tokens))
        line = self.line_of(sys._getframe(2))  # pyright: ignore[reportPrivateUsage]
        self.now.ops.append(Op(name, law.text, tokens, line))
        result = func(*args, **kwargs)
        if law.depends and (func not in _INDEXED or any(map(_is_mask, _tensors((args[1],))))):
            self.now.data_dependent |= bool(roots)
            self.now.asked += [tokens] if law.asks else []
        known = {_key(tensor) for tensor in given}
        if law.writes:
            for at, tensor in enumerate(_written(func, args, kwargs)):
                self.written |= {self.of_batch.get(self._held(tensor).name, -1)} - {-1}
                self._hold(tensor, hash((name, "written", at)), roots, made=True)
        for at, tensor in enumerate(_tensors((result,))):
            key = _key(tensor)
            if key is None or key not in known:
                self._hold(tensor, hash((name, at)), roots, made=True)
        return result


@dataclass(frozen=True, slots=True, eq=False)
class _OpLaw:
    """What is known of an op by its name."""

    text: str
    may_draw: bool  # random numbers
    writes: bool
    depends: bool  # on values: what comes out, or how much of it
    asks: bool  # for a value, in Python


@cache
def _law(func: Any) -> _OpLaw:
    tags: list[Any] = list(getattr(func, "tags", ()))
    asks = torch.Tag.data_dependent_output in tags
    schema = _compat.schema_of(func)
    return _OpLaw(
        str(func),
        torch.Tag.nondeterministic_seeded in tags,
        func in HIDDEN_MUTATIONS or (schema is not None and schema.is_mutable),
        asks or torch.Tag.dynamic_output_shape in tags or func in _INDEXED,
        asks,
    )


def first_difference(
    found: RecordedMicroBatch, expected: RecordedMicroBatch, words: Mapping[int, str]
) -> tuple[Line | None, str]:
    """Return the line of the first op by which `found` differs from `expected`, and how."""
    names = {op.name for op in expected.ops}
    others = [op for op in found.ops if op.name not in names and not _adds_up(op, words)]
    for op in sorted(others, key=lambda op: op.line is None):  # stable: the first with a line
        place = found.ops.index(op)
        before = sum(1 for o in found.ops[:place] if (o.line, o.target) == (op.line, op.target))
        alike = [o for o in expected.ops if (o.line, o.target) == (op.line, op.target)]
        if before < len(alike):
            return op.line, f"{_short(op)} of {_apart(op.tokens, alike[before].tokens, words)}"
        return op.line, f"{_short(op)} was not there before"
    names = {op.name for op in found.ops}
    gone = [op for op in expected.ops if op.name not in names and not _adds_up(op, words)]
    for op in sorted(gone, key=lambda op: op.line is None):
        return op.line, f"{_short(op)} is no longer there"
    return None, "other ops reach the loss"


def _adds_up(op: Op, words: Mapping[int, str]) -> bool:
    """Return whether autograd adds a gradient to the one that is there."""
    arguments = op.tokens[0] if op.target.startswith("aten.add") else ()
    return bool(arguments) and len(arguments[0]) > 1 and words.get(arguments[0][1]) == _SUM


def _short(op: Op) -> str:
    return op.target.removeprefix("aten.").rpartition(".")[0] or op.target


def _apart(found: Token, expected: Token, words: Mapping[int, str]) -> str:
    """Return the first leaf that differs, in words."""
    if type(found) is type(expected) is tuple:
        pairs = list(zip(cast("Pair", found), cast("Pair", expected), strict=False))
        apart = next(((left, right) for left, right in pairs if left != right), None)
        return "other arguments" if apart is None else _apart(*apart, words)
    if isinstance(found, int) and found in words:
        return words[found]
    if isinstance(expected, int) and expected in words:
        return words[expected]
    if isinstance(found, str) and isinstance(expected, str):
        return f"{expected}, then {found}"
    return "other values"


# -- tensors --------------------------------------------------------------------------------------


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _is_mask(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.bool, torch.uint8)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, _SEQUENCES):
            yield from _tensors(value)  # pyright: ignore[reportUnknownArgumentType]


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that an op changes."""
    if func in HIDDEN_MUTATIONS:
        return list(_tensors(args[3:5])) if args[5] else []
    schema = _compat.schema_of(func)
    found: list[Any] = []
    for at, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[at] if at < len(args) else None
            found.append(kwargs.get(argument.name, given))
    return list(_tensors(found))


def _key(tensor: Tensor) -> int | None:
    """Return what identifies a tensor's storage; None without one."""
    if tensor.layout is not torch.strided:
        return None
    try:
        return _compat.storage_key(tensor)
    except (RuntimeError, NotImplementedError):  # a subclass that has none
        return None


def _shape_of(tensor: Tensor) -> tuple[int | None, ...]:
    """Return a shape; a ragged size, of which each jagged tensor has another, is None."""
    return tuple(None if isinstance(n, torch.SymInt) else n for n in tensor.shape)


def _digest(tensor: Tensor) -> str:
    """Return a digest of all that the tensor's storage holds."""
    if _key(tensor) is None or tensor.device.type == "meta":
        return str(_shape_of(tensor))
    storage = tensor.untyped_storage()
    storage = storage if of(storage.device).is_cpu else storage.cpu()
    size = storage.nbytes()
    if size == 0:
        return ""
    memory = (ctypes.c_char * size).from_address(storage.data_ptr())
    return hashlib.blake2b(memory, digest_size=16).hexdigest()
