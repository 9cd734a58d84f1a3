"""penstock train: the main job, from an unmodified model to a trained one and a report."""

import json
import os
import shutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import face, view
from penstock.cli.prepare import machines, profiled
from penstock.cluster import Cluster
from penstock.errors import GraphError, PlanError
from penstock.files import write_text
from penstock.job import Job, load_job
from penstock.plan import Plan, check_fits
from penstock.profile.store import default_folder
from penstock.report import report_of
from penstock.search import Wish, evaluate, search

if TYPE_CHECKING:
    from penstock.graph.trace import Capture
    from penstock.profile import Profile
    from penstock.program.program import Program
    from penstock.runtime.rank import StepResult
    from penstock.runtime.run import Outcome

CHECKPOINT_EVERY = 100  # steps; and at the end
FIRST_WINDOW = 4  # steps of an asynchronous schedule that are run, and watched, before the rest


def train(
    job: Annotated[str, typer.Argument(metavar="JOB", help="file.py[:name] or module:name")],
    plan: Annotated[Path | None, typer.Option(help="train by this plan")] = None,
    schedule: Annotated[str | None, typer.Option(help="search only plans with this schedule")] = None,
    stages: Annotated[int | None, typer.Option(min=1, help="search only plans with so many")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="steps in all; default: the job's")] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="default: what the search finds")] = None,
    out: Annotated[Path | None, typer.Option(help="default: runs/NAME of the job's file")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on from the last checkpoint")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the summary as JSON")] = False,
) -> None:
    """Train: without a plan trace, measure, search, run, report.

    Example: penstock train examples/gpt.py --out runs/gpt
    """
    import torch

    from penstock.runtime.launch import under_torchrun

    torch.set_num_threads(1)
    loaded = load_job(job)
    folder = out or Path("runs") / _name(job)
    num_steps = steps or loaded.num_steps
    wish = Wish(ranks=ranks, schedule=schedule, stages=stages)
    session = Session(loaded, job, folder, num_steps, wish, plan, resume)
    summary = session.follow_torchrun() if under_torchrun() else session.lead()
    if as_json and summary is not None:
        print(json.dumps(summary))


def _name(job: str) -> str:
    place, _, name = job.rpartition(":") if ":" in job else (job, "", "")
    stem = Path(place).stem.rpartition(".")[2] or "job"
    return f"{stem}-{name}" if name else stem


