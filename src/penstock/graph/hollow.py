"""Hollow: a model whose parameters have shapes and no memory, for a plan of machines elsewhere.

A trace reads no value of a parameter.  So the job's own function builds the model, and each
parameter that a module is given loses its memory at once: what initialises it then computes
nothing, and a model of any size is built in a second.  Buffers keep their values, which Python may
ask for, unless they are large.

Ignores:  parameters that are computed before a module is given them: they take memory meanwhile.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from penstock.errors import GraphError, PenstockError
from penstock.graph.functional import where
from penstock.graph.waiting import HOLLOW, is_hollow
from penstock.job import Job

_LARGE_BYTES = 1 << 26  # of a buffer, whose values nobody asks for


class HollowError(GraphError):
    """A constructor that asks for values of its parameters."""


def hollow(job: Job) -> Job:
    """Return `job` with a model that is built without values."""
    return replace(job, model=_Hollow(job.model))


class _Hollow:
    """Builds what `build` builds, hollow."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        self.build = build

    def __call__(self) -> nn.Module:
        with _without_values():
            try:
                model = self.build()
            except PenstockError:
                raise
            except Exception as problem:  # whatever the job's code raises
                raise HollowError(where(problem, "the model cannot be built without values")) from (
                    problem
                )
        HOLLOW.add(model)
        return model


@contextmanager
def _without_values() -> Generator[None]:
    """While active, parameters that modules are given lose their memory, and large buffers too."""
    known: Any = WeakIdKeyDictionary()  # a parameter that several modules are given stays one

    def parameter(module: nn.Module, name: str, given: Any) -> Any:
        if given is None or given.is_meta or is_lazy(given):
            return None
        if given not in known:
            made = nn.Parameter(_emptied(given), requires_grad=given.requires_grad)
            _keep_notes(given, made)
            known[given] = made
        return known[given]

    def buffer(module: nn.Module, name: str, given: Any) -> Any:
        if given is None or given.is_meta or given.numel() * given.element_size() <= _LARGE_BYTES:
            return None
        if given not in known:
            known[given] = _emptied(given)
        return known[given]

    hooks = (
        register_module_parameter_registration_hook(parameter),
        register_module_buffer_registration_hook(buffer),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _keep_notes(old: Tensor, new: Tensor) -> None:
    """Give a parameter what the author's code has noted on another one."""
    for name, value in vars(old).items():
        setattr(new, name, value)


def _emptied(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor.detach(), device="meta")


@contextmanager
def with_small_values(model: nn.Module, most: int) -> Generator[dict[str, Tensor]]:
    """Give a hollow model zeros for parameters, at most `most` long in each dimension, by name."""
    small: dict[int, nn.Parameter] = {}
    before: list[tuple[nn.Module, str, Any]] = []
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            before.append((module, name, parameter))
            if id(parameter) not in small:
                shape = [min(size, most) for size in parameter.shape]
                zeros = torch.zeros(shape, dtype=parameter.dtype)
                small[id(parameter)] = nn.Parameter(zeros, requires_grad=parameter.requires_grad)
                _keep_notes(parameter, small[id(parameter)])
            module.register_parameter(name, small[id(parameter)])
    try:
        yield {name: parameter.data for name, parameter in model.named_parameters()}
    finally:
        for module, name, parameter in before:
            module.register_parameter(name, parameter)


@contextmanager
def stand_ins(model: nn.Module, most: int) -> Generator[dict[str, Tensor]]:
    """Replace the parameters' values by zeros, at most `most` long in each dimension.

    It yields the zeros by name.  A hollow model has other parameters meanwhile.
    """
    if is_hollow(model):
        with with_small_values(model, most) as values:
            yield values
        return
    parameters = dict(model.named_parameters())
    before = {name: parameter.data for name, parameter in parameters.items()}
    for parameter in parameters.values():
        shape = [min(size, most) for size in parameter.shape]
        parameter.data = torch.zeros(shape, dtype=parameter.dtype)
    try:
        yield {name: parameter.data for name, parameter in parameters.items()}
    finally:
        for name, parameter in parameters.items():
            parameter.data = before[name]
