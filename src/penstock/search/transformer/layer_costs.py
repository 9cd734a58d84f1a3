"""Layer costs: seconds and bytes of each block on a device, for many runs at once.

A layer is a block; the first also has the embedding, the last the head.  Made of the closed form
of a pipeline with one block on each stage and one micro-batch in flight.

Ignores:  that blocks together on a stage overlap their lanes otherwise than alone; seconds of
          messages between stages, which depend on the cut; that one stage with both ends has a
          tied head only once, and that fewer ranks than a host has need fewer buffers: then the
          bytes are too many.
"""

from typing import NamedTuple, cast

import numpy as np

from penstock.estimate.constants import Constants
from penstock.estimate.datasheet import Datasheet
from penstock.estimate.peak_memory import (
    activation_bytes,
    repeated_bytes,
    stage_memory,
    state_bytes,
)
from penstock.estimate.runs import Runs, time_terms_of
from penstock.estimate.training_run import TrainingRun
from penstock.estimate.work import stage_keys
from penstock.estimate.work_terms import Floats


class LayerCosts(NamedTuple):
    """Of every run and layer, [run, layer]; `fixed_bytes`, [run], are of a stage however long."""

    seconds: Floats
    state_bytes: Floats
    kept_bytes: Floats
    fixed_bytes: Floats


def layer_costs(
    runs: Runs, device: Datasheet, constants: tuple[Constants, Constants]
) -> LayerCosts:
    """Return the costs of every block of the model on `device`; stages of `runs` do not matter.

    constants   of time and of memory
    """
    blocks = runs.model.blocks
    alone = runs.restaged((1,) * blocks, (device,) * blocks)
    as_one = cast("TrainingRun", alone)
    keys = stage_keys(as_one)
    kinds = list(dict.fromkeys(keys))
    places = [keys.index(kind) for kind in kinds]
    column = [kinds.index(key) for key in keys]
    made = time_terms_of(alone, messages=False)
    seconds = made.stage_s(constants[0].array).reshape(len(runs), -1)
    held = [_bytes(as_one, at, constants[1]) for at in places]
    kept = np.stack([each[1] for each in held], axis=1)
    own = np.stack([each[0] for each in held], axis=1) - kept
    states = constants[1].values["states"] * state_bytes(as_one, 0)
    fixed = own[:, 0] - states
    return LayerCosts(seconds[:, column], (own - fixed[:, None])[:, column], kept[:, column], fixed)


def _bytes(run: TrainingRun, at: int, constants: Constants) -> tuple[Floats, Floats]:
    """Return the most bytes of a stage, and of those what each micro-batch in flight keeps."""
    moments = [
        sum(np.asarray(term) * each for term, each in zip(moment, constants.array, strict=True))
        for moment in stage_memory(run, at)
    ]
    again = np.where(np.asarray(run.recompute) == "full", repeated_bytes(run, at), 0.0)
    kept = constants.values["activations"] * (activation_bytes(run, at) - again)
    return np.max(np.stack(moments), axis=0), kept
