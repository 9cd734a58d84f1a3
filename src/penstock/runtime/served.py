"""Served: weights that servers update as gradients come, and ranks that ask them for these.

    each rank   gives each server its gradients, and waits for weights
    server      a thread beside a rank: updates weights by what a `Referee` takes, and answers

The server beside rank 0 has the referee.  Where several divide the parameters, it tells the others
each thing that it does, which they do in the same order: so all of them have the same versions, and
a rank gets one version of all weights.

A server's weights and optimizer are those of its rank, which like all others computes with a copy:
so its part of a checkpoint is the server's.  Nothing is updated anywhere else.
"""

import json
import threading
from collections.abc import Sequence
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
_UP, _DOWN, _TOLD = range(2**24, 2**24 + 3)  # edges, which no program has so many of
_UPDATE, _ANSWER, _OVER = range(3)  # what the first server tells the others
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
    """What has come to a server: from whom, what it is about, and gradients.

    problem:  in place of all that: waiting for a rank has ended so.
    """

    rank: int
    kind: Kind = "push"
    step: int = 0
    read: int = 0
    gradients: Sequence[Tensor] = ()
    problem: BaseException | None = None


class _ServerWord(NamedTuple):
    """What a server says to the rank beside it."""

    version: int
    renews: bool = False
    problem: BaseException | None = None


class _ServerRun(NamedTuple):
    """A piece of a flat tensor of a stage, which one server has."""

    weights: StageWeights
    flat: int
    place: slice

    @property
    def live(self) -> Tensor:
        return self.weights.flats[self.flat][self.place]

    @property
    def gradient(self) -> Tensor:
        return self.weights.flat_gradients[self.flat][self.place]

    def renew(self) -> None:
        """Let steps read what is live."""
        if (read := self.weights.reads[self.flat]) is not self.weights.flats[self.flat]:
            read[self.place].copy_(self.live)


def _runs(rank: "Rank", server: int) -> list[_ServerRun]:
    """Return what the server beside a rank has, stage by stage."""
    found: list[_ServerRun] = []
    for stage in sorted(rank.weights):
        weights = rank.weights_of(stage)
        places = weights.runs_of(rank.served_nodes(stage, server) or frozenset())
        rows = (_ServerRun(weights, at, place) for at, place in enumerate(places))
        found += (run for run in rows if run.place.stop > run.place.start)
    return found


def _specs(runs: Sequence[_ServerRun]) -> tuple[tuple[TensorSpec, ...], ...]:
    """Return what a message of weights is, and one of gradients; each begins with three numbers."""
    head = TensorSpec((3,), torch.int64)
    rows = [run.live for run in runs], [run.gradient for run in runs]
    down, up = ((TensorSpec(tuple(t.shape), t.dtype) for t in row) for row in rows)
    return (head, *down), (head, *up)


