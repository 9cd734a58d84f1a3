"""Units: decimal and binary bytes, and numbers as people read them."""

import math

KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12
KiB, MiB, GiB, TiB = 2**10, 2**20, 2**30, 2**40
TFLOP = 10**12


def format_bytes(size_bytes: float) -> str:
    """Return a size with a binary unit and three significant digits, like "12.3 MiB"."""
    for unit, name in ((TiB, "TiB"), (GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if abs(size_bytes) >= unit:
            return f"{_three_digits(size_bytes / unit)} {name}"
    return f"{size_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """Return a duration with a fitting unit and three significant digits, like "12.3 ms"."""
    if abs(seconds) >= 120:
        return f"{_three_digits(seconds / 60)} min"
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= unit:
            return f"{_three_digits(seconds / unit)} {name}"
    return "0 s" if seconds == 0 else f"{_three_digits(seconds * 1e9)} ns"


def _three_digits(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    digits = max(0, 3 - len(str(int(abs(value)))))
    return f"{value:.{digits}f}"
