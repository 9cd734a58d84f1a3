"""Asynchronous training as the papers write it: plain loops over versions of plain matrices.

The model is a chain of N layers tanh([x, 1] W^T), a layer for each stage.  w[k][t] are the weights
of stage k after t updates, v[k][t] the velocity then.  Mini-batch t has M micro-batches, counted
by m through the whole training.  Nothing here comes from the product: the version differences are
typed from the papers, for N = 2, 3, 4 and 8, k = 0 being the first stage; TiMePReSt's are played.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Table = dict[int, tuple[int, ...]]
WIDTH, SAMPLES, RATE, MOMENTUM = 5, 2, 0.3, 0.9

# Micro-batches that enter the pipeline between F and B of one of them, at each stage.
PIPEDREAM: Table = {
    2: (1, 0),
    3: (2, 1, 0),
    4: (3, 2, 1, 0),
    8: (7, 6, 5, 4, 3, 2, 1, 0),
}
VERTICAL_SYNC: Table = {
    2: (1, 1),
    3: (2, 2, 2),
    4: (3, 3, 3, 3),
    8: (7, 7, 7, 7, 7, 7, 7, 7),
}
# 1F1B-RR: ranks of each stage, and rounds in flight there.  NOAM: ceil(ranks from it on / its own).
FIRST_ON_TWO: Table = {2: (2, 1), 3: (2, 1, 1), 4: (2, 1, 1, 1), 8: (2, 1, 1, 1, 1, 1, 1, 1)}
FIRST_ON_TWO_NOAM: Table = {2: (2, 1), 3: (2, 2, 1), 4: (3, 3, 2, 1), 8: (5, 7, 6, 5, 4, 3, 2, 1)}
UNLIKE: Table = {2: (2, 3), 3: (2, 3, 1), 4: (2, 3, 1, 1), 8: (2, 3, 1, 1, 1, 1, 1, 1)}
UNLIKE_NOAM: Table = {2: (3, 1), 3: (3, 2, 1), 4: (4, 2, 2, 1), 8: (6, 3, 6, 5, 4, 3, 2, 1)}
UNLIKE_FULL: Table = {  # micro-batches in flight, from the last stage on
    2: (4, 1),  # 3; 3 + 2 + 3 = 8
    3: (6, 2, 1),  # 1; 1 + 3 + 2 = 6; 6 + 2 + 3 -> 12
    4: (7, 3, 2, 1),  # 1; 2; 2 + 3 + 2 -> 9; 9 + 2 + 3 = 14
    8: (9, 4, 6, 5, 4, 3, 2, 1),  # 1, ... 6; 6 + 3 + 2 -> 12; 12 + 2 + 3 -> 18
}
LAYERPIPE: Table = {  # 2 S(l), S(l) the stages behind
    2: (2, 0),
    3: (4, 2, 0),
    4: (6, 4, 2, 0),
    8: (14, 12, 10, 8, 6, 4, 2, 0),
}
# Version differences of SpecTrain: floor(k / 2) + N - k - 1, and floor(k / 2).
SPECTRAIN_FORWARD: Table = {
    2: (1, 0),
    3: (2, 1, 1),
    4: (3, 2, 2, 1),
    8: (7, 6, 6, 5, 5, 4, 4, 3),
}
SPECTRAIN_BACKWARD: Table = {
    2: (0, 0),
    3: (0, 0, 1),
    4: (0, 0, 1, 1),
    8: (0, 0, 1, 1, 2, 2, 3, 3),
}


class Past(NamedTuple):
    """All that was: weights, velocities and what else is kept, by stage and updates done."""

    num_stages: int
    per_step: int  # M
    w: list[list[Array]]
    v: list[list[Array]]
    other: list[list[Array]]  # Adam's second moment, PipeMare's average


Reads = Callable[[Past, int, int, int], tuple[Array, Array]]  # past, stage, micro-batch, drained at
Update = Callable[[Past, int, int, Array], tuple[Array, Array, Array]]  # past, stage, t, gradient


# -- what F and B read ----------------------------------------------------------------------------


def synchronous(past: Past, k: int, m: int, drained: int) -> tuple[Array, Array]:
    now = past.w[k][m // past.per_step]
    return now, now


def stashed(table: Table) -> Reads:
    """Gradient at w_k^(t - d): the backward pass has the weights of its forward pass."""

    def reads(past: Past, k: int, m: int, drained: int) -> tuple[Array, Array]:
        old = past.w[k][max(0, (m - table[past.num_stages][k]) // past.per_step)]
        return old, old

    return reads


def in_rounds(ranks: Table, in_flight: Table) -> Reads:
    """1F1B-RR: a stage on n ranks takes n micro-batches at once, and updates when all are back.

    Round r of a stage begins when round r - (rounds in flight) has been updated with, and reads
    that on all ranks.  A window begins a round.
    """

    def reads(past: Past, k: int, m: int, drained: int) -> tuple[Array, Array]:
        n, size = ranks[past.num_stages][k], past.per_step
        own = (m - drained * size) // n
        back = own - in_flight[past.num_stages][k]  # the last round that is back
        old = past.w[k][max(0, drained + (back + 1) * n // size)]
        return old, old

    return reads


def double_buffered(past: Past, k: int, m: int, drained: int) -> tuple[Array, Array]:
    """W(t+1) = W(t) - nu * gradient at W(t-1)."""
    old = past.w[k][max(0, m // past.per_step - 1)]
    return old, old


def unstashed(table: Table) -> Reads:
    """F and B each read the only version that there is."""

    def reads(past: Past, k: int, m: int, drained: int) -> tuple[Array, Array]:
        there = max(drained, (m - table[past.num_stages][k]) // past.per_step)
        return past.w[k][there], past.w[k][m // past.per_step]

    return reads


@cache
def nf1b(workers: int, size: int, steps: int) -> list[list[int]]:
    """Return for each worker the updates done when it does each forward, in TiMePReSt's nF1B.

    In every tick a worker does the backward of a whole mini-batch, if its gradient is there, or
    else a forward of one micro-batch, but never has more mini-batches under way than workers are
    behind it, itself counted.
    """
    forwards, backwards = [0] * workers, [0] * workers
    seen: list[list[int]] = [[] for _ in range(workers)]
    while backwards[0] < steps:
        f, b = tuple(forwards), tuple(backwards)
        for k in range(workers):
            is_last = k == workers - 1
            if f[k] >= (b[k] + 1) * size if is_last else b[k + 1] > b[k]:
                backwards[k] += 1
            elif (k == 0 or f[k - 1] > f[k]) and f[k] < size * min(steps, b[k] + workers - k):
                seen[k].append(b[k])
                forwards[k] += 1
    return seen


def newest(past: Past, k: int, m: int, drained: int) -> tuple[Array, Array]:
    """One version; the backward of a mini-batch is one operation, on the newest weights."""
    t, played = m // past.per_step, nf1b(past.num_stages, past.per_step, 40)
    there = drained + played[k][m - drained * past.per_step]
    return past.w[k][there], past.w[k][t]


def extrapolated(past: Past, k: int, m: int, drained: int) -> tuple[Array, Array]:
    """LWP in its weight form: w(t) + T (w(t) - w(t-1)), T the delay."""
    t = m // past.per_step
    there = max(drained, (m - LAYERPIPE[past.num_stages][k]) // past.per_step)
    now, before = past.w[k][there], past.w[k][max(0, there - 1)]
    return now + (t - there) * (now - before), past.w[k][t]


def by_velocity(past: Past, k: int, m: int, drained: int) -> tuple[Array, Array]:
    """LWP in its velocity form: w(t) - T * rate * v(t), T the delay."""
    t = m // past.per_step
    there = max(drained, (m - LAYERPIPE[past.num_stages][k]) // past.per_step)
    return past.w[k][there] - (t - there) * RATE * past.v[k][there], past.w[k][t]


def corrected(past: Past, k: int, m: int, drained: int) -> tuple[Array, Array]:
    """PipeMare, T2: B reads w - (tau_fwd - tau_bkwd) * delta, with tau_bkwd = 0."""
    t = m // past.per_step
    there = max(drained, (m - PIPEDREAM[past.num_stages][k]) // past.per_step)
    return past.w[k][there], past.w[k][t] - (t - there) * past.other[k][t]


def speculated(past: Past, k: int, m: int, drained: int) -> tuple[Array, Array]:
    """SpecTrain: W_t - s * lr * v_(t-1), s the version difference of F and of B."""
    n, size, t = past.num_stages, past.per_step, m // past.per_step
    first = m - PIPEDREAM[n][k]  # of the micro-batches whose updates F lacks
    there = max(drained, first // size)
    s_forward = (first + SPECTRAIN_FORWARD[n][k]) // size - there
    s_backward = (m + SPECTRAIN_BACKWARD[n][k]) // size - t
    forward = past.w[k][there] - s_forward * RATE * past.v[k][there]
    return forward, past.w[k][t] - s_backward * RATE * past.v[k][t]


ADAM_RATE, BETA1, BETA2, EPS = 0.02, 0.9, 0.999, 1e-8


def bellwether(past: Past, k: int, m: int, drained: int) -> tuple[Array, Array]:
    """XPipe: W_t - s * lr * m' / (sqrt(v') + eps), s that of a step's first micro-batch."""
    n, size, t = past.num_stages, past.per_step, m // past.per_step
    first = t * size - PIPEDREAM[n][k]
    there = max(drained, first // size)
    s_forward = (first + SPECTRAIN_FORWARD[n][k]) // size - there
    s_backward = (t * size + SPECTRAIN_BACKWARD[n][k]) // size - t
    forward = past.w[k][there] - s_forward * _adam(past, k, there)
    return forward, past.w[k][t] - s_backward * _adam(past, k, t)


def _adam(past: Past, k: int, t: int) -> Array:
    """Return what Adam's moments after t updates would take off the weights."""
    if t == 0:
        return np.zeros_like(past.w[k][0])
    first, second = past.v[k][t] / (1 - BETA1**t), past.other[k][t] / (1 - BETA2**t)
    return ADAM_RATE * first / (np.sqrt(second) + EPS)


# -- updates --------------------------------------------------------------------------------------


def momentum(past: Past, k: int, t: int, gradient: Array) -> tuple[Array, Array, Array]:
    velocity = MOMENTUM * past.v[k][t] + gradient
    return past.w[k][t] - RATE * velocity, velocity, past.other[k][t]


def smoothed(past: Past, k: int, t: int, gradient: Array) -> tuple[Array, Array, Array]:
    """SpecTrain's own velocity, that of torch's `dampening`, which begins with the gradient."""
    share = 1 - MOMENTUM if t else 1.0
    velocity = MOMENTUM * past.v[k][t] + share * gradient
    return past.w[k][t] - RATE * velocity, velocity, past.other[k][t]


def adam(past: Past, k: int, t: int, gradient: Array) -> tuple[Array, Array, Array]:
    first = BETA1 * past.v[k][t] + (1 - BETA1) * gradient
    second = BETA2 * past.other[k][t] + (1 - BETA2) * gradient**2
    root = np.sqrt(second / (1 - BETA2 ** (t + 1))) + EPS
    return past.w[k][t] - ADAM_RATE * first / (1 - BETA1 ** (t + 1)) / root, first, second


def spiked(past: Past, k: int, t: int, gradient: Array) -> tuple[Array, Array, Array]:
    """SC_D: w - eta (a v + b g), a = m^D, b = (1 - m^D) / (1 - m)."""
    delay = LAYERPIPE[past.num_stages][k] / past.per_step
    a, b = MOMENTUM**delay, (1 - MOMENTUM**delay) / (1 - MOMENTUM)
    velocity = MOMENTUM * past.v[k][t] + gradient
    return past.w[k][t] - RATE * (a * velocity + b * gradient), velocity, past.other[k][t]


def rescheduled(decay: float, annealed: int) -> Update:
    """PipeMare, T1: alpha / tau^p, p = 1 - min(t / K, 1); T2's average, gamma = D^(1 / tau)."""

    def update(past: Past, k: int, t: int, gradient: Array) -> tuple[Array, Array, Array]:
        tau = PIPEDREAM[past.num_stages][k] / past.per_step
        p = 1 - min(t / annealed, 1) if annealed else 0
        rate = RATE / max(1.0, tau) ** p
        velocity = MOMENTUM * past.v[k][t] + gradient
        new = past.w[k][t] - rate * velocity
        gamma = decay ** (1 / tau) if tau else 0.0
        return new, velocity, gamma * past.other[k][t] + (1 - gamma) * (new - past.w[k][t])

    return update


# -- training -------------------------------------------------------------------------------------

PAPERS: dict[str, tuple[Reads, Update]] = {
    "pipedream": (stashed(PIPEDREAM), momentum),
    "vertical_sync": (stashed(VERTICAL_SYNC), momentum),
    "round_robin": (in_rounds(FIRST_ON_TWO, FIRST_ON_TWO_NOAM), momentum),
    "round_robin(ranks=2-3)": (in_rounds(UNLIKE, UNLIKE_NOAM), momentum),
    "round_robin(ranks=2-3, depth=full)": (in_rounds(UNLIKE, UNLIKE_FULL), momentum),
    "double_buffered": (double_buffered, momentum),
    "delayed_gradients": (stashed(LAYERPIPE), momentum),
    "timeprest": (newest, momentum),
    "pipemare": (corrected, rescheduled(0.135, 100)),
    "pipemare(decay=0.5, rescale_steps=5)": (corrected, rescheduled(0.5, 5)),
    "spec_train": (speculated, smoothed),
    "x_pipe": (bellwether, adam),
    "pipelined_backprop": (unstashed(LAYERPIPE), momentum),
    "spike_compensation": (unstashed(LAYERPIPE), spiked),
    "weight_prediction": (extrapolated, momentum),
    "prediction_with_compensation": (extrapolated, spiked),
    "weight_prediction(form=velocity)": (by_velocity, momentum),
    "prediction_with_compensation(form=velocity)": (by_velocity, spiked),
}


def start(stage: int) -> Array:
    """Return the weights [out, in and bias] that stage `stage` begins with."""
    return np.random.default_rng(stage).normal(0, 0.6, (WIDTH, WIDTH + 1))


def batch(index: int) -> tuple[Array, Array]:
    """Return input and target of micro-batch `index`."""
    source = np.random.default_rng(1000 + index)
    return source.normal(size=(SAMPLES, WIDTH)), source.normal(0, 0.5, (SAMPLES, WIDTH))


def trained(
    schedule: str, num_stages: int, per_step: int, windows: Sequence[int], warm_up: int = 0
) -> list[Array]:
    """Return the weights of all stages after windows of so many steps; each begins drained.

    warm_up:  so many synchronous steps come first: PipeMare, T3; its average begins with them.
    """
    begin = [start(k) for k in range(num_stages)]
    past = Past(
        num_stages,
        per_step,
        [[w] for w in begin],
        [[np.zeros_like(w)] for w in begin],
        [[np.zeros_like(w)] for w in begin],
    )
    t = 0
    for length in (*[1] * warm_up, *windows):
        drained = t
        for _ in range(length):
            begins = synchronous, rescheduled(0.135, 0)
            reads, update = PAPERS[schedule] if t >= warm_up else begins
            total = [np.zeros_like(w) for w in begin]
            for m in range(t * per_step, (t + 1) * per_step):
                read = [reads(past, k, m, drained) for k in range(num_stages)]
                for k, gradient in enumerate(gradients(read, *batch(m))):
                    total[k] += gradient / per_step
            for k in range(num_stages):
                w, v, other = update(past, k, t, total[k])
                past.w[k].append(w)
                past.v[k].append(v)
                past.other[k].append(other)
            t += 1
    return [w[-1] for w in past.w]


def gradients(read: Sequence[tuple[Array, Array]], x: Array, target: Array) -> list[Array]:
    """Return those of the mean squared error: a pair is read forward and backward."""
    one = np.ones((len(x), 1))
    values = [x]
    for forward, _ in read:
        values.append(np.tanh(np.hstack([values[-1], one]) @ forward.T))
    back = 2 * (values[-1] - target) / target.size
    found: list[Array] = []
    for k in reversed(range(len(read))):
        back = back * (1 - values[k + 1] ** 2)
        found.insert(0, back.T @ np.hstack([values[k], one]))
        back = back @ read[k][1][:, :-1]
    return found
