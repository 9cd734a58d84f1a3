"""Weights: what one stage holds on one rank: parameters, gradients, versions, optimizer.

Trainable parameters of one dtype are views into one flat tensor, and so are their gradients
and every older version, so that a sum over replicas or a copy of a version is one call.
Version 0 and those after it are the live tensors, which the optimizer changes in place; an
older version that is still read is a copy in a numbered stash.

Where a step reads weights in fewer bits than they are kept in (graph/precision.py), it reads
copies, which every update makes anew; older versions are then in those bits too.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock import _compat
from penstock.device import here
from penstock.errors import CheckpointError, JobError, RunError
from penstock.graph.lasting import lasting_buffers
from penstock.graph.parts import PartName, in_order, key_in, part_in, part_key
from penstock.graph.stages import Stage
from penstock.graph.trace import Capture
from penstock.job import Job
from penstock.schedule.weight_rule import WeightRule
from penstock.state.averaged import Averaged
from penstock.state.copies import FarState, far_state
from penstock.state.error_feedback import POWER, HeldBack, held_key
from penstock.state.flat import all_views, count_of, layouts_of, run_of
from penstock.state.grown import resize_buffers
from penstock.state.optimizer.optimizer import Optimizers, optimizers_of
from penstock.state.optimizer.optimizer_trial import TRYING
from penstock.state.optimizer.updates import Updates
from penstock.state.optimizer_state import tensors_in
from penstock.state.shards import Sharers, StageShard, check_optimizer
from penstock.state.staleness import Staleness
from penstock.state.unseen_sums import UnseenSums
from penstock.sums import SumsWay

Copies = list[tuple[list[Tensor], dict[int, Tensor]]]  # flat tensors, and by node views of them


class GradientPlace(NamedTuple):
    """Where a gradient lies: in which flat tensor, from which number on, and its shape."""

    flat: int
    start: int
    shape: tuple[int, ...]


class ServedPart(NamedTuple):
    """What a server on a rank has of a stage.

    nodes:      the parameters that it updates.
    gradients:  of them, a run of each flat tensor; given: views of these, by name.
    """

    nodes: frozenset[int]
    gradients: list[Tensor]
    given: dict[str, Tensor]


class StageWeights:
    """The state of one stage on one rank; without gradients where no stage makes any.

    optimizers:  gives the stage its optimizer; default: one of its own.
    sharers:     the ranks that divide it, or the one that has it in far memory; None: it is here
                 whole.

    updated:     by node, what the optimizer changes: parameters, or their parts that are here.
    names:       by node, the name of each parameter; of a slice, that of the part of the whole.
    Raises:      JobError: the optimizer is not one, or cannot be divided as planned.
    """

    def __init__(
        self,
        stage: Stage,
        capture: Capture,
        job: Job,
        *,
        has_gradients: bool = True,
        optimizers: Optimizers | None = None,
        sharers: Sharers | None = None,
    ) -> None:
        names = {node: capture.graph.nodes[node].name for node in stage.parameters}
        parameters, self.names = capture.parameters, names
        buffers = dict(capture.model.named_buffers())
        self.buffer_names = {node: capture.graph.nodes[node].name for node in stage.buffers}
        self.caches = {f"buffers/{name}" for name in _compat.unsaved_buffers(capture.model)}
        trainable = {n: p for n, m in names.items() if (p := parameters[m]).requires_grad}
        read = {node: getattr(torch, capture.graph.nodes[node].dtype) for node in names}
        self.layouts = layouts_of(trainable, read, here().place)
        self.flats = [layout.new() for layout in self.layouts]
        frozen = {n: parameters[m] for n, m in names.items() if n not in trainable}
        with TRYING:
            self.buffers = _brought({n: buffers[m] for n, m in self.buffer_names.items()})
            self.live = _parameters(all_views(self.layouts, self.flats), trainable)
            self.frozen = _brought(frozen)
        self.reads = [f.to(of.read) for of, f in zip(self.layouts, self.flats, strict=True)]
        own = self.layouts, self.flats, self.reads
        self.shard = None if sharers is None else StageShard(*own, sharers)
        self._make_gradients(has_gradients)
        self.frozen_reads = {n: value.to(read[n]) for n, value in self.frozen.items()}
        self.stash, self.predicted, self.parked = Copies(), Copies(), Copies()
        self.staleness: Staleness | None = None
        self.undo: _Undo | None = None
        self.far_state: FarState | None = None
        self.held_back: HeldBack | None = None
        self.averaged: Averaged | None = None
        self.served: ServedPart | None = None
        self.with_gradient = {node for node, _ in stage.backward.gradients}
        self.given: dict[str, Tensor] = {}
        self.scans = {n: _scan(p) for n, p in trainable.items() if not p.is_contiguous()}
        self.updates = self._updated_by(optimizers or optimizers_of(job, capture), self.updated)

    def _make_gradients(self, has_gradients: bool) -> None:
        summed = self.layouts if has_gradients and self.shard is None else []
        self.flat_gradients = [layout.new() for layout in summed]
        self.gradients = all_views(summed, self.flat_gradients)
        self.updated: dict[int, nn.Parameter] = self.live
        if self.shard is not None:
            self.gradients, self.updated = self.shard.views, self.shard.parameters

    def _updated_by(self, optimizers: Optimizers, nodes: Container[int]) -> Updates | None:
        """Return what updates the parameters, or some of them, or their parts.

        Raises:   JobError: it may not be the optimizer of a part.
        """
        others = {self.names[node]: value for node, value in self.frozen.items()}
        others |= {self.buffer_names[node]: value for node, value in self.buffers.items()}
        live = {n: p for n, p in self.updated.items() if n in nodes}
        own = {self.names[node]: value for node, value in live.items()}
        parts = {node: part for node in self.updated if (part := self._part_of(node)) is not None}
        starts = {self.names[node]: part.start for node, part in parts.items()}
        made = optimizers.of(own, others, starts)
        shared = self.shard is not None and len(self.shard.sharers.ranks) > 1
        sliced = any(self.names[node] != key_in(self.names[node]) for node in self.updated)
        if made is not None and (shared or sliced):
            check_optimizer(made.optimizer, is_plain=made.is_plain)
        return made

    @property
    def optimizer(self) -> Optimizer | None:
        """Return what updates the parameters; None where there are none to train."""
        return None if self.updates is None else self.updates.optimizer

    def tensors(self, slot: int) -> Mapping[int, Tensor]:
        """Return node -> what a step reads of all parameters: slot 0 is live, k the k-th stash.

        Those of a stage that is divided have memory only while it is whole.
        """
        if self.shard is not None:
            return {**self.shard.reads, **self.frozen_reads}
        flats = self.reads if slot == 0 else self.stash[slot - 1][0]
        return {**all_views(self.layouts, flats), **self.frozen_reads}

    def kept(self) -> Mapping[int, Tensor]:
        """Return node -> tensor of all parameters as they are kept, or of the parts kept here."""
        return {**self.trained(), **self.frozen}

    def trained(self) -> Mapping[int, Tensor]:
        """Return node -> tensor of those that are trained, or of the parts kept here."""
        if self.shard is not None:
            return self.shard.saved
        return {node: value.detach() for node, value in self.updated.items()}

    def renew_reads(self) -> None:
        """Let a step read the weights as they are now, where it reads copies."""
        if self.shard is not None:  # that is when they are gathered
            return
        for read, flat in zip(self.reads, self.flats, strict=True):
            if read is not flat:
                read.copy_(flat)

    def reserve(self, num_slots: int, num_predictions: int = 0) -> None:
        """Make stashes up to slot `num_slots` and places for predictions, each as live now."""
        for room, count in ((self.stash, num_slots), (self.predicted, num_predictions)):
            while len(room) < count:
                flats = [read.clone() for read in self.reads]
                room.append((flats, all_views(self.layouts, flats)))

    def park(self, num_slots: int) -> None:
        """Make places for gradients of so many later steps than the one that is updated next."""
        while len(self.parked) < num_slots:
            flats = [torch.zeros_like(flat) for flat in self.flat_gradients]
            self.parked.append((flats, all_views(self.layouts, flats)))

    def unpark(self, slot: int) -> None:
        """Let the gradients in `slot` be those that are summed and updated with next."""
        for flat, kept in zip(self.flat_gradients, self.parked[slot][0], strict=True):
            flat.copy_(kept)

    def attend(self, rule: WeightRule, delay: float, *, keeps: bool) -> None:
        """Do from now on what `rule` says about staleness; `delay` is that of this stage.

        keeps:  whether its predictions need something from update to update.
        """
        minds = rule.predictor is not None or rule.compensate or rule.rescale_steps > 0
        foresees = rule.predictor == "optimizer" or rule.compensate
        if foresees and delay > 0 and self.updates is not None and self.updates.loan is not None:
            name = type(self.updates.optimizer).__name__
            message = f"rule {rule.name} cannot foresee what a {name} of its own kind does"
            raise RunError(message, hint="use a schedule with another weight rule")
        if minds and (self.staleness is None or self.staleness.rule != rule):
            by_node = partial(all_views, self.layouts) if keeps else None
            self.staleness = Staleness(rule, delay, self.flats, self.optimizer, keeps=by_node)

    def prediction(self, slot: int) -> Mapping[int, Tensor]:
        """Return node -> tensor of all parameters, as predicted in `slot`."""
        return {**self.predicted[slot][1], **self.frozen_reads}

    def predictions(self, ahead: int) -> Mapping[int, Callable[[], Tensor]]:
        """Return node -> what gives a parameter as predicted for `ahead` updates later."""
        assert self.staleness is not None, "binding has made it"
        made: dict[int, Callable[[], Tensor]] = {}
        for layout in self.layouts:
            for node in layout.nodes:
                one = partial(self.staleness.one, node, ahead, self.live)
                made[node] = one if layout.read == layout.dtype else _cast(one, layout.read)
        return {**made, **{n: partial(_same, value) for n, value in self.frozen_reads.items()}}

    def predict(self, slot: int, ahead: int) -> None:
        """Predict the weights of `ahead` updates later into `slot`."""
        assert self.staleness is not None, "binding has made it"
        for node, target in self.predicted[slot][1].items():
            target.copy_(self.staleness.one(node, ahead, self.live))

    def keep(self, slot: int) -> None:
        """Copy the live weights into stash `slot`."""
        for kept, read in zip(self.stash[slot - 1][0], self.reads, strict=True):
            kept.copy_(read)

    def move(self, moved: Mapping[int, int]) -> None:
        """Give each stash the contents of another one: {to: of}."""
        taken = {of: [flat.clone() for flat in self.stash[of - 1][0]] for of in moved.values()}
        for to, of in moved.items():
            for kept, flat in zip(self.stash[to - 1][0], taken[of], strict=True):
                kept.copy_(flat)

    def gradients_of(self, nodes: AbstractSet[int]) -> dict[str, Tensor]:
        """Return by name the gradients of those of `nodes` that are updated here."""
        sums = self.gradients if self.shard is None else self.shard.gradients
        reached = nodes & self.gradients.keys()
        return {self.names[node]: sums[node] for node in self.updated if node in reached}

    def give(self, gradients: dict[str, Tensor]) -> None:
        """Point each parameter at its gradient; None where the loss of a step does not reach it.

        What is there of these is of another step, and becomes zeros: sums are of all.
        """
        if gradients is self.given:
            return
        self.given = gradients
        for node, parameter in self.updated.items():
            gradient = gradients.get(self.names[node])
            if self.served is None:  # else a server has given it another one
                parameter.grad = gradient
            if gradient is None and self.shard is None and node in self.gradients:
                self.gradients[node].zero_()

    def told(self) -> dict[str, Tensor]:
        """Return what the optimizer is given in a step that it begins, by "gradients/NAME"."""
        assert self.updates is not None, "only an optimizer is given gradients"
        gradients = self.updates.with_left(self.given)
        rows = ((node, gradients.get(self.names[node])) for node in self.updated)
        return {self.key_of("gradients", node): row for node, row in rows if row is not None}

    def norms(self, nodes: Sequence[int]) -> list[Tensor]:
        """Return the norms of the gradients of `nodes`, each as torch's clipping computes it."""
        if self.unseen is not None:
            return self.unseen.norms(nodes)
        sums = self.gradients if self.shard is None else self.shard.summed_by_node
        found = [sums[node] for node in nodes]
        rows = zip(nodes, found, strict=True)
        return _compat.gradient_norms(
            [
                g.permute(self.scans[n]).contiguous() if n in self.scans and g.dim() > 1 else g
                for n, g in rows
            ]
        )

    def here(self, nodes: Sequence[int], *, tells_whole: bool) -> list[int]:
        """Return those of `nodes` of which this rank has a part, or if it `tells_whole` all."""
        if self.shard is None:
            return list(nodes) if tells_whole else []
        return [node for node in nodes if node in self.shard.gradients]

    def summed(self) -> Sequence[Tensor]:
        """Return what is here of the gradients, once they are summed over replicas: flat ones."""
        return self.flat_gradients if self.shard is None else self.shard.summed

    @property
    def unseen(self) -> UnseenSums | None:
        """Return what is known of sums in far memory, where nobody can look at them."""
        return None if self.shard is None else self.shard.unseen

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply every gradient by `factor`."""
        if self.unseen is not None:
            self.unseen.scale(factor)
            return
        for flat in self.summed():
            flat.mul_(factor)

    def step(self, number: int, factor: float = 1.0) -> None:
        """Let the optimizer make the next version in place, as in step `number`.

        factor:  on the rate of that step.
        """
        if self.updates is None:
            return
        if self.undo is not None and self.undo.is_on:
            self.undo.remember(number, factor)
        if self.staleness is not None:
            self.staleness.before_update()
        self.updates.step(number, self.given, factor)
        if self.staleness is not None:
            self.staleness.after_update(self.live)
        self.renew_reads()
        if self.undo is not None and self.undo.is_on:
            self.undo.after()

    def far(self) -> FarState | None:
        """Return what moves the optimizer's state to far memory; None where there is none.

        Raises:   JobError: the state of this optimizer is unknown.
        """
        if self.far_state is None and self.updates is not None:
            updates = self.updates
            self.far_state = far_state(updates.optimizer, is_plain=updates.is_plain)
        return self.far_state

    def remember_updates(self) -> None:
        """From now on keep what is needed to undo the last update.

        Raises:   JobError: that is unknown for this optimizer.
        """
        if self.undo is not None or self.updates is None:
            return
        if not self.updates.is_plain:
            name = type(self.updates.optimizer).__name__
            message = f"updates of the job's optimizer, {name} of its own kind, cannot be undone"
            raise JobError(message, hint="make the plan without post_validation")
        self.undo = _Undo(self.flats, self.flat_gradients, self.updates.optimizer)

    def may_undo(self, may: bool) -> None:
        """Say whether the next update may have to be undone."""
        if self.undo is not None:
            self.undo.is_on = may

    def update_again(self) -> None:
        """Undo the last update, and update with the gradients as they are now."""
        if self.undo is not None:
            self.step(*self.undo.take_back())

    def held_by_kind(self) -> dict[str, list[Tensor]]:
        """Return all tensors that are held, by what they are for; one may be in several places."""
        kept = [*self.flats, *self.frozen.values()]
        kept += [] if self.shard is None else self.shard.held()
        kept += [
            read for read, flat in zip(self.reads, self.flats, strict=True) if read is not flat
        ]
        kept += [v for n, v in self.frozen_reads.items() if v is not self.frozen[n]]
        versions = [flat for flats, _ in self.stash for flat in flats]
        versions += [flat for flats, _ in (*self.predicted, *self.parked) for flat in flats]
        if self.staleness is not None:
            versions += [*self.staleness.previous, *self.staleness.average]
        versions += [] if self.undo is None else self.undo.held()
        others = [*self.buffers.values()]
        others += [] if self.held_back is None else self.held_back.held()
        others += [] if self.averaged is None else self.averaged.held()
        others += [] if self.served is None else self.served.gradients
        state = [] if self.updates is None else [*self.updates.held()]
        return {
            "weights": kept,
            "gradients": [*self.flat_gradients],
            "optimizer": state if self.far_state is None else self.far_state.near(state),
            "versions": versions,
            "others": others,
        }

    def size_bytes(self) -> int:
        """Return the bytes of all that is held: weights, gradients, versions, state, buffers."""
        held = (tensor for row in self.held_by_kind().values() for tensor in row)
        return sum(tensor.untyped_storage().nbytes() for tensor in held)

    # -- by parameter name, independent of the plan ---------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict[str, object]]:
        """Return tensors and plain values by key: "weights/NAME", "optimizer/NAME/KEY", ..."""
        tensors: dict[str, Tensor] = {}
        plain: dict[str, object] = {}
        for node, value in self.kept().items():
            tensors[self.key_of("weights", node)] = value
        for node, value in self.buffers.items():
            tensors[f"buffers/{self.buffer_names[node]}"] = value
        for slot, (_, views) in enumerate(self.stash, 1):
            for node, value in views.items():
                tensors[f"version-{slot}/{self.names[node]}"] = value
        for key, views in self._remembered():
            tensors |= {f"{key}/{self.names[node]}": value for node, value in views.items()}
        for place, node, value in () if self.averaged is None else self.averaged.state():
            tensors[self.key_of(place, node)] = value
        if self.updates is not None:
            own: dict[str, Tensor] = {}
            others: dict[str, object] = {}
            self.updates.put(own, others)
            nodes = {self.names[node]: node for node in self.updated}
            tensors |= {self._state_key(key, nodes, whole=not v.dim()): v for key, v in own.items()}
            plain |= {self._state_key(key, nodes, whole=True): v for key, v in others.items()}
        if any(value.dim() and value.is_cpu for value in tensors.values()):
            here().synchronize()  # copies to far memory may be queued
        return tensors, plain

    def hold_back(self, way: SumsWay, shared: frozenset[int], seed: int) -> HeldBack:
        """Return what sums the gradients in so few numbers, and keeps the rest, made once.

        shared:  parameters that other stages hold, too.
        """
        if self.held_back is None:
            self.held_back = HeldBack(way, self.layouts, shared, self.with_gradient, seed)
        return self.held_back

    def average_by(self, way: SumsWay) -> Averaged:
        """Return what averages the weights with those of other replicas, made once."""
        if self.averaged is None:
            reached = {node for node in self.live if self.names[node] in self.given}
            self.averaged = Averaged(way, self.layouts, self.flats, reached)
        return self.averaged

    def runs_of(self, nodes: AbstractSet[int]) -> list[slice]:
        """Return where parameters that stand in a row lie in each flat tensor, gaps between them
        included."""
        return [run_of(layout, nodes) for layout in self.layouts]

    def update_apart(self, nodes: AbstractSet[int], optimizers: Optimizers) -> None:
        """Let steps read copies of the weights, of which a server here updates those of `nodes`."""
        if not nodes >= self.updated.keys():
            self.updates = self._updated_by(optimizers, nodes)
        rows = zip(self.reads, self.flats, strict=True)
        self.reads = [read.clone() if read is flat else read for read, flat in rows]
        gradients, given = list[Tensor](), dict[str, Tensor]()
        for layout, run in zip(self.layouts, self.runs_of(nodes), strict=True):
            own = torch.zeros(run.stop - run.start, dtype=layout.dtype, device=layout.device)
            gradients.append(own)
            for node, start, shape in zip(layout.nodes, layout.starts, layout.shapes, strict=True):
                if node in nodes and self.names[node] in self.given:
                    view = own[start - run.start :][: count_of(shape)].view(shape)
                    given[self.names[node]] = view
        self.served = ServedPart(frozenset(nodes), gradients, given)
        for node, parameter in self.updated.items():
            parameter.grad = given.get(self.names[node])

    def served_state(self, *, is_first: bool) -> tuple[dict[str, Tensor], dict[str, object]]:
        """Return what `state` does of what a server here has; of the first one all else, too."""
        assert self.served is not None, "a server is here"
        own = {self.names[node] for node in self.served.nodes}
        if not is_first:
            return self.state_of(own)
        tensors, plain = self.state()
        others = {self.names[node] for node in self.updated} - own
        return (
            {key: value for key, value in tensors.items() if _taken_apart(key)[1] not in others},
            {key: value for key, value in plain.items() if _taken_apart(key)[1] not in others},
        )

    def held_state(self) -> dict[str, Tensor]:
        """Return what this rank holds back, by key: "held-back-N/NAME", or "N.AGE" if older."""
        if self.held_back is None:
            return {}
        by_age, powers = self.held_back.state()
        places = [held_key(self.held_back.place, age) for age in range(len(by_age))]
        rows = zip(places, by_age, strict=True)
        found = {
            self.key_of(place, node): value for place, held in rows for node, value in held.items()
        }
        first = powers if self.held_back.place == 0 else {}
        return {**found, **{f"{POWER}/{self.names[n]}": value for n, value in first.items()}}

    def state_of(self, names: AbstractSet[str]) -> tuple[dict[str, Tensor], dict[str, object]]:
        """Return what `state` does of some trained parameters, and the optimizer's of each."""
        tensors: dict[str, Tensor] = {}
        plain: dict[str, object] = {}
        for node, value in self.trained().items():
            if self.names[node] in names:
                tensors[self.key_of("weights", node)] = value
        if self.updates is not None:
            own: dict[str, Tensor] = {}
            self.updates.put_of(names, own, plain)
            nodes = {self.names[n]: n for n in self.updated if self.names[n] in names}
            tensors |= {self._state_key(key, nodes, whole=not v.dim()): v for key, v in own.items()}
        return tensors, plain

    def seen_of(self, names: Sequence[str]) -> list[object]:
        """Return what tells whether `state_of` of some parameters is of the same tensors still."""
        return [] if self.updates is None else self.updates.seen_of(names)

    def places(self) -> dict[int, GradientPlace]:
        """Return by node where the gradients of what is trained here lie in `summed`."""
        found: dict[int, GradientPlace] = {}
        for number, layout in enumerate(self.layouts if self.gradients else ()):
            for node, start, shape in zip(layout.nodes, layout.starts, layout.shapes, strict=True):
                if self.shard is None:
                    found[node] = GradientPlace(number, start, shape)
                elif node in self.shard.slices:
                    first = start + self.shard.slices[node].start - self.shard.mine[number].start
                    found[node] = GradientPlace(
                        number, first, tuple(self.shard.parameters[node].shape)
                    )
        return found

    def key_of(self, place: str, node: int, key: str = "") -> str:
        """Return under which key what is kept of a parameter here, or of the like, is saved."""
        part = self._part_of(node)
        name = f"{place}/{key_in(self.names[node])}{f'/{key}' if key else ''}"
        return name if part is None else part_key(name, part.start, part.shape, part.order)

    def _part_of(self, node: int) -> PartName | None:
        """Return which part of a parameter is kept here: of a slice of it, of a shard, of both."""
        known = part_in(self.names[node])
        if self.shard is None or node not in self.shard.slices:
            return known
        start, shape = self.shard.slices[node]
        if known is None:
            return PartName(self.names[node], start, shape)
        return known._replace(start=known.start + start)

    def _state_key(self, key: str, nodes: Mapping[str, int], *, whole: bool) -> str:
        """Return under which key something of the optimizer is saved; numbers are not divided.

        nodes:    of parameters, by name.
        """
        place, _, rest = key.partition("/")
        name, _, last = rest.rpartition("/")
        node = nodes.get(name)
        if node is None:
            return key
        return f"{place}/{key_in(name)}/{last}" if whole else self.key_of(place, node, last)

    def load(self, tensors: Mapping[str, Tensor], plain: Mapping[str, object]) -> None:
        """Take over what `state` returned, for the parameters of this stage.

        Raises:   CheckpointError: a parameter is missing or has another shape, or it is of another
                  optimizer.
        """
        tensors, plain = self._own(tensors), self._own_plain(plain)
        for node, value in self.kept().items():
            value.copy_(fitting(tensors, f"weights/{self.names[node]}", value))
        self.renew_reads()
        for node, value in self.frozen_reads.items():
            value.copy_(self.frozen[node])
        for node, value in self.buffers.items():
            key = f"buffers/{self.buffer_names[node]}"
            if key not in self.caches or _fits(tensors, key, value):
                value.copy_(fitting(tensors, key, value))
        for slot, (_, views) in enumerate(self.stash, 1):
            for node, value in views.items():
                older = f"version-{slot}/{self.names[node]}"
                name = older if older in tensors else f"weights/{self.names[node]}"
                value.copy_(fitting(tensors, name, value))
        for key, views in self._remembered():
            for node, value in views.items():
                name = f"{key}/{self.names[node]}"
                if name in tensors:
                    value.copy_(fitting(tensors, name, value))
                elif key == "previous":  # a run by another rule wrote the checkpoint
                    value.copy_(self.live[node])
        if self.held_back is not None:
            self.held_back.load(tensors, self.names)
        if self.averaged is not None:
            self.averaged.load(tensors, self.names)
        if self.updates is not None:
            self.updates.take(tensors, plain)

    def _own(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return `tensors` with the parts that are here of this rank's parameters and their state,
        by the names that these have here.
        """
        parts = self._parts()
        if not parts:
            return tensors
        found: dict[str, Tensor] = {}
        for key, value in tensors.items():
            place, name, last = _taken_apart(key)
            for node, part in parts.get(name, {}).items():
                kept = self.updated.get(node, self.frozen.get(node))
                assert kept is not None, "what is divided is kept"
                piece = value
                if tuple(value.shape) == part.shape:
                    numbers = in_order(value, part.order)
                    piece = numbers[part.start : part.start + kept.numel()].view(kept.shape)
                found[f"{place}/{self.names[node]}{last}"] = piece
            if name not in parts:
                found[key] = value
        return found

    def _own_plain(self, plain: Mapping[str, object]) -> Mapping[str, object]:
        parts, found = self._parts(), dict[str, object]()
        for key, value in plain.items() if parts else ():
            place, name, last = _taken_apart(key)
            names = map(self.names.__getitem__, parts.get(name, {}))
            found |= {f"{place}/{own}{last}": value for own in names}
            if name not in parts:
                found[key] = value
        return found if parts else plain

    def _parts(self) -> dict[str, dict[int, PartName]]:
        """Return by name of a parameter, and by node, the parts that are here; no whole one."""
        found: dict[str, dict[int, PartName]] = {}
        for node in (*self.updated, *self.frozen):
            if (part := self._part_of(node)) is not None:
                found.setdefault(part.key, {})[node] = part
        return found

    def _remembered(self) -> list[tuple[str, dict[int, Tensor]]]:
        """Return what the remedies against staleness remember, by name and node."""
        if self.staleness is None:
            return []
        kept = (("previous", self.staleness.previous), ("average", self.staleness.average))
        return [(name, all_views(self.layouts, flats)) for name, flats in kept if flats]


class _Undo:
    """Weights and the state of one of torch's optimizers as they were before the last update."""

    def __init__(
        self, flats: Sequence[Tensor], gradients: Sequence[Tensor], optimizer: Optimizer
    ) -> None:
        self.flats, self.optimizer = flats, optimizer
        changes = any(group.get("nesterov") for group in optimizer.param_groups)
        self.gradients: list[Tensor] = (
            list(gradients) if changes else []
        )  # those that it may add its momentum to
        self.is_on = True
        self.step = 0, 1.0  # number and factor
        self.before: list[Tensor] = []
        self.given: list[Tensor] = []
        self.states: dict[Tensor, dict[str, object]] = {}  # in `room`, where there was any
        self.room: dict[Tensor, dict[str, object]] = {}

    def remember(self, number: int, factor: float) -> None:
        """Copy what the update of a step changes, into the same tensors each time."""
        self.step = number, factor
        if not self.before:
            self.before = [flat.clone() for flat in self.flats]
            self.given = [gradient.clone() for gradient in self.gradients]
        else:
            torch._foreach_copy_([*self.before, *self.given], [*self.flats, *self.gradients])  # pyright: ignore
        self.states = {
            parameter: _copied(state, self.room.get(parameter, {}))
            for parameter, state in self.optimizer.state.items()
        }

    def after(self) -> None:
        """Give the gradients the values that they had before the update."""
        if not self.room:  # before the first update an optimizer has no state
            states = self.optimizer.state.items()
            self.room = {parameter: _copied(state, {}) for parameter, state in states}
        for gradient, given in zip(self.gradients, self.given, strict=True):
            gradient.copy_(given)

    def take_back(self) -> tuple[int, float]:
        """Put everything back as it was; return number and factor of the update."""
        for flat, before in zip(self.flats, self.before, strict=True):
            flat.copy_(before)
        self.optimizer.state.clear()
        for parameter, state in self.states.items():
            self.optimizer.state[parameter] = _copied(state, {})  # of its own: room stays here
        return self.step

    def held(self) -> list[Tensor]:
        """Return all tensors that are kept."""
        return [*self.before, *self.given, *tensors_in(list(self.room.values()))]


def _copied(state: Mapping[str, object], into: Mapping[str, object]) -> dict[str, object]:
    """Return a copy of a parameter's state; tensors in those of `into`, where it has them."""
    copied: dict[str, object] = {}
    for key, value in state.items():
        kept = into.get(key)
        if not isinstance(value, Tensor):
            copied[key] = value
        elif isinstance(kept, Tensor) and (kept.shape, kept.dtype) == (value.shape, value.dtype):
            copied[key] = kept.copy_(value)
        else:
            copied[key] = value.clone()
    return copied


def _taken_apart(key: str) -> tuple[str, str, str]:
    """Return place, name of the parameter and the rest of a key."""
    place, _, rest = key.partition("/")
    if not place.startswith("optimizer"):
        return place, rest, ""
    name, slash, last = rest.rpartition("/")
    return place, name, slash + last


def _scan(parameter: Tensor) -> list[int]:
    """Return its dimensions in the order in which they lie in memory, the outermost first.

    A run keeps weights and gradients contiguous; a plain loop adds up squares as they lie.
    """
    strides = parameter.stride()
    return sorted(range(parameter.dim()), key=lambda dim: -strides[dim])


def _same(value: Tensor) -> Tensor:
    return value


def _cast(make: Callable[[], Tensor], dtype: torch.dtype) -> Callable[[], Tensor]:
    return lambda: make().to(dtype)


def _brought(values: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return copies on the device of this process: the module may wait in the host's memory."""
    place = here().place
    return {node: value.detach().to(place, copy=True) for node, value in values.items()}


def _parameters(
    views: Mapping[int, Tensor], values: Mapping[int, Tensor]
) -> dict[int, nn.Parameter]:
    """Return parameters that are these views, with these values."""
    for node, view in views.items():
        view.copy_(values[node].detach())
    return {node: nn.Parameter(view) for node, view in views.items()}


def load_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy "weights/NAME" and "buffers/NAME" into a module.

    A buffer that no state_dict holds stays, where the checkpoint has none of its shape: forward
    may have made it, or make it again.  One that forward has made larger becomes as large.
    Raises:   CheckpointError: one is missing or has another shape.
    """
    resize_buffers(model, tensors)
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(fitting(tensors, f"weights/{name}", value))
        unsaved = _compat.unsaved_buffers(model)
        for name, value in lasting_buffers(model).items():
            key = f"buffers/{name}"
            if name not in unsaved or _fits(tensors, key, value):
                value.copy_(fitting(tensors, key, value))


def _fits(tensors: Mapping[str, Tensor], key: str, like: Tensor) -> bool:
    return key in tensors and tensors[key].shape == like.shape


def fitting(tensors: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    """Return the tensor of that name.

    Raises:   CheckpointError: it is missing or has another shape than `like`.
    """
    found = tensors.get(name)
    if found is None:
        hint = "is it a checkpoint of another model?"
        raise CheckpointError(f"the checkpoint holds no {name}", hint=hint)
    if found.shape != like.shape:
        message = (
            f"{name} is {list(found.shape)} in the checkpoint, {list(like.shape)} in the model"
        )
        raise CheckpointError(message, hint="is it a checkpoint of another model?")
    return found
