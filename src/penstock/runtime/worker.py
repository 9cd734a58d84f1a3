"""Worker: the life of one rank, the same in a thread, a forked process and under torchrun."""

import gc
import json
import platform
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from penstock import _compat
from penstock._compat import MemoryEvent
from penstock.checkpoints import checkpoint
from penstock.checkpoints.control import Board, Control, Do
from penstock.checkpoints.saver import SavePolicy, Saver, Saves, State, is_due, saving
from penstock.checkpoints.saver import save as save
from penstock.device import here, of
from penstock.errors import AloneError, RunError
from penstock.files import cache_folder
from penstock.graph.code import Function, function_of
from penstock.graph.fused_runs import fused_function_of
from penstock.graph.module_facts import SINCE
from penstock.graph.stages import Segment, SegmentKind, Stages
from penstock.graph.trace import Capture
from penstock.heap import keep_freed_memory
from penstock.job import Job
from penstock.processes.short_of_memory import telling_what_is_held
from penstock.profile.noise import EVERY, NoiseTold
from penstock.program.codes import COMPUTE
from penstock.program.program import Program
from penstock.runtime.audited import Audits, StepKeeper, keeper_of, law_of
from penstock.runtime.calls import Bound, StepResult
from penstock.runtime.collects import only_slices, own_capture
from penstock.runtime.device_clock import MARKED, DeviceClock
from penstock.runtime.device_peak import with_peak
from penstock.runtime.finite import check_weights, forget, leaving
from penstock.runtime.guide import Guide
from penstock.runtime.held_parts import held_parts
from penstock.runtime.kept_reads import KeptReads
from penstock.runtime.key_steps import KeyStep, bound_of, check_alike
from penstock.runtime.lane import Begun, Queued
from penstock.runtime.left_steps import leaving_steps
from penstock.runtime.meter import DeviceWindow, Meter
from penstock.runtime.module_aside import bring_back, set_aside
from penstock.runtime.rank import Rank
from penstock.runtime.rank_terms import FunctionKey, RankTerms
from penstock.runtime.sampler import Sampler, Samples
from penstock.runtime.served import Decisions
from penstock.runtime.shared_cores import CoreTerms, in_turns
from penstock.runtime.step_traces import ProfiledSteps, StepTracer
from penstock.runtime.validate import is_out_of_patience, validate, weights_of
from penstock.runtime.windows import Windows
from penstock.schedule.orders import KINDS, Kind
from penstock.state.carried_buffers import Carries, carries_of
from penstock.state.laws.buffers import BufferLaw
from penstock.state.python_state import put_named
from penstock.state.replica_keys import key_of
from penstock.state.weights import load_model
from penstock.taken import Taken, counted
from penstock.timeline.spans import Held, Span
from penstock.timeline.spent import Spent
from penstock.transport.shared_memory import host_key
from penstock.transport.transport import Transport

