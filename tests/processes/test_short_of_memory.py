"""Short of memory: what is held is told beside what was expected, and what would fit."""

from types import SimpleNamespace

import pytest
import torch

from penstock.errors import RunError
from penstock.processes import short_of_memory
from penstock.processes.short_of_memory import telling_what_is_held, words_without_plan
from penstock.units import GiB

DEVICE = SimpleNamespace(
    is_cpu=False,
    name="a GPU",
    held_bytes=8 * GiB,
    total_bytes=10 * GiB,
    usable_bytes=9 * GiB,
    free_bytes=1 * GiB,
)


@pytest.mark.parametrize(
    ("predicted", "expected", "hint"),
    [
        ((GiB, 6 * GiB), "; the plan expects 6.00 GiB at most", "memory=5.40GiB"),
        ((), " are held of 10.0 GiB", "smaller micro-batches, or more ranks"),
    ],
)
def test_rank_without_memory_says_what_it_holds_and_what_would_fit(
    predicted, expected, hint, monkeypatch
) -> None:
    monkeypatch.setattr(short_of_memory, "here", lambda: DEVICE)
    with pytest.raises(RunError) as caught, telling_what_is_held(1, predicted):
        raise torch.OutOfMemoryError("CUDA out of memory")
    start = "rank 1 has no memory left on a GPU: 8.00 GiB of its tensors and 1.00 GiB of others"
    assert caught.value.message.startswith(start)
    assert caught.value.message.endswith(expected)
    assert hint in str(caught.value.hint)


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(ValueError, match="other"), telling_what_is_held(0, ()):
        raise ValueError("other")


def test_command_without_memory_says_so_where_no_plan_runs(monkeypatch) -> None:
    """It was said to be a fault of a line of the author's, or of Penstock's."""
    monkeypatch.setattr(short_of_memory, "here", lambda: DEVICE)
    found = words_without_plan(torch.OutOfMemoryError("CUDA out of memory"))
    assert found is not None
    assert found[0].startswith("there is no memory left on a GPU: 8.00 GiB of its tensors")
    assert words_without_plan(ValueError("other")) is None
