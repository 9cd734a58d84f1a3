"""Norms: torch's own with running statistics, whose law is that of their class, and their calls."""

from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from torch import nn

from penstock import _compat
from penstock.errors import AloneError

ALONE = 'train on one rank, or set Job.buffers="per replica"'

STATISTICS = "running_mean", "running_var", "num_batches_tracked"


def norms_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of each of torch's norms with running statistics, as torch wrote it.

    One call of it is c * old + new, with c of its momentum, whatever the batch.
    """
    for path, module in _compat.named_modules(model):
        is_its_own = "forward" in vars(module) or _compat.has_forward_hooks(module)
        if _compat.is_norm(module) and not is_its_own:
            yield path, module


@contextmanager
def counted(modules: Mapping[str, nn.Module]) -> Generator[Counter[str]]:
    """Count the calls of modules, by their paths."""
    calls = Counter(dict.fromkeys(modules, 0))

    def count(path: str, *_: object) -> None:
        calls[path] += 1

    hooks = [m.register_forward_hook(partial(count, path)) for path, m in modules.items()]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def as_often(counts: Mapping[str, int], model: nn.Module, micro_batch: int) -> Generator[None]:
    """See that the forward of a micro-batch calls each norm as often as its law has it.

    counts:   by the paths of the norms.
    Raises:   AloneError: replicas would have other running statistics than one process.
    """
    with counted({path: model.get_submodule(path) for path in counts}) as calls:
        yield
    for path, count in counts.items():
        if calls[path] != count:
            message = f"forward calls {path} {calls[path]} times in micro-batch {micro_batch}"
            raise AloneError(f"{message}, and {count} in others", hint=ALONE)