Report = Callable[[StepResult], None]
_WINDOWS_KEPT = 32  # whose marks are kept, to choose a typical one from
_CLOCK_ROUNDS = 9


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """What every rank of a run has to do.

    windows:           which programs run, from which step on.
    policy:            where checkpoints are written, when they are due, and which stay.
    board:             where ranks agree on that, and are asked to stop after a checkpoint.
    resume:            checkpoint to start from.
    function_of:       makes a segment's function; another one emulates it.
    compiled:          whether functions are compiled where they can be, as a plan says.
    memory_window:     number of the window that is run under the memory profiler, or None.
    laws:              of the buffers that forward writes; tried out where they are needed and None.
    guide:             makes the plan again where that pays; None: the plan stays.
    joined:            of the job's micro-batches that make one of the plan's, as reports count.
    first_edge:        number of the first edge; plans before had those below.
    functions:         those of segments that were made already; ranks add theirs.
    noise_every:       of how many steps one is watched for the noise of its gradients.
    audits:            where steps are kept that the plain loop makes again; None: none is.
    forgets:           whether it goes on without what the checkpoint does not hold.
    predicted_bytes:   the peak of each rank as the plan expects it; empty: unknown.
    keys:              steps of other shapes than the first, whose programs are among the windows'.
    turns:             how it shares the cores of its ranks with another run; None: with none.
    carries:           buffers that several ranks change; none where functions are emulated.  None:
                       found from what the windows' programs do.
    profiled:          steps that torch's profiler watches; None: none.
    decisions:         of a server, where they are written, and those that are made again.

    Raises:   RunError: there is no window.
              PlanError: a buffer has to see all micro-batches in order, and would not.
              UnlikeShapesError: a step of another shape has other weights in a stage.
    """

    capture: Capture
    stages: Stages
    job: Job
    windows: Windows
    policy: SavePolicy = SavePolicy()  # noqa: RUF009 - a frozen record
    board: Board | None = None
    resume: Path | None = None
    memory_window: int | None = None
    function_of: Callable[[Segment, Capture], Function] = function_of
    compiled: bool = False
    laws: Mapping[str, BufferLaw] | None = None
    guide: Guide | None = None
    joined: Taken = 1
    first_edge: int = 0
    functions: dict[FunctionKey, Function] = field(default_factory=dict[FunctionKey, Function])
    noise_every: int = EVERY
    audits: Audits | None = None
    forgets: bool = False
    predicted_bytes: tuple[int, ...] = ()
    keys: tuple[KeyStep, ...] = ()
    turns: CoreTerms | None = None
    carries: Carries = None  # type: ignore[assignment]  # until __post_init__
    decisions: Decisions = Decisions()  # noqa: RUF009 - a frozen record
    profiled: ProfiledSteps | None = None

    def __post_init__(self) -> None:
        if not self.windows.count(1):
            raise RunError("there are no steps to run", hint="give one step or more")
        for step in self.keys:
            check_alike((self.capture, self.stages), (step.capture, step.stages))
        if self.carries is None:  # pyright: ignore[reportUnnecessaryComparison]
            object.__setattr__(self, "carries", self._carried())

    def _carried(self) -> Carries:
        if self.function_of is not function_of:
            return {}
        return carries_of(self.windows.programs, self.stages, self.capture, self.job, self.laws)

    def remade(self, **changes: Any) -> "Task":
        """Return the task with changes after which its functions are others, none of them made."""
        return replace(self, functions={}, carries=None, **changes)

    @property
    def make(self) -> Callable[..., Function]:
        """Return what makes a segment's function on a rank."""
        if self.compiled:
            return partial(fused_function_of, folder=cache_folder("compiled"))
        return self.function_of

    def compile_ahead(self) -> "Task":
        """Return the task, all that it runs being compiled here, for ranks that are forked later.

        Nothing where nothing is compiled.
        """
        if self.compiled:
            for program in self.windows.programs:
                capture, stages, _ = self._step_of(program)
                for stage, kind in segments_of(program):
                    self.make(stages.stages[stage].segment(kind), capture)
        return self

    def make_ahead(self) -> "Task":
        """Return the task, the functions of all that it runs being made."""
        for program in self.windows.programs:
            capture, stages, functions = self._step_of(program)
            for stage, kind in segments_of(program):
                if (stage, kind, False) not in functions:
                    made = self.make(stages.stages[stage].segment(kind), capture)
                    functions[stage, kind, False] = made
        return self

    def _step_of(self, program: Program) -> tuple[Capture, Stages, dict[FunctionKey, Function]]:
        """Return the step that a program runs, and what is made of it."""
        for step in self.keys:
            if any(program is each for each in step.programs):
                return step.capture, step.stages, step.functions
        return self.capture, self.stages, self.functions

    def at(
        self, windows: Windows, resume: Path | None = None, first_edge: int | None = None
    ) -> "Task":
        """Return the same task for other windows of the same stages, from another state on."""
        edge, memory = self.first_edge if first_edge is None else first_edge, self.memory_window
        memory = None if memory is None else min(memory, windows.count(2) - 1)
        moved = {"windows": windows, "resume": resume, "first_edge": edge, "memory_window": memory}
        return replace(self, **moved)

    def counted(self, step: int, micro_batches: float) -> int:
        """Return of how many of the job's micro-batches a step was made, of so many of its own."""
        program = self.windows.ask(step)
        other = (k.counts for k in self.keys if any(program is each for each in k.programs))
        return round(self.joined * next(other, 1) * int(micro_batches))

    def of(self, job: Job) -> "Task":
        """Return the same task for a job that differs in its place in the data only."""
        return replace(self, job=job)

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """Return the sets of ranks that sum or gather, in one order on all ranks."""
        programs = self.windows.programs
        sums = {reduce.ranks for program in programs for reduce in program.code.reductions}
        sums |= {meeting.ranks for program in programs for meeting in program.code.meetings}
        parts = {group for carry in self.carries.values() for group in carry.groups}
        return sorted(sums | parts | {tuple(range(programs[0].num_ranks))})


