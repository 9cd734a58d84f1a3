"""Unread: values of a batch beside its tensors that the loss never looks at.

The path of an image, the number of a row, the text of which tokens were made: most data sets yield
some, each micro-batch others.  A step that was traced without looking at a value holds for any of
its kind.  Whether it looks is tried: a stand-in raises where it is used, whatever for.

Ignores:  a loss that asks for the type itself, `type(x) is str`; `isinstance` is answered.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

_FIXED = (Tensor, torch.dtype, torch.device, type(None))
_TEXT = (str, bytes)
_OF_ANY = frozenset(
    """__class__ __new__ __init__ __getattribute__ __setattr__ __delattr__ __init_subclass__
    __subclasshook__ __doc__ __dir__ __sizeof__""".split()  # noqa: SIM905 - a list of them is longer
)
_AS_OTHERS = ("__index__", "__int__", "__float__", "__complex__", "__bytes__", "__fspath__")
_ARITHMETIC = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow"),
    *("lshift", "rshift", "and", "xor", "or"),
)


class AnyKey(NamedTuple):
    """What of an unread value is fixed by the trace: its kind."""

    kind: str

    def __str__(self) -> str:
        return f"any {self.kind}"


class ReadLeaf(BaseException):
    """A stand-in was used; a loss may catch all that are errors.

    place:  of its leaf.
    """

    def __init__(self, place: int) -> None:
        super().__init__(place)
        self.place = place


@final
class UnlikeValues:
    """A value of each micro-batch of which one was made, where they are not alike."""

    __slots__ = ("values",)

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = tuple(values)


def any_key(leaf: object) -> AnyKey | None:
    """Return the key that a value has where it is unread; None: a tensor, or nothing."""
    if isinstance(leaf, UnlikeValues):
        keys = {any_key(value) for value in leaf.values}
        return keys.pop() if len(keys) == 1 else None
    kind = type(leaf)
    home = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return None if isinstance(leaf, _FIXED) else AnyKey(f"{home}{kind.__qualname__}")


def stand_in(leaf: object, place: int) -> Any:
    """Return an object that raises ReadLeaf where it is used, and is an instance of the class."""
    found = _class_like(type(leaf))()
    found.place_of_leaf = place
    return found


@cache
def _class_like(kind: type) -> type:
    names = {*dir(kind), *_AS_OTHERS} - _OF_ANY
    if kind not in _TEXT:
        names |= {f"__{side}{name}__" for name in _ARITHMETIC for side in ("", "r", "i")}
    members: dict[str, Any] = {name: _raising(getattr(kind, name, None)) for name in names}
    members |= {"__class__": property(lambda _: kind), "__slots__": ("place_of_leaf",)}
    members |= {"__copy__": _itself, "__deepcopy__": _itself}
    return type(f"Unread_{kind.__name__}", (), members)


def _raising(member: object) -> Any:
    if callable(member) or member is None:
        return _raise
    return property(_raise)


def _raise(self: Any, *_: object, **__: object) -> None:
    raise ReadLeaf(self.place_of_leaf)


def _itself(self: Any, *_: object) -> Any:
    return self


def without(leaves: Sequence[Any], places: Sequence[int]) -> list[Any]:
    """Return the leaves with stand-ins at some places."""
    return [stand_in(leaf, at) if at in places else leaf for at, leaf in enumerate(leaves)]


def unread_of(places: Sequence[int], attempt: Callable[[Sequence[int]], Any]) -> Any:
    """Return the result of `attempt`, without the leaves of as many of these places as possible.

    attempt:  is called with places that are left; those that it reads are no longer among them.
    """
    places = tuple(places)
    while True:
        try:
            return attempt(places)
        except ReadLeaf as read:
            places = tuple(at for at in places if at != read.place)
