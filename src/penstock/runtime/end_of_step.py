"""Sums: what comes at the end of a step: gradients summed over ranks, clipped, and the update."""

import time
from collections.abc import Collection, Container, Iterator, Sequence
from functools import partial
from math import isfinite, nan
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from penstock import _compat
from penstock.device import of
from penstock.errors import PlanError
from penstock.graph.parts import word_of
from penstock.program.reductions import (
    AverageWeights,
    Commit,
    Guard,
    Norm,
    Reduction,
    Sum,
)
from penstock.runtime.calls import Call, StepResult
from penstock.runtime.collects import told_slices
from penstock.runtime.host_numbers import UnseenNorm, look
from penstock.runtime.lane import SumCalls
from penstock.runtime.noise_squares import squares
from penstock.schedule.orders import Action
from penstock.state.averaged import AverageGroup
from penstock.state.error_feedback import HeldBack
from penstock.state.loss_scale import LEAST, LossScale
from penstock.state.shards import StageShard
from penstock.state.weights import StageWeights
from penstock.sums import sums_way
from penstock.transport.narrow_sums import sum_over
from penstock.transport.routed_sums import sum_along

if TYPE_CHECKING:
    from penstock.runtime.rank import Rank


class LocalStages(NamedTuple):
    """The stages that live on a rank.

    stages:  all of them.
    first:   those that live on no earlier rank of the same replica.
    added:   (stage, step) of the gradients to which this rank adds something.
    """

    stages: Sequence[int]
    first: Container[int]
    added: Container[tuple[int, int]]


def sum_calls(rank: "Rank", reduction: Reduction, own: LocalStages) -> SumCalls:
    """Return the calls of one reduction on a rank with the stages `own`."""
    match reduction:
        case Sum("tied"):
            return _tied(rank, reduction, own)
        case Sum("replicas"):
            return _replicas(rank, reduction, own)
        case Sum("delayed"):
            return _delayed(rank, reduction, own)
        case Sum("shards"):
            return _shards(rank, reduction.stage)
        case Norm():
            return _norm(rank, reduction, own)
        case Guard():
            return SumCalls(lambda: rank.guard(reduction))
        case Commit():
            return SumCalls(lambda: rank.commit(reduction))
        case AverageWeights():
            return _average(rank, reduction)
        case _:
            raise AssertionError("post_validation.py does it")


def _tied(rank: "Rank", wanted: Sum, own: LocalStages) -> SumCalls:
    """Sum the gradients of one parameter over the stages that hold it, here and elsewhere."""
    nodes = rank.capture.graph.nodes
    pairs = ((word_of(nodes[node].name), node, holders) for node, holders in rank.stages.tied)
    node, holders = next((node, held) for word, node, held in pairs if word == wanted.bucket)
    here = [(stage, rank.weights_of(stage)) for stage in holders if stage in own.stages]
    shards = [weights.shard for _, weights in here if weights.shard is not None]
    targets = [weights.gradients[node] for _, weights in here if node in weights.gradients]
    silent = [
        weights.gradients[node]
        for stage, weights in here
        if targets and (node not in rank.made(stage) or (stage, wanted.step) not in own.added)
    ]

    def make() -> None:
        for shard in shards:
            shard.begin()

    def call() -> None:
        if not targets:  # a frozen one
            return
        first, *others = targets
        for target in silent:  # it still holds the sum of the step before
            target.zero_()
        for other in others:
            first.add_(other)
        if len(wanted.ranks) > 1:
            sum_along(rank.transport, first, wanted.ranks, rank.topology)
        for other in others:
            other.copy_(first)

    return SumCalls(call, make) if shards and targets else SumCalls(call)


def _replicas(rank: "Rank", wanted: Sum, own: LocalStages) -> SumCalls:
    """Sum all gradients of a stage over all ranks on which it lives.

    A tied one has been summed over the ranks of this replica, and counts on the first of them.
    """
    stage = wanted.stage
    weights = rank.weights_of(stage)
    watched = [weights.gradients[node] for node in rank.watched(stage) if node in weights.gradients]
    is_telling = rank.rank == min(wanted.ranks)
    cleared = _cleared(rank, wanted, own)
    held, topology = _held_back(rank, weights, wanted), rank.topology
    is_last = wanted == rank.last_sum

    def call() -> None:
        for gradient in cleared:
            gradient.zero_()
        if rank.server_end is not None:
            if is_last:
                rank.server_end.exchange(rank.progress.first_step + wanted.step)
            return
        if held is not None:
            held.sum_over(rank.transport, weights.flat_gradients, wanted.ranks, topology)
            return
        for flat in weights.flat_gradients:
            sum_over(rank.transport, flat, wanted.ranks, rank.job, topology)

    def after() -> None:
        if rank.noise.is_due:
            rank.noise.large(watched)

    return SumCalls(call, after=after) if is_telling and watched else SumCalls(call)


