"""Budget: what a sum of dollars is enough for: the soonest deadline that it pays for."""

from collections.abc import Callable
from dataclasses import replace

from penstock.errors import FleetError
from penstock.fleet.advise import Advice, advise
from penstock.fleet.choices import SURE, Aim
from penstock.fleet.job_work import FleetJob
from penstock.fleet.market import HOUR_S, Market

_TIMES = 1.1, 1.5, 2.0, 3.0, 5.0  # the hours that the fastest plan takes: deadlines that are tried


def advise_for(
    market: Market,
    job: FleetJob,
    budget_usd: float,
    *,
    futures: int = 40,
    seed: int = 0,
    told: Callable[[int, int], None] | None = None,
) -> tuple[Aim, Advice]:
    """Return the soonest of some deadlines that the dollars pay for, and the advice for it.

    Where they pay for none, that which is in the budget most often, and how many of the steps they
    pay for.
    Raises:   FleetError: a budget that is not above 0; as `advise`.
    """
    if not budget_usd > 0:
        raise FleetError(f"a budget of {budget_usd:g} dollars", hint="give more than 0")
    fastest_s = min(job.seconds(size) for size in job.sizes) + job.start_s + job.restart_s
    best: tuple[Aim, Advice] | None = None
    for at, times in enumerate(_TIMES):
        aim = Aim(times * fastest_s / HOUR_S, budget_usd)
        advice = advise(market, job, aim, futures=futures, seed=seed)
        if told is not None:
            told(at + 1, len(_TIMES))
        if advice.choice.sure >= SURE:
            return aim, _with_first(advice, _pays_for(aim))
        if best is None or advice.choice.sure > best[1].choice.sure:
            best = aim, advice
    assert best is not None, "there is a deadline"
    aim, advice = best
    part = min(1.0, budget_usd / advice.choice.mean_usd)
    said = f"{budget_usd:g} dollars pay for about {part * job.steps:.3g} of {job.steps:g} steps"
    return aim, _with_first(advice, said)


def _pays_for(aim: Aim) -> str:
    return f"{aim.budget_usd:g} dollars pay for all steps within {aim.deadline_h:.3g} h"


def _with_first(advice: Advice, reason: str) -> Advice:
    return replace(advice, reasons=(reason, *advice.reasons))
