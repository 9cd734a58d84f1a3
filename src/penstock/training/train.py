"""Train: the main job from Python, as `penstock train` does it."""

import math
import os
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from penstock import _compat
from penstock.cluster.cluster import Cluster
from penstock.device import here
from penstock.elastic.notice import place_of_notice
from penstock.errors import JobError, PlanError, RunError
from penstock.fleet.batch import Least
from penstock.job import Job
from penstock.plan.plan import Plan, Units
from penstock.program.passes.offload import Offloaded
from penstock.rules.rule import Rule, load
from penstock.runtime.launch import under_torchrun
from penstock.schedule.recipe import AnySchedule
from penstock.script import as_started, script_of, with_arguments
from penstock.search.shapes import Fixed
from penstock.training import ask
from penstock.training.audits import parse_audit
from penstock.training.choose import Machines
from penstock.training.goal import Goal, GoalWatch
from penstock.training.joining import is_under_way, join_on_host
from penstock.training.listener import SILENT, Listener, Row, SaysOnly
from penstock.training.loading import JobTerms, loaded
from penstock.training.lock import locked
from penstock.training.mirror import url_of
from penstock.training.prepare import started_on
from penstock.training.saved import check_policy, text_in
from penstock.training.session import Session
from penstock.training.settle import CheckOptions
from penstock.training.tensor import check_alone
from penstock.training.torchrun import train_under_torchrun
from penstock.training.view import TERMINAL
from penstock.training.wanted import POLICY
from penstock.training.windows import (
    EVERY,
    CheckpointInterval,
    parse_every,
    parse_keep,
    parse_seconds,
)

if TYPE_CHECKING:
    from collections.abc import Generator

    from penstock.training.results import Trained

_OF_PLANS = (
    "leave out --plan, --schedule, --stages, --units, --offload, --memory, --post-validation, "
    "--with"
)


