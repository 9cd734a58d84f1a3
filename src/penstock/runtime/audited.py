"""Audited: what ranks keep of a step that the plain loop makes again, beside the run.

    FOLDER/NAME/before/            the state that the step begins with
    FOLDER/NAME/after/STEP/        gradients that the optimizers were given, and the state after it

Of an asynchronous schedule, whose state is whole between windows alone, the first steps of a window
are kept, of each the gradients, and the weights after them; how windows are computed is noted.

Each rank writes its part when it comes to it and waits for nobody: a part file, then a note with
all else, named rank-N.json.  Once the notes of all ranks are there, both are checkpoints but for
their names (`taken`).  Nothing is written through to the disk, as nothing of it outlives the run.

On an accelerator nobody waits for the copies: a part is written at the end of a later window, when
they are there, and the last one at the end of the run.
"""

import itertools
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, final

from torch import Tensor
from torch.optim import Optimizer

from penstock import _compat
from penstock.checkpoints.folders import folder_of
from penstock.checkpoints.part_file import header_of
from penstock.checkpoints.snapshot import bytes_of, described
from penstock.device import here
from penstock.errors import CheckpointError
from penstock.files import read_json
from penstock.graph.stages import Stages
from penstock.program.program import Program
from penstock.runtime.calls import StepResult
from penstock.runtime.digest import digest_of
from penstock.runtime.host_copies import HostCopies
from penstock.runtime.rank import Rank
from penstock.schedule.weight_rule import SYNCHRONOUS
from penstock.state.replica_keys import key_of
from penstock.state.weights import StageWeights
from penstock.transport.transport import Transport
from penstock.typed import damage, typed

State = tuple[Mapping[str, Tensor], Mapping[str, object]]  # tensors and plain values by key
_NOTHING: State = {}, {}
Given = Callable[[], Mapping[str, Tensor]]  # gradients by key, as an optimizer is given them
MOST_STEPS = 4  # of a window
LAW, LATER = "law", "step-{}/{}"  # keys: of how it is computed; of a gradient in a later step of it
STEPS = "steps"  # key: of how many steps are kept
CHANGES = "changes"  # key: of what the job's code has changed in its model, by rank


@dataclass(frozen=True, slots=True, eq=False)
class Audits:
    """Where the ranks of a run keep steps, and whether one more may be kept.

    folder:   seen by all ranks, and by who audits.
    affords:  whether one is worth its time now; false where nobody tells this rank.
    """

    folder: Path
    affords: Callable[[], bool]


class WatchedOptimizer(NamedTuple):
    """An optimizer of a rank, the gradients that it is given, and its weights."""

    optimizer: Optimizer
    given: Given
    weights: Given = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Note:
    """What a rank notes beside its part: how many ranks there are, and plain values by key."""

    ranks: int
    plain: dict[str, Any]