def _cleared(rank: "Rank", wanted: Sum, own: LocalStages) -> list[Tensor]:
    """Return the gradients of a stage that this rank adds nothing to a sum over replicas by."""
    stage = wanted.stage
    rows = rank.weights_of(stage).gradients.items()
    tied = {node for node, holders in rank.stages.tied if stage in holders}
    cleared: list[Tensor] = []
    if (stage, wanted.step) not in own.added:  # they still hold the sum of the step before
        cleared += [value for node, value in rows if node not in tied]
    if stage not in own.first:
        cleared += [value for node, value in rows if node in tied]
    return cleared


def _delayed(rank: "Rank", wanted: Sum, own: LocalStages) -> SumCalls:
    """Sum the gradients of the step before of a stage, and leave those of this one for the next."""
    stage = wanted.stage
    weights = rank.weights_of(stage)
    held = _held_back(rank, weights, wanted)
    assert held is not None, "the job says so, as the plan does"
    delayed = held.delayed
    assert delayed is not None, "it is of this way"
    cleared, topology = _cleared(rank, wanted, own), rank.topology

    def after() -> None:
        for gradient in cleared:
            gradient.zero_()
        delayed.take(weights.flat_gradients)

    return SumCalls(lambda: delayed.sum_over(rank.transport, wanted.ranks, topology), after=after)


def _average(rank: "Rank", wanted: AverageWeights) -> SumCalls:
    """Average the weights of a stage with other replicas, where it is due."""
    weights, progress = rank.weights_of(wanted.stage), rank.progress
    averaged = weights.average_by(sums_way(rank.averages))
    group = AverageGroup(wanted.ranks, rank.grid.replicas, rank.topology)

    def call() -> None:
        if wanted.is_due(progress.first_step + wanted.step):
            averaged.average(rank.transport, group)
            weights.renew_reads()

    return SumCalls(call)


def _held_back(rank: "Rank", weights: StageWeights, wanted: Sum) -> HeldBack | None:
    """Return what sums the gradients of a stage and holds back what is not sent, if anything is."""
    way = sums_way(rank.job.sums)
    if not way.holds_back:
        return None
    held = weights.hold_back(way, rank.stages.shared, rank.job.seed)
    held.joins(rank.rank, wanted.ranks)
    return held


def _shards(rank: "Rank", stage: int) -> SumCalls:
    """Sum all gradients of a stage over its replicas; each keeps those of its part.

    Where this rank adds none to a step, they are zeros.
    """
    shard, nodes = rank.shard_of(stage), rank.watched(stage)

    if shard.far is not None and of(rank.device).is_queued:  # it is no more at hand afterwards
        return _leaving(rank, shard, nodes)

    def after() -> None:
        if rank.noise.is_due:
            rank.noise.large(shard.summed_by_node[n] for n in nodes if n in shard.summed_by_node)

    return SumCalls(shard.scatter, shard.begin, after)


def _leaving(rank: "Rank", shard: StageShard, nodes: Collection[int]) -> SumCalls:
    """Sum gradients that leave for far memory; what is watched of them is taken before.

    It is made on the stream of the sums, and read on that of the computes.
    """
    device = of(rank.device)
    taken: list[Tensor] = []

    def make() -> None:
        taken.clear()  # of a step that was not finished
        shard.begin()

    def watch(number: int, part: Tensor) -> None:
        if rank.noise.is_due:
            own = shard.places[number].items()
            taken.extend(squares(part[place] for node, place in own if node in nodes))

    def after() -> None:
        for found in taken:
            device.used_on(found, device.current_stream())
        rank.noise.add_large(taken)

    return SumCalls(partial(shard.scatter, watch), make, after)


def _norm(rank: "Rank", wanted: Norm, own: LocalStages) -> SumCalls:
    """Clip the gradients by their norm over all ranks, and find out whether they overflow.

    Where servers update the weights each rank clips its own, before they go there.
    """
    norm, is_last = GlobalNorm(rank, own), wanted == rank.last_sum
    is_queued = of(rank.device).is_queued

    def call() -> None:
        norms = norm.own()
        if len(wanted.ranks) > 1:
            rank.transport.all_reduce(norms, wanted.ranks)
        # 17 in docs/architecture.md
        if is_queued:
            norm.clip_unseen(norm.whole(norms), wanted.step)
        else:
            norm.clip(norm.whole(norms), rank.progress.first_step + wanted.step)
        if rank.server_end is not None and is_last:
            rank.server_end.exchange(rank.progress.first_step + wanted.step)

    return SumCalls(call)


