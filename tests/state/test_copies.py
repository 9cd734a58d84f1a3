"""Copies to far memory and back give what was there, as it lay."""

import pytest
import torch
from torch import nn

from penstock.state.copies import FarFrames, FarState, Move

CPU = torch.device("cpu")


def made(move: Move) -> None:
    move.copy()
    move.end()


def stated(values: dict[str, torch.Tensor]) -> torch.optim.Optimizer:
    """Return an optimizer with this state of its one parameter."""
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter] = dict(values)
    return optimizer


STATES = {
    "plain": torch.randn(3, 4),
    "permuted": torch.randn(2, 3, 4).permute(2, 0, 1),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "with gaps": torch.randn(6, 8)[::2, 1:6],
    "of a larger one": torch.randn(9)[2:7],
    "bytes": torch.arange(7, dtype=torch.uint8),
    "empty": torch.zeros(0, 3),
}


@pytest.mark.parametrize("name", STATES)
def test_state_comes_back_as_it_was(name: str) -> None:
    value, step = STATES[name], torch.tensor(3.0)
    optimizer = stated({"a": value, "step": step, "b": torch.ones(5)})
    (state,) = optimizer.state.values()
    far = FarState(optimizer)
    for round_ in range(2):
        made(far.offload())
        assert state["a"] is not value
        assert torch.equal(state["a"], STATES[name] + round_)
        assert state["step"] is step
        assert far.near([state["a"], step]) == [step]
        made(far.reload())
        assert torch.equal(state["a"], STATES[name] + round_)
        assert far.near([state["a"]]) == [state["a"]]
        state["a"] += 1


def test_state_that_has_another_shape_gets_another_room() -> None:
    optimizer = stated({"a": torch.ones(4)})
    (state,) = optimizer.state.values()
    far = FarState(optimizer)
    made(far.offload())
    made(far.reload())
    state["a"] = torch.arange(6)
    made(far.offload())
    made(far.reload())
    assert state["a"].tolist() == list(range(6))


def test_frames_of_several_micro_batches_come_back_and_use_rooms_again() -> None:
    frames = FarFrames([(0, 1), (2,)], CPU)

    def frame(number: int) -> dict[int, torch.Tensor]:
        whole = torch.full((4, 4), float(number))
        return {0: whole, 1: whole.t()[1:], 2: torch.arange(3) + number, 3: torch.zeros(1)}

    held = {number: frame(number) for number in range(3)}
    for _ in range(2):
        for number in (0, 1):
            made(frames.offload(number, held[number]))
            assert list(held[number]) == [3]
        size = frames.memory.size_bytes
        for number in (1, 0):
            made(frames.reload(number, held[number]))
            for value, tensor in frame(number).items():
                assert torch.equal(held[number][value], tensor)
                assert held[number][value].stride() == tensor.stride()
            assert held[number][0].data_ptr() == held[number][1].data_ptr() - 4
    assert frames.memory.size_bytes == size
