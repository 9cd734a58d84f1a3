"""Run folder: what a run finds in its folder, what it leaves there, and how it goes on from it."""

import itertools
import json
import shlex
from typing import TYPE_CHECKING

from penstock.errors import PlanError
from penstock.examine import same_run
from penstock.files import write_text
from penstock.pilot.by_ranks import BATCHES
from penstock.pilot.phases import PHASES
from penstock.pilot.wishes import DECISIONS, LOG, POLICY, TABLE, WANTED
from penstock.prove.audits import AUDITS, KEPT
from penstock.script import script_of
from penstock.training import saved
from penstock.training.at_work import ENDED
from penstock.training.begin import Begin
from penstock.training.finished import NothingLeftError
from penstock.training.results import resumption

if TYPE_CHECKING:
    from penstock.training.session import Session

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


def begun_from(session: "Session") -> Begin:
    """Return where a run goes on: from the newest checkpoint that is whole.

    Raises:   PlanError: nothing is left to do.  CheckpointError: all of them are damaged.
    """
    from penstock.checkpoints import checkpoint

    if not session.resume:
        return Begin()
    found = checkpoint.newest_whole(session.folder / "checkpoints", session.listener.say)
    if found is None:
        session.listener.say(
            f"{session.folder} holds no checkpoint to resume from: starting afresh"
        )
        session.begins_afresh()
        return Begin()
    newest, done = found
    if session.goal is None and (session.folder / PHASES).exists():
        message = f"{session.folder} holds a run that ends at a loss, by a batch that it has found"
        raise PlanError(message, hint="give until_loss again, or train without resume")
    if not session.elastic and (session.folder / BATCHES).exists():
        message = f"{session.folder} holds a run whose batch followed its ranks"
        raise PlanError(message, hint="give elastic=True again, or train without resume")
    if is_out_of_patience_at(session, done):
        message = (
            f"{newest}: no better validation came in {session.job.patience}, and the run ended"
        )
        hint = "raise Job.patience, or leave it out"
        raise NothingLeftError(message, session.folder, hint=hint)
    if done >= session.num_steps and session.goal is None:
        hint = f"raise the number of steps: num_steps={done + 1} at least"
        message = f"{newest} has done {done} of {session.num_steps} steps"
        raise NothingLeftError(message, session.folder, hint=hint)
    check_micro_batches(session, done)
    return Begin(done, newest)


def check_micro_batches(session: "Session", done: int) -> None:
    """Raise where a step has other micro-batches than before: the data would not go on.

    Raises:   PlanError: it has.
    """
    before, now = saved.kept_micro_batches(session.folder), session.job.micro_batches
    if before in (None, now) or session.goal is not None:
        return
    message = f"a step of the run in {session.folder} has {before} micro-batches, and the job {now}"
    where = f"after {done:,} steps micro-batch {done * before:,} of the data is next"
    hint = f"set micro_batches={before} again, or begin anew: without resume"
    raise PlanError(f"{message}: {where}, not {done * now:,}", hint=hint)


def set_aside_earlier(session: "Session") -> None:
    """Move what an earlier run left in the folder to FOLDER.1, or FOLDER.2, ..."""
    folder = session.folder.absolute()
    earlier = (folder / "metrics.jsonl").exists() or any((folder / "checkpoints").glob("step-*"))
    if session.resume or not earlier:
        return
    numbers = (folder.with_name(f"{folder.name}.{number}") for number in itertools.count(1))
    place = next(path for path in numbers if not path.exists())
    place.mkdir()
    for name in FILES:
        if (folder / name).exists():
            (folder / name).rename(place / name)
    session.listener.say(f"{session.folder} held an earlier run: it is kept in {place.name}")


