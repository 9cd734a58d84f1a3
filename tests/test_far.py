"""Far memory: room outside the process's own, of which nothing is left."""

import os
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock import far
from penstock.far import FarMemory, as_bytes

CPU = torch.device("cpu")


@given(st.lists(st.lists(st.integers(0, 300), max_size=6), max_size=4), st.randoms())
def test_what_is_put_is_what_is_taken_and_what_lies_there(rooms, random) -> None:
    memory = FarMemory(CPU)
    made = [(memory.room(sizes), sizes) for sizes in rooms]
    held: dict[tuple[int, int], torch.Tensor] = {}
    for _ in range(2):
        for place, (room, sizes) in enumerate(made):
            some = [number for number in range(len(sizes)) if random.random() < 0.7]
            nears = {n: torch.randint(0, 256, (sizes[n],), dtype=torch.uint8) for n in some}
            room.put(nears)
            held |= {(place, number): near for number, near in nears.items()}
    for place, (room, sizes) in enumerate(made):
        own = {number: near for (at, number), near in held.items() if at == place}
        back = {number: torch.zeros(sizes[number], dtype=torch.uint8) for number in own}
        room.take(back)
        for number, near in own.items():
            assert torch.equal(back[number], near)
            assert torch.equal(room.blocks[number], near)
            room.blocks[number].fill_(7)
        room.take(back)
        assert all((each == 7).all() for each in back.values())


@pytest.mark.parametrize("size_bytes", [0, 1, 5000])
def test_no_file_is_left_and_its_handle_is_closed(
    size_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    memory = FarMemory(CPU)
    handle, room = memory.handle, memory.room([size_bytes])
    assert list(tmp_path.iterdir()) == []
    del memory
    assert os.fstat(handle), "the room needs it"
    del room
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)


def test_calls_that_move_a_part_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may stop anywhere, as at a signal."""

    def by_sevens(call):
        def called(handle, buffers, place):
            return call(handle, [buffers[0][:7]], place)

        return called

    monkeypatch.setattr(os, "pwritev", by_sevens(os.pwritev))
    monkeypatch.setattr(os, "preadv", by_sevens(os.preadv))
    monkeypatch.setattr(far, "_MOST_BUFFERS", 2)
    room = FarMemory(CPU).room([100, 3, 0, 64, 65])
    nears = {
        n: torch.randint(0, 256, (size,), dtype=torch.uint8) for n, size in enumerate(room.sizes)
    }
    room.put(nears)
    back = {number: torch.zeros_like(near) for number, near in nears.items()}
    room.take(back)
    assert all(torch.equal(back[number], near) for number, near in nears.items())


def test_neighbours_are_moved_by_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    write = os.pwritev

    def counted(handle, buffers, place):
        calls.append(len(buffers))
        return write(handle, buffers, place)

    monkeypatch.setattr(os, "pwritev", counted)
    room = FarMemory(CPU).room([64, 10, 64, 64])
    room.put({n: torch.zeros(room.sizes[n], dtype=torch.uint8) for n in (0, 1, 2)})
    room.put({n: torch.zeros(room.sizes[n], dtype=torch.uint8) for n in (0, 3)})
    assert calls == [4, 1, 1]  # with a gap behind the second block


def test_blocks_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="9 bytes for a block of 10"):
        FarMemory(CPU).room([10]).put({0: torch.zeros(9, dtype=torch.uint8)})


def test_bytes_of_a_view_are_those_of_all_that_it_lies_in() -> None:
    whole = torch.arange(6, dtype=torch.int16)
    assert as_bytes(whole[2:4]).tolist() == whole.view(torch.uint8).tolist()


def test_what_is_evicted_is_on_the_disk_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, sync = list[str](), os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda handle: (calls.append("sync"), sync(handle)))
    monkeypatch.setattr(os, "posix_fadvise", lambda *given: calls.append(str(given[1:])))
    memory = FarMemory(CPU)
    room, near = memory.room([100]), torch.arange(100, dtype=torch.uint8)
    room.put({0: near})
    memory.evict()
    assert calls == ["sync", str((0, 0, os.POSIX_FADV_DONTNEED))]  # all of the file
    room.take({0: (back := torch.zeros_like(near))})
    assert torch.equal(back, near)
