"""Job: what to train, as five functions and a few numbers; and how text becomes a job.

A job knows nothing of ranks, stages or schedules.  A step's gradient is the mean over its
micro-batches; micro-batch i of step s is number s * micro_batches + i of `data`.
"""

import difflib
import importlib
import importlib.machinery
import importlib.util
import inspect
import math
import sys
import sysconfig
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, get_args

from penstock.averages import Average
from penstock.best import LOWEST, Sets, check_best, check_names, sets_of
from penstock.bits import AS_IT_IS, WIRE_BITS, is_wire_bits
from penstock.errors import JobError, PenstockError
from penstock.in_turn import LossTurns, turned
from penstock.keyed import check_keyed, keyed
from penstock.script import as_started, ended_early, parsing, script_of
from penstock.step_places import (
    PlacedData,
    PlacedLoss,
    PlacedModel,
    check_carry,
    placed,
    unplaced,
)
from penstock.sums import sums_way
from penstock.weighted import weighted

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

Batch: TypeAlias = "Any"  # any pytree of tensors; Any because only the job's own loss looks inside
Autocast = Literal["bfloat16", "float16"]
Precision = Literal["bfloat16", "float16"]
Buffers = Literal["exact", "per replica"]


class Parameters(list["nn.Parameter"]):
    """What a job's optimizer is given: the parameters of the model, in its order and with names."""

    def __init__(self, named: "Iterable[tuple[str, nn.Parameter]]") -> None:
        rows = list(named)
        super().__init__(parameter for _, parameter in rows)
        self._names = [name for name, _ in rows]

    def named(self) -> "list[tuple[str, nn.Parameter]]":
        """Return (name, parameter) of each, as `model.named_parameters()` gives them."""
        return list(zip(self._names, self, strict=True))


_MICRO_BATCHES = 8  # of a step, where neither the job nor its data says how many
ROW = ("step", "loss", "seconds", "samples_per_second", "tokens_per_second")  # of metrics.jsonl
SCALED = ("loss_scale", "left_out")  # there too, where the loss is scaled