def train(  # long: one for each flag of the command  # noqa: PLR0913
    job: Job | str,
    *,
    arguments: Sequence[str] = (),
    cluster: Cluster | Path | str | None = None,
    plan: Plan | Path | str | None = None,
    ranks: int | None = None,
    stages: int | None = None,
    schedule: AnySchedule | str | None = None,
    tensor: int = 1,
    units: Units | None = None,
    offload: Offloaded | None = None,
    memory: str | int | tuple[int, ...] | None = None,
    post_validation: bool = False,
    rules: Sequence[Rule] | Path | str = (),
    num_steps: int | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    weights: Path | str | None = None,
    checkpoint_every: int | str | None = None,
    keep: str = "2",
    mtbf: str | None = None,
    check: bool = True,
    strict: bool = False,
    eager: bool = False,
    trial: bool = True,
    replan: bool = True,
    elastic: bool = False,
    policy: Path | str | None = None,
    until_loss: float | None = None,
    objective: Least = "time",
    audit: str = "1%",
    forget_state: bool = False,
    on_step: Callable[[Row], None] | None = None,
    listener: Listener | None = TERMINAL,
) -> "Trained | None":
    """Train a job: examine, trace, measure, search for a plan, prove it, run it and report.

    Every rank is a process of this host; under torchrun every rank calls it, and all but rank 0
    get None.

    job:               a record, or "file.py[:name]" or "module[:name]".
    arguments:         of the script that `job` names, for its own parser.
    cluster:           the machines it runs on, or their file; default: this one, measured.
    plan:              train by this one, or by that in a file; default: searched for, with as many
                       `ranks`, `stages` and with that `schedule` where they are given: a name,
                       a file, or a schedule.
    tensor:            ranks that divide the ops of every stage among them (docs/tensor.md).
    units:             into which stages are cut: "block", one for each block, or at most that many
                       of a stage; default: into none.
    offload:           what is in far memory while not needed: "state", "activations", "both",
                       "weights" (these, gradients and state) or "all".
    memory:            the most bytes that a rank may hold, or a size such as "60MiB", or several,
                           of one rank each; default:
                       what its device has.
    rules:             to which every plan keeps, the one given too, or their file (docs/rules.md).
    num_steps:         in all; default: the job's.
    out:               folder of the run; default: runs/NAME of the job's file, or runs/job.  A URL
                       of fsspec's, s3://BUCKET/NAME: it is runs/NAME, and is kept there, too.
    resume:            continue from the last checkpoint in `out`, if there is one.
    weights:           a file or folder of safetensors that the model begins with, by its own names.
    checkpoint_every:  500 (steps), "30s", "10m" or "2h"; default: by `mtbf` or that of the cluster,
                       where it is known, else 100 steps.
    keep:              which checkpoints stay: "3" (the newest), "3,every=1000" (steps), "no-best".
    mtbf:              mean time between failures: "3h".
    check:             whether the job is examined, and two steps are compared with the plain loop.
    strict:            whether a job that no plan trains as its author wrote it is refused, instead
                       of trained as eager replicas or in one process.
    eager:             train without a plan: plain data parallelism.
    post_validation:   whether ranks update before the norm that clips is known, and take that back
                       where it was wrong.
    trial:             whether the best few plans take turns at some real steps first, if the run is
                       long enough for that; the fastest is run.
    replan:            whether a plan that was searched for is made again during the run, where
                       what its ranks take has moved and that pays (docs/run.md).
    elastic:           whether the run goes on when ranks are lost (docs/elastic.md).
    policy:            a file that `penstock fleet advise --policy-file` wrote: how many machines
                       the run wants at any time, by the market as it goes on (docs/fleet.md).
    until_loss:        ends the run: once validations, or else the mean of newest steps, have come
                       down to it; until then it looks for ranks and batch (docs/until.md).
    audit:             how much of the processor time goes into making steps again by the plain loop
                       all through the run: "1%"; "0": none.  Where one differs, the run goes back
                       to the last audited checkpoint and on by what is right; "1%,stop" ends it.
    objective:         what these are to make least: "time" or "cost".
    forget_state:      whether a run goes on without the state of the job that no checkpoint holds.
    on_step:           called after each step with its row: step, loss, seconds, figures, ...
    listener:          learns what is being done; default: prints on stderr plan, phases, progress,
                       figures and folder, as `penstock train` does.  None: nothing is printed.
    Raises:   JobError, PlanError: the job, or what is requested, is wrong.
              RunError: another run is in the folder; a rank failed; what differs with `strict`.
              Stopped (a KeyboardInterrupt): a signal ended it after a checkpoint.
    """

    def make() -> Session:  # long: what was asked, flag by flag
        asks = {"--ranks": ranks, "--stages": stages, "--schedule": schedule, "--offload": offload}
        asks |= {"--post-validation": post_validation, "--memory": memory}
        asks |= {"--tensor": tensor if tensor > 1 else None}
        check_alone(
            tensor,
            {"--units": units, "--offload": offload, "--post-validation": post_validation}
            | {"--elastic": elastic, "--until-loss": until_loss is not None, "--eager": eager}
            | {"--with": rules},
        )
        wished = plan or schedule or stages or units or offload or memory or post_validation
        _check_elastic(elastic, eager=eager, mtbf=mtbf)
        if eager and (wished or rules):
            raise PlanError("--eager trains without a plan", hint=_OF_PLANS)
        if plan is not None:
            ask.check_left_out(asks)
        asked = ask.schedule_asked(schedule) if isinstance(schedule, str) else schedule
        folder = _folder_of(job, out)
        kept = folder / POLICY if resume and elastic and (folder / POLICY).exists() else None
        if policy is None and kept is not None:
            check_policy(folder)
        follows = _policy(policy or kept, elastic=elastic, until=until_loss)
        there = None if cluster is None else started_on(cluster)
        chosen = plan if plan is None or isinstance(plan, Plan) else Plan.load(plan)
        said = load(rules) if isinstance(rules, Path | str) else tuple(rules)
        with heard.busy(f"loading {script_of(job).job if isinstance(job, str) else 'the job'}"):
            found = loaded(job, JobTerms("" if weights is None else str(weights), said))
        ask.check_fits(asked, found.job, post_validation=post_validation)
        goal = _goal(until_loss, objective, found.job)
        if goal is not None and found.job.batch_by_ranks:
            message = (
                "--until-loss finds the batch, and Job.batch_by_ranks lets it follow the ranks"
            )
            raise PlanError(message, hint="leave out one of them")
        return Session(
            job=found.job,
            author=found.author,
            text=job if isinstance(job, str) else "",
            weights="" if weights is None else str(weights),
            folder=folder,
            num_steps=num_steps or found.job.num_steps,
            fixed=Fixed(
                ranks=ranks if follows is None or plan or cluster else ranks or follows,
                schedule=asked,
                stages=stages or (1 if elastic and found.job.batch_by_ranks else None),
                offload=offload,
                memory=ask.memory_asked(memory),
                post_validation=post_validation,
                rules=said,
                whole=elastic,
                tensor=tensor,
            ),
            given_plan=chosen,
            resume=resume,
            there=Machines(there, listener=heard),
            every=_every(checkpoint_every, mtbf, None if elastic else there, heard),
            keep=parse_keep(keep),
            care=CheckOptions(check, strict, eager, trial, replan, forget_state),
            on_step=on_step,
            units=ask.units_asked(None if units is None else str(units)),
            elastic=elastic,
            policy=None if policy is None else Path(policy),
            goal=goal,
            mirror=url_of(out),
            audit=parse_audit(audit),
        )

    def in_hand(trained: "Trained | None") -> "Trained | None":
        if trained is not None and isinstance(job, Job):  # its own module may be in use here
            trained.module()
        if trained is not None:
            heard.finished(trained)
        return trained

    heard = _heard_by(listener)
    _compat.let_sockets_have_no_files()
    here().enter()  # before any code of the job's: it may mean the device that is current
    job = _with_arguments(job, arguments)
    if resume and isinstance(job, str):
        job = _as_before(job, _folder_of(job, out), heard)
    with _one_thread(), as_started(job if isinstance(job, str) else ""):
        if not under_torchrun():
            _check_free(_folder_of(job, out))  # before anything that takes time
            return in_hand(_train_here(make()))
        if elastic and is_under_way(folder := _folder_of(job, out)):
            named = job if isinstance(job, str) else None
            join_on_host(folder, heard, named)  # its host was lost, and is there again
            return None
        return in_hand(train_under_torchrun(make))


