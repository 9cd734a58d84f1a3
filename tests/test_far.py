"""Far memory: room outside the process's own, of which nothing is left."""

import tempfile
from pathlib import Path

import pytest
import torch

from penstock.far import as_bytes, far_memory


@pytest.mark.parametrize("size_bytes", [0, 1, 5000])
def test_room_is_written_and_read_and_no_file_is_left(
    size_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    room = far_memory(size_bytes, torch.device("cpu"))
    assert (room.dtype, room.shape) == (torch.uint8, (size_bytes,))
    assert list(tmp_path.iterdir()) == []
    room.fill_(7)
    assert room.tolist() == [7] * size_bytes


def test_bytes_of_a_view_are_those_of_all_that_it_lies_in() -> None:
    whole = torch.arange(6, dtype=torch.int16)
    assert as_bytes(whole[2:4]).tolist() == whole.view(torch.uint8).tolist()
