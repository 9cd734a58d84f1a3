"""Rank: one process's (or thread's) part of a Program, bound once to a flat list of calls.

Binding looks up everything that can be known beforehand: the function of each segment, the
weights of each version, the ends of each channel, where every value goes.  Running a window
is then `for call in calls: call()`, with the clock read between calls.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Literal

import torch
from torch import Tensor

from penstock import _compat
from penstock.errors import RunError
from penstock.graph.stages import Segment, SegmentKind, Stages
from penstock.graph.trace import Capture, device_here, on_device
from penstock.job import Job
from penstock.program.program import Compute, Program, Receive, Reduce, Reshard, Send, Unshard, Update
from penstock.graph.code import Function, function_of, micro_batch_seed
from penstock.runtime.transport import TensorSpec, Transport
from penstock.runtime.transport.transport import Wait
from penstock.runtime.weights import StageWeights
from penstock.timeline import Span
from penstock.timeline.spans import Lane, SpanKind

Call = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Bound:
    """One call of the flat list, and how it is shown in a timeline."""

    call: Call
    lane: Lane | Literal["wait"]
    kind: SpanKind
    stage: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a rank knows of a step that it has finished; the loss only where the loss is made."""

    step: int
    loss: float | None
    seconds: float


@dataclass(slots=True)
class Progress:
    """Where a rank stands: numbers that change from window to window."""

    first_step: int = 0  # of the window
    losses: defaultdict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    squares: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    clip_factor: float = 1.0
    last_update: float = 0.0
    done: list[StepResult] = field(default_factory=list[StepResult])