def clear_after(session: "Session", begin: Begin) -> None:
    """Remove what the run to go on from left after its checkpoint, or half-written."""
    from penstock.checkpoints.checkpoint import discard, set_aside

    first_step, checkpoint = begin
    discard(session.folder / "checkpoints")
    if checkpoint is not None:
        for aside in set_aside(session.folder / "checkpoints", first_step):
            session.listener.say(f"what is damaged is kept as {aside}")
    count = session.job.micro_batches if session.goal is None else 0
    about = session.folder, session.asked.text, session.num_steps, count
    saved.keep_job(*about, session.asked.options, session.learned.late)
    same_run.keep_facts(session.folder, session.learned.facts)
    old = ("events.jsonl", ENDED) if checkpoint else ("replans.json", "events.jsonl", ENDED)
    for name in ("summary.json", "report.html", "measured.trace.json", *old):
        (session.folder / name).unlink(missing_ok=True)
    if checkpoint is None:
        return
    metrics = session.folder / "metrics.jsonl"
    rows = metrics.read_text().splitlines() if metrics.exists() else []
    kept = [row for row in rows if row.endswith("}") and json.loads(row)["step"] <= first_step]
    write_text(metrics, "".join(f"{row}\n" for row in kept))
    if session.resume:
        session.listener.say(f"resuming after step {first_step} from {checkpoint}")


def is_over(session: "Session", step: int) -> bool:
    """Return whether a run is over that has done so many steps."""
    is_reached = session.goal is not None and session.goal.is_reached
    return step == session.num_steps or is_reached or is_out_of_patience_at(session, step)


def is_out_of_patience_at(session: "Session", step: int) -> bool:
    """Return whether the job waits no longer for a better validation after so many steps."""
    from penstock.runtime.validate import is_out_of_patience

    every = session.job.validate_every
    is_validated = every is not None and step % every == 0
    return is_validated and is_out_of_patience(session.job, session.folder / "checkpoints", step)


def tell_newest(session: "Session") -> None:
    """Say from which checkpoint a run goes on that ended at once."""
    from penstock.checkpoints.checkpoint import discard, latest

    discard(session.folder / "checkpoints")
    newest = latest(session.folder / "checkpoints")
    none = f"no checkpoint: none is written before {session.asked.every}"
    session.listener.say(f"it can be resumed from {newest}" if newest else none)


def words_to_resume(session: "Session") -> str:
    """Return how a run that was stopped goes on."""
    steps = session.num_steps if session.num_steps != session.job.num_steps else None
    replaces = [rule for rule in session.fixed.rules if rule.verb == "replace"]
    goal = None if session.goal is None else session.goal.goal
    script = script_of(session.asked.text)
    told = resumption(script.job, session.folder, steps, replaces, goal, url=session.asked.mirror)
    if session.elastic and session.asked.text:
        ranks = (
            session.fixed.ranks if session.job.batch_by_ranks else None
        )  # a share is part of them
        told += " --elastic" + (" --set tls=true" if session.asked.tls else "")
        told += "" if ranks is None else f" --ranks {ranks}"
    told += (
        f" --set sums={session.fixed.exchange.sums}"
        if session.fixed.exchange.sums and session.asked.text
        else ""
    )
    return f"{told} -- {script.tail}" if script.arguments else told


def follow_policy(session: "Session", *, resume: bool, here: bool) -> None:
    """Let the run follow its policy, if it has one.

    here:     processes of this host are its machines, if no command provides others.
    Raises:   FleetError: the policy cannot be followed.
    """
    for name in () if resume else (POLICY, WANTED, DECISIONS):  # of a run that never began
        (session.folder / name).unlink(missing_ok=True)
    if session.asked.policy is not None:
        from penstock.pilot.machine_policy import begin_following

        with session.listener.busy("fitting the policy"):
            about = session.folder, session.asked.policy, session.num_steps
            begin_following(*about, resume=resume, here=here)
    if command := saved.policy_command(session.folder):
        session.listener.say(f"machines come by the policy's command: sh -c {shlex.quote(command)}")
