"""Averaging: the sequential definition of how replicas average weights, all of them at once.

After the update of step t of a run, the first being step 1, where t is a multiple of H:

    local     w_i = mean of all w
    diloco    d = a - mean of all w;  v = m v + d;  a = a - r (d + m v);  w_i = a
    easgd     w_i = w_i - p (w_i - c);  c = c + p (sum of all w_i - c)
    gossip    w_i = (w_i + w_j) / 2, j its partner in round t / H (program/partners.py), if any

a and c begin as the weights of the run do, v with zeros.  Computed in float64.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from penstock.program.partners import partners
from penstock.sums import SumsWay

Weights = Mapping[str, Tensor]
Memory = Mapping[str, Weights]  # by place: "anchor", "outer", "centre"


def first_memory(way: SumsWay, weights: Weights) -> Memory:
    """Return what replicas remember that begin with these weights."""
    match way.kind:
        case "diloco":
            zeros = {name: torch.zeros_like(value) for name, value in weights.items()}
            return {"anchor": weights, "outer": zeros}
        case "easgd":
            return {"centre": weights}
        case _:
            return {}


def averaged(
    way: SumsWay, step: int, rows: Sequence[Weights], memory: Memory
) -> tuple[list[dict[str, Tensor]], Memory]:
    """Return the weights of all replicas behind step number `step`, and what they remember.

    rows:     by replica, the weights that its update has made.
    """
    if (step + 1) % way.every:
        return [dict(row) for row in rows], memory
    found: list[dict[str, Tensor]] = [{} for _ in rows]
    then: dict[str, dict[str, Tensor]] = {place: {} for place in memory}
    for name, like in rows[0].items():
        if not like.is_floating_point():
            for row, new in zip(rows, found, strict=True):
                new[name] = row[name]
            continue
        kept = {place: values[name].double() for place, values in memory.items()}
        several = torch.stack([row[name].double() for row in rows])
        several, kept = _averaged(way, (step + 1) // way.every - 1, several, kept)
        for new, value in zip(found, several, strict=True):
            new[name] = value.to(like.dtype)
        for place, value in kept.items():
            then[place][name] = value.to(like.dtype)
    return found, then


def _averaged(
    way: SumsWay, number: int, rows: Tensor, kept: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return one weight of all replicas after average number `number`, and what is remembered."""
    match way.kind:
        case "diloco":
            anchor, velocity = kept["anchor"], kept["outer"]
            moved = anchor - rows.mean(0)
            velocity = way.momentum * velocity + moved
            anchor = anchor - way.amount * (moved + way.momentum * velocity)
            return anchor.expand_as(rows), {"anchor": anchor, "outer": velocity}
        case "easgd":
            apart, part = rows - kept["centre"], way.drawn(len(rows))
            return rows - part * apart, {"centre": kept["centre"] + part * apart.sum(0)}
        case "gossip":
            rounds, new = partners(len(rows)), rows.clone()
            for one, other in rounds[number % len(rounds)]:
                new[one] = new[other] = (rows[one] + rows[other]) / 2
            return new, kept
        case _:
            return rows.mean(0).expand_as(rows), kept
