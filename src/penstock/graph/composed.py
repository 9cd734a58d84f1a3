"""Composed: optimizers by patterns of names as one, and the average of the weights they train.

    optimizer = ps.by_name({"*norm*": adamw, "blocks.*.weight": muon, "*": adamw})

The parts share one state with the whole, and their groups are its groups.  So whatever reads an
optimizer's state - stages, shards, far memory, checkpoints - finds that of all parts at once, and
the average of a parameter, `state[parameter]["average"]`, beside the moments.
"""

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock import _compat
from penstock.averages import Average
from penstock.errors import JobError
from penstock.job import Parameters

AVERAGE = "average"  # in the state of a parameter
COUNT = "average_step"  # there too: the updates so far, as a number that stays with the host
_OWN = 2  # these

Maker = Callable[[Parameters], Optimizer]
_SHOWN = 4  # names in a message


@final
class Composed(Optimizer):
    """Several optimizers of unlike parameters, and the average of what they update, if any.

    Raises:   JobError: a parameter is in two of them, or one clears gradients in its own way.
    """

    def __init__(self, parts: Sequence[Optimizer], average: Average | None = None) -> None:
        groups = [group for part in parts for group in part.param_groups]
        for part in parts:
            if "zero_grad" in vars(part) or type(part).zero_grad is not Optimizer.zero_grad:
                message = f"{type(part).__name__} has a zero_grad of its own, which would be lost"
                hint = "leave out Job.average and ps.by_name, or what zero_grad does"
                raise JobError(message, hint=hint)
        try:
            super().__init__(groups, {})
        except ValueError as problem:
            raise JobError(f"the parts of an optimizer: {problem}", hint=_ONCE) from problem
        self.parts, self.average = list(parts), average
        every: list[dict[str, Any]] = [part.defaults for part in parts]
        self.defaults = {  # schedulers look there
            key: value for key, value in every[0].items() if all(key in one for one in every)
        }
        for part in parts:
            self.state.update(part.state)
            part.state = self.state

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update by every part, then move the average; there is no closure."""
        if self.average is None:
            for part in self.parts:
                part.step()
        else:
            self._averaged(self.average)

    @torch.no_grad()  # pyright: ignore[reportUntypedFunctionDecorator]
    def _averaged(self, average: Average) -> None:
        every = [p for group in self.param_groups for p in group["params"]]
        known = [p for p in every if COUNT in self.state.get(p, ())]
        new = [p for p in every if p.requires_grad and COUNT not in self.state.get(p, ())]
        before = [p.detach().clone() for p in new] if known else []  # theirs so far
        # a part begins the state of a parameter where there is none, at its first gradient
        alone = (p for p in known if p.grad is not None and len(self.state[p]) == _OWN)
        held = {p: self.state.pop(p) for p in alone}
        with torch.enable_grad():
            for part in self.parts:
                part.step()
        for parameter, own in held.items():
            self.state[parameter] |= own
        count = float(self.state[known[0]][COUNT]) if known else 0.0
        for at, parameter in enumerate(new):
            first = before[at] if known else parameter.detach().clone()
            self.state[parameter] |= {AVERAGE: first, COUNT: torch.tensor(count)}
        rows = [self.state[p] for p in (*known, *new)]
        if rows:
            _compat.add_number([row[COUNT] for row in rows], 1.0)
            weights = [p.detach() for p in (*known, *new)]
            share = average.share_of(round(count) + 1)
            if share:
                _compat.move_towards([row[AVERAGE] for row in rows], weights, share)


_ONCE = "give each parameter to one of them"


def with_average(optimizer: Optimizer, average: Average) -> Composed:
    """Return an optimizer that does as `optimizer`, and averages the weights."""
    parts = optimizer.parts if isinstance(optimizer, Composed) else [optimizer]
    return Composed(parts, average)


def parts_of(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that it is made of; itself where it is one."""
    return [*optimizer.parts] if isinstance(optimizer, Composed) else [optimizer]


def kind_of(optimizer: Optimizer) -> str:
    """Return the name of its class; of several, of each."""
    return " + ".join(dict.fromkeys(type(part).__name__ for part in parts_of(optimizer)))


def is_known(optimizer: Optimizer) -> bool:
    """Return whether each parameter is known to be updated by itself: torch's own, unmodified."""
    if isinstance(optimizer, Composed):
        return not _compat.has_step_hooks(optimizer) and all(map(is_known, optimizer.parts))
    kind = type(optimizer)
    if getattr(kind, "penstock_plain", False):
        return True
    known = getattr(torch.optim, kind.__name__, None) is kind
    added = _compat.added_attributes(optimizer)
    return known and not added and not _compat.has_step_hooks(optimizer)


