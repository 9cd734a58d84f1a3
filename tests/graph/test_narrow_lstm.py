"""LSTMs in float16 on a CPU: cast in front, and what torch computes itself as it is."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from penstock.graph.narrow_lstm import narrow_lstm

HALF = torch.float16


def output(model: nn.Module, *given: object, narrow: bool) -> Tensor:
    with torch.autocast("cpu", HALF), narrow_lstm(model, "cpu" if narrow else "other", HALF):
        told = model(*given)[0]
    return told if isinstance(told, Tensor) else told.data


def by_hand(model: nn.LSTM, x_TBD: Tensor, h_BD: Tensor, c_BD: Tensor) -> Tensor:
    """Return the outputs of a layer, the formula over time in 16 bits."""
    weight_in, weight_state, bias_in, bias_state = (w.half() for w in model.parameters())
    h_BD, c_BD = h_BD.half(), c_BD.half()
    outputs: list[Tensor] = []
    for x_BD in x_TBD.half():
        own = nn.functional.linear(x_BD, weight_in, bias_in)
        gates = own + nn.functional.linear(h_BD, weight_state, bias_state)
        take, forget, new, give = gates.chunk(4, 1)
        c_BD = forget.sigmoid() * c_BD + take.sigmoid() * new.tanh()
        h_BD = give.sigmoid() * c_BD.tanh()
        outputs.append(h_BD)
    return torch.stack(outputs)


def test_an_lstm_computes_its_formula_in_16_bits() -> None:
    torch.manual_seed(0)
    model, x_TBD, state = nn.LSTM(5, 7), torch.randn(4, 3, 5), torch.randn(2, 1, 3, 7)
    found = output(model, x_TBD, (state[0], state[1]), narrow=True)
    assert found.dtype == HALF
    assert torch.equal(found, by_hand(model, x_TBD, state[0, 0], state[1, 0]))


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("kind", ["packed", "projected", "in 16 bits"])
def test_what_torch_computes_itself_stays_as_it_is(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.LSTM(5, 7, proj_size=3 if kind == "projected" else 0)
    x: object = torch.randn(4, 3, 5, dtype=HALF if kind == "in 16 bits" else None)
    if kind == "packed":
        x = pack_sequence([torch.randn(4, 5), torch.randn(2, 5)])
    as_it_is, narrowed = (output(model, x, narrow=narrow) for narrow in (False, True))
    assert torch.equal(as_it_is, narrowed)
    assert as_it_is.dtype == narrowed.dtype


def test_other_functions_and_models_are_left_alone() -> None:
    torch.manual_seed(0)
    model = nn.GRU(5, 7)
    x = torch.randn(4, 3, 5)
    assert torch.equal(output(model, x, narrow=True), output(model, x, narrow=False))
