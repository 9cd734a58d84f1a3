"""Bottleneck: what holds a run up, by a rule that can be followed with the breakdown in hand.

Whether there is something to name: a step takes more than FLAG longer than predicted.  FLAG is a
quarter: predictions were off by 20 % at worst in 120 plans of 4 models on a quiet machine
(docs/figures.md), so a quarter is not the prediction's error.  Comparing the measured speed with
the predicted one to find that something is wrong is from arXiv:2003.04072 (there: a parameter
server).

What is named: of these, the one that costs most seconds of a step beyond the prediction, if at
least CAUSE of the step.

    loader       data, on the rank that waits most for it
    link         two ranks: what messages between them are late or take to hand over, whichever is
                 more; but no more than the two wait longer for messages than predicted
    slow rank    computing beyond what the other ranks' pace (the lower median of measured /
                 predicted) lets expect of it
    compute      that pace itself: all ranks compute more slowly than predicted
    collectives  the sums themselves, without waiting for latecomers
    optimizer    updates, on the rank that takes longest
    copies       to far memory and back, on the rank that takes longest
    checkpoint   writing checkpoints, except the last

If none costs that much, the run is "unclear".  A run that is as fast as predicted has nothing to
fix ("compute"), unless by plan a rank has more work than FLAG beyond the ranks' mean
("imbalance").  Without a prediction all that is known is how the parts divide the step, so a
cause must cost FLAG of it, and the pace of a rank is that of the others: a slow rank is then not
told from one that has more work by plan.

Where a quarter of the steps is a tenth shorter than their mean, that is told: other programs make
steps unlike, and a plan does not.

Ignores:  that parts may run beside each other, so that fixing one may gain less than it costs;
          a second cause beside the largest; what varies from step to step and evens out; that a
          rank may be held up by its own messages (the link's cost counts for both of its ends).
"""

import statistics
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

from penstock.files import Json, cache_folder
from penstock.timeline.breakdown import Breakdown, Part
from penstock.units import format_seconds

FLAG = 0.25  # of the predicted step
CAUSE = 0.1  # of the measured step: half of what FLAG makes of it
_UNLIKE, _FEW = 0.1, 20  # of the mean of steps; so many steps at least

Cause: TypeAlias = Literal[
    "loader",
    "link",
    "slow rank",
    "imbalance",
    "collectives",
    "optimizer",
    "copies",
    "checkpoint",
    "compute",
    "unclear",
]


class Bottleneck(NamedTuple):
    """What holds a run up.

    ranks:      those it is about; two for a link, none where it is about all.
    is_named:   whether there is something to fix.
    share:      its part of the measured step, from 0 to 1.
    slowdown:   measured / predicted seconds of a step; None without a prediction.
    evidence:   the figures, as a sentence.
    hint:       what to do; empty where there is nothing.
    """

    cause: Cause
    ranks: tuple[int, ...]
    is_named: bool
    share: float
    slowdown: float | None
    evidence: str
    hint: str = ""

    def __str__(self) -> str:
        """Return "bottleneck: the link between ranks 0 and 1: ..." and a line with the hint."""
        lines = [f"bottleneck: {self.title}: {self.evidence}"]
        return "\n".join([*lines, *([f"hint: {self.hint}"] if self.hint else [])])

    @property
    def title(self) -> str:
        """Return the cause in a few words."""
        match self.cause:
            case "loader":
                return f"the loader, on rank {self.ranks[0]}"
            case "link":
                return f"the link between ranks {self.ranks[0]} and {self.ranks[1]}"
            case "slow rank":
                return f"rank {self.ranks[0]} is slow"
            case "imbalance":
                return f"rank {self.ranks[0]} has more work than the others"
            case "optimizer":
                return f"the optimizer, on rank {self.ranks[0]}"
            case "copies":
                return f"far memory, on rank {self.ranks[0]}"
            case "checkpoint":
                return "checkpoints"
            case "compute":
                return "computing is slow on all ranks" if self.is_named else "none"
            case "collectives" | "unclear":
                return self.cause

    def to_json(self) -> dict[str, Json]:
        """Return the bottleneck as JSON values."""
        return {**self._asdict(), "ranks": list(self.ranks)}


