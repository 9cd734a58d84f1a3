"""Samples: traces of machines counted at equal gaps, one JSON document a pool.

    {"metadata": {"gap_seconds": 300}, "data": [0, 4, 4, 1]}

The public traces of SkyPilot ("Can't Be Late", NSDI 2024) are such files.
"""

import json
import math
from pathlib import Path

import numpy as np

from penstock.errors import FleetError
from penstock.files import read_bytes
from penstock.fleet.csv_rows import FORMAT, MOST
from penstock.fleet.market import Market, MarketPool
from penstock.typed import damage, typed


def read_samples(path: Path) -> Market:
    """Return the market of a file of samples, its pool called after the file.

    A row stands where the number of machines changes; the last sample holds as long as the others.
    Raises:   FleetError: no such file, no JSON, or not the fields that samples have.
    """
    place = f"{path}"
    try:
        content = json.loads(read_bytes(path, FleetError, "trace"))
    except (ValueError, RecursionError) as problem:
        raise FleetError(f"{place} is no JSON: {problem}", hint=FORMAT) from problem
    match content:
        case {"metadata": {"gap_seconds": int() | float() as gap_s}, "data": [*data]}:
            with damage(place, FleetError, hint=FORMAT):
                counts = np.array(typed(list[float], data))
        case _:
            message = f"{place} is not {{metadata: {{gap_seconds: ...}}, data: [...]}}"
            raise FleetError(message, hint=FORMAT)
    if not 0 < gap_s < math.inf or not len(counts):
        message = f"{place} has {len(counts)} samples, {gap_s:g} s apart"
        raise FleetError(message, hint="metadata.gap_seconds is above 0, data is a list of numbers")
    if not np.all((counts >= 0) & (counts <= MOST)):
        at = int(np.argmin((counts >= 0) & (counts <= MOST)))
        raise FleetError(f"{place}: data[{at}] is {counts[at]:g}", hint="give 0 machines or more")
    at = np.flatnonzero(np.diff(counts, prepend=-1.0))
    offered = counts[at][:, None]
    gone = np.maximum(0.0, -np.diff(offered, axis=0, prepend=offered[:1]))
    none = np.full(offered.shape, np.nan)
    until_s = len(counts) * gap_s
    times_s = at.astype(np.float64) * gap_s
    return Market((MarketPool(path.stem),), times_s, offered, none, gone, until_s)
