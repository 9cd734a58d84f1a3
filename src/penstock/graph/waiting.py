"""Waiting: a model for which an accelerator has no room computes there all the same, call by call.

Its parameters wait in the host's memory.  Each call of torch's that is given one gets a copy of it
on the accelerator, which lives as long as the call.  What autograd keeps for the backward pass
waits in the host's memory too, and weights are taken there again.  Gradients come to the host's
memory, where the optimizer then computes.

So the author's own loop, which every plan is compared with, runs on an accelerator of any size: it
holds one call's weights at a time, and the activations that Python holds.  Buffers are always on
the accelerator: forward writes into them.

Ignores:  weights that `torch.jit` or an autograd function of the author's own reads.
"""

import weakref
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock import _compat
from penstock.device import CPU, here
from penstock.units import format_bytes

HOLLOW: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
COPIES = 8  # of its weights that examining, measuring and the plain loop hold at most
_SMALL_BYTES = 1 << 10  # what is kept for the backward pass, and stays where it is
_DEVICES = {Tensor.device.__get__, Tensor.is_cuda.__get__, Tensor.is_cpu.__get__}  # type: ignore[attr-defined]
_LOOKS = {  # of what a parameter is, not of its values
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "__len__", "__hash__"),
    *("data_ptr", "untyped_storage", "register_hook", "requires_grad_", "retain_grad"),
    *("register_post_accumulate_grad_hook", "__repr__", "__deepcopy__", "__reduce_ex__"),
}


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the numbers of some tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def is_hollow(model: nn.Module) -> bool:
    """Return whether the parameters of a model have no values (hollow.py)."""
    return model in HOLLOW


@cache
def can_wait() -> bool:
    """Return whether a tensor on the accelerator of this process can come to the host's memory and
    stay the one that others know: torch has that of its own kinds, not of a vendor's.
    """
    near = torch.empty(0, device=here().place)
    return _compat.can_become(near, torch.empty(0))


def has_to_wait(model: nn.Module) -> bool:
    """Return whether the accelerator of this process has no room for a model and its loop."""
    device = here()
    is_small = device.is_cpu or COPIES * bytes_of(model.parameters()) <= device.usable_bytes
    return not is_small and can_wait()


def placed(model: nn.Module) -> nn.Module:
    """Return a model on the device of this process, or as one that waits; a hollow one as it is."""
    if is_hollow(model):
        return model
    if not has_to_wait(model):
        return model.to(here().place)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(CPU)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(here().place)
    return model


def nearby(model: nn.Module) -> nn.Module:
    """Return a model with all of it on the device of this process, to be trained there whole."""
    return model.to(here().place)


def why_waits(model: nn.Module) -> str:
    """Return in words why parameters of a model wait."""
    size, room = bytes_of(model.parameters()), here().usable_bytes
    words = f"weights of {format_bytes(size)} and what a plain loop holds beside them"
    return f"{words} have no room in {format_bytes(room)}: they wait in the host's memory"


def waits(model: nn.Module) -> bool:
    """Return whether parameters of a model wait in the host's memory for an accelerator."""
    return not here().is_cpu and any(parameter.is_cpu for parameter in model.parameters())


@contextmanager
def lent(model: nn.Module, later: Mapping[int, Tensor] | None = None) -> Generator[None]:
    """While active, what waits of a model is lent to each call; also nested.

    Nothing where nothing waits.
    later:    by the `id` of a parameter, what the backward pass reads in its place.
    """
    if torch.compiler.is_compiling() or not waits(model):
        yield
        return
    lender = _Lender(model, later or {})
    with lender, torch.autograd.graph.saved_tensors_hooks(lender.keep, lender.kept):
        yield


def backward_of(loss: Tensor, model: nn.Module) -> None:
    """Compute the gradients of a loss; a block that is computed again has the weights lent."""
    if not waits(model):
        loss.backward()  # pyright: ignore[reportUnknownMemberType]
        return
    with lent(model):
        _compat.run_backward(loss)


class _Near(torch.autograd.Function):
    """A copy of a parameter on the accelerator, whose gradient is one of the host's."""

    @staticmethod
    def forward(ctx: Any, waiting: Tensor, place: torch.device) -> Tensor:
        return waiting.to(place)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].to(CPU), None


class _Weight(NamedTuple):
    """What autograd keeps of a weight that was lent: which it is, and how it is looked at."""

    waiting: Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _OnHost(NamedTuple):
    """What autograd keeps besides."""

    value: Tensor


class _Lender(TorchFunctionMode):
    """Lends the parameters of a model that wait to each call of torch's."""

    def __init__(self, model: nn.Module, later: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.later, self.place = later, here().place
        self.waiting = {id(p): p for p in model.parameters() if p.is_cpu}
        self.now: dict[int, Tensor] = {}  # what waits, by the storage of its copy, during a call

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name, named = getattr(func, "__name__", ""), dict(kwargs or {})
        if func in _DEVICES and id(args[0]) in self.waiting:
            return func(torch.empty(0, device=self.place))
        if name in _LOOKS or name in ("__get__", "__set__", "__delete__"):
            return func(*args, **named)
        lent: list[tuple[Tensor, Tensor, int]] = []  # what waits, its copy, the copy's version

        def lend(value: Any) -> Any:
            if id(value) not in self.waiting:
                return value
            known = next((near for waiting, near, _ in lent if waiting is value), None)
            near = self._near(value) if known is None else known
            if known is None:
                lent.append((value, near, _writes(near)))
            return near

        given: Any = _compat.pytree.tree_map_only(Tensor, lend, (args, named))
        args, named = given
        if not lent:
            return func(*args, **named)
        before, self.now = self.now, {_storage(near): waiting for waiting, near, _ in lent}
        try:
            result: object = func(*args, **named)
        finally:
            self.now = before
        _write_back(lent)
        for waiting, near, _ in lent:
            if result is near:
                return waiting
        return result

    def _near(self, waiting: Tensor) -> Tensor:
        if waiting.requires_grad and torch.is_grad_enabled():
            return cast(Tensor, _Near.apply(waiting, self.place))  # pyright: ignore
        return waiting.detach().to(self.place)

    # -- what autograd keeps ----------------------------------------------------------------------

    def keep(self, tensor: Tensor) -> object:
        """Return a stand-in for a tensor until the backward pass."""
        if tensor.device != self.place or tensor.layout != torch.strided:
            return tensor
        if (waiting := self.now.get(_storage(tensor))) is not None:
            read = self.later.get(id(waiting), waiting).detach()
            place = int(tensor.storage_offset())
            return _Weight(read, tuple(tensor.shape), tensor.stride(), place)
        if tensor.numel() * tensor.element_size() <= _SMALL_BYTES:
            return tensor
        return _OnHost(tensor.detach().to(CPU))

    def kept(self, found: object) -> Tensor:
        """Return the tensor for which `found` stands."""
        if isinstance(found, _Weight):
            near = found.waiting.to(self.place)
            return near.as_strided(found.size, found.stride, found.offset)
        if isinstance(found, _OnHost):
            return found.value.to(self.place)
        assert isinstance(found, Tensor), "nothing else was kept"
        return found


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _writes(tensor: Tensor) -> int:
    """Return the number of times that a tensor was written into."""
    return tensor._version  # pyright: ignore[reportPrivateUsage]


def _write_back(lent: Iterable[tuple[Tensor, Tensor, int]]) -> None:
    """Give what waits the values that a call has written into its copy."""
    for waiting, near, version in lent:
        if _writes(near) != version:
            with torch.no_grad():
                waiting.copy_(near)
