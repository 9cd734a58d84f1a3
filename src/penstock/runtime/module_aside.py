"""Module aside: a job's module waits in host memory while a rank trains on an accelerator.

A rank has the weights of its stages beside it; the whole module is needed before it is made, for
validations, and when all is trained.  It stays where it is if something else may look at it: an
optimizer of the author's own, a hook, what `Job.state` names, or parameters in one memory; or if
tensors of such a device cannot be moved in their place.
"""

from typing import TYPE_CHECKING

from torch import Tensor, nn

from penstock.device import CPU, here
from penstock.graph.waiting import can_wait, has_to_wait

if TYPE_CHECKING:
    from penstock.runtime.rank import Rank


def set_aside(rank: "Rank") -> None:
    """Let the module of a rank wait in the host's memory, if nobody looks at it meanwhile."""
    model = rank.capture.model
    if here().is_cpu or rank.job.state or not (can_wait() and _is_left_alone(rank)):
        return
    for tensor in _tensors(model):
        tensor.data = tensor.data.to(CPU)


def bring_back(model: nn.Module) -> None:
    """Have a module on the device of this process; of one that waits, its buffers."""
    place = here().place
    for tensor in () if here().is_cpu or has_to_wait(model) else _tensors(model):
        if tensor.device != place:
            tensor.data = tensor.data.to(place)
    for buffer in () if here().is_cpu else model.buffers():
        buffer.data = buffer.data.to(place)


def _is_left_alone(rank: "Rank") -> bool:
    updates = [weights.updates for weights in rank.weights.values()]
    tensors = _tensors(rank.capture.model)
    places = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    return all(each is None or each.is_plain for each in updates) and len(places) == len(tensors)


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
