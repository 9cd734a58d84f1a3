"""Policies: dollars of each policy on futures of public traces, beside those of the omniscient.

A job of 24 h on n machines, n as many as the trace offers 60 % of the time, a start of 0.1 h, a
preemptible machine at 0.3 of the price on demand; deadlines of 1.1, 1.25, 1.5 and 2 times the job.
The futures are shared by the deadlines; a row of all of them ends each trace.  They are in slots of
a start, in which the omniscient is exact, or to the second, as `penstock fleet replay` has them;
losses are the same: of the machines that a pool loses, the job's share.

trace        file, and how its futures are made: resampled (blocks of the past), fitted (laws of
             its spells), or resampled to the second
policy       on_demand, greedy, uniform_progress, look_ahead
deadline     in times of the job, or all
cost_ratio   dollars beside the omniscient's, where both are in time
missed       futures that it misses and the omniscient does not
gap_closed   share of the dollars between greedy and the omniscient that it saves
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from penstock.errors import FleetError
from penstock.fleet import policies, read_market
from penstock.fleet.futures import by_laws, fitted, in_slots, resampled
from penstock.fleet.job_work import FleetJob, Speed
from penstock.fleet.look_ahead import look_ahead
from penstock.fleet.market import Market, MarketPool, noticed, priced
from penstock.fleet.outcome import judged
from penstock.fleet.replay import Ruler, replay, replay_all

PUBLIC = (
    "bamboo/p3-trace.csv",
    "bamboo/g4dn-trace.csv",
    "bamboo/v100x1-east1c.txt",
    "bamboo/a100x1-east1b.txt",
    "bamboo/doc-data/aws-spot-instances-p2-xlarge-2020-11-20-to-2020-11-23.csv",
    "parcae/bert/trace_hh_55_65.txt",
    "parcae/bert/trace_hl_15_25.txt",
    "parcae/bert/trace_lh_80_90.txt",
    "parcae/bert/trace_ll_10_11.txt",
)
KINDS = "resampled", "fitted", "resampled to the second"
DEADLINES = 1.1, 1.25, 1.5, 2.0
SLOT_S, WORK = 360.0, 240  # a start, and the job in slots
_OWN = 200  # futures that look_ahead is fitted on, of another seed than those it is judged by


def table(
    traces: Sequence[Path], futures: int, *, data: Path, told: Callable[[str], None]
) -> list[dict]:
    """Return the rows of all traces, or of the public ones in `data` if none is named."""
    files = [*traces] or [data / name for name in PUBLIC if (data / name).exists()]
    rows: list[dict] = []
    for file in files:
        market = noticed(priced(read_market(file), 1.0, 0.3), 60.0)
        need = wanted(market)
        for kind in KINDS:
            for deadline in DEADLINES:
                made = sampled(market, kind, need, deadline)
                if made is None:
                    told(f"{file.name}: spells with {need} machines are too few for a law")
                    break
                share = futures // len(DEADLINES)
                rows += of_one(f"{file.stem} {kind}", made, need, deadline, share)
                told(f"{file.name} {kind} {deadline}: {json.dumps(rows[-1])}")
            else:
                rows += of_all(rows)
    return rows


def wanted(market: Market) -> int:
    """Return the number of machines that the first pool offers 60 % of the time."""
    order = np.argsort(-market.machines[:, 0])
    share = np.cumsum(market.lasts_s()[order]) / market.until_s
    return max(1, int(market.machines[order[np.searchsorted(share, 0.6 - 1e-9)], 0]))


def sampled(
    market: Market, kind: str, need: int, deadline: float
) -> Callable[[int, int], list[Market]] | None:
    """Return a function from (count, seed) to futures; None where there are no laws."""
    lasts_s = slots_of(deadline) * SLOT_S
    if kind != "fitted":

        def make(count: int, seed: int) -> list[Market]:
            made = resampled(market, count, seed=seed, lasts_s=lasts_s)
            return [in_slots(f, SLOT_S) if kind == "resampled" else f for f in made]

        return make
    try:
        laws = fitted(market, need)
    except FleetError:
        return None

    def draw(count: int, seed: int) -> list[Market]:
        made = by_laws(market, laws, count, seed=seed, lasts_s=lasts_s, machines=need)
        return [in_slots(future, SLOT_S) for future in made]

    return draw


def slots_of(deadline: float) -> int:
    return math.floor(WORK * deadline + 1e-9)


def of_one(
    trace: str,
    make: Callable[[int, int], list[Market]],
    need: int,
    deadline: float,
    futures: int,
) -> list[dict]:
    """Return the rows of one trace and deadline."""
    free = {"start_s": SLOT_S, "reform_s": 0.0, "restart_s": 0.0, "checkpoint_s": 0.0}
    job = FleetJob(WORK * SLOT_S, (Speed(need, 1.0),), **free)
    deadline_s = slots_of(deadline) * SLOT_S
    ahead = look_ahead(make(_OWN, 1), job, deadline_s=deadline_s)
    rulers = [Ruler(p.__name__, p) for p in (policies.on_demand, policies.greedy)]
    rulers += [Ruler("uniform_progress", policies.uniform_progress), ahead]
    judging = [replace(future, notes=()) for future in make(futures, 0)]
    found = judged(judging, job, rulers, deadline_s=deadline_s, tick_s=SLOT_S)
    return [
        {
            "trace": trace,
            "policy": row.policy,
            "deadline": deadline,
            "machines": need,
            "futures": futures,
            "best_usd": found.best_usd * found.best_in_time,
            "cost_ratio": round(row.cost_ratio, 4),
            "missed": row.missed,
            "gap_closed": None if math.isnan(row.gap_closed) else round(row.gap_closed, 4),
        }
        for row in found.rows
    ]


def of_all(rows: Sequence[dict]) -> list[dict]:
    """Return a row over all deadlines for each policy of the trace whose rows are the last."""
    kinds = list(dict.fromkeys(row["policy"] for row in rows))
    last = rows[-len(kinds) * len(DEADLINES) :]
    best = [row["best_usd"] for row in last if row["policy"] == "greedy"]
    usd = {
        kind: sum(row["cost_ratio"] * row["best_usd"] for row in last if row["policy"] == kind)
        for kind in kinds
    }
    gap = usd["greedy"] - sum(best)
    return [
        {
            **next(row for row in last if row["policy"] == kind),
            "deadline": "all",
            "futures": sum(row["futures"] for row in last if row["policy"] == kind),
            "best_usd": sum(best),
            "cost_ratio": round(usd[kind] / sum(best), 4),
            "missed": sum(row["missed"] for row in last if row["policy"] == kind),
            "gap_closed": round((usd["greedy"] - usd[kind]) / gap, 4) if gap > 1e-6 else None,
        }
        for kind in kinds
    ]


def scale() -> dict[str, float]:
    """Return the seconds of a month of 64 machines, and of 1,000 futures of it for 36 hours.

    Machines change every ten minutes; the policy is asked every five.  Two threads.
    """
    random = np.random.default_rng(0)
    times_s = np.arange(0, 30 * 86400, 600.0)
    offered = np.clip(64 + np.cumsum(random.integers(-4, 5, len(times_s))), 20, 90)[:, None]
    gone = np.maximum(0.0, -np.diff(offered, axis=0, prepend=64))
    usd_h = np.full(offered.shape, 0.3)
    pool = MarketPool("zone", 1.0, 60.0)
    month = Market((pool,), times_s, offered.astype(float), usd_h, gone, 30 * 86400.0)
    job = FleetJob(29 * 86400, (Speed(1, 1 / 64), Speed(64, 1.0)), has_copies=True)
    ruler = Ruler("transient", policies.transient)
    replay(month, job, ruler, deadline_s=86400.0)  # compiles
    marks = [time.perf_counter()]
    replay(month, job, ruler, deadline_s=30 * 86400.0, with_timeline=True)
    marks.append(time.perf_counter())
    futures = [*resampled(month, 1000, seed=1, lasts_s=36 * 3600.0)]
    short = replace(job, steps=24 * 3600.0)
    replay_all(futures, short, lambda _: ruler, deadline_s=36 * 3600.0)
    marks.append(time.perf_counter())
    return {"month_s": marks[1] - marks[0], "futures_1000_s": marks[2] - marks[1]}


def words(rows: Sequence[dict]) -> str:
    """Return the rows as a table."""
    lines = [f"{'trace':60} {'policy':18} {'deadline':>8} {'ratio':>7} {'missed':>6} {'closed':>7}"]
    for row in rows:
        closed = "-" if row["gap_closed"] is None else f"{row['gap_closed']:.3f}"
        lines.append(
            f"{row['trace']:60} {row['policy']:18} {row['deadline']:8} {row['cost_ratio']:7.3f} "
            f"{row['missed']:6} {closed:>7}"
        )
    return "\n".join(lines)
