"""Served: weights that a server updates as gradients come, and ranks that ask it for them.

    each rank   gives its gradients, and waits for weights
    server      a thread beside rank 0: updates weights by what `Referee` takes, and answers

The server's weights and optimizer are those of rank 0, which like all others computes with a copy:
so its part of a checkpoint is the server's.  Nothing is updated anywhere else.
"""

import json
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Literal, NamedTuple, final

import torch
from torch import Tensor

from penstock.device import of
from penstock.errors import RunError
from penstock.referee import SERVER, Referee, ServedAnswer, ServedUpdate
from penstock.state.weights import StageWeights
from penstock.sums import SumsWay
from penstock.transport.transport import Send, TensorSpec, Transport, Wait

if TYPE_CHECKING:
    from penstock.runtime.rank import Rank

FILE = "decisions.jsonl"  # in the folder of a run
_UP, _DOWN = 2**24, 2**24 + 1  # edges, which no program has so many of
_KINDS: tuple["Kind", ...] = ("push", "save", "leave")
_LINES = 64  # of decisions that are written at once
Kind = Literal["push", "save", "leave"]


class Decisions(NamedTuple):
    """Where decisions of a server are written, and where they are taken from.

    record:  None: they are not kept.
    script:  those of another run, that are made again; empty: they follow from who comes first.
    """

    record: Path | None = None
    script: tuple[ServedUpdate, ...] = ()


def read_decisions(file: Path) -> tuple[ServedUpdate, ...]:
    """Return what a run has written.

    Raises:   RunError: there is no such file, or it is not of decisions.
    """
    try:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        return tuple(ServedUpdate(at, step, tuple(ranks), read) for at, step, ranks, read in rows)
    except (OSError, ValueError, TypeError, IndexError) as problem:
        message = f"{file} has no decisions of a server: {problem}"
        hint = "give the folder of a run whose sums were backup, ssp or async"
        raise RunError(message, hint=hint) from problem


class _RankWord(NamedTuple):
    """What has come to the server: from whom, what it is about, and gradients.

    problem:  in place of all that: waiting for a rank has ended so.
    """

    rank: int
    kind: Kind = "push"
    step: int = 0
    read: int = 0
    gradients: Sequence[Tensor] = ()
    problem: BaseException | None = None


class _ServerWord(NamedTuple):
    """What the server says to the rank beside it."""

    version: int
    renews: bool = False
    problem: BaseException | None = None


