"""Member: the life of one rank of an elastic run, through all generations.

    generation    the ranks that work together: a view says who, by which plan, from which step
    ends          a line breaks, a transport raises, or the vote says that somebody asks for it
    agree         all tell what they have done and hold; the first of them decides on the next view
    move          what a member lacks comes from those who have it
    goes on       by another plan or the same one

A process that has been started keeps all that it has loaded, traced and lowered.
"""

import gc
import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, final

import msgspec
from torch import Tensor

from penstock.checkpoints import checkpoint
from penstock.checkpoints.checkpoint import Checkpoint
from penstock.checkpoints.control import Control
from penstock.checkpoints.saver import Saver, is_due
from penstock.device import here
from penstock.errors import PenstockError, RunError
from penstock.heap import keep_freed_memory
from penstock.members.failing import failed_by, is_in_update, may_be_saved
from penstock.members.guard import Guardian
from penstock.members.mesh import SILENT_S, Mesh
from penstock.members.moving import held_row, move, moves_to
from penstock.members.own_fault import own_fault_in
from penstock.members.standing import StepWatch
from penstock.members.steps import GenerationSteps, Over
from penstock.members.views import Left, fates_of, go_on, left_of
from penstock.members.vote import Vote, Wishes
from penstock.members.words import Failed, Halt, HeldTensor, Told, View, Welcome, Where
from penstock.program.program import Program
from penstock.runtime import worker
from penstock.runtime.calls import StepResult
from penstock.runtime.finite import forget, leaving
from penstock.runtime.kept_reads import KeptReads
from penstock.runtime.key_steps import bound_of
from penstock.runtime.module_aside import set_aside
from penstock.runtime.rank import Rank
from penstock.runtime.worker import RankResult, Task
from penstock.state.python_state import packed
from penstock.state.tensor_parts import key_in, whole
from penstock.transport.transport import Transport, TransportError

_SEEK_S = 1.0  # between two attempts to reach those that cannot be reached
QUORUM_S = 60.0  # for which too few wait for the others
START = "start"  # in place of a checkpoint: the weights that the model is made with
_LOOK_S = 0.05


class GivenUpError(RunError):
    """The others went on without this member, which was silent for too long."""


class OverError(RunError):
    """The run has ended without this member, or another one has its folder."""


class RunEvent(NamedTuple):
    """Something that happened to a run, and what it cost.

    view:        with whom it goes on.
    agreed_s:    from the end of the generation before, as the first member noticed it, until all
                 had agreed on the view.
    ready_s:     from then on, until the state was where it is needed.
    stepped_s:   from then on, until the next step was done.
    """

    what: str
    view: View
    agreed_s: float = 0.0
    ready_s: float = 0.0
    stepped_s: float = 0.0
    moved_bytes: int = 0

    @property
    def words(self) -> str:
        """Return who went and came, who goes on, and how long that took."""
        view, took_s = self.view, self.agreed_s + self.ready_s + self.stepped_s
        count = len(view.members)
        who = f"{count} ranks go on" if count > 1 else "1 rank goes on"
        return f"{view.why.partition(':')[0]}: {who} from step {view.step} on, after {took_s:.2f} s"


class RunSeen(NamedTuple):
    """How a run stands, as a member sees it with a vote.

    done:    steps that have happened.
    where:   of members of the view that are there, and of `waiting` newcomers.
    """

    own: int
    is_first: bool
    done: int
    view: View
    where: Mapping[int, Where]
    waiting: tuple[int, ...]


