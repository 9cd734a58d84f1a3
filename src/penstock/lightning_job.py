"""Lightning job: a job of a LightningModule, its loaders and the options of its Trainer.

The module stays as it is.  What its steps log are figures beside the loss; hooks of the Trainer's
loop, which there is none of here, are refused by name where the module has some.
"""

import copy
import difflib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, cast
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.batches.loader import from_loader
from penstock.each_epoch import EachEpoch
from penstock.errors import JobError, PenstockError
from penstock.graph.functional import where
from penstock.job import Job, Parameters

_TAKEN = {
    "max_steps", "max_epochs", "accumulate_grad_batches", "gradient_clip_val", "precision",
    "gradient_clip_algorithm", "val_check_interval", "check_val_every_n_epoch", "callbacks",
    "strategy",
}  # fmt: skip
_OF_RUNS = {
    "accelerator", "devices", "num_nodes", "logger", "log_every_n_steps", "enable_checkpointing",
    "enable_progress_bar", "enable_model_summary", "default_root_dir", "deterministic", "benchmark",
    "inference_mode", "use_distributed_sampler", "profiler", "num_sanity_val_steps", "barebones",
    "enable_autolog_hparams", "model_registry",
}  # fmt: skip
_REFUSED = {
    "fast_dev_run": "leave it out: ps.train(job, num_steps=1)",
    "max_time": "leave it out: give max_steps",
    "min_epochs": "leave it out: patience counts validations",
    "min_steps": "leave it out: patience counts validations",
    "limit_train_batches": "leave it out: give a loader of a Subset",
    "limit_val_batches": "leave it out: give validation= a loader of a Subset",
    "limit_test_batches": "leave it out: only training and validation are taken over",
    "limit_predict_batches": "leave it out: only training and validation are taken over",
    "overfit_batches": "leave it out: give a loader of a Subset",
    "detect_anomaly": "leave it out: call torch.autograd.set_detect_anomaly(True) in the script",
    "plugins": "leave it out: a plan divides the model",
    "sync_batchnorm": "leave it out: statistics are those of whole batches, as Job.buffers says",
    "reload_dataloaders_every_n_epochs": "leave it out: one loader serves all epochs",
}
_STRATEGIES = ("auto", "ddp", "ddp_find_unused_parameters_true")
_PRECISIONS = {"32-true": None, "32": None, "bf16-mixed": "bfloat16", "bf16": "bfloat16"}
_CALLBACKS = {
    "ModelCheckpoint", "EarlyStopping", "LearningRateMonitor", "ModelSummary", "RichModelSummary",
    "ProgressBar", "TQDMProgressBar", "RichProgressBar", "DeviceStatsMonitor", "Timer",
    "ThroughputMonitor",
}  # fmt: skip
_INSTEAD = {
    "StochasticWeightAveraging": "replace(job, average=ps.swa(start=1000)) averages weights",
    "WeightAveraging": "replace(job, average=ps.swa(start=1000)) averages weights",
    "EMAWeightAveraging": "replace(job, average=ps.ema(0.999)) averages weights",
    "GradientAccumulationScheduler": "give accumulate_grad_batches a number",
    "BackboneFinetuning": "freeze by requires_grad; a hook of the optimizer may thaw on the way",
    "LambdaCallback": "ps.train(job, on_step=..., on_validation=..., on_checkpoint=...)",
}
_HOOKS = (
    "backward", "configure_callbacks", "configure_gradient_clipping", "configure_model",
    "configure_sharded_model", "lr_scheduler_step", "manual_backward", "on_after_backward",
    "on_after_batch_transfer", "on_before_backward", "on_before_batch_transfer",
    "on_before_optimizer_step", "on_before_zero_grad", "on_fit_start", "on_load_checkpoint",
    "on_save_checkpoint", "on_train_batch_end", "on_train_batch_start", "on_train_epoch_end",
    "on_train_epoch_start", "on_train_start", "on_validation_batch_end",
    "on_validation_batch_start", "on_validation_end", "on_validation_epoch_end",
    "on_validation_epoch_start", "on_validation_start", "optimizer_step", "optimizer_zero_grad",
    "setup", "training_step_end", "transfer_batch_to_device", "validation_step_end",
)  # fmt: skip
_BY_HAND = "make the job by hand: ps.Job(model=, loss=, data=, optimizer=)"
_LEAVE = "leave it out, or say it to ps.train"


