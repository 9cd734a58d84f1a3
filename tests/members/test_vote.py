"""Vote: what it believes on a device that queues, here one that only says that it does."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.members import vote
from penstock.members.vote import Vote, Wishes
from penstock.program.reductions import Commit
from penstock.runtime.calls import Progress
from penstock.runtime.host_numbers import UnseenNorm
from penstock.transport import TransportError


def rank_of(sum_of: Any) -> Any:
    progress, place = Progress(), torch.device("cpu")
    progress.losses[0] += [torch.tensor(1.0), torch.tensor([3.0])]
    graph, ranks = SimpleNamespace(figures=()), {"num_ranks": 2, "rank": 0, "all_reduce": sum_of}
    own = {"capture": SimpleNamespace(graph=graph), "loss_scale": None, "rank": 0}
    end = SimpleNamespace(**ranks)
    return SimpleNamespace(
        progress=progress, device=place, transport=end, join_buffers=lambda step: None, **own
    )


@pytest.fixture(autouse=True)
def _queued(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(is_queued=True, place=torch.device("cpu"), taken=lambda given: given)
    monkeypatch.setattr(vote, "of", lambda place: device)


ALL = Commit((0, 1))


def test_word_of_all_ranks_counts_once_its_sum_has_run() -> None:
    own = rank_of(lambda word, ranks: word.mul_(2))
    asked = Vote(own, lambda: Wishes(save=True))
    asked(ALL)
    assert asked.passed == 0
    assert asked.asked.save
    assert asked.told is not None
    assert (asked.told.loss, asked.told.micro_batches) == (2.0, 4)
    assert own.progress.seen_losses == {0: 2.0}  # of this rank: not looked at again


@pytest.mark.parametrize("left", [0.0, float("nan"), 7.5])
def test_sum_that_was_stopped_is_not_believed(left: float) -> None:
    own = rank_of(lambda word, ranks: word.fill_(left))
    own.progress.unseen = UnseenNorm(torch.tensor(float("nan")), torch.ones(1), ["w"], 0)
    asked = Vote(own, Wishes)
    with pytest.raises(TransportError, match="was stopped"):
        asked(ALL)
    assert asked.passed == -1
