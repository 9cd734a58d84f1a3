"""Machines that have accelerators: what is guessed of them is said, what cannot be is refused."""

import pytest

from penstock.choose import prepare
from penstock.cluster import Cluster, Link
from penstock.device import Device
from penstock.files import cache_folder
from penstock.listener import SILENT
from penstock.profile.kept_profiles import keep_link


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.device.here", lambda: Device("cuda"))


@pytest.mark.usefixtures("on_gpus")
def test_link_between_accelerators_is_the_measured_one_or_said_to_be_assumed(
    monkeypatch, tmp_path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Device, "name", "a GPU")
    said: list[str] = []
    listener = SimpleListener(said)
    assert prepare.machines(None, 2, listener) == Cluster.here(2)
    assert "is assumed, as no run on several has measured it" in said[0]
    link = keep_link(cache_folder("profiles"), Link(2e-6, 3e11))
    assert prepare.machines(None, 2, listener).inside == link
    assert "link measured on" in said[1]


class SimpleListener:
    """Notes what is said."""

    def __init__(self, said: list[str]) -> None:
        self.say = said.append


@pytest.mark.usefixtures("on_gpus")
def test_step_on_an_accelerator_is_measured_beside_no_companions(monkeypatch) -> None:
    asked: list[int] = []

    def measured(*_: object, beside: int, **__: object) -> object:
        asked.append(beside)
        raise KeyboardInterrupt

    monkeypatch.setattr("penstock.profile.kept_profiles.measured", measured)
    cluster = Cluster.here(2)
    with pytest.raises(KeyboardInterrupt):
        prepare.measured_as("cpu", None, None, cluster, SILENT)
    assert asked == [0]
