"""Session: the phases of the main job, from an unmodified model to a trained one and a report."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.best import best_of
from penstock.choose.choose import (
    Choice,
    Machines,
    decided,
    for_plan,
    joining_of,
)
from penstock.choose.loading import JobTerms
from penstock.choose.settle import (
    Checked,
    CheckOptions,
    bounded,
    proved,
    proved_eager,
)
from penstock.choose.size_limits import check_soon
from penstock.choose.unjoined import unjoined_choice
from penstock.cluster.cluster import Cluster
from penstock.device import all_here, here
from penstock.errors import (
    AloneError,
    PlanError,
    RankMisfitError,
    UnlikeShapesError,
)
from penstock.examine import same_run
from penstock.examine.eager_memory import check_memory
from penstock.job import Job
from penstock.listener import Listener
from penstock.pilot.goal import REACHED, GoalWatch
from penstock.pilot.replan import Replanner, SearchBasis
from penstock.pilot.replan_log import replanned, replans_in, words_of
from penstock.plan.plan import Decision, Plan
from penstock.profile.kinds import load_profiles
from penstock.profile.noise import EVERY as NOISE_EVERY
from penstock.prove.audit_pace import used_s
from penstock.prove.audits import Audited
from penstock.runtime.stop import Stopped, stopping
from penstock.script import script_of
from penstock.search.shapes import Fixed
from penstock.training import audited_run
from penstock.training.audited_run import DiffersError
from penstock.training.begin import Begin
from penstock.training.examination import compare_with_before, examine_job, tell_of_step, trace_step
from penstock.training.key_session import (
    chosen,
    proved_shapes,
)
from penstock.training.mirror import mirroring
from penstock.training.misfits import go_on_alone, go_on_unplanned, stopped_alone
from penstock.training.plan_choice import (
    ChoiceTerms,
    given_choice,
    kept_choice,
    searched_choice,
)
from penstock.training.replicas import WITHOUT_ELASTIC, Replicas, run_eagerly
from penstock.training.results import RunEnd, Trained, finished
from penstock.training.run_asked import JobLearned, RunAsked
from penstock.training.run_folder import (
    begun_from,
    clear_after,
    is_out_of_patience_at,
    set_aside_earlier,
    words_to_resume,
)
from penstock.training.run_steps import run_steps
from penstock.training.task import TaskTerms, task_of, windows_from

if TYPE_CHECKING:
    from penstock.choose.keys import TracedKey
    from penstock.graph.trace import Capture
    from penstock.prove.audit import Auditor
    from penstock.runtime.rank import StepResult
    from penstock.runtime.run import Outcome


@dataclass
class Session:
    """One run: what was requested, and its phases.

    job:      what is trained: the author's, with modules replaced where rules say so.
    goal:     a loss at which the run ends, at `num_steps` of the job's own at the latest.
    elastic:  whether the run goes on when ranks are lost.
    asked:    what else was asked for, and stays.
    noise_every: of how many steps one is watched for the noise of its gradients.
    learned:  what is known of the job by now.
    basis:    what the plan was found by, where it may be made again during the run.
    checked:  how its first steps compare with the plain loop's, in words.
    audited:  what audits have found; `auditor`, while it runs, who makes them.
    begun_s:  processor time that its process had taken when it began.
    written:  `job` and `author` as they were written, where their data was made to tell more.
    """

    job: Job
    author: Job
    folder: Path
    num_steps: int
    fixed: Fixed
    there: Machines
    asked: RunAsked = RunAsked()  # noqa: RUF009 - a frozen record
    resume: bool = False
    care: CheckOptions = CheckOptions()  # noqa: RUF009 - a frozen record
    elastic: bool = False
    goal: GoalWatch | None = None
    noise_every: int = NOISE_EVERY
    learned: JobLearned = field(default_factory=JobLearned)
    basis: SearchBasis | None = None
    checked: str = ""
    audited: Audited = Audited()  # noqa: RUF009 - a frozen record
    auditor: "Auditor | None" = None
    begun_s: float = field(default_factory=used_s)
    written: tuple[Job, Job] | None = None

    @property
    def step_job(self) -> Job:
        """Return the job of the steps of which one was traced: of several shapes, the first."""
        return self.learned.shapes[0].job if self.learned.shapes else self.job

    @property
    def is_command(self) -> bool:
        """Return whether a command asks for it, which may be begun anew, and no script."""
        return self.asked.on_step is None

    @property
    def listener(self) -> Listener:
        """Return the listener of the session."""
        return self.there.listener

    # -- what it learns from those who lead it ----------------------------------------------------

    def needs_plan(self) -> None:
        """Be a run that is not started where no plan can train it."""
        self.care = self.care._replace(strict=True, trial=False)

    def goes_on_unplanned(self, care: CheckOptions) -> None:
        """Be the run that it was, from its newest checkpoint on, and without a plan."""
        self.care, self.resume = care._replace(eager=True), True

    def stays_together(self) -> None:
        """Be a run that ends when a rank is lost."""
        self.elastic = False

    def among(self, ranks: int) -> None:
        """Be a run of so many ranks that are there."""
        self.fixed = replace(self.fixed, ranks=ranks)

    def tells_more(self, job: Job) -> None:
        """Be a run of a job whose data tells more than the author's, until there is no plan."""
        self.written = self.written or (self.job, self.author)
        self.job, self.author = job, replace(self.author, data=job.data)

    def knows(self, found: "Examined | None") -> None:
        """Note what the job is found to be; None: another rank knows."""
        self.learned.found = found

    def planned_for(self, shapes: "tuple[TracedKey, ...]") -> None:
        """Let the plan be made for the first of these shapes."""
        self.learned.shapes = shapes

    def traced_with(self, shapes: "tuple[TracedKey, ...]", noticed: list[str]) -> None:
        """Note the steps of its shapes, and the lines of the loss that print, or log."""
        self.learned.shapes, self.learned.noticed = shapes, noticed

    def cannot_trace(self, why: str) -> None:
        """Note why there is no trace."""
        self.learned.untraced = why

    def begins_with(self, facts: same_run.RunFacts | None) -> None:
        """Note what the run begins with, for those who go on with it, or join."""
        self.learned.facts = facts

    def follows_from(self, late: str) -> None:
        """Note what steps follow from that no checkpoint holds, as was found while they ran."""
        self.learned.late = late

    def begins_afresh(self) -> None:
        """Be a run that goes on from nothing."""
        self.resume = False

    def trace(self) -> "Capture | None":
        """Return the step, traced; None where the model has to be trained as eager modules."""
        return trace_step(self)

    def may_replan_by(self, basis: SearchBasis | None) -> None:
        """Note by what a plan can be made again; None: it cannot."""
        self.basis = basis

    def runs_on(self, there: Machines) -> None:
        """Note the machines that were found."""
        self.there = there

    def was_checked(self, words: str) -> None:
        """Note how its first steps compare with the plain loop's, in words."""
        self.checked = words

    def was_audited(self, audited: Audited) -> None:
        """Note what the audits have found, besides the steps that were taken back before."""
        self.audited = replace(audited, back=(*self.audited.back, *audited.back))

    def audited_by(self, auditor: "Auditor | None") -> None:
        """Note who audits what runs now; None: nobody does any more."""
        self.auditor = auditor

    def mirrored(self) -> AbstractContextManager[None]:
        """Keep the folder at its URL while it is trained."""
        return mirroring(
            self.asked.mirror, self.folder, self.asked.keep, self.listener, resume=self.resume
        )

    # -- the phases -------------------------------------------------------------------------------

    def lead(self) -> Trained:
        """Run all phases in this process, ranks as processes of this host."""
        self._be_alone()
        begin = begun_from(self)
        if not self.care.eager:
            check_soon(self.job, self.fixed, self.listener)
        found = examine_job(self, begin.checkpoint)
        self.knows(found)
        set_aside_earlier(self)
        unplanned = self.care.eager or found.one_process or found.no_plan
        captured = None if unplanned else trace_step(self)
        found.refuse_failed()
        found = found.settled(captured)
        tell_of_step(self, captured, alone=bool(found.one_process))
        compare_with_before(self, found, captured, begin.checkpoint)
        if captured is None:
            return self.train_eagerly(begin, found)
        try:
            if self.goal is not None:
                from penstock.training.until_loss import train_until

                trained = train_until(self, captured, found, begin)
                return trained or self.train_eagerly(begin, found)
            return self._lead_plan(captured, begin, found)
        except RankMisfitError as problem:
            return go_on_unplanned(self, found, problem, begin)
        except AloneError as problem:  # what its code counts to is in no checkpoint
            self.follows_from(problem.message)
            return go_on_alone(self, replace(found, forgets=(problem.message,)), problem, begin)

    def _lead_plan(self, captured: "Capture", begin: Begin, found: "Examined") -> Trained:
        """Choose a plan, prove it and run it, in processes of this host."""
        from penstock.runtime.launch import local_launcher

        try:
            choice = self.choose(captured, begin.checkpoint, found)
        except UnlikeShapesError as problem:
            if self.is_strict() or self.elastic:
                raise
            self.listener.say(f"{problem.message}: training it eagerly instead")
            return self.train_eagerly(begin, found)
        launch = local_launcher(choice.plan.total_ranks)
        checked = self.prove(choice, begin, launch, found)
        if checked.problem and choice.plan.terms.compiled:
            choice = self.without_compiling(choice, checked.problem)
            checked = self.prove(choice, begin, launch, found)
        if checked.problem and self.divides_unasked(choice.plan):
            choice = self._undivided(captured, begin.checkpoint, found, checked.problem)
            launch = local_launcher(choice.plan.total_ranks)
            checked = self.prove(choice, begin, launch, found)
        if checked.problem and (apart := unjoined_choice(self, choice, found, checked.problem)):
            choice, launch = apart, local_launcher(apart.plan.total_ranks)
            checked = self.prove(choice, begin, launch, found)
        if checked.problem:
            checked.check(strict=self.is_strict())
            return self.train_eagerly(begin, found)
        if self.elastic:
            from penstock.training import elastic_driver

            return elastic_driver.train(self, choice, begin)
        return self.train_on(choice, begin, found)

    def _be_alone(self) -> None:
        """Use one accelerator of those here, unless ranks are given: this process forks no others.

        Raises:   RunError: several ranks are asked for.
        """
        if here().can_fork:
            return
        from penstock.runtime.launch import local_launcher

        local_launcher(self.fixed.ranks or 1)
        if self.fixed.ranks is None and self.asked.given_plan is None:
            self.fixed = replace(self.fixed, ranks=1)
        if len(all_here()) > 1:
            self.listener.say(f"training on one of {len(all_here())} accelerators")

    def train_on(self, choice: Choice, begin: Begin, found: "Examined") -> Trained:
        """Run all steps by processes of this host, or on by what is right where a step differs."""
        from penstock.runtime.launch import local_launcher

        launch = local_launcher(choice.plan.total_ranks)
        try:
            trained = self.train(choice, begin, launch)
        except DiffersError as problem:
            is_new = begin.checkpoint is None
            return audited_run.go_on(self, choice, found, problem, is_new=is_new)
        assert trained is not None
        return trained

    def without_compiling(self, choice: Choice, problem: str) -> Choice:
        """Return a choice without what its compiled ops got wrong; nothing is predicted of it."""
        plan = decided(choice.plan, [Decision("compiled", "no", "search", f"tried: {problem}")])
        plan = plan.changed(compiled=False, predicted=None)
        plan.save(self.folder / "plan.json")
        (self.folder / "predicted.trace.json").unlink(missing_ok=True)
        self.listener.say("training by the same plan, its ops not compiled")
        return choice._replace(plan=plan)

    @property
    def key(self) -> str:
        """Return what names the job, with the modules that are replaced."""
        replaces = [str(rule) for rule in self.fixed.rules if rule.verb == "replace"]
        begins = [f"weights {Path(self.asked.weights).absolute()}"] if self.asked.weights else []
        tells = ["its data tells more"] if self.written else []
        words = self.asked.text, *replaces, *begins, *tells
        return "; ".join(words) if self.asked.text else ""

    def is_strict(self) -> bool:
        """Return whether a plan is required."""
        asked = (
            self.asked.given_plan,
            self.fixed.schedule,
            self.fixed.stages,
            self.fixed.offload,
            self.fixed.exchange.post_validation or None,
            self.there.cluster,
            self.asked.units,
            self.fixed.rules or None,
            self.fixed.tensor if (self.fixed.tensor or 1) > 1 else None,
        )
        return self.care.strict or any(each is not None for each in asked)

    def alike(self) -> dict[str, object]:
        """Return what was requested, by name, as far as ranks have to have it alike."""
        given, rules = self.asked.given_plan, self.fixed.rules
        return {
            "steps": self.num_steps,
            "a checkpoint every": self.asked.every,
            "keep": self.asked.keep,
            "audit": tuple(self.asked.audit),
            "out": self.asked.mirror,
            "weights": self.asked.weights,
            "resume": self.resume,
            "until_loss": None if self.goal is None else tuple(self.goal.goal),
            "units": self.asked.units,
            "arguments": script_of(self.asked.text).arguments,
            "rules": [(rule.verb, rule.pattern, rule.how) for rule in rules],
            "choices": replace(self.fixed, rules=()),
            "plan": None if given is None else given.to_json(),
        }

    def prove(self, choice: Choice, begin: Begin, launch: "Launch", found: "Examined") -> Checked:
        """Return how the plan's first steps compare with the plain loop's.

        Raises:   RunError: they differ, a plan is required, and it is the author's own ops on the
                  author's micro-batches: no other plan would make these steps otherwise.
        """
        from penstock.prove.prove import Planned, prove

        is_last = choice.plan.terms.joined == 1 and not choice.plan.terms.compiled
        is_last = is_last and not self.divides_unasked(choice.plan)
        care = self.care._replace(strict=self.is_strict() and is_last)
        steps = range(begin.step, self.num_steps)

        def shown(job: Job, of: Choice, text: str) -> Checked:
            planned = Planned(job, of.captured, of.plan, found.laws)
            run = partial(prove, planned, resume=begin.checkpoint, launcher=launch)
            return proved(planned, text, steps, care, run, self.listener)

        checked = proved_shapes(self, choice, shown)
        self.checked = checked.words
        return checked

    def choose(self, captured: "Capture", checkpoint: Path | None, found: "Examined") -> Choice:
        """Return the plan: given, that of the run to resume, or searched for."""

        def choose(fixed: Fixed, captured: "Capture") -> Choice:
            return self._chosen(captured, checkpoint, found, fixed)

        choice = chosen(self, choose) if self.learned.shapes else choose(self.fixed, captured)
        self.listener.say(str(choice.plan))
        return choice

    def _chosen(
        self, captured: "Capture", checkpoint: Path | None, found: "Examined", fixed: Fixed
    ) -> Choice:
        bounds, decisions = bounded(self.job, self.key, captured, found, fixed, self.listener)
        terms = ChoiceTerms(
            self.step_job,
            self.folder,
            self.there,
            asked=self.fixed,
            bounds=bounds,
            decisions=decisions,
            units=self.asked.units,
            tries=self.care.trial,
            lets_go=self.elastic,
            has_shapes=bool(self.learned.shapes),
            num_steps=self.num_steps,
        )
        kept = kept_choice(terms, captured) if checkpoint is not None else None
        if kept is not None and kept.basis is not None:
            self.basis = kept.basis
        if self.asked.given_plan is not None:
            return given_choice(terms, captured, self.asked.given_plan)
        if kept is not None:
            return kept.choice
        choice, self.basis = searched_choice(terms, captured, found.laws)
        return choice

    def divides_unasked(self, plan: Plan) -> bool:
        """Return whether ranks divide ops, and another plan may leave them whole."""
        return plan.tensor > 1 and self.fixed.tensor is None and self.asked.given_plan is None

    def _undivided(
        self, captured: "Capture", checkpoint: Path | None, found: "Examined", problem: str
    ) -> Choice:
        """Return the best plan that divides no ops, in place of one that differs."""
        self.listener.say(f"training by a plan that divides no ops: {problem}")
        self.fixed = replace(self.fixed, tensor=1)
        return self.choose(captured, checkpoint, found)

    # -- running ----------------------------------------------------------------------------------

    def train(
        self,
        choice: Choice,
        begin: Begin,
        launch: "Launch",
        *,
        board: "Board | None" = None,
        leader: bool = True,
    ) -> Trained | None:
        """Run all steps; return what they gave where this process leads.

        board:    what the ranks see; None: they are threads or children of this process.
        """
        ran = self.ran(choice, begin, launch, board=board, leader=leader)
        return None if ran is None else self.finished(*ran)

    def ran(
        self,
        choice: Choice,
        begin: Begin,
        launch: "Launch",
        *,
        board: "Board | None" = None,
        leader: bool = True,
    ) -> "tuple[Outcome, Choice] | None":
        """Run all steps; return the outcome and by what it ended, where this process leads.

        Raises:   Stopped: a signal ended it.
        """
        from penstock.runtime.worker import work

        is_here = board is None
        with stopping(board, tells=leader) as board:
            self.heed(board)
            guide = self._guide(choice, board, leads=None if is_here else leader)
            task = replace(self.task(choice, begin, board), guide=guide)
            if is_here:  # elsewhere each rank compiles what is its own
                task.compile_ahead()
            run, ranks = partial(work, task), choice.plan.total_ranks
            launch = partial(launch, groups=task.groups)
            if not leader:
                launch(run, ranks, _unheard)
                return None
            clear_after(self, begin)
            audits = audited_run.audited_by_plan(self, choice, board, begin.step)
            with stopped_alone(self, board, begin), audits:
                outcome = run_steps(self, run, ranks, choice, begin.step, launch)
            audited_run.check(self, begin)
            if outcome is None:
                raise Stopped(board.asked(), words_to_resume(self))
        return outcome, self.ended_by(choice)

    def heed(self, board: "Board") -> None:
        """Let the goal, once it is reached, end the ranks of a board."""
        if self.goal is not None:
            self.goal.asks = partial(board.ask_to_stop, REACHED)

    def followed(self) -> Choice:
        """Return the choice by which an elastic run ended."""
        plan = Plan.load(self.folder / "plan.json")
        if self.basis and any(way.is_of(plan) for way in self.basis.ways):
            return joining_of(self.basis.ways, plan).choice(plan)
        shapes = self.learned.shapes
        captured = shapes[0].captured if shapes else trace_step(self)
        assert captured is not None, "it was traced before"
        return Choice(*for_plan(self.step_job, plan, captured, self.listener), plan)

    def _guide(self, choice: Choice, board: "Board", *, leads: bool | None) -> Replanner | None:
        """Return what makes the plan again during the run; None where nothing does.

        leads:    as in Replanner.
        """
        plan, files = choice.plan, self.folder / "cluster.toml"
        if plan.averages or plan.served:  # with other replicas it would train otherwise
            return None
        if self.basis is None or plan.total_ranks == 1 or not self.care.replan:
            return None
        if leads is not False and not files.exists():
            return None
        basis, last, windows = self.basis, self.num_steps, self.windows
        if plan.terms.compiled and leads is not False:  # only that profile knows its segments
            profiles = load_profiles(self.folder / "profile.json")
            basis = basis._replace(ways=(choice.way(profiles),))
        run, known = (basis, choice, windows, board), self.learned.found
        stays = known is not None and any(each.by_update for each in known.beside)
        return Replanner(*run, folder=self.folder, last_step=last, leads=leads, stays=stays)

    def ended_by(self, choice: Choice) -> Choice:
        """Return the choice by which the run ended: another one where the plan was made again."""
        made = replans_in(self.folder) if self.basis is not None else []
        if not (made and self.basis):
            return choice
        for row in replanned(self.folder):
            self.listener.say("\n".join(words_of(row)))
        plan = Plan.load(self.folder / "plan.json")
        return joining_of(self.basis.ways, plan).choice(plan)

    def finished(self, outcome: "Outcome", choice: Choice | None) -> Trained:
        """Write what a run leaves in its folder; return what it gave."""
        done = outcome.steps[-1].step + 1
        if done < self.num_steps and is_out_of_patience_at(self, done):
            words = f"no better {best_of(self.job.best).figure} in {self.job.patience} validations"
            self.listener.say(f"ended after step {done} of {self.num_steps}: {words}")
        steps = (
            self.num_steps if self.goal is None and not is_out_of_patience_at(self, done) else done
        )
        about = self.folder, self.job, steps, outcome, choice
        return finished(RunEnd(*about, self.checked, self.goal, self.audited), self.listener)

    @property
    def job_terms(self) -> JobTerms:
        """Return what makes the job besides the text that names it."""
        return JobTerms(self.asked.weights, self.fixed.rules, self.fixed.exchange.sums or "")

    def task_terms(self, plan: Plan) -> TaskTerms:
        """Return what ranks have alike, whichever plan they run.

        plan:     by which the run begins, that is audited or not.
        """
        return TaskTerms(
            folder=self.folder,
            num_steps=self.num_steps,
            every=self.asked.every,
            keep=self.asked.keep,
            noise_every=self.noise_every,
            audits=audited_run.audits_of(self, plan),
            forgets=self.care.forget,
            decisions=str(self.asked.options.get("decisions", "")),
            turns=self.asked.turns,
            profiled=self.asked.profiled(self.folder),
        )

    def task(self, choice: Choice, begin: Begin, board: "Board") -> "Task":
        """Return what ranks do of a plan from a step on."""
        return task_of(self.task_terms(choice.plan), choice, begin, board)

    def windows(self, choice: Choice, first_step: int) -> "Windows":
        """Return the windows of all steps that are left."""
        return windows_from(self.task_terms(choice.plan), choice, first_step)

    def train_eagerly(self, begin: Begin, found: "Examined") -> Trained:
        """Train without a plan: as replicas, or in one process by the plain loop.

        Raises:   PlanError: ranks are to come and go, or a replica is larger than a rank may be.
        """
        self.job, self.author = self.written or (self.job, self.author)
        if self.elastic:
            why = self.learned.untraced or found.one_process or found.no_plan
            why = why or "its plan differs from the plain loop"
            raise PlanError(f"ranks that come and go need a plan: {why}", hint=WITHOUT_ELASTIC)
        ranks = 1 if found.one_process else self.fixed.ranks or Cluster.here().num_ranks
        check_memory(self.job, self.fixed.memory, ranks, self.learned.untraced or found.one_process)
        try:
            return self._train_eagerly(begin, found)
        except DiffersError as problem:
            is_new = begin.checkpoint is None
            return audited_run.go_on(self, None, found, problem, is_new=is_new)
        except AloneError as problem:
            return go_on_alone(self, found, problem, begin)

    def _train_eagerly(self, begin: Begin, found: "Examined") -> Trained:
        from penstock.runtime.launch import local_launcher

        most = self.fixed.ranks or Cluster.here().num_ranks
        about = self.job, found, most, range(begin.step, self.num_steps), begin.checkpoint
        ranks, self.checked = proved_eager(*about, self.care, self.listener)
        own = Replicas(found, ranks, begin)
        outcome = run_eagerly(self, own, local_launcher(ranks))
        assert outcome is not None, "this process leads"
        return self.finished(outcome, None)


if TYPE_CHECKING:
    from penstock.checkpoints.control import Board
    from penstock.examine.examine import Examined
    from penstock.runtime.windows import Windows
    from penstock.runtime.worker import RankResult, Task

    Launch = Callable[..., list[RankResult]]  # (work, ranks, report, *, groups)


def _unheard(step: "StepResult") -> None:
    """Let a report pass: another rank listens."""
