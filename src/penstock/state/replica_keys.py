"""Replica keys: what replicas that differ have in a checkpoint, each under keys of its own.

    KEY               of replica 0, and what all have alike ("anchor/NAME", "centre/NAME")
    replica-K/KEY     of replica K

Where other replicas, or a module, take such a checkpoint over, the weights are those that all of
them stand for: the mean, or the centre (`as_one`).
"""

from collections.abc import Iterable, Mapping
from itertools import count
from typing import TypeVar

import torch
from torch import Tensor

CENTRE = "centre"  # place of keys
WEIGHTS = "weights/"  # what such keys begin with
_REPLICA = "replica-{}/"
_Value = TypeVar("_Value")


def key_of(replica: int, key: str) -> str:
    """Return under which key something of a replica is saved."""
    return f"{_REPLICA.format(replica)}{key}" if replica else key


def replicas_in(keys: Iterable[str]) -> int:
    """Return how many replicas a checkpoint has that differ; 1 where all are alike."""
    found = {key.partition("/")[0] for key in keys if key.startswith("replica-")}
    return next(number for number in count(1) if _REPLICA.format(number)[:-1] not in found)


def own_of(held: Mapping[str, _Value], replica: int) -> dict[str, _Value]:
    """Return what replica `replica` of those in a checkpoint has, by the keys that it has alone.

    Of the first one that is what `as_one` was given.
    """
    prefix = _REPLICA.format(replica)
    rest = {key: value for key, value in held.items() if not key.startswith("replica-")}
    own = {k.removeprefix(prefix): value for k, value in held.items() if k.startswith(prefix)}
    return {**rest, **own}


def goes_on(
    tensors: Mapping[str, Tensor], plain: Mapping[str, object], place: tuple[int, int]
) -> tuple[Mapping[str, Tensor], Mapping[str, object]]:
    """Return what a replica goes on with of a checkpoint: all, or what was its own.

    Of one of another number of replicas, the weights that all of them stand for, and else what
    replica `place` modulo their number had.
    place:    its number, and how many replicas there are.
    """
    (replica, replicas), count = place, replicas_in(tensors)
    if count == 1:
        return tensors, plain
    own = own_of(tensors, replica % count)
    if count != replicas:
        own |= {key: value for key, value in tensors.items() if key.startswith(WEIGHTS)}
    return own, own_of(plain, replica % count)


def as_one(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of a checkpoint with the weights that all replicas together stand for.

    They are the centre, if there is one, else the mean; those of replica 0 are "replica-0/...".
    """
    replicas, found = replicas_in(tensors), dict(tensors)
    for key in tensors if replicas > 1 else ():
        if key.startswith(WEIGHTS):
            found[f"{_REPLICA.format(0)}{key}"] = tensors[key]
            found[key] = one_of(tensors, key, replicas)
    return found


def keys_for(key: str, replicas: int) -> list[str]:
    """Return the keys of all that `one_of` asks for."""
    centre = f"{CENTRE}/{key.removeprefix(WEIGHTS)}"
    return [centre, *(key_of(each, key) for each in range(replicas))]


def one_of(rows: Mapping[str, Tensor], key: str, replicas: int) -> Tensor:
    """Return the weights that so many replicas together stand for, of one key.

    rows:     of `keys_for`, those that there are.
    """
    centre, *own = keys_for(key, replicas)
    if centre in rows:
        return rows[centre]
    values = [rows[each] for each in own]
    if not values[0].is_floating_point():
        return values[0]
    return torch.stack([value.double() for value in values]).mean(0).to(values[0].dtype)