def segments_of(program: Program) -> list[tuple[int, SegmentKind]]:
    """Return the stages and kinds of the segments that a program runs, in order of the stages.

    A B of several micro-batches is run as I of each and W of all.
    """
    code, found = program.code, list[tuple[int, SegmentKind]]()
    rows = np.stack([code.stage, code.kind])[:, code.op == COMPUTE]
    pairs: list[tuple[int, int]] = np.unique(rows, axis=1).T.tolist()
    for stage, number in pairs:
        kind: Kind = KINDS[number]
        assert kind != "U", "an update is no compute"
        is_split = kind == "B" and program.together > 1
        split: tuple[SegmentKind, ...] = ("I", "W") if is_split else (kind,)
        found.extend((stage, each) for each in split)
    return found


@dataclass(frozen=True, slots=True)
class RankResult:
    """What one rank measured: the spans of a typical window, its seconds, the bytes held.

    spent:  how its training loop divides; None where nothing tells.
    samples:  what sampled windows told of its actions; None on a GPU, whose work is only queued by
              the thread that reads the clock.
    noise:    squares of gradients in the steps that were watched.
    saves:    what checkpoints took that were written while it trained on.
    held:     bytes between windows by what they are for, and in far memory.
    """

    rank: int
    spans: tuple[Span, ...]
    memory: tuple[Held, ...]
    peak_bytes: int
    window_s: tuple[float, ...]
    typical_s: float
    versions: dict[int, int]
    spent: Spent | None = None
    samples: Samples | None = None
    noise: NoiseTold = NoiseTold()  # noqa: RUF009 - a frozen record
    saves: Saves = Saves()  # noqa: RUF009 - a frozen record
    held: Mapping[str, int] = field(default_factory=dict[str, int])


def work(task: Task, transport: Transport, report: Report) -> RankResult:
    """Run all windows of `task` as rank `transport.rank` and return what was measured.

    Raises:   RunError: ranks traced different graphs, the data ended, another rank failed, ...
              CheckpointError: one cannot be written, or does not fit the model.
    """
    keep_freed_memory()
    if not here().is_cpu:  # a proof had its ranks in this process, and cycles keep their memory
        gc.collect()
    _agree(task, transport)
    control = Control(task.board, task.policy.every_s)
    while True:
        start = time.perf_counter()
        with telling_what_is_held(transport.rank, task.predicted_bytes):
            found = _worked(task, transport, report, control, start)
        if isinstance(found, RankResult):
            return found
        assert task.guide is not None, "who else could ask for another plan"
        task = task.guide.next(task, found, transport)
        gc.collect()  # the weights of the last plan, so that they are not held twice
        transport.connect(task.groups)


def _worked(
    task: Task, transport: Transport, report: Report, control: Control, start_s: float
) -> RankResult | int:
    """Run the windows of a plan; return what was measured, or the step after which another comes.

    start_s:  when making ready for it began.
    """
    bring_back(task.capture.model)
    rank = rank_of(task, transport, partial(_reported, report, task.joined))
    keeper = None if task.audits is None else keeper_of(rank, task.audits, partial(_settled, rank))
    bound = _by_turns(task, rank, bound_of(rank, task.windows.programs, task.keys))
    if task.resume is not None:
        state = checkpoint.load(task.resume)
        if not task.forgets:
            rank.optimizers.may_resume()
        rank.load(state)
    set_aside(rank)
    note_model(rank, again=True)
    if task.policy.folder is not None and rank.rank == 0:
        checkpoint.discard(task.policy.folder)
        forget(task.policy.folder)
    transport.barrier()
    if rank.server_end is not None:
        rank.server_end.begin(task.windows.first_step, task.decisions)
    if task.guide is not None:
        task.guide.begun(rank.rank, time.perf_counter() - start_s)
    watch = WindowRunner(rank, control, task.guide)
    watch.keeper, watch.tracer = keeper, StepTracer(task.profiled, rank.rank)
    watch.bound.append(bound)
    with (
        leaving(task.policy.folder, transport, rank.peers, partial(held_tensors, rank)),
        leaving_steps(task.policy.folder, rank, *_left_by(task, watch)),
        saving(task.policy, transport, control) as watch.saver,
    ):
        last = _run_windows(task, watch, bound)
        watch.tracer.close()
        if keeper is not None:
            keeper.look(waits=True)
        if rank.server_end is not None:
            rank.server_end.leave()
    for lane in (rank.lane, *rank.copy_lanes):
        lane.close()
    return watch.result(time.perf_counter()) if last is None else last


