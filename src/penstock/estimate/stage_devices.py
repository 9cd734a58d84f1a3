"""Devices: those of the stages of a described run, each with the rates that its row gives.

`a100-80/t4` are a stage on A100 and one on T4; `a100-80+t4` is one that is divided among both.
Ranks of a stage do as much each, so it is as slow as the kind that has least FLOP/s, and as the
slowest link to any.  Rates are written alike: one for all, or one for each.

Ignores:  unlike parts of the batch for unlike ranks of a stage.
"""

from dataclasses import replace
from typing import NamedTuple

from penstock.errors import EstimateError
from penstock.estimate.datasheet import Datasheet, find_device
from penstock.estimate.row import Line
from penstock.units import GB

_Sheets = list[list[Datasheet]]


class _Rate(NamedTuple):
    """A column that says something of devices: the field, the unit, the most, whether whole."""

    field: str
    unit: int
    most: int
    is_whole: bool = False


_RATES = {
    "memory_gb_per_s": _Rate("bytes_per_s", GB, 100_000),
    "inside_gb_per_s": _Rate("inside_bytes_per_s", GB, 10_000),
    "across_gb_per_s": _Rate("across_bytes_per_s", GB, 10_000),
    "power_w": _Rate("power_w", 1, 100_000),
    "gpus_per_host": _Rate("ranks_per_host", 1, 10_000, True),
}


def devices_of(row: Line, stages: int) -> tuple[Datasheet, ...]:
    """Return the device of each of so many stages.

    Raises:   EstimateError: no such device; other than one or one a stage; a rate that is none.
    """
    kinds = [part.split("+") for part in row.text("device").split("/")]
    if len(kinds) not in (1, stages):
        what = f"{len(kinds)} devices for {stages} stages"
        raise EstimateError(f"{row.place}: {what}", hint="give one device, or one for each stage")
    named = [[find_device(name.strip()) for name in names] for names in kinds]
    sheets = named * stages if len(named) == 1 else named
    for column in _RATES:
        if row.has(column):
            sheets = _rated(row, column, sheets)
    return tuple(map(_together, sheets))


def _rated(row: Line, column: str, sheets: _Sheets) -> _Sheets:
    """Return the devices with what a column says of them."""
    rate, cell, found = _RATES[column], row.text(column), _Sheets()
    parts = [part.split("+") for part in cell.split("/")]
    fits = len(parts) in (1, len(sheets))
    for of_stage, part in zip(
        sheets, parts * len(sheets) if len(parts) == 1 else parts, strict=False
    ):
        numbers = [row.number_in(column, text, rate.most) for text in part]
        if rate.is_whole and any(number != int(number) for number in numbers):
            what = f"{column} is {cell!r}, not a whole number"
            raise EstimateError(f"{row.place}: {what}", hint="correct the cell")
        each = [rate.unit * (int(n) if rate.is_whole else n) for n in numbers]
        each = each * len(of_stage) if len(each) == 1 else each
        fits = fits and len(each) == len(of_stage)
        pairs = zip(of_stage, each, strict=False)
        found.append([replace(sheet, **{rate.field: value}) for sheet, value in pairs])
    if not fits:
        what = f"{column} is {cell} and device {row.text('device')}"
        raise EstimateError(f"{row.place}: {what}", hint="give one number, or one for each device")
    return found


def _together(sheets: list[Datasheet]) -> Datasheet:
    """Return one device in place of several kinds of one stage."""
    slowest = min(sheets, key=lambda sheet: sheet.peak_flop_per_s)
    if len(sheets) == 1:
        return slowest
    return replace(
        slowest,
        name="+".join(sheet.name for sheet in sheets),
        inside_bytes_per_s=min(sheet.inside_bytes_per_s for sheet in sheets),
        across_bytes_per_s=min(sheet.across_bytes_per_s for sheet in sheets),
        ranks_per_host=min(sheet.ranks_per_host for sheet in sheets),
        shared=any(sheet.shared for sheet in sheets),
        memory_bytes=min(sheet.memory_bytes for sheet in sheets),
        has_eight_bits=all(sheet.has_eight_bits for sheet in sheets),
    )
