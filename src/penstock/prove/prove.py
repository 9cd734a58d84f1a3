"""Prove: some real steps of a plan, compared with the plain loop, before training starts.

The ranks run the plan's own program on the job's own batches and write down what they read, the
gradients that their optimizers were given, and the state after each step; `judge` compares.

An asynchronous plan is compared with its weight rule's sequential definition, a few steps long;
there the optimizer is SGD with momentum, for one that divides by the size of a gradient, like Adam,
makes a whole step of the last bit of a zero.
"""

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from penstock import _compat
from penstock.checkpoints import checkpoint
from penstock.cluster.machine import free_bytes
from penstock.device import CPU, here
from penstock.examine.buffer_terms import check_chosen
from penstock.files import write_text
from penstock.graph.cut import cut
from penstock.graph.merge import merged
from penstock.graph.trace import Capture, build_model
from penstock.graph.waiting import waits
from penstock.job import Job
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.plan.plan import Plan, is_asynchronous
from penstock.processes.child import apart
from penstock.processes.short_of_memory import telling_what_is_held
from penstock.prove.plain_side import AveragedReplicas, Case, SequentialParts, judged
from penstock.prove.proof import Proof
from penstock.prove.read_digest import ReadDigests, digest_of, recorded
from penstock.prove.rounded_sums import owners_of
from penstock.runtime.audited import held_digests
from penstock.runtime.collects import own_capture
from penstock.runtime.eager import EagerRank, EagerTask
from penstock.runtime.launch import Launcher, run_threads
from penstock.runtime.rank import Rank
from penstock.runtime.rank_terms import RankTerms
from penstock.runtime.run import Steps
from penstock.runtime.windows import repeated
from penstock.runtime.worker import RankResult, Report, State, Task, save, state_of
from penstock.schedule.recipe import trains
from penstock.state.laws.buffers import Laws, buffer_laws
from penstock.state.replica_keys import key_of
from penstock.state.weights import StageWeights
from penstock.sums import HALVES, sums_way
from penstock.transport.transport import Transport
from penstock.typed import typed
from penstock.units import format_bytes

WINDOW = 4  # steps of an asynchronous schedule
COPIES = 6  # of the weights that the plain loop holds
LEAST_COPIES = 3  # where it updates one parameter after the other
APART = 5  # steps between two that are proved: other batches, rates and random states


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """A plan with its job.

    job:   the author's, no micro-batches joined.
    laws:  of the buffers that forward writes; found by trying where they are needed and None.
    """

    job: Job
    captured: Capture
    plan: Plan
    laws: Laws | None = None


