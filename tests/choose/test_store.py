"""What was proved is found again by what it was made from, and by nothing else."""

from dataclasses import dataclass, replace

import pytest
import torch

from penstock.choose.store import keep, kept, key_of
from tests.parity.models import job_of


@dataclass
class Note:
    problem: str


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_the_same_job_finds_what_was_kept(tmp_path):
    job = job_of("gpt", torch.float32)
    key = key_of(job, "plan")
    assert kept(Note, key, "proof") is None
    keep(key, "proof", {"problem": ""})
    assert kept(Note, key_of(job_of("gpt", torch.float32), "plan"), "proof") == Note("")
    assert kept(Note, key, "examined") is None
    (path,) = (tmp_path / "penstock" / "proofs").iterdir()
    for damaged in ("{", "{}", '{"problem": 3}'):
        path.write_text(damaged)
        assert kept(Note, key, "proof") is None  # a damaged one is made again


def test_another_plan_number_or_line_of_code_has_another_key(tmp_path, monkeypatch):
    import sys
    from importlib import util

    job = job_of("gpt", torch.float32)
    keys = {key_of(job, "a"), key_of(job, "b"), key_of(replace(job, seed=9), "a")}
    keys.add(key_of(replace(job, clip_norm=1.0), "a"))
    file = tmp_path / "users.py"
    for text in ("RATE = 1\n", "RATE = 2\n"):
        file.write_text(text)
        spec = util.spec_from_file_location("users", file)
        monkeypatch.setitem(sys.modules, "users", util.module_from_spec(spec))
        keys.add(key_of(job, "a"))
    assert len(keys) == 6


def test_a_file_is_read_once_as_long_as_it_stays(tmp_path, monkeypatch):
    import sys
    from importlib import util
    from pathlib import Path

    job, file, read = job_of("gpt", torch.float32), tmp_path / "users.py", Path.read_bytes
    file.write_text("import torch\n")
    spec = util.spec_from_file_location("users", file)
    monkeypatch.setitem(sys.modules, "users", util.module_from_spec(spec))
    key, paths = key_of(job, "a"), []
    monkeypatch.setattr(Path, "read_bytes", lambda path: paths.append(path) or read(path))
    assert (key_of(job, "a"), paths) == (key, [])
    file.write_text("import numpy\n")
    assert key_of(job, "a") != key
    assert paths == [file]
    file.write_text("import torch\n")
    assert key_of(job, "a") == key


def test_what_is_typed_by_hand_is_never_kept(monkeypatch):
    import __main__

    monkeypatch.delattr(__main__, "__file__", raising=False)
    key = key_of(job_of("gpt", torch.float32), "job")
    assert key is None
    monkeypatch.setattr(__main__, "__file__", "here.py", raising=False)
    assert key_of(job_of("gpt", torch.float32), "") is None
    assert key_of(job_of("gpt", torch.float32), "job") is not None
    keep(key, "proof", {})
    assert kept(Note, key, "proof") is None
