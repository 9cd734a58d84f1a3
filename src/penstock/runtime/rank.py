"""Rank: what one process (or thread) holds, and the windows that it runs.

A Program is bound once to a flat list of calls (bind.py).  Running a window is then
`for call in calls: call()`, with the clock read between calls.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from penstock.batches.reads import ReadNumbers
from penstock.bits import AS_IT_IS
from penstock.checkpoints.checkpoint import Checkpoint, putting_back
from penstock.device import here, of
from penstock.errors import RunError
from penstock.graph.code import Function, micro_batch_seed
from penstock.graph.joint import Joint, joint_of
from penstock.graph.merge import number_of
from penstock.graph.segment_memory import moved
from penstock.graph.server_parts import ServerParts, server_parts
from penstock.graph.stages import SegmentKind, Stages
from penstock.graph.trace import Capture
from penstock.job import Job
from penstock.program.codes import COMPUTE
from penstock.program.program import Program
from penstock.program.reductions import Commit, Guard, Norm, Sum
from penstock.routes import server_places
from penstock.runtime import bind
from penstock.runtime.calls import Bound as Bound
from penstock.runtime.calls import Call
from penstock.runtime.calls import Progress as Progress
from penstock.runtime.calls import StepResult as StepResult
from penstock.runtime.finite import check_loss, refuse_norm
from penstock.runtime.lane import Lane
from penstock.runtime.noise_squares import NoiseMeter
from penstock.runtime.rank_terms import RankTerms
from penstock.runtime.reader import Reader, ReadOrder
from penstock.runtime.served import ServedRank
from penstock.schedule.grid import Grid
from penstock.schedule.orders import B
from penstock.state.carried_stage import CarriedStage, carried_stage
from penstock.state.copies import FarFrames
from penstock.state.loss_scale import LossScale
from penstock.state.optimizer.optimizer import optimizers_of
from penstock.state.python_state import take_named
from penstock.state.replica_keys import goes_on
from penstock.state.shards import Sharers, StageShard
from penstock.state.weights import StageWeights
from penstock.sums import sums_way
from penstock.timeline.spans import LANES, Span
from penstock.transport.packing import Packing, packing_of
from penstock.transport.transport import Post, Send, Transport, Wait


def _give_nothing(guard: Guard) -> None:
    """Give nothing to a guard: the run has none."""


class Rank:
    """Everything that rank number `transport.rank` holds.

    weights:   of each stage that lives here.
    frames:    values of each (stage, micro-batch) that a later call reads; the calls keep these
               dicts, which are empty between windows.
    outbox:    messages made and not yet sent, by (edge, micro-batch); empty between windows.
    batches:   leaves of micro-batches that a later call reads; empty between windows.
    unsettled: what is left to do about the last update; see `settle`.
    read:      leaves of the micro-batches that were read since then.
    expects_clipping: whether the last gradients were clipped, where updates are validated.
    guard:     called where each rank gives another what it alone has of a step.
    guarded_bytes: returns the bytes that are held for another rank.
    commit:    called where a step counts only once all ranks have come to its end.
    loss_scale: where the loss is scaled.
    carried:   of each stage whose buffers other ranks change too.
    server_end: where servers beside the ranks `servers` update the weights; `last_sum`, of a step,
               with which gradients go there.
    """

    guard: Callable[[Guard], None] = staticmethod(_give_nothing)
    guarded_bytes: Callable[[], int] = int
    server_end: ServedRank | None = None
    last_sum: Sum | Norm | None = None
    servers: tuple[int, ...] = ()
    _server_parts: ServerParts | None = None

    def __init__(
        self,
        capture: Capture,
        stages: Stages,
        job: Job,
        transport: Transport,
        terms: RankTerms | None = None,
    ) -> None:
        self.capture, self.stages, self.job, self.transport = capture, stages, job, transport
        terms = terms or RankTerms()
        self.make, self.report, self.carries = terms.make, terms.report, terms.carries
        self.is_guarded, self.tells_all, self._kept = terms.is_guarded, terms.tells_all, terms.kept
        self.put_outputs, self.functions = terms.put_outputs, terms.functions
        self.rank, self.device = transport.rank, here().place
        self.grid = Grid(transport.num_ranks, (1,))  # until a program is bound
        self.averages = self.topology = self.served = ""  # as the program says
        self.weights: dict[int, StageWeights] = {}
        self.carried: dict[int, CarriedStage] = {}
        self.optimizers = optimizers_of(job, capture)
        self.frames: defaultdict[tuple[int, int], dict[int, Any]] = defaultdict(dict)
        self.outbox: dict[tuple[int, int], list[Tensor]] = {}
        self.batches: dict[int, list[Any]] = {}
        self.progress, self.noise = Progress(), NoiseMeter(terms.noise_every)
        self.expects_clipping = False
        self.unsettled: list[Callable[[], bool]] = []
        self.read: dict[int, list[Any]] = {}
        self.loss_scale = LossScale() if job.scales_loss else None
        self.lane, self.commit = Lane(), self._commit  # of its sums; see above
        self._bits: tuple[int, ...] = ()  # of a number in messages of each edge
        self.copy_lanes = Lane(), Lane()  # to far memory, and back
        self.sharded = self.far = frozenset[int]()  # as the program says, and so:
        self.parts = tuple[int, ...]()
        self._ahead: dict[tuple[int, int, int], int] = {}  # by edge, sender and receiver
        self._moments: list[Any] | None = None
        self._group, self.first_edge = 1, terms.first_edge  # micro-batches of a message of a B edge
        self._joints: dict[tuple[int, int, bool], tuple[Joint, Function, Function]] = {}
        self._senders: dict[tuple[int, int], Send] = {}
        self._receivers: dict[tuple[int, int], tuple[Post | None, Wait]] = {}
        self._far: dict[int, FarFrames] = {}
        self.read_by(job)

    def read_by(self, job: Job) -> None:
        """Read the micro-batches of this job, which are the same, or made of the same."""
        self.job, self._reader = job, Reader(job, self.device, kept=self._kept)

    @property
    def replica(self) -> int:
        """Return the replica to which this rank belongs."""
        return self.grid.replica_of(self.rank)

    @property
    def summed_micro_batches(self) -> int:
        """Return the micro-batches of a step whose mean gradient updates the weights here."""
        share = self.grid.shares[self.replica]
        return share if self.averages or self.served else self.grid.step_micro_batches

    @property
    def peers(self) -> tuple[int, ...]:
        """Return the ranks of this replica, itself included."""
        return tuple(self.grid.ranks_of(self.replica))

    # -- whom it works with ------------------------------------------------------------------

    def commits_by(self, commit: Callable[[Commit], None]) -> None:
        """Call `commit` where a step counts only once all ranks have come to its end."""
        self.commit = commit

    def gives_by(self, give: Callable[[Guard], None], held_bytes: Callable[[], int]) -> None:
        """Call `give` where another rank gets what this one alone has of a step.

        held_bytes:  returns the bytes that are held here for another rank.
        """
        self.guard, self.guarded_bytes = give, held_bytes

    def tells_also(self, hear: Callable[[StepResult], None]) -> None:
        """Call `hear` with every finished step, before it is reported."""
        report = self.report

        def reported(result: StepResult) -> None:
            hear(result)
            report(result)

        self.report = reported

    def marks_into(self, moments: list[Any] | None) -> None:
        """Put marks of the device here between calls, as the clock's; None: nowhere."""
        self._moments = moments

    def expect_clipping(self, clips: bool) -> bool:
        """Note whether the last gradients were clipped, where updates are validated; return it."""
        self.expects_clipping = clips
        return clips

    # -- one window --------------------------------------------------------------------------

    def expect(self, program: Program) -> None:
        """Make room for the messages of `program`; before anything is bound, for every program."""
        computes = program.code.kind[program.code.op == COMPUTE]
        self._group = program.together if (computes == B).any() else 1
        peers = set(program.code.peer[program.code.slice_of(self.rank)].tolist()) - {-1}  # no peer
        for receiver in (self.rank, *peers):
            for (edge, sender), count in program.unread(receiver).items():
                way = edge, sender, receiver
                self._ahead[way] = max(count, self._ahead.get(way, 0))

    def renew_edges(self, first: int) -> None:
        """Let messages go by channels of their own from now on, edge 0 by number `first`."""
        self.first_edge = first
        for known in (self._senders, self._receivers, self._ahead):
            known.clear()

    def begin_anew(self, first_edge: int) -> None:
        """Forget what is made for a graph: messages go by other channels from now on."""
        self.first_edge, self._group = first_edge, 1
        self._senders, self._receivers, self._ahead = {}, {}, {}
        self._joints, self._far = {}, {}

    def bind(self, program: Program) -> list[Bound]:
        """Return the calls of one window of `program` on this rank.

        Raises:   RunError: only one of job and program waits for all gradients; windows shard
                  differently; or a schedule with which the loss cannot be scaled.
                  JobError: the job's optimizer is not one, or cannot be divided as planned.
        """
        self.expect(program)
        self.grid, self.averages = program.grid, program.end.averages
        self.topology, self.served = program.end.topology, program.end.served
        if self.served:
            self.servers = server_places(self.topology, program.num_ranks)
        self.last_sum = _last_sum(program, self.rank) if self.served else None
        self._bits = program.graph.bits
        divided = program.sharded, program.parts, program.far
        if self.weights and (self.sharded, self.parts, self.far) != divided:
            message = "the programs of a run divide other stages among their replicas, or otherwise"
            hint = "let all windows of a run shard the same stages alike, and offload the same"
            raise RunError(message, hint=hint)
        self.sharded, self.parts, self.far = divided
        is_watched = program.num_steps == 1 and program.together == program.tensor == 1
        is_watched = is_watched and not (program.end.averages or self.served)
        self.noise.watch(program.grid.step_micro_batches if is_watched else 0)
        bound = bind.bind(self, program)
        if self.served and self.server_end is None:
            self.server_end = ServedRank(self, sums_way(self.served))
        self.optimizers.release()
        return bound

    def run(self, calls: Sequence[Bound], first_step: int) -> list[float]:
        """Run one window; return the clock before each call and after the last one."""
        self.progress.first_step, self.progress.updates = first_step, 0
        for carried in self.carried.values():
            carried.begin(self._first_number(first_step))
        self.noise.begin(first_step, self.loss_scale.scale if self.loss_scale else 1.0)
        clock = time.perf_counter
        marks = [clock()]
        mark = marks.append
        self.progress.last_update_s = marks[0]
        if self._moments is not None:
            calls = self._marking(calls, self._moments)
        for call in [bound.call for bound in calls]:  # 9 in docs/architecture.md
            call()
            mark(clock())
        self.noise.end()
        return marks

    def _marking(self, calls: Sequence[Bound], moments: list[Any]) -> list[Bound]:
        """Return `calls` with a mark of the device after each, and put the first one down."""
        device, note = of(self.device), moments.append
        note(device.mark())

        def marking(call: Call) -> Call:
            return lambda: (call(), note(device.mark()))

        return [replace(bound, call=marking(bound.call)) for bound in calls]

    def live(self) -> dict[str, Tensor]:
        """Return the weights that are trained here, or the parts that are here, by name."""
        held = self.weights.values()
        return {w.names[node]: value for w in held for node, value in w.trained().items()}

    def settle(self) -> bool:
        """Validate the last update, where it was made before the norm of the gradient was known.

        Every rank calls it, at the same place of the run.  Returns whether it is another one now.
        """
        changed = [self.unsettled.pop(0)() for _ in tuple(self.unsettled)]
        return any(changed)

    def _commit(self, commit: Commit) -> None:
        """Return once all ranks have come to the end of a step."""
        if len(commit.ranks) > 1:
            word = torch.zeros(1, dtype=torch.float64, device=self.device)
            self.transport.all_reduce(word, commit.ranks)

    def join_buffers(self, step: int) -> None:
        """Give the buffers that copies carry their values after so many steps of the run.

        Every rank calls it at the same time, before the buffers are read: between two steps, and
        before an update that may look at them, or move them.
        """
        for _, carried in sorted(self.carried.items()):
            carried.join(self._first_number(step), self.transport)

    def spans(
        self,
        calls: Sequence[Bound],
        marks: Sequence[float],
        origin: float,
        summed: Sequence[tuple[float, float]] = (),
    ) -> list[Span]:
        """Return the spans of a window that was run, in seconds from `origin`.

        summed:  start and end of each sum that was begun and waited for, in the order of the waits.
        """
        beside, spans = iter(summed), list[Span]()
        for bound, both in zip(calls, pairwise(marks), strict=False):
            start, end = next(beside) if bound.begun else both
            if bound.lane in LANES:
                where = bound.lane, bound.kind, bound.stage, bound.micro_batch
                spans.append(Span(self.rank, *where, start - origin, end - origin))
        return spans

    def load(self, state: Checkpoint) -> None:
        """Continue from a checkpoint; everything has to be bound.

        Raises:   CheckpointError: it is of another model or optimizer.
        """
        own = self._own_of(state)
        with putting_back(state.step):
            for weights in self.weights.values():
                weights.load(own.tensors, own.plain)
            if self.loss_scale is not None:
                self.loss_scale.take(state.plain)
        take_named(self.job, self.capture.model, state.tensors, state.plain)

    def _own_of(self, state: Checkpoint) -> Checkpoint:
        """Return what this rank goes on with of a checkpoint."""
        if not self.averages:
            return state
        place = self.replica, self.grid.replicas
        return Checkpoint(state.step, *goes_on(state.tensors, state.plain, place))

    def is_far(self) -> bool:
        """Return whether something of the state is in far memory, and no room for it is near."""
        return bool(self.far) or any(w.far_state is not None for w in self.weights.values())

    def held_bytes(self) -> int:
        """Return the bytes held between windows by weights, gradients, versions and state."""
        constants = sum(t.untyped_storage().nbytes() for t in self.capture.constants.values())
        own = sum(weights.size_bytes() for weights in self.weights.values())
        sent = self.transport.held_bytes if of(self.device).is_queued else 0
        return own + constants + self.guarded_bytes() + sent

    # -- what binding asks for ---------------------------------------------------------------

    def weights_of(self, stage: int) -> StageWeights:
        """Return the state of a stage that lives on this rank."""
        if stage not in self.weights:
            served = self.served_nodes(stage, self.rank)
            self.weights[stage] = StageWeights(
                self.stages.stages[stage],
                self.capture,
                self.job,
                has_gradients=self.stages.has_gradients,
                optimizers=self.optimizers,
                sharers=self._sharers(stage),
            )
            self.weights[stage].give(self.weights[stage].gradients_of(self.reached(stage)))
            if served is not None:
                self.weights[stage].update_apart(served, self.optimizers)
            if stage in self.carries:
                self.carried[stage] = self._carried(stage)
        return self.weights[stage]

    def served_nodes(self, stage: int, rank: int) -> frozenset[int] | None:
        """Return the parameters of a stage that a server beside a rank has; None: there is none."""
        if rank not in self.servers:
            return None
        graph, stages, servers = self.capture.graph, self.stages.stages, self.servers
        if self._server_parts is None:
            self._server_parts = server_parts(graph, stages, len(servers))
        owners, own = self._server_parts.owners, servers.index(rank)
        return frozenset(n for n in stages[stage].parameters if owners.get((stage, n)) == own)

    def reached(self, stage: int) -> AbstractSet[int]:
        """Return the parameters of a stage of which it or another makes a gradient in this step."""
        every = (self.made(number) for number in range(len(self.stages.stages)))
        return set(self.stages.stages[stage].parameters).intersection(set[int]().union(*every))

    def made(self, stage: int) -> AbstractSet[int]:
        """Return the parameters of which a stage makes a gradient in this step itself."""
        return {node for node, _ in self.stages.stages[stage].backward.gradients}

    def _sharers(self, stage: int) -> Sharers | None:
        """Return the ranks that divide a stage that lives here, or have it in far memory.

        None where each has it whole.
        """
        if stage not in self.sharded:
            return None
        ranks = tuple(self.grid.column_of(self.rank))
        parts = tuple(self.parts[rank] if self.parts else 1 for rank in ranks)
        return Sharers(self.transport, ranks, parts, self.job, stage in self.far)

    def shard_of(self, stage: int) -> StageShard:
        """Return what this rank keeps of a stage that is divided.

        Raises:   RunError: it is not: the program gathers what every rank has.
        """
        shard = self.weights_of(stage).shard
        if shard is None:
            message = f"stage {stage} is gathered, but no sum leaves shards of it"
            raise RunError(message, hint="shard it by a plan")
        return shard

    def _carried(self, stage: int) -> CarriedStage:
        """Return what carries the buffers of a stage that lives here."""
        weights, carry = self.weights[stage], self.carries[stage]
        named = {weights.buffer_names[node]: value for node, value in weights.buffers.items()}
        return carried_stage(carry, named, self.rank)

    def watched(self, stage: int) -> frozenset[int]:
        """Return the parameters of a stage whose gradients are watched for their noise.

        Not those of several stages, nor those whose gradient has several parts.
        """
        tied = {node for node, holders in self.stages.tied if stage in holders}
        parts = Counter(node for node, _ in self.stages.stages[stage].backward.gradients)
        return frozenset(node for node, count in parts.items() if count == 1) - tied

    @property
    def away(self) -> tuple[FarFrames, ...]:
        """Return what moves activations of the stages that live here to far memory, as made yet."""
        return tuple(self._far.values())

    def far_frames(self, stage: int) -> FarFrames:
        """Return what moves the activations of a stage that lives here to far memory."""
        if stage not in self._far:
            groups = moved(self.capture.graph, self.stages, stage)
            self._far[stage] = FarFrames(groups, self.device)
        return self._far[stage]

    def function(self, stage: int, kind: SegmentKind, *, asks: bool = False) -> Function:
        """Return the function of a segment, made once; `asks`: for each parameter it reads."""
        key = (stage, kind, asks)
        if key not in self.functions:
            segment = self.stages.stages[stage].segment(kind)
            self.functions[key] = self.make(segment, self.capture, asks=asks)
        return self.functions[key]

    def joint(
        self, stage: int, count: int, *, asks: bool = False
    ) -> tuple[Joint, Function, Function]:
        """Return W of `count` micro-batches at once, and the functions of its two parts."""
        key = (stage, count, asks)
        if key not in self._joints:
            weights = self.stages.stages[stage].weight_gradient
            made = joint_of(self.capture.graph, weights, count)
            each = self.make(made.each, self.capture, asks=asks)
            self._joints[key] = made, each, self.make(made.once, self.capture, asks=asks)
        return self._joints[key]

    def group_of(self, edge: int) -> int:
        """Return of how many micro-batches a message of `edge` is."""
        return self._group if self.stages.edges[edge].kind == "B" else 1

    def sender(self, edge: int, peer: int) -> Send:
        """Return the call that sends a message of `edge` to `peer`."""
        key = (edge, peer)
        if key not in self._senders:
            ahead = self._ahead.get((edge, self.rank, peer), 0)
            packing = self._packing(edge)
            send = self.transport.bind_send(self.first_edge + edge, peer, packing.sent, ahead=ahead)
            self._senders[key] = packing.sender(send)
        return self._senders[key]

    def receiver(self, edge: int, peer: int) -> tuple[Post | None, Wait]:
        """Return (post, wait) for messages of `edge` from `peer`."""
        key = (edge, peer)
        if key not in self._receivers:
            ahead = self._ahead.get((edge, peer, self.rank), 0)
            packing = self._packing(edge)
            post, wait = self.transport.bind_receive(
                self.first_edge + edge, peer, packing.sent, ahead=ahead
            )
            self._receivers[key] = post, packing.receiver(wait)
        return self._receivers[key]

    def _packing(self, edge: int) -> Packing:
        bits = self._bits[edge] if self._bits else AS_IT_IS
        values = self.stages.edges[edge].values * self.group_of(edge)
        return packing_of(self.capture.graph, values, bits)

    # -- what calls ask for ------------------------------------------------------------------

    def leaves(self, order: ReadOrder, at: int) -> list[Any]:
        """Return the leaves of the micro-batch that is read as number `at` of the window.

        They belong to nothing else, so they may be kept for as long as needed.
        Raises:   RunError: the data ended.  GraphError: the batch does not fit the graph.
        """
        first = self.progress.first_step * order.per_step
        return self._reader.read(
            ReadNumbers(first, order.places, order.every, at), self.capture.leaves
        )

    def order(self, program: Program) -> ReadOrder:
        """Return the order, still empty, in which this rank reads in a window of `program`."""
        per_step = program.grid.step_micro_batches
        return ReadOrder([], program.num_steps * per_step, per_step)

    def place(self, micro_batch: int) -> int:
        """Return the number of a micro-batch of the window, counted from the window's first."""
        step, place = self.grid.in_step(self.replica, micro_batch)
        return step * self.grid.step_micro_batches + place

    def check_loss(self, loss: float, micro_batch: int) -> None:
        """Raise unless the loss of a micro-batch of the window is finite.

        Raises:   NotFiniteError.
        """
        step, place = self.grid.in_step(self.replica, micro_batch)
        check_loss(loss, self.progress.first_step + step, place, self._index(micro_batch))

    def refuse_norm(self, norm: float, step: int, names: Sequence[str]) -> None:
        """Raise for the norm of the gradient of a step of the run, by which these have a share.

        Raises:   NotFiniteError.
        """
        refuse_norm(norm, step, self.numbers(step), names)

    def seed(self, micro_batch: int) -> int:
        """Return the seed of the random ops of a micro-batch of the window."""
        return micro_batch_seed(self.job.seed, number_of(self.job, self._index(micro_batch)))

    def number(self, micro_batch: int) -> int:
        """Return the place of a micro-batch of the window among those that the buffers follow."""
        if self.job.buffers == "per replica":
            step, place = divmod(micro_batch, self.grid.stride)
            return self._first_number(self.progress.first_step + step) + place
        return self._index(micro_batch)

    def _first_number(self, step: int) -> int:
        """Return `number` of the first micro-batch of a step of the run."""
        if self.job.buffers == "per replica":
            return step * self.grid.shares[self.replica]
        return step * self.grid.step_micro_batches

    def numbers(self, step: int) -> range:
        """Return the numbers in the whole run of the micro-batches of a step of it."""
        count = self.grid.step_micro_batches
        return range(step * count, (step + 1) * count)

    def _index(self, micro_batch: int) -> int:
        """Return the number in the whole run of a micro-batch of the window."""
        first = self.progress.first_step * self.grid.step_micro_batches
        return first + self.place(micro_batch)


def _last_sum(program: Program, rank: int) -> Sum | Norm | None:
    """Return behind what all gradients of a step are there, and are clipped if they are."""
    code = program.code[rank]
    norms = [i for i in code if isinstance(i, Norm)]
    sums = [i for i in code if isinstance(i, Sum) and i.how == "replicas"]
    return next(reversed(norms or sums), None)
