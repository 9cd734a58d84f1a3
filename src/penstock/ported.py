"""Ported: a job from what people have for the Trainer of Hugging Face transformers.

Options are taken one by one.  What says where to write, what to show or how to start is said to
`ps.train` instead; what would train something else and has no counterpart is refused by name.
"""

import copy
import difflib
import importlib
import importlib.util
import inspect
import math
from collections.abc import Callable, Mapping, Sized
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from penstock.batches.loader import batches
from penstock.errors import JobError
from penstock.job import Job, Parameters

_TAKEN = {
    "per_device_train_batch_size", "num_train_epochs", "max_steps", "learning_rate",
    "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim", "weight_decay",
    "adam_beta1", "adam_beta2", "adam_epsilon", "gradient_accumulation_steps", "max_grad_norm",
    "bf16", "eval_strategy", "eval_steps", "per_device_eval_batch_size", "seed", "data_seed",
    "dataloader_drop_last", "dataloader_num_workers", "remove_unused_columns",
    "train_sampling_strategy",
}  # fmt: skip
_OF_RUNS = (
    "output_dir",
    "log",
    "disable_tqdm",
    "report_to",
    "run_name",
    "project",
    "trackio",
    "save_",
    "hub_",
    "push_to_hub",
    "dataloader_pin",
    "dataloader_persistent",
    "dataloader_prefetch",
    "dataloader_multiprocessing",
    "dataloader_in_order",
    "ddp_",
    "local_rank",
    "use_cpu",
    "do_",
    "skip_memory",
    "resume_from",
    "restore_callback",
    "torch_empty_cache",
    "eval_accumulation",
    "eval_do_concat",
    "eval_use_gather",
    "prediction_loss_only",
    "include_",
    "batch_eval",
    "debug",
    "enable_jit",
    "ignore_data_skip",
    "accelerator_config",
    "fsdp_config",
    "average_tokens",
    "length_column",
    "use_cache",
    "full_determinism",
    "tf32",
)  # fmt: skip - how their names begin
_REFUSED = {
    "fp16": 'set bf16, or replace(job, precision="float16")',
    "gradient_checkpointing": "leave it out: a plan repeats forward where memory asks for it",
    "activation_checkpointing": "leave it out: a plan repeats forward where memory asks for it",
    "torch_compile": "leave it out: a plan compiles where that pays",
    "deepspeed": "leave it out: a plan divides weights and state",
    "fsdp": "leave it out: a plan divides weights and state",
    "parallelism_config": "leave it out: a plan divides the model",
    "label_smoothing_factor": "make the job by hand, with a loss that smooths: ps.Job(loss=...)",
    "optim_args": "make the job by hand: ps.Job(optimizer=...)",
    "load_best_model_at_end": "leave it out: checkpoints/best is the best, by Job.best",
    "metric_for_best_model": 'leave it out: replace(job, metrics=..., best="highest val_accuracy")',
    "greater_is_better": 'leave it out: replace(job, best="highest val_accuracy")',
    "auto_find_batch_size": "leave it out: give a batch size, or until_loss, which finds one",
}
_HINT = "leave it out, or make the job by hand: ps.Job(model=, loss=, data=, optimizer=)"


class _StepSizes(NamedTuple):
    """What the options and the dataset say of steps.

    per_epoch:  steps of an epoch; 0: nobody knows.
    """

    micro_batches: int
    num_steps: int
    per_epoch: int


def from_transformers(
    model: "nn.Module",
    dataset: Any,
    arguments: object = None,
    *,
    collate: Callable[[list[Any]], Any] | None = None,
    validation: Any = None,
) -> Job:
    """Return the job that transformers' Trainer would train with these arguments.

    model:       whose forward returns what has a loss; the job trains copies of it.
    dataset:     of samples by name, as Trainer takes it.
    arguments:   TrainingArguments, or a dict of some of its options.
    collate:     Trainer's data_collator; None: transformers' default.
    validation:  Trainer's eval_dataset.

    As Trainer does, it counts micro-batches by their labels where the model's loss can, decays no
    bias and no norm, and keeps of a sample what forward takes.  The order of samples is that of
    `ps.batches`; dropout draws other numbers.
    Raises:   JobError: transformers is not installed; an option that there is not, or that has no
              counterpart; an epoch that does not end with a whole step.
    """
    told = _options(arguments)
    sizes = _sizes(told, dataset)
    read = partial(_collated, _names(model, told), collate or _library().default_data_collator)
    data = batches(
        dataset,
        told["per_device_train_batch_size"],
        shuffle=told["train_sampling_strategy"] == "random" and isinstance(dataset, Sized),
        seed=told["seed"] if told["data_seed"] is None else told["data_seed"],
        workers=told["dataloader_num_workers"],
        collate=read,
    )
    clip, evaluates = told["max_grad_norm"], _evaluates(told, validation)
    return Job(
        model=lambda: copy.deepcopy(model),
        loss=_loss,
        data=data,
        optimizer=partial(_optimizer, told, frozenset(_decayed(model))),
        micro_batches=sizes.micro_batches,
        num_steps=sizes.num_steps,
        clip_norm=clip or None,
        scheduler=partial(_scheduler, told, sizes.num_steps),
        weight=_weight_of(model, next(data(0)), sizes),
        autocast="bfloat16" if told["bf16"] else None,
        seed=told["seed"],
        validation=partial(_held, validation, told, read) if evaluates else None,
        validate_every=_every(told, sizes) if evaluates else None,
    )


