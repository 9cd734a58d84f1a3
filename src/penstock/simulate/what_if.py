"""What if: the step that would have been measured, had something been different.

    run = measured_run(plan, graph, timeline, profiles, cluster)
    print(what_if(run, Change(links=2.0)))

The seconds that were measured are scaled, or carried to another program, and simulated.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from penstock.cluster.cluster import Cluster, DeviceKind
from penstock.errors import PlanError, ProfileError
from penstock.graph.graph import Graph
from penstock.graph.stages import Stages
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.plan.plan import Plan, is_asynchronous
from penstock.profile.kinds import Profiles, as_tuple, places_of
from penstock.program.codes import COMPUTE, COST_ROW, JOINS, REDUCE, WORKS
from penstock.program.program import Program
from penstock.schedule import SCHEDULES
from penstock.schedule.orders import KINDS, Kind
from penstock.schedule.recipe import (
    AnySchedule,
    Recipe,
    any_schedule,
    as_cut,
    built_on,
    has_window,
    name_of,
    trains,
    units_of,
)
from penstock.simulate.carry import carried
from penstock.simulate.costs import Costs
from penstock.simulate.fed import data_waits, fed
from penstock.simulate.matched import Floats
from penstock.simulate.measured_seconds import record
from penstock.simulate.price import costs_of
from penstock.simulate.recorded import UNDER_WAY, Recorded
from penstock.simulate.simulate import simulate
from penstock.simulate.suited import Setting, suited, takes_seconds
from penstock.timeline.spans import SPAN_KINDS
from penstock.timeline.timeline import Timeline, step_s

_SEEN = 0.01  # of a step
WINDOW = 8  # steps of an asynchronous schedule, where the run drained after each


@dataclass(frozen=True, slots=True)
class Change:
    """What would be different; by default, nothing.

    ranks, stages, kinds   (which, how many times faster): computes and updates
    links                  messages and sums over several ranks, how many times faster; inf: free
    latency_s              each message is under way this much longer
    data                   what ranks wait for their data, how many times faster; inf: not at all
    cluster                messages and sums take what the links of these machines say
    schedule, num_micro_batches   another order of work; more or fewer micro-batches of a replica
    recompute              whether B repeats F, in all stages; None: as in the run

    Raises:   PlanError: a number that is not above 0, or a latency below 0 or infinite.
    """

    ranks: tuple[tuple[int, float], ...] = ()
    stages: tuple[tuple[int, float], ...] = ()
    kinds: tuple[tuple[Kind, float], ...] = ()
    links: float = 1.0
    latency_s: float = 0.0
    data: float = 1.0
    cluster: Cluster | None = None
    schedule: str | AnySchedule | None = None
    num_micro_batches: int | None = None
    recompute: bool | None = None

    def __post_init__(self) -> None:
        times = [times for pairs in (self.ranks, self.stages, self.kinds) for _, times in pairs]
        for number in (*times, self.links, self.data):
            if not number > 0:
                hint = "2 is twice as fast, 0.5 takes twice as long"
                raise PlanError(f"{number:g} times faster cannot be", hint=hint)
        if not 0 <= self.latency_s < float("inf"):
            message = f"messages cannot be under way {self.latency_s:g} s longer"
            raise PlanError(message, hint="give seconds, 0 or more")
        if self.num_micro_batches is not None and self.num_micro_batches < 1:
            message = f"a step of {self.num_micro_batches} micro-batches"
            raise PlanError(message, hint="give 1 or more")

    def __str__(self) -> str:
        """Return the change in a few words."""
        return ", ".join(self._words()) or "nothing else"

    def _words(self) -> Iterator[str]:
        if self.schedule is not None:
            yield name_of(any_schedule(self.schedule))
        if self.num_micro_batches is not None:
            yield f"{self.num_micro_batches} micro-batches"
        if self.recompute is not None:
            yield "all of F repeated in B" if self.recompute else "nothing of F repeated in B"
        for what, pairs in (("rank", self.ranks), ("stage", self.stages), ("", self.kinds)):
            for which, times in pairs:
                yield f"{f'{what} {which}'.strip()} {times:g} times faster"
        if self.links != 1.0:
            yield (
                f"links {self.links:g} times faster" if self.links < float("inf") else "free links"
            )
        if self.latency_s:
            yield f"messages {1e3 * self.latency_s:g} ms longer under way"
        if self.data != 1.0:
            yield (
                f"data {self.data:g} times faster"
                if self.data < float("inf")
                else "no wait for data"
            )
        if self.cluster is not None:
            yield "links of another cluster"


class Run(NamedTuple):
    """A run that was measured: its program and the seconds of all instructions.

    data_s:   by rank, of a step, that it waited for data; empty: unknown.
    waits_s:  by row of the program, of them those before it.
    """

    plan: Plan
    graph: Graph
    profiles: Profiles | None
    cluster: Cluster | None
    program: Program
    timeline: Timeline
    recorded: Recorded
    replayed_s: float  # per step, of the window simulated with these seconds
    data_s: tuple[float, ...]
    waits_s: Floats


@dataclass(frozen=True, slots=True)
class Answer:
    """What a change would give: seconds of a step, and what the answer rests on besides the trace.

    ratio:    of the step to the replayed one; where there are more or fewer micro-batches, of the
              seconds per micro-batch.
    """

    change: Change
    step_s: float
    ratio: float
    rests_on: tuple[str, ...]
    timeline: Timeline

    def __str__(self) -> str:
        return f"{self.change}: {self.ratio:.3f} of the replayed step"


def measured_run(
    plan: Plan,
    graph: Graph,
    timeline: Timeline,
    profiles: Profiles | None = None,
    cluster: Cluster | None = None,
    *,
    data_s: tuple[float, ...] = (),
) -> Run:
    """Return the run of `plan` that gave the measured `timeline`.

    profiles: only to divide B into I and W.  cluster: only for sums that were not run.
    data_s:   as in `Run`.
    Raises:   PlanError, GraphError, ScheduleError: the plan is for another graph, or cannot be
              lowered.  TimelineError: not a timeline of this plan, or not a measured one.
    """
    program = lower_plan(plan, graph, num_steps=_num_steps(plan, timeline))
    recorded = record(program, timeline)
    replayed_s = step_s(simulate(program, recorded, spans=False)) / program.num_steps
    waits_s = data_waits(program, timeline, data_s)
    return Run(
        plan,
        graph,
        profiles,
        cluster,
        program,
        timeline,
        recorded,
        replayed_s,
        data_s,
        waits_s,
    )


def _num_steps(plan: Plan, timeline: Timeline) -> int:
    """Return the number of steps in the window that a timeline shows: those with updates."""
    if not is_asynchronous(plan):
        return 1
    spans = timeline.spans
    return max(1, len(np.unique(spans.micro_batches[spans.kinds == SPAN_KINDS.index("U")])))


def what_if(run: Run, change: Change) -> Answer:
    """Return the step that the run would have had with `change`.

    Raises:   PlanError: a rank or stage that does not exist; stages on devices that did not run
              them.  ScheduleError: no such schedule, or none of these sizes.
              ProfileError: a backward has to be divided, and the run has no profile.
              ClusterError: links of machines between which there are none.
    """
    program, recorded, notes = lowered(run, change)
    _check(program, change)
    recorded = scaled(program, recorded, change)
    timeline = simulate(program, recorded, change.cluster)
    seconds = step_s(timeline) / program.num_steps
    more = program.grid.step_micro_batches / run.program.grid.step_micro_batches
    return Answer(change, seconds, seconds / run.replayed_s / more, notes, timeline)


def changed(run: Run, change: Change) -> Plan:
    """Return the run's plan with another order of work; built for profiled seconds, if for any.

    Raises:   ScheduleError: no such schedule.  PlanError: one of other sizes.
              GraphError, ProfileError: its stages cannot be priced.
    """
    asked = None
    if change.schedule is not None:
        asked = as_cut(any_schedule(change.schedule), run.plan.schedule)
    again = run.plan.recompute
    if change.recompute is not None:
        again = (change.recompute,) * run.plan.num_stages
    plan = run.plan.changed(
        schedule=asked or run.plan.schedule,
        num_micro_batches=change.num_micro_batches or run.plan.num_micro_batches,
        shares=() if change.num_micro_batches else run.plan.place.shares,
        recompute=again,
    )
    if asked is None or not takes_seconds(plan) or run.profiles is None:
        return plan
    places = (0,) * plan.total_ranks
    if run.cluster is not None:
        places = places_of(as_tuple(run.profiles), run.cluster, plan.total_ranks)
    stages = stages_of(plan, run.graph)
    costs = costs_of(run.graph, stages, run.profiles)
    return suited(plan, Setting(run.graph, stages, costs, places, run.cluster))


def lowered(run: Run, change: Change) -> tuple[Program, Recorded, tuple[str, ...]]:
    """Return the program of the change, its seconds before they are scaled, what they rest on."""
    plan = changed(run, change)
    recorded = fed(run.program, run.recorded, run.waits_s, change.data)
    if plan == run.plan:
        return run.program, recorded, ()
    stages = stages_of(plan, run.graph)
    several = is_asynchronous(plan)
    steps = (run.program.num_steps if is_asynchronous(run.plan) else WINDOW) if several else 1
    program = lower_plan(plan, run.graph, num_steps=steps, stages=stages)
    _check_devices(run, program)
    costs, is_repeated = None, plan.recompute != run.plan.recompute
    if run.profiles is not None:
        ran = stages_of(run.plan, run.graph) if is_repeated else stages
        costs = costs_of(run.graph, ran, run.profiles, copies=plan.offloads)
    other = carried(run.program, recorded, program, costs=costs, cluster=run.cluster)
    notes = [*other.rests_on]
    if several and not is_asynchronous(run.plan):
        notes.append("copies of weights as free")
    if not is_repeated:
        return program, other.recorded, tuple(notes)
    notes.append("what B repeats, as the profile has it")
    work_s = other.recorded.work_s * _longer(run, stages, costs, program)
    return program, replace(other.recorded, work_s=work_s), tuple(notes)


def _longer(run: Run, stages: Stages, ran: Costs | None, program: Program) -> Floats:
    """Return, by compute and update of a program, how many times longer each takes.

    By the profile's seconds of `stages` over those of the stages that ran, on the first kind.
    Raises:   ProfileError: the run has no profile.
    """
    if run.profiles is None or ran is None:
        message = "what B repeats was not run, and there is no profile"
        raise ProfileError(message, hint="replay a run whose folder has its profile.json")
    would = costs_of(run.graph, stages, run.profiles).action_s[: len(KINDS), :, 0]
    before = ran.action_s[: len(KINDS), :, 0]
    times = np.divide(would, before, out=np.ones_like(would), where=before > 0)
    code = program.code
    rows = np.flatnonzero(WORKS[code.op])
    kinds = COST_ROW[code.op[rows], code.kind[rows]]
    is_known = kinds < len(KINDS)  # the others are copies
    return np.where(is_known, times[np.where(is_known, kinds, 0), code.stage[rows]], 1.0)


def _check_devices(run: Run, program: Program) -> None:
    """Raise where a stage would be on a device on which it was not run."""
    if run.cluster is None or len(run.cluster.devices) < 2:
        return
    device_of = run.cluster.device_of
    ran, would = (_devices_of(each, device_of) for each in (run.program, program))
    for stage, devices in sorted(would.items()):
        for name in sorted(devices - ran[stage]):
            hint = "only what was run on a device is known of it"
            raise PlanError(f"stage {stage} would be on a {name}, and was not run there", hint=hint)


def _devices_of(program: Program, device_of: Callable[[int], DeviceKind]) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for rank in range(program.num_ranks):
        for stage in program.stages_of(rank):
            found.setdefault(stage, set()).add(device_of(rank).name)
    return found


def _check(program: Program, change: Change) -> None:
    """Raise where the change concerns a rank or stage that the program does not have."""
    for what, pairs, count in (
        ("rank", change.ranks, program.num_ranks),
        ("stage", change.stages, program.num_stages),
    ):
        for which, _ in pairs:
            if not 0 <= which < count:
                hint = f"there are {what}s 0 to {count - 1}"
                raise PlanError(f"there is no {what} {which}", hint=hint)
    if change.cluster is not None and change.cluster.num_ranks < program.num_ranks:
        message = f"links of {change.cluster.num_ranks} ranks for a run of {program.num_ranks}"
        raise PlanError(message, hint="describe more hosts")


def scaled(program: Program, recorded: Recorded, change: Change) -> Recorded:
    """Return the seconds with all of `change` but the order of work."""
    code = program.code
    rows = np.flatnonzero(WORKS[code.op])
    kinds = COST_ROW[code.op[rows], code.kind[rows]]
    owners = np.searchsorted(code.offsets, rows, side="right") - 1
    work_s = recorded.work_s.copy()
    named = [(KINDS.index(kind), times) for kind, times in change.kinds]
    for column, pairs in (
        (owners, change.ranks),
        (code.stage[rows], change.stages),
        (kinds, named),
    ):
        for which, times in pairs:
            work_s[column == which] /= times
    message_s = None
    if change.cluster is None and recorded.message_s is not None:
        message_s = recorded.message_s / change.links
        message_s[:, UNDER_WAY] += change.latency_s
    sum_s = _sums(program, recorded.sum_s, change)
    return replace(recorded, work_s=work_s, sum_s=sum_s, message_s=message_s)


def _sums(program: Program, sum_s: Floats, change: Change) -> Floats:
    """Return the seconds of the sums; those on one rank use no link.

    Ignores:  what another cluster makes of gathers.
    """
    code, found = program.code, list[float]()
    rows = np.flatnonzero(JOINS[code.op]).tolist()
    for row, seconds in zip(rows, sum_s.tolist(), strict=True):
        if code.op[row] != REDUCE:
            found.append(seconds if change.cluster is not None else seconds / change.links)
            continue
        reduction = code.reductions[int(code.edge[row])]
        if len(reduction.ranks) < 2:
            found.append(seconds)
        elif change.cluster is not None:
            topology = program.end.topology_of(reduction.word)
            found.append(change.cluster.sum_s(reduction.size_bytes, reduction.ranks, topology))
        else:
            found.append(seconds / change.links)
    return np.array(found)


# -- the usual questions ---------------------------------------------------------------------------


def usual_changes(run: Run) -> Iterator[tuple[str, Change]]:
    """Yield the changes that are asked for first, in words.

    No wait for data, where that is a hundredth of a step; free links; each rank a tenth faster;
    stages that take equally long; B that repeats F, or does not; every other schedule that drains
    and puts the same stages on the same number of ranks.
    """
    if max(run.data_s, default=0.0) > _SEEN * run.replayed_s:
        change = Change(data=float("inf"))
        yield str(change), change
    if run.program.num_ranks > 1:
        named = (
            Change(links=float("inf")),
            *(Change(ranks=((rank, 1.1),)) for rank in range(run.program.num_ranks)),
        )
        yield from ((str(change), change) for change in named)
    if run.program.num_stages > 1:
        yield "all stages equally long", balanced(run)
    plan = run.plan
    if run.profiles is not None and trains(plan.schedule):
        ways = (Change(recompute=each) for each in (False, True))
        yield from ((str(way), way) for way in ways if changed(run, way) != plan)
    several = plan.num_ranks > 1 and trains(plan.schedule)
    units = units_of(plan.schedule)
    for each in [Recipe(make.__name__, units=units) for make in SCHEDULES] if several else []:
        if each.name == name_of(plan.schedule) or has_window(each) or not trains(each):
            continue
        shares = {*plan.grid.shares}
        made = [built_on(each, plan.num_stages, share, plan.num_ranks) for share in shares]
        if all(one and (one.is_in_order or plan.terms.buffers != "one copy") for one in made):
            yield each.name, Change(schedule=each.name)


def balanced(run: Run) -> Change:
    """Return the change that makes all stages take the mean of their seconds."""
    code = run.program.code
    computes = code.op[WORKS[code.op]] == COMPUTE
    stages = code.stage[code.op == COMPUTE]
    counts = run.program.num_stages
    seconds = np.bincount(stages, run.recorded.work_s[computes], counts)
    times = seconds / seconds.mean()
    return Change(stages=tuple((at, float(x)) for at, x in enumerate(times.tolist()) if x > 0))
