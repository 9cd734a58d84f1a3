"""Averaged: weights that replicas average every few steps, in place of summing gradients.

Each replica updates its weights w by its own gradients.  After a step in which an average is due:

    local, gossip   w = mean of w, over all replicas, or of two
    diloco          d = a - mean of w;  v = momentum * v + d;  a = a - rate * (d + momentum * v);
                    w = a, which at first are the weights that training begins with
    easgd           d = w - c;  w = w - part * d;  c = c + part * replicas * mean of d; c at first
                    likewise

The state of the job's optimizer stays with its replica.

Source:  arXiv:1805.09767, arXiv:2311.08105 (Nesterov as torch.optim.SGD has it), arXiv:1412.6651
         (synchronous; the elastic force is that of the weights behind the update).
"""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple, final

import torch
from torch import Tensor

from penstock.state.error_feedback import runs_of
from penstock.state.flat import Flat, all_views
from penstock.state.replica_keys import CENTRE
from penstock.sums import SumsWay
from penstock.transport.routed_sums import sum_along
from penstock.transport.transport import Transport

ANCHOR, OUTER = "anchor", "outer"  # places of keys


class AverageGroup(NamedTuple):
    """With whom a replica averages.

    ranks:     that have the stage; of each replica equally many, with the same weights.
    replicas:  of the whole run.
    topology:  along whose rounds the sum of weights goes.
    """

    ranks: tuple[int, ...]
    replicas: int
    topology: str = ""


@final
class Averaged:
    """What averages the trained weights of a stage on one rank, and what it remembers for that.

    flats:    of the weights; layouts say what is where.
    reached:  parameters that have a gradient: the others stay as they are.
    """

    def __init__(
        self,
        way: SumsWay,
        layouts: Sequence[Flat],
        flats: Sequence[Tensor],
        reached: AbstractSet[int],
    ) -> None:
        self.way, self.layouts, self.flats = way, layouts, flats
        others = {node for layout in layouts for node in layout.nodes} - reached
        runs = runs_of(layouts, others, {layout.dtype for layout in layouts})
        self.runs = [(run.flat, slice(run.start, run.end)) for run in runs]
        self.memory: dict[str, list[Tensor]] = {}
        match way.kind:
            case "diloco":
                self.memory = {ANCHOR: self._copies(), OUTER: [layout.new() for layout in layouts]}
            case "easgd":
                self.memory = {CENTRE: self._copies()}
            case _:
                pass
        is_drawn = way.kind == "easgd"
        self.room = [torch.empty_like(flat) for flat in flats] if is_drawn else []

    def _copies(self) -> list[Tensor]:
        return [flat.clone() for flat in self.flats]

    def average(self, transport: Transport, group: AverageGroup) -> None:
        """Make the weights what they are after an average; all ranks of the group call it.

        Raises:   TransportError.
        """
        for number, part in self.runs:
            weights = self.flats[number][part]
            if self.way.kind != "easgd":
                sum_along(transport, weights, group.ranks, group.topology)
                weights.div_(len(group.ranks))
            if self.way.kind == "diloco":
                self._outer(weights, *(self.memory[key][number][part] for key in (ANCHOR, OUTER)))
            if self.way.kind == "easgd":
                apart = self.room[number][part]
                centre, drawn = self.memory[CENTRE][number][part], self.way.drawn(group.replicas)
                torch.sub(weights, centre, out=apart)
                weights.sub_(apart, alpha=drawn)
                sum_along(transport, apart, group.ranks, group.topology)
                centre.add_(apart, alpha=drawn * group.replicas / len(group.ranks))

    def _outer(self, mean: Tensor, anchor: Tensor, velocity: Tensor) -> None:
        """Move the anchor by what the mean has moved, and leave it in place of the mean."""
        torch.sub(anchor, mean, out=mean)
        velocity.mul_(self.way.momentum).add_(mean)
        mean.add_(velocity, alpha=self.way.momentum)
        anchor.sub_(mean, alpha=self.way.amount)
        mean.copy_(anchor)

    def state(self) -> Iterator[tuple[str, int, Tensor]]:
        """Yield (place of the key, node, tensor) of what all replicas remember alike."""
        for place, flats in self.memory.items():
            for node, value in all_views(self.layouts, flats).items():
                yield place, node, value

    def load(self, tensors: Mapping[str, Tensor], names: Mapping[int, str]) -> None:
        """Take over what a checkpoint has of it; if nothing, begin with the weights as they are."""
        for flats in self.memory.values():
            for kept, flat in zip(flats, self.flats, strict=True):
                kept.copy_(flat)
        for velocity in self.memory.get(OUTER, ()):
            velocity.zero_()
        for place, node, value in self.state():
            if (kept := tensors.get(f"{place}/{names[node]}")) is not None:
                value.copy_(kept)

    def held(self) -> list[Tensor]:
        """Return all tensors that are kept."""
        return [*self.room, *(flat for flats in self.memory.values() for flat in flats)]
