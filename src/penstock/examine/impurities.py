"""Impurities: what a job's model and loss read besides weights, buffers, batch and torch's seed.

A traced step is a function of these alone.  So some micro-batches run here as in a plain loop, in
a copy of the process, and whatever else the result may follow is found:

flow    the ops of a micro-batch are others, or have other arguments, when it is computed again
held    a value in Python changes between micro-batches, and code that ran reads it
asked   code reads the time, random numbers that no seed sets, or a file
"""

import gc
import itertools
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import asdict, astuple, dataclass, field
from functools import partial
from io import StringIO
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from penstock import _compat
from penstock.batches.reads import started
from penstock.device import here, of
from penstock.errors import JobError, PenstockError
from penstock.examine.alive import functions_of
from penstock.examine.dataflow import RecordedMicroBatch, Recorder, first_difference
from penstock.examine.model_changes import ChangeWatch, Facts, made_again
from penstock.examine.name_reads import (
    freezes_at,
    is_given,
    names_written,
    read_at,
    reader_of,
    written_at,
)
from penstock.examine.python_values import Values, has_extra_state, held
from penstock.examine.queries import Queries, global_chance, line_of, position, text_of, watching
from penstock.examine.surroundings import NOTES
from penstock.examine.tokens import Moving
from penstock.examine.unsaved import (
    Key,
    Tokens,
    Unsaved,
    changed,
    instances_with,
    key_of,
    look,
    named,
    shown,
    token_beside,
)
from penstock.examine.value_changes import change, differences, names_of
from penstock.graph.batch import PLAIN, leaf_key
from penstock.graph.code import SeededRandom, micro_batch_seed
from penstock.graph.contents import attributes_of, flatten, own, own_apart, rebuilt
from penstock.graph.functional import where
from penstock.graph.lasting import is_dense
from penstock.graph.precision import cast_weights
from penstock.graph.shared_memory_views import describe_overlaps, overlaps_with
from penstock.graph.trace import (
    build_model,
    first_batch,
    loss_and_figures,
    loss_of,
    on_device,
)
from penstock.graph.unread import any_key, unread_of, without
from penstock.graph.waiting import backward_of
from penstock.job import Job, is_users
from penstock.processes.child import Beat, in_a_fork
from penstock.state.optimizer.optimizer import eager_updates
from penstock.state.optimizer.reach import reached_by_hooks
from penstock.state.optimizer_state import nested
from penstock.state.python_state import digests

Line = tuple[str, int]
UNLIKE = "micro-batches are unlike, and a plan is made for one kind"
_PATIENCE_S = 600.0  # with a micro-batch
_MOST_LATER, _LATER_S = 100, 0.2  # steps that are made with the last gradients
_GRADIENT = "the gradient of "
_SET = (*PLAIN, list, tuple, dict, set)  # what is looked at of a tensor's attributes
_MOST_READ = 12  # of these, where only the data is asked
_MOST_STEPS, _EVERY = 10_000, 100  # later steps whose rate is asked for; looked at all so many
_RATES_S = 0.5  # for all of them
_READING_S = 0.1  # for the batches of the later ones


@dataclass(frozen=True, slots=True, order=True)
class Impurity:
    """Something that a traced step would freeze or lose.

    what   in words
    where  "file.py:12", or where there is no line "model.blocks.0.count"
    why    how it was seen
    batch  it is the batch, which ranks without a plan take as it comes
    anew   whether a run that goes on from a checkpoint would begin it anew: nobody saves it, and
           reading the data again, or asking again for the rates, does not bring it back
    """

    what: str
    where: str
    why: str
    batch: bool = False
    anew: bool = field(default=False, compare=False)


def impurities(job: Job) -> tuple[Impurity, ...]:
    """Return what forward, loss and backward of `job` read that a trace would freeze or lose.

    Four micro-batches of two batches, each computed twice, with an update between, in a forked
    copy of this process: nothing of the job's own state has moved afterwards.  Where there is a
    GPU, which a fork could not use, they run in this process.
    Ignores:  what changes only after many steps and by nothing that runs in these.
    Raises:   JobError: the model, the loss or the optimizer fails; the message names the line.
              RunError: they end their process, or it does nothing for ten minutes.
    """
    return looked_at(job).impurities


