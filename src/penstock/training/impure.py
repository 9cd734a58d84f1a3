"""Impure: what a job's model and loss read besides weights, buffers, batch and torch's seed.

A traced step is a function of these alone.  So some micro-batches run here as in a plain loop, in
a copy of the process, and whatever else the result may follow is found:

flow    the ops of a micro-batch are others, or have other arguments, when it is computed again
held    a value in Python changes between micro-batches, and code that ran reads it
asked   code asks for the time, for chance that no seed gives, for a file
"""

import gc
import random
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock import _compat
from penstock.batches import started
from penstock.errors import JobError, PenstockError
from penstock.graph.batch import PLAIN, leaf_key
from penstock.graph.code import SeededRandom, micro_batch_seed
from penstock.graph.contents import flatten
from penstock.graph.functional import where
from penstock.graph.trace import build, loss_and_figures, loss_of, on_device
from penstock.job import Job
from penstock.runtime.child import Beat, in_a_fork
from penstock.runtime.optimizer import eager_updates
from penstock.training.asked import Asked, global_chance, line_of, position, watching
from penstock.training.flow import Flow, Recorded, first_difference
from penstock.training.held import Values, functions_of, held
from penstock.training.reads import names_written, read_at, read_by_any_name_at, written_at

Line = tuple[str, int]
_PATIENCE_S = 600.0  # with a micro-batch
_MOST_UPDATES, _UPDATES_S = 100, 0.2  # made with the last gradients
_MOST_STEPS, _EVERY = 10_000, 100  # later steps whose rate is asked for; looked at all so many
_RATES_S = 0.5  # for all of them
_MOST_READ, _READING_S = 32, 0.2  # later batches that are read, and for how long


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
              RunError: they end their process, or it does nothing for ten minutes.
    """
    if torch.cuda.is_available():
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()
        try:
            return _examined(job, lambda: None)
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.set_rng_state(before[2])
    found = in_a_fork(partial(_told, job), _PATIENCE_S)
    return tuple(Impurity(**row) for row in found)


def describe(found: Sequence[Impurity]) -> str:
    """Return findings in words, one a line, the first three of them."""
    rows = [f"  {one.where}: {one.what}: {one.why}" for one in found[:3]]
    more = [f"  and {len(found) - 3} more"] if len(found) > 3 else []
    head = "the loss follows more than weights and batch, which a traced step would freeze"
    return "\n".join([head, *rows, *more]) if found else ""


# -- in a copy of this process --------------------------------------------------------------------


def _told(job: Job, beat: Beat) -> list[dict[str, str]]:
    gc.disable()  # all lives to the end, and going through it takes longer than the ops
    quiet = StringIO()  # what the job prints, it prints again when it trains
    with redirect_stdout(quiet), redirect_stderr(quiet):
        return [asdict(one) for one in _examined(job, beat)]


def _examined(job: Job, beat: Beat) -> tuple[Impurity, ...]:
    try:
        with torch.compiler.set_stance("force_eager"):  # what is compiled computes the same
            seen = _Loop(job, beat).run()
    except PenstockError:
        raise
    except Exception as problem:  # whatever the job's code raises
        message = where(problem, "the job's model or loss fails")
        raise JobError(message, hint="does it run without Penstock?") from problem
    return tuple(dict.fromkeys(seen))


# -- the loop -------------------------------------------------------------------------------------


class _Loop:
    """Some steps of the plain loop, looked at from all sides."""

    def __init__(self, job: Job, beat: Beat) -> None:
        self.job, self.beat, self.asked = job, beat, Asked()
        self.asked.watch_files()
        self.model, batch = build(job)
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        self.updates = eager_updates(job, self.model) if trainable else None
        self.gradients: dict[str, Tensor] = {}
        self.data = started(job.data, 0)
        self.batch: Any = batch
        self.flow = Flow(self.model, line_of)
        self.recorded: list[Recorded] = []
        self.losses: list[tuple[object, ...]] = []
        self.leaves: list[list[str]] = []
        self.members = _members(self.model)
        self.reached: Collection[int] = ()  # the `id` of what the loss can reach
        self.drawn = False

    def run(self) -> list[Impurity]:
        """Return all findings, those with a name first."""
        self._step()
        functions = functions_of(self.asked.codes)

        def look() -> Values:
            values, self.reached = held(self.model, functions, self.asked.codes)
            return values

        states = [look()]
        self._update(0)
        states += self._step(look)
        self._update(1)
        states.append(look())
        frozen = list(self._later_updates()) or list(self._later_steps())
        self._read_on()
        found = [*self._changed([*states, look()]), *frozen, *self._of_batches()]
        found += self._set_elsewhere({one.where for one in found})
        found += self._by_chance() if self.drawn else []
        found += self._of_machine()
        flows = list(self._of_flow())
        named = {one.where for one in found}
        found += [one for one in flows if one.where not in named]
        return found or list(self._of_values())

    def _step(self, look: Callable[[], Values] | None = None) -> list[Values]:
        """Compute one micro-batch twice, from equal buffers; look at what is held after each."""
        states: list[Values] = []
        batch = on_device(self._next())  # a copy: its memory may be filled again
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
            loss, figures = loss_and_figures(self.job, self.model, batch)
            for name, value in [("loss", loss), *figures.items()]:
                recorded.results[f"result {name}"] = self.flow.token(value)
            (loss / self.job.micro_batches).backward()  # pyright: ignore[reportUnknownMemberType]
        self.asked.reads_files = False
        self.drawn |= global_chance() != before
        self.recorded.append(recorded)
        self.leaves.append([_key(leaf) for leaf in leaves])
        self.beat()
        self.losses.append((float(loss.detach()), *self._sums(1 + (len(self.recorded) + 1) % 2)))

    def _sums(self, times: int) -> Iterator[int]:
        """Yield a sum of the bits of every gradient, which is now `times` that of a micro-batch."""
        for parameter in self.model.parameters():
            grad = parameter.grad
            if grad is not None and grad.layout is torch.strided and grad.is_floating_point():
                bits = (grad / times).double().view(torch.int64)
                yield int(bits.sum())

    def _read_on(self) -> None:
        """Read further batches, for a while: something may change with the epoch."""
        until = time.process_time() + _READING_S
        for _ in range(_MOST_READ):
            self._next()
            if time.process_time() > until:
                return

    def _update(self, step: int) -> None:
        """Do what the plain loop does at the end of a step."""
        named = self.model.named_parameters()
        given = {name: p.grad for name, p in named if p.requires_grad and p.grad is not None}
        self.gradients = given
        if self.updates is not None:
            with self.asked.listening(to_others=True):
                self.updates.step(step, given)
        for parameter in self.model.parameters():
            parameter.grad = None

    # -- findings ---------------------------------------------------------------------------------

    def _changed(self, states: Sequence[Values]) -> Iterator[Impurity]:
        """Yield what changes in Python and is read."""
        first, *later = states
        names: dict[tuple[str, str], tuple[str, object, object]] = {}
        for state in later:
            for place, value in state.items():
                if place not in first or first[place] != value:
                    key = place.name, place.holder
                    names.setdefault(key, (place.where, first.get(place), value))
            first = state
        for (name, holder), (place, before, after) in names.items():
            reads = self._read(name, holder, place)
            if reads is None:
                continue
            writes = written_at(name, self.asked.codes | self.asked.elsewhere)
            by = f"; set at {_text(writes)}" if writes is not None and writes != reads else ""
            change = _change(before, after)
            why = f"read here, and it changes between micro-batches{change}{by}"
            yield Impurity(_shown(place), _text(reads), why)

    def _read(self, name: str, holder: str, place: str) -> Line | None:
        """Return the line that reads it by its name, its holder's, or one that is computed."""
        codes = self.asked.codes
        reads = read_at(name, codes) or (read_at(holder, codes) if holder else None)
        if reads is not None or not place.endswith(f".{name}"):
            return reads
        return read_by_any_name_at(c for c in codes if "-packages" not in c.co_filename)

    def _later_updates(self) -> Iterator[Impurity]:
        """Make further updates with the last gradients; yield what they freeze or let learn.

        A plain optimizer of torch, without hooks or a scheduler, changes nothing but weights.
        """
        if self.updates is None or (self.updates.is_plain and self.job.scheduler is None):
            return
        before, until = _flags(self.model), time.process_time() + _UPDATES_S
        for step in range(2, min(self.job.num_steps, _MOST_UPDATES)):
            for name, parameter in self.model.named_parameters():
                parameter.grad = self.gradients.get(name)
            try:
                self._update(step)
            except JobError:  # it does not take the same gradients for ever
                return
            after = _flags(self.model)
            changed = [name for name in before if before[name] != after.get(name)]
            if changed:
                why = f"{before[changed[0]]}, and {after.get(changed[0])} from step {step + 1} on"
                yield Impurity(changed[0], "optimizer", why)
            if changed or time.process_time() > until:
                return

    def _later_steps(self) -> Iterator[Impurity]:
        """Ask for the rates of later steps; yield what these functions freeze or let learn."""
        if self.job.learning_rate is None:
            return
        before, until = _flags(self.model), time.process_time() + _RATES_S
        with self.asked.listening(to_others=True):
            for step in range(2, min(self.job.num_steps, _MOST_STEPS)):
                self.job.learning_rate(step)
                if time.process_time() > until:
                    return
                if (step & (step - 1)) and step % _EVERY and step + 1 < self.job.num_steps:
                    continue
                for name, flag in _flags(self.model).items():
                    if before.get(name) != flag:
                        why = f"{before.get(name)}, and {flag} from step {step} on or before"
                        yield Impurity(name, "learning_rate", why)
                        return

    def _set_elsewhere(self, known: Collection[str]) -> Iterator[Impurity]:
        """Yield what the data, the learning rate or the optimizer sets, and the loss reads."""
        methods = [code for code, own in self.asked.selves if id(own) in self.reached]
        codes = self.asked.elsewhere - self.asked.codes
        for name, line in names_written(codes, methods).items():
            reads = read_at(name, self.asked.codes)
            if reads is not None and _text(reads) not in known:
                why = f"read here; set at {_text(line)} as the loop goes on"
                yield Impurity(name, _text(reads), why)

    def _of_batches(self) -> Iterator[Impurity]:
        """Yield how micro-batches and the members of the model are others than at first."""
        for one, two in zip(self.leaves[0], self.leaves[-1], strict=False):
            if one != two:
                why = f"{one} in the first micro-batch, then {two}: a traced step takes only those"
                yield Impurity("the batch", "data", why)
                return
        for name in sorted(_members(self.model) ^ self.members):
            yield Impurity(
                name, f"model.{name}", "registered or removed while the loss is computed"
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
        if not lines:  # drawn once, and kept
            yield Impurity(what, _text(self._draws()), why)

    def _draws(self) -> Line | None:
        """Return the line of a function that ran and names a generator that all share."""
        for function in functions_of(self.asked.codes):
            code, known = function.__code__, function.__globals__
            if any(known.get(name) in (random, np, np.random) for name in code.co_names):
                return code.co_filename, code.co_firstlineno
        return None

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
        if not depends and self.leaves[1] == self.leaves[2]:
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
        """Return whether equal ops on equal values give equal bits."""
        is_cpu = all(p.device.type == "cpu" for p in self.model.parameters())
        return is_cpu and not any(one.writes_weights for one in self.recorded)


def _flags(model: nn.Module) -> dict[str, bool]:
    """Return which parameters learn, and which modules are in training mode."""
    flags = {f"requires_grad of {n}": p.requires_grad for n, p in model.named_parameters()}
    return flags | {f"training of {n}": m.training for n, m in _compat.named_modules(model)}


def _key(leaf: object) -> str:
    """Return what a traced step would hold a leaf of the batch to."""
    known = isinstance(leaf, (Tensor, *PLAIN))
    return str(leaf_key(leaf)) if known else type(leaf).__qualname__


def _members(model: nn.Module) -> set[str]:
    """Return the names of all that a checkpoint holds of a model."""
    return set(model.state_dict(keep_vars=True))


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
