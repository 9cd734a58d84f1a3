"""Model changes: what the functions of a job beside its loss change in its model as a loop goes on.

A traced step computes with its own tensors: it does not see a hook put on a module later,
a weight that a schedule prunes, or a buffer that the data fills.  Nor does a part of an optimizer
see what a schedule does to the options of the whole.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock import _compat
from penstock.graph.module_facts import Facts, module_facts
from penstock.job import Job
from penstock.state.optimizer.rates import options_of
from penstock.state.optimizer.reach import hook_with_module

SMALL = 2_000_000  # elements of a model of which every one is looked at
_SAMPLE = 4096  # of each tensor of a larger one
_READ, _GRADIENT = "read", "the gradient of"
_SHOWN = (bool, int, float, str, type(None))


class ChangeWatch:
    """Notes who changes what: {what: (who, before, after, step)}.

    written:  the buffers that forward writes; an optimizer is to leave them alone, unless a hook
              has the module: then it stays whole, and ranks show it the buffers of the run.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer: Optimizer | None = None
        self.found: dict[str, tuple[str, object, object, int]] = {}
        self.written: set[str] = set()
        self.step, self.is_looking = 0, True
        tensors = [*model.parameters(), *model.buffers()]
        self.most = SMALL if sum(t.numel() for t in tensors) <= SMALL else _SAMPLE

    @contextmanager
    def of(self, who: str, facts: Callable[[], Facts]) -> Generator[None]:
        """Note what is another one of `facts` afterwards."""
        before = facts()
        yield
        self.note(who, before, facts())

    @contextmanager
    def unlooked(self) -> Generator[None]:
        """Let a scheduler step without being looked at: whoever steps it looks now and then."""
        self.is_looking = False
        yield
        self.is_looking = True

    def note(self, who: str, before: Facts, after: Facts) -> None:
        """Note what differs."""
        for what, value in after.items():
            if what in before and before[what] != value:
                self.found.setdefault(what, (who, before[what], value, self.step))

    @contextmanager
    def reading(self, who: str) -> Generator[None]:
        """Note what is read of the model, or of what the optimizer keeps, by an op of torch."""
        named: dict[str, Tensor] = {
            **dict(self.model.named_parameters()),
            **dict(self.model.named_buffers()),
        }
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                named[f"{_GRADIENT} {name}"] = parameter.grad
            for key, value in self._kept(parameter).items():
                named[f"{key} of {name}"] = value
        with _FirstRead(named) as reads:
            yield
        if reads.found:
            what = f"{reads.found}, as it is in one process"
            self.found.setdefault(what, (who, None, _READ, self.step))

    def _kept(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the tensors that the optimizer keeps of a parameter."""
        state: Any = {} if self.optimizer is None else self.optimizer.state.get(parameter, {})
        return {str(key): value for key, value in state.items() if isinstance(value, Tensor)}

    # -- facts ------------------------------------------------------------------------------------

    def all(self) -> Facts:
        """Return all that only an update may change."""
        return {**self.as_made(), **self.values(), **self.options()}

    def values(self) -> Facts:
        """Return what weights and buffers hold."""
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {f"the values of {name}": sampled(tensor, self.most) for name, tensor in named}

    def in_an_update(self) -> Facts:
        """Return what not even an update may change."""
        if self.optimizer is not None and hook_with_module(self.optimizer):
            return self.as_made()
        buffers = ((n, b) for n, b in self.model.named_buffers() if n in self.written)
        return {
            **self.as_made(),
            **{f"the values of {name}": sampled(buffer, self.most) for name, buffer in buffers},
        }

    def in_a_scheduler(self) -> Facts:
        """Return what a scheduler may not change."""
        return {**self.as_made(), **self.values()}

    def as_the_optimizer_is_made(self) -> Facts:
        """Return what the job's `optimizer` may not change: hooks on weights come with it again."""
        hooks = {f"the hooks of {name}" for name, _ in self.model.named_parameters()}
        return {what: v for what, v in self.in_a_scheduler().items() if what not in hooks}

    def as_made(self) -> Facts:
        """Return who learns, who is in training mode, which module is where, and its hooks."""
        return module_facts(self.model)

    def options(self) -> Facts:
        """Return the options of the optimizer's groups, and how many there are."""
        if self.optimizer is None:
            return {}
        facts: Facts = {"the number of groups": len(self.optimizer.param_groups)}
        for at, options in enumerate(options_of(self.optimizer)):
            for name, value in options.items():
                facts[f"{name} of group {at}"] = (
                    sampled(value, SMALL) if isinstance(value, Tensor) else value
                )
        return facts

    # -- the job's functions ----------------------------------------------------------------------

    def watched(self, job: Job) -> Job:
        """Return `job` whose rate and scheduler are watched."""
        rate, scheduler = job.learning_rate, job.scheduler

        def watched_rate(step: int) -> float:
            assert rate is not None, "only then it is asked"
            with self.of("learning_rate", self.all), self.reading("learning_rate"):
                return rate(step)

        def watched_scheduler(optimizer: Any) -> Any:
            assert scheduler is not None, "only then it is asked"
            with self.of("scheduler", self.in_a_scheduler):
                made: Any = scheduler(optimizer)
            if hasattr(made, "__dict__") and callable(getattr(made, "step", None)):
                made.step = self._watched_step(made.step)
            return made

        return replace(
            job,
            learning_rate=None if rate is None else watched_rate,
            scheduler=None if scheduler is None else watched_scheduler,
        )

    def _watched_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(step)
        def watched(*args: Any, **options: Any) -> Any:
            if not self.is_looking:
                return step(*args, **options)
            with self.of("scheduler", self.in_a_scheduler), self.reading("scheduler"):
                return step(*args, **options)

        return watched

    def words(self) -> Mapping[str, tuple[str, str]]:
        """Return {what: (who, how)}."""
        found: dict[str, tuple[str, str]] = {}
        for what, (who, before, after, step) in self.found.items():
            shown = isinstance(before, _SHOWN) and isinstance(after, _SHOWN)
            shown = shown and not what.startswith("the values of")  # their digests say nothing
            how = f"{before}, then {after}" if shown else "changed"
            how = _READ if after == _READ else how
            found[what] = who, f"{how} at step {step}"
        return found


class _FirstRead(_compat.DispatchMode):
    """Notes which of these tensors is read first."""

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        strided = ((name, t) for name, t in named.items() if t.layout is torch.strided)
        self.names = {_compat.storage_key(tensor): name for name, tensor in strided}
        self.found = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        flat: list[Any] = [t for a in args for t in (a if isinstance(a, list | tuple) else (a,))]  # pyright: ignore
        for given in flat if not self.found else ():
            if isinstance(given, Tensor) and given.layout is torch.strided:
                name = self.names.get(_compat.storage_key(given), "")
                if name.startswith(_GRADIENT) or not _writes(func):
                    self.found = self.found or name
        return func(*args, **(kwargs or {}))


def _writes(func: Any) -> bool:
    return bool(_compat.schema_of(func).is_mutable)  # what is written is noted by its values


def made_again(job: Job, build: Callable[[Job], nn.Module]) -> tuple[str, nn.Module]:
    """Return what differs when the model is built once more, and the model that was built then."""
    first = _made(build(job))
    model = build(job)
    second = _made(model)
    names = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    return (names[0] if names else ""), model


def _made(model: nn.Module) -> Facts:
    watch = ChangeWatch(model)
    facts = watch.values()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        facts[f"the shape of {name}"] = tuple(tensor.shape)
    for name, module in _compat.named_modules(model):
        facts[f"the class of {name}"] = type(module).__qualname__
    return dict(sorted(facts.items(), key=lambda fact: not fact[0].startswith("the shape")))


def sampled(tensor: Tensor, most: int) -> object:
    """Return what tells the values of a tensor from others; of a large one a sample."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or not tensor.numel():
        return tuple(tensor.shape)
    flat = tensor.detach().reshape(-1)
    every = flat.numel() // most + 1
    flat = flat[::every].resolve_conj().contiguous().cpu()
    return hash(flat.view(torch.uint8).numpy().tobytes())