@dataclass(frozen=True, slots=True)
class Job:
    """What one training run needs to know about the model, and nothing about the machines.

    model          builds the module; it may be called on the meta device
    loss           the mean loss of one micro-batch, a scalar; or a pair of it and figures by name;
                   `ps.in_turn`: several, each of which trains some of the weights in its steps
    data           micro-batches from index `start` on, all of the same shapes; equal indices must
                   give equal micro-batches, or a resumed run differs from an unbroken one
    optimizer      the optimizer of the model's parameters, all of them; those that belong to a
                   stage are then updated with that stage
    weight         micro-batch -> how much it counts in the mean of its step, as by its tokens;
                   None: as much as any other
    micro_batches  per step, over all replicas; default: 1 where `ps.batches` or `ps.from_loader`
                   makes the data, as a loop over a loader has it, else 8
    num_steps      optimizer steps
    clip_norm      largest norm of the whole model's gradient; None: no clipping
    validation     the micro-batches over whose samples val_loss is the mean; or several such
                   functions by name
    validate_every steps after which to validate too, besides at the end; the best is kept
    metrics        (model, micro-batch) -> figures of a validation by name, each a number, or a pair
                   of a sum and a count
    best           which validation is the best: "lowest val_loss", "highest val_accuracy"
    patience       validations without a better one after which the run ends; None: it goes on
    learning_rate  step -> factor on the optimizer's own rate
    scheduler      optimizer -> scheduler like torch's, stepped once after every update; instead
                   of learning_rate
    average        `ps.ema` or `ps.swa`: an average of the weights, kept beside them; None: none
    facts          figures of the job itself, for summary.json
    seed           of the initial weights and of dropout
    autocast       dtype of torch.autocast; gradients are not scaled, so float16 may underflow
    precision      dtype in which forward and backward compute, with weights of that dtype too; the
                   optimizer keeps them in float32.  In float16 the loss is scaled, and a step whose
                   gradients overflow is left out
    sums           how copies of a stage agree.  In how few numbers gradients travel where they are
                   summed: "bfloat16", "float16", "int8", "sign", "top:0.01", "rank:4", "delayed:2";
                   or weights are averaged instead: "local:8", "diloco:8", "easgd:8", "gossip:8";
                   or a server updates as gradients come: "backup:1", "ssp:3", "async"
                   (penstock/sums.py); None: gradients are summed as they are
    buffers        "exact": what forward writes (running statistics) is what the plain loop has;
                   "per replica": each replica follows its own micro-batches, the first is saved
    wire_bits      fewest bits in which a number may go from rank to rank between stages: one for
                   all, or (of activations, of gradients); 2 to 16, or 32: as it is.  None: all are
                   sent as they are
    writers        called in the leading process with every row of metrics.jsonl
    batch_by_ranks whether the batch of an elastic run follows its ranks: each keeps its share, and
                   a step is the mean over the shares of those who are there
    state          what the job keeps in Python, by name: what has state_dict and load_state_dict,
                   generators of random numbers, tensors, and dicts, lists and deques of these and
                   of plain values.  It is saved, and put back into these very objects
    carry          tensors by name that each micro-batch hands on to the one at its place in the
                   next step, with their first values; the loss is then called as
                   loss(model, batch, carry), and reads and sets carry["name"]
                   (penstock/step_places.py)
    batch_range    fewest and most micro-batches of a step, where a run finds its batch itself
                   (until_loss), besides its own; None: a quarter of its own to four times it

    Raises:   JobError: a field that is not a function, or not of what it is given, or a number out
              of range.
    """

    model: "Callable[[], nn.Module]"
    loss: "Callable[[nn.Module, Batch], Tensor | tuple[Tensor, Mapping[str, Tensor | float]]]"
    data: Callable[[int], Iterator[Batch]]
    optimizer: "Callable[[Parameters], Optimizer]"
    _: KW_ONLY
    micro_batches: int = cast("int", None)  # by the data
    num_steps: int = 100
    clip_norm: float | None = None
    validation: "Callable[[], Iterable[Batch]] | Sets | None" = None
    validate_every: int | None = None
    weight: Callable[[Batch], "Tensor | float"] | None = None
    metrics: "Callable[[nn.Module, Batch], Mapping[str, Any]] | None" = None
    best: str = LOWEST
    patience: int | None = None
    learning_rate: Callable[[int], float] | None = None
    scheduler: "Callable[[Optimizer], LRScheduler] | None" = None
    average: Average | None = None
    facts: Callable[[], Mapping[str, float]] | None = None
    seed: int = 0
    autocast: Autocast | None = None
    precision: Precision | None = None
    sums: str | None = None
    buffers: Buffers = "exact"
    wire_bits: int | tuple[int, int] | None = None
    writers: Sequence[Callable[[Mapping[str, float | int | None]], None]] = ()
    batch_range: tuple[int, int] | None = None
    batch_by_ranks: bool = False
    state: Mapping[str, object] = field(default_factory=dict[str, object], hash=False)
    carry: "Mapping[str, Tensor] | None" = field(default=None, hash=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("model", "loss", "data", "optimizer"):
            _check_function(name, getattr(self, name))
        for name in ("learning_rate", "scheduler", "facts", "metrics", "weight"):
            if getattr(self, name) is not None:
                _check_function(name, getattr(self, name))
        check_carry(self.carry)
        self._check_calls()
        if cast("object", self.micro_batches) is None:
            own: int = getattr(self.data, "step_micro_batches", _MICRO_BATCHES)
            object.__setattr__(self, "micro_batches", own)
        _check_whole("micro_batches", self.micro_batches, at_least=1)
        check_keyed(self.data, self.micro_batches)
        _check_whole("num_steps", self.num_steps, at_least=1)
        _check_whole("seed", self.seed, at_least=0)
        if self.weight is not None and self.batch_by_ranks:
            message = "Job.weight needs all micro-batches of a step, and Job.batch_by_ranks is set"
            raise JobError(message, hint="leave out one of them")
        for name, part in zip(("model", "loss", "data"), self._parts(), strict=True):
            object.__setattr__(self, name, part)
        _check_validation(self.validation)
        _check_validate_every(self.validate_every, self.validation)
        check_best(self.best, self.patience, self.validate_every)
        _check_clip_norm(self.clip_norm)
        _check_autocast(self.autocast)
        _check_precision(self.precision, self.autocast)
        _check_sums(self.sums, self.precision)
        _check_buffers(self.buffers)
        _check_wire_bits(self.wire_bits)
        _check_writers(self.writers)
        _check_batch_range(self.batch_range)
        _check_state(self.state)
        _check_average(self.average)
        object.__setattr__(self, "writers", tuple(self.writers))
        if self.learning_rate is not None and self.scheduler is not None:
            message = "Job.learning_rate and Job.scheduler both set the rate of a step"
            raise JobError(message, hint="keep one of them")

    def _check_calls(self) -> None:
        """Refuse a function that does not take what it will be given."""
        model, loss, data = unplaced(self.model, self.loss, self.data)
        others = {name: getattr(self, name) for name in _GIVEN if name not in ("loss", "data")}
        given = {**_GIVEN, "loss": "model, batch" if self.carry is None else "model, batch, carry"}
        is_made = isinstance(self.loss, LossTurns | PlacedLoss)  # of losses that were looked at
        mine = {**others, "model": model, "loss": None if is_made else loss, "data": data}
        for name, each in mine.items():
            if each is not None:
                _check_call(name, each, given[name])

    def _parts(self) -> "_Parts":
        """Return model, loss and data as turns, weight and carry have them, of those given."""
        model, loss, data = unplaced(self.model, self.loss, self.data)
        loss, data = turned(loss, data, self.micro_batches)
        if self.weight is not None and isinstance(loss, LossTurns):
            message = "Job.weight weighs the micro-batches of one loss, and ps.in_turn has several"
            raise JobError(message, hint="multiply the loss of the turn that needs it")
        parts = model, *weighted(loss, data, self.weight, self.micro_batches)
        return parts if self.carry is None else self._placed(parts, self.carry)

    def _placed(self, own: "_Parts", start: "Mapping[str, Tensor]") -> "_Parts":
        """Return model, loss and data that give each micro-batch its place in the step.

        own:     without places; what others have made of placed ones stays.
        Raises:  JobError: a step of this job is not always of the same places.
        """
        whys = {
            "Job.batch_by_ranks": self.batch_by_ranks,
            "data of several shapes, or turns": keyed(own[2]) is not None,
            'Job.buffers="per replica"': self.buffers == "per replica",
            "Job.batch_range": self.batch_range is not None,
        }
        if why := next((name for name, is_so in whys.items() if is_so), None):
            message = f"Job.carry needs steps of the same {self.micro_batches} places, and there is"
            raise JobError(f"{message} {why}", hint="leave out one of them")
        model, loss, data = placed(*own, start, self.micro_batches)
        if isinstance(self.loss, PlacedLoss):
            model = model if isinstance(self.model, PlacedModel) else self.model
            data = data if isinstance(self.data, PlacedData) else self.data
        return model, loss, data

    @property
    def scales_loss(self) -> bool:
        """Return whether the loss is scaled, and steps that overflow are left out."""
        return self.precision == "float16"

    @property
    def awaits_all(self) -> bool:
        """Return whether an update depends on all gradients of the model: clipped, or left out."""
        return self.clip_norm is not None or self.scales_loss

    @property
    def fewest_bits(self) -> tuple[int, int]:
        """Return the fewest bits of a number in messages of activations, and of gradients."""
        wanted = AS_IT_IS if self.wire_bits is None else self.wire_bits
        return (wanted, wanted) if isinstance(wanted, int) else wanted


_Parts: TypeAlias = tuple[Any, Any, Any]
_VALIDATION = "pass a function that returns the micro-batches: validation=lambda: batches"
_HINTS = {
    "model": "pass the class, or a function that builds the module: model=lambda: GPT(width=256)",
    "loss": "pass a function: loss=lambda model, batch: model(**batch).loss",
    "data": "pass a function that yields micro-batches from an index on: def data(start): ...",
    "optimizer": "pass a function: optimizer=lambda parameters: AdamW(parameters, lr=3e-4)",
    "validation": _VALIDATION,
    "weight": 'pass a function: weight=lambda batch: (batch["labels"] != -100).sum()',
    "metrics": 'pass a function: metrics=lambda model, batch: {"accuracy": (correct, answers)}',
    "learning_rate": "pass a function: learning_rate=lambda step: min(1.0, (step + 1) / 100)",
    "scheduler": "pass a function: scheduler=lambda optimizer: CosineAnnealingLR(optimizer, 100)",
    "facts": 'pass a function: facts=lambda: {"entropy_nats": 3.1}',
}


_GIVEN = {
    "model": "",
    "loss": "model, batch",
    "data": "start",
    "optimizer": "parameters",
    "weight": "batch",
    "metrics": "model, batch",
    "learning_rate": "step",
    "scheduler": "optimizer",
    "facts": "",
}

_WRITER = "pass a function of a row of metrics: lambda row: print(row['loss'])"


def _check_function(name: str, value: object, hint: str = "") -> None:
    built = hasattr(value, "named_parameters") and not isinstance(value, type)  # an nn.Module
    if not callable(value) or built:
        found = f"{type(value).__name__} {_short(value)}"
        raise JobError(f"Job.{name} is the {found}, not a function", hint=hint or _HINTS[name])


def _check_call(name: str, value: "Callable[..., object]", given: str, hint: str = "") -> None:
    try:
        takes = inspect.signature(value, follow_wrapped=False)
    except (TypeError, ValueError):  # of some builtins nothing is known
        return
    try:
        takes.bind(*given.split(", ") if given else ())
    except TypeError as problem:
        message = f"Job.{name} is called as {name}({given}), and takes {takes}: {problem}"
        raise JobError(message, hint=hint or _HINTS[name]) from problem


def _check_whole(name: str, value: object, *, at_least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        message = f"Job.{name} is {_short(value)}, not a whole number of {at_least} or more"
        raise JobError(message, hint=f"set {name} to {at_least} or more")


def _check_validation(value: object) -> None:
    if isinstance(value, Mapping):
        check_names(cast("Mapping[object, object]", value))
    for name, made in sets_of(cast("object", value)).items():
        place = f'validation["{name}"]' if name else "validation"
        _check_function(place, made, _VALIDATION)
        _check_call(place, made, "", _VALIDATION)


def _check_validate_every(value: object, validation: object) -> None:
    if value is None:
        return
    _check_whole("validate_every", value, at_least=1)
    if validation is None:
        message = f"Job.validate_every is {value}, and Job.validation is None"
        raise JobError(message, hint=_HINTS["validation"])


def _check_clip_norm(value: object) -> None:
    if value is None:
        return
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        message = f"Job.clip_norm is {_short(value)}, not a positive number"
        raise JobError(message, hint="set the largest norm of the gradient, or None for no limit")


def _check_autocast(value: object) -> None:
    if value is not None and value not in get_args(Autocast):
        names = " or ".join(f'"{name}"' for name in get_args(Autocast))
        message = f"Job.autocast is {_short(value)}, not the name of a dtype of torch.autocast"
        raise JobError(message, hint=f"set {names}, or None for no autocast")


def _check_half(field: str, value: object, otherwise: str) -> None:
    if value is not None and value not in get_args(Precision):
        names = " or ".join(f'"{name}"' for name in get_args(Precision))
        message = f"Job.{field} is {_short(value)}, not a dtype of 16 bits"
        raise JobError(message, hint=f"set {names}, or {otherwise}")


def _check_precision(value: object, autocast: object) -> None:
    _check_half("precision", value, "None for the dtypes of the model")
    if value is not None and autocast is not None:
        message = f"Job.precision is {_short(value)}, and Job.autocast {_short(autocast)}"
        raise JobError(message, hint="keep Job.precision: it computes under torch.autocast too")


def _check_sums(value: object, precision: object) -> None:
    hint = 'set sums to "bfloat16", "int8", "top:0.01" or "local:8", or None for sums as they are'
    if value is not None and not isinstance(value, str):
        raise JobError(f"Job.sums is {_short(value)}, not a text", hint=hint)
    try:
        way = sums_way(value)
    except ValueError as problem:
        raise JobError(f"Job.sums is not {problem}", hint=hint) from None
    if way.holds_back and precision == "float16":
        message = f"Job.sums is {value!r} and Job.precision float16, where a step may be left out"
        hint = 'take Job.precision="bfloat16": what overflows would be held back for later steps'
        raise JobError(message, hint=hint)
    if (way.averages or way.served) and precision == "float16":
        message = f"Job.sums is {value!r} and Job.precision float16, where each replica would scale"
        raise JobError(f"{message} its loss otherwise", hint='take Job.precision="bfloat16"')


def _check_buffers(value: object) -> None:
    if value not in get_args(Buffers):
        names = " or ".join(f'"{name}"' for name in get_args(Buffers))
        message = f"Job.buffers is {_short(value)}, not a policy for buffers"
        raise JobError(message, hint=f"set {names}")


def _check_wire_bits(value: object) -> None:
    each = (value, value)
    if isinstance(value, tuple):
        each = cast("tuple[object, ...]", value)
    if value is not None and not (len(each) == 2 and all(map(is_wire_bits, each))):
        message = (
            f"Job.wire_bits is {_short(cast('object', value))}, not bits of a number in a message"
        )
        hint = f"set a number from {WIRE_BITS[0]} to {WIRE_BITS[1]}, or a pair of them; "
        raise JobError(message, hint=f"{hint}{AS_IT_IS} leaves numbers as they are")


def _check_writers(value: object) -> None:
    if not isinstance(value, list | tuple):
        message = f"Job.writers is {_short(value)}, not several functions"
        raise JobError(message, hint='list them: writers=[ps.tensorboard("runs/board")]')
    for at, writer in enumerate(cast("Sequence[object]", value)):
        _check_function(f"writers[{at}]", writer, _WRITER)


def _check_batch_range(value: object) -> None:
    if value is None:
        return
    pair = cast("tuple[object, ...]", value) if isinstance(value, tuple) else ()
    numbers = [one for one in pair if isinstance(one, int) and not isinstance(one, bool)]
    if len(numbers) != 2 or len(pair) != 2 or not 1 <= numbers[0] <= numbers[1]:
        message = f"Job.batch_range is {_short(cast('object', value))}, no range of micro-batches"
        raise JobError(message, hint="give a pair of whole numbers of a step: batch_range=(4, 64)")


_KEPT_BY = (
    ("state_dict", "load_state_dict"),
    ("get_state", "set_state"),  # torch.Generator, numpy's RandomState
    ("getstate", "setstate"),  # random.Random
    ("bit_generator",),  # numpy's Generator
    ("copy_", "shape"),  # a tensor
)


def _check_state(value: object) -> None:
    hint = 'name what has a state: state={"calls": counter}'
    if not isinstance(value, Mapping):
        raise JobError(f"Job.state is {_short(value)}, not objects by name", hint=hint)
    for name, held in cast("Mapping[object, object]", value).items():
        if not isinstance(name, str) or not name or "/" in name:
            raise JobError(f"Job.state has the name {_short(name)}, which is none", hint=hint)
        ways = (all(hasattr(held, each) for each in way) for way in _KEPT_BY)
        if isinstance(held, type) or not (isinstance(held, dict | list | deque) or any(ways)):
            message = f'Job.state["{name}"] is the {type(held).__name__} {_short(held)}, of which'
            wrap = "keep it in an object with state_dict() and load_state_dict(state), or in a dict"
            raise JobError(f"{message} no state can be taken", hint=wrap)


def _check_average(value: object) -> None:
    if value is not None and not isinstance(value, Average):
        message = f"Job.average is {_short(value)}, no average of weights"
        raise JobError(message, hint="say which: average=ps.ema(0.999), or ps.swa(start=1000)")


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def load_job(text: str) -> Job:
    """Return the job that `text` names: `path/to/file.py[:name]` or `package.module[:name]`.

    What follows ` -- ` in it are arguments of the script, which reads them in `sys.argv`.
    The name is that of a function that returns a Job.  Without one it is the function called
    `job` or `main_job`; else the only one that is annotated `-> Job` or called `..._job`; else what
    is called `job`: a Job, or a function of another module.
    As under `python path/to/file.py`, modules beside the file can be imported by it.

    Raises:   JobError: there is no such file, module or function, it raises, or what it returns
              is no Job; where Python knows it, with the line.
    """
    place, name = _split(script_of(text).job)
    try:
        with as_started(text), parsing():
            module = _load_file(Path(place)) if _is_file(place) else _load_module(place)
            function = _named(module, place, name) if name else _only(module, place)
            where = f"{place}:{getattr(function, '__name__', name)}"
            job = function if isinstance(function, Job) else _run(function, where)
    except JobError as problem:
        if isinstance(ended := problem.__cause__, SystemExit):
            raise ended_early(ended, last_users_line(ended, place), text) from ended
        raise
    if not isinstance(job, Job):
        message = f"{where} returns the {type(job).__name__} {_short(job)}, not a Job"
        raise JobError(message, hint="end the function with: return penstock.Job(model=..., ...)")
    return job


def load_function(text: str, folder: Path) -> Callable[..., object]:
    """Return the function that `text` names: `file.py:name` in `folder`, or `package.module:name`.

    Raises:   JobError: there is no such file, module or function.
    """
    place, name = _split(text)
    if not name:
        raise JobError(f'"{text}" names no function', hint="write file.py:name or module:name")
    if _is_file(place) or (folder / place).exists():
        module, place = _load_file(folder / place), str(folder / place)
    else:
        module = _load_module(place)
    found = _named(module, place, name)
    if isinstance(found, Job):
        raise JobError(f"{text} is a Job, not a function", hint="name a function")
    return found


def _split(text: str) -> tuple[str, str]:
    place, colon, name = text.rpartition(":")
    if text and not colon:
        return text, ""
    if not place or not name.isidentifier():
        hint = "write path/to/file.py, path/to/file.py:name or package.module:name"
        raise JobError(f'"{text}" names no job', hint=hint)
    return place, name


def _is_file(place: str) -> bool:
    return place.endswith(".py") or "/" in place or Path(place).exists()


def check_file(text: str) -> None:
    """Raise where a job is named by a file that is not there; nothing is loaded.

    Raises:   JobError.
    """
    place = script_of(text).place
    if place.endswith(".py"):
        _check_file(Path(place))


def _check_file(path: Path) -> None:
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise JobError(f"the file {path} {problem}", hint=_neighbours(path))


def _load_file(path: Path) -> ModuleType:
    _check_file(path)
    _search_in(path.parent)
    name = _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise JobError(f"{path} is not a Python file", hint="a job is a file that ends in .py")
    spec.loader_state = _LOADED_HERE
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as problem:
        del sys.modules[name]
        raise _failed(problem, str(path)) from problem
    return module


_LOADED_HERE = "a job"  # of the spec of a module that `_load_file` has made


def _module_name(path: Path) -> str:
    """Return the name of a file's module: its own, by which a spawned process imports it as well.

    Or one that is made up, where its own names another module, or none.
    """
    known = sys.modules.get(path.stem)
    is_free = known is None or getattr(known.__spec__, "loader_state", None) == _LOADED_HERE
    importlib.invalidate_caches()
    found = importlib.machinery.PathFinder.find_spec(path.stem) if is_free else None
    is_found = found is not None and found.origin and path.samefile(found.origin)
    return path.stem if is_found else f"penstock_job_{path.stem}"


def _neighbours(path: Path) -> str:
    folder = path if path.is_dir() else path.parent
    names = sorted(file.name for file in folder.glob("*.py"))
    if not names:
        return f"there is no .py file in {folder}" if folder.is_dir() else f"nor does {folder}"
    near = difflib.get_close_matches(path.name, names, n=1)
    if near:
        return f"did you mean {folder / near[0]}?"
    return f"in {folder} there are: {', '.join(names[:8])}"


def _load_module(place: str) -> ModuleType:
    _search_in(Path.cwd())
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as problem:
        missing = problem.name or place
        if place != missing and not place.startswith(f"{missing}."):
            raise _failed(problem, place) from problem
        hint = f'a file is written with its ending, as in "{place}.py"'
        raise JobError(f'there is no module "{missing}"', hint=hint) from problem
    except (Exception, SystemExit) as problem:
        raise _failed(problem, place) from problem


def _search_in(folder: Path) -> None:
    if (entry := str(folder.resolve())) not in sys.path:
        sys.path.insert(0, entry)


def _public_functions(module: ModuleType) -> dict[str, FunctionType]:
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, FunctionType)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    }


