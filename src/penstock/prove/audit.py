"""Audit: steps all through a run, made again by the plain loop beside it, and compared.

The proof before a run is of its first steps.  What differs later - a micro-batch of another kind, a
counter that comes to its end, a message that a broken rank sends - is found by audits: ranks keep
the state before a step, the gradients, and the state after it (runtime/audited.py); this process,
which is forked from the one that leads the run, takes the state over into the author's own objects
and makes the step from it, on the data as the author yields it.  On an accelerator, which no fork
can use, it is the same command begun anew (training/audit_anew.py), in memory that plans leave.

Which steps: the first of a run, of a resumed one, of another plan and of another set of ranks; the
last one; and between them as many, at random, as the share of the run's processor time pays for,
ever rarer ones.  A step that is equal moves on how far the run is proved, and the newest checkpoint
up to there is kept as checkpoints/audited.  One that differs ends the run, unless that is not
wanted, and what was kept of it stays as FOLDER/differs.

Steps of an asynchronous schedule have no state between them, but its windows have: their first
steps are made again by the sequential definition of the weight rule.

Ignores:  the later steps of a window, into which nobody can enter.
"""

import gc
import json
import os
import shutil
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple, final

from penstock.checkpoints import checkpoint
from penstock.checkpoints.control import Board
from penstock.device import Device
from penstock.errors import RunError
from penstock.files import add_line, json_object
from penstock.graph.module_facts import SINCE
from penstock.processes.begun_anew import BegunAnew
from penstock.processes.child import Aside
from penstock.prove.audit_checkpoint import keep_audited
from penstock.prove.audit_desk import AskedBoard, AuditDesk
from penstock.prove.audit_pace import AuditBasis, Pace, used_s, used_with_s
from penstock.prove.audit_parts import lacks_room, put_together, words_of
from penstock.prove.audits import AUDITS, KEPT, SHORT, Audit, Audited, AuditTerms
from penstock.prove.plain_side import Case, PlainLoop, judged, plain_loop
from penstock.prove.proof import Proof
from penstock.runtime.audited import Audits, is_final, is_kept, law_of, step_of
from penstock.typed import typed
from penstock.units import format_bytes

HIDDEN = ".audit"  # where ranks keep steps until they are audited
DIFFERS = -2  # in place of the signal for which ranks stop
_NICE = 10
_LOOK_S, _SELDOM_S = 0.02, 5.0  # between two looks whether a step was kept, at least and at most
_BEGIN = 5  # times what a fork takes is what the process takes until its first step is compared
_SEEN_S = 2.0  # between two looks whether the last audit still goes on
_EVERY = 0.1  # of the time that a step is waited for
_LOST_S = 5.0  # for which a step is waited for that was asked for, at least
_LOST_STEPS = 300  # likewise, as long as these take: windows of asynchronous schedules are long

# -- in the process that leads a run --------------------------------------------------------------


@final
class Auditor:
    """What audits one run: `audits` for its ranks, `finish` for what was found."""

    def __init__(self, folder: Path, desk: AuditDesk, aside: Aside | BegunAnew) -> None:
        self.folder, self.desk, self._aside = folder, desk, aside
        self.audits = Audits(folder / HIDDEN, desk.affords)
        self._before = len(_rows_in(folder))  # audits of runs before this one

    def finish(self) -> Audited:
        """Return what all audits have found, once the last one is made; no rank is at work.

        Of a process that is gone, killed or broken, that is what it has written.
        """
        self.desk.end()
        try:
            while (told := self._aside.poll(_SEEN_S)) is None:
                pass
        except RunError as problem:
            why = problem.message.strip().splitlines()[-1]
            rows = tuple(_rows_in(self.folder)[self._before :])
            return Audited(rows, failed=f"the process that audits is gone: {why}")
        return typed(Audited, told[0])

    def close(self) -> None:
        """End the process, and remove what ranks have kept."""
        self._aside.close()
        self.desk.close()
        shutil.rmtree(self.folder / HIDDEN, ignore_errors=True)


def _rows_in(folder: Path) -> list[Audit]:
    """Return the audits that are written down in the folder of a run, also of earlier ones."""
    path = folder / AUDITS
    lines = path.read_text().splitlines() if path.exists() else []
    rows = (json_object(line, RunError, f"{path}") for line in lines if line.endswith("}"))
    return [typed(Audit, {k: v for k, v in row.items() if k != "time"}) for row in rows]


def why_not(case: Case, terms: AuditTerms, folder: Path, basis: AuditBasis) -> str:
    """Return why a run cannot be audited; empty: it can."""
    if not terms.share:
        return "audit is 0"
    if not case.backward:
        return "the schedule trains nothing"
    if basis.is_short(terms.share):
        return SHORT
    folder.mkdir(parents=True, exist_ok=True)
    room = shutil.disk_usage(folder).free
    if 2 * basis.bytes > room:
        return f"a step takes {format_bytes(basis.bytes)}, and {folder} has {format_bytes(room)}"
    return ""


