"""Checkpoints of others: whatever is in one, it is read, or refused as damaged; nothing else is."""

import json
import shutil
import struct
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.checkpoints import checkpoint
from penstock.checkpoints.folders import digest_of
from penstock.errors import CheckpointError, JobError
from penstock.training.saved import is_own, kept_job, kept_micro_batches

PART = "rank-0.safetensors"
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
DEEP = b"[" * 200_000


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with checkpoints after 2 and 4 steps."""
    folder = tmp_path_factory.mktemp("written")
    tensors = {"weights/a": torch.arange(6.0), "weights/part 0 of 4/b": torch.arange(4.0)}
    for step in (2, 4):
        checkpoint.write_part(folder, step, 0, (tensors, {"optimizer/a/rate": 0.5}))
        checkpoint.finish(folder, step)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """Return a copy of it."""
    return Path(shutil.copytree(written, tmp_path / "checkpoints"))


def put_state(place: Path, **changes: Any) -> None:
    """Change state.json as who knows how it is made can: its digest fits."""
    path = place / "state.json"
    content = {**json.loads(path.read_text()), **changes}
    content = {name: value for name, value in content.items() if name != "digest"}
    path.write_text(json.dumps({**content, "digest": digest_of(content)}))


def put_header(place: Path, text: bytes, size: int | None = None) -> None:
    """Change what a part begins with, and its checksum."""
    old = (place / PART).read_bytes()
    rest = old[8 + struct.unpack_from("<Q", old)[0] :]
    head = struct.pack("<Q", len(text) if size is None else size) + text
    (place / PART).write_bytes(head + rest)
    sums = json.loads((place / "state.json").read_text())["checksums"]
    put_state(place, checksums={PART: {**sums[PART], "": f"{zlib.crc32(head):08x}"}})


def header(place: Path) -> dict[str, Any]:
    data = (place / PART).read_bytes()
    return json.loads(data[8 : 8 + struct.unpack_from("<Q", data)[0]])


def changed(content: Any, data: st.DataObject) -> Any:
    """Return a document with anything in place of one of its values."""
    if isinstance(content, Mapping) and content and data.draw(st.booleans()):
        key = data.draw(st.sampled_from(sorted(content)))
        return {**content, key: changed(content[key], data)}
    if isinstance(content, list) and content and data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(content) - 1))
        return [*content[:at], changed(content[at], data), *content[at + 1 :]]
    return data.draw(anything)


def read_or_refused(folder: Path) -> None:
    problem = None
    try:
        checkpoint.load(folder / "step-000004")
    except CheckpointError as error:
        problem = error
    if problem is not None:
        assert problem.hint
        assert checkpoint.newest_whole(folder) == (folder / "step-000002", 2)


@settings(max_examples=60)
@given(data=st.data())
def test_whatever_a_state_says_is_read_or_refused(written: Path, data: st.DataObject) -> None:
    place = written / "step-000004"
    before = (place / "state.json").read_text()
    content = {n: v for n, v in json.loads(before).items() if n != "digest"}
    new = changed(content, data)
    if isinstance(new, dict) and data.draw(st.booleans()):
        new = {**new, "digest": digest_of(new)}
    (place / "state.json").write_text(json.dumps(new))
    try:
        read_or_refused(written)
    finally:
        (place / "state.json").write_text(before)


@settings(max_examples=60)
@given(data=st.data())
def test_whatever_a_part_begins_with_is_read_or_refused(written: Path, data: st.DataObject) -> None:
    place = written / "step-000004"
    before = {name: (place / name).read_bytes() for name in ("state.json", PART)}
    put_header(place, json.dumps(changed(header(place), data)).encode())
    try:
        read_or_refused(written)
    finally:
        for name, content in before.items():
            (place / name).write_bytes(content)


@pytest.mark.parametrize(
    "text",
    [
        b'{"weights/a": {"dtype": "F32", "shape": [6]}}',
        b'{"weights/a": 3}',
        b'{"weights/a": null}',
        b'{"weights/a": {"dtype": "F32", "shape": [6], "data_offsets": 3}}',
        b'{"weights/a": {"dtype": "F32", "shape": [6], "data_offsets": ["0", "24"]}}',
        b'{"weights/a": {"dtype": "F32", "shape": [6], "data_offsets": [24, 0]}}',
        b'{"weights/a": {"dtype": "F32", "shape": [-6], "data_offsets": [-24, 0]}}',
        b'{"part 0 of 9999999/a": {"dtype": "F32", "shape": [10], "data_offsets": [0, 40]}}',
        b'{"part %s of 4/a": {"dtype": "F32", "shape": [10], "data_offsets": [0, 40]}}'
        % (b"9" * 5000),
        b"[]",
        b"3",
        DEEP,
        b'{"a": ' + DEEP,
    ],
    ids=range(13),
)
def test_a_part_of_another_form_is_damaged_and_the_checkpoint_before_is_taken(
    text: bytes, folder: Path
) -> None:
    put_header(folder / "step-000004", text)
    said = list[str]()
    with pytest.raises(CheckpointError, match=PART.split(".")[0] + "|holds"):
        checkpoint.load(folder / "step-000004")
    assert checkpoint.newest_whole(folder, said.append) == (folder / "step-000002", 2)
    assert len(said) == 1


@pytest.mark.parametrize("size", [2**63, 2**64 - 1, 2**40])
def test_a_part_that_says_it_is_huge_is_damaged(size: int, folder: Path) -> None:
    put_header(folder / "step-000004", b"{}", size)
    with pytest.raises(CheckpointError, match="ends early"):
        checkpoint.load(folder / "step-000004")


@pytest.mark.parametrize(
    "name", ["../x", "/etc/hostname", "..", ".", "", "a/../b", "a\0b", "./" + PART]
)
def test_a_part_is_inside_its_checkpoint(name: str, folder: Path) -> None:
    (folder / "x").write_bytes((folder / "step-000004" / PART).read_bytes())
    put_state(folder / "step-000004", parts=[name], checksums={})
    with pytest.raises(CheckpointError, match="not inside"):
        checkpoint.load(folder / "step-000004")
    with pytest.raises(CheckpointError, match="not inside"):
        checkpoint.unread(folder / "step-000004")


def test_a_part_does_not_lead_out_of_its_checkpoint(folder: Path) -> None:
    part = folder / "step-000004" / PART
    part.rename(folder / "elsewhere")
    part.symlink_to(folder / "elsewhere")
    with pytest.raises(CheckpointError, match="not inside"):
        checkpoint.load(folder / "step-000004")


@pytest.mark.parametrize("step", [-4, 3, 2**62])
def test_a_checkpoint_is_of_the_step_that_its_folder_names(step: int, folder: Path) -> None:
    put_state(folder / "step-000004", step=step)
    with pytest.raises(CheckpointError, match=f"of step {step}"):
        checkpoint.load(folder / "step-000004")


@given(content=st.binary(max_size=80) | anything.map(lambda value: json.dumps(value).encode()))
def test_whatever_names_a_job_is_understood_or_refused(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run")
    (folder / "job.json").write_bytes(content)
    for ask in (kept_job, is_own, kept_micro_batches):
        with suppress(JobError):
            ask(folder)


@given(data=st.data())
def test_whatever_stands_in_the_record_of_a_job_is_no_reason_to_run_it(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run")
    content = {"job": "weights.py", "from": str(folder), "steps": 3, "seal": "0" * 64}
    (folder / "job.json").write_text(json.dumps(changed(content, data)))
    with suppress(JobError):
        assert not is_own(folder)