def averaged(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint with the averages in place of the weights that have one.

    A parameter that no update has reached is its own average.
    """
    found: dict[str, Tensor] = {}
    for key in tensors:
        kind, _, name = key.partition("/")
        average = f"optimizer/{name}/{AVERAGE}"
        found[key] = tensors[average if kind == "weights" and average in tensors else key]
    return found


@dataclass(frozen=True, slots=True)
class ByName:
    """A function for `Job.optimizer`: makes an optimizer of the parameters of each pattern."""

    makers: tuple[tuple[str, Maker | None], ...]

    def __call__(self, parameters: Parameters) -> Composed:
        """Return one optimizer of all parts.

        Raises:   JobError: a pattern matches nothing, a parameter has none, or a part is wrong.
        """
        divided = self._divided(_named(parameters))
        parts = [
            _checked(pattern, maker(Parameters(rows)), rows)
            for (pattern, maker), rows in zip(self.makers, divided, strict=True)
            if maker is not None
        ]
        return Composed(parts)

    def _divided(self, named: Sequence[tuple[str, Any]]) -> list[list[tuple[str, Any]]]:
        """Return the parameters of each pattern: those that match none of the ones before.

        Raises:   JobError: a pattern matches nothing, or a parameter is trained by none.
        """
        rows: list[list[tuple[str, Any]]] = [[] for _ in self.makers]
        for name, parameter in named:
            matches = (fnmatch.fnmatchcase(name, pattern) for pattern, _ in self.makers)
            place = next((at for at, is_one in enumerate(matches) if is_one), None)
            if place is not None:
                rows[place].append((name, parameter))
            elif parameter.requires_grad:
                patterns = ", ".join(repr(pattern) for pattern, _ in self.makers)
                message = f"the parameter {name} matches none of the patterns {patterns}"
                raise JobError(message, hint='end with "*": adamw, or "*": None to leave the rest')
        for (pattern, _), own in zip(self.makers, rows, strict=True):
            if not own:
                names = [name for name, _ in named]
                every = any(fnmatch.fnmatchcase(name, pattern) for name in names)
                why = "no parameter that an earlier one leaves" if every else "no parameter"
                listed = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
                raise JobError(
                    f"the pattern {pattern!r} matches {why}", hint=f"there are: {listed}"
                )
        return rows


def _named(parameters: Parameters) -> Sequence[tuple[str, Any]]:
    named: Any = getattr(parameters, "named", None)
    if named is None:
        message = f"ps.by_name is given a {type(parameters).__name__} without names"
        raise JobError(message, hint="give it what Job.optimizer gets; its named() has the names")
    return named()


def _checked(pattern: str, made: object, rows: Sequence[tuple[str, Any]]) -> Optimizer:
    """Return the optimizer that a pattern's function has made.

    Raises:   JobError: it is none, or holds parameters of another pattern.
    """
    if not isinstance(made, Optimizer):
        message = f"what is made for the pattern {pattern!r} is a {type(made).__name__}"
        raise JobError(message, hint="return a torch optimizer: lambda weights: AdamW(weights)")
    own = {id(parameter) for _, parameter in rows}
    if any(id(p) not in own for group in made.param_groups for p in group["params"]):
        message = f"the optimizer of the pattern {pattern!r} holds parameters of other patterns"
        raise JobError(message, hint="build it from those that its function is given")
    return made


def by_name(makers: Mapping[str, Maker | None]) -> ByName:
    """Return a function for `Job.optimizer`: an optimizer for each pattern of parameters' names.

    makers:   by pattern, as "blocks.*.weight", a function of its parameters that makes their
              optimizer; None: they are not updated.  A parameter belongs to the first pattern that
              matches its name; * stands for anything, dots included.
    Raises:   JobError: there is no pattern, or what stands by one is no function.
    """
    if not makers:
        raise JobError("ps.by_name has no patterns", hint='give {"*": AdamW} at least')
    for pattern, maker in makers.items():
        if maker is not None and not callable(maker):
            message = f"what makes the optimizer of {pattern!r} is a {type(maker).__name__}"
            raise JobError(message, hint="give a function: lambda weights: AdamW(weights, lr=3e-4)")
    return ByName(tuple(makers.items()))
