"""Asynchronous schedules: nobody waits at the end of a step; each is an order and a weight rule.

After the last backward of a step a rank updates at once, while micro-batches of the next steps
are on their way.  Three orders:

    no flush     1F1B: F(m) follows B(m - (S - r)) on rank r
    pipelined    an F and a B of every stage in each tick: F(m) follows B(m - 2 (S - 1 - r) - 1),
                 so that more is in flight and no stage ever waits
    nF1B         M forwards, then one backward of a whole step, by turns

    S = 2, M = 1, three steps, one second for F and for U, two for B:
    rank 0  F0 F1 .  .  B0 B0 U0 F2 B1 B1 U1 .  B2 B2 U2
    rank 1  .  F0 B0 B0 U0 F1 B1 B1 U1 F2 B2 B2 U2 .  .

Where a stage is on several ranks, micro-batches go to them in turn (`round_robin`):

    S = 2, M = 2, three steps; seconds of stage 0: two for F, four for B; of stage 1: half
    rank 0  F0.0 -    F0.2 -    .    B0.0 -    -    -    .    .    .    F0.4 -    B0.2 -    -
    rank 1  F0.1 -    F0.3 -    .    .    .    .    B0.1 -    -    -    F0.5 -    B0.3 -    -
    rank 2  .    .    F1.0 B1.0 -    F1.1 B1.1 -    F1.2 B1.2 -    F1.3 B1.3 -    F1.4 B1.4 -

Bubble, in seconds, for equal stages, free links and u = 0, in the whole window, as it fills and
drains only once: (S - 1) * (f + b) without a flush.

weight_rule.py says which versions the rules read.
"""

from typing import Literal

import numpy as np

from penstock.errors import ScheduleError
from penstock.schedule import weight_rule as rules
from penstock.schedule.orders import Row, arrange
from penstock.schedule.schedule import Schedule
from penstock.schedule.weight_rule import InFlight, WeightRule

Form = Literal["weights", "velocity"]  # of linear weight prediction


def pipedream(num_stages: int, num_micro_batches: int, *, num_steps: int = 4) -> Schedule:
    """Return 1F1B without a flush, with weight stashing.

    With one micro-batch a step, rank r holds S - r versions of its weights:
    w_r(t+1) = w_r(t) - update(gradient at w_0(t-S+1), w_1(t-S+2), ..., w_{S-1}(t)).
    Source: arXiv:1806.03377, section 3.3.
    """
    sizes = num_stages, num_micro_batches, num_steps
    return _no_flush(pipedream.__name__, rules.STASHING, rules.as_1f1b, sizes)


def vertical_sync(num_stages: int, num_micro_batches: int, *, num_steps: int = 4) -> Schedule:
    """Return 1F1B without a flush; a micro-batch reads one version at all stages.

    With one micro-batch a step: W(t+1) = update(W(t), gradient at W(t-S+1)).
    Source: arXiv:1806.03377, section 3.3.
    """
    sizes = num_stages, num_micro_batches, num_steps
    return _no_flush(vertical_sync.__name__, rules.VERTICAL_SYNC, rules.as_1f1b, sizes)


def pipemare(
    num_stages: int,
    num_micro_batches: int,
    *,
    num_steps: int = 4,
    decay: float = rules.DISCREPANCY.decay,
    rescale_steps: int = rules.DISCREPANCY.rescale_steps,
    warm_up_steps: int = rules.DISCREPANCY.warm_up_steps,
) -> Schedule:
    """Return 1F1B without a flush on the newest weights, with PipeMare's two remedies.

    One version is alive.  The learning rate is divided by the staleness at first, and B reads
    weights that are corrected towards those that F has read.  The paper's D is `decay`; K is
    `rescale_steps`, in which the rate becomes the full one; synchronous steps come first.
    Raises:   ScheduleError: the decay is not from 0 to below 1, or a number of steps negative.
    Source: arXiv:1910.05124, sections 3.1 and 3.2, with the delays of this order.
    """
    sizes = num_stages, num_micro_batches, num_steps
    rule = rules.discrepancy(decay, rescale_steps, warm_up_steps)
    return _no_flush(pipemare.__name__, rule, rules.as_1f1b, sizes)


