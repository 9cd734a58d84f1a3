"""Shipped: the constants that come with Penstock, as a file that a person can read."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from penstock.errors import EstimateError
from penstock.estimate.pool import Pooled
from penstock.files import Json, read_json, write_text
from penstock.typed import MisfitError, typed

SHIPPED = Path(__file__).with_name("constants.json")


def save(pools: Iterable[Pooled], path: Path, *, made_by: str = "") -> None:
    """Write constants as JSON with their origin.

    Raises:   OSError: the file cannot be written.
    """
    rows: list[Json] = [asdict(pool) for pool in pools]
    write_text(path, json.dumps({"made_by": made_by, "pools": rows}, indent=1) + "\n")


def load(path: Path = SHIPPED) -> tuple[Pooled, ...]:
    """Return the constants in a file; those that come with Penstock unless another is named.

    Raises:   EstimateError: it cannot be read, or holds something else.
    """
    document = read_json(path, EstimateError, "table of constants")
    try:
        return typed(tuple[Pooled, ...], document.get("pools"))
    except (MisfitError, EstimateError) as problem:
        message = f"{path} is not a table of constants: {problem}"
        raise EstimateError(message, hint="recreate it with bench.scoreboard") from problem
