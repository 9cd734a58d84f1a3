"""Host copies: what a rank holds, copied to the host beside its steps, and read once it is there.

On an accelerator copies are queued on the stream on which weights are updated, into pinned memory
of their own: so they hold what was there then, whatever is queued later, and nobody waits.  On the
host a tensor is its own copy: whoever takes it reads it at once.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from penstock.checkpoints.snapshot import plain_of
from penstock.device import Device, of

_ALIGN = 64  # bytes


class Later(NamedTuple):
    """Something that is done with copies once they are there, and what tells that they are."""

    event: Any
    act: Callable[[], None]


@final
class HostCopies:
    """Copies of one rank's tensors, and what is to be done once they are there, in order.

    pinned_bytes:  of the host's memory that copies hold now, and `most_bytes` that they ever held.
    """

    def __init__(self, device: Device) -> None:
        self.device, self.pinned_bytes, self.most_bytes = device, 0, 0
        self._later: list[Later] = []

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of tensors by the same keys; one that is there twice is copied once."""
        if not self.device.is_queued:
            return dict(tensors)
        known: dict[object, Tensor] = {}
        for value in tensors.values():
            known.setdefault(_key(value), plain_of(value))
        sizes = {key: -(-value.nbytes // _ALIGN) * _ALIGN for key, value in known.items()}
        memory, place = self.device.pinned(sum(sizes.values())), 0
        copies: dict[object, Tensor] = {}
        for key, value in known.items():
            own = memory[place : place + value.nbytes].view(value.dtype).view(value.shape)
            copies[key] = own.copy_(value, non_blocking=not of(value.device).is_cpu)
            place += sizes[key]
        self.pinned_bytes += place
        self.most_bytes = max(self.most_bytes, self.pinned_bytes)
        return {name: copies[_key(value)] for name, value in tensors.items()}

    def then(self, act: Callable[[], None]) -> None:
        """Do something once all copies are there that were asked for by now; on the host, now."""
        if not self.device.is_queued:
            act()
            return
        event = self.device.event()
        event.record()
        self._later.append(Later(event, act))

    def look(self, *, waits: bool = False) -> None:
        """Do what is to be done with the copies that are there; waits: once they all are."""
        while self._later and (waits or self._later[0].event.query()):
            first = self._later.pop(0)
            if waits:
                first.event.synchronize()
            first.act()

    def forget(self, copies: Mapping[str, Tensor]) -> None:
        """Note that copies of one call of `of` are not needed any more."""
        places = {value.untyped_storage().data_ptr(): value for value in copies.values()}
        if self.device.is_queued:
            self.pinned_bytes -= sum(each.untyped_storage().nbytes() for each in places.values())


def _key(tensor: Tensor) -> object:
    if tensor.layout != torch.strided:
        return id(tensor)
    about = tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
    return *about, tensor.is_conj(), tensor.is_neg()
