"""Reasons: why a choice was made, what it costs on bad days, and why others were not taken."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from penstock.fleet.choices import SURE, Advised, Aim
from penstock.fleet.market import HOUR_S, Market, begin_of
from penstock.fleet.promise import Promise

_MOST_NAMED = 3  # of the choices that fail for one reason
_BAD = 0.1  # of the futures: bad days


class TriedChoices(NamedTuple):
    """A choice, the front, all that was tried, and the futures of the choice."""

    choice: Advised
    front: Sequence[Advised]
    tried: Sequence[Advised]
    futures: Sequence[Market]


def reasons_of(tried: TriedChoices, aim: Aim, best_usd: float, promise: Promise) -> tuple[str, ...]:
    """Return why, in sentences: what was asked for, what it may cost, why others are not taken."""
    parts = (
        _asked(tried, aim),
        _promised(promise),
        _bad_days(tried, aim),
        _failed(tried, aim),
        _on_demand(tried),
        _sooner(tried),
        _beside_the_best(tried.choice, best_usd),
    )
    return tuple(sentence for part in parts for sentence in part)


def _asked(tried: TriedChoices, aim: Aim) -> Iterator[str]:
    asked = f"in time ({aim.deadline_h:.4g} h)"
    if aim.budget_usd < math.inf:
        asked += f" and in the budget ({aim.budget_usd:g} dollars)"
    good = [one for one in tried.tried if one.sure >= SURE]
    if good:
        said = f"the cheapest of {len(good)} choices that are {asked} in 95 % of futures"
        others = len(tried.tried) - len(good)
        yield f"{said}; {others} other{' is' if others == 1 else 's are'} not"
    else:
        part = f"this is, in {100 * tried.choice.sure:.0f} %"
        yield f"no choice of {len(tried.tried)} is {asked} in 95 % of futures; {part}"


def _promised(promise: Promise) -> Iterator[str]:
    ends = f"between {promise.low_usd:.2f} and {promise.high_usd:.2f} dollars 8 times in 10"
    long = f"the past that says so lasts {promise.stretches:.3g} deadlines"
    yield f"it costs {promise.mean_usd:.2f} on average, {ends}; {long}"


def _bad_days(tried: TriedChoices, aim: Aim) -> Iterator[str]:
    """Yield what the dearest tenth of the futures cost, and how often machines were there."""
    one = tried.choice
    order = np.argsort(one.usd)
    bad = order[-max(1, round(_BAD * len(order))) :]
    if one.usd[bad].min() <= one.mean_usd * 1.01:
        return
    lasts_s = aim.deadline_h * HOUR_S
    up = np.array(
        [begin_of(future, lasts_s).share_up(one.machines).max() for future in tried.futures]
    )
    share = f"{100 * up[bad].mean():.0f} % of the time ({100 * up.mean():.0f} % in all)"
    days = f"on its bad days, 1 in 10, it costs {one.usd[bad].min():.2f} dollars and more"
    yield f"{days}: {one.machines} preemptible machines are there {share}"


def _failed(tried: TriedChoices, aim: Aim) -> Iterator[str]:
    """Yield what is late or over the budget too often, the cheapest of each first."""
    late = [one for one in tried.tried if one.in_time < SURE and one is not tried.choice]
    dear = [one for one in tried.tried if one.in_time >= SURE and one.in_budget < SURE]
    dear = [one for one in dear if one is not tried.choice]
    if late:
        names = _named(late, lambda one: f"{100 * (1 - one.in_time):.0f} %")
        yield f"{len(late)} {_are(late)} late too often: {names}"
    if dear:
        names = _named(dear, lambda one: f"{one.mean_usd:.2f} dollars")
        yield f"{len(dear)} {_are(dear)} over {aim.budget_usd:g} dollars too often: {names}"


def _are(ones: Sequence[Advised]) -> str:
    return "is" if len(ones) == 1 else "are"


def _named(ones: Sequence[Advised], why: Callable[[Advised], str]) -> str:
    ordered = sorted(ones, key=lambda one: one.mean_usd)
    words = [f"{one.policy} on {one.machines} ({why(one)})" for one in ordered]
    few = dict.fromkeys(words[: 4 * _MOST_NAMED])
    more = ", ..." if len(few) > _MOST_NAMED else ""
    return ", ".join([*few][:_MOST_NAMED]) + more


def _on_demand(tried: TriedChoices) -> Iterator[str]:
    sure = [one for one in tried.tried if one.policy == "on_demand" and one.in_time >= SURE]
    if sure and tried.choice.policy != "on_demand":
        least = min(sure, key=lambda one: one.mean_usd)
        more = least.mean_usd / tried.choice.mean_usd if tried.choice.mean_usd else math.inf
        yield (
            f"on demand, {least.machines} machines cost {least.mean_usd:.2f} dollars, "
            f"{more:.2f} times as much, and take {least.late_h:.1f} h"
        )


def _sooner(tried: TriedChoices) -> Iterator[str]:
    one = tried.choice
    faster = [other for other in tried.front if other.late_h < one.late_h]
    if not faster:
        return
    next_ = min(faster, key=lambda other: other.mean_usd)
    more = f"{next_.policy} on {next_.machines} machines"
    usd = next_.mean_usd - one.mean_usd
    beside = f"{abs(usd):.2f} dollars {'more' if usd >= 0 else 'less'}"
    if one.late_h == math.inf:
        yield f"it is not done in 9 of 10 futures; {more} is, in {next_.late_h:.1f} h, for {beside}"
    else:
        yield f"{one.late_h - next_.late_h:.1f} h sooner costs {beside}: {more}"


def _beside_the_best(one: Advised, best_usd: float) -> Iterator[str]:
    """Yield the bound, or why it is none."""
    who = f"who knew the future would pay {best_usd:.2f} dollars for all or none of the"
    if best_usd <= one.mean_usd:
        yield f"{who} {one.machines} machines"
    elif best_usd < math.inf:
        why = "the choice pays less, since it also runs on fewer of them, or for less than a start"
        yield f"{who} {one.machines} machines; {why}"