class _Cost(NamedTuple):
    """A cause, and its seconds of a step beyond the prediction."""

    cause: Cause
    ranks: tuple[int, ...]
    lost_s: float
    evidence: str
    hint: str


def bottleneck(
    measured: Breakdown, predicted: Breakdown | None = None, steps_s: Sequence[float] = ()
) -> Bottleneck:
    """Return the bottleneck of a run, by the rule at the top of this file.

    steps_s:  seconds of its steps one by one, where they are known.
    Raises:   ValueError: the prediction is for another number of ranks.
    """
    if predicted is not None and predicted.num_ranks != measured.num_ranks:
        counts = f"{measured.num_ranks} ranks, predicted {predicted.num_ranks}"
        raise ValueError(f"measured are {counts}")
    step_s = measured.step_s
    slowdown = step_s / predicted.step_s if predicted is not None and predicted.step_s else None
    about = f"a step takes {format_seconds(step_s)}"
    if slowdown is not None and predicted is not None:
        about += f", {slowdown:.2f} times the {format_seconds(predicted.step_s)} predicted"
        about += _shortest(steps_s, step_s, predicted.step_s)
        if slowdown <= 1 + FLAG:
            return _as_predicted(predicted, slowdown, about)
    greatest = max(_costs(measured, predicted), key=lambda cost: cost.lost_s)
    share = greatest.lost_s / step_s if step_s else 0.0
    if share >= (FLAG if slowdown is None else CAUSE):
        evidence = f"{greatest.evidence}; {about}"
        return Bottleneck(*greatest[:2], True, share, slowdown, evidence, greatest.hint)
    if slowdown is None:
        return Bottleneck("compute", (), False, 0.0, None, f"{about}, and no part stands out")
    evidence, hint = _unclear(measured, about)
    return Bottleneck("unclear", (), True, max(0.0, share), slowdown, evidence, hint)


def _shortest(steps_s: Sequence[float], step_s: float, predicted_s: float) -> str:
    """Return a clause about the shorter steps, where steps are unlike; else ""."""
    if len(steps_s) < _FEW:
        return ""
    short_s = statistics.quantiles(steps_s, n=4)[0]
    if short_s > (1 - _UNLIKE) * step_s:
        return ""
    told = f"a quarter of the steps takes at most {format_seconds(short_s)}"
    return f"; {told}, {short_s / predicted_s:.2f} times: other programs may hold up the rest"


def _unclear(measured: Breakdown, about: str) -> tuple[str, str]:
    """Return evidence and hint where no cause takes enough of a step."""
    rest_s = max(measured.of("rest"))
    if rest_s < CAUSE * measured.step_s:
        evidence = f"{about}, and no single cause takes {CAUSE:.0%} of it"
        return evidence, "compare the timelines in report.html"
    words = f"{format_seconds(rest_s)} of it pass between actions, in no part that is measured"
    hint = "train for more steps: what is done once, as to begin saving, counts less then"
    return f"{about}; {words}", hint


def _as_predicted(predicted: Breakdown, slowdown: float, about: str) -> Bottleneck:
    work_s = predicted.work_s
    mean_s, most_s = statistics.fmean(work_s), max(work_s)
    if most_s <= (1 + FLAG) * mean_s:
        return Bottleneck("compute", (), False, 0.0, slowdown, about)
    evidence = (
        f"by the plan it computes {format_seconds(most_s)} of every step, the ranks on average"
        f" {format_seconds(mean_s)}; {about}"
    )
    hint = "cut the model elsewhere, or let `penstock plan` choose the cuts"
    rank, share = work_s.index(most_s), (most_s - mean_s) / predicted.step_s
    return Bottleneck("imbalance", (rank,), True, share, slowdown, evidence, hint)


# -- what each cause costs -------------------------------------------------------------------------