class Looked(NamedTuple):
    """What examining the loss and the updates of a job has found.

    written:  leaves of the batch that the loss writes into, where all is to be done again so.
    beside:   what functions keep beside model and optimizer; `keys`, of all that ran.
    """

    impurities: tuple[Impurity, ...]
    written: "Written | None" = None
    beside: tuple[Unsaved, ...] = ()
    keys: tuple[Key, ...] = ()


Written = Collection[int]


def looked_at(job: Job) -> Looked:
    """Return what is found of a job, as `impurities` does, and what it keeps beside.

    Raises:   as `impurities`.
    """
    found = _found(job, None)
    return found if found.written is None else _found(job, found.written)


def _found(job: Job, written: Written | None) -> Looked:
    """Return what is found with each leaf of a batch copied by itself.

    Or, where the loss writes into one that overlaps another, which leaves it writes into; then
    this is called again with those.
    """
    if not here().can_fork:
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()
        try:
            return _examined(job, written, lambda: None)
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.set_rng_state(before[2])
    rows, written, beside, keys, changed = in_a_fork(partial(_told, job, written), _PATIENCE_S)
    NOTES.elsewhere += changed
    found = tuple(Impurity(**row) for row in rows), written
    told = tuple((str(file), int(line), str(name)) for file, line, name in keys)
    return Looked(*found, tuple(Unsaved(*row) for row in beside), told)


def describe(found: Sequence[Impurity]) -> str:
    """Return findings in words, one a line, the first three of them."""
    rows = [f"  {one.where}: {one.what}: {one.why}" for one in found[:3]]
    more = [f"  and {len(found) - 3} more"] if len(found) > 3 else []
    head = "the loss depends on more than weights and batch, which a traced step would freeze"
    if all(one.batch for one in found):
        head = UNLIKE
    return "\n".join([head, *rows, *more]) if found else ""


def begun_anew(found: Sequence[Impurity]) -> tuple[str, ...]:
    """Return in words what a run that goes on from a checkpoint would begin anew."""
    return tuple(f"{one.where}: {one.what}: {one.why}" for one in found if one.anew)


# -- in a copy of this process --------------------------------------------------------------------


def _told(job: Job, written: Written | None, beat: Beat) -> list[Any]:
    gc.disable()  # all lives to the end, and going through it takes longer than the ops
    quiet = StringIO()  # what the job prints, it prints again when it trains
    with redirect_stdout(quiet), redirect_stderr(quiet):
        found = _examined(job, written, beat)
        beside = [list(astuple(one)) for one in found.beside]
        rows = [asdict(one) for one in found.impurities]
        return [rows, found.written, beside, list(map(list, found.keys)), NOTES.changed()]


def _examined(job: Job, written: Written | None, beat: Beat) -> Looked:
    try:
        with torch.compiler.set_stance("force_eager"), _compat.scripts_as_written():
            loop = _Loop(job, written, beat)
            seen = loop.run()
    except PenstockError:
        raise
    except Exception as problem:  # whatever the job's code raises
        message = where(problem, "the job's model or loss fails")
        raise JobError(message, hint="does it run without Penstock?") from problem
    beside = tuple(dict.fromkeys(loop.beside))
    keys = sorted(map(key_of, loop.codes)) if beside else ()
    return Looked(tuple(dict.fromkeys(seen)), loop.together(), beside, tuple(keys))


# -- the loop -------------------------------------------------------------------------------------


