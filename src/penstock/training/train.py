"""Train: the main job from Python, as `penstock train` does it."""

import inspect
import math
import os
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Unpack

import torch

from penstock import _compat
from penstock.choose import flag_text
from penstock.choose.choose import Machines
from penstock.choose.contradictions import check_asked, check_given
from penstock.choose.degrees import axis_asked, check_alone
from penstock.choose.loading import JobTerms, loaded
from penstock.choose.prepare import started_on
from penstock.choose.run_windows import (
    EVERY,
    CheckpointInterval,
    parse_every,
    parse_keep,
    parse_seconds,
)
from penstock.choose.settle import CheckOptions
from penstock.cluster.cluster import Cluster
from penstock.device import here, idle_words
from penstock.errors import JobError, PlanError
from penstock.job import Job
from penstock.listener import SILENT, Listener, Row, SaysOnly
from penstock.members.encrypted import check_installed
from penstock.members.notice import place_of_notice
from penstock.pilot.goal import Goal, GoalWatch
from penstock.pilot.wishes import POLICY
from penstock.plan.plan import Plan
from penstock.processes.started import is_asked_beside, under_torchrun
from penstock.prove.audits import parse_audit
from penstock.rules.rule import Rule, load
from penstock.runtime.shared_cores import parse_turns
from penstock.runtime.step_traces import parse_steps
from penstock.script import as_started, script_of, with_arguments
from penstock.search.shapes import Fixed, JobNeeds, RankExchange
from penstock.sums import sums_way
from penstock.training.at_work import check_free, folder_of, is_under_way, url_of
from penstock.training.audit_anew import audit_beside
from penstock.training.callbacks import Hearing, check_declared
from penstock.training.joining import join_on_host
from penstock.training.lock import locked
from penstock.training.options import OPTIONS, Options, asked_for, check_known
from penstock.training.run_asked import RunAsked
from penstock.training.saved import check_policy, text_in
from penstock.training.session import Session
from penstock.training.torchrun import train_under_torchrun
from penstock.training.view import TERMINAL

if TYPE_CHECKING:
    from collections.abc import Generator

    from penstock.training.results import Trained

_IN_PLANS = (
    *("ranks", "stages", "replicas", "schedule", "offload", "post_validation", "memory"),
    *("tensor", "context", "topology"),
)
_UNDIVIDED = (
    "units",
    "offload",
    "post_validation",
    "elastic",
    "until_loss",
    "eager",
    "rules",
    "sums",
)
_OF_PLANS = (
    "plan",
    "schedule",
    "stages",
    "replicas",
    "units",
    "offload",
    "memory",
    "post_validation",
    "rules",
    "topology",
)


def train(
    job: Job | str,
    *,
    arguments: Sequence[str] = (),
    on_step: Callable[[Row], object] | None = None,
    on_validation: Callable[[Row], object] | None = None,
    on_checkpoint: Callable[[int, Path], object] | None = None,
    listener: Listener | None = TERMINAL,
    **options: Unpack[Options],
) -> "Trained | None":
    """Train a job: examine, trace, measure, search for a plan, prove it, run it and report.

    Every rank is a process of this host; under torchrun every rank calls it, and all but rank 0
    get None.

    job:         a record, or "file.py[:name]" or "module[:name]".
    arguments:   of the script that `job` names, for its own parser.
    on_step:     called after each step with its row: step, loss, seconds, figures, ...
    on_validation:  called with the row of a step after which there was a validation: val_loss, ...
    on_checkpoint:  called with the steps done and the folder of each checkpoint, once it is whole.
    listener:    learns what is being done; default: prints on stderr plan, phases, progress,
                 figures and folder, as `penstock train` does.  None: nothing is printed.
    options:     num_steps, ranks, plan, out, resume, memory, elastic and more: `Options`, and
                 docs/options.md.
    Raises:   JobError, PlanError: the job, or what is requested, is wrong.
              RunError: another run is in the folder; a rank failed; what differs with `strict`.
              Stopped (a KeyboardInterrupt): a signal ended it after a checkpoint.
    """
    check_known(list(options))
    heard = Hearing(on_step, on_validation, on_checkpoint)
    trained = train_requested(Request(job, options, arguments, heard), listener)
    heard.look()
    return trained


def _with_options(function: Callable[..., object]) -> inspect.Signature:
    """Return a signature in which `**options` are the options by name, as `help` shows them."""
    signature = inspect.signature(function)
    own = [each for each in signature.parameters.values() if each.kind != each.VAR_KEYWORD]
    kind = inspect.Parameter.KEYWORD_ONLY
    hints = Options.__annotations__
    rows = [inspect.Parameter(name, kind, default=None, annotation=hints[name]) for name in OPTIONS]
    return signature.replace(parameters=[*own, *rows])


