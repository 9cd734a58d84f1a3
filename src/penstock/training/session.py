"""Session: the phases of the main job, from an unmodified model to a trained one and a report."""

import itertools
import json
import shlex
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.best import best_of
from penstock.checkpoints.folders import Keep
from penstock.choose.choose import (
    Choice,
    Joining,
    Machines,
    decided,
    for_plan,
)
from penstock.choose.loading import JobTerms, Loaded, check_replaced
from penstock.choose.prepare import traced
from penstock.choose.run_windows import EVERY, CheckpointInterval
from penstock.choose.settle import (
    Checked,
    CheckOptions,
    NoPlanError,
    bounded,
    proved,
    proved_eager,
)
from penstock.choose.size_limits import check_soon
from penstock.choose.unjoined import unjoined_choice
from penstock.choose.update_memory import check_updates
from penstock.cluster.cluster import Cluster
from penstock.device import all_here, here
from penstock.errors import (
    AloneError,
    GraphError,
    PlanError,
    RankMisfitError,
    RunError,
    UnlikeShapesError,
)
from penstock.examine import same_run
from penstock.examine.eager_memory import check_memory
from penstock.files import write_text
from penstock.job import Job
from penstock.listener import Listener, Row
from penstock.pilot.by_ranks import BATCHES
from penstock.pilot.goal import REACHED, GoalWatch
from penstock.pilot.phases import PHASES
from penstock.pilot.replan import Replanner, SearchBasis
from penstock.pilot.replan_log import replanned, replans_in, words_of
from penstock.pilot.wishes import DECISIONS, LOG, POLICY, TABLE, WANTED
from penstock.plan.plan import Decision, Plan, Units
from penstock.profile.kinds import load_profiles
from penstock.profile.noise import EVERY as NOISE_EVERY
from penstock.prove.audit_pace import used_s
from penstock.prove.audits import AUDITS, KEPT, Audited, AuditTerms
from penstock.runtime.stop import Stopped, stopping
from penstock.script import script_of
from penstock.search.shapes import Fixed
from penstock.training import audited_run, saved
from penstock.training.audited_run import DiffersError
from penstock.training.chronicle import ENDED, row_of, sizes
from penstock.training.finished import NothingLeftError
from penstock.training.job_notices import (
    check_validation,
    noticing,
    words_before,
    words_of_step,
)
from penstock.training.mirror import mirroring
from penstock.training.misfits import go_on_alone, go_on_unplanned
from penstock.training.plan_choice import (
    ChoiceTerms,
    given_choice,
    kept_choice,
    searched_choice,
)
from penstock.training.replicas import WITHOUT_ELASTIC, Replicas, run_eagerly
from penstock.training.results import Trained, explained, finished, lines, resumption
from penstock.training.shapes import (
    chosen,
    examined_job,
    proved_shapes,
    sizes_by_step,
    traced_shapes,
)
from penstock.training.task import TaskTerms, task_of, windows_from

if TYPE_CHECKING:
    from penstock.choose.keys import TracedKey
    from penstock.graph.trace import Capture
    from penstock.prove.audit import Auditor
    from penstock.runtime.rank import StepResult
    from penstock.runtime.run import Outcome

FILES = (
    "plan.json",
    "graph.json",
    "profile.json",
    "cluster.toml",
    "predicted.trace.json",
    "measured.trace.json",
    "metrics.jsonl",
    "summary.json",
    "report.html",
    "checkpoints",
    "job.json",
    "replans.json",
    "events.jsonl",
    "elastic.json",
    POLICY,
    WANTED,
    DECISIONS,
    TABLE,
    LOG,
    BATCHES,
    PHASES,
    AUDITS,
    KEPT,
    same_run.FACTS,
)