class _Loop:
    """Some steps of the plain loop, looked at from all sides."""

    def __init__(self, job: Job, written: Written | None, beat: Beat) -> None:
        self.job, self.written, self.beat, self.asked = job, written, beat, Queries()
        self.asked.watch_files()
        self.made, self.model = made_again(job, build_model)
        batch = first_batch(job)
        self.watch = ChangeWatch(self.model)
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        with self.watch.of("optimizer", self.watch.as_the_optimizer_is_made):
            watched = self.watch.watched(job)
            self.updates = eager_updates(watched, self.model) if trainable else None
        self.watch.optimizer = None if self.updates is None else self.updates.optimizer
        self.reached_at_first = self._reached_by_hooks()
        self.gradients: Mapping[str, Tensor] = {}
        self.data = started(job.data, 0)
        self.batch: Any = batch
        self.flow = Recorder(self.model, line_of)
        self.recorded: list[RecordedMicroBatch] = []
        self.losses: list[dict[str, object]] = []
        self.leaves: list[list[str]] = []
        self.begin: Sequence[Any] = ()  # leaves of the first batch, the data's own objects
        self.raw: list[Sequence[Any]] = []  # leaves of the batches as the data has them
        self.members = _members(self.model)
        self.reached: Collection[int] = ()  # the `id` of what the loss can reach
        self.told: list[Impurity] = []  # by the loss or the data, to others
        self.later: list[list[str]] = []  # what the batches to come are
        self.drawn = False
        self.saved = list(job.state.values())
        self.unsaved: list[Values] = []  # what is held beside what is saved
        self.beside: list[Unsaved] = []
        self.moved: dict[str, Impurity] = {}  # what is saved, and the loss changes
        self.on_batches: dict[str, Impurity] = {}  # what the loss sets on tensors of a batch

    def run(self) -> list[Impurity]:
        """Return all findings, those with a name first.

        Raises:   JobError: the loss seeds torch's own generator, and then draws from it.
        """
        self._step()
        self._refuse_seeds()
        look = self._look_at_all()
        states = [look()]
        self._update(0)
        before = self._look_beside()
        states += self._step(look)
        between = self._look_beside()
        self._update(1)
        self._name_beside(before, between, self._look_beside())
        states.append(look())
        states += self._go_on(look)
        found = [
            *self._built(),
            *self._changed([*states, look()]),
            *self._from_outside(),
            *self._frozen_later(),
            *self._handed_to_hooks(),
            *self.told,
            *self.moved.values(),
            *self.on_batches.values(),
        ]
        found += self._of_batches()
        found += self._set_elsewhere({one.where for one in found})
        found += self._by_chance() if self.drawn else []
        found += self._of_machine()
        flows = list(self._of_flow())
        named = {one.where for one in found}
        found += [one for one in flows if one.where not in named]
        others = [one for one in found if not one.batch]
        return found if others else [*found, *self._of_values()]

    def _look_at_all(self) -> Callable[[], Values]:
        """Return what looks at all that the code which has run can reach."""
        functions = functions_of(self.asked.codes)
        own = instances_with(functions)  # a loss may be an object that no function holds
        if isinstance(self.job.loss, MethodType):  # be it that of a module
            own.append(self.job.loss.__self__)
        look_at = partial(held, self.model, functions, self.asked.codes, others=own)

        def look() -> Values:
            values, self.reached = look_at()
            is_saved = self.saved or any(map(has_extra_state, self.model.modules()))
            self.unsaved.append(look_at(saved=self.saved)[0] if is_saved else values)
            return values

        return look

    def _refuse_seeds(self) -> None:
        """Raise if random ops are to follow a seed that the loss sets: the job's decides for each.

        Raises:   JobError: so it is.
        """
        draws = any(op.tokens[-1] for one in self.recorded for op in one.ops)
        if self.asked.seeds and draws:
            place = _text(self.asked.seeds[0])
            message = "the loss seeds torch's random numbers, and Penstock seeds each op that draws"
            hint = "draw from torch.Generator().manual_seed(0), given as generator="
            raise JobError(f"{place}: {message}; {hint}", hint=hint)

    # -- what is kept beside ----------------------------------------------------------------------

    @property
    def codes(self) -> set[CodeType]:
        """Return what ran of the job but its data."""
        return self.asked.codes | self.asked.of_updates

    def _look_beside(self) -> Tokens:
        whole = () if self.updates is None else nested(self.updates.optimizer)
        own = [o for _, one in whole for o in (one, one.state, *one.param_groups)]
        skipped = (*self.model.modules(), *own, *self.saved, self.watch)
        return look(self.codes, skipped, token_beside(self.model))

    def _name_beside(self, before: Tokens, between: Tokens, after: Tokens) -> None:
        """Note what the loss has changed, then what an update has, and code of the job reads."""
        for old, new, by_update in ((before, between, False), (between, after, True)):
            places = [p for p in changed(old, new) if not self._is_done_again(p.name)]
            self.beside += named(places, self.codes, by_update=by_update, after=new)

    # -- steps ------------------------------------------------------------------------------------

    def _step(self, look: Callable[[], Values] | None = None) -> list[Values]:
        """Compute one micro-batch twice, from equal buffers; look at what is held after each."""
        states: list[Values] = []
        told = partial(self._told, "the data", self.asked.of_updates)
        self._next() if look is None else told(self._next)
        batch = on_device(self.batch)  # a copy: its memory may be filled again
        buffers = {name: b.detach().clone() for name, b in self.model.named_buffers()}
        for again in range(2):
            if again:
                self._next()
                with torch.no_grad():
                    for name, buffer in self.model.named_buffers():
                        if self._is_put_back(name, buffer, buffers.get(name)):
                            buffer.copy_(buffers[name])
            compute = partial(self._micro_batch, batch)
            with self.watch.of("the loss", self.watch.options):
                if look is None or again:
                    compute()
                else:
                    self._told("the loss", self.asked.elsewhere, compute)
            states += [look()] if look is not None else []
        now = dict(self.model.named_buffers())
        self.watch.written |= {n for n, b in buffers.items() if not _is_same(b, now.get(n))}
        self._refuse_sparse(now)
        return states

    def _refuse_sparse(self, buffers: Mapping[str, Tensor]) -> None:
        """Raise if forward writes a sparse buffer.

        Raises:   JobError: it names that.
        """
        for name in sorted(self.watch.written & buffers.keys()):
            if not is_dense(buffers[name]):
                message = f"forward writes buffer {name}, which is sparse: no checkpoint holds it"
                raise JobError(message, hint="write a dense one, and call to_sparse() in forward")

    def _is_put_back(self, name: str, buffer: Tensor, before: Tensor | None) -> bool:
        is_same = before is not None and before.shape == buffer.shape
        return is_same and not self.flow.is_cache(name)

    def _next(self) -> Any:
        """Return the next batch, or where the data has ended the last."""
        self._read(1)
        return self.batch

    def _read(self, count: int) -> None:
        until = time.process_time() + _READING_S
        data = self.watch.of("data", self.watch.all), self.watch.reading("data")
        with self.asked.listening(self.asked.of_data), data[0], data[1]:
            for _ in range(count):
                self.batch = next(self.data, self.batch)
                leaves = flatten(self.batch)[0]
                self.begin = self.begin or leaves
                self.later.append([self._overlaps(leaves), *map(_key, leaves)])
                if time.process_time() > until:
                    return

    def together(self) -> list[int] | None:
        """Return the leaves that the loss writes into if they overlap others and were copied apart.

        None: what was found, is.
        """
        written = sorted(self.flow.written)
        if self.written is None and any(map(partial(overlaps_with, written), self.raw)):
            return written
        return None

    def _micro_batch(self, batch: Any) -> None:
        self.raw.append(flatten(batch)[0])
        batch = (own_apart if self.written is None else own)(batch, here().place)
        leaves, _ = flatten(batch)
        before, named = global_chance(), digests(self.job)
        attributes = _attributes_of(leaves)
        number = len(self.recorded) // 2
        self.asked.reads_files = bool(self.recorded)
        with (
            SeededRandom(micro_batch_seed(self.job.seed, number)),
            self.flow.recording(leaves) as recorded,
            cast_weights(self.job, self.model),
            torch.autograd.set_multithreading_enabled(False),
            self.asked.listening(),
        ):
            loss, figures = loss_and_figures(self.job, self.model, batch)
            for name, value in [("loss", loss), *figures.items()]:
                recorded.results[f"result {name}"] = self.flow.token(value)
            backward_of(loss / self.job.micro_batches, self.model)
        self.asked.reads_files = False
        self.drawn |= global_chance() != before
        self._note_moved(named)
        self._note_set(leaves, attributes)
        self.recorded.append(recorded)
        self.leaves.append([self._overlaps(leaves), *map(_key, leaves)])
        self.beat()
        sums = self._sums(1 + (len(self.recorded) + 1) % 2)
        self.losses.append({"the loss": float(loss.detach()), **dict(sums)})

    def _overlaps(self, leaves: Sequence[Any]) -> str:
        """Return in words which leaves overlap those that the loss writes into."""
        return describe_overlaps(overlaps_with(self.written, leaves)) if self.written else ""

    def _note_moved(self, before: Mapping[str, bytes]) -> None:
        """Note what the job names and the loss has changed: a trace would do that once."""
        for name, now in digests(self.job).items():
            if now != before[name]:
                what, why = f'Job.state["{name}"]', "it changes while the loss is computed"
                self.moved[name] = Impurity(what, "the loss", why)

    def _note_set(self, leaves: Sequence[Any], before: Mapping[tuple[int, str], str]) -> None:
        """Note what the loss sets on tensors of a batch, and reads, if the data yields those again.

        A copy would lose it.
        """
        for (at, name), value in _attributes_of(leaves).items():
            if value == before.get((at, name)) or name in self.on_batches:
                continue
            reads = read_at(name, self.asked.codes)
            if reads is not None and self._is_yielded_again(at):
                why = "read here, and the loss sets it on a tensor that `data` yields again"
                what = f"{name} of the batch"
                self.on_batches[name] = Impurity(what, _text(reads), why, anew=True)

    def _is_yielded_again(self, at: int) -> bool:
        """Return whether data that begins anew yields the object that a leaf was at first."""
        leaves = flatten(next(started(self.job.data, 0), None))[0]
        return at < len(leaves) and leaves[at] is self.begin[at]

    def _sums(self, times: int) -> Iterator[tuple[str, int]]:
        """Yield a sum of the bits of every gradient, which is now `times` that of a micro-batch."""
        for name, parameter in self.model.named_parameters():
            grad = parameter.grad
            if grad is not None and grad.layout is torch.strided and grad.is_floating_point():
                bits = (grad / times).double().view(torch.int64)
                yield f"{_GRADIENT}{name}", int(bits.sum())

    def _update(self, step: int, gradients: Mapping[str, Tensor] | None = None) -> None:
        """Do what the plain loop does at the end of a step, or do it with these gradients."""
        for name, parameter in self.model.named_parameters():
            parameter.grad = parameter.grad if gradients is None else gradients.get(name)
        named = self.model.named_parameters()
        given = {name: p.grad for name, p in named if p.requires_grad and p.grad is not None}
        self.gradients = given if gradients is None else gradients
        self.watch.step = step
        if self.updates is not None:
            watching_it = self.watch.of("optimizer", self.watch.in_an_update)
            with self.asked.listening(self.asked.of_updates), watching_it:
                self.updates.step(step, given)
        for parameter in self.model.parameters():
            parameter.grad = None

    # -- findings ---------------------------------------------------------------------------------

    def _changed(self, states: Sequence[Values]) -> Iterator[Impurity]:
        """Yield what changes in Python and is read."""
        lost = names_of(self.unsaved)
        for key, (place, before, after) in names_of(states).items():
            name, holder, theirs = key
            reads = reader_of(name, holder, place, self.asked.codes)
            if reads is None and not theirs:
                continue
            writes = written_at(name, self.asked.codes | self.asked.elsewhere)
            by = f"; set at {_text(writes)}" if writes is not None and writes != reads else ""
            words = change(before, after)
            why = f"read here, and it changes between micro-batches{words}{by}"
            anew = key in lost and not self._is_done_again(name)
            yield Impurity(shown(place), _text(reads), why, anew=anew)

    def _is_done_again(self, name: str) -> bool:
        """Return whether only what a resume does again sets it: the data, and the rate."""
        rates = self._rates()
        again = (self.asked.of_data | rates) - self.asked.codes
        others = (self.asked.codes | self.asked.of_updates) - rates
        return written_at(name, again) is not None and written_at(name, others) is None

    def _rates(self) -> set[CodeType]:
        """Return the code of the job's rate, which is asked for all steps here."""
        rate: Any = getattr(self.job.learning_rate, "rate", self.job.learning_rate)
        return {rate.__code__} if isinstance(rate, FunctionType) else set()

    def _go_on(self, look: Callable[[], Values]) -> Iterator[Values]:
        """Go on as the loop does, for a while and with the last gradients; look after each step.

        A plain optimizer of torch, without hooks or a scheduler, changes nothing but weights.
        """
        start, most = time.process_time(), min(self.job.num_steps, _MOST_LATER)
        plain = self.updates is None or (self.updates.is_plain and self.job.scheduler is None)
        plain = plain and self.job.learning_rate is None
        step = 1
        for step in range(2, min(_MOST_READ, most) if plain else most):
            self.watch.step = step
            if time.process_time() < start + _READING_S:
                self._read(self.job.micro_batches)
            try:
                if not plain:
                    self._update(step, self.gradients)
            except Exception:  # noqa: BLE001 - the step may never come, or not with these gradients
                self._refuse_groups()
                return
            if time.process_time() > start + _LATER_S:
                break
            yield look()
        if not plain:
            self._update_apart(step)
        self._ask_for_rates(step + 1)
        self._ask_for_schedule(step + 1)

    def _update_apart(self, step: int) -> None:
        """Do an update once more, after which nothing is computed, with other buffers.

        A teacher's statistics are the student's own until their weights differ: what a hook copies
        or averages there shows only where each buffer that forward writes has values of its own.
        """
        written = ((n, b) for n, b in self.model.named_buffers() if n in self.watch.written)
        with torch.no_grad():
            for at, (_, buffer) in enumerate(written, start=1):
                if buffer.dtype != torch.bool:
                    buffer.mul_(at + 1).add_(at)
        try:
            self._update(step, self.gradients)
        except Exception:  # noqa: BLE001 - the step may never come, or not with these values
            return

    def _ask_for_rates(self, first: int) -> None:
        """Ask for the rates of later steps."""
        rate = self.job.learning_rate
        if rate is not None:
            self._ask("learning_rate", first, rate, self.watch.all)

    def _ask_for_schedule(self, first: int) -> None:
        """Let the scheduler come to later steps."""
        schedule = None if self.updates is None else self.updates.rates.schedule
        if schedule is None:
            return
        with self.watch.unlooked():
            self._ask("scheduler", first, schedule.options, self.watch.in_a_scheduler)
        self._refuse_groups()

    def _refuse_groups(self) -> None:
        """Raise if the scheduler has given the optimizer other groups.

        Raises:   JobError: so it is.
        """
        schedule = None if self.updates is None else self.updates.rates.schedule
        if schedule is not None:
            schedule.check_groups()

    def _ask(
        self, who: str, first: int, call: Callable[[int], object], facts: Callable[[], Facts]
    ) -> None:
        """Call a function of the step for later steps, for a while; note what it changes there."""
        before, until = facts(), time.process_time() + _RATES_S
        with self.asked.listening(self.asked.of_updates):
            for step in range(first, min(self.job.num_steps, _MOST_STEPS)):
                unlooked = step & (step - 1) and step % _EVERY and step + 1 < self.job.num_steps
                self.watch.step = step
                try:
                    with nullcontext() if unlooked else self.watch.reading(who):
                        call(step)
                except Exception:  # noqa: BLE001 - the step may never come
                    return
                if time.process_time() > until:
                    return
                if not unlooked:
                    self.watch.note(who, before, facts())

    def _built(self) -> Iterator[Impurity]:
        if self.made:
            why = "differs each time it is built: let `model` seed what it draws from"
            yield Impurity(self.made, "model", why)

    def _from_outside(self) -> Iterator[Impurity]:
        """Yield what others than the loss change in the model, or in the options of the updates."""
        for what, (who, how) in self.watch.words().items():
            is_again = who in ("data", "learning_rate", "scheduler") and not how.startswith("read")
            yield Impurity(what, who, how, anew=not (is_again or what.startswith("the values of")))

    def _frozen_later(self) -> Iterator[Impurity]:
        """Yield where an update may freeze or thaw what learns, be it in none of these steps."""
        updates = self.asked.of_updates - self._rates()
        line = freezes_at(code for code in updates if is_users(code.co_filename))
        if line is not None and not any(w.startswith("requires_grad") for w in self.watch.found):
            why = "an update may set it in a later step"
            yield Impurity("requires_grad", _text(line), why, anew=True)

    def _reached_by_hooks(self) -> dict[int, str]:
        return {} if self.updates is None else reached_by_hooks(self.updates.optimizer)

    def _handed_to_hooks(self) -> Iterator[Impurity]:
        """Yield the hook of the optimizer that reaches what of the model the loss has handed to it.

        A trace hands over its own module, once: ranks would change that one.
        """
        named = dict(_compat.named_modules(self.model)) | dict(self.model.named_parameters())
        own = {id(one): name for name, one in named.items()}
        for key, line in self._reached_by_hooks().items():
            if key in own and key not in self.reached_at_first:
                what = f"model.{own[key]}".rstrip(".")
                why = "a hook of the optimizer reaches it since the loss was computed"
                yield Impurity(what, line, why)
                return

    def _told(self, who: str, codes: set[CodeType], act: Callable[[], object]) -> None:
        """Note what `who` sets in Python when it acts, and others, of these `codes`, read."""
        codes = codes - self.asked.codes
        functions = functions_of(codes)
        selves = [own for code, own in self.asked.selves if code in codes]

        def look() -> Values:
            return held(nn.Module(), functions, codes, selves)[0]

        before = look()
        act()
        names = {one.what for one in self.told}
        for place, old, new in list(differences(before, look())):
            reads = read_at(place.name, codes)
            if reads is not None and place.name not in names and not isinstance(new, Moving):
                names.add(place.name)
                why = f"read here, and {who} changes it{change(old, new)}"
                anew = who == "the loss" and not self.saved
                self.told.append(Impurity(shown(place.where), _text(reads), why, anew=anew))

    def _set_elsewhere(self, known: Collection[str]) -> Iterator[Impurity]:
        """Yield what the data, the learning rate or the optimizer sets, and the loss reads."""
        methods = [code for code, own in self.asked.selves if id(own) in self.reached]
        codes = self.asked.elsewhere - self.asked.codes
        functions = functions_of(self.asked.codes)
        for name, line in names_written(codes, methods).items():
            given = {one.__code__ for one in functions if is_given(name, one)}
            reads = read_at(name, self.asked.codes - given)
            if reads is not None and _text(reads) not in known:
                why = f"read here; set at {_text(line)} as the loop goes on"
                yield Impurity(name, _text(reads), why, anew=not self._is_done_again(name))

    def _of_batches(self) -> Iterator[Impurity]:
        """Yield how micro-batches and the members of the model are others than at first."""
        pairs = [(self.leaves[0], self.leaves[-1]), *((self.later[0], row) for row in self.later)]
        unlike = [
            (at - 1, one, two)  # before them stands which ones overlap
            for first, later in pairs
            for at, (one, two) in enumerate(zip(first, later, strict=False))
            if one != two
        ]
        unread = self._unread({at for at, _, _ in unlike})
        for at, one, two in unlike:
            if at not in unread:
                why = f"{one} in the first micro-batch, then {two}: a traced step takes only those"
                yield Impurity("the batch", "data", why, batch=True)
                return
        for name in sorted(_members(self.model) ^ self.members):
            yield Impurity(
                name, f"model.{name}", "registered or removed while the loss is computed"
            )

    def _unread(self, places: Collection[int]) -> Collection[int]:
        """Return at which of these places the batch holds values that the loss does not look at."""
        leaves, spec = flatten(on_device(self.batch))
        same = [at for at in places if 0 <= at < min(len(leaves), len(self.begin))]
        same = [at for at in same if any_key(leaves[at]) == any_key(self.begin[at]) is not None]

        def attempt(left: Sequence[int]) -> Sequence[int]:
            with torch.enable_grad():
                loss_of(self.job, self.model, rebuilt(without(leaves, left), spec))
            return left

        try:
            return unread_of(same, attempt) if same else ()
        except Exception:  # noqa: BLE001 - the job's code may raise anything where it gets a stand-in
            return ()

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
        for drawn in itertools.zip_longest(*(one.generators for one in self.recorded)):
            if len(set(drawn)) > 1:  # one that is seeded anew draws the same in each
                line = next(one for one in drawn if one is not None)[0]
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
        for name in self.flow.moved():
            why = "changes as the loop goes on, and what was computed from it is kept and read"
            what = name or "weights, gradients or the batch"
            yield Impurity(f"the values of {what}", "model", why)

    def _of_values(self) -> Iterator[Impurity]:
        for k in (0, 2) if self._is_exact() else ():
            one, two = self.losses[k : k + 2]
            unlike = [what for what in one | two if one.get(what) != two.get(what)]
            if unlike:
                why = "differs when it is computed again"
                yield Impurity(unlike[0], self._behind(unlike[0]), why)
                return

    def _behind(self, what: str) -> str:
        """Return the line of what is called once this gradient is there; else it is the loss."""
        parameter = dict(self.model.named_parameters()).get(what.removeprefix(_GRADIENT))
        hooks = () if parameter is None else _compat.hooks_behind(parameter)
        code = next((hook.__code__ for hook in hooks if hasattr(hook, "__code__")), None)
        return _text(None if code is None else (code.co_filename, code.co_firstlineno))

    def _is_exact(self) -> bool:
        """Return whether equal ops on equal values give equal bits."""
        is_cpu = all(of(p.device).is_cpu for p in self.model.parameters())
        return is_cpu and not any(one.writes_weights for one in self.recorded)


