"""Loop: a training loop kept as it is; its statements make the job, and ranks run it.

    with ps.loop(model, optimizer, loader, epochs=3) as steps:
        for x, y in steps:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()

The body is read where it stands and never run there.  What it computes up to `backward` is the
loss, with the script's own lines; what follows the update is said of each step.
"""

import ast
import builtins
import copy
import inspect
import linecache
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack, cast, final
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.batches.loader import from_loader
from penstock.checkpoints.checkpoint import latest, load
from penstock.each_epoch import EachEpoch
from penstock.errors import JobError
from penstock.job import Job, Parameters
from penstock.listener import Listener, Row
from penstock.state.optimizer_state import take_state
from penstock.training.loop_body import LoopBody, Objects, Scope, body_of, loop_at
from penstock.training.options import Options
from penstock.training.train import train
from penstock.training.view import TERMINAL

if TYPE_CHECKING:
    from penstock.training.results import Trained

_OWN = (
    *("model", "loss", "data", "optimizer", "micro_batches"),
    *("num_steps", "clip_norm", "scheduler"),
)
_BY_HAND = "make the job by hand: ps.Job(model=, loss=, data=, optimizer=)"


def loop(
    model: object,
    optimizer: object,
    data: Any,
    *,
    epochs: int | None = None,
    fields: Mapping[str, Any] | None = None,
    listener: Listener | None = TERMINAL,
    **options: Unpack[Options],
) -> "LoopSteps":
    """Return the steps of a loop, to be gone through once, in a `with`.

    model:      that the loop calls; it is the trained one behind the loop.
    optimizer:  of its weights, not stepped yet; it has the trained state behind the loop.
    data:       a DataLoader, or what `ps.batches` and the like return.
    epochs:     how often it goes through the data; default: once, or `num_steps`.
    fields:     others of the Job: {"validation": ..., "average": ps.ema(0.999)}.
    listener:   of `ps.train`, and so are the options: num_steps, ranks, out, resume and more.
    Raises:     JobError: there is none for what is given.
    """
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
        kinds = f"a {type(model).__name__} and a {type(optimizer).__name__}"
        raise JobError(f"ps.loop is given {kinds}", hint="give a module and a torch optimizer")
    wrong = [name for name in fields or {} if name in _OWN]
    if wrong:
        raise JobError(f"fields has {wrong[0]}, which the loop itself says", hint="leave it out")
    if not model.training:
        hint = "call model.train() before; parts of it may stay in eval mode"
        raise JobError("the model is in eval mode, and the loop trains it", hint=hint)
    parts = frozenset(map(id, (*model.modules(), *model.parameters(), *model.buffers())))
    objects = Objects(None, model, optimizer, nn.utils.clip_grad_norm_, parts)
    return LoopSteps(objects, data, LoopAsked(epochs, fields or {}, listener, options))


class LoopAsked(NamedTuple):
    """What is asked for beside what is trained, as `loop` takes it."""

    epochs: int | None
    fields: Mapping[str, Any]
    listener: Listener | None
    options: Options


