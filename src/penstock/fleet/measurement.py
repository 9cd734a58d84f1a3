"""Measurements: what is known of something that takes seconds, and the layouts of their tables.

Each layout says which columns a table has, and which physics its seconds follow: a sum of terms,
each known but for a constant that is not below 0.  The constants are learned (learn.py).

    step        floating-point work / peak, bytes moved / memory bandwidth, launches of the host,
                least times of kernels, parameters updated
    placement   replicas on hosts: a share of the batch, messages inside a host, between hosts, and
                what the ranks of a host send through one network card
    transfer    a checkpoint to a disk or bucket, or weights through a server: bytes and tensors
    start       of machines and processes: a constant for each kind, and tensors
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

from penstock.errors import EstimateError
from penstock.estimate.datasheet import DEVICES
from penstock.estimate.row import Line
from penstock.estimate.table import read_lines
from penstock.units import GB, TFLOP

Named: TypeAlias = Mapping[str, float]

_KERNEL = 9  # taps of a convolution: a square kernel of three


@dataclass(frozen=True, slots=True)
class Measurement:
    """What takes `seconds`; None where they are to be predicted.

    group:      what is held out together: the model, or the placement
    device:     on which it runs, "" where that does not matter
    campaign:   what was measured together and may differ from other days by a factor, or ""
    terms:      the physics, each known but for a constant
    features:   by which what the physics leaves over is told, and whether it extrapolates
    """

    group: str
    device: str
    campaign: str
    terms: Named
    features: Named
    seconds: float | None
    place: str = ""

    def __post_init__(self) -> None:
        """Check the numbers."""
        values = *self.terms.values(), *self.features.values(), self.seconds or 1.0
        if not all(map(math.isfinite, values)) or min(self.terms.values(), default=-1) < 0:
            message = f"{self.place or self.group}: {dict(self.terms)} are no terms of seconds"
            raise EstimateError(message, hint="each must be a number, none below 0")
        if self.seconds is not None and not self.seconds > 0:
            message = f"{self.place or self.group}: it took {self.seconds} s"
            raise EstimateError(message, hint="leave the cell of what was not measured empty")


class Peaks(NamedTuple):
    """What a device's data sheet says: FLOP/s and bytes/s."""

    flop_per_s: float
    bytes_per_s: float


# 32-bit products; of devices that estimate/datasheet.py does not know, or only in 16 bits
_PEAKS = {
    "k80": Peaks(4.113 * TFLOP, 240 * GB),  # one of its two chips
    "p100": Peaks(9.526 * TFLOP, 732 * GB),
    "v100": Peaks(15.7 * TFLOP, 900 * GB),
    "t4": Peaks(8.1 * TFLOP, 320 * GB),
}


def peaks_of(device: str) -> Peaks:
    """Return the peaks of a device, by the name that data sheets give it.

    Raises:   EstimateError: it is not known.
    """
    name = device.lower()
    if name in _PEAKS:
        return _PEAKS[name]
    for one in DEVICES:
        if one.name == name:
            return Peaks(one.peak_flop_per_s, one.bytes_per_s)
    known = ", ".join(sorted({*_PEAKS, *(one.name for one in DEVICES)}))
    raise EstimateError(
        f"nothing is known of a device {device!r}",
        hint=f"give the columns peak_flop_per_s and bytes_per_s, or one of {known}",
    )


@dataclass(frozen=True, slots=True)
class StepWork:
    """One step of a model on one rank: floating-point operations, parameters, tensors, bytes.

    tensors:       parameters as the model has them: each is a few launches and one update
    moved_bytes:   of activations, read and written; None where nobody counted
    """

    flop: float
    parameters: float
    tensors: float
    moved_bytes: float | None = None

    @property
    def moved(self) -> float:
        """Return the bytes moved, or what a network of square convolutions would move.

        A product of width w takes w operations for each value: flop / w, w = sqrt(parameters /
        tensors / 9).
        """
        if self.moved_bytes is not None:
            return self.moved_bytes
        width = math.sqrt(self.parameters / self.tensors / _KERNEL)
        return 4.0 * self.flop / max(1.0, width)


