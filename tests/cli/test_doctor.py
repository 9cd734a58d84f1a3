"""penstock doctor: what this machine has, and what is missing."""

import json
import platform
import sys
from pathlib import Path

import pytest
import torch

from penstock.cli.doctor import LIBRARIES, examine
from penstock.cluster.machine import cpu_name, detect
from tests.cli.conftest import Call


def test_doctor_finds_this_machine_fit_and_says_what_it_has(call: Call) -> None:
    done = call("doctor", "--json")
    document = json.loads(done.out)
    found = {finding["what"]: finding["value"] for finding in document["findings"]}
    assert (done.code, done.err, document["ok"]) == (0, "", True)
    assert found["python"].startswith(platform.python_version())
    assert found["torch"] == torch.__version__
    assert found["cores"].split()[0] == str(detect().cores)
    assert found["processor"] == cpu_name()
    assert {*LIBRARIES, "memory", "processes", "shared memory", "gloo", "NCCL"} <= found.keys()


def test_doctor_for_people_shows_the_same_and_a_verdict(call: Call) -> None:
    document, done = json.loads(call("doctor", "--json").out), call("doctor")
    assert (done.code, done.err) == (0, "")
    for finding in document["findings"]:
        words = f"{finding['what']} {finding['state']} {finding['value']}"
        assert words.split() in [line.split() for line in done.out.splitlines()]
        assert finding["hint"] in done.out
    assert done.out.endswith("One can train here.\n")


def test_what_is_missing_ends_in_exit_code_one_with_a_hint(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # its import now fails
    done = call("doctor")
    assert done.code == 1
    assert done.out.endswith("One cannot train here.\n")
    assert "torch: pip install torch" in done.out
    assert json.loads(call("doctor", "--json").out)["ok"] is False


def test_missing_library_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cli.doctor.LIBRARIES", ("no_such_library",))
    found = {finding.what: finding for finding in examine()}
    assert found["no_such_library"].state == "missing"
    assert found["no_such_library"].hint == "pip install no_such_library"


def test_look_that_fails_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise OSError("no such machine")

    monkeypatch.setattr("penstock.cli.doctor.detect", broken)
    found = {finding.what: finding for finding in examine()}
    assert found["machine"].state == "missing"
    assert "no such machine" in found["machine"].value
    assert "gloo" in found


def test_folder_for_profiles_that_cannot_be_used_is_only_a_note(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    found = {finding.what: finding for finding in examine()}
    assert found["profiles"].state == "note"
    assert "XDG_CACHE_HOME" in found["profiles"].hint


@pytest.mark.parametrize("name", ["new", "penstock"])
def test_doctor_does_not_mind_what_others_keep_in_the_temporary_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "file").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = {finding.what: finding for finding in examine()}
    assert found["temporary files"].state == "ok"


def test_shared_memory_that_does_not_work_is_a_note_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = "penstock.runtime.transport.shared_memory.available"
    monkeypatch.setattr(place, lambda: (False, "no futex"))
    found = {finding.what: finding for finding in examine()}
    assert (found["shared memory"].state, found["shared memory"].value) == ("note", "no futex")


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        (b"processor\t: 0\nmodel name\t: Fast 9\n", "Fast 9"),
        (b"processor\t: 0\n", ""),
        (b"\xff", ""),
    ],
)
def test_processor_is_named_by_itself_or_by_its_architecture(
    tmp_path: Path, lines: bytes, name: str
) -> None:
    (tmp_path / "cpuinfo").write_bytes(lines)
    expected = name or platform.processor() or platform.machine()
    assert cpu_name(tmp_path / "cpuinfo") == expected
    assert cpu_name(tmp_path / "nowhere") == platform.processor() or platform.machine()
