"""Unsaved: what the functions of a job keep where no checkpoint looks.

An average of the weights in a dict of a hook, a copy of the model in the loss's closure, a count of
updates: a run that goes on would begin it anew, and neither the loss nor a weight need show that.
What changes there between two steps, and is read by code that ran, is named here; whether a resume
loses it is tried (resumed.py): the values after some steps, and after the same ones broken off.

Left out:  the model, its optimizer, what `Job.state` names; what is only counted, logged or told.
"""

# Any object may come by here.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false

import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.examine.alive import classes_with, codes_that, functions_of, instances_of
from penstock.examine.model_changes import SMALL, sampled
from penstock.examine.name_reads import read_at, used_at
from penstock.examine.python_values import Place, Walk
from penstock.examine.queries import text_of
from penstock.examine.tokens import Moving

Key = tuple[str, int, str]  # file, first line and name of a function
Tokens = Mapping[Place, tuple[str, ...]]
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_MANY = 32 * SMALL  # elements of a tensor of which all are looked at


@dataclass(frozen=True, slots=True, order=True)
class Unsaved:
    """Something that a job keeps beside its model, and that changes from step to step.

    where      the place, as a walk through the job's functions names it
    line       that reads it, "file.py:12"
    by_update  the optimizer, its hooks or its schedule change it, not the loss
    tensor     it holds tensors
    """

    where: str
    line: str
    by_update: bool = False
    tensor: bool = False

    def __str__(self) -> str:
        who = "the optimizer or a hook of it" if self.by_update else "the loss"
        return f"{self.line}: {shown(self.where)}, which {who} keeps"


def shown(place: str) -> str:
    """Return a place without the file of a global or of a closure: the line says it."""
    return re.sub(r" in .*?\.py(:\d+)?", "", place)


def look(
    codes: Collection[CodeType], skipped: Iterable[object], token: Callable[[Tensor], object]
) -> Tokens:
    """Return what functions of these codes keep, of whatever kind, by place.

    skipped:  objects that are left out.
    token:    what stands for a tensor.
    """
    walk = Walk(codes, tensor=token, values=_AllTold(), inside=True)
    skipped = list(skipped)
    walk.seen |= {id(one) for one in skipped}
    functions = functions_of(codes)
    for own in instances_with(functions):
        walk.put(type(own).__qualname__, type(own).__qualname__, own)
    for function in sorted(functions, key=lambda one: key_of(one.__code__)):
        walk.function(function)
    walk.go()
    return {place: tuple(sorted(map(str, told))) for place, told in walk.values.items()}  # type: ignore[call-overload]


def changed(before: Tokens, after: Tokens) -> list[Place]:
    """Return the places that hold something else than before, or are new."""
    return [place for place, told in after.items() if before.get(place) != told]


def named(
    places: Sequence[Place], codes: Collection[CodeType], *, by_update: bool, after: Tokens
) -> Iterator[Unsaved]:
    """Yield the places of which code of the job reads the value, so that it may matter."""
    ours = [code for code in codes if "-packages" not in code.co_filename]
    for place in places:
        is_tensor = any(_IS_TENSOR.search(told) for told in after[place])
        first = re.match(r"(?:the (?:keys|length|state|class) of )?(\w+)", place.where)
        names = [place.name, place.holder, first.group(1) if first else ""]
        reads = used_at if is_tensor and by_update else read_at  # an average is for others to see
        lines = (reads(name, ours) for name in dict.fromkeys(names) if name)
        if (line := next((line for line in lines if line is not None), None)) is not None:
            yield Unsaved(place.where, text_of(line), by_update, is_tensor)


_TENSOR = "tensor "
_IS_TENSOR = re.compile(rf"{_TENSOR}|'[0-9a-f]{{128}}'\)$")  # or an array


def token_beside(model: nn.Module) -> Callable[[Tensor], object]:
    """Return what stands for a tensor; those of `model`, and their gradients, for each other."""
    own = [*model.parameters(), *model.buffers()]

    def token(tensor: Tensor) -> object:
        if any(tensor is one or tensor is one.grad for one in own):
            return "of the model"
        return values_of(tensor)

    return token


def values_of(tensor: Tensor) -> str:
    """Return what tells the values of a tensor from others; of a large one a sample."""
    return f"{_TENSOR}{tuple(tensor.shape)} {sampled(tensor, _MANY)}"


def key_of(code: CodeType) -> Key:
    """Return what names a function's code in each process."""
    return code.co_filename, code.co_firstlineno, code.co_name


def instances_with(functions: Collection[FunctionType]) -> list[object]:
    """Return the objects that are alive and whose class has a method among functions."""
    methods = [f for f in functions if _is_method(f)]
    kinds = [*filter(None, map(_class_named, functions))]
    kinds += classes_with([f for f in methods if _class_named(f) is None])
    others = nn.Module, Optimizer, type
    found = instances_of([kind for kind in kinds if not issubclass(kind, others)])
    found = [one for one in found if not issubclass(type(one), others)]
    return sorted(found, key=lambda one: type(one).__qualname__)


def _is_method(function: FunctionType) -> bool:
    """Return whether a function was written in a class."""
    *_, holder, _ = ("", *function.__qualname__.split("."))
    return holder not in ("", "<locals>")


def _class_named(function: FunctionType) -> type | None:
    """Return the class of a method by its names; None where these lead to none that has it."""
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split(".")[:-1]:
        found = vars(found).get(name) if hasattr(found, "__dict__") else None
    if not isinstance(found, type) or found is type:
        return None
    return found if vars(found).get(function.__name__) is function else None


@final
class _AllTold(dict[Place, object]):
    """All that was noted of a place: a function of which there are several is one for each."""

    def __setitem__(self, place: Place, value: object) -> None:
        text = _iterator(value) if isinstance(value, Moving) else repr(value)
        told: Any = (*self.get(place, ()), _ADDRESS.sub("", text))  # type: ignore[misc]
        super().__setitem__(place, told)


def _iterator(value: Moving) -> str:
    """Return where an iterator of C stands, as far as it tells."""
    try:
        return repr(value.iterator.__reduce__())
    except (TypeError, AttributeError):
        return "an iterator"


def told_later(found: Sequence[Unsaved], keys: Iterable[Key]) -> dict[str, str]:
    """Return what stands for what was found beside, by place, in whatever process calls it.

    keys:     of the functions that ran when it was found.
    """
    places, known = {one.where for one in found}, set(keys)
    codes = codes_that(lambda code: key_of(code) in known)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of iterators, whose places are asked for
        tokens = look(codes, (), values_of)
    return {p.where: " ".join(told) for p, told in tokens.items() if p.where in places}
