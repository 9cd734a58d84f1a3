"""Bind: the instructions of one rank as a flat list of calls.

Binding looks up everything that can be known beforehand: the function of each segment, the
tensors of each version, the ends of each channel, where every value goes.  A call that runs
only has to take its inputs, compute, and pass its results on.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from math import isfinite
from operator import itemgetter
from typing import TYPE_CHECKING, Any, assert_never

import torch
from torch import Tensor

from penstock import _compat
from penstock.device import of
from penstock.errors import RunError
from penstock.graph.code import Function
from penstock.graph.stages import Segment, SegmentKind
from penstock.graph.trace import is_output
from penstock.program.program import (
    BeginOffload,
    BeginReload,
    Collect,
    Compute,
    Offload,
    Program,
    Receive,
    Reload,
    Reshard,
    Send,
    Unshard,
    Update,
)
from penstock.program.reductions import (
    AverageWeights,
    Commit,
    Guard,
    Norm,
    Sum,
    Validate,
)
from penstock.runtime.calls import Bound, Call
from penstock.runtime.collects import collect_calls
from penstock.runtime.end_of_step import LocalStages, sum_calls, tell_call, update_call
from penstock.runtime.far_copies import Moves
from penstock.runtime.lane import Awaited
from penstock.runtime.post_validation import Provisional, Validation, known_before
from penstock.schedule.schedule import Action, Kind
from penstock.schedule.weight_rule import SYNCHRONOUS
from penstock.state.versions import ParkedGradients, Read, VersionSlots

if TYPE_CHECKING:
    from penstock.runtime.rank import Rank

Results = tuple[Any, ...]  # of a segment's function
Consumer = Callable[[Results], None]


def bind(rank: "Rank", program: Program) -> list[Bound]:
    """Return the calls of one window of `program` on `rank`.

    Raises:   as Rank.bind.
    """
    _check_clipping(rank, program)
    _check_scaling(rank, program)
    return _Binder(rank, program).calls()  # 8 in docs/architecture.md


def _check_clipping(rank: "Rank", program: Program) -> None:
    limit = rank.job.clip_norm
    if program.end.clip == rank.job.awaits_all or not rank.stages.has_gradients:
        return
    if limit is None and not program.end.clip:
        message = "the job leaves out steps that overflow, and the plan does not wait to know"
        raise RunError(message, hint="make the plan again, or set Job.precision to None")
    if program.end.clip:
        message = "the plan clips gradients, but the job does not say to which norm"
        raise RunError(message, hint="set Job.clip_norm, or make the plan again")
    message = f"the job clips gradients to norm {limit:g}, and the plan does not"
    raise RunError(message, hint="make the plan again, or set Job.clip_norm to None")


def _check_scaling(rank: "Rank", program: Program) -> None:
    if not rank.job.scales_loss or not rank.stages.has_gradients:
        return
    hint = 'set Job.precision="bfloat16", or make the plan '
    if program.weight_rule != SYNCHRONOUS:
        message = f"a step that overflows cannot be left out under rule {program.weight_rule.name}"
        raise RunError(message, hint=f"{hint}with a synchronous schedule")
    if any(isinstance(one, Validate) for one in program.code.reductions):
        message = "an update that is made before it is known whether the step overflows"
        raise RunError(message, hint=f"{hint}without post_validation")


class _Binder:
    """Turns instructions into calls; it knows what is under way, and which use is the last."""

    def __init__(self, rank: "Rank", program: Program) -> None:
        self.rank, self.program = rank, program
        self.code = program.code[rank.rank]
        self.per_step = program.num_micro_batches
        self.own = program.stages_of(rank.rank)
        self.slots = VersionSlots(program, rank.rank)
        self.parked = ParkedGradients(self.code, self.per_step)
        sizes, rule = (program.num_stages, program.num_micro_batches), program.weight_rule
        for stage in self.own:
            weights = rank.weights_of(stage)
            weights.reserve(self.slots.count[stage], self.slots.predictions[stage])
            weights.park(self.parked.count(stage))
            keeps = rule.kept(stage, *sizes) > 0
            weights.attend(rule, rule.staleness(stage, *sizes), keeps=keeps)
        nodes, loss = rank.capture.graph.nodes, rank.capture.graph.loss
        count = rank.summed_micro_batches
        dtype = getattr(torch, nodes[loss].dtype)  # of the gradient that the loss is given
        self.scale = torch.tensor(1.0 / count, dtype=dtype, device=rank.device)
        if rank.loss_scale is not None:
            self.scale = rank.loss_scale.gradient(count, dtype, rank.device)
        actions = [i.action for i in self.code if isinstance(i, Compute)]
        computes = [piece for action in actions for piece in self._pieces(action)]
        for action, slot in tuple(self.parked.of.items()):
            self.parked.of.update(dict.fromkeys(self._pieces(action), slot))
        self.here = {(action.stage, action.micro_batch) for action in computes}
        self.first_gradient = self._first_gradients(computes)
        self.last_gradient = self._first_gradients(computes[::-1])
        sums = [i for i in self.code if isinstance(i, Sum) and i.how != "tied"]
        self.summed = {each.bucket for each in sums}
        self.leaf_uses = self._leaf_uses(computes)
        self.sums, self.copies = Awaited(rank, program), Moves(rank)
        self.order = rank.order(program)  # in which the micro-batches are read
        # by channel, an edge and a peer: micro-batches announced and not taken, and those taken
        self.under_way: defaultdict[tuple[int, int], deque[int]] = defaultdict(deque)
        self.taken: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
        # channels by stage, micro-batch and whether its F reads them
        self.readers: defaultdict[tuple[int, int, bool], list[tuple[int, int]]] = defaultdict(list)

    def calls(self) -> list[Bound]:
        own = LocalStages(self.own, self._first_homes(), self.first_gradient)
        found = [i for i in self.code if isinstance(i, Validate)]
        if found:
            calls = self._validated(own, Validation(self.rank, self.program, found[0], own))
        else:
            calls = [call for at in range(len(self.code)) for call in self._calls_of(at, own)]
            if self.program.end.clip:  # the window before may have been one of another program
                calls.insert(0, Bound(self.rank.settle, "settle", "U", -1, 0))
        return [*calls, *self.sums.waits(), *self._move_stashes(), *self._tell()]

    def _validated(self, own: LocalStages, validation: Validation) -> list[Bound]:
        """Return the calls of a program whose updates are validated."""
        ends = known_before(self.rank, self.program)
        until = int(ends[self.rank.rank] - self.program.code.offsets[self.rank.rank])
        updates = [at for at, each in enumerate(self.code) if isinstance(each, Update)]
        calls, provisional = list[Bound](), None
        for at, instruction in enumerate(self.code):
            if at == until:
                provisional = Provisional(self.rank, self.program, ends, tuple(calls))
                calls.insert(0, Bound(provisional.begin, "settle", "U", -1, 0))
                calls.append(Bound(provisional.settle, "settle", "U", -1, 0))
            if at in updates[:1]:
                calls += self.sums.waits()
                calls.append(Bound(validation.before_updates, "settle", "U", -1, 0))
            if isinstance(instruction, Validate):
                where = "reduce", -1, instruction.step
                calls.append(Bound(validation.after_updates, "collective", *where))
            else:
                calls += self._calls_of(at, own)
        assert provisional is not None, "there is an update, and before it a backward"
        provisional.close(calls)
        return calls

    def _calls_of(  # long: a case for each instruction
        self, place: int, own: LocalStages
    ) -> Iterator[Bound]:
        """Yield the calls of one instruction."""
        match instruction := self.code[place]:
            case Compute(action, version):
                for piece in self._pieces(action):
                    yield from self._read_data(piece)
                yield from self._take(action)
                read = self.slots.of(action, version, place)
                yield from self._predict(action, read)
                yield from self.sums.gathered(action.stage)
                yield from self.sums.collected(action)
                if action.kind in "BW":
                    yield from self.sums.before(action.stage)
                together = len(self.program.group_of(action)) > 1
                compute = self._joint(action, read) if together else self._compute(action, read)
                yield Bound(compute, "compute", *action)
            case Send(of, edge, peer, _):
                call = self._send((edge, of.micro_batch), peer)
                yield Bound(call, "send", *of, ranks=(peer,), edge=edge)
            case Receive(of, edge, peer, _):
                yield from self._receive(of, edge, peer)
            case Collect():
                yield from self.sums.collect(place, collect_calls(self.rank, instruction))
            case Sum() | Norm() | Guard() | Commit() | Validate() | AverageWeights():
                yield from self.sums.bind(place, sum_calls(self.rank, instruction, own))
            case Update(stage, step):
                yield from self.sums.waits()
                yield Bound(self._update(stage, step), "update", "U", stage, step)
                if (shard := self.rank.weights_of(stage).shard) is not None:
                    yield Bound(shard.forget, "versions", "U", stage, step)
                if (slot := self.parked.slots.get((stage, step + 1))) is not None:
                    unpark = partial(self.rank.weights_of(stage).unpark, slot)
                    yield Bound(unpark, "versions", "U", stage, step)
            case Offload(of) | Reload(of) | BeginOffload(of) | BeginReload(of):
                yield from self.sums.waits() if of.kind == "W" else ()  # for gradients
                yield self.copies.bind(instruction)
            case Unshard(stage):
                yield from self.sums.gather(stage)
            case Reshard(stage):
                yield from self.sums.gathered(stage)
                drop = self.rank.shard_of(stage).drop
                yield Bound(drop, "versions", "unshard", stage, -1)
            case _:
                assert_never(instruction)

    def _move_stashes(self) -> list[Bound]:
        """Return the calls that put older versions where the next window looks for them."""
        last = self.program.num_steps - 1
        moved = ((stage, moves) for stage, moves in self.slots.moved.items() if moves)
        return [
            Bound(partial(self.rank.weights_of(stage).move, moves), "versions", "U", stage, last)
            for stage, moves in moved
        ]

    def _tell(self) -> list[Bound]:
        """Return the call that reports the window's step where no update does: in inference."""
        if not self.own or any(isinstance(instruction, Update) for instruction in self.code):
            return []
        tell = tell_call(self.rank, 0, has_loss=self._has_loss())
        return [Bound(tell, "tell", "U", max(self.own), 0)]

    def _has_loss(self) -> bool:
        """Return whether the losses are made on this rank, and on it first."""
        if self.program.grid.slice_of(self.rank.rank):
            return False
        stages, loss = self.rank.stages.stages, self.rank.capture.graph.loss
        return any(loss in stages[own].forward.ops for own in self.own)

    def _first_homes(self) -> set[int]:
        """Return the stages of this rank that live on no earlier rank of its replica."""
        peers = self.rank.peers
        earlier = map(self.program.stages_of, peers[: peers.index(self.rank.rank)])
        return set(self.own).difference(*earlier)

    # -- computes ----------------------------------------------------------------------------

    def _predict(self, action: Action, read: Read) -> list[Bound]:
        """Return the call that predicts the weights that `action` is the first to read."""
        if not read.is_first:
            return []
        predict = partial(self.rank.weights_of(action.stage).predict, read.slot, read.ahead)
        return [Bound(predict, "versions", *action)]

    def _compute(self, action: Action, read: Read) -> Call:
        """Return the call that takes its inputs, computes, and passes the results on."""
        stage, kind = action.stage, _segment_kind(action)
        segment = self.rank.stages.stages[stage].segment(kind)
        function = self.rank.function(stage, kind, asks=read.slot < 0)
        if not segment.ops and not function.outputs:
            return _nothing
        consumers = self._consumers(action, segment, function)
        return self._carrying(action, self._call_of(action, segment, function, read, consumers))

    def _call_of(
        self,
        action: Action,
        segment: Segment,
        function: Function,
        read: Read,
        consumers: Sequence[Consumer],
    ) -> Call:
        """Return the call that runs `function`, of `segment`, for the micro-batch of `action`."""
        _, stage, micro_batch = action
        statics = self._statics(stage, function, read)
        leaves, seed = self._leaves(action, function), self._seed(micro_batch, segment)
        count = len(segment.takes)
        taken, others = function.values[:count], function.values[count:]
        frame = self.rank.frames[stage, micro_batch]
        pop, get = frame.pop, frame.__getitem__
        run, guard = function.run, _compat.below_autograd

        def call() -> None:
            arguments = [*statics, *leaves(), *map(pop, taken), *map(get, others)]
            with guard():
                results = run(arguments, seed())  # 11 in docs/architecture.md
                for consume in consumers:
                    consume(results)

        return call

    def _pieces(self, action: Action) -> list[Action]:
        """Return what an action is done as: by micro-batch, where it is of several."""
        kind, stage, _ = action
        group = self.program.group_of(action)
        if len(group) == 1:
            return [action]
        kinds: tuple[Kind, ...] = ("I", "W") if kind == "B" else ("W",)
        return [Action(each, stage, member) for each in kinds for member in group]

    def _joint(self, action: Action, read: Read) -> Call:
        """Return the call of B or W of several micro-batches; products of matrices run once."""
        _, stage, first = action
        group, pieces = self.program.group_of(action), self._pieces(action)
        joint, each, once = self.rank.joint(stage, len(group), asks=read.slot < 0)
        frames = [self.rank.frames[stage, member] for member in group]
        calls = [self._compute(piece, read) for piece in pieces if piece.kind == "I"]
        if action.kind == "B":
            calls.append(self._gathered(stage, group))
        for piece in pieces[-len(group) :]:
            kept = self._keep_and_add(piece, joint.each, each)
            calls.append(self._call_of(piece, joint.each, each, read, kept))
        added = {parameter for parameter, _ in joint.each.gradients}
        place = {value: at for at, value in enumerate(once.outputs)}
        sums = self._add(Action("W", stage, first), joint.once, place, added=added)
        run, guard, along = once.run, _compat.below_autograd, joint.along

        def call() -> None:
            for one in calls:
                one()
            with guard():
                whole = [torch.cat([f.pop(value) for f in frames], dim) for value, dim in along]
                if whole:
                    sums(run(whole, 0))
            for frame in frames:
                frame.clear()

        return call

    def _keep_and_add(
        self, piece: Action, segment: Segment, function: Function
    ) -> tuple[Consumer, ...]:
        """Return what keeps the operands of products, and adds up the other gradients."""
        frame = self.rank.frames[piece.stage, piece.micro_batch]
        place = {value: at for at, value in enumerate(function.outputs)}
        found = [_into(frame, segment.keeps, place)] if segment.keeps else []
        return (*found, self._add(piece, segment, place)) if segment.gradients else (*found,)

    def _gathered(self, stage: int, group: range) -> Call:
        """Return the call that puts what I of several micro-batches sends into one message."""
        outbox, target = self.rank.outbox, self.rank.stages.edges
        segment = self.rank.stages.stages[stage].input_gradient
        edges = [e for e, _ in segment.sends if (target[e].target, group[0]) not in self.here]

        def gather() -> None:
            for edge in edges:
                parts = [outbox.pop((edge, member)) for member in group]
                outbox[edge, group[0]] = [value for part in parts for value in part]

        return gather

    def _carrying(self, action: Action, call: Call) -> Call:
        """Return `call` with what has to be done for buffers that other ranks change too."""
        carried = self.rank.carried.get(action.stage)
        if carried is None or action.kind != "F":
            return call
        number, micro_batch = self.rank.number, action.micro_batch

        def carrying() -> None:
            at = number(micro_batch)
            carried.before(at)
            call()
            carried.after(at)

        return carrying

    def _statics(self, stage: int, function: Function, read: Read) -> tuple[Any, ...]:
        weights, capture = self.rank.weights_of(stage), self.rank.capture
        held: Mapping[int, Any]
        if read.slot < 0:
            held = weights.predictions(read.ahead)
        else:
            held = weights.prediction(read.slot) if read.ahead else weights.tensors(read.slot)
        known = {**held, **weights.buffers, **capture.constants}
        nodes = capture.graph.nodes
        return tuple(self.scale if nodes[n].kind == "scale" else known[n] for n in function.statics)

    def _leaves(self, action: Action, function: Function) -> Callable[[], Sequence[Any]]:
        """Return what gives the leaves of the batch that a function reads."""
        if not function.leaves:
            return tuple
        micro_batch, batches = action.micro_batch, self.rank.batches
        places = [self.rank.capture.inputs[node] for node in function.leaves]
        is_last_use = self.leaf_uses[micro_batch][-1] == action
        find = batches.pop if is_last_use else batches.__getitem__

        def leaves() -> list[Any]:
            batch = find(micro_batch)
            return [batch[place] for place in places]

        return leaves

    def _read_data(self, action: Action) -> list[Bound]:
        """Return the call that reads the batch, if `action` is the first that needs it.

        It stands before those that wait for messages, which may come meanwhile.
        """
        micro_batch = action.micro_batch
        if self.leaf_uses[micro_batch][:1] != [action]:
            return []
        rank, order, at = self.rank, self.order, len(self.order.places)
        order.places.append(rank.place(micro_batch))

        def read() -> None:
            # 10 in docs/architecture.md
            batch = rank.batches[micro_batch] = rank.leaves(order, at)
            if rank.unsettled:
                rank.read[micro_batch] = batch

        return [Bound(read, "data", *action)]

    def _seed(self, micro_batch: int, segment: Segment) -> Callable[[], int]:
        """Return what gives the seed; always 0 where nothing is random."""
        nodes = self.rank.capture.graph.nodes
        if not any(nodes[op].effect == "random" for op in segment.ops):
            return int
        seed = self.rank.seed
        return lambda: seed(micro_batch)

    def _first_gradients(self, computes: Sequence[Action]) -> dict[tuple[int, int], Action]:
        """Return by (stage, step) the action whose gradients are the first of their step."""
        first: dict[tuple[int, int], Action] = {}
        for action in computes:
            if action.kind in ("B", "W"):
                first.setdefault((action.stage, action.micro_batch // self.per_step), action)
        return first

    def _leaf_uses(self, computes: Sequence[Action]) -> defaultdict[int, list[Action]]:
        """Return by micro-batch the actions that read the batch, in order."""
        uses: defaultdict[int, list[Action]] = defaultdict(list)
        for action in computes:
            if self.rank.function(action.stage, _segment_kind(action)).leaves:
                uses[action.micro_batch].append(action)
        return uses

    # -- where results go --------------------------------------------------------------------

    def _consumers(
        self, action: Action, segment: Segment, function: Function
    ) -> tuple[Consumer, ...]:
        """Return what keeps, hands over, puts out, adds up and notes the results."""
        kind, stage, micro_batch = action
        frame = self.rank.frames[stage, micro_batch]
        place = {value: i for i, value in enumerate(function.outputs)}
        consumers: list[Consumer] = []
        kept = [value for value in segment.keeps if value in place]
        if kept:
            consumers.append(_into(frame, kept, place))
        for edge, values in segment.sends:
            target = self.rank.stages.edges[edge].target
            if (target, micro_batch) in self.here:
                there = self.rank.frames[target, micro_batch]
                consumers.append(_into(there, values, place))
            else:
                consumers.append(self._put_out((edge, micro_batch), values, place))
        if segment.gradients:
            consumers.append(self._add(action, segment, place))
        loss = self.rank.capture.graph.loss
        if kind == "F" and loss in place and not self.program.grid.slice_of(self.rank.rank):
            consumers.append(self._note_loss(micro_batch, place[loss]))
        if kind == "F" and stage == self._tells_in():
            consumers += self._tells(micro_batch, place)
        if kind in ("B", "W"):
            consumers.append(lambda results: frame.clear())
        return tuple(consumers)

    def _put_out(
        self, key: tuple[int, int], values: Sequence[int], place: dict[int, int]
    ) -> Consumer:
        outbox, pick = self.rank.outbox, _picker([place[value] for value in values])

        def put_out(results: Results) -> None:
            outbox[key] = pick(results)

        return put_out

    def _add(
        self,
        action: Action,
        segment: Segment,
        place: dict[int, int],
        *,
        added: Collection[int] = (),
    ) -> Consumer:
        """Return what adds gradients to those of the step; the first ones are copied.

        added:  parameters of which the first ones come from elsewhere.
        """
        weights, slot = self.rank.weights_of(action.stage), self.parked.of.get(action)
        sums = weights.gradients if slot is None else weights.parked[slot][1]
        parts = dict(segment.gradients)  # the last part of each parameter
        for parameter in added:
            parts.pop(parameter, None)
        targets = [sums[parameter] for parameter in parts]
        pick = _picker([place[value] for value in parts.values()])
        more = [(sums[p], place[v]) for p, v in segment.gradients if parts.get(p) != v]
        is_first = self.first_gradient[action.stage, action.micro_batch // self.per_step] == action
        begin = weights.shard.begin if is_first and weights.shard is not None else _nothing
        combine: Callable[[list[Tensor], list[Tensor]], object]
        combine = torch._foreach_copy_ if is_first else torch._foreach_add_  # pyright: ignore

        def add(results: Results) -> None:
            begin()
            combine(targets, pick(results))  # 15 in docs/architecture.md
            for target, at in more:
                target.add_(results[at])

        return self._watched(action, parts, place, add) if self.rank.noise.is_on else add

    def _watched(
        self, action: Action, parts: dict[int, int], place: dict[int, int], add: Consumer
    ) -> Consumer:
        """Return `add`, with a look at the gradients that are added in steps that are watched.

        And, of a stage that is summed over no other rank, at their sum after the last.
        """
        noise, stage = self.rank.noise, action.stage
        nodes = self.rank.watched(stage)
        pick = _picker([place[value] for node, value in parts.items() if node in nodes])
        is_last = self.last_gradient[stage, action.micro_batch // self.per_step] == action
        is_alone = is_last and f"stage{stage}" not in self.summed
        weights = self.rank.weights_of(stage)
        sums = weights.gradients if weights.shard is None else weights.shard.gradients
        whole = [sums[node] for node in nodes if node in sums]

        def watched(results: Results) -> None:
            add(results)
            if noise.is_due:
                noise.small(pick(results))
                if is_alone:
                    noise.large(whole)

        return watched

    def _note_loss(self, micro_batch: int, at: int) -> Consumer:
        rank, step = self.rank, micro_batch // self.per_step
        losses = rank.progress.losses
        if not rank.is_guarded or of(rank.device).is_queued:  # elsewhere a look would wait for it
            return lambda results: losses[step].append(results[at])

        def note(results: Results) -> None:
            loss = results[at]
            if not isfinite(loss.item()) and not rank.unsettled:
                rank.check_loss(float(loss), micro_batch)
            losses[step].append(loss)  # 14 in docs/architecture.md

        return note

    def _tells_in(self) -> int:
        """Return the stage of the loss, or behind it of the figures; -1: another rank tells."""
        if self.program.grid.slice_of(self.rank.rank):
            return -1
        told, stages = self.rank.capture.graph.told, self.rank.stages.stages
        return max(each.index for each in stages if not told.isdisjoint(each.forward.ops))

    def _tells(self, micro_batch: int, place: Mapping[int, int]) -> Iterator[Consumer]:
        """Yield what puts out, and what notes, the figures of a micro-batch."""
        told = self.rank.capture.graph.figures
        figures = [place[node] for name, node in told if not is_output(name)]
        outputs = {name: place[node] for name, node in told if is_output(name)}
        if outputs:
            yield self._put_outputs(micro_batch, outputs)
        if figures:
            yield self._note_figures(micro_batch, figures)

    def _note_figures(self, micro_batch: int, places: Sequence[int]) -> Consumer:
        noted, pick = self.rank.progress.figures, _picker(places)
        step = micro_batch // self.per_step
        return lambda results: noted[step].append(torch.stack(pick(results)))

    def _put_outputs(self, micro_batch: int, places: dict[str, int]) -> Consumer:
        rank = self.rank

        def put(results: Results) -> None:
            found = {name: results[at] for name, at in places.items()}
            rank.put_outputs(rank.number(micro_batch), found)

        return put

    # -- messages ----------------------------------------------------------------------------

    def _send(self, key: tuple[int, int], peer: int) -> Call:
        send, take = self.rank.sender(key[0], peer), self.rank.outbox.pop
        return lambda: send(take(key))  # 12 in docs/architecture.md

    def _receive(self, of: Action, edge: int, peer: int) -> list[Bound]:
        """Return the call that posts a receive, if the transport wants one, and note who reads."""
        post, _ = self.rank.receiver(edge, peer)
        micro_batch = of.micro_batch
        to = self.rank.stages.edges[edge]
        self.under_way[edge, peer].append(micro_batch)
        self.readers[to.target, micro_batch, to.kind == "F"].append((edge, peer))
        where = to.kind, to.target, micro_batch
        return [Bound(post, "post", *where, ranks=(peer,), edge=edge)] if post else []

    def _take(self, action: Action) -> Iterator[Bound]:
        """Yield the calls that take the messages that `action` is the first to read.

        A channel hands over the oldest message first, so older ones are taken with them: another
        micro-batch may be read before them.
        """
        stage, micro_batch = action.stage, action.micro_batch
        for channel in self.readers.pop((stage, micro_batch, action.kind == "F"), ()):
            under_way = self.under_way[channel]
            while micro_batch not in self.taken[channel]:
                oldest = under_way.popleft()
                self.taken[channel].add(oldest)
                take, (edge, peer) = self._take_call(channel, oldest), channel
                where = action.kind, stage, oldest
                yield Bound(take, "take", *where, ranks=(peer,), edge=edge)

    def _take_call(self, channel: tuple[int, int], micro_batch: int) -> Call:
        _, wait = self.rank.receiver(*channel)
        edge, nodes = self.rank.stages.edges[channel[0]], self.rank.capture.fx_nodes
        values, count = edge.values, self.rank.group_of(channel[0])
        frames = [self.rank.frames[edge.target, micro_batch + member] for member in range(count)]
        permuted = [(value, nodes[value]) for value in values if _is_permuted(nodes[value])]

        def take() -> None:
            came = iter(wait())  # 13 in docs/architecture.md
            for frame in frames:
                frame.update(zip(values, came))  # noqa: B905 - each takes its part
                for value, node in permuted:
                    frame[value] = _with_strides(frame[value], node)

        return take

    # -- the end of a step -------------------------------------------------------------------

    def _update(self, stage: int, step: int) -> Call:
        return update_call(
            self.rank,
            Action("U", stage, step),
            stash=self.slots.stash_at.get((stage, step)),
            tells=stage == max(self.own),
            late=self.program.weight_rule != SYNCHRONOUS,
            has_loss=self._has_loss(),
        )


def _nothing() -> None:
    """Do nothing: the I of a stage that no other stage waits for, the W of a frozen one."""


def _segment_kind(action: Action) -> SegmentKind:
    assert action.kind != "U", "an update is no compute"
    return action.kind


def _into(frame: dict[int, Any], values: Sequence[int], place: dict[int, int]) -> Consumer:
    """Return what puts `values` into a frame."""
    update, pick = frame.update, _picker([place[value] for value in values])
    return lambda results: update(zip(values, pick(results), strict=True))


def _picker(places: Sequence[int]) -> Callable[[Results], list[Any]]:
    """Return a function that picks the values at `places`."""
    if len(places) == 1:
        (only,) = places
        return lambda results: [results[only]]
    if not places:
        return lambda results: []
    pick = itemgetter(*places)
    return lambda results: list(pick(results))


def _is_permuted(node: torch.fx.Node) -> bool:
    value = node.meta["val"]
    return not value.is_contiguous() and 0 not in value.stride()


def _with_strides(tensor: Tensor, node: torch.fx.Node) -> Tensor:
    """Return a copy laid out as the trace saw it, so that its views stay views."""
    like = node.meta["val"]
    return tensor.new_empty_strided(like.shape, like.stride()).copy_(tensor)
