"""Until loss: a run to a goal of its loss, by ranks and a batch that it finds on the way.

The search for them is the run itself: short phases with unlike ranks K and batches B, each of which
trains on where the one before has ended.  They tell how long a step takes and how noisy gradients
are, and so what each (K, B) is worth:

    own steps of a step  (1 + scale / B0) / (1 + scale / B)     profile/noise.py; B0 is the job's
    seconds of a step    a + b B / K + c (K - 1) / K            fleet/batch_size.py; or as measured

The phases are the most ranks with the job's batch; one rank; the largest batch; then whatever looks
best, until that has been measured.  With it the run goes on to its goal.  Each change is a
checkpoint from which ranks go on, whatever their number.  A batch is changed by the number of its
micro-batches, and rates follow it (pace.py).

Source:   "Scavenger", arXiv:2303.06659.
"""

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, final

from penstock import taken
from penstock.choose import trial
from penstock.choose.choose import (
    Choice,
    Joining,
    Machines,
    best,
    best_of,
    decided,
    found_in_units,
    joining_of,
    on_hosts_of,
    save,
)
from penstock.choose.compiling import compiled
from penstock.choose.flag_text import to_fill
from penstock.choose.prepare import machines
from penstock.choose.settle import bounded
from penstock.errors import EstimateError, PlanError
from penstock.fleet.batch_size import BatchOption, Phase, phases
from penstock.fleet.curve import steps_to
from penstock.graph.merge import merged
from penstock.pilot.goal import GoalWatch
from penstock.pilot.pace import exponent
from penstock.pilot.phases import (
    ChosenBatch,
    TrainedPhase,
    UntilFile,
    points_in,
    rows_in,
    until_in,
    words_of_pair,
)
from penstock.pilot.replan import SearchBasis
from penstock.plan.plan import Decision
from penstock.profile.kinds import load_profiles
from penstock.profile.noise import EVERY, gain, noise_of, pooled_scale
from penstock.runtime.stop import Stopped
from penstock.schedule.recipe import name_of
from penstock.schedule.schedule import Schedule
from penstock.search.shapes import Fixed
from penstock.training.begin import Begin
from penstock.training.results import Trained
from penstock.training.run_folder import words_to_resume
from penstock.units import format_seconds

if TYPE_CHECKING:
    from penstock.cluster.cluster import Cluster
    from penstock.examine.examine import Examined
    from penstock.graph.trace import Capture
    from penstock.job import Job
    from penstock.profile.profile import Profile
    from penstock.runtime.run import Outcome
    from penstock.training.session import Session

_PHASE_S, _FEWEST, _MOST = 3.0, 12, 40  # of a phase: seconds by its prediction, within these steps
_MOST_PHASES = 6
_SEARCH_S = 2.0  # for the plan of a phase
_VALIDATING = 0.1  # of the time, where the job does not say how often
_NEVER = 2**60

Pair = tuple[int, int]  # ranks, micro-batches of a step