train.__signature__ = _with_options(train)  # type: ignore[attr-defined]  # of a function


class Request(NamedTuple):
    """What is to be trained, and how."""

    job: Job | str
    options: Options
    arguments: Sequence[str] = ()
    hearing: Hearing | None = None

    @property
    def folder(self) -> Path:
        """Return the folder of the run.

        Raises:   PlanError: it is a file.
        """
        return folder_of(self.job if isinstance(self.job, str) else "", self.options.get("out"))


def train_requested(request: Request, listener: Listener | None) -> "Trained | None":
    """Train a job as it is asked for; return what it gave, on rank 0.

    Raises:   as `train`, in the words of the command line.
    """
    heard = _heard_by(listener)
    _compat.let_sockets_have_no_files()
    here().enter()  # before any code of the job's: it may mean the device that is current
    if words := idle_words():
        heard.say(words)
    job, is_elastic = (
        _with_arguments(request.job, request.arguments),
        request.options.get("elastic"),
    )
    if request.options.get("resume") and isinstance(job, str):
        job = _as_before(job, request.folder, heard)
    request = request._replace(job=job)
    with _one_thread(), as_started(job if isinstance(job, str) else ""):
        if is_asked_beside():
            audit_beside(_session(request, SILENT))
            return None
        if not under_torchrun():
            check_free(request.folder)  # before anything that takes time
            return _in_hand(_train_here(_session(request, heard)), job, heard)
        if is_elastic and is_under_way(folder := request.folder):
            named = job if isinstance(job, str) else None
            join_on_host(folder, heard, named)  # its host was lost, and is there again
            return None
        return _in_hand(train_under_torchrun(partial(_session, request, heard)), job, heard)


def _in_hand(trained: "Trained | None", job: Job | str, heard: Listener) -> "Trained | None":
    """Return what a run gave, told of; the module in hand is the trained one."""
    if trained is not None and isinstance(job, Job):  # its own module may be in use here
        trained.module()
    if trained is not None:
        heard.finished(trained)
    return trained


def _session(request: Request, heard: Listener) -> Session:  # long: option by option
    """Return the session of a run that is asked for.

    Raises:   PlanError, JobError, ClusterError, ScheduleError, FleetError: what is asked for.
    """
    options, folder, cluster = request.options, request.folder, request.options.get("cluster")
    _check_together(options)
    follows = _followed(options, folder)
    there = None if cluster is None else started_on(cluster)
    plan, rules, weights = (options.get("plan"), options.get("rules", ()), options.get("weights"))
    chosen = plan if plan is None or isinstance(plan, Plan) else Plan.load(plan)
    said = load(rules) if isinstance(rules, Path | str) else tuple(rules)
    begins = "" if weights is None else str(weights)
    name = script_of(request.job).job if isinstance(request.job, str) else "the job"
    with heard.busy(f"loading {name}"):
        found = loaded(request.job, JobTerms(begins, said, options.get("sums", "")))
    check_declared(options, found.job)
    _check_profiled(options, found.job)
    if request.hearing is not None:
        request.hearing.folder = folder / "checkpoints"
    fixed = _fixed(options, found.job, said, follows)
    _check_asked(options, Machines(there), (found.job, fixed), chosen)
    policy, units = options.get("policy"), options.get("units")
    asked = RunAsked(
        text=request.job if isinstance(request.job, str) else "",
        weights=begins,
        given_plan=chosen,
        units=flag_text.units_asked(None if units is None else str(units)),
        every=_every(options, there, heard),
        keep=parse_keep(options.get("keep", "2")),
        on_step=None if request.hearing is None else request.hearing.hear,
        tls=options.get("tls", False),
        policy=None if policy is None else Path(policy),
        mirror=url_of(options.get("out")),
        audit=parse_audit(options.get("audit", "1%")),
        options=asked_for(options),
    )
    return Session(
        job=found.job,
        author=found.author,
        folder=folder,
        num_steps=options.get("num_steps") or found.job.num_steps,
        fixed=fixed,
        there=Machines(there, listener=heard),
        asked=asked,
        resume=options.get("resume", False),
        care=_care(options),
        elastic=options.get("elastic", False),
        goal=_goal(options, found.job),
    )