class Rank:
    """Everything that rank number `transport.rank` holds, and the windows it can run."""

    def __init__(  # noqa: PLR0913 - what a rank is made of
        self,
        capture: Capture,
        stages: Stages,
        job: Job,
        transport: Transport,
        replicas: int,
        *,
        make: Callable[[Segment, Capture], Function] = function_of,
    ) -> None:
        self.make = make
        self.capture, self.stages, self.job, self.transport = capture, stages, job, transport
        self.rank = transport.rank
        self.replicas = replicas
        self.per_replica = transport.num_ranks // replicas
        self.replica = self.rank // self.per_replica
        self.weights: dict[int, StageWeights] = {}
        self.functions: dict[tuple[int, SegmentKind], Function] = {}
        self.frames: dict[tuple[int, int], dict[int, Any]] = defaultdict(dict)
        self.outbox: dict[tuple[int, int], list[Tensor]] = {}
        self.batches: dict[int, list[Any]] = {}
        self.progress = Progress()
        self.scale = torch.tensor(1.0, device=device_here())
        self._channels: dict[tuple[str, int, int], Any] = {}
        self._data: Iterator[Any] | None = None
        self._next_micro_batch = -1
        self.losses_here = False

    # -- one window -----------------------------------------------------------------------------

    def bind(self, program: Program) -> list[Bound]:
        """Return the calls of one window of `program` on this rank."""
        return _Binder(self, program).calls()

    def run(self, calls: Sequence[Bound], first_step: int) -> list[float]:
        """Run one window; return the clock before each call and after the last one."""
        self.progress.first_step = first_step
        clock = time.perf_counter
        marks = [clock()]
        mark = marks.append
        self.progress.last_update = marks[0]
        for bound in calls:
            bound.call()
            mark(clock())
        return marks

    def spans(self, calls: Sequence[Bound], marks: Sequence[float], origin: float) -> list[Span]:
        """Return the spans of a window that was run, in seconds from `origin`."""
        rows = zip(calls, marks, marks[1:], strict=False)
        return [
            Span(self.rank, b.lane, b.kind, b.stage, b.micro_batch, start - origin, end - origin)
            for b, start, end in rows
            if b.lane != "wait"
        ]

    def held_bytes(self) -> int:
        """Return the bytes held between windows by weights, gradients, versions and state."""
        constants = sum(t.untyped_storage().nbytes() for t in self.capture.constants.values())
        return sum(weights.size_bytes() for weights in self.weights.values()) + constants

    # -- what the binder asks for -----------------------------------------------------------------

    def weights_of(self, stage: int) -> StageWeights:
        """Return the state of a stage that lives on this rank."""
        if stage not in self.weights:
            self.weights[stage] = StageWeights(self.stages.stages[stage], self.capture, self.job)
            tied = [p for p, holders in self.stages.tied if stage in holders]
            self.weights[stage].use_gradients(tied)
        return self.weights[stage]

    def function(self, stage: int, kind: SegmentKind) -> Function:
        """Return the function of a segment, made once."""
        key = (stage, kind)
        if key not in self.functions:
            segment = self.stages.stages[stage].segment(kind)
            self.functions[key] = self.make(segment, self.capture)
        return self.functions[key]

    def specs(self, edge: int) -> tuple[TensorSpec, ...]:
        """Return shape and dtype of each value of an edge."""
        nodes = self.capture.graph.nodes
        values = self.stages.edges[edge].values
        return tuple(TensorSpec(nodes[v].shape, getattr(torch, nodes[v].dtype)) for v in values)

    def sender(self, edge: int, peer: int) -> Callable[[Sequence[Tensor]], None]:
        """Return the call that sends a message of `edge` to `peer`."""
        key = ("send", edge, peer)
        if key not in self._channels:
            self._channels[key] = self.transport.bind_send(edge, peer, self.specs(edge))
        return self._channels[key]

    def receiver(self, edge: int, peer: int) -> tuple[Call | None, Wait]:
        """Return (post, wait) for messages of `edge` from `peer`."""
        key = ("receive", edge, peer)
        if key not in self._channels:
            self._channels[key] = self.transport.bind_receive(edge, peer, self.specs(edge))
        return self._channels[key]

    def leaves(self, micro_batch: int, per_step: int) -> list[Any]:
        """Return the leaves of a micro-batch of the window, read from the job's data."""
        step, place = divmod(micro_batch, per_step)
        step += self.progress.first_step
        index = (step * self.replicas + self.replica) * per_step + place
        if self._data is None or index != self._next_micro_batch:
            self._data = self.job.data(index)
        self._next_micro_batch = index + 1
        batch = next(self._data, None)
        if batch is None:
            hint = "let `data` go on for ever, or train fewer steps"
            raise RunError(f"the job's data ended at micro-batch {index}", hint=hint)
        return self.capture.leaves(on_device(batch))

    def seed(self, micro_batch: int, per_step: int) -> int:
        """Return the seed of the random ops of a micro-batch of the window."""
        step, place = divmod(micro_batch, per_step)
        step += self.progress.first_step
        index = (step * self.replicas + self.replica) * per_step + place
        return micro_batch_seed(self.job.seed, index)