@dataclass
class Session:
    """One invocation of `penstock train`."""

    job: Job
    text: str
    folder: Path
    num_steps: int
    wish: Wish
    given_plan: Path | None
    resume: bool

    # -- the phases -------------------------------------------------------------------------------

    def lead(self) -> dict[str, object]:
        """Run all phases in this process, ranks as processes of this host."""
        from penstock.runtime.launch import run_processes

        first_step, checkpoint = self.start()
        captured = self.trace()
        if captured is None:
            return self._train_eagerly(first_step, checkpoint)
        plan = self.plan(captured, checkpoint)
        summary = self.train(captured, plan, first_step, checkpoint, run_processes)
        assert summary is not None
        return summary

    def follow_torchrun(self) -> dict[str, object] | None:
        """Run as one of torchrun's ranks: rank 0 plans, all agree, rank 0 reports."""
        from penstock.cli.torchrun import train_under_torchrun

        return train_under_torchrun(self)

    def start(self, *, leader: bool = True) -> tuple[int, Path | None]:
        """Return the first step and the checkpoint to start from; clear what an old run left.

        Only the leader touches files.
        Raises:   PlanError: nothing to resume from, or nothing left to do.
        """
        from penstock.runtime import checkpoint

        checkpoints = self.folder / "checkpoints"
        newest = checkpoint.latest(checkpoints) if self.resume else None
        if self.resume and newest is None:
            hint = "train without --resume first, or give the --out of that run"
            raise PlanError(f"{self.folder} holds no checkpoint to resume from", hint=hint)
        if newest is None and not leader:
            return 0, None
        self.folder.mkdir(parents=True, exist_ok=True)
        if leader:
            checkpoint.discard(checkpoints)
        if newest is None:
            shutil.rmtree(checkpoints, ignore_errors=True)
            for name in ("metrics.jsonl", "summary.json", "report.html", "measured.trace.json"):
                (self.folder / name).unlink(missing_ok=True)
            return 0, None
        done = checkpoint.load(newest).step
        if done >= self.num_steps:
            hint = f"give --steps more than {done}"
            raise PlanError(f"{newest} has done {done} of {self.num_steps} steps", hint=hint)
        if leader:
            self._keep_metrics(done)
            face.say(f"resuming after step {done} from {newest}")
        return done, newest

    def _keep_metrics(self, done: int) -> None:
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        kept = [line for line in lines if json.loads(line)["step"] <= done]
        write_text(path, "".join(f"{line}\n" for line in kept))

    def trace(self) -> "Capture | None":
        from penstock.graph.trace import capture

        with face.busy("tracing the step"):
            try:
                captured = capture(self.job)
            except GraphError as problem:
                if self.given_plan is not None or self.wish.schedule or self.wish.stages:
                    raise
                face.say(problem.message)
                face.say("training it as eager modules under plain data parallelism instead")
                return None
        face.say(str(captured.graph))
        return captured

    def plan(self, captured: "Capture", checkpoint: Path | None, ranks: int | None = None) -> Plan:
        """Return the plan: given, that of the run to resume, or searched for (on `ranks`)."""
        if ranks is not None:
            self.wish = replace(self.wish, ranks=ranks)
        path = self.folder / "plan.json"
        free = not (self.wish.schedule or self.wish.stages)
        if self.given_plan is not None:
            plan = Plan.load(self.given_plan)
            check_fits(plan, captured.graph)
            self._predict(captured, plan, self.given_plan.parent)
        elif checkpoint is not None and free and path.exists():
            plan = Plan.load(path)
            check_fits(plan, captured.graph)
            if self.wish.ranks not in (None, plan.total_ranks):
                plan = self._search(captured)
        else:
            plan = self._search(captured)
        view.show_plan(plan)
        return plan

    def _search(self, captured: "Capture") -> Plan:
        cluster = machines(None, self.wish.ranks)
        profile = profiled(captured, self.job, cluster)
        with face.progress("searching") as update:
            plan, _ = search(
                captured.graph,
                profile,
                cluster,
                micro_batches=self.job.micro_batches,
                clip=self.job.clip_norm is not None,
                wish=self.wish,
                progress=update,
            )
        self._save_plan(captured, plan, profile, cluster)
        return plan

    def _predict(self, captured: "Capture", plan: Plan, beside: Path) -> None:
        """Simulate a plan that was given, so that the run can be held against it."""
        cluster = machines(None, plan.total_ranks)
        profile = profiled(captured, self.job, cluster)
        self._save_plan(captured, plan, profile, cluster)

    def _save_plan(self, captured: "Capture", plan: Plan, profile: "Profile", cluster: Cluster) -> None:
        _, timeline = evaluate(captured.graph, profile, cluster, plan)
        plan.save(self.folder / "plan.json")
        captured.graph.save(self.folder / "graph.json")
        profile.save(self.folder / "profile.json")
        cluster.save(self.folder / "cluster.toml")
        timeline.save(self.folder / "predicted.trace.json")

    # -- running ----------------------------------------------------------------------------------

    def train(  # noqa: PLR0913 - what the phases before it found
        self,
        captured: "Capture",
        plan: Plan,
        first_step: int,
        checkpoint: Path | None,
        launch: "Launch",
        *,
        leader: bool = True,
    ) -> dict[str, object] | None:
        """Run all steps; return the summary where this process leads."""
        from penstock.program.lower_plan import stages_of
        from penstock.runtime.worker import Task, work

        stages = stages_of(plan, captured.graph)
        task = Task(
            capture=captured,
            stages=stages,
            job=self.job,
            windows=self.windows(captured, plan, first_step),
            replicas=plan.replicas,
            checkpoints=self.folder / "checkpoints",
            checkpoint_every=CHECKPOINT_EVERY,
            resume=checkpoint,
            memory_window=_memory_window(plan, self.num_steps - first_step),
        )
        run = partial(work, task)
        sums = {reduce.ranks for program, _ in task.windows for reduce in program.code.reductions}
        launch = partial(launch, groups=[*sorted(sums), tuple(range(plan.total_ranks))])
        if not leader:
            launch(run, plan.total_ranks, lambda step: None)
            return None
        outcome = self._run(run, plan.total_ranks, plan, captured, first_step, launch)
        return self._finish(outcome, plan, captured)

    def windows(
        self, captured: "Capture", plan: Plan, first_step: int
    ) -> "tuple[tuple[Program, int], ...]":
        """Return the windows that make up the steps that are left.

        A synchronous program is one step.  An asynchronous one drains only where a checkpoint
        is due, and once at the start, after a few steps that are watched for their memory.
        """
        from penstock.program.lower_plan import is_asynchronous, lower_plan

        if not is_asynchronous(plan):
            program = lower_plan(plan, captured.graph)
            return tuple((program, step) for step in range(first_step, self.num_steps))
        made: dict[int, Program] = {}
        windows: list[tuple[Program, int]] = []
        step = first_step
        while step < self.num_steps:
            until = min(self.num_steps, (step // CHECKPOINT_EVERY + 1) * CHECKPOINT_EVERY)
            length = min(FIRST_WINDOW, until - step) if step == first_step else until - step
            if length not in made:
                made[length] = lower_plan(plan, captured.graph, num_steps=length)
            windows.append((made[length], step))
            step += length
        return tuple(windows)

    def _run(
        self,
        work: "Work",
        ranks: int,
        plan: Plan | None,
        captured: "Capture | None",
        first_step: int,
        launch: "Launch",
    ) -> "Outcome":
        from penstock.runtime.checkpoint import latest, load
        from penstock.runtime.run import Steps, outcome_of

        replicas = plan.replicas if plan else ranks
        shape = captured.graph if captured else None
        scale = self.job.micro_batches
        samples, tokens = (shape.samples * scale, shape.tokens * scale) if shape else (0, 0)
        predicted = plan.predicted.step_s if plan and plan.predicted else None
        with view.training(first_step, self.num_steps, predicted) as show, view.lines(self.folder / "metrics.jsonl") as write:

            def done(step: "StepResult") -> None:
                row = _row(step, samples, tokens)
                write(row)
                show(row)

            steps = Steps(replicas, done)
            results = launch(work, ranks, steps.add)
        newest = latest(self.folder / "checkpoints")
        assert newest is not None, "a run ends with a checkpoint"
        return outcome_of(results, steps, load(newest).tensors)

    def _train_eagerly(self, first_step: int, checkpoint: Path | None) -> dict[str, object]:
        from penstock.runtime.eager import EagerTask, replicas_of, work_eagerly
        from penstock.runtime.launch import run_processes

        ranks = replicas_of(self.job, self.wish.ranks or Cluster.here().num_ranks)
        task = EagerTask(
            self.job,
            first_step,
            self.num_steps - first_step,
            self.folder / "checkpoints",
            CHECKPOINT_EVERY,
            checkpoint,
        )
        work = partial(work_eagerly, task)
        outcome = self._run(work, ranks, None, None, first_step, run_processes)
        return self._finish(outcome, None, None)

    # -- after the last step ------------------------------------------------------------------------

    def _finish(
        self, outcome: "Outcome", plan: Plan | None, captured: "Capture | None"
    ) -> dict[str, object]:
        outcome.timeline.save(self.folder / "measured.trace.json")
        predicted = plan.predicted if plan else None
        last = statistics.fmean(s.loss for s in outcome.steps[-10:] if s.loss is not None)
        summary: dict[str, object] = {
            "val_loss": self._validate(outcome, captured),
            "train_loss": last,
            "steps": self.num_steps,
            "step_s_predicted": predicted.step_s if predicted else None,
            "step_s_measured": outcome.step_s,
            "peak_bytes_predicted": list(predicted.peak_bytes) if predicted else None,
            "peak_bytes_measured": list(outcome.peak_bytes),
            "live_versions": list(outcome.live_versions),
            **(dict(self.job.facts()) if self.job.facts else {}),
        }
        write_text(self.folder / "summary.json", json.dumps(summary, indent=2) + "\n")
        report_of(self.folder).save(self.folder / "report.html")
        view.show_summary(summary, self.folder)
        return summary

    def _validate(self, outcome: "Outcome", captured: "Capture | None") -> float | None:
        """Return the mean loss over the validation micro-batches, in evaluation mode."""
        import torch

        from penstock.graph.trace import build, loss_of
        from penstock.runtime.eager import load_model

        if self.job.validation is None:
            return None
        model = captured.model if captured else build(self.job)[0]
        load_model(model, outcome.weights)
        batches = list(self.job.validation())
        was_training = model.training
        model.eval()
        torch.set_num_threads(os.cpu_count() or 1)
        losses: list[float] = []
        with torch.no_grad(), face.progress("validating") as update:
            for number, batch in enumerate(batches, 1):
                losses.append(float(loss_of(self.job, model, batch)))
                update(number, len(batches))
        torch.set_num_threads(1)
        model.train(was_training)
        return statistics.fmean(losses) if losses else None


if TYPE_CHECKING:
    from penstock.runtime.launch import Work
    from penstock.runtime.worker import RankResult

    Launch = Callable[..., Sequence[RankResult]]  # (work, ranks, report, *, groups)


def _row(step: "StepResult", samples: int, tokens: int) -> dict[str, float | int | None]:
    assert step.loss is not None
    return {
        "step": step.step + 1,
        "loss": step.loss,
        "seconds": step.seconds,
        "samples_per_second": samples / step.seconds if samples else None,
        "tokens_per_second": tokens / step.seconds if tokens else None,
    }


def _memory_window(plan: Plan, num_steps: int) -> int:
    """Return the window to run under the memory profiler: the first complete, short one."""
    from penstock.program.lower_plan import is_asynchronous

    return 0 if is_asynchronous(plan) else min(1, num_steps - 1)
