"""Told data: what was found of the data of a job, as other processes of its run take it over.

That is the shape of each micro-batch of the run, or which of its numbers are tensors.  One process
has looked; whoever joins, or was started by torchrun, is told.
"""

from dataclasses import dataclass

from penstock.batches.by_shape import ByShape
from penstock.choose.known_shapes import told_by
from penstock.choose.number_tensors import NumberTensors, with_tensors_at
from penstock.job import Job
from penstock.weighted import WeightedData


@dataclass(frozen=True, slots=True)
class ToldData:
    """What the data of a job tells besides what its author wrote; nothing where all is empty.

    shapes:   that there are, in words; `places`, of each micro-batch of the run among these.
    numbers:  places of leaves that are tensors in place of numbers.
    """

    shapes: tuple[str, ...] = ()
    places: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()

    def of(self, job: Job) -> Job:
        """Return a job whose data tells that, too."""
        if self.shapes:
            return told_by(job, self.shapes, self.places)
        return with_tensors_at(job, self.numbers) if self.numbers else job


def told_by_data(job: Job) -> ToldData:
    """Return what was found of the data of a job."""
    own = job.data.of if isinstance(job.data, WeightedData) else job.data
    if isinstance(own, NumberTensors):
        return ToldData(numbers=own.places)
    if not isinstance(own, ByShape):
        return ToldData()
    shapes = tuple(dict.fromkeys(own.shapes))
    return ToldData(shapes, tuple(map(shapes.index, own.shapes)))
