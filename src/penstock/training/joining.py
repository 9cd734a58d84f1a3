"""Joining: this process becomes a rank of an elastic run that is under way, here or elsewhere."""

import json
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

import torch

from penstock.choose.choose import Choice, for_plan
from penstock.choose.keys import traced_keys
from penstock.choose.loading import loaded
from penstock.choose.prepare import traced
from penstock.errors import PenstockError, RunError
from penstock.examine.same_run import check_joins, run_facts_of
from penstock.files import read_bytes
from penstock.gauge.hosts import place_key
from penstock.job import Job
from penstock.listener import SILENT, Listener
from penstock.members.calling import introduced, newcomer
from penstock.members.launch_members import NOBODY, Lived, Scribe, Start, join
from penstock.members.mesh import address_towards
from penstock.members.words import Where
from penstock.pilot.goal import REACHED, GoalWatch
from penstock.pilot.phases import until_in
from penstock.pilot.wishes import is_to_leave, pool_here
from penstock.plan.plan import Plan
from penstock.processes.child import can_fork
from penstock.processes.end_with_parent import outlive_parent
from penstock.processes.inherited import be_as_plain
from penstock.runtime.stop import stopping
from penstock.script import as_started
from penstock.search.shapes import Fixed
from penstock.training.addresses import (
    Addresses,
    RunTerms,
    addresses_in,
    addresses_of,
    job_digest,
)
from penstock.training.at_work import ADDRESSES, ENDED
from penstock.training.begin import Begin
from penstock.training.chronicle import Chronicle, RunAbout, sizes
from penstock.training.elastic_driver import save_predicted, wait_for_end, ways_of
from penstock.training.elastic_run import ElasticRun, RunPilot
from penstock.training.key_session import sizes_by_step
from penstock.training.mirror import mirroring_next
from penstock.training.saved import job_to_run, kept_job
from penstock.training.task import TaskTerms, task_of

if TYPE_CHECKING:
    from penstock.checkpoints.control import Board

LIMIT_S = 60.0  # for which a run may take to let another rank in
TCP = "tcp://"


def _nobody(question: str) -> bool:
    return False


class JoinTerms(NamedTuple):
    """How a process joins a run.

    limit_s:      for which it waits to be taken in.
    forget_state: whether it goes on without what no checkpoint holds, whatever the run does.
    job:          what names the job here; None: what the run's folder names, if this user's own
                  `penstock train` wrote that, or members that know the token tell of it.
    asks:         puts the question to a person whether to run what others wrote.
    """

    limit_s: float = LIMIT_S
    forget_state: bool = False
    job: str | None = None
    asks: Callable[[str], bool] = _nobody


def join_run(
    run: Path | str,
    *,
    token_file: Path | str | None = None,
    terms: JoinTerms = JoinTerms(),  # noqa: B008 - a tuple
    listener: Listener = SILENT,
    notice: Callable[[], bool] = lambda: False,
) -> Lived:
    """Be a rank of an elastic run, to its end or until a signal; return how that was.

    run:         its folder, or tcp://HOST:PORT, where one of its ranks listens.
    token_file:  of whoever cannot read the folder's file of addresses: its token.
    notice:      whether this machine will go.
    Raises:   RunError: no such run, or it takes nobody in: it has as many ranks as there are plans
              for, or trains something else; its folder is not seen here.
              JobError: its job cannot be loaded, or is not to be run.
    """
    known = _known(str(run), token_file)
    forgets = terms.forget_state or known.terms.forgets
    known = replace(known, terms=known.terms._replace(forgets=forgets))
    folder = Path(known.folder)
    is_told = bool(known.job) and str(run).startswith(TCP) and known.job == job_digest(folder)
    rules = [rule.how for rule in known.terms.job.rules if rule.verb == "replace"]
    is_told = is_told and terms.job is None
    text = kept_job(folder) if is_told else job_to_run(folder, terms.asks, terms.job, rules)
    with as_started(text):
        return _joined(known, text, terms.limit_s, listener, notice)


def _joined(
    known: Addresses, job: str, limit_s: float, listener: Listener, notice: Callable[[], bool]
) -> Lived:
    """Be a rank of an elastic run of which these addresses are known, by the job of that name."""
    folder, members = Path(known.folder), tuple(known.members.values())
    own = _made(known, job, listener)
    pilot = RunPilot(own.run)
    pilot.prepare()
    torch.set_num_threads(1)
    reached = threading.Event()
    if own.chronicle.goal is not None:
        own.chronicle.goal.asks = reached.set
    with stopping(None, tells=False) as board:
        start = Start(
            NOBODY,
            known.secret,
            lambda: pilot,
            lambda: REACHED if reached.is_set() else 0,
            lambda: board.asked() != 0 or notice(),
        )
        listener.say("joining the run")
        at = Where(address_towards(members[0].host), 0, place_key(), pool_here())
        caller = newcomer(at, known.secret, pilot.graph)

        def in_vain() -> bool:
            return (folder / ENDED).exists() or is_to_leave(folder, caller.mesh.own)

        caller = caller._replace(in_vain=in_vain)
        scribe = Scribe(own.chronicle.report, own.chronicle.finish)
        with mirroring_next(known.terms.mirror, folder, known.terms.keep, listener):
            return join(caller, members, start, scribe, listener.say, limit_s)


def join_on_host(folder: Path, listener: Listener, job: str | None = None) -> None:
    """Let a member that joins live in place of this rank of a torchrun job, to the run's end.

    job:      what names the job here, as in `join_run`.
    Raises:   RunError: it is not taken in, and the run does not end well without it.
    """
    from penstock.training.elastic_hosts import noticing

    with stopping(None) as board, noticing(int(os.environ["LOCAL_WORLD_SIZE"])) as notice:
        leaves = partial(_leaves, board, notice)
        if not can_fork():
            join_run(folder, terms=JoinTerms(job=job), listener=listener, notice=leaves)
            return
        context = multiprocessing.get_context("fork")
        child = context.Process(target=_joins, args=(folder, listener, leaves, job), daemon=False)
        child.start()
        child.join()
        if not notice():
            wait_for_end(folder, listener, board)


