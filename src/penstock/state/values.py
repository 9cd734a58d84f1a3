"""Values: what a checkpoint keeps of a value of Python, as tensors and plain values by place.

A list, tuple, deque or dict is taken apart down to tensors, numbers and text; so are an array of
numpy, a generator of torch and what has a state_dict.  What is left cannot be saved.
"""

# Any value may come by here.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Plain = dict[str, object]
Tensors = dict[str, Tensor]
_LARGE = 2**63  # of whole numbers, which JSON is not read back with everywhere


class OddError(Exception):
    """A value that cannot be saved; the message is its type."""


class LostValue:
    def __init__(self, kind: str) -> None:
        self.kind = kind


class StateDictValue:
    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content


def put_value(place: str, value: Any, tensors: Tensors, plain: Plain) -> None:
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        tensors[place] = value
        return
    leaves: list[Tensor] = []
    plain[place] = apart_value(value, leaves)
    for number, leaf in enumerate(leaves):
        tensors[f"{place}/{number}"] = leaf


def apart_value(value: Any, leaves: list[Tensor]) -> object:
    """Return `value` as JSON has it; its tensors are added to `leaves`."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(float(value))}
    if isinstance(value, int) and abs(value) >= _LARGE:
        return {"int": str(int(value))}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        array = np.ascontiguousarray(value)
        leaves.append(torch.from_numpy(np.frombuffer(array.tobytes(), np.uint8).copy()))  # pyright: ignore
        about = [str(array.dtype), list(value.shape), isinstance(value, np.generic)]
        return {"array": len(leaves) - 1, "about": about}
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        leaves.append(value)
        return {"tensor": len(leaves) - 1}
    if isinstance(value, torch.Generator):
        leaves.append(value.get_state())
        return {"generator": len(leaves) - 1, "device": str(value.device)}
    if type(value) in (list, tuple, deque):
        values: list[Any] = list(value)  # pyright: ignore[reportArgumentType]
        parts = {type(value).__name__: [apart_value(each, leaves) for each in values]}
        return {**parts, "most": value.maxlen} if isinstance(value, deque) else parts
    if isinstance(value, dict):
        rows: list[Any] = list(value.items())
        return {"dict": [[apart_value(one, leaves) for one in row] for row in rows]}
    if hasattr(value, "load_state_dict") and not isinstance(value, nn.Module):
        return {"state_dict": apart_value(_state_dict(value), leaves)}
    raise OddError(type(value).__name__)


def _state_dict(value: Any) -> Any:
    return value.state_dict()


def lost_kind(kept: object) -> str:
    """Return the type of what could not be saved, of what is kept in its place; else nothing."""
    noted: dict[str, Any] = {**kept} if isinstance(kept, dict) else {}
    return str(noted.get("lost", ""))


def take_value(place: str, tensors: Mapping[str, Tensor], plain: Mapping[str, object]) -> Any:
    if place in tensors:
        return tensors[place].clone()
    return _together(plain[place], place, tensors)


def _together(found: Any, place: str, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(found, dict):
        return found
    parts: dict[str, Any] = {**found}
    kind, content = next(iter(parts.items()))
    match kind:
        case "float":
            return float(content)
        case "tensor":
            return tensors[f"{place}/{content}"].clone()
        case "generator":
            return torch.Generator(parts["device"]).set_state(tensors[f"{place}/{content}"])
        case "int":
            return int(content)
        case "array":
            dtype, shape, alone = parts["about"]
            array = np.frombuffer(tensors[f"{place}/{content}"].numpy().tobytes(), dtype)
            return array.reshape(shape)[()] if alone else array.reshape(shape).copy()
        case "list" | "tuple" | "deque":
            values = [_together(each, place, tensors) for each in content]
            if kind == "deque":
                return deque(values, parts.get("most"))
            return values if kind == "list" else tuple(values)
        case "dict":
            return dict([_together(one, place, tensors) for one in row] for row in content)
        case "state_dict":
            return StateDictValue(_together(content, place, tensors))
        case _:
            return LostValue(str(content))