@final
class ServedRank:
    """A rank's end: it gives gradients, and gets weights in place of an update.

    version:  of the weights that it has.
    """

    def __init__(self, rank: "Rank", way: SumsWay) -> None:
        self.rank, self.way, self.transport = rank, way, rank.transport
        self.stages = [rank.weights_of(stage) for stage in sorted(rank.weights)]
        self.version, self.is_backup = 0, way.kind == "backup"
        if of(rank.device).is_queued:
            message = f"a server that takes gradients as {rank.served} says updates on the host"
            raise RunError(message, hint="sum gradients instead: leave sums out")
        self.server = None
        if self.transport.rank == SERVER:
            self.server = Server(self.stages, way, self.transport)
            return
        heads, flats = _specs(self.stages)
        self.up: Send = self.transport.bind_send(_UP, SERVER, heads + flats[1])
        _, self.down = self.transport.bind_receive(_DOWN, SERVER, heads + flats[0])

    def begin(self, first_step: int, decisions: Decisions) -> None:
        """Begin with weights that all ranks have alike, after so many steps of the run."""
        ranks = self.transport.num_ranks
        self.version = first_step * (1 if self.is_backup else ranks)
        if self.server is not None:
            script = [row for row in decisions.script if row.version >= self.version]
            self.server.begin(Referee(self.way, ranks, first_step, script), decisions.record)

    def has_passed(self, step: int) -> bool:
        """Return whether the update of a step has been made without this rank."""
        return self.is_backup and self.version > step

    def exchange(self, step: int) -> None:
        """Give the gradients of a step, and go on with the weights that come back.

        Raises:   TransportError: the server is gone.  RunError.
        """
        self._ask("push", step)

    def stop_for_save(self, step: int) -> None:
        """Return once all ranks are there and the server stands still, with its weights here.

        Raises:   as `exchange`.
        """
        self._ask("save", step)

    def go_on(self) -> None:
        """Let the server move again; the rank beside it says so."""
        if self.server is not None:
            self.server.may_move.set()

    def leave(self) -> None:
        """Say that nothing more comes from here; the rank beside the server waits for its end.

        Raises:   as `exchange`.
        """
        if self.server is None:
            self._say("leave", 0)
            return
        self.server.heard.put(_RankWord(SERVER, "leave"))
        self.server.finish()

    def _say(self, kind: Kind, step: int) -> None:
        flats = [flat for weights in self.stages for flat in weights.flat_gradients]
        self.up([torch.tensor([_KINDS.index(kind), step, self.version]), *flats])

    def _ask(self, kind: Kind, step: int) -> None:
        if self.server is not None:
            flats = [flat for weights in self.stages for flat in weights.flat_gradients]
            self.server.heard.put(_RankWord(SERVER, kind, step, self.version, flats))
            told = self.server.told.get()
            if told.problem is not None:
                raise told.problem
            self.version = told.version
            return
        self._say(kind, step)
        head, *flats = self.down()
        self.version, renews = int(head[0]), bool(head[1])
        own = [flat for weights in self.stages for flat in weights.flats]
        for flat, came in zip(own, flats if renews else (), strict=renews):
            flat.copy_(came)
        for weights in self.stages:
            weights.renew_reads()


def _specs(
    stages: Sequence[StageWeights],
) -> tuple[tuple[TensorSpec, ...], tuple[tuple[TensorSpec, ...], ...]]:
    """Return what a message begins with; and what weights are, and gradients."""
    head = (TensorSpec((3,), torch.int64),)
    weights = [flat for each in stages for flat in each.flats]
    gradients = [flat for each in stages for flat in each.flat_gradients]
    rows = (
        tuple(TensorSpec(tuple(f.shape), f.dtype) for f in flats) for flats in (weights, gradients)
    )
    return head, tuple(rows)


