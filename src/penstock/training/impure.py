"""Impure: what a job's model and loss read besides weights, buffers, batch and torch's seed.

A traced step is a function of these alone.  So some micro-batches run here as in a plain loop, in
a copy of the process, and whatever else the result may follow is found:

flow    the ops of a micro-batch are others, or have other arguments, when it is computed again
held    a value in Python changes between micro-batches, and code that ran reads it
asked   code asks for the time, for chance that no seed gives, for a file
"""

import gc
import json
import multiprocessing
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from io import StringIO
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.batches import started
from penstock.errors import JobError, PenstockError
from penstock.graph.code import SeededRandom, micro_batch_seed
from penstock.graph.contents import flatten
from penstock.graph.functional import where
from penstock.graph.trace import build, loss_of, on_device
from penstock.job import Job
from penstock.runtime.optimizer import eager_updates
from penstock.training.asked import Asked, global_chance, line_of, position, watching
from penstock.training.flow import Flow, Recorded, first_difference
from penstock.training.held import Values, functions_of, held
from penstock.training.reads import names_written, read_at, written_at

Line = tuple[str, int]


@dataclass(frozen=True, slots=True, order=True)
class Impurity:
    """Something that a traced step would freeze or lose.

    what   in words
    where  "file.py:12", or where there is no line "model.blocks.0.count"
    why    how it was seen
    """

    what: str
    where: str
    why: str


def impurities(job: Job) -> tuple[Impurity, ...]:
    """Return what forward, loss and backward of `job` read that a trace would freeze or lose.

    Four micro-batches of two batches, each computed twice, with an update between, in a forked
    copy of this process: nothing of the job's own state has moved afterwards.  Where there is a
    GPU, which a fork could not use, they run in this process.
    Ignores:  what changes only after many steps and by nothing that runs in these.
    Raises:   JobError: the model, the loss or the optimizer fails; the message names the line.
    """
    if torch.cuda.is_available():
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()
        try:
            return _examined(job)
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.set_rng_state(before[2])
    return _in_a_copy(job)


def describe(found: Sequence[Impurity]) -> str:
    """Return findings in words, one a line, the first three of them."""
    rows = [f"  {one.where}: {one.what}: {one.why}" for one in found[:3]]
    more = [f"  and {len(found) - 3} more"] if len(found) > 3 else []
    head = "the loss follows more than weights and batch, which a traced step would freeze"
    return "\n".join([head, *rows, *more]) if found else ""


# -- in a copy of this process --------------------------------------------------------------------


def _in_a_copy(job: Job) -> tuple[Impurity, ...]:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_tell, args=(job, theirs))
    process.start()
    theirs.close()
    try:
        answer = json.loads(ours.recv_bytes())
    except EOFError:
        process.join()
        message = f"computing the loss ended its process ({process.exitcode})"
        raise JobError(message, hint="does it run without Penstock?") from None
    finally:
        if process.is_alive():
            process.join(timeout=1)
            process.kill()
        process.join()
        ours.close()
    if "error" in answer:
        raise JobError(answer["error"], hint=answer["hint"])
    return tuple(Impurity(**row) for row in answer["found"])


def _tell(job: Job, pipe: Connection) -> None:
    torch.set_num_threads(1)
    gc.disable()  # all lives to the end, and going through it takes longer than the ops
    quiet = StringIO()  # what the job prints, it prints again when it trains
    try:
        with redirect_stdout(quiet), redirect_stderr(quiet):
            answer: object = {"found": [asdict(one) for one in _examined(job)]}
    except PenstockError as problem:
        answer = {"error": problem.message, "hint": problem.hint}
    pipe.send_bytes(json.dumps(answer).encode())
    pipe.close()


def _examined(job: Job) -> tuple[Impurity, ...]:
    try:
        seen = _Loop(job).run()
    except PenstockError:
        raise
    except Exception as problem:  # whatever the job's code raises
        message = where(problem, "the job's model or loss fails")
        raise JobError(message, hint="does it run without Penstock?") from problem
    return tuple(dict.fromkeys(seen))