@final
class LoopSteps:
    """The steps of one loop; `trained` is what the run gave, once it is through."""

    def __init__(self, objects: Objects, data: Any, asked: LoopAsked) -> None:
        self.objects = objects._replace(steps=self)
        self.data: Any = data if callable(data) else from_loader(data)
        self.asked = asked
        self.trained: Trained | None = None
        self._is_read = False

    def __enter__(self) -> "LoopSteps":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        if kind is None and not self._is_read:
            hint = "write `for batch in steps:` in it"
            raise JobError("nothing went through the steps of ps.loop", hint=hint)

    def __iter__(self) -> Iterator[Any]:
        """Train; the body is not run here, so there is no step to give.

        Raises:   JobError: the loop cannot be read, or is not that of a job; else as `ps.train`.
        """
        if self._is_read:
            hint = "say epochs=3 to ps.loop, or make another with ps.loop"
            raise JobError("the steps of a ps.loop are gone through once", hint=hint)
        self._is_read = True
        frame = cast("FrameType", cast("FrameType", inspect.currentframe()).f_back)
        scope = Scope(frame.f_locals, frame.f_globals, vars(builtins))
        job, body = self._job(frame, scope)
        following = _Following(body, scope, frame.f_code.co_filename)
        asked = self.asked
        self.trained = train(job, on_step=following.hear, listener=asked.listener, **asked.options)
        if self.trained is not None:
            _take_state(self.objects, body, self.trained.folder)
        return iter(())

    def _job(self, frame: FrameType, scope: Scope) -> tuple[Job, LoopBody]:
        """Return the job of a loop, and what its body says."""
        tree = _tree(frame.f_code.co_filename)
        node = loop_at(tree, frame.f_lineno, self.objects.is_steps(scope))
        body = body_of(tree, node, scope, self.objects)
        copies = _OptimizerCopies(self.objects, body.scheduler, body.updates)
        module = cast("nn.Module", self.objects.model)
        job = Job(
            model=lambda: module,
            loss=_function(body, scope, frame.f_code.co_filename),
            data=self.data,
            optimizer=copies.optimizer,
            micro_batches=body.summed,
            num_steps=self._num_steps(body.summed),
            clip_norm=_clip(body, scope),
            scheduler=copies.scheduler if body.scheduler is not None else None,
            **self.asked.fields,
        )
        return job, body

    def _num_steps(self, summed: int) -> int:
        """Return the steps of the run, each of so many batches.

        Raises:   JobError: nobody says how many, or batches would be left over.
        """
        told, epochs = self.asked.options.get("num_steps"), self.asked.epochs
        if epochs is not None and told is not None:
            raise JobError("ps.loop is given epochs and num_steps", hint="leave out one of them")
        if told is not None:
            return told
        try:
            batches = len(self.data) * (1 if epochs is None else epochs)
        except TypeError:
            message = "the data of ps.loop has no length"
            raise JobError(message, hint="say num_steps=1000 to ps.loop") from None
        if left := batches % summed:
            message = f"an update follows {summed} batches; of {batches} the last {left} have none"
            steps = batches // summed
            hint = f"say num_steps={steps} to ps.loop: these are left out" if steps else "sum fewer"
            raise JobError(message, hint=hint)
        return batches // summed


def _tree(file: str) -> ast.Module:
    """Return the statements of a script.

    Raises:   JobError: its text is not there.
    """
    text = "".join(linecache.getlines(file))
    if not text:
        message = f"ps.loop reads the lines of its loop, and there are none of {file}"
        raise JobError(message, hint="write the loop into a file")
    return ast.parse(text)


def _function(body: LoopBody, scope: Scope, file: str) -> Callable[[Any, Any], Any]:
    """Return the loss of a loop: a function of its own lines, of what is around them."""
    names = ast.arguments([], [ast.arg(name) for name in body.free], None, [], [], None, [])
    given = ast.Return(ast.Name(body.loss.name, ast.Load()))
    around = ast.FunctionDef("around", names, [body.loss, given], [])
    ast.copy_location(around, body.loss)
    module = ast.fix_missing_locations(ast.Module([around], []))
    made: dict[str, Any] = {}
    exec(compile(module, file, "exec", dont_inherit=True), cast("Any", scope.globals), made)
    return made["around"](*(scope.locals[name] for name in body.free))


def _clip(body: LoopBody, scope: Scope) -> float | None:
    if body.clip is None:
        return None
    code = compile(ast.fix_missing_locations(ast.Expression(body.clip)), "clip_norm", "eval")
    return float(eval(code, {**scope.globals, **scope.locals}))


