"""Traces: files of what was offered, lost and charged, read as a `Market` (docs/fleet.md).

time_s,pool,machines,usd_h,on_demand_usd_h   the format: all but the time may be left out
time_s,event,machine                         machines that came (add) and went (remove)
time_ms,add|remove,machine                   the same without a header
date,time,count  and  time,count             counts without a header
date,instance,region,ondemand_usd_h,...      changes of price
[time_ms, "add", {"nodes": [...]}]           one JSON list a line
{"metadata": {"gap_seconds": 300}, "data": [...]}   counts at equal gaps (samples.py)
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np

from penstock.errors import FleetError
from penstock.files import read_bytes
from penstock.fleet.csv_rows import FORMAT, CellRows, RowError, begin_of_file, read_cells
from penstock.fleet.lifetimes import endless
from penstock.fleet.market import DAY_S, HOUR_S, Floats, Market, MarketPool, only
from penstock.fleet.samples import read_samples

UNITS_S = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_POOL = ("pool", "instance", "machine_type", "zone", "region")
_ALSO = {
    "count": "machines",
    "spot_usd_h": "usd_h",
    "ondemand_usd_h": "on_demand_usd_h",
    "node": "machine",
}
_MOST_CELLS = 100_000_000  # rows times pools
_COME = {"add": 1.0, "join": 1.0, "remove": -1.0, "lose": -1.0}


class _Long(NamedTuple):
    """One row for each change of a pool, in any order; an array that is None is not in the file."""

    rows: CellRows
    times_s: Floats
    pools: tuple[str, ...]
    machines: Floats | None
    usd_h: Floats | None
    on_demand: Floats | None
    gone: Floats | None


def read_market(
    path: Path | str,
    *,
    unit: str | None = None,
    pools: Sequence[str] = (),
    lines: int | None = None,
) -> Market:
    """Return the market that a trace tells of.

    unit    of times that do not say theirs: ms, s, min, h or d; else the likeliest, and a note
    pools   those to read; all if empty
    lines   of the file that are read; None: all
    Rows that are out of order are sorted, which a note tells.
    Raises:   FleetError: the file, the row and what is wrong with it.
    """
    path = Path(path)
    if unit is not None and unit not in UNITS_S:
        raise FleetError(f"there is no unit of time {unit!r}", hint="use ms, s, min, h or d")
    notes: list[str] = []
    first = read_bytes(path, FleetError, "trace")[:1]
    if first == b"{":
        sampled = read_samples(path)
        return only(sampled, pools) if pools else sampled
    if first == b"[":
        long = _of_json_lines(path, unit, lines)
    else:
        header, rows = read_cells(path, lines)
        if "lifetime_s" in header:
            lasting = endless(path)
            return only(lasting, pools) if pools else lasting
        long = _of_rows(rows, header or _guessed(rows), unit, notes)
    return _market(long, tuple(pools), path, notes)


# -- layouts ---------------------------------------------------------------------------------------


def _guessed(rows: CellRows) -> tuple[str, ...]:
    """Return the header that a file without one would have."""
    match len(rows.columns):
        case 3 if rows.columns[1][0] in _COME:
            return "time_ms", "event", "machine"
        case 3:
            return "date", "time", "machines"
        case 2:
            return "time", "machines"
        case width:
            what = f"{width} columns without a header"
            raise rows.fail(0, what, hint=f"name the columns; {FORMAT}")


def _of_rows(rows: CellRows, header: Sequence[str], unit: str | None, notes: list[str]) -> _Long:
    names = [_ALSO.get(name.lower(), name.lower()) for name in header]
    known = {name: at for at, name in enumerate(names)}
    times_s = _times(rows, names, unit, notes)
    if {"event", "machine"} <= known.keys():
        return _of_events(rows, times_s, known)
    by = [known[name] for name in _POOL if name in known]
    named = zip(*(rows.columns[at] for at in by), strict=True) if by else ()
    pools = tuple("/".join(parts) for parts in named)
    found = {
        name: rows.numbers(known[name], name) if name in known else None
        for name in ("machines", "usd_h", "on_demand_usd_h")
    }
    if found["machines"] is None and found["usd_h"] is None:
        what = f"neither machines nor usd_h among the columns {', '.join(header)[:80]}"
        raise rows.fail(-1, what)
    return _Long(rows, times_s, pools, *found.values(), gone=None)


def _times(rows: CellRows, names: Sequence[str], unit: str | None, notes: list[str]) -> Floats:
    """Return the times of all rows in seconds."""
    for name in names:
        if name.startswith("time_") and name[5:] in UNITS_S:
            return rows.numbers(names.index(name), name, least=-np.inf) * UNITS_S[name[5:]]
    dated = [names.index(name) for name in ("date", "time") if name in names]
    if not dated:
        raise rows.fail(-1, f"no column of times among {', '.join(names)[:80]}")
    if len(dated) == 2 or "-" in rows.columns[dated[0]][0][1:]:
        return rows.seconds(dated)
    times = rows.numbers(dated[0], "time", least=-np.inf)
    likely = unit or _likeliest(times)
    if unit is None:
        notes.append(f"{rows.place} does not say the unit of its times; taken as {likely}")
    return times * UNITS_S[likely]


def _likeliest(times: Floats) -> str:
    """Return ms for whole thousands, s for other whole numbers, else h."""
    if np.any(times != np.round(times)):
        return "h"
    return "ms" if np.all(times % 1000 == 0) and np.any(times) else "s"


def _of_events(rows: CellRows, times_s: Floats, known: dict[str, int]) -> _Long:
    events, machines = rows.columns[known["event"]], rows.columns[known["machine"]]
    pools = rows.columns[known["pool"]] if "pool" in known else ("",) * len(rows)
    change = np.array([_COME.get(event.lower(), np.nan) for event in events])
    if np.isnan(change).any():
        row = int(np.argmax(np.isnan(change)))
        raise rows.fail(row, f"event is {events[row]!r:.60}, neither add nor remove")
    there: dict[str, set[str]] = {pool: set() for pool in pools}
    counts = np.zeros(len(rows))
    in_time: list[int] = np.argsort(times_s, kind="stable").tolist()
    for row in in_time:
        held, machine = there[pools[row]], machines[row]
        if (machine in held) == (change[row] > 0):
            what = "is there already" if change[row] > 0 else "is not there"
            raise rows.fail(row, f"{events[row]} of {machine!r:.60}, which {what}")
        (held.add if change[row] > 0 else held.discard)(machine)
        counts[row] = len(held)
    return _Long(rows, times_s, pools, counts, None, None, np.maximum(0.0, -change))


def _of_json_lines(path: Path, unit: str | None, most: int | None) -> _Long:
    """Read lines like [60000, "remove", {"nodes": ["node-1"]}]; other events change nothing."""
    cells: list[tuple[str, str, str]] = []
    lines: list[int] = []
    for at, line in enumerate(begin_of_file(path, most).splitlines(), start=1):
        if line.strip():
            cells += _json_events(str(path), at, line)
            lines += [at] * (len(cells) - len(lines))
    if not cells:
        raise FleetError(f"{path} adds no machine", hint=FORMAT)
    rows = CellRows(str(path), lines, tuple(zip(*cells, strict=True)))
    times_s = rows.numbers(0, "time", least=-np.inf) * UNITS_S[unit or "ms"]
    return _of_events(rows, times_s, {"event": 1, "machine": 2})


def _json_events(place: str, at: int, line: bytes) -> Iterator[tuple[str, str, str]]:
    try:
        match json.loads(line):
            case [int() | float() as time, str(event), {"nodes": [*nodes]}]:
                machines = cast("list[object]", nodes)
                yield from ((str(time), event, str(m)) for m in machines if event in _COME)
            case _:
                raise RowError(place, at, "not [time, event, {nodes: [...]}]", hint=FORMAT)
    except (ValueError, RecursionError) as problem:
        raise RowError(place, at, f"no JSON: {problem}", hint=FORMAT) from problem


# -- one axis of times -----------------------------------------------------------------------------


def _market(long: _Long, wanted: tuple[str, ...], path: Path, notes: list[str]) -> Market:
    names = long.pools if any(long.pools) else (path.stem,) * len(long.rows)
    kinds = sorted(set(names))
    missing = next((name for name in wanted if name not in kinds), None)
    if missing is not None:
        few = ", ".join(kinds[:6]) + (" ..." if len(kinds) > 6 else "")
        raise FleetError(f"{path} has no pool {missing!r}", hint=f"it has {few}")
    kinds = list(wanted) or kinds
    places = {name: k for k, name in enumerate(kinds)}
    order = np.argsort(long.times_s, kind="stable")
    if late := int(np.count_nonzero(np.diff(long.times_s) < 0)):
        row = long.rows.lines[int(np.argmax(np.diff(long.times_s) < 0)) + 1]
        notes.append(f"{path} has rows out of order ({late}, the first is row {row}); sorted")
    which = np.array([places.get(name, -1) for name in names])
    order = order[which[order] >= 0]
    begins_s = float(long.times_s[order[0]])
    times_s, at = np.unique(long.times_s[order] - begins_s, return_inverse=True)
    if len(times_s) * len(kinds) > _MOST_CELLS:
        message = f"{path} has {len(times_s)} times of {len(kinds)} pools"
        raise FleetError(message, hint="choose some of the pools")
    cells = _Cells(len(times_s), len(kinds), at, which[order], order)
    offered = _offered(long, cells)
    return Market(
        tuple(MarketPool(name, _last(long, which, k)) for name, k in places.items()),
        times_s,
        *offered,
        until_s=float(times_s[-1]) + _last_s(times_s, offered),
        starts_s=begins_s % DAY_S if begins_s > 1000 * DAY_S else 0.0,
        notes=tuple(notes),
        begins_s=begins_s,
    )


def _last_s(times_s: Floats, offered: tuple[Floats, ...]) -> float:
    """Return for how long the last row holds.

    Of samples, most of them equally far apart, as long as the others; of a log of changes, which
    tells of no time after its last row, a second.  So do two rows that say the same: the last one
    is there to tell the end.
    """
    gaps = np.diff(times_s)
    if not len(gaps):
        return HOUR_S
    gap = float(np.median(gaps))
    is_sampled = np.mean(np.abs(gaps - gap) <= 0.01 * gap) > 0.5
    if len(gaps) == 1 and all(np.array_equal(*table[-2:], equal_nan=True) for table in offered):
        is_sampled = False
    return max(1.0, gap) if is_sampled else 1.0


class _Cells(NamedTuple):
    """Where the rows of a file stand in a table [time, pool], in the order of time."""

    times: int
    pools: int
    at: np.ndarray
    which: np.ndarray
    order: np.ndarray

    def spread(self, values: Floats) -> Floats:
        """Return [time, pool], each value held until the next; nan before a pool's first."""
        table = np.full((self.times, self.pools), np.nan)
        table[self.at, self.which] = values[self.order]
        rows = np.where(np.isnan(table), 0, np.arange(self.times)[:, None])
        return np.take_along_axis(table, np.maximum.accumulate(rows, axis=0), axis=0)


