"""Memory: peak bytes of a run, as the largest over its stages and their moments.

    states       weights, gradients, optimizer: no constant, they are exact
    activations  what the forwards of all micro-batches in flight keep for their backwards
    logits       of the last stage, as many bytes of each as the loss keeps
    gradient     of the largest matrix, in 32 bits, made on top of everything else
    buffers      GB, once; where all that the device has in use was measured, its context and
                 buffers of messages to every other rank of the host

In flight on stage s of S under 1F1B are min(S - s, M) micro-batches; a total is never divided
by the number of stages.

Ignores:  fragmentation; offloading.
Source:   arXiv:2205.05198, section 4; arXiv:1910.02054 (sharding).
"""

import functools
from collections.abc import Sequence

import numpy as np

from penstock.estimate.either import among, ever, least, most, where
from penstock.estimate.training_run import TrainingRun
from penstock.estimate.work import block_kinds, distinct_stages, is_mixed, stage_parameters
from penstock.estimate.work_terms import Terms
from penstock.units import GB

_SCORE_BYTES = {"written": 5, "eager": 5, "eager in 32 bits": 8}  # kept of a score
_LOGIT_BYTES = 10, 4  # of a logit: 16 bits, 32 and softmax; in one kernel the softmax
_RESERVED = 1.06  # of what tensors come and go in, the allocator keeps more of a device
_CONTEXT = 0.6  # GB of a device's context, its kernels and libraries
MEMORY_TERMS = ("states", "activations", "logits", "gradient", "buffers")


def memory_terms(runs: Sequence[TrainingRun]) -> Terms:
    """Return the terms of peak memory of `runs`: bytes, or numbers times bytes to be fitted."""
    rows: list[list[float]] = []
    starts: list[int] = []
    for run in runs:
        starts.append(len(rows))
        for at, _ in distinct_stages(run):
            rows += stage_memory(run, at)
    ones = np.ones(len(runs))
    return Terms(
        MEMORY_TERMS,
        np.array(rows, dtype=np.float64)[None],
        np.ones(len(rows)),
        np.array(starts, dtype=np.int64),
        ones,
        0 * ones,
        np.zeros((len(runs), len(MEMORY_TERMS))),
        np.zeros((len(runs), len(MEMORY_TERMS))),
        0 * ones,
    )


def stage_memory(run: TrainingRun, at: int) -> list[list[float]]:
    """Return the terms of stage `at` in the moments that can be its peak.

    Without full recompute all are there at once.  With it there are two moments: the loss, when
    of each block only its input is held; and the last repeated block, when the logits are gone.
    Monotone in the micro-batch: only activations and logits grow, and both in proportion.
    """
    last = at == run.pipe - 1
    logits = run.tokens * run.model.vocabulary / run.tensor if last else 0.0
    logits *= _LOGIT_BYTES[run.fused_loss]
    reserved = _RESERVED if run.on_device else 1.0
    logits *= reserved
    states, held = state_bytes(run, at), reserved * activation_bytes(run, at)
    gradient = 4 * run.model.largest_matrix / run.tensor
    together = least(run.ranks, run.devices[at].ranks_per_host)
    peers = _CONTEXT + together - 1 if run.on_device else 1
    buffers = 1.0 * GB * peers
    is_repeated = run.recompute == "full"
    if ever(is_repeated) and last:
        inputs = where(is_repeated, held - reserved * repeated_bytes(run, at), held)
        in_loss = [states, inputs, logits, where(is_repeated, 0.0, gradient), buffers]
        return [in_loss, [states, held, where(is_repeated, 0.0, logits), gradient, buffers]]
    return [[states, held, logits, gradient, buffers]]


def state_bytes(run: TrainingRun, at: int) -> float:
    """Return the bytes of weights (2), gradients and optimizer on one rank.

    Sharding divides the optimizer's, then the gradients', then the weights' bytes by the ranks
    that hold the same numbers: those of `data`, for experts those that share none.
    """
    own, experts = stage_parameters(run, at)
    replicas = run.data * run.context
    copies = most(1, replicas * run.tensor // run.expert)
    total = 0.0
    for numbers, ranks in ((own, replicas), (experts, copies)):
        weights = where(run.sharding == "full", 2 / ranks, 2.0)
        is_sharded = among(run.sharding, ("full", "gradients"))
        gradients = run.gradient_bytes / where(is_sharded, ranks, 1)
        optimizer = run.optimizer_bytes / where(run.sharding == "none", 1, ranks)
        total += numbers * (weights + gradients + optimizer)
    return total


def activation_bytes(run: TrainingRun, at: int) -> float:
    """Return the bytes that the micro-batches in flight keep on one rank of stage `at`.

    Interleaving keeps (1 + (S - 1) / (S * v)) as much as the first stage of 1F1B.
    """
    in_flight = 1.0 * least(run.pipe - at, run.num_micro_batches)
    more = 1 + (run.pipe - 1) / (run.pipe * run.interleave)
    in_flight *= where(run.interleave > 1, more, 1.0)
    one = run.tokens * run.model.hidden * 2 / where(run.sequence_parallel, run.tensor, 1)
    kept = sum(_block_bytes(run, block) * count for block, count in block_kinds(run, at))
    all_kept = in_flight * (kept + (2 * one if at == 0 else 0.0))
    # the input of every block, and one block as a whole
    inputs = in_flight * run.stage_blocks[at] * one + repeated_bytes(run, at)
    return where(run.recompute == "full", inputs, all_kept)


def repeated_bytes(run: TrainingRun, at: int) -> float:
    """Return the bytes that the largest block of a stage keeps while it is repeated, in full."""
    blocks = (_block_bytes(run, block) for block, _ in block_kinds(run, at))
    return functools.reduce(most, blocks, 0.0)


def _block_bytes(run: TrainingRun, block: int) -> float:
    """Return the bytes that one block keeps of one micro-batch.

    A word of 2 bytes for: in- and output of both norms, queries, keys, values, the result of
    attention, in- and output of the gate or GELU; the masks of two dropouts, and softmax, mask
    and result, where scores are written.
    """
    model, experts = run.model, run.model.experts
    split = where(run.sequence_parallel, run.tensor, 1)
    between = 8 * model.hidden
    wide = model.heads * model.per_head
    if model.latent is None:
        inner = 4 * (wide + (model.key_heads or model.heads) * model.per_head)
    else:
        between += 4 * (model.latent.query_rank + model.latent.key_rank)
        inner = 12 * wide + 4 * model.heads * model.latent.rotary
    forward = 2 * (2 + model.gated)
    if experts is not None and is_mixed(run, block):
        inner += experts.chosen * (forward * experts.width + 4 * model.hidden)
        inner += forward * experts.shared_width
    else:
        inner += forward * model.feed_forward
    if not model.is_flash:
        between += 2 * model.hidden
        scores = _SCORE_BYTES[model.scores] * model.sequence * model.heads
        inner += where(run.recompute != "selective", scores, 0)
    return run.tokens * (between / split + inner / run.tensor)