class Pilot(Protocol):
    """What tells members what to do; every member has one of the same."""

    @property
    def last_step(self) -> int:
        """Return the steps of the run."""
        ...

    @property
    def graph(self) -> str:
        """Return the digest of the step that is trained."""
        ...

    @property
    def about(self) -> str:
        """Return what a newcomer on another host has to know of the run."""
        ...

    def task(self, view: View) -> Task:
        """Return what all ranks of a view do; one step is left to it at least."""
        ...

    def facts(self, view: View) -> str:
        """Return what all members have to have alike of it, as a digest."""
        ...

    def decide(self, view: View, left: Left, mesh: Mesh, joining: tuple[int, ...]) -> View:
        """Return the view that follows `view`; the first of those that are left is asked."""
        ...

    def may_grow(self, count: int) -> bool:
        """Return whether there is a plan for so many ranks."""
        ...

    def hears(self, view: View, factors: Sequence[float]) -> None:
        """Note by how much each rank of a view is slower than at first."""
        ...

    def shares(self, view: View, step: int) -> bool:
        """Return whether micro-batches are to be shared otherwise after a step."""
        ...

    def follows(self, seen: Callable[[], RunSeen]) -> tuple[bool, Sequence[str]]:
        """Note how the run stands; return whether this member is to leave, and words for people.

        Every member asks before each vote.
        """
        ...

    def is_to_leave(self, member: int) -> bool:
        """Return whether a member is to leave, now that a generation ends anyway."""
        ...

    def happened(self, event: RunEvent) -> None:
        """Note an event; the first rank of a view is asked."""
        ...

    def why_over(self) -> str:
        """Return why no rank may go on without the others; "": the run is not over."""
        ...


class Outside(NamedTuple):
    """How a member deals with what is around it.

    join:      makes its end of the transport of a view; `news` raises where the view is over.
    report:    takes the steps that have happened, and validations.
    asked:     the number of a signal by which the run is to stop, or 0.
    leaves:    whether this member has to go: its machine has had notice.
    says:      takes words for people.
    """

    join: Callable[[View, int, Callable[[], None]], Transport]
    report: Callable[[StepResult], None]
    asked: Callable[[], int] = lambda: 0
    leaves: Callable[[], bool] = lambda: False
    says: Callable[[str], None] = lambda words: None


@dataclass(eq=False)
class _State:
    """What a member holds after `done` steps, and how the step that it is in ends.

    holders: of weights by stage; of several that hold the same, the last one's counts.
    scale:   of the loss, which a step may change before it counts; and what the job names.
    finish:  makes its update, if it counts; `undo` takes back what it changed, if it does not.
    """

    done: int
    holders: tuple[Rank | Guardian, ...] = ()
    scale: dict[str, object] = field(default_factory=dict[str, object])
    finish: Callable[[], None] = lambda: None
    undo: Callable[[], None] = lambda: None

    def catalog(self) -> tuple[dict[str, HeldTensor], dict[str, object]]:
        """Return what tensors there are, and plain values, by key, as a checkpoint has them."""
        rows, plain = dict[str, HeldTensor](), dict[str, object]()
        for one in self.holders:
            if isinstance(one, Guardian):
                more, values = one.catalog(self.done)
            else:
                tensors, values = _state_of(one)
                more = {key: held_row(key, value) for key, value in tensors.items()}
            rows |= more
            plain |= values
        return rows, plain | self.scale

    def tensors(self, wanted: AbstractSet[str]) -> dict[str, Tensor]:
        """Return tensors by key: all of the ranks, and the guards' where they are `wanted`."""
        found = dict[str, Tensor]()
        for rank in (one for one in self.holders if isinstance(one, Rank)):
            found |= _state_of(rank)[0]
        for guard in (one for one in self.holders if isinstance(one, Guardian)):
            if wanted - found.keys():
                found = {**guard.tensors(self.done), **found}
        return found


