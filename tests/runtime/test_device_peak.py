"""Device peak: what a rank has held at most, as an accelerator tells it."""

from penstock.device import Device
from penstock.runtime.device_peak import with_peak


class Pretended:
    """An accelerator on which a module lies besides what a rank holds."""

    is_cpu = False

    def __init__(self, beside: int) -> None:
        self.now = self.peak_bytes = beside

    def hold(self, size: int) -> None:
        self.now += size
        self.peak_bytes = max(self.peak_bytes, self.now)

    def reset_peak(self) -> int:
        self.peak_bytes = self.now
        return self.now


def test_state_that_a_window_makes_counts_once() -> None:
    """The first window of a run makes the optimizer's state; what is of others is left out."""
    device, held = Pretended(1000), [100]
    device.hold(100)

    def window() -> str:
        device.hold(70)
        held[0] += 20  # of which that stays
        device.hold(-50)
        return "done"

    assert with_peak(device, lambda: held[0], window) == ("done", 170)  # type: ignore[arg-type]
    assert with_peak(device, lambda: held[0], str) == ("", 120)  # type: ignore[arg-type]


def test_cpu_tells_no_peak() -> None:
    assert with_peak(Device("cpu"), lambda: 5, lambda: 7) == (7, 0)