def _offered(long: _Long, cells: _Cells) -> tuple[Floats, Floats, Floats]:
    """Return machines, prices and machines gone [time, pool]."""
    priced = np.full((cells.times, cells.pools), np.nan)
    if long.usd_h is not None:
        priced = cells.spread(long.usd_h)
    counted = np.where(np.isnan(priced), 0.0, np.inf)
    if long.machines is not None:
        counted = np.nan_to_num(cells.spread(long.machines), posinf=np.inf)
    before = np.vstack([counted[:1], counted[:-1]])
    were = np.where(np.isfinite(before), before, 0.0)
    gone = np.maximum(0.0, were - np.minimum(counted, were))
    if long.gone is not None:
        gone = np.zeros_like(counted)
        np.add.at(gone, (cells.at, cells.which), long.gone[cells.order])
    first = np.argmax(~np.isnan(priced), axis=0)
    since = np.take_along_axis(priced, first[None, :], axis=0)
    return counted, np.where(np.isnan(priced), since, priced), gone


def _last(long: _Long, which: np.ndarray, pool: int) -> float:
    """Return the price on demand that a pool had at last, 0.0 if the file has none."""
    if long.on_demand is None:
        return 0.0
    rows = np.flatnonzero(which == pool)
    return float(long.on_demand[rows[np.argmax(long.times_s[rows])]])