def _fixed(options: Options, job: Job, rules: Sequence[Rule], follows: int | None) -> Fixed:
    """Return what of a plan is decided beforehand.

    follows:  how many machines a policy wants; None: none is followed.
    Raises:   PlanError, ScheduleError: it cannot be.
    """
    schedule, ranks = options.get("schedule"), options.get("ranks")
    asked = flag_text.schedule_asked(schedule) if isinstance(schedule, str) else schedule
    is_validated, is_elastic = options.get("post_validation", False), options.get("elastic", False)
    flag_text.check_fits(asked, job, post_validation=is_validated)
    tensor, context = axis_asked(*_degrees(options), _asks(options, (*_UNDIVIDED, "policy")))
    is_placed = options.get("plan") is not None or options.get("cluster") is not None
    return Fixed(
        ranks=ranks if follows is None or is_placed else ranks or follows,
        schedule=asked,
        stages=options.get("stages") or (1 if is_elastic and job.batch_by_ranks else None),
        replicas=options.get("replicas"),
        offload=options.get("offload"),
        memory=flag_text.memory_asked(options.get("memory")),
        rules=tuple(rules),
        tensor=tensor,
        context=context,
        exchange=RankExchange(
            is_validated,
            sums=options.get("sums"),
            topology=flag_text.topology_asked(options.get("topology")),
            woven=options.get("units") == "woven",
        ),
        needs=JobNeeds(whole=is_elastic),
    )


def _check_asked(
    options: Options, there: Machines, asked: tuple[Job, Fixed], plan: Plan | None
) -> None:
    """Raise where no plan can be what is asked for of a job, before the job is looked at.

    Raises:   PlanError: it names what does not go together.  RunError: there are no decisions.
    """
    if options.get("eager"):
        _check_decisions(options, is_served=False)
        return
    job, fixed = asked
    is_elastic = options.get("elastic", False)
    ranks = int(os.environ["WORLD_SIZE"]) if under_torchrun() else fixed.ranks
    ranks = ranks or (there.cluster or Cluster.here()).num_ranks
    if plan is None:
        check_asked(job, fixed, ranks, commits=is_elastic)
    elif is_elastic:
        check_given(plan)
    is_served = sums_way(job.sums).served and ranks > 1
    _check_decisions(options, is_served=is_served if plan is None else bool(plan.served))


def _check_decisions(options: Options, *, is_served: bool) -> None:
    """Raise where a run is to make a server's decisions again, and has no server or none of them.

    Raises:   PlanError.  RunError: there are none, or they are damaged.
    """
    folder = options.get("decisions")
    if not folder:
        return
    if not is_served:
        message = f"decisions of {folder} are to be made again, and no server updates the weights"
        hint = (
            "give sums as that run had them, as ssp:3, on 2 ranks or more; or leave decisions out"
        )
        raise PlanError(message, hint=hint)
    from penstock.runtime.served import FILE, read_decisions

    read_decisions(Path(folder) / FILE)


def _check_profiled(options: Options, job: Job) -> None:
    """Raise where steps are to be profiled that there are not, or whose ranks may change.

    Raises:   PlanError.
    """
    text = options.get("torch_profile")
    if not text:
        return
    first, _ = parse_steps(text)
    if options.get("elastic"):
        message = "torch_profile is of ranks that stay, and this run is elastic"
        raise PlanError(message, hint="leave out torch_profile or elastic")
    num_steps = options.get("num_steps") or job.num_steps
    if first > num_steps and options.get("until_loss") is None:
        message = f"torch_profile begins with step {first}, and there are {num_steps}"
        raise PlanError(message, hint=f"write torch_profile={max(1, num_steps - 2)}:{num_steps}")


def _degrees(options: Options) -> tuple[int | None, int | None]:
    return options.get("tensor"), options.get("context")


def _check_turns(options: Options) -> None:
    """Raise where two runs are to share cores, and cannot.

    Raises:   PlanError: turns say nothing, or ranks change, or they compute on accelerators.
    """
    text = options.get("turns")
    if not text:
        return
    parse_turns(text)
    for name in ("elastic", "until_loss"):
        if options.get(name) is not None and options.get(name) is not False:
            message = f"{name} lets ranks change, and turns are those of the same ranks"
            raise PlanError(message, hint=f"leave out turns or {name}")
    if not here().can_fork:
        message = "turns are of CPU cores, and ranks here compute on accelerators"
        raise PlanError(message, hint="leave out turns: an accelerator serves two runs by itself")


def _care(options: Options) -> CheckOptions:
    return CheckOptions(
        check=options.get("check", True),
        strict=options.get("strict", False),
        eager=options.get("eager", False),
        trial=options.get("trial", True),
        replan=options.get("replan", True) and not options.get("turns"),
        forget=options.get("forget_state", False),
    )


def _check_together(options: Options) -> None:
    """Raise where two options contradict each other, before anything is read.

    Raises:   PlanError.  RunError: what is said of notices names no place for them.
    """
    check_alone(*_degrees(options), _asks(options, _UNDIVIDED))
    _check_elastic(options)
    _check_turns(options)
    if options.get("eager") and any(options.get(name) for name in _OF_PLANS):
        hint = f"leave out {', '.join(_OF_PLANS)}"
        raise PlanError("eager trains without a plan", hint=hint)
    if options.get("plan") is not None:
        flag_text.check_left_out(_asks(options, _IN_PLANS))