def _library() -> Any:
    """Return transformers.

    Raises:   JobError: it is not installed.
    """
    if importlib.util.find_spec("transformers") is None:
        hint = 'install it: pip install "penstock[transformers]"'
        raise JobError("ps.from_transformers needs transformers, which is not installed", hint=hint)
    return importlib.import_module("transformers")


# -- options ---------------------------------------------------------------------------------------


def _options(arguments: object) -> dict[str, Any]:
    """Return the options that are taken, by name.

    Raises:   JobError: one is not known, or has no counterpart.
    """
    kind = _library().TrainingArguments
    defaults = {each.name: each.default for each in fields(kind)}
    if isinstance(arguments, Mapping):
        given = dict(cast("Mapping[str, Any]", arguments))
    elif arguments is None or isinstance(arguments, kind):
        given = {name: getattr(arguments, name) for name in defaults if arguments is not None}
    else:
        message = f"the arguments are a {type(arguments).__name__}"
        raise JobError(message, hint="give TrainingArguments, or a dict of its options")
    for name, value in given.items():
        _check(name, value, defaults)
    plain = {name: getattr(value, "value", value) for name, value in given.items()}  # of an enum
    told = {name: plain.get(name, defaults[name]) for name in _TAKEN}
    if told["optim"] not in _OPTIMIZERS:
        message = f"TrainingArguments.optim is {told['optim']!r}, which is not taken over"
        listed = ", ".join(_OPTIMIZERS)
        raise JobError(message, hint=f"there are {listed}; or make the job by hand")
    return told


def _check(name: str, value: object, defaults: Mapping[str, object]) -> None:
    if name not in defaults:
        near = difflib.get_close_matches(name, defaults, n=1)
        hint = f"did you mean {near[0]}?" if near else "see transformers.TrainingArguments"
        raise JobError(f"TrainingArguments has no {name}", hint=hint)
    is_default = value == defaults[name] or (not value and not defaults[name])
    if not is_default and name not in _TAKEN and not name.startswith(_OF_RUNS):
        message = f"TrainingArguments.{name} is {value!r}, which has no counterpart here"
        raise JobError(message, hint=_REFUSED.get(name, _HINT))


def _sizes(told: Mapping[str, Any], dataset: Any) -> _StepSizes:
    """Return the micro-batches of a step and the steps.

    Raises:   JobError: nobody knows how many, or a step would have fewer micro-batches or samples.
    """
    size, count = told["per_device_train_batch_size"], told["gradient_accumulation_steps"]
    if not isinstance(dataset, Sized):
        if told["max_steps"] <= 0:
            hint = "set max_steps"
            raise JobError("the dataset has no length, and max_steps is not set", hint=hint)
        return _StepSizes(count, told["max_steps"], 0)
    whole, rest = divmod(len(dataset), size)
    per_epoch = whole // count
    steps = told["max_steps"]
    if steps <= 0:
        steps = math.ceil(told["num_train_epochs"] * max(per_epoch, 1))
    if steps > per_epoch and rest and not told["dataloader_drop_last"]:
        message = f"the last micro-batch of an epoch has {rest} samples, the others {size}"
        raise JobError(message, hint="set dataloader_drop_last=True")
    if steps > per_epoch and whole % count:
        message = (
            f"the last step of an epoch has {whole % count} micro-batches, the others {count}: "
            f"{whole} in all"
        )
        raise JobError(message, hint=f"leave out {whole % count * size} samples")
    return _StepSizes(count, steps, per_epoch)


def _evaluates(told: Mapping[str, Any], validation: Any) -> bool:
    """Return whether there are validations.

    Raises:   JobError: they are asked for, and there are no samples for them.
    """
    if told["eval_strategy"] == "no":
        return False
    if validation is None:
        message = f"eval_strategy is {told['eval_strategy']!r}, and there is nothing to validate"
        raise JobError(message, hint="give Trainer's eval_dataset as validation=")
    return True


