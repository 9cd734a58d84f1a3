"""Weight rules: the version of the weights that each action reads, and the update's remedy.

Version v + 1 of a stage is made by U(stage, v); version 0 is there when a window starts.
A rule is a law, arithmetic on (stage, micro-batch) alone; a schedule must fit its rule.

A rank that keeps `w` micro-batches in flight does F(m) right after B(m - w), so when F(m) starts,
(m - w + 1) // M updates of its stage are done: the *newest* version then.  B(m) starts when
m // M are done.  The laws differ in which of these they read:

    stashing        F and B the newest at F; older versions are kept for B and, over the end of a
                    window, for the next one, so that windows change nothing
    round robin     as stashing, where the micro-batches that the ranks of a stage take at once, a
                    round, all read what is there when the round begins
    vertical sync   F and B what the first stage reads: one version for a micro-batch everywhere
    newest          F the newest at F, B the newest at B: one version is alive.  A window begins
                    with what is there, so the pipeline starts afresh at its end
    2BW             F and B the version of one step before
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from math import gcd, lcm
from typing import TYPE_CHECKING, Generic, Literal, NamedTuple, Protocol, TypeVar, cast

import numpy as np

from penstock.errors import ScheduleError
from penstock.schedule.compiled import compiled
from penstock.schedule.orders import Columns, F, IntArray, U, excerpt

if TYPE_CHECKING:  # a schedule has a rule, so its file imports this one
    from penstock.schedule.schedule import Schedule

Number = TypeVar("Number", int, IntArray)
_DISCREPANCY = re.compile(
    r"discrepancy:(\d(?:\.\d{1,20})?(?:e-\d{1,3})?),(\d{1,9}),(\d{1,9})", re.ASCII
)
_NEWEST = re.compile(r"newest:([1-9]\d{0,8})", re.ASCII)
_UNITS = re.compile(r"[1-9]\d{0,8}(,[1-9]\d{0,8})*", re.ASCII)
_ROUND_ROBIN = re.compile(r"round_robin:([1-9]\d{0,8}(?:-[1-9]\d{0,8})*)(,full)?", re.ASCII)


class Reads(NamedTuple, Generic[Number]):
    """What one micro-batch reads at one stage, and the step that its gradient enters.

    The versions read by F, and by B (or I and W); and how many updates ahead of that version
    (behind it, where negative) the weights are predicted.  0: the version itself.
    """

    forward: Number
    backward: Number
    step: Number
    forward_ahead: Number | int = 0
    backward_ahead: Number | int = 0


class Law(Protocol):
    """A function written in arithmetic, so that it takes numbers and arrays of numbers.

    The micro-batch counts over the whole window; then come the stages, and the micro-batches of
    one step.  A later micro-batch never reads an older version.
    """

    def __call__(
        self, stage: Number, micro_batch: Number, num_stages: int, num_micro_batches: int, /
    ) -> Reads[Number]: ...


Depth = Literal["noam", "full"]
"""How many rounds of micro-batches 1F1B-RR has in flight."""


class Round(NamedTuple):
    """Micro-batches that the ranks of a stage take at once, and how many times that in flight."""

    size: int
    in_flight: int


Predictor = Literal["optimizer", "difference", "average"]
"""What one update is predicted to add to the weights.

    optimizer    the optimizer's next step as far as its state tells: - lr * v after SGD with
                 momentum, - lr * m' / (sqrt(v') + eps) after Adam, its moments without bias
    difference   what the last update added: W(t) - W(t-1)
    average      an average of what updates added: d <- g * d + (1 - g) * (W(t+1) - W(t)) with
                 g = decay ** (1 / staleness)