@final
class RunMember:
    """One member; `live` returns when the run is over."""

    def __init__(self, mesh: Mesh, pilot: Pilot, outside: Outside) -> None:
        self.mesh, self.pilot, self.outside = mesh, pilot, outside
        self._view: View | None = None
        self._transport: Transport | None = None
        self._state = _State(0)
        self._newest: Told | None = None
        self._validation: StepResult | None = None  # the newest that it has heard
        self._guard: Guardian | None = None
        self._saver: Saver | None = None
        self._saved_s = time.monotonic()
        self._ended_s = self._agreed_s = 0.0
        self._vote: Vote | None = None
        self._begun = 0  # the newest generation whose steps have begun
        self._fails: Failed | None = None  # the error of its own, with which the run ends
        self._reads = KeptReads()  # of a step that does not count yet
        self._audits = 0  # steps that were asked for and kept
        self._factors = tuple[float, ...]()  # by how much each rank was slower, as it was weighed
        self._slow = 1.0  # times what this member's actions took in its first generation
        self.has_left = False  # the run goes on without it, as it asked for
        self._is_asked_to_leave = False
        mesh.on_change = self._changed
        self._watch = StepWatch(threading.get_ident(), outside.says)

    @property
    def is_first(self) -> bool:
        """Return whether this is the first member of its last view: that with the least number."""
        return self._view is not None and min(self._view.members) == self.mesh.own

    @property
    def leaves(self) -> bool:
        """Return whether this member has to go: its machine does, or is not wanted any more."""
        return self._is_asked_to_leave or self.outside.leaves()

    @property
    def last_view(self) -> View:
        """Return the newest view that it was in."""
        assert self._view is not None, "it has lived"
        return self._view

    def drop(self) -> None:
        """Let go of the transport, and of the process that writes, as a process that dies does."""
        self._close_transport()
        if self._saver is not None:
            self._saver.let_go()

    def close(self) -> None:
        """Return once what this member was to write of a checkpoint is written."""
        if self._saver is not None:
            self._saver.close()

    def live(self, view: View) -> list[RankResult] | None:
        """Run from `view` on, to the end; return what all ranks of the last generation measured.

        None where this member leaves it.

        Raises:   RunError: the job fails; too few are left; the others have given this one up.
        """
        before: View | None = None
        self._watch = StepWatch(threading.get_ident(), self.outside.says)
        self.mesh.looks = lambda: self._watch.look()
        keep_freed_memory()
        while True:
            try:
                over = self._generation(view, before)
            except TransportError as problem:
                over = None
                self._abort()
                if self._saver is not None:
                    self._saver.leave()
                self._check_reason(view, problem)
            except Exception as problem:  # noqa: BLE001 - the job's own code may raise anything
                over = None
                self._fail(view, problem)
            self._close_transport()
            if over is not None:
                self._end_failed(view)
                return over.results
            self._ended_s = self._ended_s or time.monotonic()
            before, view = view, self._agreed(view)
            self._agreed_s = time.monotonic()
            self._check_ahead(view)
            if self.mesh.own not in view.members:
                self.has_left = True
                return None

    def _fail(self, view: View, problem: Exception) -> None:
        """Raise an error of this member, unless a checkpoint is to be written before it is.

        Raises:   `problem`.
        """
        is_in_steps = self._begun == view.generation and view.fails is None
        vote = self._vote if is_in_steps else None
        folder = self.pilot.task(view).policy.folder
        own = own_fault_in(problem) if len(self.mesh.members) > 1 else None
        if own is not None:
            raise own  # the others go on, also where it came as the job's error
        alone = len(view.members) == 1
        if not may_be_saved(problem, vote, self._state.done, folder, alone=alone):
            if isinstance(problem, PenstockError):
                self.mesh.tell(failed_by(problem))
            raise problem
        self._fails = failed_by(problem)
        if vote is not None and is_in_update(vote, self._state.done):
            self._newest = self._counted(view, vote)
            self._spoil()
        self.outside.says("the job fails: a checkpoint is written first")
        self._abort()
        if self._saver is not None:
            self._saver.leave()

    def _counted(self, view: View, vote: Vote) -> Told:
        """Return the step that counts, whose update fails here."""
        told = vote.told
        assert told is not None, "a step counts"
        count = self.pilot.task(view).counted(told.step, told.micro_batches)
        return Told(told.step, told.loss, self._watch.stood_s, count, dict(told.figures))

    def _spoil(self) -> None:
        """Hold nothing but the copy of another member: of its own the update has changed a part."""
        state, guard = self._state, self._guard

        def without_update() -> None:
            kept = guard is not None and guard.may_count(state.done + 1)
            own = (guard,) if guard is not None and kept else ()
            self._state = _State(state.done + 1, own, state.scale)

        own = () if guard is None else (guard,)
        self._state = _State(state.done, own, state.scale, without_update, state.undo)

    def _end_failed(self, view: View) -> None:
        """Raise the error with which a run ends, if it does.

        Raises:   RunError.
        """
        if view.fails is not None:
            self.mesh.tell(view.fails)  # for who could not take part
            raise view.fails.error

    # -- one generation -------------------------------------------------------------------------

    def _generation(self, view: View, before: View | None) -> Over | None:
        """Work in a generation; return how the run ended, or None where another follows.

        Raises:   TransportError: a member is lost.
        """
        self._view = view
        self._forget_older(view)
        self.mesh.where |= view.where
        self.mesh.greets = partial(self._welcome, view)
        self._check(view)
        position, task = view.members.index(self.mesh.own), self.pilot.task(view)
        transport = self._transport = self.outside.join(view, position, partial(self._check, view))
        transport.connect(task.groups)
        self._check(view)
        rank = worker.rank_of(task, transport, self._heard, tells_all=True, kept=self._reads)
        vote = self._vote = Vote(rank, partial(self._wishes, view, task))
        rank.commits_by(vote)
        program, bound = task.windows.programs[0], bound_of(rank, task.windows.programs, task.keys)
        came = self._load(view, rank)
        guard, more = self._guarded(rank, program, view.step)
        if task.policy.folder is not None and position == 0:
            if view.generation == 1:  # later ones may be completing what was begun
                checkpoint.discard(task.policy.folder)
            forget(task.policy.folder)
        self._hold(rank, view.step, keep=True)
        everyone = tuple(range(transport.num_ranks))  # all have what they need when this is over
        came = sum(map(int, transport.all_gather_bytes(str(came + more).encode(), everyone)))
        self._guard = guard  # whose ward has written all that it begins with
        self._settle_in(rank, view.step)
        self.mesh.forget(view.generation)
        left, attempt = range(view.step, self.pilot.last_step), f"-{view.generation}"
        steps = GenerationSteps(rank, task, vote, bound, left, attempt)
        steps.watch.saver = self._saving(task, transport, view, before)
        vote.slow = partial(self._slowness, steps)
        note = self._noting(self._event(view, came))
        self._begins(view, steps)
        held = partial(worker.held_tensors, rank)
        try:
            with leaving(task.policy.folder, transport, rank.peers, held):
                return steps.run(self, note)
        finally:
            self._slow = self._slowness(steps)
            self._abort_unless_over(steps)
            steps.close()

    def _begins(self, view: View, steps: GenerationSteps) -> None:
        """Tell again what a first member that died may not have written down."""
        self._report(view.newest)
        if self._validation is not None and self.is_first:
            self.outside.report(self._validation)
        steps.validates, steps.only_saves = view.validates, view.fails is not None
        self._begun, self._factors = view.generation, ()
        self._watch.begins()

    @staticmethod
    def _guarded(rank: Rank, program: Program, step: int) -> tuple[Guardian | None, int]:
        """Return what keeps a copy of another rank, if any does, and the bytes that came for it."""
        if program.end.guard is None:
            if rank.transport.is_queued:  # its channels are opened in one order
                rank.transport.barrier()
            return None, 0
        guard = Guardian(rank, program)
        came = guard.begin(step)
        rank.gives_by(guard.exchange, guard.size_bytes)
        return guard, came

    def _saving(
        self, task: Task, transport: Transport, view: View, before: View | None
    ) -> Saver | None:
        """Return what writes this member's checkpoints, in this generation as in those before."""
        if task.policy.folder is None:
            return None
        if self._saver is None:
            self._saver = Saver(task.policy, transport, Control(None))
        is_saved = before is not None and is_due(view.step, task.policy.every)
        due = view.step if is_saved and not view.resume else None
        self._saver.enter(transport, partial(self._check, view), view.generation, due=due)
        return self._saver

    def _forget_older(self, view: View) -> None:
        """Hold nothing, where all go back to a checkpoint, or this member is a newcomer.

        Raises:   RunError: the job fails, and there is nothing to write down.
        """
        if view.resume:
            self._end_failed(view)
        if view.resume or self._state.done != view.step:
            self._state = _State(view.step)

    def _slowness(self, steps: GenerationSteps) -> float:
        """Return what this member's actions take now, by what they took at first."""
        return self._slow * steps.slowness

    def _welcome(self, view: View) -> Welcome:
        """Return what a newcomer has to know of this generation."""
        where, pilot = self.mesh.where, self.pilot
        here = {m: where[m] for m in view.members if m in where}
        return Welcome(here, pilot.graph, pilot.about)

    def _load(self, view: View, rank: Rank) -> int:
        """Fill a rank with the state of the view's step; return the bytes that came from others.

        Raises:   RunError: a member makes something else of the view.
        """
        names = self._told_names(view, rank)
        if view.resume == START:
            return 0
        rank.optimizers.may_resume()
        if view.resume:
            rank.load(checkpoint.load(Path(view.resume)))
            return 0
        wanted = [
            moves_to(member, partial(_is_needed, theirs), view.holds)
            for member, theirs in zip(view.members, names, strict=True)
        ]
        mine = {one.of.key for rows in wanted for one in rows if one.source == self.mesh.own}
        moved = move(rank.transport, view.members, self._state.tensors(mine), wanted)
        plain = {key: msgspec.json.decode(value) for key, value in view.plain.items()}
        rank.load(Checkpoint(view.step, whole(moved.tensors), plain))
        return moved.received_bytes

    def _told_names(self, view: View, rank: Rank) -> list[frozenset[str]]:
        """Return the names that each rank of a view needs; all tell each other, and compare."""
        own = json.dumps([self.pilot.facts(view), sorted(_names(rank))]).encode()
        everyone = tuple(range(rank.transport.num_ranks))
        told = [json.loads(text) for text in rank.transport.all_gather_bytes(own, everyone)]
        facts = [row[0] for row in told]
        if len({*facts}) > 1:
            message = f"members {view.members} make different programs of one plan: {facts}"
            raise RunError(message, hint="have all of them the same job file and packages?")
        return [frozenset(row[1]) for row in told]

    def _settle_in(self, rank: Rank, step: int) -> None:
        """Hold what a rank has after so many steps alone, and nothing of the last generation."""
        self._hold(rank, step)
        set_aside(rank)
        worker.note_model(rank)
        if not here().is_cpu:
            gc.collect()

    def _hold(self, rank: Rank, step: int, *, keep: bool = False) -> None:
        """Note what this member can give to others after so many steps.

        keep:  beside what it had before: the others may not have got yet what they need.
        """
        scale = dict[str, object]()
        if rank.loss_scale is not None:
            rank.loss_scale.put(scale)
        scale |= packed(rank.job)
        own = (rank,) if self._guard is None or keep else (self._guard, rank)
        if self._guard is not None and not keep:
            self._guard.counts(step)
        self._state = _State(step, (*self._state.holders, *own) if keep else own, scale)
        self.mesh.done = step

    # -- between generations --------------------------------------------------------------------

    def _agreed(self, view: View) -> View:
        """Tell what this member has, and return the next view.

        Raises:   RunError: the job fails elsewhere; too few are left.  GivenUpError.
                  OverError.
        """
        self._say(view)
        until, sought_s = time.monotonic() + QUORUM_S, math.inf
        while True:
            self.mesh.wait(partial(self._is_news, view), _LOOK_S)
            self._check_failed()
            self._catch_up(view)
            new = self.mesh.view
            if new is None or new.generation <= view.generation:
                new = self._decided(view)
            if new is not None:
                self._state.undo()
                return new
            left = until - time.monotonic()
            if left < 0:
                raise self._too_few(view)
            if self._is_apart(view) and left < sought_s - _SEEK_S:
                self._check_over()
                self._seek(view, is_first=sought_s == math.inf)
                sought_s = left

    def _is_apart(self, view: View) -> bool:
        """Return whether all that are here have stopped, and are too few to go on."""
        mesh, members = self.mesh, sorted(view.members)
        left = left_of(view.generation, members, mesh.lost, mesh.stopped)
        return left is not None and not go_on(members, left, fates_of(mesh.ends))

    def _seek(self, view: View, *, is_first: bool) -> None:
        """Ask those that cannot be reached whether they went on; say so the first time."""
        silent = [m for m in view.members if self.mesh.lost.get(m) == "silent"]
        if is_first:
            words = f"ranks {silent} cannot be reached, and may go on: waiting {QUORUM_S:.0f} s"
            self.outside.says(f"{words} for them")
        for member in silent:
            self.mesh.seek(member)

    def _catch_up(self, view: View) -> None:
        """Make the update of a step that others have seen happen, and tell what is held then."""
        ahead = self._ahead(view)
        if ahead:
            self._newest = ahead[0].newest
            try:
                self._state.finish()
            except Exception as problem:  # noqa: BLE001 - the job's own optimizer may raise anything
                self._fails = failed_by(problem)
                self._spoil()
            self._say(view)

    def _ahead(self, view: View) -> list[Halt]:
        """Return what members have told that have seen a step more happen than this one.

        One whose own update fails has seen it, and has not done it; so does this one then, and
        waits for one that has.
        """
        told = (self.mesh.stopped[m] for m in view.members if m in self.mesh.stopped)
        ended = [one for one in told if one.generation == view.generation]
        done = self._state.done
        return [
            one
            for one in ended
            if one.done > done or (not self._fails and one.counted_steps > done)
        ]

    def _say(self, view: View) -> None:
        if self.mesh.view is not None and self.mesh.view.generation >= view.generation:
            self.mesh.tell(self.mesh.view)  # who was to hear it may have missed it
        rows, values = self._state.catalog()
        plain = {k: msgspec.Raw(msgspec.json.encode(v)) for k, v in values.items()}
        lost = tuple(m for m in view.members if m in self.mesh.lost)
        self._is_asked_to_leave |= self.pilot.is_to_leave(self.mesh.own)
        holds = tuple(rows[key] for key in sorted(rows))
        own = view.generation, self._state.done, holds, plain, self._newest, lost, self.leaves
        heard = -1 if self._validation is None else self._validation.step
        self.mesh.tell(Halt(*own, heard, self._fails))

    def _is_news(self, view: View) -> bool:
        mesh, new = self.mesh, self.mesh.view
        is_new = new is not None and new.generation > view.generation
        is_over = mesh.failed is not None or mesh.given_up
        return is_new or is_over or bool(self._ahead(view)) or self._left(view) is not None

    def _left(self, view: View) -> Left | None:
        """Return what is left, if this member is the one to decide, and can."""
        mesh, members = self.mesh, sorted(view.members)
        if next((m for m in members if m not in mesh.lost), None) != mesh.own:
            return None
        left = left_of(view.generation, members, mesh.lost, mesh.stopped)
        if left is None or not left.members:
            return None
        return left if go_on(members, left, fates_of(mesh.ends)) else None

    def _decided(self, view: View) -> View | None:
        """Return the next view if this member is the one to decide, and can."""
        left, mesh = self._left(view), self.mesh
        if left is None:
            return None
        self._check_over()
        decided = self.pilot.decide(view, left, mesh, tuple(self._newcomers(view)))
        halts = (mesh.stopped[m] for m in view.members if m in mesh.stopped)
        told = (one.fails for one in halts if one.generation == view.generation and one.fails)
        validates = self._lacks_validation(view, decided)
        decided = msgspec.structs.replace(decided, validates=validates, fails=next(told, None))
        mesh.tell(decided)
        for member, how in left.gone.items():
            if member not in mesh.lost and how != "notice":
                mesh.give_up(member)
        return decided

    def _lacks_validation(self, view: View, decided: View) -> bool:
        """Return whether the step before a view was to be validated, and nobody has heard of it."""
        if decided.resume or decided.step >= self.pilot.last_step:
            return False  # of the last step it is done anyway
        every = self.pilot.task(view).policy.validate_every
        told = (halt.validated for halt in self.mesh.stopped.values())
        is_heard = max(told, default=-1) >= decided.step - 1
        return is_due(decided.step, every) and not is_heard

    def _check_ahead(self, view: View) -> None:
        """Raise where this member has made the update of a step that a view begins with.

        It had heard that the step counts from one whom who decided could not reach.
        Raises:   GivenUpError: it cannot take the update back; it joins the others anew.
        """
        if not view.resume and self._state.done > view.step:
            words = f"step {self._state.done} has counted for member {self.mesh.own}"
            message = f"{words}, and the others go on after step {view.step}"
            raise GivenUpError(message, hint="it can join again: penstock join")

    def _check_over(self) -> None:
        """Raise where the run has ended without this member: it may have been apart from it.

        Raises:   OverError.
        """
        if words := self.pilot.why_over():
            raise OverError(words)

    def _too_few(self, view: View) -> RunError:
        mesh = self.mesh
        here = {m for m, told in mesh.stopped.items() if told.generation == view.generation}
        apart = [m for m in view.members if m in mesh.lost or m not in {*here, mesh.own}]
        words = ", ".join(f"{m} {mesh.lost.get(m, 'does not answer')}" for m in apart)
        message = f"too few ranks are left to go on without the others: {words}"
        hint = "the others may go on; if they do not, resume=True continues from a checkpoint"
        return RunError(message, hint=hint)

    def _check_reason(self, view: View, problem: TransportError) -> None:
        """Raise `problem` unless the generation ended because somebody was lost, or asks for it.

        Raises:   TransportError.
        """
        self._ended_s = self._ended_s or time.monotonic()
        mesh, others = self.mesh, [m for m in view.members if m != self.mesh.own]

        def is_explained() -> bool:
            newer = mesh.view is not None and mesh.view.generation > view.generation
            told = (mesh.stopped[m].generation for m in others if m in mesh.stopped)
            some = any(generation >= view.generation for generation in told)
            lost = any(m in mesh.lost for m in others)
            return lost or some or newer or mesh.failed is not None or mesh.given_up

        if not mesh.wait(is_explained, 2 * SILENT_S):
            mesh.tell(Failed(problem.message, problem.hint))
            raise problem
        self._check_failed()

    def _check_failed(self) -> None:
        failed = self.mesh.failed
        if failed is not None:
            raise failed.error
        if self.mesh.given_up:
            message = f"member {self.mesh.own} was silent for too long: the others went on"
            raise GivenUpError(message, hint="it can join again: penstock join")

    def _check(self, view: View) -> None:
        """Raise if a member of a view is lost, or a newer view is known.

        Raises:   TransportError.
        """
        for rank, member in enumerate(view.members):
            if member in self.mesh.lost:
                raise TransportError(rank, f"is lost: {self.mesh.lost[member]}")
        new = self.mesh.view
        if new is not None and new.generation > view.generation:
            raise TransportError(0, f"has gone on to generation {new.generation}")
        if self.mesh.failed is not None or self.mesh.given_up:
            raise TransportError(0, "has failed, or gone on")

    def _changed(self) -> None:
        """A member is lost, has stopped, or asks to be taken in; called in the mesh's thread."""
        view, mesh = self._view, self.mesh
        if view is None:
            return
        lost = any(member in mesh.lost for member in view.members)
        told = (mesh.stopped[m] for m in view.members if m in mesh.stopped)
        apart = any(one.generation >= view.generation and (one.lost or one.fails) for one in told)
        if lost or apart or mesh.failed is not None or mesh.given_up:
            self._abort()

    def _abort(self) -> None:
        transport = self._transport
        if transport is not None:
            transport.abort("a member was lost")

    def _abort_unless_over(self, steps: GenerationSteps) -> None:
        """Let no lane wait any more, where the generation broke."""
        if not steps.is_over:
            self._abort()

    def _close_transport(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    # -- what steps ask for ---------------------------------------------------------------------

    def _wishes(self, view: View, task: Task) -> Wishes:
        """Return what this member asks for with the next vote."""
        is_first, vote = self.is_first, self._vote
        shares = False
        if vote is not None and vote.factors != self._factors:  # of others nothing new follows
            self._factors = vote.factors
            self.pilot.hears(view, vote.factors)
            shares = is_first and self.pilot.shares(view, vote.passed + 1)
        return Wishes(
            regroup=shares or (is_first and bool(self._newcomers(view))),
            save=self._wants_checkpoint(task),
            stop=self.outside.asked() != 0 or self.mesh.is_asked_to_stop,
            audit=self._wants_audit(task),
            leave=self._follows(view) or self.outside.leaves(),
        )

    def _follows(self, view: View) -> bool:
        """Return whether this member is to leave, as the pilot has it."""
        leaves, words = self.pilot.follows(partial(self._seen, view))
        for each in words:
            self.outside.says(each)
        self._is_asked_to_leave = self._is_asked_to_leave or leaves
        return self._is_asked_to_leave

    def _seen(self, view: View) -> RunSeen:
        mesh = self.mesh
        waiting = tuple(m for m in sorted(mesh.asks) if m not in view.members and m in mesh.members)
        here = [m for m in view.members if m not in mesh.lost]
        where = {m: mesh.where[m] for m in (*here, *waiting) if m in mesh.where}
        return RunSeen(mesh.own, self.is_first, self._state.done, view, where, waiting)

    def _wants_checkpoint(self, task: Task) -> bool:
        """Return whether one is due by the clock, or was dropped with a generation."""
        saver, every_s = self._saver, task.policy.every_s
        if saver is None:
            return False
        is_late = every_s is not None and time.monotonic() - self._saved_s >= every_s
        return saver.has_lapsed or (self.is_first and is_late and not saver.is_put_off())

    def _wants_audit(self, task: Task) -> bool:
        """Return whether a step is asked for that was not kept yet."""
        board = None if task.audits is None else task.board
        return board is not None and board.audits_asked() > self._audits

    def audited(self, task: Task) -> None:
        """Note that the next step is one that was asked for."""
        if task.board is not None:
            self._audits = task.board.audits_asked()

    def _newcomers(self, view: View) -> list[int]:
        """Return who asks to be taken in, and can be: as many as there are plans for."""
        mesh = self.mesh
        if not mesh.asks:
            return []
        here = {m for m in view.members if m not in mesh.lost}
        asks = {m: ask for m, ask in sorted(mesh.asks.items()) if m not in view.members}
        ready = [m for m, ask in asks.items() if here <= {*ask.known} and m in mesh.members]
        counts = [n for n in range(len(ready) + 1) if self.pilot.may_grow(len(here) + n)]
        return ready[: max(counts, default=0)]

    def _heard(self, result: StepResult) -> None:
        """Pass on what a rank reports; of steps only the vote tells."""
        if result.validated is not None:
            self._validation = result
            if self.is_first:
                self.outside.report(result)

    def saved(self) -> None:
        """Note that a checkpoint was written."""
        self._saved_s = time.monotonic()

    def begins(self, finish: Callable[[], None], undo: Callable[[], None]) -> None:
        """Note how the step that begins is finished if it counts, and undone if it does not."""
        self._state.finish, self._state.undo = finish, undo
        self._watch.goes_on()

    def counts(self, told: Told, rank: Rank) -> None:
        """Note that a step has happened; the first rank reports it."""
        self._newest = told
        self._reads.clear()
        self._watch.counts()
        self._hold(rank, told.step + 1)
        self._report(told)

    def late(self, rank: Rank, step: int) -> None:
        """Note that the update of a step was made after its generation had ended."""
        self._reads.clear()
        self._hold(rank, step + 1)

    def _report(self, told: Told | None) -> None:
        if told is not None and self.is_first:
            self.outside.report(StepResult(*told))

    def _event(self, view: View, came: int) -> RunEvent:
        """Return what has happened; a newcomer may be the first of those that go on."""
        joined = bool(view.before) and not {*view.members} <= {*view.before}
        leaves = bool(view.gone) and {*view.gone.values()} <= {"left", "notice"}
        what = "left" if leaves else "lost" if view.gone else "moved"
        what = what if view.before else "begins"
        what = "joined" if joined and not view.gone else what
        now = time.monotonic()
        ended, agreed = self._ended_s or now, self._agreed_s or now
        self._ended_s = self._agreed_s = 0.0
        return RunEvent(what, view, agreed - ended, now - agreed, moved_bytes=came)

    def _noting(self, event: RunEvent) -> Callable[[], None]:
        return partial(self._note, event, time.monotonic()) if self.is_first else _nothing

    def _note(self, event: RunEvent, since_s: float) -> None:
        event = event._replace(stepped_s=time.monotonic() - since_s)
        self.pilot.happened(event)
        if event.what != "begins":
            self.outside.says(event.words)


def _nothing() -> None:
    """Note nothing: another rank does."""


def _state_of(rank: Rank) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Return what a rank holds, by key."""
    tensors, plain = dict[str, Tensor](), dict[str, object]()
    for weights in rank.weights.values():
        more, values = weights.state()
        tensors |= more
        plain |= values
    return tensors, plain


def _names(rank: Rank) -> frozenset[str]:
    """Return the names of the parameters and buffers that live on a rank."""
    found: set[str] = set()
    for weights in rank.weights.values():
        found |= {*map(key_in, weights.names.values()), *weights.buffer_names.values()}
    return frozenset(found)


def _is_needed(names: frozenset[str], key: str) -> bool:
    """Return whether a rank with these parameters needs a tensor: its own, or one of nobody's."""
    place, _, rest = key_in(key).partition("/")
    if place in ("weights", "buffers"):
        return rest in names
    if place.startswith("optimizer") and not place.startswith(("optimizer-own", "optimizer-group")):
        return rest.rpartition("/")[0] in names
    return True
