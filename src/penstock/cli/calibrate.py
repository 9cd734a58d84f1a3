"""penstock doctor --calibrate: what this device and its links reach, as entries with intervals."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from penstock.cli import face
from penstock.cluster.cluster import Cluster, DeviceKind, Link
from penstock.files import Json
from penstock.units import GB, format_seconds

if TYPE_CHECKING:
    from penstock.gauge.calibrate import Calibrated
    from penstock.gauge.links import Probe

_BILLIONS = {"FLOP/s": "GFLOP/s", "bytes/s": "GB/s"}
_BUDGET_S = 40.0  # of computing; links take the rest of a minute


def calibrate(out: Path | None, *, as_json: bool) -> None:
    """Measure this device in each class of ops, and the link between two ranks; show and write.

    Raises:   RunError: a rank failed.
    """
    import torch

    from penstock.gauge.calibrate import calibrated

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a rank computes
    with face.busy("computing for a minute"):
        rates = calibrated(_BUDGET_S)
    probe = _link()
    torch.set_num_threads(threads)
    cluster = measured(Cluster.here(), rates, probe.link if probe else None)
    if out is not None:
        cluster.save(out)
    if as_json:
        face.show_json(document(cluster, rates, probe))
    else:
        face.show(words(rates, probe))
    if out is not None:
        face.say(f"wrote {out}")


def _link() -> "Probe | None":
    """Return the link between two ranks of this host; None where one device is all there is."""
    from penstock.device import here
    from penstock.gauge.links import probe_here

    if not here().can_fork:
        return None
    with face.busy("sending between two ranks"):
        return probe_here()


def measured(cluster: Cluster, rates: "Sequence[Calibrated]", link: Link | None) -> Cluster:
    """Return `cluster` with the peaks of its device and the link as they were measured.

    The peak of FLOP/s is that of the class of ops that reaches most, of memory likewise.
    """
    kind = cluster.devices[0]
    products = {
        rate.what.removeprefix("product "): rate.value
        for rate in rates
        if rate.what.startswith("product ")
    }
    computed, moved = peaks(rates)
    products["float32"] = computed
    device: DeviceKind = replace(
        kind,
        flop_per_s=tuple((name, float(f"{value:.3g}")) for name, value in products.items()),
        memory_bytes_per_s=float(f"{moved:.3g}"),
    )
    inside = cluster.inside if link is None else link
    return replace(cluster, devices=(device, *cluster.devices[1:]), inside=inside)


class BestRates(NamedTuple):
    """What a device reaches at best, in float32 and in bytes read and written."""

    flop_per_s: float
    bytes_per_s: float


def peaks(rates: "Sequence[Calibrated]") -> BestRates:
    """Return the most of all classes of ops: a convolution may take fewer products than counted."""
    computed = (r.value for r in rates if r.unit == "FLOP/s" and not r.what.endswith("bfloat16"))
    return BestRates(max(computed), max(r.value for r in rates if r.unit == "bytes/s"))


def shares(rates: "Sequence[Calibrated]") -> dict[str, float]:
    """Return the part of its peak that each class of ops reaches."""
    peak, memory = peaks(rates)
    return {
        rate.what: rate.value / (peak if rate.unit == "FLOP/s" else memory)
        for rate in rates
        if rate.unit != "s" and not rate.what.startswith("product ")
    }


class Interval(NamedTuple):
    """The first and the ninth tenth of what was measured."""

    low: float
    high: float


def link_intervals(probe: "Probe") -> tuple[Interval, Interval]:
    """Return the seconds of the smallest payload, one way, and the bytes/s of the largest."""
    small, large = probe.timings[0], probe.timings[-1]
    rate = Interval(large.size_bytes / large.high_s, large.size_bytes / large.low_s)
    return Interval(small.low_s, small.high_s), rate


def document(
    cluster: Cluster, rates: "Sequence[Calibrated]", probe: "Probe | None"
) -> dict[str, Json]:
    """Return the entries of the device and of its link, each with its interval."""
    kind = cluster.devices[0]
    link: Json = None
    if probe is not None:
        latency, rate = link_intervals(probe)
        link = {"latency_s": dict(latency._asdict()), "bytes_per_s": dict(rate._asdict())}
    return {
        "device": kind.name,
        "flop_per_s": dict(kind.flop_per_s),
        "memory_bytes_per_s": kind.memory_bytes_per_s,
        "rates": [dict(rate._asdict()) for rate in rates],
        "shares": dict(shares(rates)),
        "link": link,
    }


def words(rates: "Sequence[Calibrated]", probe: "Probe | None") -> str:
    """Return a table of the rates with their intervals, and a line for the link."""
    part = shares(rates)
    rows = [
        (
            rate.what,
            _text(rate.value, rate.unit),
            f"{_text(rate.low, rate.unit)} .. {_text(rate.high, rate.unit)}",
            f"{100 * part[rate.what]:.0f} %" if rate.what in part else "",
            rate.rounds,
        )
        for rate in rates
    ]
    lines = [face.table(("", "median", "8 times in 10", "of the peak", "rounds"), rows)]
    if probe is None:
        return "\n".join([*lines, "\nno link: run penstock doctor --links under torchrun"])
    latency, rate = link_intervals(probe)
    small = f"{format_seconds(latency.low)} .. {format_seconds(latency.high)}"
    large = f"{_text(rate.low, 'bytes/s')} .. {_text(rate.high, 'bytes/s')}"
    return "\n".join([*lines, f"\nbetween two ranks: {small} at least, large ones {large}"])


def _text(value: float, unit: str) -> str:
    return format_seconds(value) if unit == "s" else f"{value / GB:.3g} {_BILLIONS[unit]}"