@final
class _Following:
    """What is said of each step, by the statements behind the update.

    In a module they set its names; in a function they have names of their own.
    """

    def __init__(self, body: LoopBody, scope: Scope, file: str) -> None:
        self.body = body
        module = ast.fix_missing_locations(ast.Module(list(body.after), []))
        self.code = compile(module, file, "exec", dont_inherit=True)
        own = cast("dict[str, Any]", scope.globals)
        self.names = own if scope.is_module else {**scope.globals, **scope.locals}

    def hear(self, row: Row) -> None:
        if self.body.of_loss:
            self.names[self.body.of_loss] = torch.tensor(row["loss"], dtype=torch.float64)
        for name in self.body.figures:
            is_number = name in self.body.numbers
            value = torch.tensor(row[name], dtype=torch.float64)
            self.names[name] = value.item() if is_number else value
        if self.body.counts is not None:
            name, first = self.body.counts
            self.names[name] = first + self.body.summed * int(row["step"] or 0) - 1
        exec(self.code, self.names)


@final
class _OptimizerCopies:
    """Optimizers and schedulers like those of the script, of the parameters that are given.

    Raises:   JobError: they have begun, or hold what a copy would not have.
    """

    def __init__(self, objects: Objects, scheduler: object | None, updates: int) -> None:
        self._optimizer = cast("Optimizer", objects.optimizer)
        self._scheduler, self._model = cast("Any", scheduler), cast("nn.Module", objects.model)
        self._updates = updates
        self._made: WeakKeyDictionary[Optimizer, None] = WeakKeyDictionary()
        self._check()

    def _check(self) -> None:
        own = {id(parameter) for parameter in self._model.parameters()}
        kind = type(self._optimizer).__name__
        groups = self._optimizer.param_groups
        if any(id(p) not in own for group in groups for p in group["params"]):
            message = f"the {kind} has weights that the model of ps.loop has not"
            raise JobError(message, hint="put all that is trained into one module")
        if self._optimizer.state or getattr(self._scheduler, "last_epoch", 0) > 0:
            raise JobError(f"the {kind} has made steps already", hint="make it anew before ps.loop")
        kept = vars(copy.deepcopy(self._optimizer))
        plain = vars(Optimizer([torch.empty(0)], {}))  # what all have is made anew
        lost = sorted(vars(self._optimizer).keys() - kept.keys() - plain.keys() - {"step"})
        hooks = [name for name, held in vars(self._optimizer).items() if "_hooks" in name and held]
        if lost or hooks:
            message = f"the {kind} holds {[*lost, *hooks][0]}, which no copy of it would have"
            raise JobError(message, hint=_BY_HAND)

    def optimizer(self, weights: Parameters) -> Optimizer:
        """Return the script's optimizer of these weights, at the rates that it was made with."""
        given = dict(weights.named())
        memo = {id(p): given[name] for name, p in self._model.named_parameters() if name in given}
        made = copy.deepcopy(self._optimizer, cast("Any", memo))
        for group in made.param_groups:
            group["lr"] = group.pop("initial_lr", group["lr"])
        return made

    def scheduler(self, optimizer: Optimizer) -> Any:
        """Return the script's scheduler of an optimizer, whose rates it sets as it did there."""
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)  # the optimizer counts for it
        made = copy.deepcopy(self._scheduler, cast("Any", {id(self._optimizer): optimizer}))
        for group, own in zip(optimizer.param_groups, self._optimizer.param_groups, strict=True):
            group["lr"] = own["lr"]
        return made if self._updates == 1 else EachEpoch(made, self._updates)


def _take_state(objects: Objects, body: LoopBody, folder: Path) -> None:
    """Let the script's optimizer and scheduler stand where a loop would have left them."""
    newest = latest(folder / "checkpoints")
    if newest is None:
        return
    kept, optimizer = load(newest), cast("Optimizer", objects.optimizer)
    model = cast("nn.Module", objects.model)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    take_state(optimizer, named, kept.tensors, kept.plain)
    with warnings.catch_warnings():  # it is not this optimizer that was stepped
        warnings.simplefilter("ignore")
        for _ in range(kept.step // body.updates if body.scheduler is not None else 0):
            cast("Any", body.scheduler).step()
