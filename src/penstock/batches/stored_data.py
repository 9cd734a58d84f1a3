"""Stored data: the store that a job's data is read from, if it is."""

from typing import Any

from torch.utils.data import Subset

from penstock.batches.bucketed import Bucketed
from penstock.batches.by_number import Map
from penstock.batches.packed import Packed
from penstock.step_places import PlacedData
from penstock.stores.stored import Stored
from penstock.weighted import WeightedData


def stored_data(data: Any) -> tuple[Stored, int] | None:
    """Return the dataset of data and the samples of a micro-batch; None: of no store."""
    while isinstance(data, WeightedData | PlacedData):
        data = data.of
    if not isinstance(data, Map | Bucketed | Packed):
        return None
    dataset: Any = data.dataset
    while isinstance(dataset, Subset):
        dataset = dataset.dataset  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return (dataset, len(data.indices(0))) if isinstance(dataset, Stored) else None
