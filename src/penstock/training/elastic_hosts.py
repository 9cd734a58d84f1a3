"""Elastic hosts: the ranks of a torchrun job as members of an elastic run, out of torchrun's hands.

torchrun ends all processes of a host when one of them dies, and those of no other host; its store
is on one host.  So each process that it starts is a stand-in: what it has loaded, traced and
lowered it hands on to a member, a process in a session of its own, and waits for the run's end.  A
member that is killed takes nobody with it; nor does a stand-in, nor torchrun itself, nor the host
that had the store.

The token goes through the folder of the run, which only its owner can read, never through the
store.
"""

import hashlib
import json
import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.checkpoints.control import LocalBoard
from penstock.choose.choose import Choice
from penstock.errors import PlanError
from penstock.members.launch_members import Here, Places
from penstock.members.words import Where
from penstock.pilot.wishes import pool_here
from penstock.runtime.stop import Stopped, stopping
from penstock.training.addresses import Addresses, addresses_in, write_addresses
from penstock.training.at_work import ADDRESSES
from penstock.training.audited_run import audited_by_plan, with_audits
from penstock.training.begin import Begin
from penstock.training.chronicle import ended
from penstock.training.elastic_driver import (
    Plans,
    lived,
    planned_alike,
    run_of,
    start_of,
    wait_for_end,
    ways_of,
)
from penstock.training.elastic_run import ElasticRun
from penstock.training.run_folder import clear_after, follow_policy, words_to_resume

if TYPE_CHECKING:
    from penstock.checkpoints.control import Board
    from penstock.plan.plan import Plan
    from penstock.training.rendezvous import Rendezvous
    from penstock.training.results import Trained
    from penstock.training.session import Session

_READY, _MEMBER = "penstock/elastic", "penstock/member/{}"


def train_on_hosts(
    session: "Session",
    rendezvous: "Rendezvous",
    choice: Choice,
    members: "Callable[[Plan], tuple[int, ...]]",
    begin: Begin,
) -> "Trained | None":
    """Let a member live in place of this rank of a torchrun job; return what rank 0 returns.

    members:  gives, by rank of a plan, the ranks of the job.
    Raises:   PlanError: the plan is asynchronous; this host does not see the folder of the run.
              RunError: the job fails, or nobody is left.
    """
    with stopping(None) as board, noticing(int(os.environ["LOCAL_WORLD_SIZE"])) as notice:
        session.heed(board)
        run = _run(session, rendezvous, choice, begin, board)

        def meet(own: Places) -> Places:
            where = _met(rendezvous, own)
            if rendezvous.rank == 0:
                write_addresses(run.addresses, where)
            rendezvous.go()
            return where

        own = members(run.plans[choice.plan.total_ranks])
        start = start_of(run, own, board, meet)._replace(notice=notice)
        pools = {rendezvous.rank: pool_here()}
        here, leads = Here((rendezvous.rank,), rendezvous.address, pools), rendezvous.rank == 0
        audits = audited_by_plan(session, choice, board, begin[0]) if leads else nullcontext()
        with audits:
            found = lived(session, choice, begin[0], start, here, calls=leads)
            if found is None and not notice():
                wait_for_end(session.folder, session.listener, board)
                found = ended(session.folder, session.followed)
        if leads:
            found = with_audits(session, found, begin)
        if found == "stopped" and leads:
            raise Stopped(board.asked() or signal.SIGTERM, words_to_resume(session))
    return found if leads and found != "stopped" else None


def _run(
    session: "Session",
    rendezvous: "Rendezvous",
    choice: Choice,
    begin: Begin,
    board: "Board",
) -> ElasticRun:
    """Return what all members have alike: rank 0 plans and writes it down, the others read it."""
    folder, ways = session.folder, ways_of(session.folder, choice, session.fixed)
    if rendezvous.rank == 0:
        run = run_of(session, ways, planned_alike(session, ways, choice), begin, board)
        clear_after(session, begin)
        follow_policy(session, resume=begin.checkpoint is not None, here=False)
        write_addresses(run.addresses, {})
        rendezvous.put(_READY, _digest(run.token))
        return run
    known = known_in(folder, rendezvous.take(_READY))
    about = session.job, session.learned.shapes, session.listener
    run = run_of(session, ways, Plans(known.by_count, known.keyed_by(*about)), begin, board)
    return replace(run, token=known.secret)


def known_in(folder: Path, digest: str) -> Addresses:
    """Return what rank 0 has written of the run, whose token has that digest.

    Raises:   PlanError: it is not in this folder.
    """
    known = addresses_in(folder) if (folder / ADDRESSES).exists() else None
    if known is None or _digest(known.secret) != digest:
        message = f"{folder} as seen from here is not the folder that rank 0 has"
        raise PlanError(message, hint="give a folder that all hosts see")
    return known


def _digest(token: bytes) -> str:
    """Return what tells one token from another, and nothing else of it."""
    return hashlib.sha256(b"penstock " + token).hexdigest()[:16]


# -- where members listen -------------------------------------------------------------------------


def _met(rendezvous: "Rendezvous", own: Places) -> Places:
    """Return where all members listen; each rank has one."""
    for member, where in own.items():
        rendezvous.put(_MEMBER.format(member), json.dumps(where))
    told = (json.loads(rendezvous.take(_MEMBER.format(m))) for m in range(rendezvous.num_ranks))
    return {member: Where(*row) for member, row in enumerate(told)}


# -- signals ---------------------------------------------------------------------------------------


@contextmanager
def noticing(num_siblings: int) -> Generator[Callable[[], bool]]:
    """Take SIGTERM as word that this host will go; yield whether it came, as forks see it too.

    num_siblings:  processes that torchrun has started here.  Where one of them is gone, torchrun
                   is ending the others for its sake: the members need not go.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    with closing(LocalBoard()) as board:

        def hear(number: int, _: object) -> None:
            if _num_children(os.getppid()) >= num_siblings:
                board.ask_to_stop(number)

        before = signal.signal(signal.SIGTERM, hear)
        try:
            yield lambda: board.asked() != 0
        finally:
            signal.signal(signal.SIGTERM, before)


def _num_children(parent: int) -> int:
    """Return how many processes a process has started that are still there."""
    count = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, its_parent, *_ = stat.read_text().rpartition(")")[2].split()
            count += int(its_parent) == parent and state not in "ZX"
    return count
