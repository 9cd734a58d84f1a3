"""Judge: simulates plans for one graph on one cluster; what plans share is computed once.

Before a plan is simulated it has two bounds, which its step cannot be below:

    rough   from the seconds of pieces between cut points: nothing is cut
    bound   from the seconds of the plan's own stages, its updates and its sums over replicas

Both are those of the busiest rank (bounds.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from math import lcm
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.cluster.cluster import Cluster
from penstock.cluster.order import placed
from penstock.errors import GraphError, ProgramError, ScheduleError
from penstock.graph.alike import AlikeStages
from penstock.graph.graph import Graph
from penstock.graph.known_stages import KnownStages
from penstock.graph.server_parts import server_parts
from penstock.graph.stages import Stages
from penstock.graph.wire import message_bytes, summed_bytes
from penstock.plan.lower_plan import bits_of, lower_plan, stages_of
from penstock.plan.plan import Plan, is_asynchronous, schedule_of
from penstock.profile.kinds import Profiles, as_tuple, places_of
from penstock.referee import SERVER
from penstock.routes import server_places
from penstock.rules.ruled import FREE, Ruled
from penstock.schedule.figures import weight_copies
from penstock.schedule.recipe import AnySchedule
from penstock.schedule.schedule import Schedule
from penstock.search.bounds import ActionCounts, Pieces, counts_of, longest_s, pieces_of
from penstock.search.candidate import Candidate, Objective
from penstock.simulate.costs import Costs, Memory
from penstock.simulate.far_rooms import far_bytes
from penstock.simulate.guards import with_guards
from penstock.simulate.memory import most_held
from penstock.simulate.price import (
    ONE_BY_ONE,
    DeviceMemory,
    Ways,
    by_rank,
    check_profile,
    costs_of,
    held_of,
    memory_on,
    ways_of,
)
from penstock.simulate.server_steps import STEPS, ServerSeconds, served_step_s
from penstock.simulate.simulate import Simulator
from penstock.simulate.suited import Setting, bare, suited, takes_seconds
from penstock.timeline.spans import LANES
from penstock.timeline.timeline import Timeline, peak_bytes, step_s
from penstock.units import format_bytes

_WINDOW = 8  # steps over which an asynchronous schedule is simulated
_ROUNDING = 1 - 1e-9  # sums of a bound are made in another order than those of a simulation


class Priced(NamedTuple):
    """Stages with their seconds and bytes on each kind of device."""

    stages: Stages
    costs: Costs
    held: tuple[DeviceMemory, ...]


class _Ready(NamedTuple):
    """A window of a plan, ready to be simulated."""

    simulator: Simulator
    memory: Memory

    def timeline(self, start_s: Sequence[float] = (), *, spans: bool) -> Timeline:
        return self.simulator.timeline(start_s, memory=self.memory, spans=spans)


class Judge:
    """Says what plans of `graph` on `cluster` give.

    profiles:  one for any device, or one for each kind of device.
    suits:     whether a schedule that is built for seconds is built for those of each plan, before
               it is simulated; else for those that the plan says.
    rules:     a plan that does not keep to them is refused.
    Raises:    ProfileError: a profile of another graph, or none of a device that the cluster has.
    """

    def __init__(
        self,
        graph: Graph,
        profiles: Profiles,
        cluster: Cluster,
        *,
        suits: bool = True,
        rules: Ruled = FREE,
    ) -> None:
        self.suits, self.rules = suits, rules
        self.graph, self.cluster, self.profiles = graph, cluster, as_tuple(profiles)
        for profile in self.profiles:
            check_profile(graph, profile)
        self._clusters: dict[tuple[str, ...], Cluster] = {}
        self._places: dict[tuple[str, ...], tuple[int, ...]] = {}
        self._schedules: dict[tuple[AnySchedule, int, int, int, int], Schedule] = {}
        self._counts: dict[tuple[AnySchedule, int, int, int], ActionCounts] = {}
        self._known = KnownStages(graph, AlikeStages(graph).segments)
        self._priced: dict[tuple[object, ...], Priced] = {}

    def cluster_of(self, hosts: tuple[str, ...]) -> Cluster:
        """Return the cluster with `hosts` first."""
        if hosts not in self._clusters:
            self._clusters[hosts] = placed(self.cluster, hosts)
        return self._clusters[hosts]

    def places(self, hosts: tuple[str, ...], num_ranks: int) -> tuple[int, ...]:
        """Return for each rank the place of its device's profile."""
        known = self._places.get(hosts, ())
        if len(known) < num_ranks:
            known = self._places[hosts] = places_of(
                self.profiles, self.cluster_of(hosts), num_ranks
            )
        return known[:num_ranks]

    def suited(self, plan: Plan) -> Plan:
        """Return `plan` with its schedule built for the seconds of its stages, if it takes any.

        Raises:   GraphError: it cannot be cut.  ScheduleError: it cannot be built.
        """
        if not (self.suits and takes_seconds(plan)):
            return plan
        priced, places = self.price(plan), self.places(plan.place.hosts, plan.total_ranks)
        edges = priced.stages.edges
        sizes = [message_bytes(self.graph, e.values, plan.terms.wire[e.kind == "B"]) for e in edges]
        there = self.cluster_of(plan.place.hosts)
        setting = Setting(self.graph, priced.stages, priced.costs, places, there, sizes)
        return suited(plan, setting, alike=self.schedule(bare(plan)))

    def schedule(self, plan: Plan, num_steps: int = 1, *, share: int | None = None) -> Schedule:
        """Return the schedule of a plan, as the plan says it.

        share:    micro-batches of a replica; default: the largest share.
        Raises:   ScheduleError: it cannot be built for these sizes.
        """
        share = share or plan.num_micro_batches
        key = plan.schedule, plan.num_stages, share, plan.num_ranks, num_steps
        if key not in self._schedules:
            self._schedules[key] = schedule_of(plan, num_steps=num_steps, share=share)
        return self._schedules[key]

    def holders(self, plan: Plan) -> tuple[tuple[int, ...], ...]:
        """Return for each stage the ranks of the first replica on which it lives."""
        lives = self._counts_of(plan).forward > 0
        return tuple(tuple(np.flatnonzero(column).tolist()) for column in lives.T)

    def portions(self, plan: Plan) -> tuple[tuple[int, float], ...]:
        """Return for each stage the kind of device of the rank that is longest at it, and its part.

        That is of the stage's micro-batches; kinds are places of profiles.  Nothing where all ranks
        do as large a part, or a rank has several stages.
        """
        forward = self._counts_of(plan).forward
        parts = forward / forward.sum(axis=0)
        several = ((forward > 0).sum(axis=1) > 1).any()
        if several or np.ptp(parts.max(axis=0)) == 0:
            return ()
        kinds = self._slowest(plan)
        each_s = np.array([self.profiles[kind].micro_batch_s for kind in kinds])
        longest: list[int] = (parts * each_s[:, None]).argmax(axis=0).tolist()
        return tuple((kinds[rank], float(parts[rank, at])) for at, rank in enumerate(longest))

    def speeds(self, plan: Plan) -> tuple[float, ...]:
        """Return the micro-batches a second of each rank of a replica, of the slowest replica."""
        return tuple(1 / self.profiles[kind].micro_batch_s for kind in self._slowest(plan))

    def _slowest(self, plan: Plan) -> list[int]:
        """Return for each rank of a replica the slowest kind of device of all that have its place.

        Kinds are places of profiles.
        """
        places, column_of = self.places(plan.place.hosts, plan.total_ranks), plan.grid.column_of

        def seconds(kind: int) -> float:
            return self.profiles[kind].micro_batch_s

        rows = ([places[at] for at in column_of(rank)] for rank in plan.grid.ranks_of(0))
        return [max(row, key=seconds) for row in rows]

    # -- simulation -------------------------------------------------------------------------------

    def candidate(self, plan: Plan, *, as_said: bool = False) -> Candidate:
        """Return what the simulation of `plan` says; refused where it cannot be or does not fit.

        as_said:  whether the plan says for which seconds its schedule is built.
        """
        if broken := self.rules.broken(plan, self.graph):
            return Candidate(plan, float("inf"), (), 0.0, refused=broken)
        try:
            plan = plan if as_said else self.suited(plan)
            candidate, _ = self.simulated(plan, spans=False)
        except (GraphError, ProgramError, ScheduleError) as problem:
            return Candidate(plan, float("inf"), (), 0.0, refused=problem.message)
        cluster = self.cluster_of(plan.place.hosts)
        for rank, peak in enumerate(candidate.peak_bytes):
            cap = cluster.memory_of(rank)
            if peak > cap:
                why = f"rank {rank} would hold {format_bytes(peak)} of {format_bytes(cap)}"
                return replace(candidate, refused=why)
        return candidate

    def caps(self, plan: Plan) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return for each rank of a replica the devices it is on: (kind, bytes of memory)."""
        hosts = plan.place.hosts
        cluster, places = self.cluster_of(hosts), self.places(hosts, plan.total_ranks)
        rows = [(k, cluster.memory_of(rank)) for rank, k in enumerate(places)]
        grid = plan.grid
        columns = (grid.column_of(rank) for rank in grid.ranks_of(0))
        return tuple(tuple({rows[rank] for rank in column}) for column in columns)

    def lacking_bytes(self, candidate: Candidate) -> int:
        """Return the bytes that all ranks together hold above what their devices have."""
        cluster = self.cluster_of(candidate.plan.place.hosts)
        rows = enumerate(candidate.peak_bytes)
        return sum(max(0, peak - cluster.memory_of(rank)) for rank, peak in rows)

    def simulated(self, plan: Plan, *, spans: bool) -> tuple[Candidate, Timeline]:
        """Return what the simulation of `plan` says, and its timeline.

        Seconds are those that one more step adds to a long run.  No rank waits for others at the
        end of a step but for what they are told only then, as a norm that clips.  The timeline is
        one step of such a run, each rank beginning when it can; or a whole asynchronous window.
        """
        if is_asynchronous(plan):
            count = self._steps(plan)
            whole, half = (self._ready(plan, steps) for steps in (count, count // 2))
            timeline = whole.timeline(spans=spans)
            seconds = step_s(timeline) - step_s(half.timeline(spans=False))
            seconds /= count - count // 2
        else:
            ready = self._ready(plan)
            seconds, start_s = ready.simulator.long_run()
            timeline = ready.timeline(start_s, spans=spans or bool(plan.served))
            if plan.served:
                seconds = self._served_s(plan, timeline)
        usd = self._usd_per_s(plan) * seconds
        return Candidate(plan, seconds, peak_bytes(timeline), usd), timeline

    def _served_s(self, plan: Plan, timeline: Timeline) -> float:
        """Return the seconds of a step whose gradients servers take as they come.

        timeline:  of a step whose gradients are summed.
        """
        spans, cluster = timeline.spans, self.cluster_of(plan.place.hosts)
        took_s, ranks = spans.ends_s - spans.starts_s, range(plan.total_ranks)
        computes, updates = (spans.lanes == LANES.index(lane) for lane in ("compute", "update"))
        computes_s = [took_s[computes & (spans.ranks == rank)].sum() for rank in ranks]
        places = server_places(plan.topology, plan.total_ranks)
        sizes = server_parts(self.graph, self.price(plan).stages.stages, len(places)).size_bytes
        servers: list[ServerSeconds] = []
        for place, size in zip(places, sizes, strict=True):
            way_s = tuple(cluster.message_s(place, rank, size) for rank in ranks)
            update_s = took_s[updates & (spans.ranks == place)].sum() * size / max(1, sum(sizes))
            told_s = cluster.message_s(SERVER, place, 8 * (5 + len(ranks)))
            servers.append(ServerSeconds(way_s, float(update_s), told_s))
        table = np.repeat(np.array(computes_s)[:, None], STEPS, axis=1)
        return served_step_s(plan.sums_way, table, servers)

    def drained_s(self, plan: Plan) -> float:
        """Return the seconds from the first start of a step to its last end, alone."""
        ready = self._ready(plan, self._steps(plan) if is_asynchronous(plan) else 1)
        return step_s(ready.timeline(spans=False))

    def far_bytes(self, plan: Plan) -> tuple[int, ...]:
        """Return the bytes of far memory that every rank comes to have."""
        ready = self._ready(plan, self._steps(plan) if is_asynchronous(plan) else 1)
        return far_bytes(ready.simulator.program, ready.memory)

    def _steps(self, plan: Plan) -> int:
        """Return the steps of a window: 8, or as many times those in which all take their turn."""
        count = plan.num_micro_batches
        return _WINDOW * (lcm(count, self.schedule(plan).weight_rule.turn) // count)

    def _ready(self, plan: Plan, steps: int = 1) -> "_Ready":
        schedule = self.schedule(plan, steps)
        alive = weight_copies(schedule) if is_asynchronous(plan) else ()
        stages, costs, held = self.price(plan, alive, ways_of(schedule))
        program = lower_plan(plan, self.graph, num_steps=steps, stages=stages, schedule=schedule)
        places = self.places(plan.place.hosts, program.num_ranks)
        posted = plan.overlap.early > 0 or self.cluster.holds_receives
        memory = memory_on(held, program, places, posted=posted)
        costs = by_rank(costs, self.profiles, program, places, (self.graph, stages))
        own = places, (self.graph, stages)
        costs, memory = with_guards(costs, memory, program, self.profiles, own)
        return _Ready(Simulator(program, costs, self.cluster_of(plan.place.hosts)), memory)

    def price(self, plan: Plan, alive: Sequence[int] = (), ways: Ways = ONE_BY_ONE) -> Priced:
        """Return the stages of `plan`, priced; `alive` and `ways` as in `held_of`."""
        copies = plan.offloads
        ways = ways._replace(compiled=plan.terms.compiled, held_back=plan.sums_way)
        key = plan.cuts, plan.recompute, tuple(alive), copies, ways, plan.terms.wire, plan.divided
        key = (*key, plan.far)
        if key not in self._priced:
            stages, graph = stages_of(plan, self.graph, self._known), self.graph
            bits = tuple(bits_of(plan, stages)) if plan.terms.rounds else ()
            own = ways._replace(bits=bits, sharded=plan.divided, far=plan.far)
            costs = costs_of(graph, stages, self.profiles, alive, copies=copies, ways=own)
            held = tuple(
                held_of(graph, stages, p, alive, copies=copies, ways=own) for p in self.profiles
            )
            self._priced[key] = Priced(stages, costs, held)
        return self._priced[key]

    def _usd_per_s(self, plan: Plan) -> float:
        cluster = self.cluster_of(plan.place.hosts)
        return sum(cluster.device_of(r).usd_per_hour for r in range(plan.total_ranks)) / 3600

    # -- bounds -----------------------------------------------------------------------------------

    def rough(self, plan: Plan, objective: Objective) -> float:
        """Return a lower bound of the first number of the plan's score; cheap."""
        if objective == "memory" or is_asynchronous(plan):
            return 0.0
        work = self._pieces.between(plan.cuts)
        waits = plan.agreement.clip and not plan.agreement.post_validation
        parts = self._parts(plan)
        seconds = max(longest_s(*part, work, waits=waits) for part in parts)
        return _ROUNDING * self._score(plan, objective, seconds)

    def bound(self, plan: Plan, objective: Objective) -> float:
        """Return a lower bound of the first number of the plan's score; the plan is cut."""
        if is_asynchronous(plan):
            return 0.0
        try:
            schedule = self.schedule(self.suited(plan)) if objective == "memory" else None
            ways = ONE_BY_ONE if schedule is None else ways_of(schedule)
            stages, costs, held = self.price(plan, ways=ways)
        except GraphError:
            return 0.0
        parts = list(self._parts(plan))
        if objective == "memory" and (plan.offloads or plan.place.parts):
            return 0.0
        if schedule is not None:
            peaks = most_held(schedule, stages.edges, held)
            _, places = parts[0]
            return float(max(peaks[at % len(peaks), place] for at, place in enumerate(places)))
        work = self._pieces.chained(costs.action_s)
        ends_s = None if plan.place.shares or plan.shards else self._ends_s(plan, stages)
        waits = plan.agreement.clip and not plan.agreement.post_validation
        seconds = max(longest_s(*part, work, ends_s, waits=waits) for part in parts)
        return _ROUNDING * self._score(plan, objective, seconds)

    def may_beat(self, plan: Plan, best: Candidate, objective: Objective) -> bool:
        """Return whether a plan may have a better score than a candidate, by its bounds."""
        limit = best.score(objective)[0]
        if objective == "memory" or self.rough(plan, objective) > limit:
            return objective == "memory"
        return self.bound(plan, objective) <= limit

    def least(self, plan: Plan) -> tuple[float, float]:
        """Return lower bounds of the seconds and dollars of a plan."""
        seconds = self.bound(plan, "time")
        return seconds, self._usd_per_s(plan) * seconds

    def _score(self, plan: Plan, objective: Objective, seconds: float) -> float:
        if objective == "cost":
            return self._usd_per_s(plan) * seconds or seconds * plan.total_ranks
        return seconds

    @cached_property
    def _pieces(self) -> Pieces:
        return pieces_of(self.graph, self.profiles)

    def _parts(self, plan: Plan) -> Iterator[tuple[ActionCounts, list[int]]]:
        """Yield the counts of each share, the largest first, and the places of its ranks."""
        places, grid = self.places(plan.place.hosts, plan.total_ranks), plan.grid
        for share in sorted(set(grid.shares), reverse=True):
            whose = [at for at, own in enumerate(grid.shares) if own == share]
            yield (
                self._counts_of(plan, share),
                [places[rank] for replica in whose for rank in grid.ranks_of(replica)],
            )

    def _counts_of(self, plan: Plan, share: int | None = None) -> ActionCounts:
        plan = bare(plan)  # each rank does the same, in whatever order
        share = share or plan.num_micro_batches
        key = plan.schedule, plan.num_stages, share, plan.num_ranks
        if key not in self._counts:
            steps = self._steps(plan) if is_asynchronous(plan) else 1
            self._counts[key] = counts_of(self.schedule(plan, steps, share=share))
        return self._counts[key]

    def _ends_s(self, plan: Plan, stages: Stages) -> NDArray[np.float64]:
        """Return for each rank of a replica the seconds of the sum after its last action."""
        counts, cluster = self._counts_of(plan), self.cluster_of(plan.place.hosts)
        if plan.sums_way.late or plan.averages:  # with the step, or behind a few
            return np.zeros(plan.num_ranks)
        ends_s, grid = np.zeros(plan.num_ranks), plan.grid
        each = [grid.ranks_of(replica) for replica in range(grid.replicas)]
        for stage in stages.stages:
            holders = np.flatnonzero(counts.forward[:, stage.index])
            ranks = [r for own in each for r in np.array(own)[holders].tolist()]
            if len(ranks) > 1:
                sums, among = plan.agreement.sums, len(ranks)
                size = summed_bytes(
                    self.graph, stage.parameters, sums, ranks=among, shared=stages.shared
                )
                ends_s[counts.last == stage.index] = cluster.sum_s(size, ranks, plan.topology)
        return ends_s