def steps_to_prove(first: int, until: int, count: int = 2, averages: str = "") -> tuple[int, ...]:
    """Return the numbers of up to `count` steps of the run of `first` to `until` - 1.

    averages: how replicas average weights, as a plan says it: then also the first two steps behind
              which they do.
    """
    steps = {min(first + at * APART, until - 1) for at in range(count)}
    if averages:
        every = sums_way(averages).every
        due = -(-(first + 1) // every) * every - 1
        steps |= {step for step in (due, due + every) if step < until}
    return tuple(sorted(steps))


def prove(
    planned: Planned,
    steps: tuple[int, ...] = (0,),
    *,
    resume: Path | None = None,
    launcher: Launcher = run_threads,
) -> Proof:
    """Return how the planned steps differ from the plain ones.

    launcher:  runs the ranks of the plan; the plain loop has a process of its own.
    Raises:    RunError: a rank failed, or the plain loop did.
    """
    case = case_of(planned, steps, resume)
    with tempfile.TemporaryDirectory(prefix="penstock-") as name:
        run_planned(planned, case, Path(name), launcher)
        return apart_judged(case, Path(name))


def prove_eager(
    job: Job,
    ranks: int,
    steps: tuple[int, ...],
    *,
    resume: Path | None = None,
    laws: Laws | None = None,
    launcher: Launcher = run_threads,
) -> Proof:
    """Return how steps of eager replicas differ from those of the plain loop.

    laws:      of the buffers that forward writes; found by trying where they are not given.

    Raises:    as `prove`.
    """
    if laws is None:
        laws = buffer_laws(job) if ranks > 1 and job.buffers == "exact" else {}
    with tempfile.TemporaryDirectory(prefix="penstock-") as name:
        case = Case(job, steps, resume, owners=owners_of_replicas(job, ranks))
        run_replicas(case, ranks, Path(name), laws, launcher)
        return apart_judged(case, Path(name))


def run_replicas(case: Case, ranks: int, folder: Path, laws: Laws, launcher: Launcher) -> None:
    """Run the steps of a case as eager replicas, and leave in `folder` what the ranks wrote; every
    rank calls it.

    Raises:   RunError: a rank failed.
    """
    reads = ReadDigests()
    watched = replace(case.job, data=recorded(case.job.data, reads))
    task = EagerTask(watched, 0, 1, resume=case.resume, laws=laws)
    told = Steps(case.job.micro_batches)
    if launcher(partial(_work_eagerly, task, case.steps, reads, folder), ranks, told.add):
        _write_losses(folder, told)


def owners_of_replicas(job: Job, ranks: int) -> Mapping[str, Sequence[int]]:
    """Return which replica adds up the gradient of each micro-batch, as `Case` needs it."""
    if job.sums not in HALVES or ranks == 1:
        return {}
    each = [number * ranks // job.micro_batches for number in range(job.micro_batches)]
    return {name: each for name, _ in build_model(job).named_parameters()}


def apart_judged(case: Case, folder: Path) -> Proof:
    """Return what `judged` finds, in a process of its own.

    Raises:   as `judged`; RunError: the process died.
    """
    return typed(Proof, apart(lambda: asdict(judged(case, folder))))


def lacks_memory(planned: Planned) -> str:
    """Return why the plain loop cannot be run beside the ranks; empty if there is room for it.

    It holds what one micro-batch keeps for its backward, the weights as they were and are, and
    gradients; for all updates at once two moments of each and one more copy to compare.
    """
    is_late = is_asynchronous(planned.plan)
    copies = COPIES if is_late or planned.plan.averages else LEAST_COPIES
    loops = planned.plan.replicas if planned.plan.averages else 1
    return _short_of(planned.captured, copies * loops)


def _short_of(captured: Capture, copies: int) -> str:
    needed, device = plain_bytes(captured, copies), here()
    is_here = device.is_cpu or waits(captured.model)
    free = free_bytes() if is_here else device.free_bytes
    if needed <= free:
        return ""
    return f"the plain loop needs {format_bytes(needed)} of which {format_bytes(free)} are free"


def plain_bytes(captured: Capture, copies: int = COPIES) -> int:
    """Return what the plain loop holds at most: copies of the weights, and a micro-batch."""
    weights = sum(p.numel() * p.element_size() for p in captured.model.parameters())
    (stage,) = cut(captured.graph, (), (False,)).stages
    return copies * weights + stage.forward.peak_bytes + stage.backward.peak_bytes


def needs_trace(job: Job, plan: Plan) -> bool:
    """Return whether the plain loop of a plan needs the traced step."""
    return is_asynchronous(plan) or plan.terms.rounds or job.sums in HALVES


def untraced_case(job: Job, plan: Plan, steps: tuple[int, ...]) -> Case:
    """Return the plain loop's task of a plan for which no trace is needed."""
    clip_norm = job.clip_norm if plan.agreement.clip else None
    job = replace(job, micro_batches=plan.job_micro_batches, clip_norm=clip_norm)
    case = Case(job, steps, backward=trains(plan.schedule))
    if plan.averages:
        case = replace(case, apart=AveragedReplicas(plan.averages, plan.replicas))
    return case


def case_of(
    planned: Planned, steps: tuple[int, ...], resume: Path | None = None, *, begun: bool = False
) -> Case:
    """Return the plain loop's task: the same steps, with as many micro-batches as planned.

    An asynchronous plan begins with the job's first weights, or is of windows of a run.
    Raises:   PlanError: plan and job disagree about buffers.
    """
    check_chosen(planned.plan, planned.job, planned.captured.graph)
    planned = _at_once(planned)
    plan, captured = planned.plan, planned.captured
    case = untraced_case(planned.job, plan, steps)
    job = case.job
    if not is_asynchronous(plan):
        by_parts, rounded = bool(_short_of(captured, COPIES)), None
        if plan.terms.rounds:
            program = lower_plan(plan, captured.graph)
            rounded = SequentialParts(
                program, stages_of(plan, captured.graph), captured, plan.terms.joined
            )
        case = replace(case, resume=resume, rounded=rounded, by_parts=by_parts)
        if job.sums in HALVES:
            case = replace(case, owners=_owners(plan, captured), joined=int(plan.terms.joined))
        draws = any(effect == "random" for _, effect, _ in captured.graph.effects())
        return replace(case, model=captured.model, draws=draws)
    if not begun:
        job = replace(job, optimizer=_sgd, learning_rate=None, scheduler=None)
    stages, graph = stages_of(plan, captured.graph), captured.graph
    program = lower_plan(plan, graph, num_steps=WINDOW)
    late = SequentialParts(program, stages, captured, plan.terms.joined)
    return Case(job, (0,), late=late, model=captured.model, begun=begun)


def _at_once(planned: Planned) -> Planned:
    """Return what is proved: where a server decides by real time, its gradients summed at once."""
    if not planned.plan.served:
        return planned
    job = replace(planned.job, sums=None)
    return replace(planned, job=job, plan=planned.plan.changed(sums=None))


def _owners(plan: Plan, captured: Capture) -> Mapping[str, Sequence[int]]:
    stages = stages_of(plan, captured.graph)
    return owners_of(lower_plan(plan, captured.graph), stages, captured.graph)


def run_planned(planned: Planned, case: Case, folder: Path, launcher: Launcher) -> None:
    """Run the planned steps and leave in `folder` what the ranks wrote; every rank calls it.

    Raises:   RunError: a rank failed.
    """
    planned = _at_once(planned)
    plan, captured, reads = planned.plan, planned.captured, ReadDigests()
    parts = case.late or case.rounded
    program = parts.program if parts else lower_plan(plan, captured.graph)
    watched = replace(case.job, data=recorded(case.job.data, reads))
    job = merged(watched, plan.terms.joined, captured.batch.division)
    task = Task(
        captured,
        stages_of(plan, captured.graph),
        job,
        repeated(program, range(case.steps[0], case.steps[0] + 1)),
        resume=case.resume,
        laws=planned.laws,
        compiled=plan.terms.compiled,
        predicted_bytes=plan.predicted.peak_bytes if plan.predicted else (),
    ).compile_ahead()
    reads.taken()  # what finding out about buffers has read
    told = Steps(program.grid.step_micro_batches)
    work = partial(_work_within, task, case.steps, reads, folder)
    if launcher(work, program.num_ranks, told.add, groups=task.groups):
        _write_losses(folder, told)


def _write_losses(folder: Path, told: Steps) -> None:
    write_text(folder / "losses.json", json.dumps({s.step: s.loss for s in told.finished}))


def _work_within(
    task: Task,
    steps: Sequence[int],
    reads: ReadDigests,
    folder: Path,
    transport: Transport,
    report: Report,
) -> RankResult:
    """Run `steps` as `_work` does.

    Raises:   RunError: an accelerator has no memory left.
    """
    with telling_what_is_held(transport.rank, task.predicted_bytes):
        return _work(task, steps, reads, folder, transport, report)


def _work(
    task: Task,
    steps: Sequence[int],
    reads: ReadDigests,
    folder: Path,
    transport: Transport,
    report: Report,
) -> RankResult:
    """Run `steps` by the program of `task`; write gradients, state and what was read after each."""
    (program,) = task.windows.programs
    capture = own_capture(task.capture, program, transport.rank)
    own = capture, task.stages, task.job, transport
    rank = Rank(*own, RankTerms(make=task.make, carries=task.carries, report=report))
    rank.expect(program)
    calls = rank.bind(program)
    if task.resume is not None:
        rank.load(checkpoint.load(task.resume))
    given: dict[str, Tensor] = {}
    place = rank.replica if rank.averages else 0
    for weights in rank.weights.values():
        _watch(weights, given, place)
    transport.barrier()
    for step in steps:
        given.clear()
        with torch.no_grad():
            rank.run(calls, step)
            rank.settle()
        state = state_of(rank, step + program.num_steps)
        own = {f"read/{rank.rank}": reads.taken(), f"held/{rank.rank}": held_digests(rank)}
        save(folder / str(step), step + 1, transport, _told(state, given, own))
    return RankResult(transport.rank, (), (), 0, (0.0,), 0.0, {})


def _watch(weights: StageWeights, given: dict[str, Tensor], replica: int) -> None:
    """Keep in `given` what the optimizer of a stage is given at each step, as a replica's own."""

    def keep(*_: object) -> None:
        told = weights.told().items()
        given.update({key_of(replica, k): g.to(CPU, copy=True) for k, g in told})

    if weights.optimizer is not None:
        _compat.call_first(weights.optimizer, keep)


def _work_eagerly(
    task: EagerTask,
    steps: tuple[int, ...],
    reads: ReadDigests,
    folder: Path,
    transport: Transport,
    report: Report,
) -> RankResult:
    """Run `steps` as an eager replica; write the same as a planned rank."""
    rank = EagerRank(task, transport)
    given: dict[str, Tensor] = {}

    def keep(*_: object) -> None:
        for name, parameter in rank.parameters.items():
            if parameter.grad is not None:
                given[f"gradients/{name}"] = parameter.grad.to(CPU, copy=True)

    _compat.call_first(rank.updates.optimizer, keep)
    transport.barrier()
    for step in steps:
        given.clear()
        report(rank.result(step))
        rank.join_buffers(step + 1)
        state = rank.state() if rank.rank == 0 else None
        held = digest_of([value.detach() for value in rank.model.parameters()])
        own = {f"read/{rank.rank}": reads.taken(), f"held/{rank.rank}": {"0": held}}
        save(folder / str(step), step + 1, transport, _told(state, given, own))
    return RankResult(transport.rank, (), (), 0, (0.0,), 0.0, {})


def _told(state: State | None, given: Mapping[str, Tensor], own: Mapping[str, object]) -> State:
    """Return what a rank writes: its part of the state with the gradients, and of itself."""
    if state is None:
        return {}, own
    tensors, plain = state
    return {**tensors, **given}, {**plain, **own}


def _sgd(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)
