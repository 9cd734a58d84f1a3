"""Store: a kept profile is found again, and a stale or damaged one is not used."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster import Link
from penstock.files import cache_folder
from penstock.graph.trace import capture
from penstock.profile import Profile, measure
from penstock.profile.kept_profiles import (
    ProfileKey,
    find,
    keep,
    link_of,
    measured,
    optimizer_text,
)
from penstock.profile.profile import CopyCost, ProfileBasis, UpdateCost
from tests.cli import mlp
from tests.search.chains import with_costs

WANTED = ProfileKey("0123", "sgd", 1, "cpu", "torch 2")
PROFILE = Profile(
    graph="0123",
    basis=ProfileBasis("cpu", "torch 2", "measured", 1),
    op_s=(0.5, 0.25),
    workspace_bytes=(1, 2),
    call_s=0.1,
    accumulate_s_per_byte=0.1,
    update=UpdateCost(0.1, 0.1, 2.0, 0.5),
    copying=CopyCost(0.1, 0.2),
)


def test_kept_profile_is_found_again_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep(tmp_path / "new", WANTED, PROFILE)
    assert find(tmp_path / "new", WANTED) == PROFILE
    assert caplog.records == []


def test_nothing_kept_is_nothing_found_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert find(tmp_path / "nowhere", WANTED) is None
    assert caplog.records == []


@pytest.mark.parametrize(("key", "value"), [("device", "gpu"), ("versions", "torch 3")])
def test_stale_profile_is_not_used_and_both_makers_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, key: str, value: str
) -> None:
    keep(tmp_path, WANTED, PROFILE)
    assert find(tmp_path, WANTED._replace(**{key: value})) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "cpu, torch 2" in record.getMessage()
    assert value in record.getMessage()


@given(st.sampled_from(["graph", "optimizer", "beside"]), st.integers(2, 99))
def test_other_graph_optimizer_and_companions_have_files_of_their_own(key: str, n: int) -> None:
    other = WANTED._replace(**{key: n if key == "beside" else f"other {n}"})
    assert other.path_in(Path()) != WANTED.path_in(Path())


@given(st.data())
def test_damaged_profile_is_not_used(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("store")
    keep(folder, WANTED, PROFILE)
    path = WANTED.path_in(folder)
    whole = path.read_bytes()
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    assert find(folder, WANTED) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [("op_s", 3), ("op_s", ["x"]), ("op_s", [-1.0, 0.0]), ("more", 1), ("penstock", "plan")],
)
def test_profile_with_a_wrong_value_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, key: str, value: object
) -> None:
    keep(tmp_path, WANTED, PROFILE)
    path = WANTED.path_in(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    assert find(tmp_path, WANTED) is None
    assert "measured again" in caplog.text


def test_folder_that_cannot_be_used_costs_only_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    keep(tmp_path / "file", WANTED, PROFILE)
    assert find(tmp_path / "file", WANTED) is None
    assert "could not be kept" in caplog.text


def test_measuring_is_done_once_and_again_for_other_companions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = mlp.job()
    captured, times = capture(job), []

    def counted(*arguments: object, beside: int, apart: object) -> Profile:
        times.append(beside)
        return with_costs(PROFILE, graph=captured.graph.digest, beside=beside)

    monkeypatch.setattr(measure, "measure", counted)
    first = measured(captured, job, beside=0, folder=tmp_path)
    assert measured(captured, job, beside=0, folder=tmp_path) == first
    measured(captured, job, beside=1, folder=tmp_path)
    measured(captured, job, beside=1)
    assert times == [0, 1, 1]
    assert first.basis.versions.startswith(f"torch {torch.__version__}")


def test_optimizer_is_known_by_class_and_settings_but_not_by_its_rate() -> None:
    captured = capture(mlp.job())

    def text(**settings: float) -> str:
        job = replace(mlp.job(), optimizer=lambda weights: torch.optim.SGD(weights, **settings))
        return optimizer_text(captured, job)

    assert text(lr=0.1) == text(lr=0.2)
    assert text(lr=0.1) != text(lr=0.1, momentum=0.9)
    assert text(lr=0.1) != optimizer_text(captured, mlp.adam())
    clipped = [optimizer_text(captured, replace(mlp.job(), clip_norm=k)) for k in (None, 1.0, 2.0)]
    assert clipped[0] != clipped[1] == clipped[2]


def test_folder_is_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("profiles") == tmp_path / "penstock" / "profiles"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says its specification
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder("profiles") == tmp_path / ".cache" / "penstock" / "profiles"


def test_without_a_home_there_is_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("no home")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert cache_folder("profiles") is None


def test_link_of_this_host_is_measured_once(tmp_path):
    asked, told = [], []

    def measure():
        asked.append(1)
        return Link(1e-5, 3e9, overhead_s=2e-6, copy_bytes_per_s=5e9)

    first = link_of(tmp_path, measure, told.append)
    assert link_of(tmp_path, measure, told.append) == first
    (path,) = tmp_path.iterdir()
    assert (len(asked), told) == (1, [path])
    path.write_text("damaged")
    assert link_of(tmp_path, measure, told.append) == first
    assert link_of(None, measure, told.append) == first
    assert (len(asked), len(told)) == (3, 1)