class GlobalNorm:
    """Scales the gradients of a rank so that the norm over all stages is at most clip_norm.

    Where the loss is scaled, they are divided by its scale before; one number more than norms says
    on how many ranks they are not finite.

    A tied parameter counts once, in the first stage that holds it; a stage on the first rank on
    which it lives.  What comes out is that of torch.nn.utils.clip_grad_norm_ on the whole model,
    to the bit: the norm of each parameter, then of these in the model's order.  Where stages are
    divided among replicas, or their ops among ranks, the squares of parts are summed instead:
    equal to rounding.

    count:  of the model's parameters that have a gradient.
    """

    def __init__(self, rank: "Rank", own: LocalStages) -> None:
        self.rank, self.limit, self.loss_scale = rank, rank.job.clip_norm, rank.loss_scale
        self.parts = [(rank.weights_of(stage), nodes) for stage, nodes in _counted(rank, own)]
        stages, nodes = rank.stages.stages, rank.capture.graph.nodes
        counted = sorted({node for stage in stages for node, _ in stage.backward.gradients})
        place = {node: number for number, node in enumerate(counted)}
        self.names = [nodes[node].name for node in counted]
        kept = rank.capture.parameters
        self.dtypes = [kept[name].dtype for name in self.names]
        like = [torch.empty(0, dtype=dtype, device=rank.device) for dtype in self.dtypes]
        self.order = [number for group in _compat.groups_by_dtype(like) for number in group]
        self.sums_squares = bool(rank.sharded) and rank.grid.replicas > 1
        if rank.grid.tensor > 1:  # of a parameter that each has whole, the first one tells
            self.sums_squares, rest = True, rank.grid.slice_of(rank.rank) > 0
            self.told = [(w, told_slices(w, own) if rest else own) for w, own in self.parts]
        elif self.sums_squares:  # of a parameter that all replicas have whole, the first one tells
            self.told = [
                (w, w.here(owned, tells_whole=rank.replica == 0)) for w, owned in self.parts
            ]
        else:
            self.told = self.parts
        places = [place[node] for _, owned in self.told for node in owned]
        self.own_places = torch.tensor(places, dtype=torch.int64, device=rank.device)

    @property
    def count(self) -> int:
        return len(self.names)

    def own(self) -> Tensor:
        """Return the norm of each parameter of the model, zero for those of other ranks."""
        scaled, count = self.loss_scale, self.count
        norms = torch.zeros(count + bool(scaled), dtype=torch.float64, device=self.rank.device)
        if scaled is not None:
            norms[count] = ~self._unscale(scaled)
        if self.limit is None:
            return norms
        found = [norm.double() for weights, owned in self.told for norm in weights.norms(owned)]
        if found:
            norms[self.own_places] = torch.stack(found)
        return norms.square_() if self.sums_squares else norms

    def _unscale(self, scaled: LossScale) -> Tensor:
        """Divide the gradients of this rank by the scale; return whether all of them are finite."""
        parts = [weights for weights, _ in self.parts]
        flats = [flat for each in parts if each.unseen is None for flat in each.summed()]
        away = [each.unseen for each in parts if each.unseen is not None]
        checks = [unseen.are_finite() for unseen in away]
        for unseen in away:
            unseen.scale(1 / scaled.scale)
        checks += [scaled.unscale(flats)] if flats or not away else []
        return torch.stack(checks).all()

    def whole(self, norms: Tensor) -> Tensor:
        """Return the norm of each parameter, where `norms` is the sum of what all ranks told."""
        return norms.sqrt_() if self.sums_squares else norms

    def clip(self, norms: Tensor, step: int) -> bool:
        """Clip the gradients of a step of the run; return whether that changed anything.

        Raises:   NotFiniteError.
        """
        if self.loss_scale is not None:
            self._end(self.loss_scale, step, overflowed=bool(norms[self.count]))
            if self.loss_scale.leaves_out(step):
                return False
        if self.limit is None:
            return False
        rank, total = self.rank, _total(norms[: self.count], self.order, self.dtypes)
        coefficient = self.limit / (total + 1e-6)
        clips = not bool(coefficient >= 1.0)
        if clips and rank.is_guarded and not isfinite(float(total)):
            rank.refuse_norm(float(total), step, [self.names[k] for k in _bad(norms)])
        if clips:
            for weights, _ in self.parts:
                weights.scale_gradients(coefficient)
        return clips

    def clip_unseen(self, norms: Tensor, at: int) -> None:
        """Clip as `clip` does, without a look at the norm: by the same numbers, or by 1.

        at:  the step, of the window.
        It is looked at before the next update, where that is guarded; at once where the loss is
        scaled, for whether gradients overflow has to be known now.
        """
        progress, scale = self.rank.progress, self.loss_scale
        step = progress.first_step + at
        if self.limit is not None:
            total = _total(norms[: self.count], self.order, self.dtypes)
            coefficient = (self.limit / (total + 1e-6)).clamp(max=1.0)
            for weights, _ in self.parts:
                weights.scale_gradients(coefficient)
            progress.unseen = UnseenNorm(total, norms, self.names, step)
        if scale is not None:
            losses = progress.losses.get(at, ()) if self.rank.is_guarded else ()
            self._end(scale, step, overflowed=look(self.rank, at, losses, flag=norms[self.count]))

    def _end(self, scale: LossScale, step: int, *, overflowed: bool) -> None:
        """Let the scale know how a step has ended; one that is no longer the reason is an error."""
        if overflowed and self.rank.is_guarded and scale.scale <= LEAST:
            self.rank.refuse_norm(nan, step, ())
        scale.end(step, overflowed=overflowed)