def grid_of(ranks: int, own: int, allowed: tuple[int, int] | None = None) -> list[Pair]:
    """Return all (ranks, micro-batches of a step) that a run on so many ranks may take.

    own, allowed:  the job's micro-batches, and its `batch_range`.
    Powers of two, and the most; of the batch, the job's own times these.
    """
    fewest, most = allowed or (max(1, own // 4), 4 * own)
    batches = {own, most, *(own * 2**k for k in range(1, 30) if own * 2**k <= most)}
    batches |= {own // 2**k for k in range(1, 30) if own // 2**k >= fewest and own % 2**k == 0}
    counts = {ranks, *(2**k for k in range(20) if 2**k <= ranks)}
    return sorted(itertools.product(counts, batches))


def first_pairs(grid: Sequence[Pair], own: int) -> list[Pair]:
    """Return the phases that a search begins with: unlike in ranks, and in the batch."""
    ranks, batches = sorted({k for k, _ in grid}), sorted({m for _, m in grid})
    other = batches[-1] if batches[-1] != own else batches[0]
    wanted = dict.fromkeys([(ranks[-1], own), (ranks[0], own), (ranks[-1], other)])
    return [pair for pair in wanted if pair in grid]


@final
@dataclass
class UntilRun:
    """One run to a goal: what it is made from, and what was told so far.

    choice:   by which the first phase is planned; `ways` and `fixed`, the others.
    grid:     all (ranks, micro-batches) that are left to choose from; one: nothing is searched for.
    there:    with the memory that plans may take.
    newest:   what the newest phase gave, and by which plan.
    """

    session: "Session"
    watch: GoalWatch
    found: "Examined"
    fixed: Fixed
    decisions: tuple[Decision, ...]
    there: Machines
    room: "Cluster"
    ways: tuple[Joining, ...]
    choice: Choice
    told: UntilFile
    grid: list[Pair]
    checkpoint: Path | None
    newest: "tuple[Outcome, Choice, Session] | None" = None

    def train(self, step: int) -> Trained | None:
        """Run phases, then the rest; return what it gave, or None: no plan is left to train by.

        Raises:   PlanError: nothing is left to do.
        """
        self._check_open(step)
        under_way = self.told.phases[-1] if self.told.phases else None
        if under_way is not None and not under_way.step_s:  # it was stopped there
            start = time.monotonic()
            if under_way.is_last:
                self._keep(self.told.ended(replace(under_way, steps=self._left(under_way, step))))
            step = self._over(self._planned(_pair(under_way), under_way.is_last), step, start)
        while not self._is_over() and len(self.grid) > 1 and (pair := self._next()) is not None:
            step = self._tried(pair, step)
        while not self._is_over() and self.grid:
            step = self._tried(self._best_pair(), step, is_last=True)
        if self.newest is None:
            return None
        outcome, choice, part = self.newest
        self._keep(replace(self.told, reached=self.watch.is_reached, loss=self.watch.value))
        return part.finished(outcome, choice)

    def _check_open(self, step: int) -> None:
        last = self.told.phases[-1] if self.told.phases else None
        own = step if last is None else last.own_at(step)
        goal, least = self.watch.goal.loss, self.session.num_steps + 1
        hint = f"raise the number of steps: num_steps={least} at least"
        if self.watch.is_reached:
            message = f"after {step} steps the {self.watch.by} loss is {self.watch.value:.4g}"
            raise PlanError(message, hint=f"ask for a loss below {goal:g}")
        if own > self.session.num_steps - 1e-6:
            raise PlanError(f"{step} steps have done what the job's own would do", hint=hint)

    def _is_over(self) -> bool:
        """Return whether the goal is reached, or as much is done as the job's steps would do."""
        last = self.told.phases[-1] if self.told.phases else None
        is_done = last is not None and last.own_at(last.step + last.steps) > self._limit - 1e-6
        return self.watch.is_reached or (is_done and last is not None and last.step_s > 0)

    @property
    def _limit(self) -> int:
        return self.session.num_steps

    # -- what is tried, and chosen ----------------------------------------------------------------

    @property
    def scale(self) -> float:
        """Return the noise scale that all phases tell together; nan where none does."""
        return pooled_scale([p.noise for p in self.told.phases if p.noise is not None])

    def _measured(self) -> list[Phase]:
        """Return the phases that are over, as the fit takes them; of equal ones the newest."""
        rows = {_pair(p): p for p in self.told.phases if p.step_s}
        samples, scale = self.told.samples, self.scale
        return [Phase(k, m * samples, p.step_s, scale, p.watched) for (k, m), p in rows.items()]

    def _next(self) -> Pair | None:
        """Return the next (ranks, micro-batches) to try; None: what looks best was measured.

        Where no phase tells how noisy gradients are, the batch stays.
        """
        done = {_pair(p) for p in self.told.phases if p.step_s}
        if done and math.isnan(self.scale):
            self.grid = [pair for pair in self.grid if pair[1] == self.told.micro_batches]
        first = [p for p in first_pairs(self.grid, self.told.micro_batches) if p not in done]
        if first:
            return first[0]
        pair = self._best_pair()
        return None if pair in done or len(self.told.phases) >= _MOST_PHASES else pair

    def _options(self) -> list[BatchOption]:
        """Return what is foreseen of every (ranks, batch), per own step, the best first.

        Nothing where too little is known.
        """
        told, samples = self._measured(), self.told.samples
        try:
            law = phases(told)
        except EstimateError:
            return []
        over = [(k, m * samples) for k, m in self.grid]
        own, usd = self.told.micro_batches * samples, self.told.usd_per_hour or 1.0
        found = law.options(over, steps=1.0, batch=own, usd_per_hour=usd, told=told)
        return sorted(found, key=lambda one: one.score(self.watch.goal.least))

    def _best_pair(self) -> Pair:
        """Return what looks best by now: measured, or foreseen by what was."""
        options = self._options()
        if options:
            return options[0].ranks, options[0].batch // self.told.samples
        is_cost = self.watch.goal.least == "cost"
        rows = [p for p in self.told.phases if p.step_s and _pair(p) in self.grid]
        least = min(rows, key=lambda p: p.step_s * (p.ranks if is_cost else 1), default=None)
        return first_pairs(self.grid, self.told.micro_batches)[0] if least is None else _pair(least)

    def _gain(self, micro_batches: int) -> float:
        own, samples, scale = self.told.micro_batches, self.told.samples, self.scale
        if micro_batches == own or math.isnan(scale):
            return 1.0
        return gain(own * samples, micro_batches * samples, scale)

    # -- one phase --------------------------------------------------------------------------------

    def _tried(self, pair: Pair, step: int, *, is_last: bool = False) -> int:
        """Train with so many ranks and micro-batches; return the step after that.

        Where there is no plan for them, or it trains something else, they are left out.
        """
        from penstock.runtime.launch import local_launcher

        start, session = time.monotonic(), self.session
        try:
            choice = self._planned(pair, is_last)
            launch = local_launcher(choice.plan.total_ranks)
            checked = session.prove(choice, Begin(step, self.checkpoint), launch, self.found)
            problem = checked.problem
            if problem and self._leaves_joining(choice):
                return self._tried(pair, step, is_last=is_last)
        except PlanError as why:
            if len(self.grid) == 1:
                raise
            problem = why.message
        else:
            checked.check(strict=len(self.grid) == 1 and session.is_strict())
            if not problem:
                if is_last and len(self.grid) > 1:
                    self._choose(pair, step)
                self._begin(pair, step, choice, is_last=is_last)
                return self._over(choice, step, start)
        session.listener.say(f"not with {words_of_pair(*pair)}: {problem}")
        self.grid.remove(pair)
        return step

    def _leaves_joining(self, choice: Choice) -> bool:
        """Join no micro-batches from now on, if `choice` does and there are plans that do not.

        Raises:   PlanError: there are none, of those that were to be the first.
        """
        apart = tuple(way for way in self.ways if way.joined == 1)
        if choice.plan.terms.joined == 1 or not apart:
            return False
        self.session.listener.say("joining no micro-batches from now on")
        self.ways = apart
        if self.choice.plan.terms.joined != 1:
            fixed = replace(self.fixed, ranks=self.choice.plan.total_ranks)
            self.choice = best_of(apart, fixed, self.there, _SEARCH_S)
        return True

    def _begin(self, pair: Pair, step: int, choice: Choice, *, is_last: bool) -> None:
        """Write down a phase before its first step: a run that is killed finds its place by it."""
        before = self.told.phases[-1] if self.told.phases else None
        worth = self._gain(pair[1])
        phase = TrainedPhase(
            step,
            step * self.told.micro_batches if before is None else before.number_at(step),
            float(step) if before is None else before.own_at(step),
            *pair,
            gain=worth,
            factor=worth**self.told.exponent,
            plan=shape_of_choice(choice),
            predicted_s=_step_s(choice),
            is_last=is_last,
        )
        left = self._left(phase, step)
        phase = replace(phase, steps=left if is_last else min(left, _steps_of(choice)))
        which = "to the goal:" if is_last else f"phase {len(self.told.phases) + 1}:"
        self.session.listener.say(f"{which} {phase}, {phase.plan}")
        self._keep(self.told.begun(phase))

    def _left(self, phase: TrainedPhase, step: int) -> int:
        """Return how many steps a phase has until as much is done as the job's own would do."""
        left = math.ceil((self._limit - phase.own_at(step)) / phase.gain - 1e-9)
        return step - phase.step + max(1, left)

    def _over(self, choice: Choice, step: int, start: float) -> int:
        """Run the newest phase from a step on, note what it has told; return the step after it."""
        outcome = self._ran(choice, step)
        phase, done = self.told.phases[-1], outcome.steps[-1].step + 1
        count, samples = choice.plan.step_micro_batches, max(1, choice.captured.graph.samples)
        noise = noise_of(outcome.noise, count, samples)
        own = replace(
            phase,
            steps=done - phase.step,
            step_s=outcome.step_s,
            seconds=time.monotonic() - start,
            small=noise.small if noise else 0.0,
            large=noise.large if noise else 0.0,
            watched=noise.steps if noise else 0,
            parts=count,
            samples=samples,
        )
        self._keep(self.told.ended(own))
        return done

    def _planned(self, pair: Pair, is_last: bool) -> Choice:
        """Return the best plan for so many ranks and micro-batches, saved.

        Raises:   PlanError: there is none.
        """
        session, cluster = self.session, self.there.cluster
        assert cluster is not None, "a plan is for some machines"
        choice = self._found(pair)
        profiles = self._profiles(choice)
        if (
            is_last
            and session.care.trial
            and not session.elastic
            and session.asked.given_plan is None
        ):
            steps = math.ceil(self._limit / self._gain(pair[1]))
            run = partial(trial.seconds_of, self.found.laws)
            choice, profiles = compiled(choice, profiles, self.there, steps, run)
        words = self.told.chosen.why if self.told.chosen else "a phase of the search for them"
        is_open = len(self.grid) > 1
        why = Decision("batch", words_of_pair(*pair), "search", words)
        more = (*self.decisions, why) if is_open else self.decisions
        choice = choice._replace(plan=on_hosts_of(decided(choice.plan, more), cluster))
        save(session.folder, choice.captured, choice.plan, profiles, self.room)
        return choice

    def _found(self, pair: Pair) -> Choice:
        """Return the best plan for so many ranks and micro-batches.

        Raises:   PlanError: there is none.
        """
        own = self.choice.plan
        ways = ways_for(self.ways, pair[1])
        is_told = len(self.grid) == 1 or any(way.is_of(own) for way in ways)
        if is_told and pair == (own.total_ranks, own.job_micro_batches):
            return self.choice
        ranks = pair[0]
        choice = best_of(ways, replace(self.fixed, ranks=ranks), self.there, _SEARCH_S)
        cluster = self.there.cluster
        assert cluster is not None, "a plan is for some machines"
        profiles = self._profiles(choice)
        about = choice, self.session.asked.units, self.fixed
        return found_in_units(*about, profiles=profiles, cluster=cluster)

    def _profiles(self, choice: Choice) -> "tuple[Profile, ...]":
        return joining_of(self.ways, choice.plan).profiles

    def _ran(self, choice: Choice, step: int) -> "Outcome":
        """Run the newest phase from a step on.

        Raises:   Stopped: a signal ended it.
        """
        from penstock.checkpoints.checkpoint import latest
        from penstock.runtime.launch import local_launcher
        from penstock.training import elastic_driver

        session, phase = self.session, self.told.phases[-1]
        every = self._validates_every(phase) if phase.is_last else _NEVER
        job = self.told.job_of(session.job, len(self.told.phases) - 1)
        job = replace(job, validate_every=every if self.watch.by == "validation" else None)
        ways = ways_for(self.ways, phase.micro_batches)
        ways = tuple(way._replace(job=_as_in(way, job)) for way in ways)
        may_change = phase.is_last and session.asked.given_plan is None and bool(ways)
        part = replace(
            session,
            job=job,
            author=self.told.job_of(session.author, len(self.told.phases) - 1),
            num_steps=phase.step + phase.steps,
            resume=False,
            basis=SearchBasis(ways, self.fixed, session.asked.units, _SEARCH_S)
            if may_change
            else None,
            noise_every=EVERY if phase.is_last else 1,
        )
        division, begin = choice.captured.batch.division, Begin(step, self.checkpoint)
        choice = choice._replace(job=merged(job, choice.plan.terms.joined, division))
        try:
            if session.elastic and phase.is_last:
                trained = elastic_driver.train(part, choice, begin)
                ran = trained.outcome, part.followed()
            else:
                launch = local_launcher(choice.plan.total_ranks)
                ran = part.ran(choice, begin, launch)
        except Stopped as stopped:
            raise Stopped(stopped.code - 128, words_to_resume(session)) from None
        assert ran is not None, "this process leads"
        self.newest = *ran, part
        self.checkpoint = latest(session.folder / "checkpoints")
        return ran[0]

    # -- what is foreseen -------------------------------------------------------------------------

    def _choose(self, pair: Pair, step: int) -> None:
        """Write down what is chosen, why, and what is foreseen of it."""
        told, options = self.told, self._options()
        one = next((o for o in options if (o.ranks, o.batch // told.samples) == pair), None)
        step_s = one.step_s if one else told.phases[-1].step_s
        own = steps_to(points_in(self.session.folder, told), self.watch.goal.loss)
        rest_s = None if own is None else self._rest_s(own, pair, step_s, step)
        law = phases(self._measured()) if options else None
        why = f"{words_of_pair(*pair)}: {format_seconds(step_s)} a step"
        why += "".join(f"; {self._worth(o, options[0])}" for o in options[1:4])
        chosen = ChosenBatch(
            *pair,
            scale=self.scale if math.isfinite(self.scale) else None,
            constants=(law.start_s, law.sample_s, law.sums_s) if law else None,
            step_s=step_s,
            own=own,
            seconds=None if rest_s is None else told.seconds + rest_s,
            cost=None if rest_s is None else told.cost + told.cost_of(pair[0], rest_s),
            why=why,
        )
        self._keep(replace(told, chosen=chosen))

    def _rest_s(self, own: float, pair: Pair, step_s: float, step: int) -> float:
        """Return the seconds from a step to the job's own step `own`, all in."""
        done = [p for p in self.told.phases if p.step_s]
        apart = sorted(p.seconds - p.steps * p.step_s for p in done)  # searching, starting, saving
        steps = max(0.0, own - done[-1].own_at(step)) / self._gain(pair[1])
        every = self._validates_every(replace(done[-1], predicted_s=step_s))
        validating_s = self.watch.val_s / every if every else 0.0
        return max(0.0, apart[len(apart) // 2]) + steps * (step_s + validating_s)

    def _worth(self, one: BatchOption, first: BatchOption) -> str:
        least, pair = self.watch.goal.least, (one.ranks, one.batch // self.told.samples)
        ratio = one.score(least)[0] / first.score(least)[0]
        return f"{ratio:.2f} times the {least} with {words_of_pair(*pair)}"

    def _validates_every(self, phase: TrainedPhase) -> int | None:
        """Return after how many steps the rest is validated, if it is."""
        job, val_s = self.session.job, self.watch.val_s
        if self.watch.by != "validation" or job.validate_every is not None:
            return job.validate_every
        if not val_s or not phase.predicted_s:
            return max(1, self._limit // 20)
        return max(1, math.ceil(val_s / (_VALIDATING * phase.predicted_s)))

    def _keep(self, told: UntilFile) -> None:
        self.told = told
        self.session.folder.mkdir(parents=True, exist_ok=True)
        told.save(self.session.folder)


def _pair(phase: TrainedPhase) -> Pair:
    return phase.ranks, phase.micro_batches


def ways_for(ways: Sequence[Joining], micro_batches: int) -> tuple[Joining, ...]:
    """Return the ways of joining in which a step of so many micro-batches has two or more.

    One micro-batch a step does not tell how noisy gradients are.
    """
    return tuple(
        way._replace(job=replace(way.job, micro_batches=micro_batches // way.joined))
        for way in ways
        if micro_batches % way.joined == 0 and (way.joined == 1 or micro_batches > way.joined)
    )


def _as_in(way: Joining, job: "Job") -> "Job":
    """Return the job with its micro-batches joined, or divided, in a way."""
    return merged(job, way.joined, way.captured.batch.division)


def shape_of_choice(choice: Choice) -> str:
    """Return the shape of a plan in a few words."""
    plan = choice.plan
    words = f"{plan.replicas} x {plan.num_stages} stages by {name_of(plan.schedule)}"
    return ", ".join(filter(None, (words, taken.words(plan.terms.joined))))


def _step_s(choice: Choice) -> float:
    assert choice.plan.predicted is not None, "a search predicts"
    return choice.plan.predicted.step_s


def _steps_of(choice: Choice) -> int:
    return max(_FEWEST, min(_MOST, math.ceil(_PHASE_S / max(_step_s(choice), 1e-9))))


# -- a run from the start, or from a checkpoint ----------------------------------------------------


def train_until(
    session: "Session", captured: "Capture", found: "Examined", begin: Begin
) -> Trained | None:
    """Train to the goal of a session; return what that gave, or None: no plan trains the job.

    Raises:   PlanError: nothing fits what is fixed, or the memory; nothing is left to do.
    """
    (first_step, checkpoint), watch, job = begin, session.goal, session.job
    assert watch is not None, "it has a goal"
    kept = until_in(session.folder) if checkpoint is not None else None
    fixed, decisions = bounded(job, session.key, captured, found, session.fixed, session.listener)
    cluster = session.there.cluster or machines(None, fixed.ranks, session.listener)
    power = _exponent(session, captured)
    grid = _grid(session, fixed, cluster.num_ranks, power)
    there = session.there._replace(cluster=cluster.within(to_fill(fixed.memory)))
    if len(grid) == 1:
        choice, ways = _only_choice(session, captured, checkpoint, found)
        grid = [(choice.plan.total_ranks, job.micro_batches)]
    else:
        most = max(ranks for ranks, _ in grid)
        searched = best(job, replace(fixed, ranks=most), captured, there)
        choice, ways = searched.choice, tuple(option.way for option in searched.options)
    told = _told(session, captured, cluster, power)
    if kept is not None:
        told = replace(kept.cut_at(first_step), until_loss=watch.goal.loss, least=watch.goal.least)
        for row, phase in rows_in(session.folder, told):
            if int(row["step"] or 0) <= first_step:
                watch.hear(row, phase.micro_batches)
    about = session, watch, found, fixed, decisions, there, cluster.within(fixed.memory)
    return UntilRun(*about, ways, choice, told, grid, checkpoint).train(first_step)


def _only_choice(
    session: "Session", captured: "Capture", checkpoint: Path | None, found: "Examined"
) -> tuple[Choice, tuple[Joining, ...]]:
    """Return the plan where nothing is searched for but that, and what it was made from."""
    choice = session.choose(captured, checkpoint, found)
    ways = session.basis.ways if session.basis else ()
    if not any(way.is_of(choice.plan) for way in ways):
        profiles = load_profiles(session.folder / "profile.json")
        ways = (choice.way(profiles),)
    return choice, ways


def _exponent(session: "Session", captured: "Capture") -> float | None:
    from penstock.processes.child import apart

    job = session.job
    return apart(lambda: exponent(job, captured.model))


def _grid(session: "Session", fixed: Fixed, ranks: int, power: float | None) -> list[Pair]:
    """Return all that may be chosen: what a user has fixed stays."""
    job = session.job
    if session.asked.given_plan is not None:
        return [(session.asked.given_plan.total_ranks, job.micro_batches)]
    grid = grid_of(fixed.ranks or ranks, job.micro_batches, job.batch_range)
    if fixed.ranks is not None:
        grid = [pair for pair in grid if pair[0] == fixed.ranks]
    if power is None or isinstance(fixed.schedule, Schedule) or job.carry is not None:
        why = "its orders are given" if power is not None else "the optimizer has no rate to scale"
        if job.carry is not None:
            why = "Job.carry has a value for each of its micro-batches"
        session.listener.say(f"the batch stays: {why}")
        grid = [pair for pair in grid if pair[1] == job.micro_batches]
    return grid


def _told(
    session: "Session", captured: "Capture", cluster: "Cluster", power: float | None
) -> UntilFile:
    watch = session.goal
    assert watch is not None, "it has a goal"
    prices = [cluster.device_of(rank).usd_per_hour for rank in range(cluster.num_ranks)]
    return UntilFile(
        watch.goal.loss,
        watch.goal.least,
        watch.by,
        max(1, captured.graph.samples),
        session.job.micro_batches,
        sum(prices) / len(prices),
        power if power is not None else 1.0,
    )