@final
class StepKeeper:
    """Keeps steps on one rank.

    part:     what this rank has of the state after so many steps, or None; all ranks ask together.
    watched:  the optimizers of this rank.
    held:     the weights of each stage that other ranks have, too, by its name.
    attempt:  tells a step from the same one, which ranks began before one of them was lost.
    """

    def __init__(
        self,
        audits: Audits,
        transport: Transport,
        part: Callable[[int], State | None],
        watched: Callable[[], Sequence[WatchedOptimizer]],
        held: Callable[[], Mapping[str, Sequence[Tensor]]],
        attempt: str = "",
    ) -> None:
        self.copies = HostCopies(here())
        self.audits, self.transport = audits, transport
        self._part, self._watched, self._held = part, watched, held
        self._attempt = attempt
        self._given: dict[str, Tensor] = {}
        self._blocks: list[Mapping[str, Tensor]] = []  # of what was given, in pinned memory
        self._losses: list[tuple[float, float]] = []
        self._ends: list[Callable[[], None]] = []
        self._law, self._steps = "", 1
        self._folder = audits.folder
        self._is_on = False
        self._cpu_s = 0.0

    def affords(self) -> bool:
        """Return whether the next step is to be kept; every rank asks at the same time."""
        own = b"1" if self.audits.affords() else b""
        everyone = tuple(range(self.transport.num_ranks))
        return any(self.transport.all_gather_bytes(own, everyone))

    def hear(self, result: StepResult) -> None:
        """Note the loss that this rank reports of the step that is kept."""
        if self._is_on and result.loss is not None:
            self._losses.append((result.loss, result.micro_batches))

    def before(self, step: int, law: str = "", steps: int = 1) -> None:
        """Keep the state that a step begins with; every rank calls it at the same time.

        law, steps:  how a window that begins with it is computed, and how many it has.
        """
        self.look()
        start_s = time.process_time()
        self._law, self._steps = law, steps
        self._folder = self.audits.folder / f"{step:06d}{self._attempt}"
        tensors, plain = self._part(step) or _NOTHING
        copies, folder = self.copies.of(tensors), self._folder / "before"
        self.copies.then(lambda: self._put(folder, (copies, plain), copies))
        self._given, self._blocks, self._losses, self._is_on = {}, [], [], True
        for one in self._watched():
            self._ends.append(_compat.call_first(one.optimizer, self._keeping(one)))
        self._cpu_s += time.process_time() - start_s

    def _keeping(self, watched: WatchedOptimizer) -> Callable[..., None]:
        number = itertools.count()

        def keep(*_: object) -> None:
            at = next(number)
            if at < MOST_STEPS:
                kept = watched.given().items()
                self._take({_key(at, key): gradient for key, gradient in kept})
            elif at == MOST_STEPS:
                self._take(watched.weights())

        return keep

    def _take(self, tensors: Mapping[str, Tensor]) -> None:
        if self.copies.device.is_queued:
            taken = self.copies.of(tensors)
            self._blocks.append(taken)
            self._given |= taken
        else:
            self._given |= {key: value.clone() for key, value in tensors.items()}

    def after(self, step: int, changes: Callable[[], Sequence[str]] = tuple) -> None:
        """Keep what the step has made, after `step` steps; every rank calls it at the same time.

        changes:  tells those of the model that a traced step does not follow, in words.
        """
        start_s, rank, changed = time.process_time(), self.transport.rank, changes()
        for end in self._ends:
            end()
        self._ends, self._is_on = [], False
        state = self._part(step)
        tensors, plain = state or _NOTHING
        if self._steps > MOST_STEPS:  # what is there now is of later steps
            tensors, plain = _NOTHING
        stages = self._held()
        held = {f"held/{s}/{n}": each for s, row in stages.items() for n, each in enumerate(row)}
        copies = self.copies.of({**tensors, **held})
        rows = {s: [copies[f"held/{s}/{n}"] for n in range(len(r))] for s, r in stages.items()}
        tensors = {key: copies[key] for key in tensors}
        tensors = {**tensors, **self._given}
        about = {f"losses/{rank}": self._losses}
        about |= {LAW: self._law} if self._law else {}
        about |= {f"{CHANGES}/{rank}": [*changed]} if changed else {}
        about |= {STEPS: min(self._steps, MOST_STEPS)}
        self._cpu_s += time.process_time() - start_s
        own, blocks = {**plain, **about}, [*self._blocks, copies]
        self.copies.then(partial(self._end, self._folder / "after", (tensors, own), rows, blocks))
        self._given, self._blocks = {}, []

    def _end(
        self,
        folder: Path,
        state: State,
        held: Mapping[str, Sequence[Tensor]],
        blocks: Sequence[Mapping[str, Tensor]],
    ) -> None:
        """Write what the step has made, with a digest of what other ranks have, too."""
        start_s, rank, (tensors, plain) = time.process_time(), self.transport.rank, state
        digests = {stage: digest_of(row) for stage, row in held.items()}
        self._cpu_s += time.process_time() - start_s
        about = {f"held/{rank}": digests, f"cpu/{rank}": [time.process_time(), self._cpu_s]}
        self._put(folder, (tensors, {**plain, **about}), *blocks)

    def look(self, *, waits: bool = False) -> None:
        """Write what was kept and is there by now; waits: once all of it is."""
        self.copies.look(waits=waits)

    def _put(self, folder: Path, state: State, *blocks: Mapping[str, Tensor]) -> None:
        start_s, rank = time.process_time(), self.transport.rank
        folder.mkdir(parents=True, exist_ok=True)
        tensors, plain = state
        pieces = described(tensors)
        with (folder / f"rank-{rank}.safetensors").open("wb") as file:
            file.write(header_of(pieces))
            for piece in pieces:
                file.write(bytes_of(tensors[piece.key]))
        note = {"ranks": self.transport.num_ranks, "plain": dict(plain)}
        (folder / f".rank-{rank}").write_text(json.dumps(note))
        os.rename(folder / f".rank-{rank}", folder / f"rank-{rank}.json")
        for block in blocks:
            self.copies.forget(block)
        self._cpu_s += time.process_time() - start_s


def _key(step: int, key: str) -> str:
    return LATER.format(step, key) if step else key