@final
class ServedRank:
    """A rank's end: it gives gradients, and gets weights in place of an update.

    version:  of the weights that it has.
    """

    def __init__(self, rank: "Rank", way: SumsWay) -> None:
        self.rank, self.way, self.transport = rank, way, rank.transport
        self.version, self.is_backup = 0, way.kind == "backup"
        if of(rank.device).is_queued:
            message = f"a server that takes gradients as {rank.served} says updates on the host"
            raise RunError(message, hint="sum gradients instead: leave sums out")
        own = self.transport.rank
        self.runs = {place: _runs(rank, place) for place in rank.servers}
        self.others = [place for place in rank.servers if place != own]
        specs = {place: _specs(self.runs[place]) for place in self.others}
        self.ups: dict[int, Send] = {
            place: self.transport.bind_send(_UP, place, up) for place, (_, up) in specs.items()
        }
        self.downs: dict[int, Wait] = {
            place: self.transport.bind_receive(_DOWN, place, down)[1]
            for place, (down, _) in specs.items()
        }
        self.server: Server | None = None
        if own in rank.servers:
            self.server = Server(self.runs[own], way, self.transport, rank.servers)

    def begin(self, first_step: int, decisions: Decisions) -> None:
        """Begin with weights that all ranks have alike, after so many steps of the run."""
        ranks = self.transport.num_ranks
        self.version = first_step * (1 if self.is_backup else ranks)
        if self.server is None:
            return
        if self.transport.rank != SERVER:
            self.server.begin(None, None, self.version)
            return
        script = [row for row in decisions.script if row.version >= self.version]
        referee = Referee(self.way, ranks, first_step, script)
        self.server.begin(referee, decisions.record, self.version)

    def has_passed(self, step: int) -> bool:
        """Return whether the update of a step has been made without this rank."""
        return self.is_backup and self.version > step

    def exchange(self, step: int) -> None:
        """Give the gradients of a step, and go on with the weights that come back.

        Raises:   TransportError: a server is gone.  RunError.
        """
        self._ask("push", step)

    def stop_for_save(self, step: int) -> None:
        """Return once all ranks are there and servers stand still, with their weights here.

        Raises:   as `exchange`.
        """
        self._ask("save", step)

    def go_on(self) -> None:
        """Let the server here move again; the rank beside it says so."""
        if self.server is not None:
            self.server.may_move.set()

    def leave(self) -> None:
        """Say that nothing more comes from here; a rank beside a server waits for its end.

        Raises:   as `exchange`.
        """
        self._say("leave", 0)
        if self.server is not None:
            self.server.finish()

    def _say(self, kind: Kind, step: int) -> None:
        head = [_KINDS.index(kind), step, self.version]
        if self.server is not None:
            flats = [run.gradient for run in self.server.runs]
            word = _RankWord(self.transport.rank, kind, step, self.version, flats)
            self.server.heard.put(word)
        for place, up in self.ups.items():
            up([torch.tensor(head), *(run.gradient for run in self.runs[place])])

    def _ask(self, kind: Kind, step: int) -> None:
        self._say(kind, step)
        version = self.version
        if self.server is not None:
            told = self.server.told.get()
            if told.problem is not None:
                raise told.problem
            version = told.version
        for place, down in self.downs.items():
            head, *flats = down()
            version, renews = int(head[0]), bool(head[1])
            for run, came in zip(self.runs[place], flats, strict=True) if renews else ():
                run.live.copy_(came)
                run.renew()
        self.version = version