def spec_train(num_stages: int, num_micro_batches: int, *, num_steps: int = 4) -> Schedule:
    """Return 1F1B without a flush; F and B read the weights that the optimizer is expected to make.

    Both predict to the end of the micro-batch's round trip: with one micro-batch a step stage s
    predicts S - 1 - s + s // 2 updates ahead in F, and s // 2 in B.
    Source: arXiv:1809.02839, section 3.2.
    """
    sizes = num_stages, num_micro_batches, num_steps
    return _no_flush(spec_train.__name__, rules.SPECULATIVE, rules.as_1f1b, sizes)


def x_pipe(num_stages: int, num_micro_batches: int, *, num_steps: int = 4) -> Schedule:
    """Return 1F1B without a flush; all micro-batches of a step read one prediction, as F and as B.

    Source: arXiv:1911.04610, section 3.3, with the version differences of this order: those of
    spec_train, for the first micro-batch of the step.
    """
    sizes = num_stages, num_micro_batches, num_steps
    return _no_flush(x_pipe.__name__, rules.BELLWETHER, rules.as_1f1b, sizes)


def delayed_gradients(num_stages: int, num_micro_batches: int, *, num_steps: int = 4) -> Schedule:
    """Return the pipelined order with stashing: gradients are delayed by 2 (S - 1 - s).

    Source: arXiv:2108.06629 (LayerPipe), the delays by retiming of arXiv:2512.08160.
    """
    sizes = num_stages, num_micro_batches, num_steps
    return _no_flush(delayed_gradients.__name__, rules.DELAYED, rules.as_pipelined, sizes)


def pipelined_backprop(num_stages: int, num_micro_batches: int, *, num_steps: int = 4) -> Schedule:
    """Return the pipelined order on the newest weights: F and B read different ones.

    Source: arXiv:2003.11666, section 2.
    """
    sizes = num_stages, num_micro_batches, num_steps
    return _no_flush(pipelined_backprop.__name__, rules.PIPELINED, rules.as_pipelined, sizes)


def spike_compensation(num_stages: int, num_micro_batches: int, *, num_steps: int = 4) -> Schedule:
    """Return pipelined backpropagation whose updates make up for the delay.

    Source: arXiv:2003.11666, section 3.1.
    """
    sizes = num_stages, num_micro_batches, num_steps
    return _no_flush(spike_compensation.__name__, rules.COMPENSATED, rules.as_pipelined, sizes)


def weight_prediction(
    num_stages: int, num_micro_batches: int, *, num_steps: int = 4, form: Form = "weights"
) -> Schedule:
    """Return pipelined backpropagation with linear weight prediction.

    T is the number of updates until B.  With `form` "weights" F reads w(t) + T (w(t) - w(t-1)),
    with "velocity" w(t) - T * rate * v(t), v the momentum.
    Source: arXiv:2003.11666, section 3.2.
    """
    sizes = num_stages, num_micro_batches, num_steps
    rule = rules.PREDICTED if form == "weights" else rules.FORESEEN
    return _no_flush(weight_prediction.__name__, rule, rules.as_pipelined, sizes)


def prediction_with_compensation(
    num_stages: int, num_micro_batches: int, *, num_steps: int = 4, form: Form = "weights"
) -> Schedule:
    """Return pipelined backpropagation with both; `form` as in `weight_prediction`.

    Source: arXiv:2003.11666, section 3.3.
    """
    name, sizes = prediction_with_compensation.__name__, (num_stages, num_micro_batches, num_steps)
    rule = rules.PREDICTED_COMPENSATED if form == "weights" else rules.FORESEEN_COMPENSATED
    return _no_flush(name, rule, rules.as_pipelined, sizes)