def from_lightning(
    module: nn.Module,
    loader: Any = None,
    options: Mapping[str, Any] | None = None,
    *,
    validation: Any = None,
) -> Job:
    """Return the job that Lightning's Trainer would train of this module with these options.

    module:      a LightningModule of one optimizer, which is stepped automatically; the job trains
                 copies of it.
    loader:      a torch DataLoader; None: module.train_dataloader().
    options:     keywords of Trainer: {"max_epochs": 3, "gradient_clip_val": 1.0}.
    validation:  a loader; None: module.val_dataloader(), where it has one.

    A step's loss is what training_step returns, that of a validation the val_loss that
    validation_step logs, or what it returns; what they log beside it are figures.  The order of
    samples is that of `ps.from_loader`; dropout draws other numbers.
    Raises:   JobError: what is given is no LightningModule; an option, a callback or a hook that
              there is not, or that has no counterpart; epochs that do not end with a whole step.
    """
    base = _base_of(module)
    told = _options(options or {})
    _check_hooks(module, base)
    loader = _loader(module, base, loader, "train_dataloader")
    held: Any = _loader(module, base, validation, "val_dataloader")
    sizes = _sizes(told, loader)
    following = _Configured(module, sizes)
    validates = held is not None and _has(module, base, "validation_step")
    best, patience = _judged(told["callbacks"], validates)
    return Job(
        model=lambda: copy.deepcopy(module),
        loss=_loss,
        data=from_loader(loader, last="short" if sizes.micro_batches == 1 else None),
        optimizer=following.optimizer,
        micro_batches=sizes.micro_batches,
        num_steps=sizes.num_steps,
        clip_norm=told["gradient_clip_val"] or None,
        scheduler=following.scheduler if following.has_scheduler else None,
        autocast=cast("Any", _PRECISIONS[told["precision"]]),
        validation=partial(_as_it_is, held) if validates else None,
        validate_every=_every(told, sizes, loader) if validates else None,
        best=best,
        patience=patience,
    )


def _as_it_is(loader: Any) -> Any:
    return loader


def _base_of(module: object) -> type:
    """Return Lightning's own class, of which a module is.

    Raises:   JobError: it is of none, or steps its optimizers itself.
    """
    bases = [kind for kind in type(module).__mro__ if kind.__name__ == "LightningModule"]
    if not bases:
        message = f"ps.from_lightning is given the {type(module).__name__}, no LightningModule"
        raise JobError(message, hint=_BY_HAND)
    if not getattr(module, "automatic_optimization", True):
        message = f"{type(module).__name__} sets automatic_optimization=False: it steps itself"
        raise JobError(message, hint="make a job of its losses: ps.Job(loss=ps.in_turn(...))")
    return bases[-1]


def _has(module: nn.Module, base: type, name: str) -> bool:
    """Return whether a module has a method of its own in place of Lightning's."""
    return getattr(type(module), name, None) is not getattr(base, name, None)


def _check_hooks(module: nn.Module, base: type) -> None:
    found = [name for name in _HOOKS if _has(module, base, name)]
    if found:
        message = f"{type(module).__name__}.{found[0]} is a hook of Lightning's loop"
        more = f"; so are {', '.join(found[1:])}" if found[1:] else ""
        hint = "call it before the job is made" if found[0] == "setup" else _BY_HAND
        raise JobError(message + more, hint=hint)
    if not _has(module, base, "training_step"):
        raise JobError(f"{type(module).__name__} has no training_step", hint=_BY_HAND)


