"""Flat: files of plans as they were written before a plan had records: one field for each word."""

from typing import cast

from penstock.files import Json
from penstock.plan.decision_words import HOMES, ROWS
from penstock.typed import MisfitError


def is_flat(content: dict[str, Json]) -> bool:
    """Return whether a file of a plan has its cuts as a row, and no stages."""
    return "cuts" in content and "stages" not in content


def nested(flat: dict[str, Json]) -> dict[str, Json]:
    """Return the content that a flat file has today.

    A row becomes a field of each stage, another word a field of its record; what is none of both
    stays where it is.
    Raises:   MisfitError: a row is none, or is of another number of stages.
    """
    content: dict[str, Json] = {"place": {}, "stages": _stages(flat)}
    for name, value in flat.items():
        if name in HOMES:
            cast("dict[str, Json]", content.setdefault(HOMES[name], {}))[name] = value
        elif name not in ROWS:
            content[name] = value
    return content


def _stages(flat: dict[str, Json]) -> list[Json]:
    rows = {field: _row(flat, name) for name, field in ROWS.items()}
    count = len(rows["cut"]) + 1
    stages: list[dict[str, Json]] = [{} for _ in range(count)]
    for name, field in ROWS.items():
        row = rows[field]
        wanted = count - 1 if name in ("cuts", "cut_names") else count
        if len(row) != wanted and (row or name == "cut_names"):
            raise MisfitError(f"says {len(row)} of {wanted} stages", name)
        for stage, value in zip(stages, row, strict=False):
            stage[field] = value
    return cast("list[Json]", stages)


def _row(flat: dict[str, Json], name: str) -> list[Json]:
    row = flat.get(name, [])
    if not isinstance(row, list):
        raise MisfitError.of(row, "a list", name)
    return row
