"""Joules: what this machine takes while it trains, where it tells.

Processors and their memory by RAPL (/sys/class/powercap), whose counters begin again at
max_energy_range_uj; accelerators by NVML, where its library is installed.  All of the machine is
counted, whatever else runs on it; what tells nothing - disks, fans, the network - is not.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, final

from penstock.device import Device, all_here

POWERCAP = Path("/sys/class/powercap")
_MICRO = 1e-6


class JouleMeter(NamedTuple):
    """A counter of joules.

    read:     gives what it stands at; None: it cannot be read.
    range_j:  at which it begins again at 0; inf: never.
    """

    name: str
    read: Callable[[], float | None]
    range_j: float


def meters(powercap: Path = POWERCAP, devices: Iterable[Device] | None = None) -> list[JouleMeter]:
    """Return the counters that can be read: of packages, of memory beside them, of accelerators.

    devices:  whose own is asked for; None: all accelerators here.
    """
    boards = all_here() if devices is None else devices
    return [*_rapl(powercap), *(found for device in boards for found in _board(device))]


def _rapl(powercap: Path) -> Iterator[JouleMeter]:
    """Yield packages, and memory, which stands below a package and is no part of its counter."""
    for zone in sorted(powercap.glob("intel-rapl:*")):
        try:
            name = (zone / "name").read_text().strip()
            range_j = _MICRO * int((zone / "max_energy_range_uj").read_text())
        except (OSError, ValueError):
            continue
        is_counted = name.startswith("package") or name == "dram"
        if is_counted and _joules_of(zone) is not None:
            yield JouleMeter(f"{name} ({zone.name})", lambda zone=zone: _joules_of(zone), range_j)


def _joules_of(zone: Path) -> float | None:
    try:
        return _MICRO * int((zone / "energy_uj").read_text())
    except (OSError, ValueError):  # for root only, or gone
        return None


def _board(device: Device) -> Iterator[JouleMeter]:
    if device.joules() is not None:
        yield JouleMeter(f"{device.name} {device.index}", device.joules, float("inf"))


def why_no_joules(powercap: Path = POWERCAP) -> str:
    """Return why nothing tells."""
    zones = sorted(powercap.glob("intel-rapl:*"))
    if not zones:
        return f"there is no RAPL below {powercap}, and no board tells"
    return f"{zones[0] / 'energy_uj'} cannot be read (root can), and no board tells"


@final
class Joules:
    """What meters count from now on; it is to be read before a counter goes round twice."""

    def __init__(self, found: Sequence[JouleMeter]) -> None:
        self._meters, self._last_j = found, [meter.read() for meter in found]
        self._total_j: float | None = 0.0 if found else None
        self._steps: list[float] = []

    def so_far(self) -> float | None:
        """Return the joules since it was made; None where a meter does not tell, now or before."""
        for at, meter in enumerate(self._meters):
            now_j, last_j = meter.read(), self._last_j[at]
            if self._total_j is None or now_j is None or last_j is None:
                self._total_j = None
                break
            moved_j = now_j - last_j
            self._total_j += moved_j + (meter.range_j if moved_j < 0 else 0.0)
            self._last_j[at] = now_j
        return self._total_j

    def hear(self, step: object) -> None:
        """Note that a step is done."""
        total_j = self.so_far()
        if total_j is not None:
            self._steps.append(total_j)

    @property
    def per_step(self) -> float | None:
        """Return the joules of a step, the mean from the first to the last that it heard of.

        None where a meter does not tell, and of one step.
        """
        count = 0 if self._total_j is None else len(self._steps) - 1
        return (self._steps[-1] - self._steps[0]) / count if count > 0 else None