def _bad(norms: Tensor) -> list[int]:
    return [number for number, norm in enumerate(norms) if not isfinite(float(norm))]


def _counted(rank: "Rank", own: LocalStages) -> Iterator[tuple[int, list[int]]]:
    """Yield each stage of a rank, and the parameters whose norms this rank reports."""
    owner = {node: holders[0] for node, holders in rank.stages.tied}
    reached = {node for stage in rank.stages.stages for node, _ in stage.backward.gradients}
    for stage in own.stages:
        live = rank.weights_of(stage).live if stage in own.first else ()
        yield stage, [n for n in live if n in reached and owner.get(n, stage) == stage]


def _total(norms: Tensor, order: Sequence[int], dtypes: Sequence[torch.dtype]) -> Tensor:
    """Return the norm of norms, each in the dtype of its gradient, in this order."""
    if not order:
        return norms.sum()
    rows = [norms[number].to(dtypes[number]) for number in order]
    return _compat.gradient_norms([torch.stack(rows)])[0]


def update_call(
    rank: "Rank",
    action: Action,
    *,
    stash: int | None,
    tells: bool,
    has_loss: bool,
    late: bool,
) -> Call:
    """Return the call of one Update.

    stash:     where the version that it replaces is kept, if it is still read.
    tells:     whether it is the last one of its step here, and reports the step.
    has_loss:  whether the losses of the step are on this rank.
    late:      whether its gradients are of older weights; not so in a synchronous warm-up.
    """
    stage, step = action.stage, action.micro_batch
    weights, progress = rank.weights_of(stage), rank.progress
    tell = tell_call(rank, step, has_loss=has_loss) if tells else None
    looks = rank.is_guarded and of(rank.device).is_queued
    shows = weights.updates is not None and weights.updates.shows_model
    if shows and late and rank.carried.get(stage) is not None:
        message = "an update may look at statistics that replicas put together once a window ends"
        raise PlanError(message, hint="take a synchronous schedule, or one replica")

    def call() -> None:
        if shows:
            rank.join_buffers(progress.first_step + step + 1)
        if looks:
            are_there = has_loss and (tells or not late) and step not in progress.seen_losses
            look(rank, step, progress.losses[step] if are_there else ())
        if stash is not None:
            weights.keep(stash)
        progress.updates += 1
        number, factor = progress.first_step + step, 1.0
        if weights.staleness is not None and late:
            factor = weights.staleness.rate(number)
        leaves_out = rank.loss_scale is not None and rank.loss_scale.leaves_out(number)
        if not (leaves_out or rank.served):  # else a server has made it
            weights.step(number, factor)  # 18 in docs/architecture.md
        elif leaves_out and weights.updates is not None:
            weights.updates.leave_out()
        if tell is not None:
            tell()

    return call


def tell_call(rank: "Rank", step: int, *, has_loss: bool) -> Call:
    """Return the call that reports a step of the window as finished."""
    progress, device = rank.progress, of(rank.device)
    names = [name for name, _ in rank.capture.graph.figures]

    def tell() -> None:
        now = time.perf_counter()
        parts = [part.reshape(()) for part in progress.losses.pop(step, ())]
        loss = progress.seen_losses.pop(step, None)
        if loss is None and has_loss and parts:
            loss = float(torch.stack(parts).double().mean())
        rows = progress.figures.pop(step, ())
        means = device.read(torch.stack([*rows]).mean(0)) if rows else []
        figures = dict(zip(names, means, strict=False))
        if rank.loss_scale is not None:
            figures |= rank.loss_scale.figures()
        seconds, progress.last_update_s = now - progress.last_update_s, now
        number = progress.first_step + step
        # 19 in docs/architecture.md
        rank.report(StepResult(number, loss, seconds, len(parts), figures))

    return tell
