"""Steps: those of one generation, on one rank, each of which counts once all ranks say so."""

import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, Protocol, final

import torch

from penstock.checkpoints.control import Control, Do
from penstock.members.failing import is_kept
from penstock.members.vote import Vote, Wishes
from penstock.members.words import Told
from penstock.program.alone import fewest_holders
from penstock.runtime import worker
from penstock.runtime.audited import keeper_of
from penstock.runtime.calls import Bound
from penstock.runtime.launch import as_json, from_json
from penstock.runtime.rank import Rank
from penstock.runtime.worker import RankResult, Task


class Over(NamedTuple):
    """The run is over, or was stopped: what all ranks measured."""

    results: list[RankResult]


class Keeper(Protocol):
    """What the steps of a generation tell the member that runs them."""

    def begins(self, finish: Callable[[], None], undo: Callable[[], None]) -> None: ...

    def counts(self, told: Told, rank: Rank) -> None: ...

    def late(self, rank: Rank, step: int) -> None: ...

    def saved(self) -> None: ...

    def audited(self, task: Task) -> None: ...


@final
class GenerationSteps:
    """The steps of a generation, which may be none.

    attempt:  tells what it keeps of a step from what a generation before has kept of the same.
    """

    def __init__(
        self,
        rank: Rank,
        task: Task,
        vote: Vote,
        bound: Mapping[int, list[Bound]],
        steps: range,
        attempt: str = "",
    ) -> None:
        self.rank, self.task, self.vote, self.bound = rank, task, vote, bound
        self.first, self.last, self.is_over = steps.start, steps.stop, False
        self.validates = False  # the step before the first one: its validation was broken off
        self.only_saves = False  # the job fails: no step is made any more
        self.watch = worker.WindowRunner(rank, Control(None))
        if task.audits is not None:
            part = partial(worker.state_of, rank)
            self.watch.keeper = keeper_of(rank, task.audits, part, attempt)
        rank.gives_by(self.watch.meter.inside(rank.guard), rank.guarded_bytes)
        captures = rank.capture, *(each.capture for each in task.keys)
        written = {name for each in captures for name in each.graph.written}
        self.buffers = [
            value for w in rank.weights.values() for n, value in w.buffers.items() if n in written
        ]

    @property
    def slowness(self) -> float:
        """Return what this rank's actions take now, by what they took when the generation began."""
        return self.watch.sampler.drift.factor

    def run(self, member: Keeper, note: Callable[[], None]) -> Over | None:
        """Run steps until the run is over, or somebody asks for another generation (None).

        note:  called once the first step is done.
        Raises:   TransportError: a rank is lost.
        """
        if self.only_saves:
            return self._saved_only()
        once, asked = worker.run_once(self.task), Wishes()
        with torch.no_grad():
            if self.validates:
                self._save(member, self.first, asked)
            self.watch.audits(affordable=self.first < self.last)
            for number, step in enumerate(range(self.first, self.last)):
                self._step(member, step, (number, number in once))
                asked = self.vote.asked
                if number == 0:
                    note()
                    if asked.save or worker.is_saved_on_the_way(self.task):
                        worker.begin_saving(self.watch)
                self._save(member, step + 1, asked)
                if asked.stop or (asked.regroup and step + 1 < self.last):
                    break
                if asked.audit:
                    member.audited(self.task)
                is_due = self.watch.has_saved or step + 2 == self.last
                self.watch.audits(asked=asked.audit, affordable=is_due)
            else:
                if self.first == self.last:  # all that was left is to end it well
                    note()
                    self._save(member, self.last, asked)
            self.rank.settle()
            if self.watch.keeper is not None:
                self.watch.keeper.look(waits=True)
            done = self.vote.passed + 1 if self.vote.passed >= 0 else self.first
            over = Over(self._results()) if done == self.last or asked.stop else None
        self.is_over = True
        return over

    def _saved_only(self) -> Over:
        """Write a checkpoint after the steps before the first one, where there is none."""
        folder = self.task.policy.folder
        if folder is not None and is_kept(folder, self.first):
            self.is_over = True
            return Over([])
        with torch.no_grad():
            worker.save_due(self.task, self.watch, self.first, "stop", is_last=False)
        self.is_over = True
        return Over([])

    def _step(self, member: Keeper, step: int, place: tuple[int, bool]) -> None:
        number, is_once = place
        program = self.task.windows.ask(step)
        assert program is not None, "a step is left"
        calls, start = self.bound[id(program)], time.monotonic()
        self._begin(member, calls, step)
        window = worker.Window(step, 1, number == self.task.memory_window, is_once)
        self.watch.window(calls, window)
        told = self.vote.told
        assert told is not None, "the step counts"
        count = self.task.counted(step, told.micro_batches)
        own = step, told.loss, time.monotonic() - start, count, dict(told.figures)
        member.counts(Told(*own), self.rank)

    def _begin(self, member: Keeper, calls: list[Bound], step: int) -> None:
        """Say how the step that begins is finished by this rank alone, or undone.

        When the word of a step is through anywhere, all its gradients are whole here: what comes
        behind the last sum, which is the word, needs nobody else.
        """
        kept, scale = [value.clone() for value in self.buffers], dict[str, object]()
        loss_scale = self.rank.loss_scale
        if loss_scale is not None:
            loss_scale.put(scale)

        def undo() -> None:
            for value, before in zip(self.buffers, kept, strict=True):
                value.copy_(before)
            if loss_scale is not None:
                loss_scale.take(scale)

        def finish() -> None:
            at = max(k for k, each in enumerate(calls) if each.kind == "reduce")
            with torch.no_grad():
                for each in calls[at + 1 :]:
                    each.call()
            member.late(self.rank, step)

        member.begins(finish, undo)

    def _save(self, member: Keeper, step: int, asked: Wishes) -> None:
        is_last = step == self.last
        do: Do = "stop" if asked.stop or is_last else "save" if asked.save else "go"
        if asked.leave and do != "stop" and self._takes_along(asked.leave):
            do = "plan"  # a checkpoint that is waited for
        is_saved = worker.save_due(self.task, self.watch, step, do, is_last=is_last)
        self.watch.has_saved = is_saved
        if is_saved:
            member.saved()

    def _takes_along(self, leaving: int) -> bool:
        """Return whether ranks that leave may hold what is nowhere else: a rank and its guard, or
        all replicas of a stage.
        """
        (program, *_) = self.task.windows.programs
        return leaving >= fewest_holders(program)

    def _results(self) -> list[RankResult]:
        """Return what all ranks of the generation measured; every rank calls it."""
        rank = self.rank
        if self.watch.kept:
            own = self.watch.result(time.perf_counter())
        else:
            versions = dict.fromkeys(rank.weights, 1)
            own = RankResult(rank.rank, (), (), 0, (0.0,), 0.0, versions)
        everyone = tuple(range(rank.transport.num_ranks))
        rows = rank.transport.all_gather_bytes(json.dumps(as_json(own)).encode(), everyone)
        return [from_json(json.loads(row)) for row in rows]

    def close(self) -> None:
        """Return once nothing runs beside this thread any more."""
        for lane in (self.rank.lane, *self.rank.copy_lanes):
            lane.close()
