"""Formulas: what planners take for the seconds of a 1F1B step, instead of simulating it.

Each is given the seconds of F and of B at every stage, of a message from a stage to the next one
(as long back), and the number of micro-batches; `t` is F + B of a stage.  Only what they say of
the pipeline is here: no sums over replicas, no updates, one micro-batch size.

Read in the source or the paper named; what only a planner's own code knows (its profile, its
network) is given.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]


class Pipeline(NamedTuple):
    """What a formula is given.  `message_s` is one shorter than the others."""

    forward_s: Floats
    backward_s: Floats
    message_s: Floats
    num_micro_batches: int


Formula: TypeAlias = Callable[[Pipeline], float]


def alpa(given: Pipeline) -> float:
    """Return sum(t) + (m - 1) * max(t).

    Source: arXiv:2201.12023, equation 2.
    """
    t = given.forward_s + given.backward_s
    return float(t.sum() + (given.num_micro_batches - 1) * t.max())


def metis(given: Pipeline) -> float:
    """Return sum(t) + (m - 1) * max(t) + the messages of one micro-batch, there and back.

    Source: "Metis: Fast Automatic Distributed Training on Heterogeneous GPUs", ATC 2024.
    """
    return alpa(given) + 2 * float(given.message_s.sum())


def megatron(given: Pipeline) -> float:
    """Return (m + p - 1) * mean(t): ideal time and bubble of equal stages.

    Source: arXiv:2104.04473, section 2.2.1.
    """
    t = given.forward_s + given.backward_s
    return float((given.num_micro_batches + len(t) - 1) * t.mean())


def slowest(given: Pipeline) -> float:
    """Return (m + p - 1) * max(t): as if all stages were like the slowest.

    Source: nnScaler's and many others' stage cost, max * (m - 1 + p).
    """
    t = given.forward_s + given.backward_s
    return float((given.num_micro_batches + len(t) - 1) * t.max())


def sailor(given: Pipeline) -> float:
    """Return sum(t) + sum(c) + (m - 1) * max(t + c).

    c is what a stage sends, F on and B back; at both ends it counts its one message twice, the
    first stage only if there are more than 3.

    Source: github.com/eth-easl/sailor, get_time_per_pipeline and estimate_p2p_pipeline_times.
    """
    t, message_s = given.forward_s + given.backward_s, given.message_s
    sent_s = np.zeros(len(t))
    if len(t) > 1:
        sent_s[1:-1] = message_s[:-1] + message_s[1:]
        sent_s[0] = message_s[0] * (2 if len(t) > 3 else 1)
        sent_s[-1] = 2 * message_s[-1]
    return float(t.sum() + sent_s.sum() + (given.num_micro_batches - 1) * (t + sent_s).max())


def galvatron(given: Pipeline) -> float:
    """Return the larger of sum(t) + (m - 1) * t[last] and a walk along the first stage.

    The walk: warm-up max(w * t[0], sum(t[1:])) / 3, cool-down twice that, and between them
    (m + 1 - p) * t[0], with w = min(p, m) - 1; a third of t is taken for F.

    Source: github.com/PKU-DAIR/Hetu-Galvatron, pipeline_costmodel, where p2p is asynchronous.
    """
    t, m = given.forward_s + given.backward_s, given.num_micro_batches
    fill_s = max((min(len(t), m) - 1) * t[0], t[1:].sum())
    first_s = fill_s + t[0] * max(0, m + 1 - len(t))
    return float(max(t.sum() + (m - 1) * t[-1], first_s))


def dapple(given: Pipeline) -> float:
    """Return warm-up, steady state and cool-down of the pivot stage q.

    sum(F[: q + 1]) + (m - 1) * (F[q] + B[q]) + sum(B[: q + 1]), where messages are stages too.
    q begins at the last stage and moves to an earlier one s whose steady state is longer than
    q's and a pass through what lies between them.

    Source: arXiv:2007.01045, equations 1 to 3, without all-reduces.
    """
    forward_s, backward_s = (
        _with_messages(each, given.message_s) for each in (given.forward_s, given.backward_s)
    )
    t, rounds = forward_s + backward_s, given.num_micro_batches - 1
    pivot = len(t) - 1
    for stage in range(len(t) - 2, -1, -1):
        if rounds * t[stage] > rounds * t[pivot] + t[stage + 1 : pivot].sum():
            pivot = stage
    return float(t[: pivot + 1].sum() + rounds * t[pivot])


def _with_messages(stages_s: Floats, message_s: Floats) -> Floats:
    """Return stages and messages in turn."""
    both = np.empty(len(stages_s) + len(message_s))
    both[0::2], both[1::2] = stages_s, message_s
    return both


def pipedream(given: Pipeline) -> float:
    """Return m * max(t): a pipeline that never drains, limited by its slowest stage.

    Its message time is compared with t, not added; here it is never the larger one.

    Source: "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, section 3.1.
    """
    t = given.forward_s + given.backward_s
    return float(given.num_micro_batches * max(t.max(), 2 * given.message_s.max(initial=0.0)))


FORMULAS: tuple[Formula, ...] = (
    alpa,
    metis,
    megatron,
    slowest,
    sailor,
    galvatron,
    dapple,
    pipedream,
)
