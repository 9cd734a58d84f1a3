"""Runs: many configurations that have their stages in common, as arrays: one formula for all.

Every function of `work`, `links` and `memory` that takes a `TrainingRun` takes a `Runs`, and then
returns arrays where it returned numbers; so a hundred thousand configurations take the time of
some hundred.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from penstock.estimate.datasheet import Datasheet
from penstock.estimate.peak_memory import MEMORY_TERMS, stage_memory
from penstock.estimate.training_run import Hiding, Recompute, Sharding, TrainingRun
from penstock.estimate.transformer import Transformer
from penstock.estimate.work import LANES, TIME_TERMS, distinct_stages, once_a_step, stage_work, sums
from penstock.estimate.work_terms import Floats, Terms, cover


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of one model with the same stages; the other fields of a `TrainingRun`, one a run.

    Ignores:  what a `TrainingRun` checks when it is built.
    """

    model: Transformer
    stage_blocks: tuple[int, ...]
    devices: tuple[Datasheet, ...]
    tensor: NDArray[np.int64]
    data: NDArray[np.int64]
    micro_batch: NDArray[np.int64]
    num_micro_batches: NDArray[np.int64]
    interleave: NDArray[np.int64]
    recompute: NDArray[np.str_]
    sharding: NDArray[np.str_]
    sequence_parallel: NDArray[np.bool_]
    expert: int = 1
    context: int = 1
    gradient_bytes: int = 4
    optimizer_bytes: int = 12
    product_speed: float = 1.0
    overlap: Hiding = Hiding()  # noqa: RUF009 - a frozen record
    fused_loss: bool = False
    stops_early: bool = False
    on_device: bool = False
    selective: float = 0.0

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def pipe(self) -> int:
        """Return the number of stages."""
        return len(self.stage_blocks)

    @property
    def ranks(self) -> NDArray[np.int64]:
        """Return the number of devices of every run."""
        return self.tensor * self.data * self.context * self.pipe

    @property
    def tokens(self) -> Floats:
        """Return the tokens of a micro-batch on one rank, before tensor ranks divide them."""
        return self.micro_batch * self.model.sequence / self.context

    def take(self, chosen: NDArray[Any]) -> "Runs":
        """Return some of the runs."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        arrays: dict[str, Any] = {
            name: cast("Any", value)[chosen]
            for name, value in values.items()
            if isinstance(value, np.ndarray)
        }
        return replace(self, **arrays)

    def restaged(self, stage_blocks: tuple[int, ...], devices: tuple[Datasheet, ...]) -> "Runs":
        """Return the runs on other stages, with one micro-batch a step and one chunk a rank."""
        ones = np.ones(len(self), np.int64)
        return replace(
            self,
            stage_blocks=stage_blocks,
            devices=devices,
            num_micro_batches=ones,
            interleave=ones,
        )

    def one(self, at: int, cluster: str = "") -> TrainingRun:
        """Return one of the runs.

        Raises:   EstimateError: it is impossible.
        """
        return TrainingRun(
            self.model, cluster, self.stage_blocks, self.devices,
            int(self.tensor[at]), int(self.data[at]),
            int(self.micro_batch[at]), int(self.num_micro_batches[at]),
            self.expert, self.context, int(self.interleave[at]),
            cast("Recompute", str(self.recompute[at])), cast("Sharding", str(self.sharding[at])),
            bool(self.sequence_parallel[at]),
            self.gradient_bytes, self.optimizer_bytes, self.product_speed,
            self.overlap, self.fused_loss, self.stops_early, self.on_device, self.selective,
        )  # fmt: skip


def time_terms_of(runs: Runs, *, messages: bool = True) -> Terms:
    """Return the terms of step time, as `time_terms` of each; messages between stages or none."""
    as_one, count = cast("TrainingRun", runs), len(runs)
    stages = distinct_stages(as_one)
    lanes = np.zeros((len(LANES), count, len(stages), len(TIME_TERMS)))
    for place, (at, _) in enumerate(stages):
        for (lane, name), value in stage_work(as_one, at, messages=messages).items():
            lanes[LANES.index(lane), :, place, TIME_TERMS.index(name)] = value
    once, beside = (np.zeros((count, len(TIME_TERMS))) for _ in range(2))
    for array, work in ((once, once_a_step(as_one)), (beside, sums(as_one))):
        for name, value in work.items():
            array[:, TIME_TERMS.index(name)] = value
    return Terms(
        TIME_TERMS,
        lanes.reshape(len(LANES), -1, len(TIME_TERMS)),
        np.tile(np.array([float(alike) for _, alike in stages]), count),
        np.arange(count) * len(stages),
        runs.num_micro_batches.astype(np.float64),
        1.0 / runs.interleave,
        once,
        beside,
        np.full(count, cover(as_one)),
    )


def memory_terms_of(runs: Runs) -> Terms:
    """Return the terms of peak memory, as `memory_terms` of each."""
    as_one, count = cast("TrainingRun", runs), len(runs)
    moments: Sequence[list[float]] = [
        moment for at, _ in distinct_stages(as_one) for moment in stage_memory(as_one, at)
    ]
    rows = np.empty((count, len(moments), len(MEMORY_TERMS)))
    for place, moment in enumerate(moments):
        for column, value in enumerate(moment):
            rows[:, place, column] = value
    return Terms(
        MEMORY_TERMS,
        rows.reshape(1, -1, len(MEMORY_TERMS)),
        np.ones(count * len(moments)),
        np.arange(count) * len(moments),
        np.ones(count),
        np.zeros(count),
        np.zeros((count, len(MEMORY_TERMS))),
        np.zeros((count, len(MEMORY_TERMS))),
        np.zeros(count),
    )
