"""Narrow LSTM: on a CPU, an LSTM under autocast in float16 is given numbers of 16 bits.

torch hands an LSTM whose input is in float32 to oneDNN, and only there casts it: to a kernel in
float16 that oneDNN does not have.  Input and state that are cast in front of it go to torch's own
loop over time, with the products and sums in float16 that autocast means; gates, state and output
are of 16 bits, as they are on a GPU.

Leaves out:  an LSTM with projections, or of packed sequences, which torch computes by that loop
             anyway, as autocast casts the ops inside.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.device import CPU


def narrow_lstm(model: nn.Module, device: str, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Return a context in which LSTMs of the model that autocast could not compute are cast."""
    narrow = device == CPU and dtype == torch.float16
    recurrent = narrow and any(isinstance(module, nn.LSTM) for module in model.modules())
    return _CastInFront() if recurrent else nullcontext()


class _CastInFront(TorchFunctionMode):
    """Casts input and state of `torch.lstm`."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.lstm and not kwargs and _goes_to_onednn(*args[:2]):
            given, state, *others = args
            return func(given.half(), [part.half() for part in state], *others)
        return func(*args, **(kwargs or {}))


def _goes_to_onednn(given: Tensor, state: Tensor | Sequence[Tensor]) -> bool:
    if isinstance(state, Tensor):  # lengths of packed sequences
        return False
    hidden, cell = state
    return given.dtype == torch.float32 and hidden.shape[-1] == cell.shape[-1]