def _is_same(tensor: Tensor, other: Tensor | None) -> bool:
    if other is None or tensor.shape != other.shape or tensor.layout != other.layout:
        return False
    return torch.equal(tensor.to_dense(), other.to_dense())  # of sparse ones torch compares none


def _key(leaf: object) -> str:
    """Return what a traced step would hold a leaf of the batch to."""
    if isinstance(leaf, Tensor) and leaf.layout != torch.strided:  # none takes it
        sizes = f" of {list(leaf.values().shape)}" if leaf.layout is torch.jagged else ""
        return f"{leaf.dtype} of layout {leaf.layout}{sizes}"
    if isinstance(leaf, Tensor):
        own = attributes_of(leaf).items()
        named = [f" with {n} = {value!r}" for n, value in own if isinstance(value, PLAIN)]
        return "".join([str(leaf_key(leaf)), *named])
    return str(leaf_key(leaf)) if isinstance(leaf, PLAIN) else type(leaf).__qualname__


def _attributes_of(leaves: Sequence[Any]) -> dict[tuple[int, str], str]:
    """Return in words what somebody has set on the tensors of a batch."""
    found: dict[tuple[int, str], str] = {}
    for at, leaf in enumerate(leaves):
        own: dict[str, object] = attributes_of(leaf) if isinstance(leaf, Tensor) else {}
        found |= {(at, name): repr(one) for name, one in own.items() if issubclass(type(one), _SET)}
    return found


def _members(model: nn.Module) -> set[str]:
    """Return the names of all that a checkpoint holds of a model."""
    return set(model.state_dict(keep_vars=True))


def _text(line: Line | None) -> str:
    return "the loss" if line is None else text_of(line)