@final
class Server:
    """Updates the weights of the rank beside it, and answers ranks; a thread of its own.

    heard:     what ranks have said, in the order of its coming.
    told:      what the rank beside it is told.
    may_move:  not while that rank writes a checkpoint.
    """

    def __init__(self, stages: Sequence[StageWeights], way: SumsWay, transport: Transport) -> None:
        self.stages, self.way, self.transport = stages, way, transport
        self.heard: SimpleQueue[_RankWord] = SimpleQueue()
        self.told: SimpleQueue[_ServerWord] = SimpleQueue()
        self.may_move = threading.Event()
        self.may_move.set()
        self.kept: dict[int, Sequence[Tensor]] = {}  # gradients by rank
        for weights in stages:
            weights.update_apart()
        heads, (down, up) = _specs(stages)
        others = [rank for rank in range(transport.num_ranks) if rank != SERVER]
        self.sends = {r: transport.bind_send(_DOWN, r, heads + down) for r in others}
        self.waits = {r: transport.bind_receive(_UP, r, heads + up)[1] for r in others}
        self.threads: list[threading.Thread] = []
        self.referee: Referee | None = None
        self.record: Path | None = None
        self.lines: list[str] = []

    def begin(self, referee: Referee, record: Path | None) -> None:
        """Begin to listen; decisions are added to those before the first one in `record`."""
        self.referee, self.record = referee, record
        if record is not None:
            kept = record.read_text().splitlines()[: referee.version] if record.exists() else []
            record.write_text("".join(f"{line}\n" for line in kept))
        runs = [(self._run, ()), *((self._listen, (r, w)) for r, w in self.waits.items())]
        count = torch.get_num_threads()
        for run, own in runs:
            thread = threading.Thread(target=run, args=(*own, count), daemon=True)
            thread.name = "penstock server"
            thread.start()
            self.threads.append(thread)

    def finish(self) -> None:
        """Return once all ranks have left.

        Raises:   what the server has raised.
        """
        told = self.told.get()
        if told.problem is not None:
            raise told.problem

    def _listen(self, rank: int, wait: Wait, _: int) -> None:
        """Put what comes from a rank where the server finds it."""
        kind: Kind = "push"
        while kind != "leave":
            try:
                head, *gradients = wait()
            except RunError as problem:  # raised by the rank beside it
                self.heard.put(_RankWord(rank, problem=problem))
                return
            kind = _KINDS[int(head[0])]
            self.heard.put(_RankWord(rank, kind, int(head[1]), int(head[2]), gradients))

    def _run(self, threads: int) -> None:
        torch.set_num_threads(threads)  # a setting of each thread, as is the next
        with torch.no_grad():
            try:
                self._serve()
                self._write()
            except BaseException as problem:  # noqa: BLE001 - raised by the rank beside it
                self.told.put(_ServerWord(0, problem=problem))
                self.transport.abort(f"the server beside it stopped: {problem}")
            else:
                self.told.put(_ServerWord(0))

    def _serve(self) -> None:
        referee = self.referee
        assert referee is not None, "it was told whom to serve"
        while referee.done:
            heard = self.heard.get()
            self.may_move.wait()
            if heard.problem is not None:
                raise heard.problem
            match heard.kind:
                case "push":
                    self.kept[heard.rank] = heard.gradients
                    self._do(referee.push(heard.rank, heard.step, heard.read))
                case "save":
                    self._do(referee.save(heard.rank))
                case "leave":
                    self._do(referee.leave(heard.rank))

    def _do(self, follows: Iterable[ServedUpdate | ServedAnswer]) -> None:
        for each in follows:
            match each:
                case ServedUpdate():
                    self._update(each)
                case ServedAnswer(rank):
                    self.kept.pop(rank, None)
                    if each.is_still and rank == SERVER:  # who is told first
                        self._write()
                        self.may_move.clear()
                    self._answer(each)

    def _update(self, taken: ServedUpdate) -> None:
        """Update the weights by the mean of the gradients of some ranks, in the order of these."""
        assert self.referee is not None, "who else has decided"
        first, *others = (self.kept[rank] for rank in taken.ranks)
        own = [flat for weights in self.stages for flat in weights.server_gradients]
        for number, flat in enumerate(own):
            flat.copy_(first[number])
            for other in others:
                flat.add_(other[number])
            flat.div_(len(taken.ranks))
        stale = self.referee.staleness(taken)
        factor = 1.0 / max(1, stale) if self.way.aware else 1.0
        number = (
            taken.version
            if self.way.kind == "backup"
            else taken.version // self.transport.num_ranks
        )
        for weights in self.stages:
            if weights.updates is not None:
                weights.updates.step(number, weights.given, factor)
        if self.record is not None:
            self.lines.append(json.dumps(taken))
            if len(self.lines) >= _LINES:
                self._write()

    def _write(self) -> None:
        if self.record is not None and self.lines:
            with self.record.open("a") as file:
                file.writelines(f"{line}\n" for line in self.lines)
            self.lines.clear()

    def _answer(self, answer: ServedAnswer) -> None:
        assert self.referee is not None, "who else answers"
        version = self.referee.version
        if answer.rank != SERVER:
            flats = [flat.clone() for weights in self.stages for flat in weights.flats]
            self.sends[answer.rank]([torch.tensor([version, answer.renews, 0]), *flats])
            return
        if answer.renews:
            for weights in self.stages:
                weights.renew_reads()
        self.told.put(_ServerWord(version))
