"""Held: parameters and buffers that a job's code keeps past the module, as a list or a hook does.

`weight.register_hook(lambda gradient: gradient + 0.01 * weight)` or a penalty over `WEIGHTS`, a
list that `model()` fills, has the very tensors of the module.  While a step is traced the module
has stand-ins in their place, which nobody told the list of.  So each call of torch's is given the
stand-in of what it is given.

Ignores:  views of them that were made before, which a trace would keep with their first values.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from penstock import _compat
from penstock.errors import GraphError


class StandIns(TorchFunctionMode):
    """While active, torch is given `state[name]` for the tensor that is `kept[name]`."""

    def __init__(self, kept: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.names = {id(tensor): name for name, tensor in kept.items() if name in state}
        self.state = state

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func` with the stand-ins; return its result.

        Raises:   GraphError: it is asked for what training has left at a tensor beside its value.
        """

        def stand_in(tensor: Tensor) -> Tensor:
            name = self.names.get(id(tensor))
            if name is None:
                return tensor
            if func == _GRADIENT:
                message = f"the model reads the gradient of {name}, as micro-batches so far left it"
                raise GraphError(message, hint="look at it in the optimizer, or give eager=True")
            return self.state[name]

        given: Any = _compat.pytree.tree_map_only(Tensor, stand_in, (args, dict(kwargs or {})))
        return func(*given[0], **given[1])


_GRADIENT: Any = Tensor.grad.__get__  # pyright: ignore