def timeprest(
    num_stages: int, num_micro_batches: int, *, num_steps: int = 4, backward_slots: int = 1
) -> Schedule:
    """Return nF1B on the newest weights: M forwards and one backward of the whole step by turns.

    The backward is one action, of all micro-batches of the step, and takes as long as
    `backward_slots` forwards of a micro-batch.  Stage s begins min(1 + backward_slots, M) forwards
    earlier than the next one, the fewest with which none waits once the pipeline is full.  One
    version is alive: F of micro-batch j of step t reads version
    floor((t M + j - (S - 1 - s) min(1 + backward_slots, M)) / M), from 0 on, and B version t.
    Raises:   ScheduleError: `backward_slots` is not from 1 to 999999999.
    Source: arXiv:2410.14312, section 3 (nF1B).
    """
    rule = rules.newest(backward_slots)
    m, step = np.arange(num_steps * num_micro_batches), np.arange(num_steps)
    first = step * num_micro_batches
    orders = arrange(
        (
            Row("B", rank, first, 3 * (first + num_micro_batches + early)),
            Row("U", rank, step, 3 * (first + num_micro_batches + early) + 1),
            Row("F", rank, m, 3 * m + 2),
        )
        for rank in range(num_stages)
        for early in [rules.earlier(rank, num_stages, num_micro_batches, backward_slots)]
    )
    sizes = num_stages, num_micro_batches
    return Schedule(*sizes, orders, num_steps, rule, timeprest.__name__, num_micro_batches)


def round_robin(
    num_stages: int,
    num_micro_batches: int,
    *,
    num_steps: int = 4,
    ranks: int | str = 2,
    depth: rules.Depth = "noam",
) -> Schedule:
    """Return 1F1B without a flush, with stashing; ranks of a stage take turns.

    `ranks` are those of each stage, as PipeDream's paper writes them: 15-1; stages not named are on
    one.  Of n ranks the (m % n)-th does micro-batch m, forward and backward; n micro-batches are a
    round.  After its last backward come the updates for it: only there these ranks wait for each
    other.  With `depth` "noam", ceil(ranks from here on / n) rounds are in flight; with "full" so
    many that a micro-batch takes the most of (f + b) / n, whatever f and b of each stage are.

    Raises:   ScheduleError: a stage is on no rank, or more stages are named than there are.
    Source: arXiv:1806.03377, section 3.2 (1F1B-RR), and the authors' runtime.
    """
    rule = rules.round_robin(_ranks_of(ranks), depth)
    m, step = np.arange(num_steps * num_micro_batches), np.arange(num_steps)
    rows: list[tuple[Row, ...]] = []
    for stage, (size, in_flight) in enumerate(rules.rounds_of(rule.ranks, num_stages, depth)):
        ends = ((step + 1) * num_micro_batches - 1) // size  # the round with a step's last one
        for turn in range(size):
            own = m[turn::size]
            rows.append(
                (
                    Row("B", stage, own, 3 * (own // size)),
                    Row("U", stage, step, 3 * ends + 1),
                    Row("F", stage, own, 3 * (own // size - in_flight) + 2),
                )
            )
    name = round_robin.__name__
    return Schedule(num_stages, num_micro_batches, arrange(rows), num_steps, rule, name)


def _ranks_of(given: int | str) -> tuple[int, ...]:
    """Return the ranks of stages that `given` says, like 15-1.

    Raises:   ScheduleError: it says none.
    """
    words = str(given).split("-")
    if not all(word.isdecimal() and len(word) < 10 for word in words):
        hint = "write the ranks of each stage: 15-1"
        raise ScheduleError(f"the stages are on {given!r} ranks", hint=hint)
    return tuple(map(int, words))


ASYNCHRONOUS = (
    pipedream,
    vertical_sync,
    round_robin,
    pipemare,
    spec_train,
    x_pipe,
    timeprest,
    delayed_gradients,
    pipelined_backprop,
    spike_compensation,
    weight_prediction,
    prediction_with_compensation,
)


def _no_flush(
    name: str, rule: WeightRule, in_flight: InFlight, sizes: tuple[int, int, int]
) -> Schedule:
    """Return the schedule in which F(m) follows B(m - in_flight) on every rank."""
    num_stages, num_micro_batches, num_steps = sizes
    m, step = np.arange(num_steps * num_micro_batches), np.arange(num_steps)
    last = (step + 1) * num_micro_batches - 1
    orders = arrange(
        (
            Row("B", rank, m, 3 * m),
            Row("U", rank, step, 3 * last + 1),
            Row("F", rank, m, 3 * (m - in_flight(rank, num_stages)) + 2),
        )
        for rank in range(num_stages)
    )
    return Schedule(num_stages, num_micro_batches, orders, num_steps, rule, name)