@dataclass
class Session:
    """One run: what was requested, and its phases.

    job:      what is trained: the author's, with modules replaced where rules say so.
    text:     how the job was named, "file.py:name -- ARGUMENTS"; "": it was given as a record.
    units:    into which the stages of the plan are cut, whichever it is; None: it stays as it is.
    weights:  the file or folder whose weights the model begins with; "": it makes its own.
    on_step:  called with the row of each step, as `metrics.jsonl` has it, and the writers' rows.
    basis:    what the plan was found by, where it may be made again during the run.
    elastic:  whether the run goes on when ranks are lost; tls: by lines that are encrypted.
    goal:     a loss at which the run ends, at `num_steps` of the job's own at the latest.
    policy:   the file of the policy that the run follows; None: none.
    noise_every: of how many steps one is watched for the noise of its gradients.
    mirror:   URL at which the folder is kept, too; "": nowhere else.
    audit:    how much of it is made again by the plain loop; `auditor`, while it runs, by whom;
              and `audited`, what that has found.
    noticed:  lines of the loss that print, or log, where it was traced.
    untraced: why there is no trace.
    begun_s:  processor time that its process had taken when it began.
    facts:    what it begins with, for those who go on with it, or join.
    found:    what the job is found to be, under torchrun, on rank 0.
    shapes:   the steps of its shapes, if it has several, that with most of the work first.
    """

    job: Job
    text: str
    folder: Path
    num_steps: int
    fixed: Fixed
    given_plan: Plan | None
    resume: bool
    there: Machines
    author: Job
    every: CheckpointInterval = EVERY
    keep: Keep = Keep()  # noqa: RUF009 - a frozen record
    care: CheckOptions = CheckOptions()  # noqa: RUF009 - a frozen record
    units: Units | None = None
    weights: str = ""
    on_step: Callable[[Row], None] | None = None
    checked: str = ""
    basis: SearchBasis | None = None
    elastic: bool = False
    tls: bool = False
    goal: GoalWatch | None = None
    policy: Path | None = None
    noise_every: int = NOISE_EVERY
    mirror: str = ""
    audit: AuditTerms = AuditTerms()  # noqa: RUF009 - a tuple
    auditor: "Auditor | None" = None
    audited: Audited = Audited()  # noqa: RUF009 - a frozen record
    noticed: list[str] = field(default_factory=list[str])
    untraced: str = ""
    begun_s: float = field(default_factory=used_s)
    facts: same_run.RunFacts | None = None
    found: "Examined | None" = None
    shapes: "tuple[TracedKey, ...]" = ()

    @property
    def step_job(self) -> Job:
        """Return the job of the steps of which one was traced: of several shapes, the first."""
        return self.shapes[0].job if self.shapes else self.job

    @property
    def is_command(self) -> bool:
        """Return whether a command asks for it, which may be begun anew, and no script."""
        return self.on_step is None

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

    def knows(self, found: "Examined | None") -> None:
        """Note what the job is found to be; None: another rank knows."""
        self.found = found

    def planned_for(self, shapes: "tuple[TracedKey, ...]") -> None:
        """Let the plan be made for the first of these shapes."""
        self.shapes = shapes

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
        return mirroring(self.mirror, self.folder, self.keep, self.listener, resume=self.resume)

    # -- the phases -------------------------------------------------------------------------------

    def lead(self) -> Trained:
        """Run all phases in this process, ranks as processes of this host."""
        self._be_alone()
        first_step, checkpoint = self.start()
        if not self.care.eager:
            check_soon(self.job, self.fixed, self.listener)
        found = self.examine(checkpoint)
        self.set_aside()
        unplanned = self.care.eager or found.one_process or found.no_plan
        captured = None if unplanned else self.trace()
        found.refuse_failed()
        found = found.settled(captured)
        self.tell(captured)
        self.compare(found, captured, checkpoint)
        if captured is None:
            return self.train_eagerly(first_step, checkpoint, found)
        try:
            if self.goal is not None:
                from penstock.training.until_loss import train_until

                trained = train_until(self, captured, found, first_step, checkpoint)
                return trained or self.train_eagerly(first_step, checkpoint, found)
            return self._lead_plan(captured, first_step, checkpoint, found)
        except RankMisfitError as problem:
            return go_on_unplanned(self, found, problem, (first_step, checkpoint))

    def _lead_plan(
        self, captured: "Capture", first_step: int, checkpoint: Path | None, found: "Examined"
    ) -> Trained:
        """Choose a plan, prove it and run it, in processes of this host."""
        from penstock.runtime.launch import local_launcher

        try:
            choice = self.choose(captured, checkpoint, found)
        except UnlikeShapesError as problem:
            if self.is_strict():
                raise
            self.listener.say(f"{problem.message}: training it eagerly instead")
            return self.train_eagerly(first_step, checkpoint, found)
        launch = local_launcher(choice.plan.total_ranks)
        checked = self.prove(choice, first_step, checkpoint, launch, found)
        if checked.problem and choice.plan.terms.compiled:
            choice = self.without_compiling(choice, checked.problem)
            checked = self.prove(choice, first_step, checkpoint, launch, found)
        if checked.problem and self.divides_unasked(choice.plan):
            choice = self._undivided(captured, checkpoint, found, checked.problem)
            launch = local_launcher(choice.plan.total_ranks)
            checked = self.prove(choice, first_step, checkpoint, launch, found)
        if checked.problem and (apart := unjoined_choice(self, choice, found, checked.problem)):
            choice, launch = apart, local_launcher(apart.plan.total_ranks)
            checked = self.prove(choice, first_step, checkpoint, launch, found)
        if checked.problem:
            checked.check(strict=self.is_strict())
            return self.train_eagerly(first_step, checkpoint, found)
        if self.elastic:
            from penstock.training import elastic_driver

            return elastic_driver.train(self, choice, first_step, checkpoint)
        return self.train_on(choice, first_step, checkpoint, found)

    def _be_alone(self) -> None:
        """Use one accelerator of those here, unless ranks are given: this process forks no others.

        Raises:   RunError: several ranks are asked for.
        """
        if here().can_fork:
            return
        from penstock.runtime.launch import local_launcher

        local_launcher(self.fixed.ranks or 1)
        if self.fixed.ranks is None and self.given_plan is None:
            self.fixed = replace(self.fixed, ranks=1)
        if len(all_here()) > 1:
            self.listener.say(f"training on one of {len(all_here())} accelerators")

    def train_on(
        self, choice: Choice, first_step: int, checkpoint: Path | None, found: "Examined"
    ) -> Trained:
        """Run all steps by processes of this host, or on by what is right where a step differs."""
        from penstock.runtime.launch import local_launcher

        launch = local_launcher(choice.plan.total_ranks)
        try:
            trained = self.train(choice, first_step, checkpoint, launch)
        except DiffersError as problem:
            is_new = checkpoint is None
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

    def examine(self, checkpoint: Path | None) -> "Examined":
        """Return what the job is found to be.

        checkpoint:  from which it goes on, if it does.

        Raises:   JobError: only the plain loop trains it, and something else was requested; or a
                  run that goes on would begin anew what the job keeps.
        """
        check_replaced(Loaded(self.author, self.job), self.fixed.rules, self.listener)
        check_validation(self.job, self.key, self.listener)
        care = self.care._replace(strict=self.is_strict())
        try:
            found = examined_job(self, care)
        except NoPlanError as problem:
            self.found = problem.found
            raise
        self._check_resumed(found, checkpoint)
        return found

    def _check_resumed(self, found: "Examined", checkpoint: Path | None) -> None:
        """Raise where a run that goes on would begin anew what the job keeps in Python.

        Raises:   JobError, CheckpointError: it says what, with its line.
        """
        from penstock.training.resumed import check_resumed

        if self.care.forget or found.failed:
            return
        if checkpoint is not None or self.elastic:
            with self.listener.busy("looking whether it goes on as an unbroken run"):
                check_updates(self.job, self.key)
                check_resumed(self.job, found)
        elif found.forgets:
            self.listener.say(f"a resumed run would begin anew: {found.forgets[0]}")
        elif told := [one for one in found.beside if one.by_update and one.tensor]:
            self.listener.say(f"no checkpoint holds {told[0]}: Job.state would")

    def compare(
        self, found: "Examined", captured: "Capture | None", checkpoint: Path | None
    ) -> None:
        """Note what the run begins with; raise if it goes on and has something else than before.

        Raises:   JobError: it names that, and the line that reads it.
        """
        if not self.care.check or found.one_process or found.failed:
            return
        with self.listener.busy("reading what the run begins with"):
            self.facts = same_run.run_facts_of(self.author, captured)
        goes_on = checkpoint is not None and not self.care.forget
        if goes_on and (told := same_run.check_goes_on(self.folder, self.facts)):
            self.listener.say(told)

    @property
    def key(self) -> str:
        """Return what names the job, with the modules that are replaced."""
        replaces = [str(rule) for rule in self.fixed.rules if rule.verb == "replace"]
        begins = [f"weights {Path(self.weights).absolute()}"] if self.weights else []
        return "; ".join([self.text, *replaces, *begins]) if self.text else ""

    def is_strict(self) -> bool:
        """Return whether a plan is required."""
        asked = (
            self.given_plan,
            self.fixed.schedule,
            self.fixed.stages,
            self.fixed.offload,
            self.fixed.post_validation or None,
            self.there.cluster,
            self.units,
            self.fixed.rules or None,
            self.fixed.tensor if (self.fixed.tensor or 1) > 1 else None,
        )
        return self.care.strict or any(each is not None for each in asked)

    def asked(self) -> dict[str, object]:
        """Return what was requested, by name, as far as ranks have to have it alike."""
        given, rules = self.given_plan, self.fixed.rules
        return {
            "steps": self.num_steps,
            "a checkpoint every": self.every,
            "keep": self.keep,
            "audit": tuple(self.audit),
            "out": self.mirror,
            "weights": self.weights,
            "resume": self.resume,
            "until_loss": None if self.goal is None else tuple(self.goal.goal),
            "units": self.units,
            "arguments": script_of(self.text).arguments,
            "rules": [(rule.verb, rule.pattern, rule.how) for rule in rules],
            "choices": replace(self.fixed, rules=()),
            "plan": None if given is None else given.to_json(),
        }

    def prove(
        self,
        choice: Choice,
        first_step: int,
        checkpoint: Path | None,
        launch: "Launch",
        found: "Examined",
    ) -> Checked:
        """Return how the plan's first steps compare with the plain loop's.

        Raises:   RunError: they differ, a plan is required, and it is the author's own ops on the
                  author's micro-batches: no other plan would make these steps otherwise.
        """
        from penstock.prove.prove import Planned, prove

        is_last = choice.plan.terms.joined == 1 and not choice.plan.terms.compiled
        is_last = is_last and not self.divides_unasked(choice.plan)
        care = self.care._replace(strict=self.is_strict() and is_last)
        steps = range(first_step, self.num_steps)

        def shown(job: Job, of: Choice, text: str) -> Checked:
            planned = Planned(job, of.captured, of.plan, found.laws)
            run = partial(prove, planned, resume=checkpoint, launcher=launch)
            return proved(planned, text, steps, care, run, self.listener)

        checked = proved_shapes(self, choice, shown)
        self.checked = checked.words
        return checked

    def start(self) -> tuple[int, Path | None]:
        """Return the first step and the checkpoint to start from: the newest that is whole.

        Raises:   PlanError: nothing is left to do.  CheckpointError: all of them are damaged.
        """
        from penstock.checkpoints import checkpoint

        if not self.resume:
            return 0, None
        found = checkpoint.newest_whole(self.folder / "checkpoints", self.listener.say)
        if found is None:
            self.listener.say(f"{self.folder} holds no checkpoint to resume from: starting afresh")
            self.resume = False
            return 0, None
        newest, done = found
        if self.goal is None and (self.folder / PHASES).exists():
            message = f"{self.folder} holds a run that ends at a loss, by a batch that it has found"
            raise PlanError(message, hint="give until_loss again, or train without resume")
        if not self.elastic and (self.folder / BATCHES).exists():
            message = f"{self.folder} holds a run whose batch followed its ranks"
            raise PlanError(message, hint="give elastic=True again, or train without resume")
        if self._is_out(done):
            message = (
                f"{newest}: no better validation came in {self.job.patience}, and the run ended"
            )
            hint = "raise Job.patience, or leave it out"
            raise NothingLeftError(message, self.folder, hint=hint)
        if done >= self.num_steps and self.goal is None:
            hint = f"raise the number of steps: num_steps={done + 1} at least"
            message = f"{newest} has done {done} of {self.num_steps} steps"
            raise NothingLeftError(message, self.folder, hint=hint)
        self._check_micro_batches(done)
        return done, newest

    def _check_micro_batches(self, done: int) -> None:
        """Raise where a step has other micro-batches than before: the data would not go on.

        Raises:   PlanError: it has.
        """
        before, now = saved.kept_micro_batches(self.folder), self.job.micro_batches
        if before in (None, now) or self.goal is not None:
            return
        message = (
            f"a step of the run in {self.folder} has {before} micro-batches, and the job {now}"
        )
        where = f"after {done:,} steps micro-batch {done * before:,} of the data is next"
        hint = f"set micro_batches={before} again, or begin anew: without resume"
        raise PlanError(f"{message}: {where}, not {done * now:,}", hint=hint)

    def set_aside(self) -> None:
        """Move what an earlier run left in the folder to FOLDER.1, or FOLDER.2, ..."""
        folder = self.folder.absolute()
        earlier = (folder / "metrics.jsonl").exists() or any(
            (folder / "checkpoints").glob("step-*")
        )
        if self.resume or not earlier:
            return
        numbers = (folder.with_name(f"{folder.name}.{number}") for number in itertools.count(1))
        place = next(path for path in numbers if not path.exists())
        place.mkdir()
        for name in FILES:
            if (folder / name).exists():
                (folder / name).rename(place / name)
        self.listener.say(f"{self.folder} held an earlier run: it is kept in {place.name}")

    def trace(self) -> "Capture | None":
        """Return the step, traced; None where the model has to be trained as eager modules."""
        try:
            with noticing() as self.noticed:
                self.shapes = traced_shapes(self)
                captured = (
                    self.shapes[0].captured
                    if self.shapes
                    else traced(self.job, self.listener, rules=self.fixed.rules)
                )
        except GraphError as problem:
            if self.is_strict():
                raise
            self.untraced = problem.message
            self.listener.say(problem.message)
            self.listener.say("training it eagerly with plain data parallelism instead")
            return None
        self.listener.say(str(captured.graph))
        return captured

    def tell(self, captured: "Capture | None") -> None:
        """Say what a step is, and what else of the job a person should know before the first."""
        ranks, steps = self.fixed.ranks, self.num_steps if self.goal is None else None
        if captured is None:
            words = list(words_of_step(self.job, 0, steps, ranks))
        else:
            words = words_before(self.step_job, captured, self.noticed, steps)
        for line in words:
            self.listener.say(line)

    def choose(self, captured: "Capture", checkpoint: Path | None, found: "Examined") -> Choice:
        """Return the plan: given, that of the run to resume, or searched for."""
        if self.shapes:
            choice = chosen(self, partial(self._chosen, checkpoint=checkpoint, found=found))
        else:
            choice = self._chosen(captured, checkpoint, found)
        self.listener.say(str(choice.plan))
        return choice

    def _chosen(self, captured: "Capture", checkpoint: Path | None, found: "Examined") -> Choice:
        fixed, decisions = bounded(self.job, self.key, captured, found, self.fixed, self.listener)
        terms = ChoiceTerms(
            self.step_job,
            self.folder,
            self.there,
            asked=self.fixed,
            bounds=fixed,
            decisions=decisions,
            units=self.units,
            tries=self.care.trial,
            lets_go=self.elastic,
            has_shapes=bool(self.shapes),
            num_steps=self.num_steps,
        )
        kept = kept_choice(terms, captured) if checkpoint is not None else None
        if kept is not None and kept.basis is not None:
            self.basis = kept.basis
        if self.given_plan is not None:
            return given_choice(terms, captured, self.given_plan)
        if kept is not None:
            return kept.choice
        choice, self.basis = searched_choice(terms, captured, found.laws)
        return choice

    def divides_unasked(self, plan: Plan) -> bool:
        """Return whether ranks divide ops, and another plan may leave them whole."""
        return plan.tensor > 1 and self.fixed.tensor is None and self.given_plan is None

    def _undivided(
        self, captured: "Capture", checkpoint: Path | None, found: "Examined", problem: str
    ) -> Choice:
        """Return the best plan that divides no ops, in place of one that differs."""
        self.listener.say(f"training by a plan that divides no ops: {problem}")
        self.fixed = replace(self.fixed, tensor=1)
        return self.choose(captured, checkpoint, found)

    def clear(self, first_step: int, checkpoint: Path | None) -> None:
        """Remove what the run to go on from left after its checkpoint, or half-written."""
        from penstock.checkpoints.checkpoint import discard, set_aside

        discard(self.folder / "checkpoints")
        if checkpoint is not None:
            for aside in set_aside(self.folder / "checkpoints", first_step):
                self.listener.say(f"what is damaged is kept as {aside}")
        count = self.job.micro_batches if self.goal is None else 0
        saved.keep_job(self.folder, self.text, self.num_steps, count)
        same_run.keep_facts(self.folder, self.facts)
        old = ("events.jsonl", ENDED) if checkpoint else ("replans.json", "events.jsonl", ENDED)
        for name in ("summary.json", "report.html", "measured.trace.json", *old):
            (self.folder / name).unlink(missing_ok=True)
        if checkpoint is None:
            return
        metrics = self.folder / "metrics.jsonl"
        rows = metrics.read_text().splitlines() if metrics.exists() else []
        kept = [row for row in rows if row.endswith("}") and json.loads(row)["step"] <= first_step]
        write_text(metrics, "".join(f"{row}\n" for row in kept))
        if self.resume:
            self.listener.say(f"resuming after step {first_step} from {checkpoint}")

    # -- running ----------------------------------------------------------------------------------

    def train(
        self,
        choice: Choice,
        first_step: int,
        checkpoint: Path | None,
        launch: "Launch",
        *,
        board: "Board | None" = None,
        leader: bool = True,
    ) -> Trained | None:
        """Run all steps; return what they gave where this process leads.

        board:    what the ranks see; None: they are threads or children of this process.
        """
        about = choice, first_step, checkpoint, launch
        ran = self.ran(*about, board=board, leader=leader)
        return None if ran is None else self.finished(*ran)

    def ran(
        self,
        choice: Choice,
        first_step: int,
        checkpoint: Path | None,
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
            task = replace(self.task(choice, first_step, checkpoint, board), guide=guide)
            if is_here:  # elsewhere each rank compiles what is its own
                task.compile_ahead()
            run, ranks = partial(work, task), choice.plan.total_ranks
            launch = partial(launch, groups=task.groups)
            if not leader:
                launch(run, ranks, _unheard)
                return None
            self.clear(first_step, checkpoint)
            with audited_run.audited_by_plan(self, choice, board, first_step):
                outcome = self.run_steps(run, ranks, choice, first_step, launch)
            audited_run.check(self, first_step, checkpoint)
            if outcome is None:
                raise Stopped(board.asked(), self.resumption())
        return outcome, self._followed(choice)

    def heed(self, board: "Board") -> None:
        """Let the goal, once it is reached, end the ranks of a board."""
        if self.goal is not None:
            self.goal.asks = partial(board.ask_to_stop, REACHED)

    def follow(self, *, resume: bool, here: bool) -> None:
        """Let the run follow its policy, if it has one.

        here:     processes of this host are its machines, if no command provides others.
        Raises:   FleetError: the policy cannot be followed.
        """
        for name in () if resume else (POLICY, WANTED, DECISIONS):  # of a run that never began
            (self.folder / name).unlink(missing_ok=True)
        if self.policy is not None:
            from penstock.pilot.machine_policy import begin_following

            with self.listener.busy("fitting the policy"):
                about = self.folder, self.policy, self.num_steps
                begin_following(*about, resume=resume, here=here)
        if command := saved.policy_command(self.folder):
            self.listener.say(
                f"machines come by the policy's command: sh -c {shlex.quote(command)}"
            )

    def followed(self) -> Choice:
        """Return the choice by which an elastic run ended."""
        plan = Plan.load(self.folder / "plan.json")
        ways = self.basis.ways if self.basis else ()
        way = next((way for way in ways if way.is_of(plan)), None)
        if way is not None:
            return Choice(way.job, way.captured, plan)
        captured = self.trace()
        assert captured is not None, "it was traced before"
        return Choice(*for_plan(self.job, plan, captured, self.listener), plan)

    def _guide(self, choice: Choice, board: "Board", *, leads: bool | None) -> Replanner | None:
        """Return what makes the plan again during the run; None where nothing does.

        leads:    as in Replanner.
        """
        plan, files = choice.plan, self.folder / "cluster.toml"
        if plan.averages:  # with other replicas it would train otherwise
            return None
        if self.basis is None or plan.total_ranks == 1 or not self.care.replan:
            return None
        if leads is not False and not files.exists():
            return None
        basis, last, windows = self.basis, self.num_steps, self.windows
        if plan.terms.compiled and leads is not False:  # only that profile knows its segments
            profiles = load_profiles(self.folder / "profile.json")
            own = Joining(plan.terms.joined, *choice[:2], profiles)
            basis = basis._replace(ways=(own,))
        run = basis, choice, windows, board
        return Replanner(*run, folder=self.folder, last_step=last, leads=leads)

    def _followed(self, choice: Choice) -> Choice:
        """Return the choice by which the run ended: another one where the plan was made again."""
        made = replans_in(self.folder) if self.basis is not None else []
        if not (made and self.basis):
            return choice
        for row in replanned(self.folder):
            self.listener.say("\n".join(words_of(row)))
        plan = Plan.load(self.folder / "plan.json")
        way = next(way for way in self.basis.ways if way.is_of(plan))
        return Choice(way.job, way.captured, plan)

    def _is_over(self, step: int) -> bool:
        """Return whether a run is over that has done so many steps."""
        is_reached = self.goal is not None and self.goal.is_reached
        return step == self.num_steps or is_reached or self._is_out(step)

    def _is_out(self, step: int) -> bool:
        """Return whether the job waits no longer for a better validation after so many steps."""
        from penstock.runtime.validate import is_out_of_patience

        every = self.job.validate_every
        is_validated = every is not None and step % every == 0
        return is_validated and is_out_of_patience(self.job, self.folder / "checkpoints", step)

    def finished(self, outcome: "Outcome", choice: Choice | None) -> Trained:
        """Write what a run leaves in its folder; return what it gave."""
        done = outcome.steps[-1].step + 1
        if done < self.num_steps and self._is_out(done):
            words = f"no better {best_of(self.job.best).figure} in {self.job.patience} validations"
            self.listener.say(f"ended after step {done} of {self.num_steps}: {words}")
        steps = self.num_steps if self.goal is None and not self._is_out(done) else done
        about = self.folder, self.job, steps, outcome, choice
        return finished(*about, self.checked, self.listener, self.goal, self.audited)

    def resumption(self) -> str:
        """Return how a run that was stopped goes on."""
        steps = self.num_steps if self.num_steps != self.job.num_steps else None
        replaces = [rule for rule in self.fixed.rules if rule.verb == "replace"]
        goal = None if self.goal is None else self.goal.goal
        script = script_of(self.text)
        told = resumption(script.job, self.folder, steps, replaces, goal, url=self.mirror)
        if self.elastic and self.text:
            ranks = self.fixed.ranks if self.job.batch_by_ranks else None  # a share is part of them
            told += " --elastic" + (" --set tls=true" if self.tls else "")
            told += "" if ranks is None else f" --ranks {ranks}"
        told += f" --set sums={self.fixed.sums}" if self.fixed.sums and self.text else ""
        return f"{told} -- {script.tail}" if script.arguments else told

    @property
    def job_terms(self) -> JobTerms:
        """Return what makes the job besides the text that names it."""
        return JobTerms(self.weights, self.fixed.rules, self.fixed.sums or "")

    def task_terms(self, plan: Plan) -> TaskTerms:
        """Return what ranks have alike, whichever plan they run.

        plan:     by which the run begins, that is audited or not.
        """
        return TaskTerms(
            folder=self.folder,
            num_steps=self.num_steps,
            every=self.every,
            keep=self.keep,
            noise_every=self.noise_every,
            audits=audited_run.audits_of(self, plan),
            forgets=self.care.forget,
        )

    def task(
        self, choice: Choice, first_step: int, checkpoint: Path | None, board: "Board"
    ) -> "Task":
        """Return what ranks do of a plan from a step on."""
        return task_of(self.task_terms(choice.plan), choice, first_step, checkpoint, board)

    def windows(self, choice: Choice, first_step: int) -> "Windows":
        """Return the windows of all steps that are left."""
        return windows_from(self.task_terms(choice.plan), choice, first_step)

    def run_steps(
        self,
        work: "Work",
        ranks: int,
        choice: Choice | None,
        first_step: int,
        launch: "Launch",
    ) -> "Outcome | None":
        """Return what the run gave; None if it was asked to stop before its last step."""
        from penstock.checkpoints.checkpoint import latest, load
        from penstock.runtime.left_steps import complete_and_discard
        from penstock.runtime.run import Steps, outcome_of

        samples, tokens, micro_batches, predicted = sizes(self.job, choice)
        sizes_of = sizes_by_step(choice, samples, tokens)
        heard = self.heard_by(micro_batches)
        with (
            self.listener.steps(first_step, self.num_steps, predicted) as show,
            lines(self.folder / "metrics.jsonl") as write,
        ):

            def done(step: "StepResult") -> None:
                row = row_of(step, *sizes_of(step.step))
                for hear in (write, show, *heard):
                    hear(row)

            steps = Steps(micro_batches, done, self.awaits)
            try:
                results = launch(work, ranks, steps.add)
            except KeyboardInterrupt:
                self.tell_newest()
                raise
            except RunError as problem:
                complete_and_discard(self.folder / "checkpoints")
                job = self._followed(choice).job if choice else self.job
                raise explained(self.folder, job, problem, self.listener) from problem.__cause__
            steps.flush()
        newest = latest(self.folder / "checkpoints")
        assert newest is not None, "a run ends with a checkpoint"
        last = load(newest)
        return outcome_of(results, steps, last.tensors) if self._is_over(last.step) else None

    def heard_by(self, micro_batches: int) -> list[Callable[[Row], object]]:
        """Return who is told the rows of steps of so many micro-batches."""
        goal = [] if self.goal is None else [partial(self.goal.hear, micro_batches=micro_batches)]
        return [*self.job.writers, *([self.on_step] if self.on_step else []), *goal]

    def awaits(self, step: int) -> bool:
        """Return whether a validation is told of a step, if it is run at all and not stopped at."""
        every = self.job.validate_every
        return every is not None and ((step + 1) % every == 0 or step + 1 == self.num_steps)

    def tell_newest(self) -> None:
        """Say from which checkpoint a run goes on that ended at once."""
        from penstock.checkpoints.checkpoint import discard, latest

        discard(self.folder / "checkpoints")
        newest = latest(self.folder / "checkpoints")
        none = f"no checkpoint: none is written before {self.every}"
        self.listener.say(f"it can be resumed from {newest}" if newest else none)

    def train_eagerly(self, first_step: int, checkpoint: Path | None, found: "Examined") -> Trained:
        """Train without a plan: as replicas, or in one process by the plain loop.

        Raises:   PlanError: ranks are to come and go, or a replica is larger than a rank may be.
        """
        if self.elastic:
            why = self.untraced or found.one_process or found.no_plan
            why = why or "its plan differs from the plain loop"
            raise PlanError(f"ranks that come and go need a plan: {why}", hint=WITHOUT_ELASTIC)
        ranks = 1 if found.one_process else self.fixed.ranks or Cluster.here().num_ranks
        check_memory(self.job, self.fixed.memory, ranks, self.untraced or found.one_process)
        try:
            return self._train_eagerly(first_step, checkpoint, found)
        except DiffersError as problem:
            is_new = checkpoint is None
            return audited_run.go_on(self, None, found, problem, is_new=is_new)
        except AloneError as problem:
            return go_on_alone(self, found, problem, (first_step, checkpoint))

    def _train_eagerly(
        self, first_step: int, checkpoint: Path | None, found: "Examined"
    ) -> Trained:
        from penstock.runtime.launch import local_launcher

        most = self.fixed.ranks or Cluster.here().num_ranks
        about = self.job, found, most, range(first_step, self.num_steps), checkpoint
        ranks, self.checked = proved_eager(*about, self.care, self.listener)
        own = Replicas(found, ranks, first_step, checkpoint)
        outcome = run_eagerly(self, own, local_launcher(ranks))
        assert outcome is not None, "this process leads"
        return self.finished(outcome, None)


if TYPE_CHECKING:
    from penstock.checkpoints.control import Board
    from penstock.examine.examine import Examined
    from penstock.runtime.launch import Work
    from penstock.runtime.windows import Windows
    from penstock.runtime.worker import RankResult, Task

    Launch = Callable[..., list[RankResult]]  # (work, ranks, report, *, groups)


def _unheard(step: "StepResult") -> None:
    """Let a report pass: another rank listens."""
