"""Datasheet: the figures of an accelerator's data sheet, for devices that are not here.

Source:   NVIDIA's datasheets; links are those of the machines that these devices are sold in.
"""

from dataclasses import dataclass, fields

from penstock.errors import EstimateError
from penstock.units import GB, TFLOP


@dataclass(frozen=True, slots=True)
class Datasheet:
    """One accelerator: peak rates, all of them decimal and in one direction.

    peak_flop_per_s      dense products of 16-bit numbers, summed in 32 bits
    bytes_per_s          its own memory
    inside_bytes_per_s   to another device of the same host
    across_bytes_per_s   its share of the host's network
    shared               devices of a host share `inside_bytes_per_s`: a bus, no switch
    Raises:   EstimateError: a rate or a size is not positive.
    """

    name: str
    peak_flop_per_s: float
    bytes_per_s: float
    inside_bytes_per_s: float
    across_bytes_per_s: float
    ranks_per_host: int
    shared: bool = False

    def __post_init__(self) -> None:
        for field in fields(self)[1:6]:
            if not getattr(self, field.name) > 0:
                message = f"device {self.name}: {field.name} is {getattr(self, field.name)}"
                raise EstimateError(message, hint="every rate and size must be above 0")


def _device(name: str, tflops: float, memory: float, inside: float, across: float) -> Datasheet:
    """Return a device from TFLOP/s and GB/s, in hosts of eight."""
    return Datasheet(name, tflops * TFLOP, memory * GB, inside * GB, across * GB, 8)


def _on_bus(name: str, tflops: float, memory: float, across: float) -> Datasheet:
    """Return a device of a host without NVLink: PCIe 3 x16, shared."""
    return Datasheet(name, tflops * TFLOP, memory * GB, 12 * GB, across * GB, 8, shared=True)


# positional, to be read as a table: name, TFLOP/s, GB/s of memory, (inside,) across
DEVICES = (
    _device("a100-40", 312, 1555, 300, 25),
    _device("a100-80", 312, 2039, 300, 25),
    _device("h100", 989, 3352, 450, 50),
    _device("h200", 989, 4800, 450, 50),
    _device("b200", 2250, 8000, 900, 50),
    Datasheet("gh200", 989 * TFLOP, 4000 * GB, 150 * GB, 25 * GB, 4),
    _device("v100", 125, 900, 150, 12.5),
    _on_bus("t4", 65, 320, 3),
    _on_bus("a10g", 70, 600, 6),
    _on_bus("l4", 121, 300, 6),
    _on_bus("l40s", 362, 864, 12.5),
    _on_bus("titan-rtx", 130.5, 672, 0.0125),  # hosts with a network of 100 Mb/s
    _on_bus("rtx-2080", 80.5, 448, 0.0125),
    _on_bus("rtx-3090", 71, 936, 0.0125),
)


def find_device(name: str) -> Datasheet:
    """Return the device of this name.

    Raises:   EstimateError: there is none.
    """
    for device in DEVICES:
        if device.name == name:
            return device
    known = ", ".join(device.name for device in DEVICES)
    raise EstimateError(f"no device is called {name!r}", hint=f"known: {known}")
