"""Held out: policies fitted on the first half of a trace, replayed on the second, beside the best.

    python -m bench.held_out [FOLDER|TRACE ...] [--json] [--hours 48] [--deadline 1.25]
                             [--starts 40]

Of each trace the first half is the past: on it policies are fitted, from it the seconds between
checkpoints follow, and what the job will cost is promised.  The second half, which nothing has
seen, is replayed from `--starts` moments, evenly far apart, each with a whole deadline before the
trace ends.  A machine costs 1 dollar an hour on demand and 0.3 preemptible where the trace has no
prices; starts, restarts and checkpoints are a job's defaults (165, 30 and 10 s), without a notice
or copies.  Of traces that are too short for it the job is shorter: a third of the second half.
Without a folder: the public traces in ../shared/data.

trace, policy
machines        as many as the past offers 60 % of the time; half of the most where that is none
hours           of work, and `deadline_hours`
starts          replays
cost_ratio      dollars beside the omniscient's, where both are in time
in_time         share of the replays
missed          replays that are late though the omniscient is not
gap_closed      share of the dollars between greedy and the omniscient that it saves
usd             mean of the replays
promised_usd    what was promised for the mean, and between which dollars 8 in 10 would lie:
                `low_usd`, `high_usd`
kept            share of the replays that lie between them
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.policies import wanted
from penstock.cli import face
from penstock.errors import PenstockError
from penstock.fleet import read_market
from penstock.fleet.futures import coming as foreseen
from penstock.fleet.job_work import FleetJob, Speed
from penstock.fleet.loss_rate import saving
from penstock.fleet.market import DAY_S, HOUR_S, Market, begin_of, priced
from penstock.fleet.outcome import Outcomes, judged
from penstock.fleet.promise import Promise, promise_of
from penstock.fleet.replay import Ruler, replay_all
from penstock.fleet.rulers import basis_of, ruler_of

DATA = Path(__file__).parents[2] / "shared" / "data"
PUBLIC = "bamboo", "parcae"
NAMES = "on_demand", "greedy", "uniform_progress", "auto_scaling,0.1", "look_ahead"
KINDS = ".csv", ".json", ".txt"
_FUTURES = 40  # that promises are from
_LEAST_H = 0.5  # of work: a job that is shorter is all start


def main() -> None:
    """Print the rows of all traces."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("places", nargs="*", type=Path, metavar="FOLDER|TRACE")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--hours", type=float, default=48.0, help="of work")
    parser.add_argument("--deadline", type=float, default=1.25, help="in times of the work")
    parser.add_argument("--starts", type=int, default=40)
    asked = parser.parse_args()
    rows: list[dict] = []
    for path in files(asked.places or [DATA / name for name in PUBLIC]):
        try:
            new = of_trace(path, asked.hours, asked.deadline, asked.starts)
        except PenstockError as problem:
            new = [{"trace": path.stem, "skipped": problem.message}]
        print(f"{path}: {len(new)} rows", file=sys.stderr, flush=True)
        rows += new
    print(json.dumps(rows) if asked.json else words(rows))


def files(places: Sequence[Path]) -> Iterator[Path]:
    """Yield the traces that are named, and those in folders, in the order of their names."""
    for place in places:
        if place.is_dir():
            yield from sorted(path for path in place.rglob("*") if path.suffix in KINDS)
        else:
            yield place


def of_trace(path: Path, hours: float, deadline: float, starts: int) -> list[dict]:
    """Return the rows of one trace."""
    market = priced(read_market(path), 1.0, 0.3)
    past, rest = begin_of(market, market.until_s / 2), rest_of(market, market.until_s / 2)
    hours = min(hours, rest.until_s / HOUR_S / deadline / 3)
    if hours < _LEAST_H:
        return [{"trace": path.stem, "skipped": f"{rest.until_s / HOUR_S:.2f} h are too short"}]
    need = wanted(past)
    if past.share_up(need).max() < 0.5:
        need = max(1, int(past.machines.max()) // 2)
    deadline_s = deadline * hours * HOUR_S
    job = saving(FleetJob(hours * HOUR_S, (Speed(need, 1.0),)), past, deadline_s)
    rulers = fitted(past, job, deadline_s)
    begins = np.linspace(0.0, rest.until_s - deadline_s, starts)
    coming = [rest_of(rest, begin) for begin in begins]
    found = judged(coming, job, rulers, deadline_s=deadline_s)
    lasts_s = 1.5 * deadline_s
    futures = [*foreseen(past, _FUTURES, seed=0, lasts_s=lasts_s, machines=need)]
    promises = [promised(futures, past, job, ruler, deadline_s) for ruler in rulers]
    about = {"machines": need, "hours": hours, "deadline_hours": deadline * hours, "starts": starts}
    return [{"trace": path.stem, **row, **about} for row in rows_of(found, promises)]


def promised(
    futures: Sequence[Market], past: Market, job: FleetJob, ruler: Ruler, deadline_s: float
) -> Promise:
    """Return what the past promises of a policy, at its end."""
    usd, in_order = (
        np.array([r.usd for r in replay_all(all_of, job, lambda _: ruler, deadline_s=deadline_s)])
        for all_of in (futures, basis_of(past, deadline_s).futures)
    )
    return promise_of(usd, in_order, past, job, deadline_s=deadline_s)


def rest_of(market: Market, from_s: float) -> Market:
    """Return what a market offers from a second on, before its end."""
    row = market.row_at(from_s)
    gone = market.gone[row:].copy()
    gone[0] = 0.0
    return replace(
        market,
        times_s=np.maximum(0.0, market.times_s[row:] - from_s),
        machines=market.machines[row:],
        usd_h=market.usd_h[row:],
        gone=gone,
        until_s=market.until_s - from_s,
        starts_s=(market.starts_s + from_s) % DAY_S,
        begins_s=market.begins_s + from_s,
    )


def fitted(past: Market, job: FleetJob, deadline_s: float) -> list[Ruler]:
    basis = basis_of(past, deadline_s)
    return [ruler_of(name, job, basis, _no_function) for name in NAMES]


def _no_function(text: str) -> None:
    raise AssertionError(text)


def rows_of(found: Outcomes, promises: Sequence[Promise]) -> list[dict]:
    """Return what became of each policy, beside what was promised."""
    return [
        {
            "policy": row.policy,
            "cost_ratio": _number(row.cost_ratio),
            "in_time": row.in_time,
            "missed": row.missed,
            "gap_closed": _number(row.gap_closed),
            "usd": row.mean_usd,
            "promised_usd": promise.mean_usd,
            "low_usd": promise.low_usd,
            "high_usd": promise.high_usd,
            "kept": float(np.mean((usd >= promise.low_usd) & (usd <= promise.high_usd))),
        }
        for row, usd, promise in zip(found.rows, found.all_usd, promises, strict=True)
    ]


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 4)


def words(rows: Sequence[dict]) -> str:
    """Return the rows as a table."""
    head = "trace", "policy", "machines", "hours", "of best", "in time", "closed", "usd", "kept"
    cells = [
        (row["trace"], row["skipped"], *[""] * 7)
        if "skipped" in row
        else (
            row["trace"],
            row["policy"],
            row["machines"],
            f"{row['hours']:.3g}",
            row["cost_ratio"],
            f"{100 * row['in_time']:.0f} %",
            row["gap_closed"],
            f"{row['usd']:.2f} ({row['low_usd']:.2f} .. {row['high_usd']:.2f})",
            f"{100 * row['kept']:.0f} %",
        )
        for row in rows
    ]
    return face.table(head, cells)


if __name__ == "__main__":
    main()
