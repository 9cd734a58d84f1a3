"""Simulate: one step of a program on a computed clock.

Each rank has one computing thread, which takes its instructions in order:

    Compute   waits for its messages and, after an Unshard, for the weights; pays `Link.end_s` for
              each message that it is the first to use; then runs
    Send      pays `Link.end_s`, hands the message to the link, and goes on
    Receive   posts a place for the message, and goes on
    Reduction, Unshard   are issued, and the thread goes on; the collective lanes of all members run
              them one after another, each from when the last member has reached it
    Update    waits for all collectives that the rank has issued, then runs
    Offload, Reload   run: a copy occupies the computing thread.  One that was begun runs beside it,
              one to far memory and one back at a time, and the thread waits until it is over

A message waits until its lane is free, has it for size_bytes / bytes_per_s, and is there latency_s
later.  Inside a host every pair of ranks has a lane for each direction; between hosts a message
takes two lanes in turn, the cards of the sender's and of the receiver's host (`Cluster.lanes`),
each in the order in which messages reach it.

Where a host has fewer cores than ranks, these have a part of a core each (sharing.py).

While a rank has messages on a link with a slowdown, its computes take 1 + slowdown times as long.
Only the messages that it sends count, one after another as if they had one lane of their own.

Ignores:  that messages on a shared lane really divide it (together they take as long); that
          messages and collectives slow each other; what an incoming message slows.
"""

from collections.abc import Sequence
from typing import final

import numpy as np

from penstock.cluster.cluster import Cluster
from penstock.errors import ProgramError
from penstock.program.codes import JOINS, MEETS, RECEIVE, SEND, SPAN_OF, WORKS, excerpt
from penstock.program.instructions import TABLE
from penstock.program.program import Program
from penstock.simulate import kernel
from penstock.simulate.arrays import Seconds, among, begun, job_of, offsets_of
from penstock.simulate.costs import Costs, Memory
from penstock.simulate.memory import account, curve_of
from penstock.simulate.recorded import Recorded
from penstock.simulate.sharing import alone_s, crowded, shared_s
from penstock.timeline.spans import LANES, MemoryCurve, Spans, Totals
from penstock.timeline.timeline import Timeline

META = (("clock", "simulated"),)
_ALIKE = 1e-9  # of a step: what it adds to two ranks, for them to be in step
_MOST_STEPS = 16  # of a long run that are played


def simulate(  # noqa: PLR0913 - what there is, and one for each request
    program: Program,
    seconds: Costs | Recorded | Seconds,
    cluster: Cluster | None = None,
    *,
    memory: Memory | None = None,
    capacity: int | None = None,
    spans: bool = True,
    start_s: Sequence[float] = (),
) -> Timeline:
    """Return the timeline of one window of `program`, in seconds from its start.

    `seconds` is a table, or a function of the action.  The function is called for updates only if
    the schedule lists them, as an asynchronous one does; else they take no time.  Or `Recorded`:
    those of every single instruction; where it says what messages take, no cluster is given.
    Without a `cluster`, messages and collectives take no time.
    `capacity` is the number of messages from one rank to another that may be under way to
    receives that are not posted yet: None for any number, 0 where a Send waits for its Receive.
    `spans=False` leaves only the totals (`step_s`, `busy_s`, `peak_bytes`), and is faster.
    `start_s`: of every rank, when it begins; default: at 0 s, or as recorded.

    Raises:   ValueError: costs of other stages, ranks or devices; seconds below 0; recorded
              seconds of another program; starts of other ranks.
              ClusterError: the cluster has too few ranks, or no link where a message goes.
              ProgramError: a rank waits forever, as none does in a program that passed its checks.
    """
    made = Simulator(program, seconds, cluster, capacity=capacity)
    return made.timeline(start_s, memory=memory, spans=spans)


