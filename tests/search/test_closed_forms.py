"""Closed forms and the simulation of every action give the same step, within 5 %."""

import numpy as np
import pytest

from penstock.estimate import MODELS, TrainingRun, load
from penstock.estimate.datasheet import find_device
from penstock.estimate.training_run import even
from penstock.estimate.work_terms import time_terms
from penstock.schedule.interleaved import interleaved
from penstock.schedule.one_f_one_b import one_f_one_b
from penstock.search.transformer.exact_step import _split
from penstock.simulate.many_candidates import step_seconds
from penstock.simulate.wait_table import table_of

TIME, _ = load()
SHAPES = [  # model, device, tensor, pipe, data, micro-batches, chunks, recompute
    ("llama3-8b", "a100-80", 1, 1, 8, 8, 1, "none"),
    ("llama3-8b", "a100-80", 2, 4, 2, 16, 1, "none"),
    ("llama3-8b", "h100", 1, 8, 4, 32, 2, "full"),
    ("llama3-70b", "h100", 8, 4, 4, 32, 1, "full"),
    ("llama3-70b", "h100", 8, 8, 2, 64, 2, "selective"),
    ("llama3-70b", "b200", 4, 5, 8, 20, 1, "none"),
    ("gpt3-175b", "a100-80", 8, 16, 8, 192, 1, "full"),
    ("gpt3-175b", "a100-80", 8, 8, 16, 96, 3, "full"),
    ("mixtral-8x7b", "h200", 1, 2, 16, 16, 1, "none"),
    ("opt-350", "gh200", 4, 4, 2, 32, 1, "none"),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_step_in_closed_form_is_that_of_its_schedule(shape):
    name, kind, tensor, pipe, data, count, chunks, recompute = shape
    model, device = MODELS[name], find_device(kind)
    run = TrainingRun(
        model, "shape", even(model.blocks, pipe), (device,) * pipe, tensor, data, 1, count,
        interleave=chunks, recompute=recompute,
    )  # fmt: skip
    constants = TIME.of("vtrain")
    seconds, once_s = _split(run, constants)
    schedule = (
        one_f_one_b(pipe, count)
        if chunks == 1
        else interleaved(pipe * chunks, count, num_ranks=pipe)
    )
    spread = np.tile(seconds, (1, chunks)) / chunks
    message_s = np.zeros((1, pipe * chunks))
    exact = float(step_seconds(table_of(schedule), spread[None], message_s)[0]) + once_s
    closed = float(time_terms([run]).of(constants.array)[0])
    assert closed == pytest.approx(exact, rel=0.05)
