"""Best: by which figure of a validation the best checkpoint is known, and when none better comes.

best="lowest val_loss"    best="highest val_accuracy"
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, cast

from penstock.errors import JobError

LOWEST = "lowest val_loss"
_HINT = 'write best="lowest val_loss", or best="highest val_accuracy"'
Sets = Mapping[str, Callable[[], Iterable[Any]]]


class Best(NamedTuple):
    """The figure of a validation that the best checkpoint has, and which way is better."""

    way: Literal["lowest", "highest"]
    figure: str

    def is_better(self, value: float, other: float) -> bool:
        """Return whether `value` is better than `other`."""
        return value < other if self.way == "lowest" else value > other

    def of(self, found: Mapping[str, float]) -> float:
        """Return the figure in what a validation has found.

        Raises:   JobError: it is not there.
        """
        if self.figure not in found:
            listed = ", ".join(name for name in found if name.startswith("val_")) or "none"
            message = f"Job.best is by {self.figure}, which the validation does not give"
            raise JobError(message, hint=f"there are: {listed}")
        return found[self.figure]


def best_of(text: object) -> Best:
    """Return the way and the figure that a text names, as "highest val_accuracy".

    Raises:   JobError: it says no such thing.
    """
    way, _, figure = text.partition(" ") if isinstance(text, str) else ("", "", "")
    if way not in ("lowest", "highest") or not figure.startswith("val_") or " " in figure:
        raise JobError(f"Job.best is {text!r}, no figure of a validation", hint=_HINT)
    return Best(way, figure)


def check_best(text: object, patience: object, validate_every: int | None) -> None:
    """Raise unless a job may say so.

    Raises:   JobError.
    """
    best_of(text)
    if patience is None:
        return
    if not isinstance(patience, int) or isinstance(patience, bool) or patience < 1:
        message = f"Job.patience is {patience!r}, not a whole number of 1 or more"
        raise JobError(message, hint="count validations without a better one: patience=3")
    if validate_every is None:
        message = f"Job.patience is {patience}, and Job.validate_every is None"
        raise JobError(message, hint="say how often to validate: validate_every=500")


def sets_of(validation: object) -> Sets:
    """Return the sets of a validation by name; "" is the name of the only one."""
    if isinstance(validation, Mapping):
        return cast("Sets", validation)
    return {} if validation is None else {"": cast("Callable[[], Iterable[Any]]", validation)}


def check_names(sets: Mapping[object, object]) -> None:
    """Raise where sets of a validation have no names that figures could have.

    Raises:   JobError.
    """
    if not sets:
        message = "Job.validation names no sets"
        raise JobError(message, hint='name them: validation={"near": near, "far": far}')
    for name in sets:
        if not isinstance(name, str) or not name.isidentifier() or name == "loss":
            message = f"Job.validation has the name {name!r}, which no figure can have"
            raise JobError(message, hint="use letters, digits and _: its loss is val_NAME_loss")


def out_of_patience(best_step: int, step: int, *, every: int, patience: int | None) -> bool:
    """Return whether so many validations after the best one none was better.

    every:    steps from one validation to the next.
    """
    return patience is not None and step - best_step >= patience * every