"""


def _no_staleness(stage: int, num_stages: int, num_micro_batches: int) -> float:
    return 0.0


@dataclass(frozen=True, slots=True)
class WeightRule:
    """A law, how weights are predicted where it reads ahead, and how updates handle staleness.

    staleness:      (stage, stages, micro-batches of a step) -> updates between F and B, a mean.
    decay:          of the average, over as many updates as the staleness.
    rescale_steps:  learning rate / max(1, staleness) ** p, with p from 1 to 0 in that many steps;
                    0: as it is.
    warm_up_steps:  that many steps at the start of training are synchronous.
    compensate:     spike compensation: a gradient D updates late has at once the effect
                    that the momentum would have given it in D updates.
    ranks:          of the first stages, where the micro-batches of a stage go to several ranks
                    in turn; all others are on one.
    """

    name: str
    law: Law
    predictor: Predictor | None = None
    staleness: Callable[[int, int, int], float] = _no_staleness
    decay: float = 0.0
    rescale_steps: int = 0
    warm_up_steps: int = 0
    compensate: bool = False
    ranks: tuple[int, ...] = ()

    def history(self, num_stages: int, num_micro_batches: int) -> IntArray:
        """Return, for each stage, how many versions older than version 0 a window reads.

        They are kept from one window to the next; at the very start of training version -1 and
        those before it equal version 0.
        """
        stages = np.arange(num_stages, dtype=np.int64)
        first = self.law(stages, np.zeros(1, np.int64), num_stages, num_micro_batches)
        oldest = np.broadcast_to(np.minimum(first.forward, first.backward), stages.shape)
        return np.maximum(-oldest, 0)

    @property
    def turn(self) -> int:
        """Return the micro-batches after which every stage begins with its first rank again."""
        return lcm(*self.ranks)

    def kept(self, stage: int, num_stages: int, num_micro_batches: int) -> int:
        """Return the number of copies of its weights' size that a stage keeps for its predictions.

        From update to update: the weights before the last one, or the average.  A stage that reads
        no prediction when the pipeline is full keeps none.
        """
        if self.predictor in (None, "optimizer"):
            return 0
        full = 4 * num_stages * num_micro_batches
        micro_batches = full + np.arange(num_micro_batches, dtype=np.int64)
        reads = self.law(np.array([stage]), micro_batches, num_stages, num_micro_batches)
        return int(np.any(reads.forward_ahead) or np.any(reads.backward_ahead))


# -- in flight ------------------------------------------------------------------------------------


class InFlight(Protocol):
    """The micro-batches that one of `num_stages` stages keeps in flight in the steady state."""

    def __call__(self, stage: Number, num_stages: int, /) -> Number: ...


def as_1f1b(stage: Number, num_stages: int, /) -> Number:
    """Return the micro-batches in flight under 1F1B: one for each stage from here on."""
    return num_stages - stage


def as_pipelined(stage: Number, num_stages: int, /) -> Number:
    """Return the micro-batches in flight if each tick holds an F and a B: there and back again."""
    return 2 * (num_stages - 1 - stage) + 1


def _staleness(in_flight: InFlight) -> Callable[[int, int, int], float]:
    """Return the mean number of updates from F to B: one for M micro-batches in flight."""

    def staleness(stage: int, num_stages: int, num_micro_batches: int) -> float:
        return (in_flight(stage, num_stages) - 1) / num_micro_batches

    return staleness


def _not_negative(number: Number) -> Number:
    return (number + abs(number)) // 2


# -- laws -----------------------------------------------------------------------------------------


def _synchronous(
    stage: Number, micro_batch: Number, num_stages: int, num_micro_batches: int, /
) -> Reads[Number]:
    step = micro_batch // num_micro_batches
    return Reads(step, step, step)


def _double_buffered(
    stage: Number, micro_batch: Number, num_stages: int, num_micro_batches: int, /
) -> Reads[Number]:
    step = micro_batch // num_micro_batches
    return Reads(step - 1, step - 1, step)


def _stashing(in_flight: InFlight) -> Law:
    def law(
        stage: Number, micro_batch: Number, num_stages: int, num_micro_batches: int, /
    ) -> Reads[Number]:
        newest = (micro_batch - in_flight(stage, num_stages) + 1) // num_micro_batches
        return Reads(newest, newest, micro_batch // num_micro_batches)

    return law


@cache
def rounds_of(ranks: tuple[int, ...], num_stages: int, depth: Depth) -> tuple[Round, ...]:
    """Return the rounds of each stage; `ranks` as in a weight rule.

    "noam"    so that all ranks from here on have work: ceil(their number / those of the stage)
    "full"    so many more that none ever waits, whatever the seconds of the stages: of a stage on
              n ranks before one on k, the micro-batches in flight there, n for its own work, and
              as many as one round can be out of step with the other: k + n - 2 gcd(k, n)

    Raises:   ScheduleError: of more stages than there are.
    """
    if len(ranks) > num_stages:
        message = f"{num_stages} stages on {words_of_ranks(ranks)} ranks"
        raise ScheduleError(message, hint="name 1 or more ranks for each stage, and no others")
    own = (*ranks, *(1,) * (num_stages - len(ranks)))
    if depth == "noam":
        return tuple(Round(n, -(-sum(own[stage:]) // n)) for stage, n in enumerate(own))
    rows = [Round(own[-1], 1)]
    for n in own[-2::-1]:
        k, behind = rows[-1]
        need = k * behind + n + k + n - 2 * gcd(k, n)
        rows.append(Round(n, -(-need // n)))
    return tuple(rows[::-1])


def _in_rounds(ranks: tuple[int, ...], depth: Depth) -> Law:
    """Return the law of stages on several ranks: a round reads the version that its first finds."""

    def law(
        stage: Number, micro_batch: Number, num_stages: int, num_micro_batches: int, /
    ) -> Reads[Number]:
        sizes, in_flight = zip(*rounds_of(ranks, num_stages, depth), strict=True)
        size, ahead = _of_stage(sizes, stage), _of_stage(in_flight, stage)
        done = (micro_batch // size - ahead + 1) * size
        newest = done // num_micro_batches
        return Reads(newest, newest, micro_batch // num_micro_batches)

    return law


def _of_stage(row: tuple[int, ...], stage: Number) -> Number:
    return cast("Number", row[stage] if isinstance(stage, int) else np.array(row)[stage])


def words_of_ranks(ranks: Iterable[int]) -> str:
    """Return the ranks of stages as PipeDream's paper writes them: 15-1."""
    return "-".join(map(str, ranks))