class Anew(NamedTuple):
    """How a process that audits is begun anew.

    asked:    what is asked of it besides (`audit_asked`), as JSON values.
    device:   on which it computes.
    """

    asked: Mapping[str, object]
    device: Device


@contextmanager
def auditing(
    case: Case, folder: Path, board: Board, terms: AuditTerms, basis: AuditBasis, anew: Anew | None
) -> Generator[Auditor]:
    """Give what audits a run in `folder`; nothing of it is left afterwards.

    board:    asked for steps, and to stop where one differs.
    anew:     how its process is begun; None: it is forked.
    """
    shutil.rmtree(folder / HIDDEN, ignore_errors=True)
    desk, start_s = AuditDesk(), time.process_time()
    clock = AuditClock(os.getpid(), used_s() - basis.before_s)
    if anew is None:
        pace = Pace(terms.share, basis, clock.seen_s)
        aside = Aside(lambda: _audited(case, folder, desk, board, terms, pace))
        fork_s = time.process_time() - start_s
        basis = basis._replace(begin_s=max(basis.begin_s, _BEGIN * fork_s))
    else:
        asked = {**anew.asked, "desk": desk.files, "clock": clock, "basis": basis}
        aside, fork_s = BegunAnew(asked, desk.files, anew.device.index), 0.0
        desk.hand_on(board)
    desk.may(basis.affords(terms.share))
    desk.began(aside.pid, fork_s)
    auditor = Auditor(folder, desk, aside)
    try:
        yield auditor
    finally:
        auditor.close()


class AuditClock(NamedTuple):
    """What tells the processor time of a run: of the process that leads it, since a moment."""

    leader: int
    begun_s: float

    def seen_s(self) -> float:
        """Return the processor time of the run so far as far as this host sees it."""
        return used_with_s(self.leader) - self.begun_s


@final
class Asks:
    """The steps that were asked for; of one whose rank was lost nobody will tell."""

    def __init__(self) -> None:
        self.count, self.longest_s = 0, 0.0
        self._since_s: float | None = None

    @property
    def is_open(self) -> bool:
        """Return whether a step that was asked for is waited for."""
        return self._since_s is not None

    @property
    def waited_s(self) -> float:
        """Return for how long a step was waited for by now."""
        return 0.0 if self._since_s is None else time.monotonic() - self._since_s

    def heard(self) -> None:
        """Note that a step was kept."""
        if self._since_s is not None:
            self.longest_s = max(self.longest_s, time.monotonic() - self._since_s)
        self._since_s = None

    def ask(self, board: AskedBoard, pace: Pace) -> None:
        """Ask for a step, if one is due and none is waited for."""
        now_s = time.monotonic()
        lost_s = max(_LOST_S, 3 * self.longest_s, _LOST_STEPS * pace.basis.step_s)
        if self._since_s is not None and now_s - self._since_s > lost_s:
            self._since_s = None
        if self._since_s is None and pace.is_due():
            self.count, self._since_s = self.count + 1, now_s
            board.ask_to_audit(self.count)


# -- in the process that audits -------------------------------------------------------------------


def _audited(
    case: Case, folder: Path, desk: AuditDesk, board: Board, terms: AuditTerms, pace: Pace
) -> dict[str, Any]:
    """Audit until the run is over, or a step differs; return what was found as JSON values."""
    os.nice(_NICE)
    gc.freeze()  # what is there is the parent's: looking for what is free in it would copy it all
    with (
        Path(os.devnull).open("w") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
    ):
        return asdict(Bench(case, folder, desk, pace).run(board, terms))


def audit_asked(case: Case, folder: Path, terms: AuditTerms, asked: Mapping[str, Any]) -> Audited:
    """Audit in a process that was begun anew, as it was asked to; return what was found."""
    os.nice(_NICE)
    desk = AuditDesk(typed(tuple[int, int, int], asked["desk"]))
    basis = AuditBasis(*asked["basis"])
    pace = Pace(terms.share, basis, AuditClock(*asked["clock"]).seen_s)
    return Bench(case, folder, desk, pace).run(desk, terms)


