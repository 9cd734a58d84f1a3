"""Closed forms and the simulation of every action give the same step, within 5 %."""

from dataclasses import replace

import numpy as np
import pytest

from penstock.estimate import MODELS, TrainingRun, load
from penstock.estimate.datasheet import find_device
from penstock.estimate.runs import time_terms_of
from penstock.estimate.training_run import Hiding, even
from penstock.estimate.work import distinct_stages
from penstock.estimate.work_terms import time_terms
from penstock.schedule.interleaved import interleaved
from penstock.schedule.one_f_one_b import one_f_one_b
from penstock.schedule.orders import KINDS
from penstock.search.transformer.exact_step import _split
from penstock.search.transformer.space import runs_of
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


@pytest.mark.parametrize(
    ("pipe", "count", "share"), [(4, 16, 0.05), (8, 32, 0.02), (8, 64, 0.05), (16, 64, 0.05)]
)
def test_messages_beside_1f1b_cost_what_the_simulation_of_each_says(pipe, count, share):
    """No stage has enough in flight to hide them all."""
    model, constants = MODELS["llama3-8b"], TIME.of("vtrain")
    choice = (1, 1, 1, count, 1, "none", "none", False)
    overlap = Hiding(pipe=True)

    def runs(across_bytes_per_s):
        device = replace(find_device("a100-80"), across_bytes_per_s=across_bytes_per_s)
        alone = replace(device, ranks_per_host=1)
        made = runs_of(model, even(model.blocks, pipe), (alone,) * pipe, [choice])
        return replace(made, overlap=overlap)

    bare = time_terms_of(runs(1e9), messages=False)
    stages = distinct_stages(runs(1e9))
    kinds = np.repeat(bare.stage_s(constants.array), [alike for _, alike in stages])
    message_s = share * kinds.max()
    size = 2 * model.sequence * model.hidden
    slow = runs(size * constants.values["across"] / message_s)
    seconds = np.zeros((1, len(KINDS), pipe))
    seconds[0, KINDS.index("F")], seconds[0, KINDS.index("B")] = kinds / 3, 2 * kinds / 3
    wires = np.full((1, pipe), message_s)
    exact = float(step_seconds(table_of(one_f_one_b(pipe, count)), seconds, wires)[0])
    exact += float(bare.once_s(constants.array)[0])
    assert float(time_terms_of(slow).of(constants.array)[0]) == pytest.approx(exact, rel=0.05)
