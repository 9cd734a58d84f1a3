"""Datasheet: the figures of an accelerator's data sheet, for devices that are not here.

Rates are those of makers' datasheets; links are those of the machines that these devices are sold
in.  Left out: TPUs and other accelerators that torch does not run on without a bridge.
"""

import math
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
    power_w              what it may draw, which is what products end at
    memory_bytes         infinite: not known
    is_hopper            of NVIDIA's Hopper or a later one for data centres, whose best kernels are
                         written anew
    has_eight_bits       products of 8 bits with a point are twice as fast
    Raises:   EstimateError: a rate or a size is not positive.
    """

    name: str
    peak_flop_per_s: float
    bytes_per_s: float
    inside_bytes_per_s: float
    across_bytes_per_s: float
    ranks_per_host: int
    shared: bool = False
    power_w: float = 400.0
    memory_bytes: float = math.inf
    source: str = ""
    is_hopper: bool = False
    has_eight_bits: bool = True

    def __post_init__(self) -> None:
        for field in (*fields(self)[1:6], *fields(self)[7:9]):
            if not getattr(self, field.name) > 0:
                message = f"device {self.name}: {field.name} is {getattr(self, field.name)}"
                raise EstimateError(message, hint="every rate and size must be above 0")


def usual_power_w(peak_flop_per_s: float) -> float:
    """Return the watts usual for a device with this peak: 400 to 1000 from A100 to B200."""
    return 400.0 * (peak_flop_per_s / (312 * TFLOP)) ** 0.46


# name, TFLOP/s, GB/s of memory, GB/s inside and across, devices of a host, a bus, W, GB, source
_TABLE: tuple[tuple[str, float, float, float, float, int, bool, float, float, str], ...] = (
    (
        "a100-40", 312, 1555, 300, 25, 8, False, 400, 40,
        "A100 SXM4 40GB, DGX A100: NVLink 3, 8 x 200 Gb/s",
    ),
    (
        "a100-80", 312, 2039, 300, 25, 8, False, 400, 80,
        "A100 SXM4 80GB, DGX A100: NVLink 3, 8 x 200 Gb/s",
    ),
    ("h100", 989, 3352, 450, 50, 8, False, 700, 80, "H100 SXM5, DGX H100: NVLink 4, 8 x 400 Gb/s"),
    ("h200", 989, 4800, 450, 50, 8, False, 700, 141, "H200 SXM, HGX H200: NVLink 4, 8 x 400 Gb/s"),
    ("b200", 2250, 8000, 900, 50, 8, False, 1000, 180, "B200, DGX B200: NVLink 5, 8 x 400 Gb/s"),
    (
        "gh200", 989, 4000, 150, 25, 4, False, 700, 96,
        "GH200 96GB, four in a host: 6 links to each other, 200 Gb/s",
    ),
    ("v100", 125, 900, 150, 12.5, 8, False, 300, 16, "V100 SXM2, DGX-1: NVLink 2; 100 Gb/s each"),
    ("t4", 65, 320, 12, 3, 8, True, 70, 16, "T4: PCIe 3 x16; 25 Gb/s each"),
    ("a10g", 70, 600, 25, 6, 8, True, 300, 24, "A10G, AWS g5: PCIe 4 x16; 100 Gb/s a pair"),
    ("l4", 121, 300, 25, 6, 8, True, 72, 24, "L4: PCIe 4 x16; 50 Gb/s each"),
    ("l40s", 362, 864, 25, 12.5, 8, True, 350, 48, "L40S: PCIe 4 x16; 100 Gb/s each"),
    ("titan-rtx", 130.5, 672, 12, 1.25, 8, True, 280, 24, "Titan RTX: PCIe 3 x16; 10 Gb/s"),
    ("rtx-2080", 80.5, 448, 12, 1.25, 8, True, 215, 8, "RTX 2080: PCIe 3 x16; 10 Gb/s"),
    (
        "rtx-3090", 71, 936, 25, 1.25, 8, True, 350, 24,
        "RTX 3090, GA102 whitepaper: PCIe 4 x16; 10 Gb/s",
    ),
    (
        "rtx-4090", 165.2, 1008, 25, 1.25, 8, True, 450, 24,
        "RTX 4090, Ada whitepaper: PCIe 4 x16; 10 Gb/s",
    ),
    (
        "rtx-5090", 209.5, 1792, 50, 1.25, 8, True, 575, 32,
        "RTX 5090, Blackwell whitepaper: PCIe 5 x16; 10 Gb/s",
    ),
    (
        "mi250x", 191.5, 1638, 50, 12.5, 8, False, 280, 64,
        "MI250X, one of its two dies, as software sees them; 100 Gb/s each",
    ),
    (
        "mi300x", 1307, 5300, 448, 50, 8, False, 750, 192,
        "MI300X OAM: 7 links of 64 GB/s; 8 x 400 Gb/s",
    ),
)  # fmt: skip
_HOPPER = {"h100", "h200", "gh200", "b200"}
_WITHOUT_EIGHT_BITS = {
    "a100-40", "a100-80", "v100", "t4", "a10g", "titan-rtx", "rtx-2080", "rtx-3090", "mi250x",
}  # fmt: skip
DEVICES = tuple(
    Datasheet(
        name, tflops * TFLOP, memory * GB, inside * GB, across * GB, ranks, bus, watts, size * GB,
        source, is_hopper=name in _HOPPER, has_eight_bits=name not in _WITHOUT_EIGHT_BITS,
    )
    for name, tflops, memory, inside, across, ranks, bus, watts, size, source in _TABLE
)  # fmt: skip
_ALSO = {
    "a100": "a100-80", "a100-sxm": "a100-80", "h100-80": "h100", "h100-sxm": "h100",
    "h200-141": "h200", "b200-180": "b200", "gh-96": "gh200", "v100-16": "v100", "a10": "a10g",
}  # fmt: skip


def find_device(name: str) -> Datasheet:
    """Return the device of this name: "A100-80", "a100_80gb" and "RTX 4090" are names, too.

    Raises:   EstimateError: there is none.
    """
    plain = "-".join(name.lower().replace("_", " ").replace("-", " ").split()).removesuffix("gb")
    for device in DEVICES:
        if device.name == _ALSO.get(plain, plain):
            return device
    known = ", ".join(device.name for device in DEVICES)
    raise EstimateError(f"no device is called {name!r}", hint=f"known: {known}")