@final
class Bench:
    """Makes steps again, one after the other."""

    def __init__(self, case: Case, folder: Path, desk: AuditDesk, pace: Pace) -> None:
        self.case: Case = case
        self.folder, self.desk, self.pace = folder, desk, pace
        self.loop: PlainLoop | None = None
        self.rows: list[Audit] = []
        self.asks = Asks()
        self.failed = self.missed = self.but = ""

    def run(self, board: AskedBoard, terms: AuditTerms) -> Audited:
        """Audit what ranks keep, and ask for more; return what was found once the run is over."""
        while not self.desk.has_begun:
            time.sleep(_LOOK_S)
        first_is_kept = self.desk.is_open
        while True:
            is_over = self.desk.is_over()  # asked first: what was kept before is seen then
            place = self.next(is_over=is_over)
            if place is not None:
                self.asks.heard()
                self.desk.found()
                self.desk.may(self.pace.affords() - 1)
                self.audit(place)
                wrong = bool(self.rows) and bool(self.rows[-1].problem)
                if wrong and terms.otherwise != "warn":
                    board.ask_to_stop(DIFFERS)
                if self.failed or wrong:
                    break
            elif is_over:
                break
            else:
                self.pace.used(self.own_s)
                waits = first_is_kept and not (
                    self.rows or self.missed
                )  # as was said by who leads the run
                if not waits:
                    self.asks.ask(board, self.pace)
                    self.desk.may(self.pace.affords() - self.asks.is_open)
                self.desk.wait(self._soon_s(first=waits))
        self.desk.may(0)
        self.pace.used(self.own_s)
        own = self.pace.spent_s, self.pace.of_s
        return Audited(tuple(self.rows), *own, self.failed or self.missed, but=self.but)

    @property
    def own_s(self) -> float:
        """Return the processor time of this process: forking it, and its end, which takes as
        long."""
        return time.process_time() + 2 * self.desk.fork_s

    def _soon_s(self, *, first: bool) -> float:
        """Return when to look for a step that was kept: seldom, where none is waited for."""
        now_s = time.monotonic()
        if first or self.asks.is_open:
            waited_s = now_s - self.pace.begun_s if first else self.asks.waited_s
            return min(_SELDOM_S, max(_LOOK_S, _EVERY * waited_s))
        return min(_SELDOM_S, max(_LOOK_S, self.pace.soon_s()))

    def next(self, *, is_over: bool = False) -> Path | None:
        """Return where a step was kept that was not audited; None: there is none.

        One that a rank has left out is there once all have kept a later one, or none is at work.
        """
        hidden = self.folder / HIDDEN
        with suppress(FileNotFoundError):
            places = sorted(hidden.iterdir())
            whole = [is_kept(place) for place in places]
            for at, place in enumerate(places):
                if whole[at] or (is_final(place) and (is_over or any(whole[at:]))):
                    return place
        return None

    def audit(self, place: Path) -> None:
        """Make the step that was kept in a folder again, and compare; what cannot be made differs.

        What the machine has no room for, and a folder that not all ranks see, say nothing of a
        step: then there are no more audits.  Nor do files and hosts that the author's code does
        not reach just now: another step is audited.
        """
        step, start_s = step_of(place), time.process_time()
        is_seen = bool(self.rows) or any(map(is_kept, place.parent.iterdir()))
        try:
            kept = put_together(place, step)
            if self._is_of_another_plan(kept.law):
                self._fail(place, "the plan was made again by an asynchronous schedule")
                return
            case = self._case(kept.law, range(step, step + kept.steps))
            if self.loop is None and case.late is None:
                self.loop = plain_loop(case, digests=False)
                start_s = time.process_time()
            proof = self._proof(case, place)
        except Exception as problem:  # noqa: BLE001 - the job's own code may raise anything
            if lacks_room(problem) or not is_seen:
                self._fail(place, words_of(problem))
            elif isinstance(problem, OSError):
                self._miss(place, words_of(problem))
            else:
                self._tell(place, Audit(step, words_of(problem), "", self.own_s))
            return
        cost_s = self.pace.told(kept.cpu_s, self.own_s, time.process_time() - start_s)
        words = ", ".join(map(str, proof.differences))
        late = f"{kept.change} {SINCE}" if kept.change else ""
        problem = "; ".join(filter(None, (late, proof.problem)))
        self._tell(place, Audit(step, problem, words, cost_s, len(proof.steps), bool(late)))

    def _tell(self, place: Path, row: Audit) -> None:
        """Note what an audit has found; a step that differs stays."""
        self.rows.append(row)
        add_line(self.folder / AUDITS, json.dumps({**asdict(row), "time": time.time()}))
        if row.problem:
            shutil.rmtree(self.folder / KEPT, ignore_errors=True)
            place.rename(self.folder / KEPT)
        else:
            shutil.rmtree(place)
            keep_audited(self.folder / "checkpoints", row.step + row.steps)

    def _fail(self, place: Path, why: str) -> None:
        self.failed = f"step {step_of(place) + 1} could not be audited: {why}"
        shutil.rmtree(place, ignore_errors=True)

    def _miss(self, place: Path, why: str) -> None:
        self._fail(place, why)
        self.missed, self.failed = self.failed, ""
        if self.loop is not None:
            self.loop.plain.rest()

    def _is_of_another_plan(self, law: str) -> bool:
        late = self.case.late
        return bool(law) and (late is None or law != law_of(late.program, late.stages))

    def _case(self, law: str, steps: range) -> Case:
        """Return the task that a step, or a window that is computed by a law, is."""
        return replace(self.case, steps=tuple(steps), late=self.case.late if law else None)

    def _proof(self, case: Case, place: Path) -> Proof:
        """Return how steps differ; an update that follows from no state is left out."""
        before = checkpoint.folder_of(place / "before", case.steps[0])
        case = replace(case, resume=before)
        found = judged(case, place, self.loop)
        if self.loop is not None:
            self.loop.plain.rest()
        if found.problem and case.updates and (why := case.forgets()):
            self.but, self.case = why, replace(self.case, updates=False)
            return self._proof(replace(case, updates=False), place)
        return found