def law_of(program: Program, stages: Stages) -> str:
    """Return what names how the windows of a program are computed; "": step by step."""
    rule, sizes = program.weight_rule, (program.num_stages, program.num_micro_batches)
    if rule == SYNCHRONOUS:
        return ""
    ends = [sorted(stage.parameters) for stage in stages.stages]
    return f"{rule.name} {sizes} {ends}"


def keeper_of(
    rank: Rank, audits: Audits, part: Callable[[int], State | None], attempt: str = ""
) -> StepKeeper:
    """Return what keeps steps of a planned rank, and hears what it reports.

    part, attempt:  as in StepKeeper.
    """

    def watched() -> list[WatchedOptimizer]:
        is_first = rank.replica < rank.grid.tensor or bool(rank.averages)
        place = rank.replica if rank.averages else 0
        own = [w for w in rank.weights.values() if is_first or w.shard is not None]
        each = ((w, w.optimizer) for w in own)
        return [
            WatchedOptimizer(optimizer, partial(_told, w, place), partial(_weights, w))
            for w, optimizer in each
            if optimizer is not None
        ]

    held = partial(held_weights, rank)
    keeper = StepKeeper(audits, rank.transport, part, watched, held, attempt)
    rank.tells_also(keeper.hear)
    return keeper


def _told(of: StageWeights, replica: int) -> dict[str, Tensor]:
    return {key_of(replica, key): value for key, value in of.told().items()}


def _weights(of: StageWeights) -> dict[str, Tensor]:
    return {of.key_of("weights", node): value for node, value in of.kept().items()}


def held_weights(rank: Rank) -> dict[str, list[Tensor]]:
    """Return the weights of each stage on this rank: copies must have the same.

    Of a stage that its replicas divide there are no copies, nor where each has its own weights.
    """
    if rank.averages:
        return {}
    whole = ((stage, weights) for stage, weights in rank.weights.items() if weights.shard is None)
    held = ((stage, weights.kept().values()) for stage, weights in whole)
    own = f" of slice {rank.grid.slice_of(rank.rank)}" if rank.grid.tensor > 1 else ""
    return {f"{stage}{own}": list(values) for stage, values in held}


def held_digests(rank: Rank) -> dict[str, str]:
    """Return a digest of the weights of each stage on this rank, as `held_weights` names them."""
    return {stage: digest_of(values) for stage, values in held_weights(rank).items()}


# -- for who audits -------------------------------------------------------------------------------


def step_of(folder: Path) -> int:
    """Return which step was kept in a folder, by its name."""
    return int(folder.name.partition("-")[0])


def is_final(folder: Path) -> bool:
    """Return whether a step was kept where no rank may be lost: else some may never tell of it."""
    return folder.name.isdigit()


def is_kept(folder: Path) -> bool:
    """Return whether all ranks have kept what they have of a step in a folder of its own.

    A damaged note says no more of them: then it is true, and putting them together fails.
    """
    return _is_whole(folder / "before") and _is_whole(folder / "after")


def _is_whole(folder: Path) -> bool:
    ranks = ranks_of(folder)
    try:
        return bool(ranks) and len(ranks) == note_of(folder, ranks[0]).ranks
    except CheckpointError:
        return True


def ranks_of(folder: Path) -> list[int]:
    """Return the ranks whose notes are in a folder."""
    names = (path.stem.removeprefix("rank-") for path in folder.glob("rank-*.json"))
    return sorted(int(name) for name in names)


def note_of(folder: Path, rank: int) -> Note:
    """Return what a rank has noted in a folder.

    Raises:   CheckpointError: it is damaged.
    """
    path = folder / f"rank-{rank}.json"
    content = read_json(path, CheckpointError, "note of an audit")
    with damage(f"note {path}", CheckpointError, hint="audits write it anew"):
        return typed(Note, content)


def taken(folder: Path, step: int) -> Path:
    """Make a checkpoint of what all ranks have kept after so many steps; return its folder.

    Raises:   CheckpointError: a note is damaged.
    """
    plain: dict[str, object] = {}
    for rank in ranks_of(folder):
        plain |= note_of(folder, rank).plain
        (folder / f"rank-{rank}.json").unlink()
    parts = sorted(path.name for path in folder.glob("rank-*.safetensors"))
    content = {"step": step, "parts": parts, "plain": plain, "checksums": {}}
    place = folder_of(folder, step)
    place.mkdir(exist_ok=True)
    for name in parts:
        (folder / name).rename(place / name)
    (place / "state.json").write_text(json.dumps(content))
    return place
