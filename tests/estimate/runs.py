"""Runs for the tests: any GPT that divides, with any degrees that fit."""

from dataclasses import replace

from hypothesis import strategies as st

from penstock.estimate import TrainingRun
from penstock.estimate.datasheet import DEVICES, find_device
from penstock.estimate.training_run import even
from penstock.estimate.transformer import gpt

A100 = find_device("a100-80")


def run_of(hidden=1024, blocks=8, pipe=1, *, device=A100, sequence=512, heads=16, **more):
    """Return a run of a GPT; degrees and sizes that are not given are small."""
    model = gpt(hidden, blocks, heads, sequence=sequence, vocabulary=51200)
    model = replace(model, scores=more.pop("scores", model.scores))
    sizes = {"tensor": 1, "data": 1, "micro_batch": 1, "num_micro_batches": 4} | more
    cluster = sizes.pop("cluster", "tests")
    return TrainingRun(model, cluster, even(blocks, pipe), (device,) * pipe, **sizes)


sizes = st.fixed_dictionaries(
    {
        "hidden": st.sampled_from([512, 1024, 2048, 4096]),
        "blocks": st.sampled_from([8, 12, 24]),
        "pipe": st.sampled_from([1, 2, 4, 8]),
        "tensor": st.sampled_from([1, 2, 4, 8, 16]),
        "data": st.sampled_from([1, 2, 8, 64]),
        "micro_batch": st.integers(1, 8),
        "num_micro_batches": st.integers(1, 64),
        "interleave": st.integers(1, 3),
        "recompute": st.sampled_from(["none", "selective", "full"]),
        "sharding": st.sampled_from(["none", "optimizer", "gradients", "full"]),
        "sequence_parallel": st.booleans(),
        "device": st.sampled_from(DEVICES),
    }
)