def _heard_by(listener: Listener | None) -> Listener:
    """Return who learns what this process does: of ranks that torchrun started, the first tells."""
    if listener is None:
        return SILENT
    is_first = not under_torchrun() or os.environ["RANK"] == "0"
    return listener if is_first else SaysOnly(listener)


def _with_arguments(job: Job | str, arguments: Sequence[str]) -> Job | str:
    """Return what names the job with the arguments of its script.

    Raises:   JobError: no script is named.
    """
    if not arguments:
        return job
    if isinstance(job, Job):
        hint = 'name the file: ps.train("script.py", arguments=[...])'
        raise JobError("a job that is a record has read its arguments already", hint=hint)
    return with_arguments(job, arguments)


def _as_before(text: str, folder: Path, listener: Listener) -> str:
    """Return what names the job of a run that goes on, with its arguments if there are no others.

    Raises:   JobError: the run's own file is damaged.
    """
    script, before = script_of(text), script_of(text_in(folder))
    if script.arguments or before.job != script.job or not before.arguments:
        return text
    listener.say(f"arguments of the script as before: {before.tail}")
    return str(before)


def _goal(loss: float | None, least: Least, job: Job) -> GoalWatch | None:
    """Return what watches for the loss at which a run ends; None: it takes all its steps.

    Raises:   PlanError: the loss is no number; what is to be least is asked for without it.
    """
    if loss is None:
        if least != "time":
            hint = "give --until-loss, or plan with `penstock plan --objective cost`"
            raise PlanError(f"--objective {least} is that of a run to a loss", hint=hint)
        return None
    if not math.isfinite(loss):
        raise PlanError(f"--until-loss is {loss}, no loss", hint="write --until-loss 2.1")
    return GoalWatch.of_job(Goal(loss, least), job)