def _asks(options: Options, names: Sequence[str]) -> dict[str, bool]:
    """Return by name whether each of these options asks for something."""
    values = {name: options.get(name) for name in names}
    values |= {name: (options.get(name) or 1) > 1 for name in ("tensor", "context")}  # of 1, none
    values["until_loss"] = options.get("until_loss") is not None  # 0 is a loss
    values["units"] = options.get("units") not in (None, "woven")  # which are of divided ops
    return {name: bool(values[name]) for name in names}


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


def _goal(options: Options, job: Job) -> GoalWatch | None:
    """Return what watches for the loss at which a run ends; None: it takes all its steps.

    Raises:   PlanError: the loss is no number; what is to be least is asked for without it; the
              job's batch follows its ranks.
    """
    loss, least = options.get("until_loss"), options.get("objective", "time")
    if loss is None:
        if least != "time":
            hint = "give until_loss=2.1, or plan with `penstock plan --objective cost`"
            raise PlanError(f"objective {least} is that of a run to a loss", hint=hint)
        return None
    if not math.isfinite(loss):
        raise PlanError(f"until_loss is {loss}, no loss", hint="write until_loss=2.1")
    if job.batch_by_ranks:
        message = "until_loss finds the batch, and Job.batch_by_ranks lets it follow the ranks"
        raise PlanError(message, hint="leave out one of them")
    return GoalWatch.of_job(Goal(loss, least), job)


def _followed(options: Options, folder: Path) -> int | None:
    """Return how many machines a policy asks for; None: none is followed.

    A run that goes on follows the one in its folder where no other is given.
    Raises:   PlanError: ranks cannot come and go.  FleetError: the file is damaged.
    """
    path, is_elastic = options.get("policy"), options.get("elastic")
    if path is None and options.get("resume") and is_elastic and (folder / POLICY).exists():
        check_policy(folder)
        path = folder / POLICY
    if path is None:
        return None
    if not is_elastic or options.get("until_loss") is not None:
        message = f"policy {path} lets machines come and go, and"
        what = "the run ends at a loss" if is_elastic else "the run is not elastic"
        hint = "leave out until_loss" if is_elastic else "give elastic=True, too"
        raise PlanError(f"{message} {what}", hint=hint)
    from penstock.fleet.policy_file import read_policy

    return read_policy(Path(path)).machines


def _check_elastic(options: Options) -> None:
    """Raise where ranks that come and go are asked for together with what cannot have them.

    Raises:   PlanError.  RunError: what is said of notices names no place for them.
    """
    if options.get("tls"):
        if not options.get("elastic"):
            message = "tls is of the lines between ranks of an elastic run, and this one has none"
            raise PlanError(message, hint="give elastic=True, too, or leave out tls")
        check_installed()
    if not options.get("elastic"):
        return
    place_of_notice()
    if options.get("eager"):
        message = "eager trains without a plan, and ranks that come and go need one"
        raise PlanError(message, hint="leave out eager or elastic")
    if (mtbf := options.get("mtbf")) is not None:
        message = f"mtbf is {mtbf}, and ranks that are lost are made up for by others"
        raise PlanError(message, hint="leave out mtbf or elastic; checkpoint_every goes with it")


def _every(options: Options, cluster: Cluster | None, listener: Listener) -> CheckpointInterval:
    """Return how often checkpoints are due: as asked, by failures, or as always.

    Raises:   PlanError: both an interval and a mean time between failures are given.
    """
    asked, mtbf = options.get("checkpoint_every"), options.get("mtbf")
    if options.get("elastic"):
        cluster = None
    if asked is not None and mtbf is not None:
        message = f"checkpoint_every is {asked}, and mtbf {mtbf} asks for another interval"
        raise PlanError(message, hint="leave out one of them")
    if asked is not None:
        return parse_every(str(asked))
    known = cluster.mtbf_s if cluster is not None else None
    mtbf_s = known if mtbf is None else parse_seconds(mtbf, "mtbf")
    if mtbf_s is not None:
        every = CheckpointInterval(0, None, mtbf_s)
        listener.say(f"a checkpoint every {every}, measured in this run")
        return every
    if cluster is not None and any(kind.preemptible for kind in cluster.devices):
        listener.say(
            f"a checkpoint every {EVERY}: how often preemptible hosts are taken is not said; "
            "say it as mtbf, or as mtbf_s of the device"
        )
    return EVERY


def _train_here(session: Session) -> "Trained":
    with locked(session.folder):
        check_free(session.folder)
        with session.mirrored():
            return session.lead()


@contextmanager
def _one_thread() -> "Generator[None]":
    """Let this process compute as a rank does, on one core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
