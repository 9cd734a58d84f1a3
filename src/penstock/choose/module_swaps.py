"""Module swaps: a job with modules of its model replaced by others that compute the same.

A rule names modules and a function that makes the other module of the one.  The other has the
parameters and buffers of the one, by name; it gets these very tensors, so that weights, ties and
checkpoints stay what they were.  Before it is used, one step of both models is compared.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from penstock import _compat
from penstock.errors import JobError, PlanError
from penstock.graph.contents import flatten
from penstock.job import Job, load_function
from penstock.processes.child import apart
from penstock.prove.compare import Difference, compared, compared_gradients, is_narrow
from penstock.prove.plain import Plain
from penstock.prove.proof import LOW_PRECISION_TOLERANCE, TOLERANCE
from penstock.rules.rule import Rule
from penstock.rules.ruled import matched
from penstock.typed import typed

_HINT = "a module that replaces another computes the same, forward and backward, on the same state"
_Swap = tuple[Rule, Callable[..., object]]


def replaced(job: Job, rules: Sequence[Rule]) -> Job:
    """Return `job` with modules replaced where `rules` say so; itself where none does.

    Raises:   JobError: a rule names no function.
    """
    swaps = [(rule, load_function(rule.how, _folder(rule))) for rule in rules if _replaces(rule)]
    return replace(job, model=partial(_built, job.model, swaps)) if swaps else job


def verify(author: Job, job: Job, rules: Sequence[Rule]) -> None:
    """Compare one step of a job with that of its author's: loss, gradients and buffers.

    In a process of its own, for the functions of a job may change what they like.
    Raises:   JobError: a module is replaced by one that computes something else.
    """
    wrong = typed(list[str], apart(lambda: _differences(author, job, rules)))
    if wrong:
        raise JobError(wrong[0], hint=_HINT)


def _replaces(rule: Rule) -> bool:
    return rule.verb == "replace"


def _folder(rule: Rule) -> Path:
    """Return where files stand that a rule names: beside the file that it is in."""
    return Path(rule.file).parent


# -- building -------------------------------------------------------------------------------------


def _built(make: Callable[[], nn.Module], swaps: Sequence[_Swap]) -> nn.Module:
    model = make()
    for rule, other in swaps:
        for name in _matched(rule, model):
            _put(model, model.get_submodule(name), _made(rule, name, model, other))
    return model


def _matched(rule: Rule, model: nn.Module) -> tuple[str, ...]:
    try:
        return matched(rule, [name for name, _ in _compat.named_modules(model) if name])
    except PlanError as problem:
        raise JobError(problem.message, hint=problem.hint) from problem


def _made(rule: Rule, name: str, model: nn.Module, make: Callable[..., object]) -> nn.Module:
    """Return what replaces a module, with its parameters and buffers.

    Raises:   JobError: it is no module, or has others.
    """
    old = model.get_submodule(name)
    new = make(old)
    if not isinstance(new, nn.Module):
        raise JobError(f"{rule}: for {name} it is the {type(new).__name__} {new!r:.40}", hint=_HINT)
    own, other = old.state_dict(keep_vars=True), new.state_dict(keep_vars=True)
    shapes = [{key: tuple(value.shape) for key, value in each.items()} for each in (own, other)]
    if shapes[0] != shapes[1]:
        odd = sorted(shapes[0].items() ^ shapes[1].items())[0]
        side = name if odd in shapes[0].items() else "what replaces it"
        hint = "give it parameters and buffers of the same names and shapes"
        raise JobError(f"{rule}: only {side} has {odd[0]} of {odd[1]}", hint=hint)
    for key, value in own.items():
        path, _, leaf = key.rpartition(".")
        setattr(new.get_submodule(path), leaf, value)
    return new.train(old.training)


def _put(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Let `new` stand wherever `old` does."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is old:
                setattr(parent, name, new)


# -- comparing ------------------------------------------------------------------------------------


def _differences(author: Job, job: Job, rules: Sequence[Rule]) -> list[str]:
    """Return what differs between one step of both jobs, in words, where it begins first."""
    loops = Plain(author), Plain(job)
    is_exact = author.precision is author.autocast is None
    is_exact = is_exact and not any(map(is_narrow, loops[0].parameters.values()))
    limit = TOLERANCE if is_exact else LOW_PRECISION_TOLERANCE
    names = [
        (rule, name) for rule in rules if _replaces(rule) for name in _matched(rule, loops[0].model)
    ]
    seen = [_outputs(loop.model, [name for _, name in names]) for loop in loops]
    steps = [loop.gradients(0) for loop in loops]
    for rule, name in names:
        for one, other in zip(*(each[name] for each in seen), strict=False):
            row = compared("output", {"": other}, {"": one})
            if not row.value <= limit:
                return [f"{rule}: the output of {name} {_by(row)}"]
    rows = [
        compared_gradients(steps[1].gradients, steps[0].gradients),
        compared("buffers", loops[1].buffers(), loops[0].buffers()),
    ]
    last = names[-1][0]
    return [f"{last}: {row.what} of {row.where} {_by(row)}" for row in rows if row.value > limit]


def _by(row: Difference) -> str:
    return f"differs by {row.value:.3g}" if row.value < float("inf") else "is of another shape"


def _outputs(model: nn.Module, names: Sequence[str]) -> dict[str, list[Tensor]]:
    """Return what modules give in the first micro-batch, once it has run."""
    found: dict[str, list[Tensor]] = {name: [] for name in names}

    def keep(name: str, _: nn.Module, __: Any, output: Any) -> None:
        if not found[name]:
            leaves = flatten(output)[0]
            found[name] += [leaf.detach().clone() for leaf in leaves if isinstance(leaf, Tensor)]

    for name in names:
        model.get_submodule(name).register_forward_hook(partial(keep, name))
    return found