def of_step(
    model: str, device: str, peaks: Peaks, work: StepWork, *, seconds: float | None = None
) -> Measurement:
    """Return a step of `work` on a device of these peaks."""
    terms = {
        "work": work.flop / peaks.flop_per_s,
        "bytes": work.moved / peaks.bytes_per_s,
        "launches": work.tensors * 1e-5,
        "kernels": work.tensors * 1e7 / peaks.flop_per_s,
        "update": 12.0 * work.parameters / peaks.bytes_per_s,
        "step": 1e-3,
        "least": 1e10 / peaks.flop_per_s,
    }
    features = {
        "flop": math.log(work.flop),
        "tensors": math.log(work.tensors),
        "parameters": math.log(work.parameters),
        "peak": math.log(peaks.flop_per_s),
        "bandwidth": math.log(peaks.bytes_per_s),
    }
    if work.moved_bytes is not None:
        features["bytes moved"] = math.log(work.moved_bytes)
    return Measurement(model, device, "", terms, features, seconds)


def steps_on(
    model: str, work: StepWork, rows: Sequence[Measurement], devices: Iterable[str] = ()
) -> list[Measurement]:
    """Return a row for a step of `work` on each of `devices` and on each device of `rows`.

    The bytes moved are left to be guessed where they are of the rows, too.
    Raises:   EstimateError: nothing is known of one of `devices`.
    """
    known = {
        row.device: Peaks(math.exp(row.features["peak"]), math.exp(row.features["bandwidth"]))
        for row in rows
    }
    if not all("bytes moved" in row.features for row in rows):
        work = replace(work, moved_bytes=None)
    names = dict.fromkeys([*devices, *known])
    return [of_step(model, name, known.get(name) or peaks_of(name), work) for name in names]


def of_transfer(
    model: str,
    size_bytes: float,
    tensors: float,
    *,
    to: str = "",
    campaign: str = "",
    seconds: float | None = None,
) -> Measurement:
    """Return the writing or sending of `tensors` tensors, together `size_bytes` bytes."""
    terms = {"start": 1.0, "bytes": size_bytes / GB, "tensors": tensors * 1e-3}
    features = {"bytes": math.log(size_bytes), "tensors": math.log(tensors)}
    return Measurement(model, to, campaign, terms, features, seconds)


def of_start(model: str, kind: str, tensors: float, *, seconds: float | None = None) -> Measurement:
    """Return a start of this kind: a constant for it, and making what `tensors` tensors need.

    Ignores:  the bytes of the model, which four models that were measured do not tell from tensors.
    """
    terms = {f"start {kind}": 1.0, "tensors": tensors * 1e-3}
    return Measurement(model, kind, "", terms, {"tensors": math.log1p(tensors)}, seconds)


def of_placement(
    app: str, hosts: Sequence[int], batch: float, *, seconds: float | None = None
) -> Measurement:
    """Return a step of replicas on hosts, `hosts[i]` of them on host i, each with `batch` samples.

    Raises:   EstimateError: a host without a replica.
    """
    if not hosts or min(hosts) < 1:
        message = f"{list(hosts)} are no numbers of replicas on hosts"
        raise EstimateError(message, hint="each host has at least one replica")
    count, replicas, most = len(hosts), sum(hosts), max(hosts)
    across, inside = float(count > 1), float(count == 1 < replicas)
    ring = across * (count - 1) / count
    terms = {
        "step": 1e-2,
        "samples": batch * 1e-3,
        "inside": inside,
        "inside, each": inside * (replicas - 2),
        "across": across,
        "across, each": across * (count - 2),
        "card": across * (most - 1),
        "ring": ring,
        "card, ring": ring * (most - 1),
        "ring, samples": ring * batch * 1e-3,
    }
    features = {
        "batch": math.log(batch),
        "hosts": float(count),
        "replicas": float(replicas),
        "most": float(most),
        "least": float(min(hosts)),
        "last": float(hosts[-1]),
        "mean": replicas / count,
        "across": across,
        "share": 1.0 / replicas,
    }
    return Measurement("".join(map(str, hosts)), app, "", terms, features, seconds)