def _vertical_sync(
    stage: Number, micro_batch: Number, num_stages: int, num_micro_batches: int, /
) -> Reads[Number]:
    oldest = (micro_batch - num_stages + 1) // num_micro_batches
    return Reads(oldest, oldest, micro_batch // num_micro_batches)


def _newest(in_flight: InFlight, *, ahead: int = 0, back: int = 0) -> Law:
    """Return the law that F reads the newest version, and so does B.

    ahead:  1: F reads a prediction of what B will read.  back: 1: B one of what F has read.
    """

    def law(
        stage: Number, micro_batch: Number, num_stages: int, num_micro_batches: int, /
    ) -> Reads[Number]:
        step = micro_batch // num_micro_batches
        newest = (micro_batch - in_flight(stage, num_stages) + 1) // num_micro_batches
        forward = _not_negative(newest)
        gap = step - forward
        return Reads(forward, step, step, ahead * gap, -back * gap)

    return law


def _round_trip(
    stage: Number, micro_batch: Number, num_stages: int, num_micro_batches: int, /
) -> Reads[Number]:
    """F and B read predictions of what is newest when the micro-batch is back at the first stage.

    B of stage s is s backwards before that one.  A stage that does a forward between any two
    backwards, each of one tick, does s // 2 more of them in these s ticks.
    """
    step = micro_batch // num_micro_batches
    forward = _not_negative((micro_batch - as_1f1b(stage, num_stages) + 1) // num_micro_batches)
    back = (micro_batch + stage // 2) // num_micro_batches
    return Reads(forward, step, step, back - forward, back - step)


def _bellwether(
    stage: Number, micro_batch: Number, num_stages: int, num_micro_batches: int, /
) -> Reads[Number]:
    """All micro-batches of a step read what its first one predicts."""
    first = micro_batch // num_micro_batches * num_micro_batches
    return _round_trip(stage, first, num_stages, num_micro_batches)


def earlier(stage: Number, num_stages: int, num_micro_batches: int, slots: int) -> Number:
    """Return the number of forwards that a stage of nF1B does before the last stage begins.

    A step's forward of the next stage comes after its own, and between two backwards stand M
    forwards: its gradients return one forward and one backward later than from itself, or M
    forwards, if these are fewer.
    """
    return (num_stages - 1 - stage) * min(1 + slots, num_micro_batches)


def _whole_steps(slots: int) -> Law:
    """Return the law of nF1B, whose backward is as long as `slots` forwards of a micro-batch."""

    def law(
        stage: Number, micro_batch: Number, num_stages: int, num_micro_batches: int, /
    ) -> Reads[Number]:
        step = micro_batch // num_micro_batches
        early = earlier(stage, num_stages, num_micro_batches, slots)
        return Reads(_not_negative((micro_batch - early) // num_micro_batches), step, step)

    return law


# -- rules ----------------------------------------------------------------------------------------

SYNCHRONOUS = WeightRule("synchronous", _synchronous)
"""W(t+1) = update(W(t), gradient at W(t))."""

DOUBLE_BUFFERED = WeightRule("double_buffered", _double_buffered)
"""W(t+1) = update(W(t), gradient at W(t-1)): PipeDream-2BW, arXiv:2006.09503."""

STASHING = WeightRule("stashing", _stashing(as_1f1b))
"""F and B of stage s read the version S - 1 - s micro-batches ago: PipeDream, arXiv:1806.03377."""

VERTICAL_SYNC = WeightRule("vertical_sync", _vertical_sync)
"""F and B of every stage read the version S - 1 micro-batches ago: PipeDream's other rule."""

ROUND_ROBIN = WeightRule("round_robin", _in_rounds((2,), "noam"), ranks=(2,))
"""As stashing, where micro-batches alternate between two ranks of the first stage: 1F1B-RR."""


def round_robin(ranks: tuple[int, ...], depth: Depth = "noam") -> WeightRule:
    """Return the rule of 1F1B-RR with the first stages on several ranks, all others on one.

    Raises:   ScheduleError: one of them is on no rank.
    """
    if min(ranks, default=0) < 1:
        message = f"the stages are on {words_of_ranks(ranks) or 'no'} ranks"
        raise ScheduleError(message, hint="give each stage 1 or more: 15-1")
    while len(ranks) > 1 and ranks[-1] == 1:
        ranks = ranks[:-1]
    return _round_robin(ranks, depth)


@cache
def _round_robin(ranks: tuple[int, ...], depth: Depth) -> WeightRule:
    if (ranks, depth) == (ROUND_ROBIN.ranks, "noam"):
        return ROUND_ROBIN
    name = f"{ROUND_ROBIN.name}:{words_of_ranks(ranks)}" + ",full" * (depth == "full")
    return replace(ROUND_ROBIN, name=name, law=_in_rounds(ranks, depth), ranks=ranks)


DELAYED = WeightRule("delayed", _stashing(as_pipelined))
"""F and B read the version 2 (S - 1 - s) micro-batches ago: LayerPipe, arXiv:2108.06629."""

NEWEST = WeightRule("newest", _whole_steps(1))
"""F and B read the newest version, and so different ones: TiMePReSt, arXiv:2410.14312."""


@cache
def newest(slots: int) -> WeightRule:
    """Return TiMePReSt's rule for a backward that is as long as `slots` forwards of a micro-batch.

    Raises:   ScheduleError: that is not from 1 to 999999999.
    """
    if not 1 <= slots < 10**9:
        message = f"a backward of a step is as long as {slots} forwards of a micro-batch"
        raise ScheduleError(message, hint="give from 1 to 999999999")
    name = f"{NEWEST.name}:{slots}"
    return NEWEST if slots == 1 else replace(NEWEST, name=name, law=_whole_steps(slots))


DISCREPANCY = WeightRule(
    "discrepancy",
    _newest(as_1f1b, back=1),
    predictor="average",
    staleness=_staleness(as_1f1b),
    decay=0.135,
    rescale_steps=100,
    warm_up_steps=8,
)
"""F and B the newest, B corrected to F's; synchronous steps, then lower rates at first: PipeMare.

arXiv:1910.05124, sections 3.1 to 3.3.
"""


def discrepancy(decay: float, rescale_steps: int, warm_up_steps: int) -> WeightRule:
    """Return PipeMare's rule with another D, K and number of synchronous steps.

    Raises:   ScheduleError: the decay is not from 0 to below 1, or a number of steps negative.
    """
    given = float(decay), rescale_steps, warm_up_steps
    if not 0 <= decay < 1 or not all(0 <= steps < 10**9 for steps in given[1:]):
        message = (
            f"PipeMare's decay is {decay}, its rescale_steps {given[1]}, warm_up_steps {given[2]}"
        )
        hint = "give a decay from 0 to below 1, and steps from 0 to 999999999"
        raise ScheduleError(message, hint=hint)
    if given == (DISCREPANCY.decay, DISCREPANCY.rescale_steps, DISCREPANCY.warm_up_steps):
        return DISCREPANCY
    name = f"{DISCREPANCY.name}:{','.join(map(repr, given))}"
    return replace(
        DISCREPANCY,
        name=name,
        decay=given[0],
        rescale_steps=rescale_steps,
        warm_up_steps=warm_up_steps,
    )


SPECULATIVE = WeightRule("speculative", _round_trip, predictor="optimizer")
"""F and B predict the weights for when the micro-batch is done: SpecTrain, arXiv:1809.02839.

With one micro-batch a step F predicts S - 1 - s + s // 2 updates ahead, B s // 2.
"""

BELLWETHER = WeightRule("bellwether", _bellwether, predictor="optimizer")
"""As speculative, one prediction for all micro-batches of a step: XPipe, arXiv:1911.04610."""

PIPELINED = WeightRule("pipelined", _newest(as_pipelined))
"""F and B read the newest, 2 (S - 1 - s) micro-batches apart: pipelined backpropagation."""

COMPENSATED = WeightRule(
    "compensated", _newest(as_pipelined), staleness=_staleness(as_pipelined), compensate=True
)
"""As pipelined, with spike compensation: arXiv:2003.11666."""

PREDICTED = WeightRule("predicted", _newest(as_pipelined, ahead=1), predictor="difference")
"""As pipelined, with linear weight prediction in its weight form: arXiv:2003.11666."""

PREDICTED_COMPENSATED = WeightRule(
    "predicted_compensated",
    _newest(as_pipelined, ahead=1),
    predictor="difference",
    staleness=_staleness(as_pipelined),
    compensate=True,
)
"""Both: LWP with spike compensation, which that paper found best."""

FORESEEN = replace(PREDICTED, name="foreseen", predictor="optimizer")
"""As predicted, in the velocity form: by what the optimizer's momentum would do."""

FORESEEN_COMPENSATED = replace(
    PREDICTED_COMPENSATED, name="foreseen_compensated", predictor="optimizer"
)
"""Both, in the velocity form."""

WEIGHT_RULES = (
    SYNCHRONOUS,
    DOUBLE_BUFFERED,
    STASHING,
    VERTICAL_SYNC,
    ROUND_ROBIN,
    DELAYED,
    NEWEST,
    DISCREPANCY,
    SPECULATIVE,
    BELLWETHER,
    PIPELINED,
    COMPENSATED,
    PREDICTED,
    PREDICTED_COMPENSATED,
    FORESEEN,
    FORESEEN_COMPENSATED,
)


@cache
def of_units(rule: WeightRule, units: tuple[int, ...]) -> WeightRule:
    """Return `rule` for the units of stages: stage s is cut into `units[s]` units.

    A unit does what the rule says of the stage that it is part of.  A rule that does not depend on
    the stage's place is that of units too: `SYNCHRONOUS`.
    """
    if rule == SYNCHRONOUS:
        return rule
    ends = np.cumsum(units)

    def whole(unit: Number, num_stages: int) -> Number:
        if num_stages != ends[-1]:
            message = f"{rule.name} is in {ends[-1]} units, not in {num_stages}"
            raise ScheduleError(message, hint=f"its units are {' '.join(map(str, units))}")
        found = np.searchsorted(ends, unit, side="right")
        return cast("Number", int(found) if isinstance(unit, int) else found)

    def law(
        stage: Number, micro_batch: Number, num_stages: int, num_micro_batches: int, /
    ) -> Reads[Number]:
        return rule.law(whole(stage, num_stages), micro_batch, len(units), num_micro_batches)

    def staleness(stage: int, num_stages: int, num_micro_batches: int) -> float:
        return rule.staleness(whole(stage, num_stages), len(units), num_micro_batches)

    name = f"{rule.name}/{','.join(map(str, units))}"
    return replace(rule, name=name, law=law, staleness=staleness)


def rule_named(name: str, rules: Iterable[WeightRule]) -> WeightRule | None:
    """Return the rule with that name, for units if the name says so; None: there is none."""
    known = tuple(rules)
    for rule in known:
        if rule.name == name:
            return rule
    if (found := _NEWEST.fullmatch(name)) and NEWEST in known:
        return newest(int(found[1]))
    if (found := _DISCREPANCY.fullmatch(name)) and DISCREPANCY in known:
        return discrepancy(float(found[1]), int(found[2]), int(found[3]))
    if (found := _ROUND_ROBIN.fullmatch(name)) and ROUND_ROBIN in known:
        ranks = tuple(map(int, found[1].split("-")))
        return round_robin(ranks, "full" if found[2] else "noam")
    head, _, counts = name.rpartition("/")
    if not _UNITS.fullmatch(counts) or (rule := rule_named(head, known)) is None:
        return None
    return of_units(rule, tuple(map(int, counts.split(","))))


def scaled(rate: float, momentum: float, *, samples: int, reference: int) -> tuple[float, float]:
    """Return learning rate and momentum for updates of `samples`, from those for `reference`.

    With N samples in place of R: m' = m ** (N / R), rate' = rate * (1 - m') * N / ((1 - m) * R).
    The gradient of a sample then has the same total effect, and it fades over as many samples.
    Raises:   ValueError: no samples, or a momentum that is not from 0 to below 1.
    Source:   "Pipelined backpropagation at scale", arXiv:2003.11666, section 3.4.
    """
    if min(samples, reference) < 1 or not 0.0 <= momentum < 1.0:
        given = f"{samples} samples, reference {reference}, momentum {momentum:g}"
        raise ValueError(f"{given}: samples are 1 or more, momentum from 0 to below 1")
    share = samples / reference
    other = momentum**share
    return rate * (1.0 - other) * share / (1.0 - momentum), other


@dataclass(frozen=True, slots=True, eq=False)
class VersionTable:
    """What a weight rule means for one schedule.  The arrays are [stage, micro-batch]."""

    forward: IntArray  # version read by F
    backward: IntArray  # version read by B, or by I and W
    forward_ahead: IntArray  # updates that F's weights are predicted ahead of it
    backward_ahead: IntArray  # the same for B
    step: IntArray  # step, counted in the window, whose update takes the gradient
    alive: tuple[int, ...]  # per stage, the most versions alive at once on a rank


def versions(schedule: "Schedule") -> VersionTable:
    """Return the versions read in `schedule`, and how many of each stage are alive at once.

    A version lives from its update to the last action that reads it.  The newest one always
    lives, and at the window's end the `history` before it.  An update that makes a version from
    one that nothing will read again writes it in place.

    Raises:   ScheduleError: the law names a version that is not there yet, or no longer.
    """
    rule, per_step = schedule.weight_rule, schedule.num_micro_batches
    shape = (schedule.num_stages, per_step * schedule.num_steps)
    stages, micro_batches = (np.arange(size, dtype=np.int64) for size in shape)
    reads = rule.law(stages[:, None], micro_batches[None, :], schedule.num_stages, per_step)
    columns = tuple(np.broadcast_to(read, shape) for read in reads)
    forward, backward, step, ahead, back_ahead = columns
    if not np.array_equal(step, np.broadcast_to(micro_batches // per_step, shape)):
        raise _wrong_step(schedule, step)
    if (odd := _unlike(backward, ahead_of=back_ahead, together=schedule.together)) is not None:
        stage, m = odd
        message = f"rule {rule.name} gives B of micro-batches {m - 1} and {m} of stage {stage}"
        hint = "take a rule by which B of a step reads one version, or backwards one by one"
        raise ScheduleError(f"{message}, which are one action, unlike weights", hint=hint)
    if not schedule.has_updates:
        return VersionTable(forward, backward, ahead, back_ahead, step, (1,) * schedule.num_stages)
    read = (np.array(forward, order="C"), np.array(backward, order="C"))  # one type of array
    history = rule.history(schedule.num_stages, per_step)
    alive, wrong = _walk(schedule.orders.columns, read, schedule.num_steps, history)
    if wrong >= 0:
        raise _unavailable(schedule, int(wrong), read)
    return VersionTable(forward, backward, ahead, back_ahead, step, tuple(alive.tolist()))


def _unlike(backward: IntArray, *, ahead_of: IntArray, together: int) -> tuple[int, int] | None:
    """Return a stage and micro-batch whose B reads another version than the one before it."""
    for read in (backward, ahead_of) if together > 1 else ():
        changes = np.argwhere(np.diff(read, axis=1) != 0)
        inside = changes[(changes[:, 1] + 1) % together != 0]
        if len(inside):
            return int(inside[0][0]), int(inside[0][1]) + 1
    return None


@compiled
def _walk(
    columns: Columns, read: tuple[IntArray, IntArray], num_steps: int, history: IntArray
) -> tuple[IntArray, int]:
    """Return the most versions alive per stage, and the first action without its version, or -1."""
    kinds, stages, numbers, offsets = columns
    num_stages, oldest = read[0].shape[0], history.max()
    # Version v of a stage stands at [stage, v + oldest].  What lies before the first action
    # of a rank belongs to a rank before it, and is not there.
    born = np.full((num_stages, oldest + num_steps + 1), -1)
    last = np.full((num_stages, oldest + num_steps + 1), -1)
    alive = np.zeros(num_stages, np.int64)
    for rank in range(len(offsets) - 1):
        start = offsets[rank]
        for index in range(start, offsets[rank + 1]):
            kind, stage, number = kinds[index], stages[index], numbers[index]
            version = number if kind == U else read[0 if kind == F else 1][stage, number]
            if version < -history[stage] or version > num_steps:
                return alive, index
            if version > 0 and born[stage, version + oldest] < start:
                return alive, index
            last[stage, version + oldest] = index
            if kind == U:
                born[stage, version + oldest + 1] = index
        for stage in range(num_stages):
            if born[stage, -1] >= start:
                first = oldest - history[stage]
                most = _most_alive(born[stage, first:], last[stage, first:], start, history[stage])
                alive[stage] = max(alive[stage], most)
    return alive, -1


@compiled
def _most_alive(born: IntArray, last: IntArray, start: int, history: int) -> int:
    """Return the most versions of a stage alive at once on the rank whose actions begin at `start`.

    A version is alive after action i if it was born at i or before and is read after i.
    """
    most, num_versions = 0, len(born)
    for at in range(num_versions):
        count = 0
        for version in range(num_versions):
            kept = version >= num_versions - 1 - history
            is_born = born[version] <= born[at] or version <= history
            if is_born and (kept or last[version] > max(born[at], start - 1)):
                count += 1
        most = max(most, count)
    return most


def _wrong_step(schedule: "Schedule", step: IntArray) -> ScheduleError:
    per_step = schedule.num_micro_batches
    own: IntArray = np.arange(step.shape[1], dtype=np.int64) // per_step
    stage, m = np.argwhere(step != own)[0].tolist()
    return ScheduleError(
        f"rule {schedule.weight_rule.name} puts the gradient of stage {stage}, micro-batch {m} "
        f"into step {step[stage, m]}, and the micro-batch is of step {own[m]}",
        hint=f"return micro_batch // num_micro_batches ({per_step} here) as the step",
    )


def _unavailable(
    schedule: "Schedule", index: int, read: tuple[IntArray, IntArray]
) -> ScheduleError:
    action, orders, rule = schedule.orders.action(index), schedule.orders, schedule.weight_rule
    kind, stage, number = action
    version = number if kind == "U" else int(read[0 if kind == "F" else 1][stage, number])
    rank = orders.rank_at(index)
    if 1 <= version <= schedule.num_steps:
        why = f"but U{stage}.{version - 1} makes it later"
        hint = f"move U{stage}.{version - 1} before {action} on rank {rank}"
    else:
        oldest = -int(rule.history(schedule.num_stages, schedule.num_micro_batches)[stage])
        why = f"but there are only versions {oldest} to {schedule.num_steps}"
        hint = f"give rule {rule.name} a law that never goes back to an older version"
    head = (
        f"rank {rank} cannot do {action}: rule {rule.name} needs version {version} of stage {stage}"
    )
    return ScheduleError(f"{head}, {why}\n{excerpt(orders, rank, index)}", hint=hint)