def _leaves(board: "Board", notice: Callable[[], bool]) -> bool:
    return board.asked() != 0 or notice()


def _joins(folder: Path, listener: Listener, notice: Callable[[], bool], job: str | None) -> None:
    """Be the member in a process of its own: neither torchrun nor its parent ends it."""
    be_as_plain()
    outlive_parent()
    os.setsid()
    try:
        join_run(folder, terms=JoinTerms(job=job), listener=listener, notice=notice)
    except PenstockError as problem:
        sys.stderr.write(f"error: {problem.message}\nhint: {problem.hint}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _known(run: str, token_file: Path | str | None) -> Addresses:
    """Return what is known of a run, by its folder or by one of its ranks.

    Raises:   RunError: nobody tells; or its folder is not seen here.
    """
    if not run.startswith(TCP):
        known = addresses_in(Path(run))
        return replace(known, folder=str(Path(run).absolute()))
    token = _token_in(token_file)
    told = introduced(_where(run), token)
    members = {str(member): where for member, where in told.members.items()}
    known = replace(addresses_of(told.about), token=token.hex(), members=members)
    if not (Path(known.folder) / "job.json").exists():
        message = f"{known.folder}, the folder of the run, is not seen from here"
        raise RunError(message, hint="mount it at the same place as the other hosts do")
    return known


def _where(text: str) -> Where:
    """Return the place that tcp://HOST:PORT names.

    Raises:   RunError: it names none.
    """
    try:
        address = urlsplit(text)
        host, port = address.hostname, address.port
    except ValueError:  # of the port
        host = port = None
    if not host or not port:
        raise RunError(f'"{text}" is no address', hint="write tcp://HOST:PORT, or the run's folder")
    return Where(host, port, "")


def _token_in(path: Path | str | None) -> bytes:
    """Return the token in a file: hexadecimal, or the run's own file of addresses.

    Raises:   RunError: there is none.
    """
    if path is None:
        hint = f'token_file="FOLDER/{ADDRESSES}", or a file that holds the token alone'
        raise RunError("a run on another host asks for its token", hint=hint)
    text = read_bytes(path, RunError, "token").decode(errors="replace").strip()
    try:
        return bytes.fromhex(text if not text.startswith("{") else json.loads(text)["token"])
    except (ValueError, KeyError, TypeError):
        hint = f"copy the token that {ADDRESSES} in the run's folder has"
        raise RunError(f"{path} holds no token", hint=hint) from None


class _Made(NamedTuple):
    """What a newcomer has made of a run."""

    run: ElasticRun
    chronicle: Chronicle


def _made(known: Addresses, text: str, listener: Listener) -> _Made:
    """Return a run as the ranks that began it have it, traced anew.

    Raises:   JobError: its job cannot be loaded, or has something else than the run began with.
              PlanError: it is another one than the run's.
    """
    folder, terms = Path(known.folder), known.terms
    author, trained = map(known.data.of, loaded(text, terms.job))
    shapes = traced_keys(trained, listener, terms.job.rules) if known.keyed else ()
    whole = shapes[0].captured if shapes else traced(trained, listener, rules=terms.job.rules)
    check_joins(folder, run_facts_of(author, whole))
    plan = Plan.load(folder / "plan.json")
    trained = _as_now(trained, folder, terms, plan)
    keyed = known.keyed_by(trained, shapes, listener)
    if keyed:
        choice = keyed[plan.total_ranks]
    else:
        choice = Choice(*for_plan(trained, plan, whole, listener), plan)
    ways = ways_of(folder, choice, Fixed(rules=terms.job.rules))
    task = partial(task_of, _task_terms(folder, known))
    about = Begin(), known.steps, folder, known.secret, terms, author.batch_by_ranks
    run = ElasticRun(ways, task, known.by_count, *about, keyed=keyed)

    def followed() -> Choice:
        ended = choice._replace(plan=Plan.load(folder / "plan.json"), others=())
        save_predicted(folder, ended)
        return ended

    samples, tokens, *_ = sizes(author, choice)
    sizes_of = sizes_by_step((trained, shapes), choice, samples, tokens)
    rows = RunAbout(known.steps, samples, tokens, terms.checked, sizes_of)
    goal = None if terms.until is None else GoalWatch.of_job(terms.until, author)
    return _Made(run, Chronicle(folder, author, rows, followed, goal))


def _as_now(job: Job, folder: Path, terms: RunTerms, plan: Plan) -> Job:
    """Return a job as the run trains it now: the batch and the rates of its phase or its ranks."""
    if terms.until is not None and (told := until_in(folder)) is not None:
        job = told.job_of(job, len(told.phases) - 1)
    elif job.batch_by_ranks:  # it may be that of fewer ranks
        job = replace(job, micro_batches=plan.job_micro_batches)
    return replace(job, validate_every=terms.validate_every or None)


def _task_terms(folder: Path, known: Addresses) -> TaskTerms:
    """Return what ranks do of any plan, as the ranks that began the run do."""
    from penstock.prove.audit import HIDDEN
    from penstock.runtime.audited import Audits

    terms = known.terms
    return TaskTerms(
        folder=folder,
        num_steps=known.steps,
        every=terms.every,
        keep=terms.keep,
        noise_every=terms.noise_every,
        audits=Audits(folder / HIDDEN, lambda: False) if terms.audits else None,
        forgets=terms.forgets,
    )