@final
class Simulator:
    """Simulates one window of a program, from whatever each rank begins at; as `simulate` says.

    What does not depend on that is made once.
    """

    def __init__(
        self,
        program: Program,
        seconds: Costs | Recorded | Seconds,
        cluster: Cluster | None = None,
        *,
        capacity: int | None = None,
    ) -> None:
        self.program, self.seconds, self.cluster = program, seconds, cluster
        self.capacity = capacity
        self._jobs: dict[bool, kernel.Simulation] = {}  # by whether there are spans, not begun
        self._at_once: kernel.Simulation | None = None  # all ranks begin at 0 s; without spans

    def timeline(
        self, start_s: Sequence[float] = (), *, memory: Memory | None = None, spans: bool = True
    ) -> Timeline:
        """Return the timeline of a window; arguments as of `simulate`."""
        program, job = self.program, self._played(start_s, spans=spans)
        curve, peak_bytes = MemoryCurve.of(), (0,) * program.num_ranks
        if memory is not None:
            held = account(program, memory)
            peak_bytes = held.peak_bytes
            if spans:
                curve = curve_of(program, held, job.record.work_s, job.queues.issued_s)
        last_s = job.queues.over_s.max(initial=0.0)  # nobody waits for a norm after the updates
        step_s = float(max(job.threads.clock_s.max(), last_s))
        totals = Totals(step_s, tuple(job.threads.busy_s.tolist()), peak_bytes)
        kept = _spans(program, job) if spans else Spans.of([])
        return Timeline(program.num_ranks, kept, curve, META, totals)

    def long_run(self) -> tuple[float, tuple[float, ...]]:
        """Return the seconds that a step takes in a long run, and when each rank begins to work.

        No rank waits for the others at the end of a step: it begins the next one when it has ended
        its own.  Steps are played until that adds the same on every rank; where it never does, as
        several cycles take turns, it is the mean of half of those played.  Beginnings are from the
        first one.  Where that is no less than a step alone takes, ranks begin as in that.

        Ignores:  messages and sums under way from one step to the next, as a norm that is told
                  late.
        Raises:   as `simulate`.
        """
        start_s, ends_s = np.zeros(self.program.num_ranks), list[float]()
        ahead_s, least_s, most_s = 0.0, 0.0, np.inf
        while most_s > least_s * (1 + _ALIKE) and len(ends_s) < _MOST_STEPS:
            clock_s = _ended_s(self.program, self._played(start_s.tolist()))
            least_s, most_s = float((clock_s - start_s).min()), float((clock_s - start_s).max())
            ends_s.append(ahead_s + float(clock_s.max()))
            start_s, ahead_s = clock_s - clock_s.min(), ahead_s + float(clock_s.min())
        half = _MOST_STEPS // 2
        if len(ends_s) == _MOST_STEPS:
            most_s = (ends_s[-1] - ends_s[-1 - half]) / half
        if most_s >= ends_s[0] * (1 - _ALIKE):
            return ends_s[0], (0.0,) * self.program.num_ranks
        begun_s = np.full(self.program.num_ranks, np.inf)
        spans = _spans(self.program, self._played(start_s.tolist(), spans=True))
        own = spans.working()
        np.minimum.at(begun_s, spans.ranks[own], spans.starts_s[own])
        begun_s = np.where(np.isfinite(begun_s), begun_s - begun_s.min(), 0.0)
        return most_s, tuple(begun_s.tolist())

    def _played(self, start_s: Sequence[float] = (), *, spans: bool = False) -> kernel.Simulation:
        """Return the simulation at its end."""
        at_once = len(start_s) == self.program.num_ranks and not any(start_s) and not spans
        if at_once and self._at_once is not None:
            return self._at_once
        program, cluster, job = self.program, self.cluster, self._begun(start_s, spans=spans)
        few = crowded(program.num_ranks, cluster)
        if few and cluster is not None and isinstance(self.seconds, Costs):

            def begun_and_over_s(taken_s: kernel.Floats) -> kernel.Floats:
                return _run(program, _with(self._begun(start_s, spans=True), taken_s)).record.work_s

            own_s = alone_s(program, self.seconds.action_s, job.durations.device)
            job = _with(job, shared_s(program, cluster, few, own_s, begun_and_over_s))
        job = _run(program, job)
        if at_once:
            self._at_once = job
        return job

    def _begun(self, start_s: Sequence[float], *, spans: bool) -> kernel.Simulation:
        """Return the simulation as it begins."""
        if len(start_s) not in (0, self.program.num_ranks):
            ranks = self.program.num_ranks
            raise ValueError(f"starts of {len(start_s)} ranks; there are {ranks}")
        if spans not in self._jobs:
            asked = self.program, self.seconds, self.cluster
            self._jobs[spans] = job_of(*asked, capacity=self.capacity, spans=spans)
        job = begun(self._jobs[spans])
        if len(start_s):
            job.threads.clock_s[:] = start_s
        return job


