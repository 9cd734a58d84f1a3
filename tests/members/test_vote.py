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


def rank_of(sum_of: Any, begun: Any = None) -> Any:
    progress, place = Progress(), torch.device("cpu")
    progress.losses[0] += [torch.tensor(1.0), torch.tensor([3.0])]
    graph, ranks = SimpleNamespace(figures=()), {"num_ranks": 2, "rank": 0, "all_reduce": sum_of}
    ranks["begin_sum"] = begun
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


def test_an_update_that_comes_first_waits_for_the_word_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = SimpleNamespace(is_queued=False, place=torch.device("cpu"))
    monkeypatch.setattr(vote, "of", lambda place: device)
    fails = [True]

    def begun(word: torch.Tensor, ranks: tuple[int, ...]) -> Any:
        def end() -> None:
            if fails[0]:
                raise TransportError(1, "is lost")
            word.mul_(2)

        return end

    asked = Vote(rank_of(None, begun), lambda: Wishes(save=True))
    asked.updates_first = True
    asked(ALL)
    assert (asked.is_open, asked.passed) == (True, -1)
    with pytest.raises(TransportError, match="is lost"):
        asked.end()
    assert (asked.is_open, asked.passed) == (True, -1)  # it may count, or not
    fails[0] = False
    asked.end()
    assert (asked.is_open, asked.passed, asked.asked.save) == (False, 0, True)
    assert asked.told is not None
    assert (asked.told.loss, asked.told.micro_batches) == (2.0, 4)
    asked.end()  # nothing is under way


def test_where_a_sum_can_only_be_made_at_once_the_word_comes_before_the_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = SimpleNamespace(is_queued=False, place=torch.device("cpu"))
    monkeypatch.setattr(vote, "of", lambda place: device)
    asked = Vote(rank_of(lambda word, ranks: word.mul_(2), lambda word, ranks: None), Wishes)
    asked.updates_first = True
    asked(ALL)
    assert (asked.is_open, asked.passed) == (False, 0)