def _every(told: Mapping[str, Any], sizes: _StepSizes) -> int:
    """Return the steps from one validation to the next.

    Raises:   JobError: they are not a whole number, or an epoch has no end.
    """
    steps = sizes.per_epoch if told["eval_strategy"] == "epoch" else told["eval_steps"]
    if not steps or steps != int(steps):
        message = f"eval_strategy is {told['eval_strategy']!r}, and that is each {steps} steps"
        raise JobError(message, hint='set eval_strategy="steps" and eval_steps to a whole number')
    return int(steps)


# -- what a job is made of -------------------------------------------------------------------------


def _names(model: nn.Module, told: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of what is kept of a sample; none: all of it."""
    if not told["remove_unused_columns"]:
        return frozenset()
    return frozenset(inspect.signature(model.forward).parameters) | {"label", "label_ids", "labels"}


def _collated(names: frozenset[str], collate: Callable[[list[Any]], Any], rows: list[Any]) -> Any:
    if names and rows and isinstance(rows[0], Mapping):
        rows = [{name: row[name] for name in row if name in names} for row in rows]
    return collate(rows)


def _loss(model: nn.Module, batch: Any) -> Any:
    return model(**batch).loss


def _weight_of(model: nn.Module, batch: Any, sizes: _StepSizes) -> Callable[[Any], Any] | None:
    """Return the weight of micro-batches: their labels, if the model's loss can be a step's."""
    labels: Any = cast("Any", batch).get("labels") if isinstance(batch, Mapping) else None
    told: Any = getattr(model, "accepts_loss_kwargs", None)
    if told is None:
        known = inspect.signature(model.forward).parameters.values()
        told = any(each.kind == each.VAR_KEYWORD for each in known)
    is_alike = sizes.micro_batches == 1 or labels is None or labels.dim() < 2
    if is_alike or not told:
        return None
    config: Any = getattr(model, "config", None)
    is_causal = getattr(model, "loss_type", None) == "ForCausalLM"
    return _next_labels if is_causal and not getattr(config, "is_encoder_decoder", 0) else _labels


def _labels(batch: Any) -> Any:
    return (batch["labels"] != -100).sum()


def _next_labels(batch: Any) -> Any:
    return (batch["labels"][..., 1:] != -100).sum()


def _decayed(model: nn.Module) -> list[str]:
    """Return the names of the parameters that decay, as Trainer has it."""
    found: Any = importlib.import_module("transformers.trainer_pt_utils").get_parameter_names
    without = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
    return found(model, [nn.LayerNorm], without)


def _optimizer(told: Mapping[str, Any], decayed: frozenset[str], weights: Parameters) -> Any:
    """Return Trainer's optimizer, of those in `_OPTIMIZERS`."""
    named = [(name, p) for name, p in weights.named() if p.requires_grad]
    rows = (
        ([p for n, p in named if n in decayed], told["weight_decay"]),
        ([p for n, p in named if n not in decayed], 0.0),
    )
    groups = [{"params": params, "weight_decay": decay} for params, decay in rows if params]
    kind, more = _OPTIMIZERS[told["optim"]], dict[str, Any]()
    if told["optim"].startswith("adamw"):
        more = {"betas": (told["adam_beta1"], told["adam_beta2"]), "eps": told["adam_epsilon"]}
        more["fused"] = told["optim"] == "adamw_torch_fused"
    return kind(groups, lr=told["learning_rate"], **more)


_OPTIMIZERS: Mapping[str, Any] = {
    "adamw_torch": torch.optim.AdamW,
    "adamw_torch_fused": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}


def _scheduler(told: Mapping[str, Any], num_steps: int, optimizer: Any) -> Any:
    warm = told["warmup_steps"]
    return _library().get_scheduler(
        told["lr_scheduler_type"],
        optimizer=optimizer,
        num_warmup_steps=int(warm) if warm >= 1 else math.ceil(num_steps * warm),
        num_training_steps=num_steps,
        scheduler_specific_kwargs=told["lr_scheduler_kwargs"],
    )


def _held(dataset: Any, told: Mapping[str, Any], read: Callable[[list[Any]], Any]) -> list[Any]:
    """Return the micro-batches of a validation, the last one as short as it is."""
    size = told["per_device_eval_batch_size"]
    starts = range(0, len(dataset), size)
    return [read([dataset[k] for k in range(at, min(at + size, len(dataset)))]) for at in starts]
