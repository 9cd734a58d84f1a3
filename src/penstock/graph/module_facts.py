"""Module facts: what a traced step takes for granted of the modules of its model.

Who learns, who is in training mode, which module is where, its hooks, the numbers that a module of
torch reads, of a dropout its p.  Nobody runs these modules while ranks train by a plan, so what the
job's code changes there later is not followed.  Nor is what it writes into their weights and
buffers: ranks have their own.
"""

import math
from collections.abc import Iterator, Mapping
from functools import cache
from types import FunctionType

import torch
from torch import Tensor, nn

from penstock import _compat
from penstock.graph.batch import PLAIN
from penstock.graph.lasting import lasting_buffers

Facts = dict[str, object]

SINCE = "since the model was traced, and ranks go on as it was then"
_SAMPLE = 4096  # numbers of a tensor that are told apart by their places, too
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def module_facts(model: nn.Module) -> Facts:
    """Return who learns, who is in training mode, which module is where, and its hooks."""
    facts: Facts = {}
    for name, parameter in model.named_parameters():
        facts[f"requires_grad of {name}"] = parameter.requires_grad
        facts[f"the hooks of {name}"] = _compat.num_gradient_hooks(parameter)
    for name, module in _compat.named_modules(model):
        facts[f"training of {name}"] = module.training
        facts[f"the class of {name}"] = type(module).__qualname__
        facts[f"the hooks of module {name}"] = _compat.hooks_of(module)
    return facts


def traced_facts(model: nn.Module) -> Facts:
    """Return these facts so that two models can be compared, and the numbers of torch's modules."""
    facts = module_facts(model)
    for path, module in _compat.named_modules(model):
        facts[f"the hooks of module {path}"] = len(_compat.hooks_of(module))
        if type(module).__module__.startswith("torch."):
            names = _made_with(type(module))
            held = ((n, v) for n, v in vars(module).items() if n in names)
            facts |= {f"{n} of {path}": v for n, v in held if isinstance(v, PLAIN)}
    return facts


@cache
def _made_with(kind: type) -> frozenset[str]:
    """Return the names that modules of a class are made with; others are notes of the job's."""
    makers = (vars(each).get("__init__") for each in kind.__mro__)
    names = (each.__code__.co_names for each in makers if isinstance(each, FunctionType))
    return frozenset(name for each in names for name in each if not name.startswith("_"))


def value_facts(model: nn.Module) -> Facts:
    """Return digests of the values of its weights and buffers."""
    held = {**dict(model.named_parameters()), **lasting_buffers(model)}
    return {f"the values of {name}": _told(tensor) for name, tensor in held.items()}


def _told(tensor: Tensor) -> object:
    """Return the sum of all bits, and a digest of every so many numbers of a large tensor."""
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return tuple(tensor.shape)
    flat = tensor.detach().resolve_conj().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    bits = flat.view(_BITS[flat.element_size()])
    some = bits[:: bits.numel() // _SAMPLE + 1].contiguous().cpu()
    return int(bits.sum()), hash(some.numpy().tobytes())


def changes(before: Mapping[str, object], after: Mapping[str, object]) -> Iterator[str]:
    """Yield in words what is another fact afterwards, or is none."""
    for what, value in before.items():
        if what not in after:
            yield f"{what} is gone"
        elif after[what] != value and not _are_nan(value, after[what]):
            shown = isinstance(value, PLAIN) and isinstance(after[what], PLAIN)
            yield f"{what}: {value}, then {after[what]}" if shown else f"{what}: changed"
    yield from (f"{what} is new" for what in after.keys() - before.keys())


def _are_nan(one: object, other: object) -> bool:
    return all(isinstance(each, float) and math.isnan(each) for each in (one, other))
