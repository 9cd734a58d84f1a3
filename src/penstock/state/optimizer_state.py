"""Optimizer state: what an optimizer holds, as tensors and plain values by key, and back.

    optimizer/NAME/KEY              its state of one parameter
    optimizer.ATTRIBUTE/NAME/KEY    so of a dict by parameter or name, or an optimizer inside
    optimizer-group/2/KEY           an option of a group that it has changed by itself
    optimizer-own/ATTRIBUTE         an attribute of its own that is not as it was made
    optimizer-kind                  its class

Lists, tuples, dicts and generators of random numbers are taken apart (values.py).
"""

import hashlib
import io
import pickle
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock import _compat
from penstock.errors import CheckpointError
from penstock.graph.composed import COUNT, kind_of
from penstock.state.optimizer.rates import changed_options, options_of
from penstock.state.values import (
    LostValue,
    OddError,
    Plain,
    StateDictValue,
    Tensors,
    apart_value,
    put_value,
    take_value,
)

Parameters = Mapping[str, nn.Parameter]
_ALONE = "="  # the key of a value that is no dict by itself
_BY_NAME = ":name"  # ends the place of a dict by the names of parameters
_LARGE_BYTES = 2**16  # of what is remembered of an attribute as it was at first
_HINT = "keep it in optimizer.state, as tensors, numbers and text in lists, tuples and dicts"


def put_state(optimizer: Optimizer, parameters: Parameters, tensors: Tensors, plain: Plain) -> None:
    """Add what an optimizer, and those inside it, hold for some parameters, by their names.

    Raises:   CheckpointError: it holds something that cannot be saved.
    """
    for place, name, key, value in _entries(optimizer, parameters):
        try:
            if not isinstance(key, str) or "/" in key:
                raise OddError(f"value under a key of type {type(key).__name__}")
            put_value(f"{place}/{name}/{key}", value, tensors, plain)
        except OddError as odd:
            message = f"the optimizer's {key} of {name} is a {odd}, which cannot be saved"
            raise CheckpointError(message, hint=_HINT) from None
    plain["optimizer-kind"] = kind_of(optimizer)


def take_state(
    optimizer: Optimizer,
    parameters: Parameters,
    tensors: Mapping[str, Tensor],
    plain: Mapping[str, object],
) -> None:
    """Give an optimizer back what `put_state` took.

    Raises:   CheckpointError: it is the state of an optimizer of another class.
    """
    kind, own = plain.get("optimizer-kind"), kind_of(optimizer)
    if kind is not None and kind != own:
        message = f"the checkpoint's optimizer is {kind}, the job's is {own}"
        raise CheckpointError(message, hint=f"continue with {kind}, or start without resume")
    for (place, name), keys in _keys_of({**tensors, **plain}).items():
        if name in parameters:
            one, store = _store_at(optimizer, place)
            parameter = parameters[name]
            found = {
                key: _on_device(
                    take_value(f"{place}/{name}/{key}", tensors, plain), key, parameter, one
                )
                for key in keys
            }
            index = name if place.endswith(_BY_NAME) else parameter
            store[index] = found[_ALONE] if found.keys() == {_ALONE} else found


def _store_at(optimizer: Optimizer, place: str) -> tuple[Optimizer, dict[Any, Any]]:
    """Return the store of that place, made where the optimizer makes it late, and its owner.

    Raises:   CheckpointError: there is no such optimizer.
    """
    inside = dict(nested(optimizer))
    if place in inside:
        return inside[place], inside[place].state
    way, _, attribute = place.removesuffix(_BY_NAME).rpartition(".")
    if way not in inside:
        message = f"the checkpoint holds {place}, which the job's optimizer lacks"
        raise CheckpointError(message, hint="is it a checkpoint of another job?")
    if not isinstance(getattr(inside[way], attribute, None), dict):
        setattr(inside[way], attribute, {})
    return inside[way], getattr(inside[way], attribute)


def _keys_of(places: Iterable[str]) -> dict[tuple[str, str], list[str]]:
    """Return the keys of what is kept for each parameter, by store and name."""
    found: dict[tuple[str, str], list[str]] = {}
    for whole in places:
        place, slash, rest = whole.partition("/")
        name, _, key = rest.rpartition("/")
        if slash and name and (place == "optimizer" or place.startswith("optimizer.")):
            found.setdefault((place, name), []).append(key)
    return found


def _entries(
    optimizer: Optimizer, parameters: Parameters
) -> Iterator[tuple[str, str, object, object]]:
    """Yield store, name, key and value of all that is held for some parameters."""
    for place, store in _stores(optimizer, parameters):
        for name, parameter in parameters.items():
            index = name if place.endswith(_BY_NAME) else parameter
            if index in store:
                held = store[index]
                rows = _as_list(held.items()) if isinstance(held, dict) else [(_ALONE, held)]  # pyright: ignore
                for key, value in rows:
                    yield place, name, key, value