def _named(module: ModuleType, place: str, name: str) -> Callable[[], object] | Job:
    value = getattr(module, name, None)
    if isinstance(value, Job) or callable(value):
        return value
    problem = f"has no function {name}" if value is None else f"has no function, but a value {name}"
    names = list(_public_functions(module))
    near = difflib.get_close_matches(name, names, n=1)
    listed = f"its functions: {', '.join(names) or 'none'}"
    hint = f"did you mean {place}:{near[0]}?" if near else listed
    raise JobError(f"{place} {problem}", hint=hint)


def _only(module: ModuleType, place: str) -> Callable[[], object] | Job:
    functions = _public_functions(module)
    called_job = [name for name in functions if name in ("job", "main_job")]
    jobs = [
        name
        for name, function in functions.items()
        if (name.endswith("_job") or _returns_job(function)) and not _needs_arguments(function)
    ]
    for names in (called_job, jobs):
        if len(names) == 1:
            return functions[names[0]]
    if jobs or called_job:
        listed = ", ".join(dict.fromkeys(called_job + jobs))
        message = f"{place} has several jobs: {listed}"
        raise JobError(message, hint=f"name one: {place}:{(called_job or jobs)[0]}")
    value = getattr(module, "job", None)
    if isinstance(value, Job) or callable(value):  # made at the top, or imported
        return value
    message = f"{place} has no function called job, and none annotated -> Job"
    listed = f"name the function that returns the Job, as in {place}:name"
    if functions:
        listed += f"; its functions: {', '.join(functions)}"
    raise JobError(message, hint=listed)


