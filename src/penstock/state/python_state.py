"""Python state: what a job keeps in Python, in a checkpoint and back in the objects of its code.

    state/NAME           what `Job.state` names
    extra/MODULE         what `get_extra_state` of a module returns
    state-rates          for how many steps a learning rate with state was asked
    state-random         the generators of Python and numpy, where the job draws from them

Nothing is pickled: tensors, numbers, text, and lists, tuples and dicts of these.
"""

# Any object may come by here.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false

import math
import random
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.errors import CheckpointError
from penstock.job import Job
from penstock.state.optimizer.rates import ReplayedRate
from penstock.state.optimizer_state import digest
from penstock.state.values import OddError, Plain, StateDictValue, Tensors, put_value, take_value

EXTRA = "penstock extra state"  # of an exported file's metadata
RATES, RANDOM, WHOLE = "state-rates", "state-random", "state-whole"
_HINT = "let it be tensors, numbers and text, in lists, tuples and dicts"


def put_named(job: Job, model: nn.Module, tensors: Tensors, plain: Plain) -> None:
    """Add what `job` names, what modules of `model` keep beside tensors, and the rates told.

    Raises:   CheckpointError: something of it cannot be saved.
    """
    for name, value in job.state.items():
        _put(f"state/{name}", _content(value), tensors, plain)
    for name, module in with_extra(model):
        _put(f"extra/{name}", module.get_extra_state(), tensors, plain)
    if (rate := replays_of(job)) is not None:
        plain[RATES] = len(rate.told)


def take_named(
    job: Job, model: nn.Module, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]
) -> None:
    """Put what `put_named` added back into the objects of `job` and of `model`.

    What a checkpoint does not hold stays as it is.  A rate with state is told all steps first.
    """
    rate = replays_of(job)
    if rate is not None and plain.get(RATES):
        rate(plain[RATES] - 1)
    if WHOLE in plain:
        put_back(job, _unpacked(plain[WHOLE]))
    for name, value in job.state.items():
        if (place := f"state/{name}") in {*plain, *tensors}:
            _give_back(value, take_value(place, tensors, plain))
    take_extra(model, tensors, plain)


