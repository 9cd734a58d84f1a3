"""What tests of links and hosts share."""

import pytest

from penstock.gauge import links
from penstock.units import KiB


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure links in a moment: figures of this world, good for nothing else."""
    monkeypatch.setattr(links, "SIZES", (64, 4 * KiB, 32 * KiB))
    monkeypatch.setattr(links, "_ROUNDS", (2, 3))
    monkeypatch.setattr(links, "_REPEATS", (2, 5))
    monkeypatch.setattr(links, "_THINK_S", 1e-5)
    monkeypatch.setattr(links, "_PAUSE_S", 1e-4)
