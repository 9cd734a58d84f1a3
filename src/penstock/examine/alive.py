"""Alive: the functions and the objects of a job that there are, as the collector of garbage knows.

To ask it goes through all that is alive: a million objects where PyTorch is loaded, and a dozen
times in an examination.  So what is there before the job is loaded can be set apart once: the
collector then passes it over, here and in forks, and what of it could be a job's is noted.

Ignores:  code or a class that somebody gives a function or an object that was set apart.
"""

# Any object may come by here.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false

import gc
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any, final

from penstock.examine.queries import is_ours


@final
class _SetApart:
    """What was set apart, and may be a job's.

    mark:       stands behind it: where the collector passes over this too, so it may over a job.
    functions:  of code that is neither Python's nor torch's.
    kinds:      classes of what was there, by their `id`, and their objects; None: not noted.
    """

    def __init__(self) -> None:
        self.mark: list[object] = []
        self.functions: dict[CodeType, list[weakref.ref[FunctionType]]] = {}
        self.kinds: dict[int, tuple[weakref.ref[type], list[weakref.ref[Any]] | None]] = {}

    def note(self, values: Sequence[Any]) -> None:
        """Note of values, all alive, what may be a job's."""
        skipped: set[int] = set()  # classes of no job, by their `id`: nearly all that there is
        for value in values:
            kind = type(value)
            if id(kind) in skipped:
                continue
            if kind is FunctionType:
                if is_ours(value.__code__.co_filename):
                    self.functions.setdefault(value.__code__, []).append(weakref.ref(value))
            elif (known := self._of(kind)) is None:
                skipped.add(id(kind))
            else:
                try:
                    known.append(weakref.ref(value))
                except TypeError:  # slots without a place for it
                    self.kinds[id(kind)] = weakref.ref(kind), None

    def _of(self, kind: type) -> list[weakref.ref[Any]] | None:
        """Return where objects of a class are noted; None: nowhere."""
        known = self.kinds.get(id(kind))
        if known is None or known[0]() is not kind:
            known = weakref.ref(kind), [] if _is_of_a_job(kind) else None
            self.kinds[id(kind)] = known
        return known[1]

    def forget(self) -> None:
        """Let the collector see all again."""
        gc.unfreeze()
        self.__init__()


_APART = _SetApart()  # of this process, which has one collector


def set_apart() -> None:
    """Let searches pass over what is there now, but for what may be a job's.

    Garbage in circles that nobody has collected yet stays for ever.
    """
    if not _is_as_left(gc.get_referrers(_APART)):
        _APART.forget()
    _APART.note(gc.get_objects())
    gc.freeze()
    _APART.mark = [_APART]


def functions_of(codes: Collection[CodeType]) -> list[FunctionType]:
    """Return the functions that are alive and whose code is among `codes`."""
    if not codes:
        return []
    if not all(is_ours(code.co_filename) for code in codes):
        _APART.forget()
    found = [f for f in _referrers(*codes) if isinstance(f, FunctionType) and f.__code__ in codes]
    noted = (ref() for code in codes for ref in _APART.functions.get(code, ()))
    return [*found, *(f for f in noted if f is not None and f.__code__ in codes)]


def codes_that(are_wanted: Callable[[CodeType], bool]) -> set[CodeType]:
    """Return the code of functions that are alive, as far as it may be a job's."""
    if not _is_as_left(gc.get_referrers(_APART)):
        _APART.forget()
    found = {one.__code__ for one in gc.get_objects() if type(one) is FunctionType}
    alive = (code for code, refs in _APART.functions.items() if any(ref() for ref in refs))
    return {code for code in {*found, *alive} if are_wanted(code)}


def instances_of(kinds: Collection[type]) -> list[object]:
    """Return the objects that are alive and of one of some classes, or of one below."""
    wanted = {id(kind): kind for kind in _with_those_below(kinds)}
    noted = [_APART.kinds[key] for key in wanted if key in _APART.kinds]
    if any(objects is None for _, objects in noted):
        _APART.forget()
        noted.clear()
    found = _referrers(*wanted.values()) if wanted else []
    found += [ref() for _, objects in noted for ref in objects or ()]
    return [one for one in found if id(type(one)) in wanted]


def classes_with(functions: Collection[FunctionType]) -> list[type]:
    """Return the classes that have some functions, of whatever name."""
    wanted = {id(one) for one in functions}
    every = _with_those_below([object] if wanted else [])
    return [kind for kind in every if not wanted.isdisjoint(map(id, vars(kind).values()))]


def _referrers(*objects: object) -> list[Any]:
    """Return what was not set apart and refers to some objects."""
    found = gc.get_referrers(*objects, _APART)
    if not _is_as_left(found):
        _APART.forget()
        found = gc.get_referrers(*objects)
    return found


def _is_as_left(referrers: Collection[object]) -> bool:
    """Return whether nobody else has set more apart; `referrers` are all that are found."""
    return any(one is _APART.mark for one in referrers)


def _is_of_a_job(kind: type) -> bool:
    functions = (f for one in kind.__mro__ for f in vars(one).values() if type(f) is FunctionType)
    return any(is_ours(function.__code__.co_filename) for function in functions)


def _with_those_below(kinds: Collection[type]) -> Iterator[type]:
    todo, seen = [*kinds], set[int]()
    while todo:
        kind = todo.pop()
        if id(kind) not in seen:
            seen.add(id(kind))  # no class is asked for its own hash
            yield kind
            todo += type.__subclasses__(kind)