def _loader(module: nn.Module, base: type, given: Any, name: str) -> Any:
    if given is not None or not _has(module, base, name):
        if given is None and name == "train_dataloader":
            message = "ps.from_lightning is given no loader, and the module has none"
            raise JobError(message, hint="give one: ps.from_lightning(module, DataLoader(...))")
        return given
    return getattr(module, name)()


# -- options ---------------------------------------------------------------------------------------


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are taken, by name.

    Raises:   JobError: one is not known, or has no counterpart.
    """
    for name, value in given.items():
        if name not in {*_TAKEN, *_OF_RUNS, *_REFUSED}:
            near = difflib.get_close_matches(name, [*_TAKEN, *_REFUSED], n=1)
            hint = f"did you mean {near[0]}?" if near else "see lightning.pytorch.Trainer"
            raise JobError(f"Trainer has no {name}", hint=hint)
        if name in _REFUSED and value:
            message = f"Trainer's {name} is {value!r:.60}, which has no counterpart here"
            raise JobError(message, hint=_REFUSED[name])
    told = {name: given.get(name) for name in _TAKEN}
    told["precision"] = str(given.get("precision") or "32-true")
    told["callbacks"] = _callbacks(given.get("callbacks"))
    if told["precision"] not in _PRECISIONS:
        hint = 'give "bf16-mixed", or replace(job, precision="bfloat16") or "float16"'
        _refuse("precision", told["precision"], hint)
    if (told["strategy"] or "auto") not in _STRATEGIES:
        _refuse("strategy", told["strategy"], "leave it out: a plan divides weights and state")
    if told["gradient_clip_val"] and (told["gradient_clip_algorithm"] or "norm") != "norm":
        hint = "a hook of the optimizer clips by value: register_step_pre_hook"
        _refuse("gradient_clip_algorithm", told["gradient_clip_algorithm"], hint)
    accumulated = told["accumulate_grad_batches"]
    if not isinstance(accumulated, int | None):
        _refuse("accumulate_grad_batches", accumulated, "give a number")
    return told


def _refuse(name: str, value: object, hint: str) -> NoReturn:
    raise JobError(f"Trainer's {name} is {value!r:.60}, which is not taken over", hint=hint)


def _callbacks(given: Any) -> list[Any]:
    """Return the callbacks.

    Raises:   JobError: one does what has no counterpart.
    """
    several = isinstance(given, list | tuple)
    rows: list[Any] = [*cast("Sequence[Any]", given)] if several else [given] if given else []
    for row in rows:
        name = type(row).__name__
        if name not in _CALLBACKS:
            message = f"the callback {name} is told of steps by Lightning's loop"
            raise JobError(message, hint=_INSTEAD.get(name, _LEAVE))
    return rows


def _judged(callbacks: Sequence[Any], validates: bool) -> tuple[str, int | None]:
    """Return which validation is the best, and the patience.

    Raises:   JobError: callbacks look at two figures, or at one of training.
    """
    looking = [row for row in callbacks if getattr(row, "monitor", None)]
    best = sorted({_best_of(row) for row in looking})
    if not best:
        return "lowest val_loss", None
    if len(best) > 1 or not validates:
        why = "two figures" if len(best) > 1 else "a figure of a validation, and there is none"
        message = f"callbacks look at {why}: {', '.join(best)}"
        raise JobError(message, hint="keep one of them, and give validation=")
    stopping = [row for row in looking if type(row).__name__ == "EarlyStopping"]
    return best[0], min((int(row.patience) for row in stopping), default=None)


def _best_of(callback: Any) -> str:
    way = "highest" if getattr(callback, "mode", "min") == "max" else "lowest"
    return f"{way} val_{_figure(callback.monitor)}"


@dataclass(frozen=True, slots=True)
class _RunSizes:
    """What options and loader say of a run.

    per_epoch:  steps of an epoch; 0: nobody knows.
    """

    micro_batches: int
    num_steps: int
    per_epoch: int
    max_epochs: int | None


def _sizes(told: Mapping[str, Any], loader: Any) -> _RunSizes:
    """Return the micro-batches of a step, and the steps.

    Raises:   JobError: nobody knows how many, or an epoch ends within a step.
    """
    count = told["accumulate_grad_batches"] or 1
    steps, epochs = told["max_steps"] or -1, told["max_epochs"]
    try:
        batches = len(loader)
    except TypeError:
        batches = 0
    if steps < 0 and (not epochs or epochs < 0 or not batches):
        why = "max_epochs is set, and the loader has no length" if epochs else "no end is set"
        raise JobError(f"nobody knows how many steps: {why}", hint="set max_steps")
    per_epoch, rest = divmod(batches, count)
    whole = epochs * per_epoch if epochs and epochs > 0 and batches else math.inf
    num_steps = int(min(whole, steps if steps >= 0 else math.inf))
    if (rest and num_steps > per_epoch) or not num_steps:
        message = f"the last step of an epoch has {rest} batches, the others {count}"
        raise JobError(message, hint=f"drop the last {rest}, or accumulate another number")
    return _RunSizes(count, num_steps, per_epoch, epochs)


def _every(told: Mapping[str, Any], sizes: _RunSizes, loader: Any) -> int:
    """Return the steps from one validation to the next.

    Raises:   JobError: they are not a whole number.
    """
    epochs, interval = told["check_val_every_n_epoch"], told["val_check_interval"]
    epochs = 1 if epochs is None and not isinstance(interval, int) else epochs
    if interval is None or (interval == 1.0 and isinstance(interval, float)):
        return max(1, sizes.per_epoch * (epochs or 1))
    batches = interval if isinstance(interval, int) else interval * len(loader)
    steps = batches / sizes.micro_batches
    if steps < 1 or steps != int(steps):
        hint = "give a whole number of batches, a multiple of accumulate_grad_batches"
        _refuse("val_check_interval", interval, hint)
    return int(steps)


# -- the loss --------------------------------------------------------------------------------------


class BatchNumber:
    """The batch_idx of a step, which nobody knows here: a step is a function of its batch."""

    def _asked(self, *_: object) -> NoReturn:
        message = "a step of the LightningModule reads batch_idx, and a loss has only its batch"
        raise JobError(message, hint="put the number into the batches, as one of their fields")

    __add__ = __radd__ = __sub__ = __mul__ = __mod__ = __floordiv__ = __truediv__ = _asked
    __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __int__ = __index__ = __float__ = _asked
    __eq__ = __ne__ = __str__ = __format__ = _asked  # pyright: ignore[reportAssignmentType]
    __hash__ = object.__hash__


def _loss(model: nn.Module, batch: Any) -> Any:
    """Return the loss of a micro-batch, and what the module logs beside it."""
    logged: dict[str, Any] = {}
    step: Any = model
    held = vars(model)
    held["log"], held["log_dict"] = partial(_log, logged), partial(_log_dict, logged)
    try:
        if model.training:
            return _with_figures(_called(step.training_step, batch), logged, "train_loss")
        return _with_figures(_called(step.validation_step, batch), logged, "val_loss")
    finally:
        del held["log"], held["log_dict"]


def _called(step: Callable[..., Any], batch: Any) -> Any:
    takes = len(inspect.signature(step).parameters)
    return step(batch) if takes == 1 else step(batch, BatchNumber())


def _log(logged: dict[str, Any], name: str, value: Any, *_: Any, **__: Any) -> None:
    logged[name] = value


def _log_dict(logged: dict[str, Any], values: Mapping[str, Any], *_: Any, **__: Any) -> None:
    logged |= values


def _with_figures(returned: Any, logged: Mapping[str, Any], own: str) -> Any:
    """Return a loss and the figures beside it, of what a step has returned and logged.

    own:      the name by which a step may log the loss itself.
    Raises:   JobError: there is no loss.
    """
    loss: Any = cast("Any", returned).get("loss") if isinstance(returned, Mapping) else returned
    if own == "val_loss":
        loss = logged.get(own, loss)
    if not isinstance(loss, Tensor):
        message = f"a step of the LightningModule returns {returned!r:.60}, and no loss"
        raise JobError(message, hint=f'return it, or self.log("{own}", loss)')
    figures = {
        _figure(name): value.detach() if isinstance(value, Tensor) else value
        for name, value in logged.items()
        if name not in (own, "loss") and isinstance(value, Tensor | int | float)
    }
    return (loss, figures) if figures else loss


def _figure(name: str) -> str:
    """Return the name of a figure, before which rows put "val_" where it is of a validation."""
    return name.removeprefix("val_").removeprefix("train_")


# -- optimizer and scheduler -----------------------------------------------------------------------


class TrainerFacts:
    """What configure_optimizers may ask of a Trainer."""

    def __init__(self, sizes: _RunSizes) -> None:
        self.estimated_stepping_batches = self.max_steps = sizes.num_steps
        self.max_epochs = sizes.max_epochs

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        message = f"configure_optimizers asks the Trainer for {name}, and there is none"
        raise JobError(message, hint="give the module that number itself")


class _Configured:
    """What configure_optimizers returns, made of the parameters that it is to be made of."""

    def __init__(self, module: nn.Module, sizes: _RunSizes) -> None:
        self.module, self.sizes = module, sizes
        self._schedulers: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()
        _, scheduler = self._made(module)
        self.has_scheduler = scheduler is not None

    def optimizer(self, weights: Parameters) -> Optimizer:
        """Return the module's optimizer of these weights."""
        given = dict(weights.named())
        memo = {id(p): given[name] for name, p in self.module.named_parameters()}
        made, scheduler = self._made(copy.deepcopy(self.module, cast("Any", memo)))
        self._schedulers[made] = scheduler
        return made

    def scheduler(self, optimizer: Optimizer) -> Any:
        """Return the scheduler that was made with an optimizer."""
        return self._schedulers[optimizer]

    def _made(self, module: nn.Module) -> tuple[Optimizer, Any]:
        """Return optimizer and scheduler, if there is one.

        Raises:   JobError: it fails, or there are several.
        """
        own: Any = module
        own.trainer = TrainerFacts(self.sizes)
        try:
            return self._of(own.configure_optimizers())
        except PenstockError:
            raise
        except Exception as problem:  # whatever the module's code raises
            raise JobError(where(problem, "configure_optimizers fails"), hint=_BY_HAND) from problem
        finally:
            own.trainer = None

    def _of(self, returned: Any) -> tuple[Optimizer, Any]:
        optimizer: Any = returned
        schedulers: list[Any] = []
        if isinstance(returned, Mapping):
            named = cast("Mapping[str, Any]", returned)
            optimizer = named.get("optimizer")
            schedulers = [named["lr_scheduler"]] if named.get("lr_scheduler") else []
        elif isinstance(returned, list | tuple):
            parts = cast("Sequence[Any]", returned)
            nested = len(parts) == 2 and isinstance(parts[0], list | tuple)
            rows = cast("Any", parts[0] if nested else parts)
            optimizers = [*cast("Sequence[Any]", rows)]
            schedulers = list(parts[1]) if nested else []
            optimizer = optimizers[0] if len(optimizers) == 1 else None
        if not isinstance(optimizer, Optimizer) or len(schedulers) > 1:
            message = f"configure_optimizers returns {returned!r:.60}: not one optimizer"
            raise JobError(message, hint="ps.by_name makes one of several, in a job made by hand")
        return optimizer, self._stepped(schedulers[0]) if schedulers else None

    def _stepped(self, row: Any) -> Any:
        """Return a scheduler that is stepped after each update, as its row says."""
        given = {"scheduler": row}
        if isinstance(row, Mapping):
            given = dict(cast("Mapping[str, Any]", row))
        updates = int(given.get("frequency", 1))
        if given.get("interval", "epoch") == "epoch":
            if not self.sizes.per_epoch:
                message = "the scheduler is stepped each epoch, and the loader has no length"
                raise JobError(message, hint='say interval="step" in configure_optimizers')
            updates *= self.sizes.per_epoch
        scheduler = given["scheduler"]
        return scheduler if updates == 1 or given.get("monitor") else EachEpoch(scheduler, updates)