def _policy(path: Path | str | None, *, elastic: bool, until: float | None) -> int | None:
    """Return how many machines a policy asks for; None: none is followed.

    Raises:   PlanError: ranks cannot come and go.  FleetError: the file is damaged.
    """
    if path is None:
        return None
    if not elastic or until is not None:
        message = f"--policy {path} lets machines come and go, and"
        what = "the run ends at a loss" if elastic else "the run is not elastic"
        hint = "leave out --until-loss" if elastic else "give --elastic, too"
        raise PlanError(f"{message} {what}", hint=hint)
    from penstock.fleet.policy_file import read_policy

    return read_policy(Path(path)).machines


def _check_elastic(elastic: bool, *, eager: bool, mtbf: str | None) -> None:
    """Raise where ranks that come and go are asked for together with what cannot have them.

    Raises:   PlanError.  RunError: what is said of notices names no place for them.
    """
    if elastic:
        place_of_notice()
    if elastic and eager:
        message = "--eager trains without a plan, and ranks that come and go need one"
        raise PlanError(message, hint="leave out --eager or --elastic")
    if elastic and mtbf is not None:
        message = f"--mtbf is {mtbf}, and ranks that are lost are made up for by others"
        raise PlanError(
            message, hint="leave out --mtbf or --elastic; --checkpoint-every goes with it"
        )


def _every(
    asked: int | str | None, mtbf: str | None, cluster: Cluster | None, listener: Listener
) -> CheckpointInterval:
    """Return how often checkpoints are due: as asked, by failures, or as always.

    Raises:   PlanError: both an interval and a mean time between failures are given.
    """
    if asked is not None and mtbf is not None:
        message = f"--checkpoint-every is {asked}, and --mtbf {mtbf} asks for another interval"
        raise PlanError(message, hint="leave out one of them")
    if asked is not None:
        return parse_every(str(asked))
    known = cluster.mtbf_s if cluster is not None else None
    mtbf_s = known if mtbf is None else parse_seconds(mtbf, "--mtbf")
    if mtbf_s is not None:
        every = CheckpointInterval(0, None, mtbf_s)
        listener.say(f"a checkpoint every {every}, measured in this run")
        return every
    if cluster is not None and any(kind.preemptible for kind in cluster.devices):
        listener.say(
            f"a checkpoint every {EVERY}: how often preemptible hosts are taken is not said; "
            "--mtbf 3h, or mtbf_s of the device"
        )
    return EVERY


def _train_here(session: Session) -> "Trained":
    with locked(session.folder):
        _check_free(session.folder)
        with session.mirrored():
            return session.lead()


def _check_free(folder: Path) -> None:
    """Raise where ranks of an elastic run go on, whoever began it.

    Raises:   RunError.
    """
    if is_under_way(folder):
        hint = (
            f"`penstock stop {folder}` ends it; `penstock join {folder}` makes this process one of"
        )
        raise RunError(f"ranks of an elastic run are at work in {folder}", hint=f"{hint} them")


@contextmanager
def _one_thread() -> "Generator[None]":
    """Let this process compute as a rank does, on one core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _folder_of(job: Job | str, out: Path | str | None) -> Path:
    """Return the folder of the run.

    Raises:   PlanError: it is a file.
    """
    folder = Path("runs") / (_name(job) if isinstance(job, str) else "job") if out is None else out
    if url_of(out):
        folder = Path("runs") / url_of(out).rstrip("/").rpartition("/")[2]
    if Path(folder).exists() and not Path(folder).is_dir():
        hint = "give --out a folder, or a new name"
        raise PlanError(f"{folder} is a file, not a folder", hint=hint)
    return Path(folder)


def _name(job: str) -> str:
    job = script_of(job).job
    place, _, name = job.rpartition(":") if ":" in job else (job, "", "")
    stem = Path(place).stem.rpartition(".")[2] or "job"
    return f"{stem}-{name}" if name else stem
