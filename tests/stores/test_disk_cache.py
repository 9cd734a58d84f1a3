"""A cache on disk: never larger than it may be, never wrong, whoever is killed."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import StoreError
from penstock.stores import DiskCache

DIGEST_BYTES = 16
calls = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 60), st.booleans()), max_size=40)


def content_of(key: int, size: int) -> bytes:
    return bytes([key]) * size


def on_disk(folder: Path) -> int:
    """Return the bytes of all files but the lock, counted by itself."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    return sum(path.stat().st_size for path in files)


@settings(max_examples=60)
@given(calls, st.integers(1, 200))
def test_it_is_never_larger_and_gives_what_was_put(tmp_path_factory, calls, most_bytes):
    cache = DiskCache(tmp_path_factory.mktemp("cache"), most_bytes)
    sizes: dict[int, int] = {}
    for key, size, is_put in calls:
        if is_put:
            size = sizes.setdefault(key, size)
            cache.put(str(key), content_of(key, size))
            fits = size + DIGEST_BYTES <= most_bytes
            assert (cache.get(str(key)) is not None) == fits
        else:
            found = cache.get(str(key))
            assert found is None or found == content_of(key, sizes[key])
        assert on_disk(Path(cache.folder)) == cache.held_bytes() <= most_bytes


def test_what_was_used_longest_ago_goes_first(tmp_path):
    cache = DiskCache(tmp_path, 4 * (10 + DIGEST_BYTES))
    for number, key in enumerate("abcd"):
        cache.put(key, b"0" * 10)
        used_first(cache, key, number)
    assert cache.get("a") is not None
    cache.put("e", b"0" * 10)
    assert [key for key in "abcde" if cache.get(key) is not None] == ["a", "d", "e"]


def used_first(cache: DiskCache, key: str, at_ns: int) -> None:
    """Let a key have been used at some time long ago."""
    os.utime(cache._path(key), ns=(at_ns, at_ns))


def test_what_is_damaged_or_cut_is_not_there(tmp_path):
    cache = DiskCache(tmp_path, 1000)
    for damage in (lambda content: b"x" + content[1:], lambda content: content[:-1]):
        cache.put("key", b"content")
        (file,) = list(tmp_path.glob("??/*"))
        file.write_bytes(damage(file.read_bytes()))
        assert cache.get("key") is None
        assert not file.exists()


def test_what_is_evicted_stays_readable_for_who_has_it_open(tmp_path):
    cache = DiskCache(tmp_path, 30)
    cache.put("first", b"first")
    with cache._path("first").open("rb") as file:
        cache.put("second", b"second")
        assert cache.get("first") is None
        assert file.read().startswith(b"first")


def test_who_is_killed_while_he_writes_leaves_no_file_that_is_read_and_no_lock(tmp_path):
    cache = DiskCache(tmp_path, 120)
    killed = in_process(killed_while_writing, cache)
    assert killed.exitcode == -signal.SIGKILL
    assert [path.name.endswith(".part") for path in tmp_path.glob("??/*")] == [True]
    assert cache.get("killed") is None
    for number in range(4):  # goes round the cache: what he left goes too
        cache.put(str(number), b"0" * 30)
        assert on_disk(tmp_path) <= 120
    assert not list(tmp_path.rglob("*.part"))
    cache.put("killed", b"0" * 50)
    assert cache.get("killed") == b"0" * 50


def killed_while_writing(cache: DiskCache) -> None:
    Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    cache.put("killed", b"0" * 50)


def test_two_processes_share_it(tmp_path):
    cache = DiskCache(tmp_path, 2000)
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=fill, args=(cache, start)) for start in (0, 20)]
    for each in both:
        each.start()
    for each in both:
        each.join()
    assert [each.exitcode for each in both] == [0, 0]
    assert 0 < cache.held_bytes() <= 2000
    for key in range(60):
        assert cache.get(str(key)) in (None, content_of(key, 100))


def fill(cache: DiskCache, start: int) -> None:
    for turn in range(3):
        for key in range(start, start + 40):
            cache.put(str(key), content_of(key, 100))
            with cache._locked():  # else files come and go while they are counted
                assert cache.held_bytes() <= 2000
            other = (key * 7 + turn) % 60
            assert cache.get(str(other)) in (None, content_of(other, 100))


def in_process(call, *arguments):
    process = multiprocessing.get_context("fork").Process(target=call, args=arguments)
    process.start()
    process.join()
    return process


def test_its_folder_is_that_of_where_it_was_made(tmp_path, monkeypatch):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    cache = DiskCache("kept", 100)
    monkeypatch.chdir(tmp_path / "there")
    cache.put("one", b"content")
    assert cache.get("one") == b"content"
    assert [path.name for path in tmp_path.glob("*/kept")] == ["kept"]
    assert (tmp_path / "here" / "kept").exists()


def test_a_cache_without_room_is_refused(tmp_path):
    with pytest.raises(StoreError, match="0 bytes"):
        DiskCache(tmp_path, 0)