def take_extra(model: nn.Module, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
    """Give modules of `model` the extra state that a checkpoint holds of them."""
    for name, module in with_extra(model):
        if (place := f"extra/{name}") in {*plain, *tensors}:
            module.set_extra_state(take_value(place, tensors, plain))


def snapshot(job: Job) -> tuple[Tensors, Plain]:
    """Return a copy of what `job` names, as `put_named` adds it."""
    tensors, plain = Tensors(), Plain()
    for name, value in job.state.items():
        _put(f"state/{name}", _content(value), tensors, plain)
    return {key: value.detach().clone() for key, value in tensors.items()}, plain


def put_back(job: Job, state: tuple[Mapping[str, Tensor], Mapping[str, Any]]) -> None:
    """Put a copy of `snapshot` back."""
    for name, value in job.state.items():
        _give_back(value, take_value(f"state/{name}", *state))


def packed(job: Job) -> Plain:
    """Return what `job` names as plain values alone, tensors included, for `take_named`."""
    if not job.state:
        return {}
    tensors, plain = snapshot(job)
    rows = {
        key: [str(value.dtype).removeprefix("torch."), list(value.shape), _bytes_of(value).hex()]
        for key, value in tensors.items()
    }
    return {WHOLE: [rows, plain]}


def _unpacked(whole: Any) -> tuple[Tensors, Plain]:
    rows, plain = whole
    found = Tensors()
    for key, (dtype, shape, text) in rows.items():
        flat = torch.frombuffer(
            bytearray.fromhex(text) or bytearray(8), dtype=getattr(torch, dtype)
        )
        found[key] = flat[: math.prod(shape)].reshape(shape).clone()
    return found, plain


def _bytes_of(value: Tensor) -> bytes:
    flat = value.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def digests(job: Job) -> dict[str, bytes]:
    """Return by name what is different where the state of an object that `job` names differs."""
    tensors, plain = snapshot(job)
    found = dict[str, bytes]()
    for name in job.state:
        own = [key for key in (*plain, *tensors) if f"{key}/".startswith(f"state/{name}/")]
        parts = (repr(plain[key]).encode() if key in plain else digest(tensors[key]) for key in own)
        found[name] = b"".join(parts)
    return found


def replays_of(job: Job) -> ReplayedRate | None:
    """Return the rate of `job` that is told all steps in order, if it has one."""
    rate: Any = job.learning_rate
    while rate is not None and not isinstance(rate, ReplayedRate):
        rate = getattr(rate, "rate", None)  # of one that follows another batch
    return rate


# -- generators that all share --------------------------------------------------------------------


def chance() -> tuple[Any, ...]:
    """Return the state of the generators of Python and of numpy."""
    return random.getstate(), np.random.get_state(legacy=True)


def put_chance(tensors: Tensors, plain: Plain) -> None:
    """Add the state of the generators of Python and of numpy."""
    put_value(RANDOM, list(chance()), tensors, plain)


def saved_chance(tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what `put_chance` added; if that is nothing, the state as it is."""
    return tuple(take_value(RANDOM, tensors, plain)) if RANDOM in plain else chance()


def take_chance(tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
    """Put back what `put_chance` added, if it is there."""
    own, numpys = saved_chance(tensors, plain)
    random.setstate(own)
    np.random.set_state(numpys)


def is_moved(before: tuple[Any, ...]) -> bool:
    """Return whether one of these generators is not where it was."""
    own, numpys = before
    now: Any = np.random.get_state(legacy=True)
    same = np.array_equal(now[1], numpys[1]) and now[2:] == numpys[2:]
    return own != random.getstate() or not same


# -- objects --------------------------------------------------------------------------------------


def _put(place: str, value: object, tensors: Tensors, plain: Plain) -> None:
    try:
        put_value(place, value, tensors, plain)
    except OddError as odd:
        message = f"{place} of the job holds a {odd}, which cannot be saved"
        raise CheckpointError(message, hint=_HINT) from None


def extra_key(name: str) -> str:
    """Return the key of a module's extra state in the `state_dict` of the model."""
    return f"{name}._extra_state".removeprefix(".")


def with_extra(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that tell what they keep beside tensors, by name."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield name, module


def _content(value: Any) -> object:
    """Return the state of an object that `Job.state` may name."""
    if isinstance(value, Tensor | dict | list | deque):
        return value.detach() if isinstance(value, Tensor) else value
    if hasattr(value, "load_state_dict"):
        return value.state_dict()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return dict(value.bit_generator.state)
    return value.get_state()


def _give_back(value: Any, content: Any) -> None:
    """Give an object its state; a tensor, list or dict stays the very object that it is."""
    if isinstance(value, Tensor):
        with torch.no_grad():
            value.copy_(content)
    elif isinstance(value, dict):
        held: dict[Any, Any] = {**value}
        value.clear()
        value.update({key: _merged(held.get(key), one) for key, one in content.items()})
    elif isinstance(value, list | deque):
        rows: list[Any] = list(value)
        old = [*rows, *[None] * len(content)]
        value.clear()
        value.extend(_merged(one, new) for one, new in zip(old, content, strict=False))
    elif hasattr(value, "load_state_dict"):
        value.load_state_dict(content)
    elif isinstance(value, random.Random):
        value.setstate(content)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = content
    else:
        value.set_state(content)


def _merged(old: Any, new: Any) -> Any:
    """Return `new`, in the object that was there where that can hold it."""
    if isinstance(new, StateDictValue):
        old.load_state_dict(new.content)
        return old
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        if (old.shape, old.dtype) != (new.shape, new.dtype) or not old.is_leaf:
            return new
        with torch.no_grad():
            return old.copy_(new.to(old.device))
    if any(isinstance(old, kind) and isinstance(new, kind) for kind in (dict, list)):
        _give_back(old, new)
        return old
    return new