class _Binder:
    """Turns the instructions of one rank into calls."""

    def __init__(self, rank: Rank, program: Program) -> None:
        self.rank, self.program = rank, program
        self.code = program.code[rank.rank]
        self.per_step = program.num_micro_batches
        computes = [i.action for i in self.code if isinstance(i, Compute)]
        self.own = {action.stage for action in computes}
        self.split = {a.stage for a in computes if a.kind == "I"}
        self.slots = _VersionSlots(rank, program, self.own)
        self.first_gradient = self._first_gradients(computes)
        self.last_leaf_use = self._last_leaf_uses(computes)
        self.waits: dict[tuple[int, int], list[tuple[int, Wait]]] = defaultdict(list)
        rank.scale.fill_(1.0 / (program.num_micro_batches * rank.replicas))
        rank.losses_here = any(rank.function(s, "F").outputs[-1:] == (rank.capture.graph.loss,) for s in self.own)

    def calls(self) -> list[Bound]:
        calls: list[Bound] = []
        for place, instruction in enumerate(self.code):
            match instruction:
                case Compute(action, version):
                    slot = self.slots.of(action.stage, version, place)
                    calls += self._compute(action.kind, action.stage, action.micro_batch, slot)
                case Send(of, edge, peer, _):
                    calls.append(self._send(of.kind, of.stage, of.micro_batch, edge, peer))
                case Receive(of, edge, peer, _):
                    calls += self._receive(of.micro_batch, edge, peer)
                case Reduce():
                    calls.append(self._reduce(instruction))
                case Update(stage, step):
                    calls.append(self._update(stage, step))
                case Unshard() | Reshard():
                    hint = "use a plan without sharding"
                    raise RunError(f"{instruction}: sharded weights cannot be run yet", hint=hint)
        return calls

    # -- computes -----------------------------------------------------------------------------------

    def _compute(self, kind: Any, stage: int, micro_batch: int, slot: int) -> list[Bound]:
        calls: list[Bound] = []
        waits = self._waits_of(kind, stage, micro_batch)
        if waits:
            calls.append(Bound(self._wait_call(stage, micro_batch, waits), "wait", kind, stage, micro_batch))
        function = self.rank.function(stage, kind)
        if not function.outputs and not self.rank.stages.stages[stage].segment(kind).ops:
            call = _nothing
        else:
            call = self._compute_call(kind, stage, micro_batch, slot)
        calls.append(Bound(call, "compute", kind, stage, micro_batch))
        return calls

    def _waits_of(self, kind: SegmentKind, stage: int, micro_batch: int) -> list[tuple[int, Wait]]:
        """Return what has been posted for this micro-batch and is needed from here on."""
        posted = self.waits.pop((stage, micro_batch), [])
        edges = self.rank.stages.edges
        now = [(edge, wait) for edge, wait in posted if (edges[edge].kind == "F") == (kind == "F")]
        later = [pair for pair in posted if pair not in now]
        if later:
            self.waits[stage, micro_batch] = later
        return now

    def _wait_call(self, stage: int, micro_batch: int, waits: list[tuple[int, Wait]]) -> Call:
        frames, nodes = self.rank.frames, self.rank.capture.fx_nodes
        plans = [(wait, self.rank.stages.edges[edge].values) for edge, wait in waits]
        restore = {v for _, values in plans for v in values if _is_permuted(nodes[v])}
        key = (stage, micro_batch)

        def call() -> None:
            frame = frames[key]
            for wait, values in plans:
                frame.update(zip(values, wait(), strict=True))
            for value in restore:
                frame[value] = _with_strides(frame[value], nodes[value])

        return call

    def _compute_call(self, kind: SegmentKind, stage: int, micro_batch: int, slot: int) -> Call:
        rank, key = self.rank, (stage, micro_batch)
        segment = rank.stages.stages[stage].segment(kind)
        function = rank.function(stage, kind)
        run, guard = function.run, _compat.below_autograd
        statics = self._statics(stage, function, slot)
        frames, per_step = rank.frames, self.per_step
        leaf_ids = [rank.capture.inputs[node] for node in function.leaves]
        drop_leaves = self.last_leaf_use.get(micro_batch) == (kind, stage)
        taken = function.values[: len(segment.takes)]
        read = function.values[len(segment.takes) :]
        finish = self._finish(kind, stage, micro_batch, function)
        last = kind in ("B", "W")

        def call() -> None:
            frame = frames[key]
            arguments = statics.copy()
            if leaf_ids:
                leaves = rank.batches.get(micro_batch)
                if leaves is None:
                    leaves = rank.batches[micro_batch] = rank.leaves(micro_batch, per_step)
                arguments += [leaves[i] for i in leaf_ids]
                if drop_leaves:
                    del rank.batches[micro_batch]
            arguments += map(frame.pop, taken)
            arguments += map(frame.__getitem__, read)
            with guard():
                finish(frame, run(arguments, rank.seed(micro_batch, per_step)))
            if last:
                del frames[key]

        return call

    def _finish(
        self, kind: SegmentKind, stage: int, micro_batch: int, function: Function
    ) -> Callable[[dict[int, Any], tuple[Any, ...]], None]:
        """Return what to do with the results: keep, hand over, send, add up, note the loss."""
        rank = self.rank
        segment = rank.stages.stages[stage].segment(kind)
        place = {value: i for i, value in enumerate(function.outputs)}
        kept = [value for value in segment.keeps if value in place]
        take_kept = _getter([place[value] for value in kept])
        outgoing = self._outgoing(stage, micro_batch, segment.sends, place)
        add = self._adder(kind, stage, micro_batch, place)
        loss = place.get(rank.capture.graph.loss) if kind == "F" else None
        losses, step = rank.progress.losses, micro_batch // self.per_step

        def finish(frame: dict[int, Any], outputs: tuple[Any, ...]) -> None:
            if kept:
                frame.update(zip(kept, take_kept(outputs), strict=True))
            for hand_over in outgoing:
                hand_over(outputs)
            if add is not None:
                add(outputs)
            if loss is not None:
                losses[step].append(outputs[loss])

        return finish

    def _outgoing(
        self,
        stage: int,
        micro_batch: int,
        sends: tuple[tuple[int, tuple[int, ...]], ...],
        place: dict[int, int],
    ) -> list[Callable[[tuple[Any, ...]], None]]:
        calls: list[Callable[[tuple[Any, ...]], None]] = []
        for edge, values in sends:
            take = _getter([place[value] for value in values])
            target = self.rank.stages.edges[edge].target
            if target in self.own:
                calls.append(self._hand_over(take, values, (target, micro_batch)))
            else:
                calls.append(self._put_out(take, (edge, micro_batch)))
        return calls

    def _hand_over(
        self, take: Callable[[tuple[Any, ...]], Any], values: tuple[int, ...], key: tuple[int, int]
    ) -> Callable[[tuple[Any, ...]], None]:
        frames = self.rank.frames

        def hand_over(outputs: tuple[Any, ...]) -> None:
            frames[key].update(zip(values, take(outputs), strict=True))

        return hand_over

    def _put_out(
        self, take: Callable[[tuple[Any, ...]], Any], key: tuple[int, int]
    ) -> Callable[[tuple[Any, ...]], None]:
        outbox = self.rank.outbox

        def put_out(outputs: tuple[Any, ...]) -> None:
            outbox[key] = take(outputs)

        return put_out

    def _adder(
        self, kind: SegmentKind, stage: int, micro_batch: int, place: dict[int, int]
    ) -> Callable[[tuple[Any, ...]], None] | None:
        """Return what adds a micro-batch's gradients to the step's; the first ones are copied."""
        pairs = self.rank.stages.stages[stage].segment(kind).gradients
        if not pairs:
            return None
        weights = self.rank.weights_of(stage)
        once = dict(pairs)  # the last part of each parameter
        targets = [weights.gradients[parameter] for parameter in once]
        take = _getter([place[value] for value in once.values()])
        more = [(weights.gradients[p], place[v]) for p, v in pairs if once[p] != v]
        first = self.first_gradient[stage, micro_batch // self.per_step] == (kind, micro_batch)
        combine: Any = torch._foreach_copy_ if first else torch._foreach_add_  # pyright: ignore

        def add(outputs: tuple[Any, ...]) -> None:
            combine(targets, take(outputs))
            for target, at in more:
                target.add_(outputs[at])

        return add

    def _statics(self, stage: int, function: Function, slot: int) -> list[Any]:
        weights, nodes = self.rank.weights_of(stage), self.rank.capture.graph.nodes
        parameters = weights.tensors(slot)
        found: list[Any] = []
        for node in function.statics:
            match nodes[node].kind:
                case "parameter":
                    found.append(parameters[node])
                case "buffer":
                    found.append(weights.buffers[node])
                case "scale":
                    found.append(self.rank.scale)
                case _:
                    found.append(self.rank.capture.constants[node])
        return found

    def _first_gradients(self, computes: Sequence[Any]) -> dict[tuple[int, int], tuple[str, int]]:
        first: dict[tuple[int, int], tuple[str, int]] = {}
        for kind, stage, micro_batch in computes:
            if kind in ("B", "W"):
                first.setdefault((stage, micro_batch // self.per_step), (kind, micro_batch))
        return first

    def _last_leaf_uses(self, computes: Sequence[Any]) -> dict[int, tuple[str, int]]:
        last: dict[int, tuple[str, int]] = {}
        for kind, stage, micro_batch in computes:
            if self.rank.function(stage, kind).leaves:
                last[micro_batch] = (kind, stage)
        return last

    # -- messages -----------------------------------------------------------------------------------

    def _send(self, kind: Any, stage: int, micro_batch: int, edge: int, peer: int) -> Bound:
        send, outbox, key = self.rank.sender(edge, peer), self.rank.outbox, (edge, micro_batch)

        def call() -> None:
            send(outbox.pop(key))

        return Bound(call, "send", kind, stage, micro_batch)

    def _receive(self, micro_batch: int, edge: int, peer: int) -> list[Bound]:
        post, wait = self.rank.receiver(edge, peer)
        to = self.rank.stages.edges[edge]
        self.waits[to.target, micro_batch].append((edge, wait))
        if post is None:
            return []
        return [Bound(post, "wait", to.kind, to.target, micro_batch)]

    # -- the end of a step --------------------------------------------------------------------------

    def _reduce(self, reduce: Reduce) -> Bound:
        match reduce.how:
            case "tied":
                call = self._reduce_tied(reduce)
            case "replicas":
                call = self._reduce_replicas(reduce)
            case "norm":
                call = self._reduce_norm(reduce)
        return Bound(call, "collective", "reduce", -1, reduce.step)

    def _reduce_tied(self, reduce: Reduce) -> Call:
        nodes, rank = self.rank.capture.graph.nodes, self.rank
        node, holders = next(
            (node, held) for node, held in rank.stages.tied if nodes[node].name == reduce.bucket
        )
        here = [rank.weights_of(stage) for stage in holders if stage in self.own]
        if node not in here[0].gradients:
            return _nothing
        targets = [weights.gradients[node] for weights in here]
        silent = [w.gradients[node] for w in here if node not in w.with_gradient]
        first, others, ranks = targets[0], targets[1:], reduce.ranks

        def call() -> None:
            for target in silent:
                target.zero_()
            for other in others:
                first.add_(other)
            if len(ranks) > 1:
                rank.transport.all_reduce(first, ranks)
            for other in others:
                other.copy_(first)

        return call

    def _reduce_replicas(self, reduce: Reduce) -> Call:
        stage = int(reduce.bucket.removeprefix("stage"))
        flats, transport = self.rank.weights_of(stage).flat_gradients, self.rank.transport

        def call() -> None:
            for flat in flats:
                transport.all_reduce(flat, reduce.ranks)

        return call

    def _reduce_norm(self, reduce: Reduce) -> Call:
        rank = self.rank
        owner = {node: held[0] for node, held in rank.stages.tied}
        reached = {node for s in rank.stages.stages for node, _ in s.backward.gradients}
        parts = [
            (weights, [n for n in weights.live if n in reached and owner.get(n, stage) == stage])
            for stage in sorted(self.own)
            for weights in [rank.weights_of(stage)]
        ]

        def call() -> None:
            assert rank.job.clip_norm is not None
            total = sum(weights.squares(nodes) for weights, nodes in parts)
            squares = torch.tensor([total], dtype=torch.float64)
            if len(reduce.ranks) > 1:
                rank.transport.all_reduce(squares, reduce.ranks)
            norm = float(squares.sqrt())
            factor = min(1.0, rank.job.clip_norm / (norm + 1e-6))
            for weights, _ in parts:
                weights.scale_gradients(factor)

        return call

    def _update(self, stage: int, step: int) -> Bound:
        rank, weights = self.rank, self.rank.weights_of(stage)
        progress, rate = rank.progress, rank.job.learning_rate
        stash = self.slots.stash_at.get((stage, step))
        loss_here = rank.capture.graph.loss in rank.function(stage, "F").outputs
        newest = stage == max(self.own)

        def call() -> None:
            if stash is not None:
                weights.keep(stash)
            number = progress.first_step + step
            weights.step(1.0 if rate is None else float(rate(number)))
            if newest:
                now = time.perf_counter()
                loss = None
                if loss_here:
                    losses = progress.losses.pop(step)
                    loss = float(torch.stack([x.float().reshape(()) for x in losses]).mean())
                progress.done.append(StepResult(number, loss, now - progress.last_update))
                progress.last_update = now

        return Bound(call, "update", "U", stage, step)


class _VersionSlots:
    """Which tensors hold which version of a stage's weights, decided before the window runs.

    Version v is live (slot 0) until U(v) makes the next one; if it is still read after that,
    U(v) first copies it into a stash (slot 1, 2, ...) that no version needs any more.
    """

    def __init__(self, rank: Rank, program: Program, own: set[int]) -> None:
        self.program, self.rank = program, rank
        self.history = program.weight_rule.history
        self.stash_at: dict[tuple[int, int], int] = {}
        self.updated_at: dict[tuple[int, int], int] = {}
        self.last_read: dict[tuple[int, int], int] = {}
        for place, instruction in enumerate(program.code[rank.rank]):
            match instruction:
                case Compute(action, version):
                    self.last_read[action.stage, version] = place
                case Update(stage, step):
                    self.updated_at[stage, step] = place
                case _:
                    pass
        for stage in own:
            self._assign(stage)

    def of(self, stage: int, version: int, place: int) -> int:
        """Return the slot in which instruction `place` finds `version` (0: the live weights)."""
        if version < 0:
            return -version
        replaced = place > self.updated_at.get((stage, version), place)
        return self.stash_at[stage, version] if replaced else 0

    def _assign(self, stage: int) -> None:
        count, num_steps = self.history, self.program.num_steps
        holds = {slot: -slot for slot in range(1, count + 1)}  # the version in each stash
        for step in range(num_steps):
            place = self.updated_at[stage, step]
            kept = step >= num_steps - self.history
            if self.last_read.get((stage, step), -1) < place and not kept:
                continue
            dead = [s for s, v in holds.items() if not self._needed(stage, v, place)]
            slot = num_steps - step if kept and num_steps - step in dead else min(dead, default=0)
            if not slot:
                count += 1
                slot = count
            holds[slot] = step
            self.stash_at[stage, step] = slot
        moved = [k for k in range(1, self.history + 1) if holds[k] != num_steps - k]
        if moved:
            raise RunError(f"stage {stage}: older versions {moved} end in other stashes")
        self.rank.weights_of(stage).reserve(count)

    def _needed(self, stage: int, version: int, place: int) -> bool:
        lasts = self.last_read.get((stage, version), -1) > place
        return lasts or version >= self.program.num_steps - self.history


def _nothing() -> None:
    """Do nothing: the I of a stage that no other stage waits for."""


def _getter(places: list[int]) -> Callable[[tuple[Any, ...]], list[Any]]:
    """Return a function that picks the values at `places`, as a list."""
    if len(places) == 1:
        (only,) = places
        return lambda outputs: [outputs[only]]
    if not places:
        return lambda outputs: []
    pick = itemgetter(*places)
    return lambda outputs: list(pick(outputs))


def _is_permuted(node: torch.fx.Node) -> bool:
    value = node.meta["val"]
    return not value.is_contiguous() and 0 not in value.stride()


def _with_strides(tensor: Tensor, node: torch.fx.Node) -> Tensor:
    """Return a copy laid out as the trace saw it, so that its views stay views."""
    like = node.meta["val"]
    result = torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device)
    return result.copy_(tensor)
