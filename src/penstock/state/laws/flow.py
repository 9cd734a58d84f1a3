"""Flow: which values of an eager step depend on the tensors that the model keeps.

Every op of the step is seen as it runs.  What reads a buffer depends on it, and so does what reads
that; where Python looks at a number that depends on a buffer, all that follows does.  The running
statistics of a batch norm in training are the exception that its schema does not tell of: its
output does not depend on them.

Ignores:  what never reaches a dispatcher: `.numpy()`, `.tolist()`, custom C++.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from penstock import _compat
from penstock.graph.functional import BACKWARD_OF_HIDDEN, HIDDEN_MUTATIONS

aten = torch.ops.aten

# Ops after which nothing is left of what their first argument held.
_OVERWRITES = (
    aten.copy_.default,
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
)
_EACH = ("aten._foreach_", "aten._fused_ada", "aten._fused_sgd")  # the same to each of some lists
_STATISTICS = slice(3, 5)  # where a batch norm and its backward take the running statistics
_TRAINING, _TRAINING_OF_BACKWARD = 5, 7

Names = frozenset[str]


class Dependencies(_compat.DispatchMode):
    """Under this mode it is noted which values depend on which of the `kept` tensors.

    written:  names of those that an op wrote into.
    seen:     names of those of which Python has seen something.
    """

    def __init__(self, kept: Mapping[str, Tensor]) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.written: set[str] = set()
        self.seen: Names = frozenset()
        self._depends: dict[int, Names] = {}
        self._names: dict[int, Names] = {}
        self._held: list[object] = []  # a number of a forgotten storage may come back
        for name, tensor in kept.items():
            key = _key(tensor)
            self._names[key] = self._names.get(key, frozenset()) | {name}
            self.note(tensor, self._names[key])

    @property
    def shared(self) -> Names:
        """Return the names of kept tensors whose memory is also that of another one."""
        return frozenset[str]().union(*(names for names in self._names.values() if len(names) > 1))

    def of(self, tensor: Tensor) -> Names:
        """Return the names of the kept tensors on which a tensor depends."""
        return self._depends.get(_key(tensor), frozenset())

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        result = func(*args, **given)
        if func in HIDDEN_MUTATIONS and args[_TRAINING]:
            self._normalized(args, result)
        elif func in BACKWARD_OF_HIDDEN and _is_training(func, args):
            read = (*args[: _STATISTICS.start], *args[_STATISTICS.stop :])
            self._made(result, self._of_all(_tensors(read)))
        elif str(func).startswith(_EACH):
            self._each(func, args, given, result)
        else:
            self._plain(func, args, given, result)
        return result

    def _plain(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        written = list(_written(func, args, kwargs))
        if func in _OVERWRITES and _is_whole(args[0]):
            self._write(args[0])
            self.note(args[0], self._of_all(_tensors(args[1:])) | self.seen)
            return
        names = self._of_all(_tensors((args, kwargs)))
        if _shows(func, args):
            self.saw(names)
        for tensor in written:
            self._write(tensor)
        self._made((written, result), names | self.seen)

    def _each(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Note an op that does the same to each member of some lists."""
        count = len(args[0])
        rows: list[Sequence[Any]] = [a for a in args if _is_list(a) and len(a) == count]
        others = [arg for arg in (*args, *kwargs.values()) if not any(arg is row for row in rows)]
        common = self._of_all(_tensors(others)) | self.seen
        inside = {id(tensor) for tensor in _tensors(list(_written(func, args, kwargs)))}
        for at in range(count):
            members = [row[at] for row in rows]
            names = self._of_all(_tensors(members)) | common
            changed = [tensor for tensor in _tensors(members) if id(tensor) in inside]
            for tensor in changed:
                self._write(tensor)
            made = result[at] if _is_list(result) else None
            self._made((changed, made), names)

    def _normalized(self, args: Sequence[Any], result: Any) -> None:
        """Note a batch norm in training."""
        for statistics in _tensors(args[_STATISTICS]):
            self._write(statistics)
            self._made(statistics, self._of_all(_tensors(args[0])) | self.seen)
        self._made(result, self._of_all(_tensors(args[: _STATISTICS.start])) | self.seen)

    def _of_all(self, tensors: Iterable[Tensor]) -> Names:
        return frozenset[str]().union(*map(self.of, tensors))

    def _made(self, values: Any, names: Names) -> None:
        if names:
            for tensor in _tensors(values):
                self.note(tensor, names | self.of(tensor))

    def saw(self, names: Names) -> None:
        """Note that Python has seen a number that depends on these."""
        self.seen |= names

    def note(self, tensor: Tensor, names: Names) -> None:
        """Note on which of the kept tensors one depends."""
        key = _key(tensor)
        if key not in self._depends:
            if not names:
                return
            is_plain = (
                tensor.layout == torch.strided
            )  # its memory need not be kept, nor that tensor
            self._held.append(StorageWeakRef(tensor.untyped_storage()) if is_plain else tensor)
        self._depends[key] = names

    def _write(self, tensor: Tensor) -> None:
        self.written |= self._names.get(_key(tensor), frozenset())


def _key(tensor: Tensor) -> int:
    """Return what is the same for tensors that share their memory."""
    return _compat.storage_key(tensor) if tensor.layout == torch.strided else id(tensor)


def _is_whole(tensor: Tensor) -> bool:
    """Return whether a tensor is all that is in its memory."""
    size = tensor.untyped_storage().nbytes() if tensor.layout == torch.strided else -1
    return tensor.numel() * tensor.element_size() == size


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _shows(func: Any, args: Sequence[Any]) -> bool:
    """Return whether Python sees something of what an op reads: a number, or how many there are."""
    if func is aten.index.Tensor:  # only one by truths has a size that depends on them
        return any(index.dtype in (torch.bool, torch.uint8) for index in _tensors(args[1]))
    tags = getattr(func, "tags", ())
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags


def _is_training(func: Any, args: Sequence[Any]) -> bool:
    """Return whether it is the backward of a batch norm in training; cudnn has no other."""
    return func is not aten.native_batch_norm_backward.default or bool(args[_TRAINING_OF_BACKWARD])


def _tensors(values: Any) -> Iterator[Tensor]:
    leaves, _ = _compat.pytree.tree_flatten(values)
    return (leaf for leaf in leaves if isinstance(leaf, Tensor))


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors into which an op writes, as its schema says."""
    schema = _compat.schema_of(func)
    for at, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            yield from _tensors(value)