def _by_turns(
    task: Task, rank: Rank, bound: Mapping[int, list[Bound]]
) -> Mapping[int, list[Bound]]:
    """Return the calls of each program, by turns with another run if there is one."""
    return {each: in_turns(calls, task.turns, rank.rank) for each, calls in bound.items()}


def _left_by(
    task: Task, watch: "WindowRunner"
) -> tuple[Callable[[], State | None], int, Callable[[], float]]:
    """Return a rank's part of a checkpoint, from which step on it is one, and what a step takes."""
    return partial(_part_of, watch.rank), task.windows.first_step, lambda: sum(watch.window_s[-1:])


def _reported(report: Report, joined: Taken, result: StepResult) -> None:
    """Report a step by the micro-batches of the job."""
    report(replace(result, micro_batches=counted(joined, Fraction(result.micro_batches))))


def _run_windows(task: Task, watch: "WindowRunner", bound: Mapping[int, list[Bound]]) -> int | None:
    """Run windows to the end, or return the step after which another plan is made."""
    once, ask, number = run_once(task), task.windows.ask, 0
    step = task.windows.first_step
    program = ask(step)
    with torch.no_grad():
        watch.audits(affordable=True)
        while program is not None:
            is_profiled, length = number == task.memory_window, program.num_steps
            law = "" if task.audits is None else law_of(program, task.stages)
            window = Window(step, length, is_profiled, number in once, law)
            _run_or_pass(watch, bound[id(program)], window)
            step, number = step + length, number + 1
            program = ask(step)
            do = _done(task, watch, (step, number), is_last=program is None)
            is_last = program is not None and ask(step + program.num_steps) is None
            watch.audits(asked=do == "audit", affordable=is_last or watch.has_saved)
            if do == "plan":
                return step
            if do == "probe":
                _probe(task, watch)
            if do == "share" and program is not None:
                task, bound = _shared(task, watch, step)
                ask = task.windows.ask
                program = ask(step)
            if do == "stop":
                break
        check_model(watch.rank.capture)
        watch.rank.settle()
    return None


def _run_or_pass(watch: "WindowRunner", calls: list[Bound], window: "Window") -> None:
    """Run a window, or pass over one whose step was made without this rank."""
    rank = watch.rank
    if rank.server_end is None or not rank.server_end.has_passed(window.first_step):
        watch.window(calls, window)
        return
    share = rank.grid.shares[rank.replica]
    rank.report(StepResult(window.first_step, None, 0.0, share, left_out=True))


