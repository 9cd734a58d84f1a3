"""Keyed: data whose steps are of one of several kinds, which a function of their number tells.

They have several shapes (`ps.bucketed`), or take turns (`ps.in_turn`).
"""

from collections.abc import Hashable, Mapping
from typing import Any, Protocol, cast

from penstock.errors import JobError


class Keyed(Protocol):
    """Data that knows the key of each micro-batch without reading it.

    step_micro_batches:  of which the first of a step has the key of all; a job may take steps of
                         a divisor of it.
    keys:                of the steps of an epoch, and how many steps have each.
    """

    @property
    def step_micro_batches(self) -> int: ...
    @property
    def keys(self) -> Mapping[Any, int]: ...
    def key_of(self, number: int) -> Hashable: ...


def keyed(data: object) -> Keyed | None:
    """Return the data if it is keyed; of weighted data, what is weighted."""
    inner: Any = getattr(data, "of", data) if not hasattr(data, "key_of") else data
    parts = "key_of", "keys", "step_micro_batches"  # data of others may have one by chance
    return cast("Keyed", inner) if all(hasattr(inner, part) for part in parts) else None


def kinds_of(data: object) -> str:
    """Return in a word what the steps of keyed data differ in: "shapes" or "turns"."""
    return str(getattr(keyed(data), "kinds", "shapes"))


def only_key(data: object) -> Hashable | None:
    """Return the one key of a job's data that `batches/one_key.py` has made; None: it is of all."""
    return getattr(getattr(data, "of", data), "only_key", None)


def check_keyed(data: object, micro_batches: int) -> None:
    """Raise where a step would have micro-batches of several keys.

    Raises:   JobError.
    """
    known = keyed(data)
    if known is None or known.step_micro_batches % micro_batches == 0:
        return
    message = f"Job.micro_batches is {micro_batches}, and the data makes steps of"
    hint = f"say it there: ps.bucketed(..., micro_batches={micro_batches})"
    if known.step_micro_batches == 1:
        hint = 'let all have one size, last="drop", or leave micro_batches out'
    raise JobError(f"{message} {known.step_micro_batches} of one length", hint=hint)