def _costs(measured: Breakdown, predicted: Breakdown | None) -> Iterator[_Cost]:
    hint = "make `data` faster: keep batches ready, decode less, read from a local disk"
    yield _part(("loader", "data"), measured, predicted, "waits {} of every step for data", hint)
    hint = "more micro-batches per step, or an optimizer that is fused or foreach"
    words = "updates weights for {} of every step"
    yield _part(("optimizer", "optimizer"), measured, predicted, words, hint)
    hint = "put TMPDIR on a faster disk, or offload less"
    words = "copies to far memory and back for {} of every step"
    yield _part(("copies", "copies"), measured, predicted, words, hint)
    hint = "fewer replicas, more micro-batches per step, or a faster network"
    words = "sums over ranks for {} of every step"
    yield _part(("collectives", "collectives"), measured, predicted, words, hint)
    hint = "checkpoint less often, or to a faster disk"
    words = "writes checkpoints for {} of every step"
    yield _part(("checkpoint", "checkpoint"), measured, predicted, words, hint)
    yield from _pace(measured, predicted)
    yield from _links(measured, predicted)


def _part(
    what: tuple[Cause, Part],
    measured: Breakdown,
    predicted: Breakdown | None,
    words: str,
    hint: str,
) -> _Cost:
    """Return the cost of a part on the rank on which it exceeds the prediction most."""
    cause, part = what
    expected = (0.0,) * measured.num_ranks if predicted is None else predicted.of(part)
    lost = [m - p for m, p in zip(measured.of(part), expected, strict=True)]
    rank = max(range(measured.num_ranks), key=lost.__getitem__)
    took_s, known_s = measured.of(part)[rank], expected[rank]
    evidence = f"rank {rank} {words.format(format_seconds(took_s))}"
    if known_s:
        evidence += f" ({format_seconds(known_s)} predicted)"
    ranks = () if cause in ("collectives", "checkpoint") else (rank,)
    return _Cost(cause, ranks, lost[rank], evidence, hint)


def _pace(measured: Breakdown, predicted: Breakdown | None) -> Iterator[_Cost]:
    """Yield what it costs that one rank computes more slowly than the others, and that all do."""
    work_s = measured.work_s
    expected = (
        predicted.work_s
        if predicted is not None
        else (statistics.median_low(work_s),) * len(work_s)
    )
    paces = [m / p for m, p in zip(work_s, expected, strict=True) if p > 0]
    if not paces:
        return
    common = statistics.median_low(paces)
    lost = [m - common * p for m, p in zip(work_s, expected, strict=True)]
    rank = max(range(len(lost)), key=lost.__getitem__)
    took, known = format_seconds(work_s[rank]), format_seconds(expected[rank])
    if predicted is None:
        evidence = f"it computes {took} of every step, other ranks {known}"
        hint = "does it have more work, or a slower device? With a plan, a prediction would tell"
    else:
        others = f"the others take {common:.2f} times what is predicted"
        evidence = f"it computes {took} of every step, predicted {known}; {others}"
        hint = f"look at the host of rank {rank}: other programs, heat, a slower device?"
    yield _Cost("slow rank", (rank,), lost[rank], evidence, hint)
    if predicted is not None:
        most_s = max(expected)
        evidence = f"ranks compute {common:.2f} times as long as predicted"
        kept = cache_folder("profiles") or "the profile"
        hint = f"other programs on these hosts? If not, delete {kept} to measure again"
        yield _Cost("compute", (), (common - 1) * most_s, evidence, hint)


def _links(measured: Breakdown, predicted: Breakdown | None) -> Iterator[_Cost]:
    """Yield what messages cost between any two ranks."""
    more_s = _longer_s(measured, predicted)
    for first, second, late_s, handed_s in measured.links:
        lost_s, pair = max(late_s, handed_s), (first, second)
        goes_by = f"{format_seconds(lost_s)} of every step passes while"
        what = "one of them waits for a message that the other has sent"
        what = what if late_s >= handed_s else "they hand messages over"
        evidence = f"{goes_by} {what}"
        hint = (
            "send less over it (other cuts), put communicating stages on nearby ranks, and leave"
            " each rank a core of its own"
        )
        yield _Cost("link", pair, min(lost_s, sum(more_s[r] for r in pair)), evidence, hint)


def _longer_s(measured: Breakdown, predicted: Breakdown | None) -> list[float]:
    """Return the seconds beyond the prediction that each rank spends on messages."""
    own = zip(measured.of("waiting"), measured.of("messages"), strict=True)
    known = (0.0,) * measured.num_ranks if predicted is None else predicted.of("waiting")
    return [max(0.0, sum(m) - p) for m, p in zip(own, known, strict=True)]