def note_model(rank: Rank, *, again: bool = False) -> None:
    """Note what modules hold while a rank trains, which has tensors of its own.

    again:   whether what was noted before does not count any more.
    Ignores:  ranks that are threads, which share the modules of their process.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    updates = [weights.updates for weights in rank.weights.values()]
    loans = [each.loan for each in updates if each is not None and each.loan is not None]
    rank.capture.note_values([loan.model for loan in loans if loan.stays], again=again)


def check_model(capture: Capture) -> None:
    """Raise where the job's code has changed its model since it was traced.

    Each rank looks at the end of a run, and before it writes a checkpoint, which then is right.

    Raises:   AloneError.
    """
    if changes := capture.changes:
        hint = "train it without a plan (eager=True), or change the model from the first step on"
        raise AloneError(f"{changes[0]} {SINCE}", hint=hint)


def _probe(task: Task, watch: "WindowRunner") -> None:
    """Measure the links between hosts, as the guide has asked for."""
    assert task.guide is not None, "who else could ask for that"
    start = time.perf_counter()
    task.guide.probe(task, watch.rank.transport)
    watch.control.probed()
    watch.meter.once(time.perf_counter() - start)


def _shared(task: Task, watch: "WindowRunner", step: int) -> tuple[Task, Mapping[int, list[Bound]]]:
    """Share micro-batches otherwise from `step` on: bind other programs on the same rank."""
    rank, guide = watch.rank, task.guide
    assert guide is not None, "who else could ask for it"
    before, task = task, guide.shared(task, step, rank.transport)
    if _lacks_room(before, task):
        first_edge = before.first_edge + len(before.stages.edges)
        task = task.at(task.windows, first_edge=first_edge)
        rank.renew_edges(task.first_edge)
    bound = {id(program): rank.bind(program) for program in task.windows.programs}
    watch.sampler.shared()
    watch.bound.append(bound)
    rank.transport.barrier()  # nobody sends before the others can take it
    guide.ready(rank.rank)
    return task, bound


def _lacks_room(before: Task, after: Task) -> bool:
    """Return whether more messages wait somewhere than there is room for: on all ranks alike."""
    rooms: dict[tuple[int, int, int], int] = {}
    for program in before.windows.programs:
        for rank in range(program.num_ranks):
            for (edge, sender), count in program.unread(rank).items():
                key = edge, sender, rank
                rooms[key] = max(count, rooms.get(key, 0))
    return any(
        count > rooms.get((edge, sender, rank), 0)
        for program in after.windows.programs
        for rank in range(program.num_ranks)
        for (edge, sender), count in program.unread(rank).items()
    )


def held_tensors(rank: Rank) -> Mapping[str, Tensor]:
    """Return weights and buffers by key, as they are at any moment."""
    held = (weights.state()[0].items() for weights in rank.weights.values())
    kinds = "weights/", "buffers/"
    return {key: value for state in held for key, value in state if key.startswith(kinds)}


def rank_of(
    task: Task,
    transport: Transport,
    report: Report,
    *,
    tells_all: bool = False,
    kept: KeptReads | None = None,
) -> Rank:
    """Return the rank of a run, which ends at a loss that is not finite.

    tells_all:  whether every rank reports validations.
    kept:       where a step may be done again: what was read of it.
    """
    terms = RankTerms(
        make=task.make,
        functions=task.functions,
        carries=task.carries,
        report=report,
        tells_all=tells_all,
        is_guarded=True,
        first_edge=task.first_edge,
        noise_every=task.noise_every,
        kept=kept,
    )
    capture = own_capture(task.capture, task.windows.programs[0], transport.rank)
    return Rank(capture, task.stages, task.job, transport, terms)


def run_once(task: Task) -> set[int]:
    """Return the windows that are unlike those of a longer run: the first and the profiled one.

    At least one window is left to tell something.
    """
    profiled = {task.memory_window} - {None}
    everything = set(range(task.windows.count((task.memory_window or 0) + 2)))
    sets = ({0, *profiled}, profiled, set[int]())
    return next({n for n in once if n is not None} for once in sets if everything - once)


def _agree(task: Task, transport: Transport) -> None:
    """Raise unless all ranks traced the same graph."""
    captures = task.capture, *(step.capture for step in task.keys)
    own = " ".join(capture.graph.digest for capture in captures)
    digests = [d.decode() for d in transport.all_gather_bytes(own.encode(), _everyone(transport))]
    if set(digests) != {own}:
        listed = ", ".join(f"rank {r}: {d}" for r, d in enumerate(digests))
        hint = "do all ranks run the same job file with the same library versions?"
        raise RunError(f"ranks traced different graphs: {listed}", hint=hint)


def _everyone(transport: Transport) -> tuple[int, ...]:
    return tuple(range(transport.num_ranks))


# -- checkpoints ---------------------------------------------------------------------------------


def _done(task: Task, watch: "WindowRunner", done: tuple[int, int], *, is_last: bool) -> Do:
    """Write the checkpoint that is due after a window; return what comes then.

    done:     the steps of the run, and the windows of this plan.
    """
    step, number = done
    do: Do = "stop" if is_last else watch.control.after(number)
    watch.has_saved = save_due(task, watch, step, "go" if do == "share" else do, is_last=is_last)
    if watch.has_saved:
        watch.control.saved()
    if number == 1 and is_saved_on_the_way(task):
        begin_saving(watch)
    if do == "plan":
        watch.control.planned(number)
    elif do == "share":
        watch.control.shared()
    elif do == "audit":
        watch.control.audited()
    return "stop" if watch.is_over else do


def begin_saving(watch: "WindowRunner") -> None:
    """Make ready to write checkpoints beside the steps; every rank calls it at the same time."""
    if watch.saver is not None:
        is_far = watch.rank.is_far()
        with watch.meter.checkpoint(is_last=True):
            watch.saver.begin(None if is_far else _part_of(watch.rank), is_far=is_far)


def save_due(task: Task, watch: "WindowRunner", step: int, do: Do, *, is_last: bool) -> bool:
    """Write the checkpoint that is due after `step` steps, if one is; return whether it was.

    Every rank calls it, with the same arguments.
    Raises:   AloneError: the job's code has changed its model.
    """
    rank, saver = watch.rank, watch.saver
    if task.policy.folder is None or saver is None:
        return False
    saver.check()
    is_stopped = do == "stop" and not is_last
    validates = not is_stopped and is_validated(step, task.policy.validate_every, is_last=is_last)
    if do in ("go", "probe", "audit") and not validates and not is_due(step, task.policy.every):
        return False
    with watch.meter.checkpoint(is_last=do == "stop"), saver.timed():
        check_model(rank.capture)
        rank.settle()
        check_weights(rank.live(), step)
        waits = validates or do in ("stop", "plan")
        if rank.server_end is not None:
            rank.server_end.stop_for_save(step)
        saver.save(step, state_of(rank, step), waits=waits)
        if validates:
            _validate(task, rank, task.policy.folder, step)
            watch.is_over = is_out_of_patience(task.job, task.policy.folder, step)
        if rank.server_end is not None:
            rank.server_end.go_on()
    return True


def _validate(task: Task, rank: Rank, checkpoints: Path, step: int) -> None:
    """Validate what was just saved, and report it; the module is not the one that trains."""

    def model() -> nn.Module:
        kept = checkpoint.load(checkpoint.folder_of(checkpoints, step))
        bring_back(task.capture.model)
        load_model(task.capture.model, weights_of(task.job, kept.tensors))
        return task.capture.model

    own = task.job, rank.transport, checkpoints, step
    found = validate(*own, model, keeps_best=task.policy.keep.best)
    set_aside(rank)
    note_model(rank, again=True)
    if rank.rank == 0 or rank.tells_all:
        rank.report(StepResult(step - 1, None, 0.0, 0, validated=found))


def is_validated(step: int, every: int, *, is_last: bool) -> bool:
    """Return whether the weights after `step` steps are validated: every so often, and the last."""
    return is_due(step, every) or (every > 0 and is_last)


def is_saved_on_the_way(task: Task) -> bool:
    """Return whether a checkpoint is due before the last step, for which nothing waits."""
    ends = (step + program.num_steps for program, step in task.windows)
    return task.policy.writes_aside(end for end, _ in pairwise(ends))


def state_of(rank: Rank, step: int) -> State | None:
    """Return this rank's part of a checkpoint after `step` steps; None: another replica has all.

    Every rank calls it at the same time.
    """
    rank.join_buffers(step)
    return _part_of(rank)


def _settled(rank: Rank, step: int) -> State | None:
    rank.settle()
    return state_of(rank, step)


def _part_of(rank: Rank) -> State | None:
    is_first = rank.replica < rank.grid.tensor or bool(rank.averages) or rank.rank in rank.servers
    told = [w for w in rank.weights.values() if is_first or w.shard is not None]
    tensors: dict[str, Tensor] = {}
    for weights in rank.weights.values():
        tensors |= weights.held_state()
    if not told:
        return (tensors, {}) if tensors else None
    plain: dict[str, object] = {}
    for weights in told:
        more, values = weights.state()
        if weights.served is not None:
            more, values = weights.served_state(is_first=rank.rank == 0)
        tensors |= more
        plain |= values
    if rank.grid.slice_of(rank.rank):
        return only_slices(tensors), {}
    if rank.loss_scale is not None:
        rank.loss_scale.put(plain)
    if rank.rank == 0:
        put_named(rank.job, rank.capture.model, tensors, plain)
    place = rank.replica if rank.averages else 0
    own = {key_of(place, key): value for key, value in plain.items()}
    return {key_of(place, key): value for key, value in tensors.items()}, own


# -- what is measured ----------------------------------------------------------------------------


class Window(NamedTuple):
    """Which steps a window has, whether it is run under the memory profiler, and is as no other;
    and by which law it reads weights, as `law_of` names it."""

    first_step: int
    num_steps: int
    is_profiled: bool
    is_once: bool
    law: str = ""


class _Ran(NamedTuple):
    """A window that was run: its calls, the clock between them, and the sums run beside them.

    On a device that queues marks of it stand for seconds until the run is over.
    """

    calls: Sequence[Bound]
    marks: list[Any]
    num_steps: int
    summed: list[tuple[Any, Any]]

    def by(self, clock: DeviceClock) -> "_Ran":
        """Return it in seconds."""
        sums = [mark for pair in self.summed for mark in pair]
        seconds = clock.seconds_of([*self.marks, *sums])
        count = len(self.marks)
        pairs = list(zip(seconds[count::2], seconds[count + 1 :: 2], strict=True))
        return self._replace(marks=seconds[:count], summed=pairs)


class WindowRunner:
    """Runs windows and remembers enough of them to show a typical one.

    bound:   calls of all programs that were ever run: what is kept of them goes by their ids.
    keeper:  keeps the windows that are audited; None: none is.
    tracer:  has torch's profiler watch those that are asked for.
    has_saved:  whether a checkpoint was begun after the last one.
    is_over:  whether no better validation has come for as long as the job waits for one.
    """

    def __init__(self, rank: Rank, control: Control, guide: Guide | None = None) -> None:
        self.rank, self.control, self.guide = rank, control, guide
        self.meter = Meter(rank.transport, has_server=bool(rank.served))
        self.sampler = Sampler()
        self.saver: Saver | None = None
        self.keeper: StepKeeper | None = None
        self.tracer = StepTracer(None, rank.rank)
        self._is_audited = self.has_saved = self.is_over = False
        self.bound: list[Mapping[int, list[Bound]]] = []
        self.kept: deque[_Ran] = deque(maxlen=_WINDOWS_KEPT)
        self.begun: dict[int, list[Begun | Queued]] = {}  # by id of a program's calls
        device = of(rank.device)
        self.clock = DeviceClock(device) if device.is_queued else None
        self.window_s: list[float] = []
        self.memory: tuple[Held, ...] = ()
        self.peak_bytes = 0  # of an accelerator, as it tells it

    def audits(self, *, asked: bool = False, affordable: bool = False) -> None:
        """Keep the next window for an audit, if it was asked for, or is to be where one is
        affordable; every rank calls it at the same time."""
        if self.keeper is not None:
            self.keeper.look()
            waits = self._is_audited  # the window was watched for its memory
            self._is_audited = waits or asked or (affordable and self.keeper.affords())

    def window(self, calls: list[Bound], window: Window) -> None:
        """Run a window, and keep it where it is audited."""
        if self.keeper is None or not self._is_audited or window.is_profiled:
            self._window(calls, window)
            return
        start, last = time.perf_counter(), window.first_step + window.num_steps
        self._is_audited = False
        self.keeper.before(window.first_step, window.law, window.num_steps)
        self.meter.once(time.perf_counter() - start)
        is_once = window.is_once or bool(self.kept)
        self._window(calls, window._replace(is_once=is_once))
        start = time.perf_counter()
        self.keeper.after(last, lambda: self.rank.capture.changes)
        self.meter.once(time.perf_counter() - start)

    def _window(self, calls: list[Bound], window: Window) -> None:
        start = time.perf_counter()
        is_seen = self.tracer.sees(window.first_step, window.num_steps) and bool(self.kept)
        marks = self._run(calls, window)
        if window.is_once or is_seen:
            self.meter.once(time.perf_counter() - start)
            return
        self.meter.window(calls, marks, window.num_steps)
        if not of(self.rank.device).is_queued and not window.is_profiled:
            look = partial(self._look, window.first_step + window.num_steps)
            self.sampler.window(calls, marks, window.num_steps, look)
        if window.is_profiled:
            self.meter.once(time.perf_counter() - start - (marks[-1] - marks[0]))

    def _look(self, step: int) -> None:
        if self.guide is not None:
            self.guide.look(self.rank.rank, step, self.sampler)

    def _run(self, calls: list[Bound], window: Window) -> list[float]:
        """Run a window, keep what it showed, and return its marks."""
        is_marked = self.clock is not None and len(self.kept) < MARKED
        moments: list[Any] | None = [] if is_marked else None
        self.rank.marks_into(moments)
        if window.is_profiled:
            self.tracer.close()
            run = partial(self.rank.run, calls, window.first_step)
            with _compat.memory_profile() as memory:
                marks, self.peak_bytes = with_peak(of(self.rank.device), self.rank.held_bytes, run)
            self.memory = _held(self.rank, memory(), self.rank.held_bytes())
        else:
            with self.tracer.over(calls, window.first_step, window.num_steps) as named:
                marks = self.rank.run(named, window.first_step)
        self.rank.marks_into(None)
        is_seen = self.tracer.sees(window.first_step, window.num_steps)
        if (window.is_profiled or is_seen) and self.kept:  # another one is typical
            return marks
        if self.clock is None or moments is not None:
            self._keep(calls, moments or marks, window.num_steps)
        self.window_s.append((marks[-1] - marks[0]) / window.num_steps)
        return marks

    def _keep(self, calls: list[Bound], marks: list[Any], num_steps: int) -> None:
        """Keep what a window has shown."""
        if id(calls) not in self.begun:
            self.begun[id(calls)] = [bound.begun for bound in calls if bound.begun]
        summed = [begun.times for begun in self.begun[id(calls)]]
        self.kept.append(_Ran(calls, marks, num_steps, summed))

    def result(self, end_s: float) -> RankResult:
        """Return what was measured until `end_s`; every rank calls it at the same time."""
        rank, transport = self.rank, self.rank.transport
        everyone = _everyone(transport)
        if self.clock is not None:
            self.kept = deque(each.by(self.clock) for each in self.kept)
        lengths = [(each.marks[-1] - each.marks[0]) / each.num_steps for each in self.kept]
        answers = transport.all_gather_bytes(json.dumps(lengths).encode(), everyone)
        slowest = [max(row) for row in zip(*map(json.loads, answers), strict=not rank.served)]
        every = transport.all_gather_bytes(json.dumps(self.window_s).encode(), everyone)
        seconds = [max(row) for row in zip(*map(json.loads, every), strict=not rank.served)]
        middle = statistics.median(seconds[min(2, len(seconds) - 1) :])
        typical = min(slowest, key=lambda window_s: abs(window_s - middle))
        calls, marks, num_steps, summed = self.kept[slowest.index(typical)]
        ahead_s = _clock_ahead_s(transport)
        marks = [mark - ahead_s for mark in marks]
        summed = [(start - ahead_s, end - ahead_s) for start, end in summed]
        spans = rank.spans(calls, marks, 0.0, summed)
        first = min((span.start_s for span in spans), default=marks[0])
        starts = transport.all_gather_bytes(json.dumps(first).encode(), everyone)
        origin = min(map(json.loads, starts))
        return RankResult(
            rank=rank.rank,
            spans=tuple(rank.spans(calls, marks, origin, summed)),
            memory=self.memory,
            peak_bytes=max((held.size_bytes for held in self.memory), default=0)
            if of(rank.device).is_cpu
            else self.peak_bytes,
            window_s=tuple(self.window_s),
            typical_s=typical,
            versions={stage: 1 + len(w.stash) for stage, w in rank.weights.items()},
            spent=self._spent(end_s, calls, marks, num_steps),
            samples=None if of(rank.device).is_queued else self.sampler.told(is_last=True),
            noise=rank.noise.told(),
            saves=self.saver.told if self.saver else Saves(),
            held=held_parts(rank),
        )

    def _spent(
        self, end_s: float, calls: Sequence[Bound], marks: Sequence[float], num_steps: int
    ) -> Spent | None:
        """Return how the time divides; None where the run was stopped before a window that tells
        something.  On a device that queues, as windows with marks of its own clock were divided.
        """
        if not self.meter.num_steps:
            return None
        if self.clock is not None:
            typical = [*self.kept][1:] or [*self.kept]  # the first one makes what others find
            self.meter.of_device([DeviceWindow(w.calls, w.marks, w.num_steps) for w in typical])
        return self.meter.spent(end_s, calls, marks, num_steps)


def _clock_ahead_s(transport: Transport) -> float:
    """Return how far this rank's clock is ahead of that of rank 0; every rank asks together.

    Ranks of one host have one clock.  Else all read their clocks when they leave a barrier:
    the median difference, which is off by as much as they leave it one after another.
    """
    everyone = _everyone(transport)
    own_host = host_key() if sys.platform == "linux" else platform.node()
    hosts = transport.all_gather_bytes(own_host.encode(), everyone)
    if len(set(hosts)) == 1:
        return 0.0
    apart: list[float] = []
    for _ in range(_CLOCK_ROUNDS):
        transport.barrier()
        own = time.perf_counter()
        first = transport.all_gather_bytes(json.dumps(own).encode(), everyone)[0]
        apart.append(own - json.loads(first))
    return 0.0 if hosts[transport.rank] == hosts[0] else statistics.median(apart)


def _held(rank: Rank, events: Sequence[MemoryEvent], held_after: int) -> tuple[Held, ...]:
    """Return the bytes held over a profiled window: the profiler's changes on top of what stays."""
    if not events:
        return ()
    now = held_after - sum(event.size_bytes for event in events)
    curve = [Held(rank.rank, 0.0, now)]
    for event in events:
        now += event.size_bytes
        curve.append(Held(rank.rank, event.time_s - events[0].time_s, now))
    return tuple(curve)
