"""Vote: the word that makes a step count, and what else rides on it.

Every rank comes to it when its gradients of the step are whole; when it is through, all have come.
With it go what ranks ask for - a new generation, a checkpoint, the end - and what they know of the
step: so all ranks know its loss, and none has to be asked for it when others have died.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast, final

import torch
from torch import Tensor

from penstock.device import of
from penstock.graph.trace import is_output
from penstock.program.reductions import Commit
from penstock.runtime.calls import StepResult
from penstock.runtime.host_numbers import SeenBeside, look
from penstock.runtime.rank import Rank
from penstock.transport import TransportError


class Wishes(NamedTuple):
    """What a rank asks for, or any rank did.

    leave:   that it goes, and the others go on; where all do, the run stops.  How many do.
    """

    regroup: bool = False
    save: bool = False
    stop: bool = False
    audit: bool = False
    leave: int = 0

    @classmethod
    def of_all(cls, counts: Sequence[float], ranks: int) -> "Wishes":
        """Return what is asked for by any of the ranks; `counts`: how many ask for each."""
        regroup, save, stop, audit, _ = (count > 0 for count in counts)
        leave = round(counts[-1])
        return cls(regroup or leave > 0, save, stop or leave >= ranks, audit, leave)


@final
class Vote:
    """The votes of one rank.

    wishes:  what this rank asks for now.
    passed:  number of the newest step that counts; `asked`: what any rank asked for with it.
    told:    that step, as all ranks together know it.
    slow:    by how much this rank is slower than at first; `factors`: of each rank, with that step.
    """

    def __init__(self, rank: Rank, wishes: Callable[[], Wishes]) -> None:
        self.rank, self.wishes = rank, wishes
        self.passed, self.asked = -1, Wishes()
        self.told: StepResult | None = None
        self.slow: Callable[[], float] = lambda: 1.0
        self.factors: tuple[float, ...] = ()
        graph = rank.capture.graph
        self._names = [name for name, _ in graph.figures if not is_output(name)]
        size = rank.transport.num_ranks + len(Wishes()) + 2 + len(self._names)
        self._room = torch.empty(size, dtype=torch.float64)  # what is said and heard on a CPU
        self._numbers = self._room.numpy()

    def __call__(self, commit: Commit) -> None:
        """Return once all ranks have come to the end of a step.

        Raises:   TransportError: one has not, and will not.
        """
        rank, step = self.rank, self.rank.progress.first_step + commit.step
        rank.join_buffers(step + 1)
        word, count_of = self._word(commit.step), rank.transport.num_ranks
        if len(commit.ranks) > 1:
            rank.transport.all_reduce(word, commit.ranks)
        heard = self._heard(word, commit)
        self.factors, heard = tuple(heard[:count_of]), heard[count_of:]
        asked, (count, loss, *figures) = heard[: len(Wishes())], heard[len(Wishes()) :]
        self.passed, self.asked = step, Wishes.of_all(asked, count_of)
        means = {name: total / count for name, total in zip(self._names, figures, strict=True)}
        if rank.loss_scale is not None:
            means |= rank.loss_scale.figures()
        mean = loss / count if count else None
        self.told = StepResult(step, mean, 0.0, int(count), means)

    def _word(self, step: int) -> torch.Tensor:
        """Return what this rank says: how slow it is, what it asks for, micro-batches with a loss,
        and sums over them.
        """
        progress, transport = self.rank.progress, self.rank.transport
        slow = [0.0] * transport.num_ranks
        slow[transport.rank] = self.slow()
        rows, found = progress.figures.get(step, ()), progress.losses.get(step, ())
        if of(self.rank.device).is_queued:
            return self._queued_word([*slow, *self.wishes(), len(found)], found, rows)
        losses = [float(part) for part in found]
        none = [0.0] * len(self._names)
        whole = torch.stack([*rows]).double().sum(0).tolist() if rows else none  # pyright: ignore
        sums = cast(list[float], whole)
        self._numbers[:] = [*slow, *self.wishes(), len(losses), sum(losses), *sums]
        return self._room

    def _heard(self, word: Tensor, commit: Commit) -> list[float]:
        """Return what all ranks have said.

        On a device that queues once the sum has run; norm and losses of the step are seen with it.
        Raises:   TransportError: it was stopped, and nobody knows what there is instead.
        """
        rank = self.rank
        if not of(rank.device).is_queued:
            return cast(list[float], self._numbers.tolist())
        heard = list[float]()
        losses = rank.progress.losses.get(commit.step, ())

        def take(numbers: list[float]) -> None:
            count, *heard[:] = numbers
            if count != len(commit.ranks):
                raise TransportError(rank.rank, "was stopped while ranks agreed on a step")

        if rank.loss_scale is not None:  # its norm may overflow, of which the update asks
            take(of(rank.device).read(word))
        else:
            look(rank, commit.step, losses, beside=SeenBeside(word, take))
        return heard

    def _queued_word(
        self, known: Sequence[float], losses: Sequence[Tensor], rows: Sequence[Tensor]
    ) -> Tensor:
        """Return the word on a device that queues, for whose numbers the host does not wait yet."""
        device = of(self.rank.device)
        sums = torch.zeros(1 + len(self._names), dtype=torch.float64, device=device.place)
        if losses:
            sums[0] = torch.stack([loss.reshape(()) for loss in losses]).double().sum()
        if rows:
            sums[1:] = torch.stack([*rows]).double().sum(0)
        head = torch.tensor([1.0, *known], dtype=torch.float64)  # the first counts the ranks
        return torch.cat([device.taken(head), sums])