# -- the loop -------------------------------------------------------------------------------------


class _Loop:
    """Some steps of the plain loop, looked at from all sides."""

    def __init__(self, job: Job) -> None:
        self.job, self.asked = job, Asked()
        self.asked.watch_files()
        self.model, batch = build(job)
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        self.updates = eager_updates(job, self.model) if trainable else None
        self.data = started(job.data, 0)
        self.batch: Any = batch
        self.flow = Flow(self.model, line_of)
        self.recorded: list[Recorded] = []
        self.losses: list[tuple[object, ...]] = []
        self.shapes: list[object] = []
        self.drawn = False

    def run(self) -> list[Impurity]:
        """Return all findings, those with a name first."""
        self._step()
        functions = functions_of(self.asked.codes)
        look: Callable[[], Values] = lambda: held(self.model, functions, self.asked.codes)  # noqa: E731
        states = [look()]
        self._between()
        states += self._step(look)
        found = [*self._changed(states), *self._set_elsewhere()]
        found += self._by_chance() if self.drawn else []
        found += self._of_machine()
        flows = list(self._of_flow())
        named = {one.where for one in found}
        found += [one for one in flows if one.where not in named]
        return found or list(self._of_values())

    def _step(self, look: Callable[[], Values] | None = None) -> list[Values]:
        """Compute one micro-batch twice, from equal buffers; look at what is held after each."""
        states: list[Values] = []
        batch = self._next()
        buffers = {name: b.detach().clone() for name, b in self.model.named_buffers()}
        for again in range(2):
            if again:
                self._next()
                with torch.no_grad():
                    for name, buffer in self.model.named_buffers():
                        if name in buffers and buffers[name].shape == buffer.shape:
                            buffer.copy_(buffers[name])
            self._micro_batch(batch)
            states += [look()] if look is not None else []
        return states

    def _next(self) -> Any:
        """Return the next batch, or where the data has ended the last."""
        with self.asked.listening(to_others=True):
            self.batch = next(self.data, self.batch)
        return self.batch

    def _micro_batch(self, batch: Any) -> None:
        batch = on_device(batch)
        leaves, _ = flatten(batch)
        before = global_chance()
        number = len(self.recorded) // 2
        self.asked.reads_files = bool(self.recorded)
        with (
            SeededRandom(micro_batch_seed(self.job.seed, number)),
            self.flow.recording(leaves) as recorded,
            torch.autograd.set_multithreading_enabled(False),
            self.asked.listening(),
        ):
            loss = loss_of(self.job, self.model, batch)
            recorded.results["loss"] = self.flow.token(loss)
            (loss / self.job.micro_batches).backward()  # pyright: ignore[reportUnknownMemberType]
        self.asked.reads_files = False
        self.drawn |= global_chance() != before
        self.recorded.append(recorded)
        self.shapes.append([_shape(leaf) for leaf in leaves])
        self.losses.append((float(loss.detach()), *self._sums(1 + (len(self.recorded) + 1) % 2)))

    def _sums(self, times: int) -> Iterator[int]:
        """Yield a sum of the bits of every gradient, which is now `times` that of a micro-batch."""
        for parameter in self.model.parameters():
            grad = parameter.grad
            if grad is not None and grad.layout is torch.strided and grad.is_floating_point():
                bits = (grad / times).double().view(torch.int64)
                yield int(bits.sum())

    def _between(self) -> None:
        """Do what the plain loop does between two steps."""
        named = self.model.named_parameters()
        given = {name: p.grad for name, p in named if p.requires_grad and p.grad is not None}
        if self.updates is not None:
            with self.asked.listening(to_others=True):
                self.updates.step(0, given)
        for parameter in self.model.parameters():
            parameter.grad = None

    # -- findings ---------------------------------------------------------------------------------

    def _changed(self, states: Sequence[Values]) -> Iterator[Impurity]:
        """Yield what changes in Python and is read."""
        first, *later = states
        names: dict[str, tuple[str, object, object]] = {}
        for state in later:
            for place, value in state.items():
                if place not in first or first[place] != value:
                    names.setdefault(place.name, (place.where, first.get(place), value))
            first = state
        for name, (place, before, after) in names.items():
            reads = read_at(name, self.asked.codes)
            if reads is None:
                continue
            writes = written_at(name, self.asked.codes | self.asked.elsewhere)
            by = f"; set at {_text(writes)}" if writes is not None and writes != reads else ""
            change = _change(before, after)
            why = f"read here, and it changes between micro-batches{change}{by}"
            yield Impurity(_shown(place), _text(reads), why)

    def _set_elsewhere(self) -> Iterator[Impurity]:
        """Yield what the data, the learning rate or the optimizer sets, and the loss reads."""
        for name, line in names_written(self.asked.elsewhere - self.asked.codes).items():
            reads = read_at(name, self.asked.codes)
            if reads is not None:
                yield Impurity(
                    name, _text(reads), f"read here; set at {_text(line)} as the loop goes on"
                )

    def _by_chance(self) -> Iterator[Impurity]:
        """Yield the lines that draw from the generators of Python or numpy."""
        lines: list[Line] = []
        with watching(position, lines.append), torch.enable_grad():
            loss_of(self.job, self.model, on_device(self.batch))
        why = "drawn here; a traced step would keep the first ones"
        what = "random numbers of Python or numpy"
        for line in dict.fromkeys(lines):
            yield Impurity(what, _text(line), why)
        if not lines:
            yield Impurity(what, "the loss", why)

    def _of_machine(self) -> Iterator[Impurity]:
        for (what, line), why in self.asked.found.items():
            yield Impurity(what, _text(line), why)
        for recorded in self.recorded:
            for line in recorded.generators:
                why = "drawn from here; it goes on from one micro-batch to the next"
                yield Impurity("a torch.Generator", _text(line), why)

    def _of_flow(self) -> Iterator[Impurity]:
        """Yield where a micro-batch is computed otherwise than before."""
        pairs = [(0, 1), (2, 3)]
        depends = self.asked.escapes or any(one.data_dependent for one in self.recorded)
        if not depends and self.shapes[1] == self.shapes[2]:
            pairs.append((1, 2))
        for before, after in pairs:
            one, two = self.recorded[before], self.recorded[after]
            if two.is_one_function_with(one):
                continue
            line, how = first_difference(two, one, self.flow.words)
            why = f"it differs between micro-batches ({how})"
            yield Impurity("what is computed", _text(line), why)
            return

    def _of_values(self) -> Iterator[Impurity]:
        if any(self.losses[k] != self.losses[k + 1] for k in (0, 2) if self._is_exact()):
            yield Impurity(
                "the loss or a gradient", "the loss", "differs when it is computed again"
            )

    def _is_exact(self) -> bool:
        """Return whether equal ops give equal bits."""
        return all(p.device.type == "cpu" for p in self.model.parameters())


def _shape(leaf: object) -> object:
    return tuple(leaf.shape) if isinstance(leaf, Tensor) else repr(leaf)


def _text(line: Line | None) -> str:
    return "the loss" if line is None else f"{_near(line[0])}:{line[1]}"


def _near(file: str) -> str:
    """Return a path as one would write it here."""
    path = Path(file)
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else file


def _shown(place: str) -> str:
    """Return a place without the file of a global or of a closure: the line says it."""
    return re.sub(r" in .*?\.py(:\d+)?", "", place)


def _change(before: object, after: object) -> str:
    """Return both values where they are short."""
    words = [_short(token) for token in (before, after)]
    return "" if None in words or words[0] == words[1] else f" ({words[0]}, then {words[1]})"


def _short(token: Any) -> str | None:
    """Return a token of `held` as one would write the value: text of a number, (type, value)."""
    if isinstance(token, str):
        return f"{float(token):.6g}" if _is_number(token) else token[:24]
    match token:
        case (str(), value) if len(str(value)) <= 24:
            return str(value)
        case int():
            return str(token)
        case _:
            return None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