def _ended_s(program: Program, job: kernel.Simulation) -> kernel.Floats:
    """Return when each rank can begin its next step: behind an average of its weights, if any."""
    clock_s, queues = job.threads.clock_s, job.queues
    if not program.end.averages:
        return clock_s
    return np.maximum(clock_s, queues.over_s[queues.offsets[1:] - 1])


def _with(job: kernel.Simulation, taken_s: kernel.Floats) -> kernel.Simulation:
    """Return the simulation with seconds of its own for every compute and update."""
    return job._replace(durations=job.durations._replace(listed_s=taken_s))


def _run(program: Program, job: kernel.Simulation) -> kernel.Simulation:
    """Run to the end."""
    while kernel.run(job) == kernel.FULL:
        agenda = job.agenda
        heap_s, heap = (np.concatenate([each, each]) for each in (agenda.heap_s, agenda.heap))
        job = job._replace(agenda=agenda._replace(heap_s=heap_s, heap=heap))
    _check_end(program, job)
    return job


def _check_end(program: Program, job: kernel.Simulation) -> None:
    """Raise a ProgramError if a rank has not reached its end."""
    rows = job.threads.row
    stuck = np.flatnonzero(rows < program.code.offsets[1:]).tolist()
    if stuck:
        row = int(rows[stuck[0]])
        at = program.code.between(slice(row, row + 1))[0]
        evidence = "\n".join(excerpt(program.code, int(rows[rank])) for rank in stuck[:4])
        hint = "what this instruction waits for never comes: check the program"
        raise ProgramError(f"rank {stuck[0]} waits forever at {at}\n{evidence}", hint=hint)


def _spans(program: Program, job: kernel.Simulation) -> Spans:
    """Return the spans, rank by rank in the order of the code."""
    code, queues = program.code, job.queues
    times_s = [(WORKS, job.record.work_s), (JOINS, np.stack([queues.begun_s, queues.over_s], 1))]
    times_s += [(MEETS, job.meetings.times_s)]
    if len(job.routes.offsets):
        messages = (SEND, job.record.send_s), (RECEIVE, kernel.receive_s(job))
        times_s += [(among(op), both_s) for op, both_s in messages]
    chosen = np.logical_or.reduce([ops for ops, _ in times_s])
    here = chosen[code.op]
    op, kinds, stages = code.op[here], code.kind[here], code.stage[here].astype(np.int32)
    counts = np.diff(offsets_of(program, chosen))
    ranks = np.repeat(np.arange(program.num_ranks, dtype=np.int32), counts)
    lanes = np.array([LANES.index(row.lane or "compute") for row in TABLE], np.uint8)[op]
    starts_s, ends_s = np.empty(len(op)), np.empty(len(op))
    for ops, both_s in times_s:
        starts_s[ops[op]], ends_s[ops[op]] = both_s[:, 0], both_s[:, 1]
    columns = ranks, lanes, SPAN_OF[op, kinds], stages, code.micro_batch[here]
    return Spans(*columns, starts_s, ends_s)