# -- tables ----------------------------------------------------------------------------------------


class MeasuredTable(NamedTuple):
    """What a file holds, in the layout that its columns have."""

    layout: str
    rows: tuple[Measurement, ...]


class FleetLayout(NamedTuple):
    """A layout: the columns that a table must have, and what a row of it is."""

    name: str
    columns: frozenset[str]
    build: Callable[[Line], Measurement]


def _text(row: Line, column: str) -> str:
    return row.text(column) if column in row.cells else ""


def _optional(row: Line, column: str) -> float | None:
    return row.number(column) if _text(row, column) else None


def _step(row: Line) -> Measurement:
    device, peak = _text(row, "device"), _optional(row, "peak_flop_per_s")
    moves = _optional(row, "bytes_per_s")
    peaks = Peaks(peak, moves) if peak is not None and moves is not None else peaks_of(device)
    work = StepWork(
        row.number("flop"),
        row.number("parameters"),
        row.number("tensors"),
        _optional(row, "moved_bytes"),
    )
    return of_step(row.text("model"), device, peaks, work, seconds=row.measured("seconds"))


def _placement(row: Line) -> Measurement:
    text = row.text("placement")
    if not (text.isdecimal() and text.isascii()):
        message = f"{row.place}: placement is {text!r}, not like 213"
        raise EstimateError(message, hint="write the number of replicas on each host, below 10")
    hosts = [int(letter) for letter in text]
    seconds = row.measured("seconds" if "seconds" in row.cells else "step_time")
    batch = row.number("batch" if "batch" in row.cells else "local_bsz")
    return of_placement(_text(row, "model"), hosts, batch, seconds=seconds)


def _transfer(row: Line) -> Measurement:
    size, tensors = row.number("size_bytes"), row.number("tensors")
    to, campaign = _text(row, "to"), _text(row, "campaign")
    seconds = row.measured("seconds")
    return of_transfer(row.text("model"), size, tensors, to=to, campaign=campaign, seconds=seconds)


def _start(row: Line) -> Measurement:
    tensors, seconds = _optional(row, "tensors") or 0.0, row.measured("seconds")
    return of_start(row.text("model"), row.text("kind"), tensors, seconds=seconds)


FLEET_LAYOUTS = (
    FleetLayout("step", frozenset(("model", "flop", "parameters", "tensors", "seconds")), _step),
    FleetLayout("transfer", frozenset(("model", "size_bytes", "tensors", "seconds")), _transfer),
    FleetLayout("start", frozenset(("model", "kind", "seconds")), _start),
    FleetLayout("placement", frozenset(("placement", "batch", "seconds")), _placement),
    FleetLayout("placement", frozenset(("placement", "local_bsz", "step_time")), _placement),
)


def read_table(path: Path) -> MeasuredTable:
    """Return the table in a file; a row without seconds is to be predicted.

    Raises:   EstimateError: not there, no CSV, columns of no known layout, or a cell that cannot
              be, with its row.
    """
    head, rows = read_lines(path)
    for layout in FLEET_LAYOUTS:
        if layout.columns <= set(head):
            return MeasuredTable(layout.name, tuple(_placed(row, layout.build) for row in rows))
    known = "; ".join(", ".join(sorted(layout.columns)) for layout in FLEET_LAYOUTS[:4])
    message = f"{path} has columns of no known layout: {', '.join(head)[:80]}"
    raise EstimateError(message, hint=f"it needs one of: {known} (docs/fleet_predict.md)")


def read_tables(paths: Sequence[Path]) -> dict[str, list[Measurement]]:
    """Return the measured rows of tables, by layout.

    Raises:   EstimateError: a table that cannot be read.
    """
    found: dict[str, list[Measurement]] = {}
    for table in map(read_table, paths):
        found.setdefault(table.layout, []).extend(row for row in table.rows if row.seconds)
    return found


def _placed(row: Line, build: Callable[[Line], Measurement]) -> Measurement:
    try:
        return build(row)
    except EstimateError as problem:
        if problem.message.startswith(row.place):
            raise
        raise EstimateError(f"{row.place}: {problem.message}", hint=problem.hint) from problem
