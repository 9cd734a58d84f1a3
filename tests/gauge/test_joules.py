"""Joules: counters of a stand-in for /sys/class/powercap, and of a board."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import device
from penstock.device import Device
from penstock.gauge.joules import JouleMeter, Joules, meters, why_no_joules

RANGE_UJ = 262_143_328_850
ZONES = {
    "intel-rapl:0": "package-0",
    "intel-rapl:0:0": "core",
    "intel-rapl:0:1": "dram",
    "intel-rapl:1": "package-1",
    "intel-rapl:2": "psys",
}


def powercap(folder: Path) -> Path:
    """Make a folder such as the kernel has; a package counts 1 J, its cores and all else 100."""
    for zone, name in ZONES.items():
        (folder / zone).mkdir(parents=True)
        (folder / zone / "name").write_text(f"{name}\n")
        (folder / zone / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
        count(folder, zone, 1_000_000 if name[0] in "pd" and name != "psys" else 100_000_000)
    (folder / "intel-rapl").mkdir()  # the driver's own
    return folder


def count(folder: Path, zone: str, uj: int) -> None:
    (folder / zone / "energy_uj").write_text(f"{uj}\n")


def test_packages_count_and_memory_beside_them_and_no_part_twice(tmp_path):
    found = meters(powercap(tmp_path), ())
    assert [meter.name for meter in found] == [
        *("package-0 (intel-rapl:0)", "dram (intel-rapl:0:1)", "package-1 (intel-rapl:1)")
    ]
    assert [meter.read() for meter in found] == [1.0, 1.0, 1.0]
    joules = Joules(found)
    count(tmp_path, "intel-rapl:0", 3_000_000)
    count(tmp_path, "intel-rapl:0:0", 900_000_000)
    count(tmp_path, "intel-rapl:0:1", 1_500_000)
    assert joules.so_far() == pytest.approx(2.5)
    assert joules.so_far() == pytest.approx(2.5)


def test_counter_that_began_again_has_gone_on(tmp_path):
    count(powercap(tmp_path), "intel-rapl:0", RANGE_UJ - 2_000_000)
    joules = Joules(meters(tmp_path, ()))
    count(tmp_path, "intel-rapl:0", 3_000_000)
    assert joules.so_far() == pytest.approx(5.0)
    count(tmp_path, "intel-rapl:0", 4_000_000)
    assert joules.so_far() == pytest.approx(6.0)


@given(st.lists(st.floats(0, 99), min_size=1), st.floats(0, 99))
def test_all_that_was_taken_is_counted_however_often_it_goes_round(taken, start):
    """It is read before a round is over."""
    now = [start]
    joules = Joules([JouleMeter("a meter", lambda: sum(now) % 100.0, 100.0)])
    for each in taken:
        now.append(each)
        joules.so_far()
    assert joules.so_far() == pytest.approx(sum(taken), abs=1e-6)


def test_step_takes_the_mean_from_the_first_to_the_last():
    now = iter([0.0, 50.0, 53.0, 59.0])  # before the first step much else is done
    joules = Joules([JouleMeter("a meter", lambda: next(now), 100.0)])
    joules.hear({})
    assert joules.per_step is None
    joules.hear({})
    joules.hear({})
    assert joules.per_step == pytest.approx(4.5)


def test_meter_that_falls_silent_leaves_no_figure(tmp_path):
    joules = Joules(meters(powercap(tmp_path), ()))
    joules.hear({})
    joules.hear({})
    assert joules.per_step == 0.0
    (tmp_path / "intel-rapl:0" / "energy_uj").unlink()
    joules.hear({})
    count(tmp_path, "intel-rapl:0", 9_000_000)
    joules.hear({})
    assert joules.so_far() is None
    assert joules.per_step is None


def test_machine_that_tells_nothing_has_no_meter_and_a_reason(tmp_path):
    assert meters(tmp_path / "none", ()) == []
    assert "there is no RAPL below" in why_no_joules(tmp_path / "none")
    folder = powercap(tmp_path)
    for zone in ZONES:
        (folder / zone / "energy_uj").unlink()
        (folder / zone / "energy_uj").mkdir()  # as unreadable for root as for others
    assert meters(folder, ()) == []
    assert "energy_uj cannot be read (root can)" in why_no_joules(folder)
    joules = Joules([])
    joules.hear({})
    joules.hear({})
    assert joules.per_step is None


class _NVMLError(Exception):
    pass


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Let there be a library that knows one board, at 7 J, and an accelerator with its name."""

    def by_uuid(uuid: str) -> str:
        if uuid != "GPU-1234":
            raise _NVMLError
        return uuid

    library = SimpleNamespace(
        NVMLError=_NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetTotalEnergyConsumption=lambda board: 7000,
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    about = SimpleNamespace(uuid="1234")
    own = SimpleNamespace(get_device_properties=lambda index: about, get_device_name=lambda i: "b")
    monkeypatch.setattr(device.torch, "get_device_module", lambda kind: own)
    device._nvml.cache_clear()
    yield SimpleNamespace(library=library, about=about)
    device._nvml.cache_clear()


def test_board_tells_in_joules_by_its_own_name(nvml, tmp_path):
    (found,) = meters(tmp_path, [Device("cuda", 0)])
    assert (found.name, found.read(), found.range_j) == ("b 0", 7.0, float("inf"))


def test_board_that_does_not_tell_is_no_meter(nvml, tmp_path, monkeypatch):
    nvml.about.uuid = "a slice of it"
    assert meters(tmp_path, [Device("cuda", 0)]) == []
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    device._nvml.cache_clear()
    nvml.about.uuid = "1234"
    assert meters(tmp_path, [Device("cuda", 0)]) == []
    assert meters(tmp_path, [Device("cpu", 0)]) == []
