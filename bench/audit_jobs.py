"""The jobs of bench/audit.py: those of the examples, with steps of some ten milliseconds.

An audit takes one or two steps' time, so that a share of 1 % pays for three in a thousand steps.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import nn

from penstock.job import Job, load_job

EXAMPLES = Path(__file__).parent.parent / "examples"
MICRO_BATCHES = 2
WIDTH, HEADS, BLOCKS = 64, 4, 4


def gpt() -> Job:
    """Return the byte-level GPT of examples/gpt.py, a third as wide and half as deep."""
    job = load_job(f"{EXAMPLES / 'gpt.py'}")
    kind: Callable[..., nn.Module] = job.model
    model = partial(kind, WIDTH, HEADS, BLOCKS)
    return replace(job, model=model, micro_batches=MICRO_BATCHES, validation=None, facts=None)


def resnet() -> Job:
    """Return the ResNet of examples/hf.py."""
    return replace(load_job(f"{EXAMPLES / 'hf.py'}:resnet"), micro_batches=MICRO_BATCHES)


def llama() -> Job:
    """Return the Llama of examples/hf.py."""
    return replace(load_job(f"{EXAMPLES / 'hf.py'}:llama"), micro_batches=MICRO_BATCHES)