def _needs_arguments(function: FunctionType) -> bool:
    parameters = inspect.signature(function).parameters.values()
    fixed = (p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
    return any(parameter.default is parameter.empty for parameter in fixed)


def _returns_job(function: FunctionType) -> bool:
    annotation = function.__annotations__.get("return")
    return annotation is Job or (
        isinstance(annotation, str) and annotation.rpartition(".")[2] == "Job"
    )


def _run(function: Callable[[], object], where: str) -> object:
    try:
        return function()
    except (Exception, SystemExit) as problem:
        raise _failed(problem, where) from problem


def _failed(problem: BaseException, where: str) -> JobError:
    """Return the JobError for what the user's code raised, with the last line of that code."""
    if isinstance(problem, SyntaxError) and problem.filename:
        where, found = f"{problem.filename}:{problem.lineno}", problem.msg
    else:
        where, found = last_users_line(problem, where), str(problem)
    if isinstance(problem, PenstockError):
        return JobError(f"{where}: {problem.message}", hint=problem.hint)
    found = " ".join(found.split()) or "no message"
    hint = "correct that line" if where.rpartition(":")[2].isdecimal() else _CALLED
    return JobError(f"{where}: {type(problem).__name__}: {found}", hint=hint)


_CALLED = "it is called without arguments; give its parameters defaults"


def last_users_line(problem: BaseException, otherwise: str) -> str:
    """Return the last line of the user's code that an error came through."""
    frames = traceback.extract_tb(problem.__traceback__)
    lines = [f"{at.filename}:{at.lineno}" for at in frames if is_users(at.filename)]
    return (lines or [otherwise])[-1]


def exit_words(problem: SystemExit) -> tuple[str, str]:
    """Return in words that the user's code ends the program while a job is run, and the mend."""
    where = last_users_line(problem, "the job's code")
    hint = "let `data` end with return, and raise an error for what is wrong"
    return f"{where}: sys.exit({problem.code!r}) ends the program in the midst of a run", hint


@cache
def is_users(filename: str) -> bool:
    """Return whether a file is neither Python's nor installed nor Penstock's."""
    is_installed = "site-packages" in filename or "dist-packages" in filename
    return not (is_installed or filename.startswith(_others()))


@cache
def _others() -> tuple[str, ...]:
    return str(Path(__file__).parent), sysconfig.get_path("stdlib"), "<"