def _stores(optimizer: Optimizer, parameters: Parameters) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Yield what is held by parameter, or by its name: states, and dicts as attributes."""
    seen = set[int]()  # parts of one optimizer have one state
    for place, one in nested(optimizer):
        if id(one.state) not in seen:
            seen.add(id(one.state))
            yield place, one.state
        for name, value in _compat.added_attributes(one).items():
            if is_store(value, parameters):
                by_name = isinstance(next(iter(value)), str)
                yield f"{place}.{name}{_BY_NAME if by_name else ''}", value


def is_store(value: Any, parameters: Parameters) -> bool:
    """Return whether a value is a dict by parameter, or by the names of parameters."""
    keys = _as_list(value) if isinstance(value, dict) else []
    if not keys:
        return False
    if isinstance(keys[0], str):
        return any(key in parameters for key in keys)
    return all(isinstance(key, nn.Parameter) for key in keys)


def _on_device(value: Any, key: str, parameter: Tensor, optimizer: Optimizer) -> Any:
    """Return a tensor where torch keeps it: with its parameter, but for the count of steps."""
    if not isinstance(value, Tensor):
        return value
    own: dict[str, Any] = {}
    for group in optimizer.param_groups:
        own = group if any(p is parameter for p in group["params"]) else own
    if key == COUNT or (key == "step" and not (own.get("capturable") or own.get("fused"))):
        return value
    return value.to(parameter.device)


def nested(optimizer: Optimizer, place: str = "optimizer") -> list[tuple[str, Optimizer]]:
    """Return an optimizer and those that it holds as attributes, with the way to each."""
    found = [(place, optimizer)]
    for name, value in _compat.added_attributes(optimizer).items():
        for number, one in enumerate(_inside(value)):
            if isinstance(one, Optimizer):
                way = f"{place}.{name}" if one is value else f"{place}.{name}.{number}"
                found += nested(one, way)
    return found


def _inside(value: Any) -> list[Any]:
    """Return the items of a list or tuple; else the value alone."""
    return _as_list(value) if isinstance(value, list | tuple) else [value]


def _as_list(values: Any) -> list[Any]:
    return list(values)


# -- what is of no single parameter ---------------------------------------------------------------


class ExtraState:
    """What an optimizer holds beside the state of parameters, and what of it has changed.

    is_whole:  else it is that of a stage, whose lists and dicts tell only of a part.
    """

    def __init__(self, optimizer: Optimizer, parameters: Parameters, *, is_whole: bool) -> None:
        self.optimizer, self.parameters, self.is_whole = optimizer, parameters, is_whole
        self.first = {place: _digest(value) for place, _, value in self._attributes()}
        self.at_first = {place: _copied(value) for place, _, value in self._attributes()}
        self.had = {(place, name) for place, name, *_ in _entries(optimizer, parameters)}
        self.counts = {place: len(one.param_groups) for place, one in nested(optimizer)}
        seen = {id(group) for group in optimizer.param_groups}  # those of its parts are its own
        inside = [(p, o) for p, o in nested(optimizer)[1:] if not _all_in(o.param_groups, seen)]
        self.options = {place: options_of(one) for place, one in inside}

    def put(self, changed: Iterable[Mapping[str, Any]], tensors: Tensors, plain: Plain) -> None:
        """Add the options `changed` of each group, and the attributes that are not as at first.

        Of what cannot be saved the type is noted, so that no run is resumed without it.
        """
        groups = {"optimizer": changed}
        for place, one in nested(self.optimizer)[1:]:
            if place in self.options:
                groups[place] = changed_options(one, self.options[place])
        for place, one in nested(self.optimizer):
            for number in range(self.counts.get(place, 0), len(one.param_groups)):
                plain[f"{_groups(place)}/{number}/params"] = {"lost": "group added later"}
        for place, rows in groups.items():
            for number, options in enumerate(rows):
                for key, value in options.items():
                    self._try(f"{_groups(place)}/{number}/{key}", value, tensors, plain)
        for place, _, value in self._attributes():
            if self.first.get(place) != _digest(value):
                self._try(place, value, tensors, plain)

    def _try(self, place: str, value: Any, tensors: Tensors, plain: Plain) -> None:
        try:
            if not self.is_whole and type(value) in (list, dict):
                raise OddError(type(value).__name__)
            put_value(place, value, tensors, plain)
        except OddError as odd:
            plain[place] = {"lost": str(odd)}

    def take(self, tensors: Mapping[str, Tensor], plain: Mapping[str, object]) -> None:
        """Give the optimizer back what `put` added; what it did not add is as it was at first.

        So one that has made steps already goes on from any state as a new one does, but for
        attributes with large tensors, and options of its groups: these may be a scheduler's.
        Raises:   CheckpointError: something of it could not be saved.
        """
        self._begin_anew({**tensors, **plain})
        owners = {_own(place): one for place, one in nested(self.optimizer)}
        grouped = {_groups(place): one for place, one in nested(self.optimizer)}
        for place in {**tensors, **plain}:
            kind, _, name = place.partition("/")
            if kind in grouped and name.count("/") == 1:
                number, _, key = name.partition("/")
                grouped[kind].param_groups[int(number)][key] = _found(place, tensors, plain)
            elif kind in owners and "/" not in name:
                _give(owners[kind], name, _found(place, tensors, plain))

    def _begin_anew(self, kept: Mapping[str, object]) -> None:
        """Give what is not in a checkpoint, and is no more as it was at first, its first value."""
        for place, owner, value in list(self._attributes()):
            name = place.partition("/")[2]
            if place in kept or self.first.get(place) == _digest(value):
                continue
            if place not in self.first:
                vars(owner).pop(name, None)
            elif (first := self.at_first[place]) is not None:
                _give(owner, name, take_value("", *first))
        known = _keys_of(kept)
        for place, store in list(_stores(self.optimizer, self.parameters)):
            for name, parameter in self.parameters.items():
                if (place, name) not in known and (place, name) not in self.had:
                    store.pop(name if place.endswith(_BY_NAME) else parameter, None)

    def _attributes(self) -> Iterator[tuple[str, Optimizer, Any]]:
        """Yield place, owner and value of every attribute that torch does not give them all."""
        inside = nested(self.optimizer)
        for place, one in inside:
            owner = _own(place)
            for name, value in _compat.added_attributes(one).items():
                if not (_holds_optimizer(value) or is_store(value, self.parameters)):
                    yield f"{owner}/{name}", one, value
            loose = {key: value for key, value in one.state.items() if not _is_parameter(key)}
            yield f"{owner}/state", one, loose


def _all_in(groups: Iterable[Mapping[str, Any]], seen: set[int]) -> bool:
    return all(id(group) in seen for group in groups)


def _own(place: str) -> str:
    """Return where the attributes of the optimizer at a place are kept."""
    return place.replace("optimizer", "optimizer-own", 1)


def _groups(place: str) -> str:
    """Return where the options of the optimizer at a place are kept."""
    return place.replace("optimizer", "optimizer-group", 1)


def _is_parameter(key: object) -> bool:
    return isinstance(key, Tensor)


def _holds_optimizer(value: Any) -> bool:
    return any(isinstance(one, Optimizer) for one in _inside(value))


def _copied(value: Any) -> tuple[Tensors, Plain] | None:
    """Return a copy of a value, as a checkpoint has it; None: it is large, or cannot be saved."""
    tensors, plain = Tensors(), Plain()
    try:
        put_value("", value, tensors, plain)
    except OddError:
        return None
    if sum(leaf.nbytes for leaf in tensors.values()) > _LARGE_BYTES:
        return None
    return {place: leaf.detach().clone() for place, leaf in tensors.items()}, plain


def _give(owner: Optimizer, name: str, value: Any) -> None:
    old: Any = getattr(owner, name, None)
    if name == "state":
        for key in [key for key in owner.state if not _is_parameter(key)]:
            del owner.state[key]
        owner.state.update(value)
    elif isinstance(value, StateDictValue):
        old.load_state_dict(value.content)
    else:
        setattr(owner, name, value)


def _found(place: str, tensors: Mapping[str, Tensor], plain: Mapping[str, object]) -> Any:
    value = take_value(place, tensors, plain)
    if isinstance(value, LostValue):
        name = place.rpartition("/")[2]
        message = f"the optimizer's {name}, a {value.kind}, has changed and was not saved"
        raise CheckpointError(message, hint=_HINT)
    return value


def digest(value: Tensor) -> bytes:
    """Return what is different for tensors that differ in a bit, a shape or a dtype."""
    data = value.detach().cpu().contiguous()
    content = hashlib.blake2b(f"{data.dtype}{list(data.shape)}".encode(), digest_size=16)
    content.update(data.reshape(-1).view(torch.uint8).numpy().tobytes())
    return content.digest()


def _digest(value: Any) -> bytes:
    """Return what is different for values that differ, as far as that can be told."""
    leaves: list[Tensor] = []
    try:
        text = repr(apart_value(value, leaves)).encode()
    except OddError as odd:
        return _pickled(value) or str(odd).encode()
    return text + b"".join(map(digest, leaves))


class _Pickler(pickle.Pickler):
    """One to which all parameters and modules are alike: what they hold is kept elsewhere."""

    def persistent_id(self, obj: Any) -> str | None:
        return "of the model" if isinstance(obj, nn.Parameter | nn.Module | Optimizer) else None


def _pickled(value: Any) -> bytes:
    """Return a pickle; nothing for what cannot be pickled, as a function inside another one."""
    content = io.BytesIO()
    try:
        _Pickler(content).dump(value)
    except Exception:  # noqa: BLE001 - whatever the classes of the job raise
        return b""
    return content.getvalue()


def state_digests(optimizer: Optimizer, parameters: Parameters) -> Iterator[tuple[str, str, bytes]]:
    """Yield name, key, and what is different where the state of that name differs."""
    for place, name, key, value in _entries(optimizer, parameters):
        yield name, f"{place}/{key}", _digest(value)


def tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors that a value holds."""
    return [leaf for leaf in _compat.pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