@final
class Server:
    """Updates what it has of the weights of the rank beside it, and answers ranks; a thread.

    heard:     what ranks have said, in the order of its coming.
    told:      what the rank beside it is told.
    may_move:  not while that rank writes a checkpoint.
    referee:   decides; None: the first server tells what it has decided.
    """

    def __init__(
        self, runs: Sequence[_ServerRun], way: SumsWay, transport: Transport, places: Sequence[int]
    ) -> None:
        self.runs, self.way, self.transport = runs, way, transport
        self.stages = list({id(run.weights): run.weights for run in runs}.values())
        self.heard: SimpleQueue[_RankWord] = SimpleQueue()
        self.told: SimpleQueue[_ServerWord] = SimpleQueue()
        self.may_move = threading.Event()
        self.may_move.set()
        self.kept: dict[int, Sequence[Tensor]] = {}  # gradients by rank
        own, ranks = transport.rank, range(transport.num_ranks)
        others, (down, up) = [rank for rank in ranks if rank != own], _specs(runs)
        self.sends = {r: transport.bind_send(_DOWN, r, down) for r in others}
        self.waits = {r: transport.bind_receive(_UP, r, up)[1] for r in others}
        told = (TensorSpec((5 + len(ranks),), torch.int64),)
        later = [place for place in places if place != SERVER] if own == SERVER else []
        self.tells = [transport.bind_send(_TOLD, place, told) for place in later]
        self.hears = None if own == SERVER else transport.bind_receive(_TOLD, SERVER, told)[1]
        self.threads: list[threading.Thread] = []
        self.referee: Referee | None = None
        self.record: Path | None = None
        self.version, self.lines = 0, list[str]()

    def begin(self, referee: Referee | None, record: Path | None, version: int) -> None:
        """Begin to listen; decisions are added to those before the first one in `record`."""
        self.referee, self.record, self.version = referee, record, version
        if record is not None:
            kept = record.read_text().splitlines()[:version] if record.exists() else []
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
                if self.referee is None:
                    self._follow()
                else:
                    self._serve(self.referee)
                self._write()
            except BaseException as problem:  # noqa: BLE001 - raised by the rank beside it
                self.told.put(_ServerWord(0, problem=problem))
                self.transport.abort(f"the server beside it stopped: {problem}")
            else:
                self.told.put(_ServerWord(0))

    def _serve(self, referee: Referee) -> None:
        """Do what the referee decides, and tell the other servers before."""
        while referee.done:
            heard = self._hear()
            self.may_move.wait()
            match heard.kind:
                case "push":
                    self.kept[heard.rank] = heard.gradients
                    follows = referee.push(heard.rank, heard.step, heard.read)
                case "save":
                    follows = referee.save(heard.rank)
                case "leave":
                    follows = referee.leave(heard.rank)
            for each in follows:
                self._tell(_numbers(each))
                self._do(each)
        self._tell([_OVER])

    def _follow(self) -> None:
        """Do what the first server does, in the same order.

        A rank waits for the answer of every server to each of its words, so that one word of each
        is here at most.
        """
        assert self.hears is not None, "it is not the first one"
        while (each := _read(list(map(int, self.hears()[0])))) is not None:
            ranks = {*each.ranks} if isinstance(each, ServedUpdate) else {each.rank}
            while not ranks <= self.kept.keys():
                heard = self._hear()
                if heard.kind != "leave":
                    self.kept[heard.rank] = heard.gradients
            if not (isinstance(each, ServedAnswer) and each.is_still):
                self.may_move.wait()
            self._do(each)

    def _hear(self) -> _RankWord:
        heard = self.heard.get()
        if heard.problem is not None:
            raise heard.problem
        return heard

    def _tell(self, numbers: list[int]) -> None:
        row = [*numbers, *[-1] * (5 + self.transport.num_ranks - len(numbers))]
        for tell in self.tells:
            tell([torch.tensor(row)])

    def _do(self, each: ServedUpdate | ServedAnswer) -> None:
        match each:
            case ServedUpdate():
                self._update(each)
            case ServedAnswer(rank):
                self.kept.pop(rank, None)
                if each.is_still and rank == self.transport.rank:
                    self._write()
                    self.may_move.clear()
                self._answer(each)

    def _update(self, taken: ServedUpdate) -> None:
        """Update the weights by the mean of the gradients of some ranks, in the order of these."""
        first, *others = (self.kept[rank] for rank in taken.ranks)
        for number, run in enumerate(self.runs):
            assert run.weights.served is not None, "a server is here"
            flat = run.weights.served.gradients[run.flat]
            flat.copy_(first[number])
            for other in others:
                flat.add_(other[number])
            flat.div_(len(taken.ranks))
        factor = 1.0 / max(1, taken.staleness) if self.way.aware else 1.0
        number = (
            taken.version
            if self.way.kind == "backup"
            else taken.version // self.transport.num_ranks
        )
        for weights in self.stages:
            assert weights.served is not None, "a server is here"
            if weights.updates is not None:
                weights.updates.step(number, weights.served.given, factor)
        self.version = taken.version + 1
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
        if answer.rank != self.transport.rank:
            flats = [run.live.clone() for run in self.runs]
            self.sends[answer.rank]([torch.tensor([self.version, answer.renews, 0]), *flats])
            return
        for run in self.runs if answer.renews else ():
            run.renew()
        self.told.put(_ServerWord(self.version))


def _numbers(each: ServedUpdate | ServedAnswer) -> list[int]:
    """Return what a server does as numbers for the others."""
    if isinstance(each, ServedAnswer):
        return [_ANSWER, each.rank, each.renews, each.is_still]
    return [_UPDATE, each.version, each.step, each.read, len(each.ranks), *each.ranks]


def _read(row: list[int]) -> ServedUpdate | ServedAnswer | None:
    """Return what `_numbers` says; None: nothing more comes."""
    match row:
        case [int(kind), rank, renews, is_still, *_] if kind == _ANSWER:
            return ServedAnswer(rank, bool(renews), bool(is_still))
        case [int(kind), version, step, read, count, *ranks] if kind == _UPDATE:
            return ServedUpdate(version, step, tuple(ranks[:count]), read)
        case _:
            return None
