"""Samples of a store: the same in the same order, whatever is fetched ahead or kept."""

import itertools
import pickle
import signal
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Subset

import penstock as ps
from penstock.batches import ReadNumbers
from penstock.errors import StoreError
from penstock.stores import DiskCache, ObjectPart, Stored
from penstock.stores.stored import Fetching
from tests.stores.slow_store import SlowStore, filled


def content_of(number: int) -> bytes:
    return number.to_bytes(2) * (1 + number % 5)


def samples(count: int, *, again: bool = False, **options) -> Stored:
    """Return a dataset of so many objects, of several sizes; again: of the same store."""
    url = filled({f"{number:03}": content_of(number) for number in range(count)}, again=again)
    return ps.stored(url, decode=number_of, **options)


def number_of(content: bytes, name: str) -> int:
    assert content == content_of(int(name))
    return int(name)


def read(data, count: int) -> list[list[int]]:
    return [batch.tolist() for batch in itertools.islice(data, count)]


@settings(max_examples=40)
@given(
    st.integers(4, 30),
    st.integers(1, 4),
    st.integers(0, 9),
    st.sampled_from([1, 7, 40, 10**6]),
    st.integers(1, 5),
)
def test_micro_batches_are_those_of_a_dataset_in_memory(
    tmp_path_factory, count, size, start, ahead, requests
):
    kept = DiskCache(tmp_path_factory.mktemp("cache"), 60)
    seed = count % 3
    expected = read(ps.batches(range(count), size, seed=seed)(start), 12)
    for again, cache in ((False, None), (True, kept), (True, kept)):
        dataset = samples(count, again=again, cache=cache, ahead=ahead, requests=requests)
        data = ps.batches(dataset, size, seed=seed)
        assert read(data(start), 12) == expected
        assert SlowStore.most <= requests
        picked = [data.picked(ReadNumbers(start, places, 2)) for places in ((0,), (1,))]
        shared = [read(each, 6) for each in picked]
        assert [one for pair in zip(*shared, strict=True) for one in pair] == expected


def test_a_resumed_run_fetches_nothing_of_what_it_skips():
    dataset = samples(40, requests=2)
    data = ps.batches(dataset, 4, shuffle=False)
    assert read(data(5), 1) == [[20, 21, 22, 23]]
    assert min(SlowStore.read) == "root/020"


def test_an_epoch_that_was_read_is_not_fetched_again(tmp_path):
    for again in (False, True):  # ranks, or a run that is resumed: another dataset of the folder
        dataset = samples(20, again=again, cache=DiskCache(tmp_path, 10**6))
        read(ps.batches(dataset, 4)(0), 5)
        assert sorted(SlowStore.read) == ([] if again else [f"root/{n:03}" for n in range(20)])


def test_an_object_that_has_changed_is_fetched_again(tmp_path):
    url = filled({"one": b"first"})
    cache = DiskCache(tmp_path, 1000)
    assert ps.stored(url, cache=cache)[0] == b"first"
    assert ps.stored(filled({"one": b"other"}, again=True), cache=cache)[0] == b"other"


def test_what_comes_next_is_on_its_way_while_a_sample_is_used():
    dataset = samples(30, requests=8)
    asked = threading.Event()
    SlowStore.before = lambda path: asked.set() if path == "root/007" else None
    data = ps.batches(dataset, 2, shuffle=False)(0)
    next(data)
    assert asked.wait(20), "number 7 is asked for before it is needed"
    assert Counter(SlowStore.read).most_common(1)[0][1] == 1


def test_more_than_one_round_of_requests_is_ahead_once_something_was_read():
    dataset = samples(100, requests=4)
    last = threading.Event()
    SlowStore.before = lambda path: last.set() if path == "root/019" else None
    data = ps.batches(dataset, 8, shuffle=False)(0)
    next(data)  # 0 to 7; as many as requests, and as were taken, may be ahead
    assert last.wait(20)


def test_more_is_asked_for_while_a_large_micro_batch_is_read():
    dataset = samples(40, requests=4)
    later = threading.Event()

    def before(path: str) -> None:
        if path == "root/008":
            later.set()
        if path == "root/006":
            assert later.wait(20), "number 8 is asked for before number 6 has come"

    SlowStore.before = before
    data = ps.batches(quick(dataset), 20, shuffle=False)(0)
    assert next(data).tolist() == [*range(20)]


def test_no_more_bytes_are_ahead_than_allowed():
    dataset = samples(100, ahead=1, requests=16)  # so one at a time
    data = ps.batches(dataset, 1, shuffle=False)(0)
    assert read(data, 50) == [[number] for number in range(50)]
    assert SlowStore.most == 1
    assert set(SlowStore.read) <= {f"root/{number:03}" for number in range(52)}


def test_who_reads_a_little_has_fetched_little():
    dataset = samples(200, requests=3)
    data = ps.batches(dataset, 2, shuffle=False)(0)
    next(data)
    data = None
    assert len(SlowStore.read) <= 2 + 3 + 2


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_of_torch_gets_the_same(workers):
    dataset = samples(20)
    loader = DataLoader(
        dataset, 4, num_workers=workers, multiprocessing_context="fork" if workers else None
    )
    assert read(loader, 5) == [list(range(at, at + 4)) for at in range(0, 20, 4)]
    data = ps.batches(dataset, 4, seed=1, workers=workers)
    assert read(data(3), 6) == read(ps.batches(range(20), 4, seed=1)(3), 6)


def test_samplers_and_subsets_tell_what_comes_next(monkeypatch):
    told: list[int] = []
    following = Stored.following

    def noted(self, indices):
        def each():
            for index in indices:
                told.append(index)
                yield index

        return following(self, each())

    monkeypatch.setattr(Stored, "following", noted)
    dataset = samples(20, requests=2)
    weighted = torch.utils.data.WeightedRandomSampler([1.0] * 20, 20)
    for data in (
        ps.from_loader(DataLoader(dataset, 4, sampler=weighted)),
        ps.batches(Subset(dataset, range(10, 20)), 4),
        ps.bucketed(dataset, (30,), 4, length=[3] * 20, pad=lambda sample, length: sample),
    ):
        told.clear()
        found = read(data(2), 2)
        assert told[:8] == [index for batch in found for index in batch]
        assert len(told) > 8


def test_in_order_looks_ahead_for_any_loop():
    dataset = samples(30, requests=4)
    wanted = [3, 1, 4, 1, 5, 9, 2, 6]
    assert [(index, dataset[index]) for index in dataset.in_order(wanted)] == [
        (i, i) for i in wanted
    ]
    assert [*dataset.in_order(wanted)] == wanted  # not even taken
    loader = DataLoader(dataset, 2, sampler=dataset.in_order(wanted))
    assert read(loader, 4) == [[3, 1], [4, 1], [5, 9], [2, 6]]


def test_a_large_object_comes_in_parts(monkeypatch):
    monkeypatch.setattr(import_module("penstock.stores.stored"), "_CHUNK_BYTES", 10)
    content = bytes(range(95))
    assert ps.stored(filled({"large": content}))[0] == content
    assert len(SlowStore.read) == 10


def test_what_fails_now_and_then_is_tried_again():
    dataset = quick(samples(6))
    fails = Counter[str]()

    def before(path: str) -> None:
        fails[path] += 1
        if fails[path] < 3:
            raise OSError("try later")

    SlowStore.before = before
    assert [dataset[number] for number in range(6)] == list(range(6))
    assert set(fails.values()) == {3}


def quick(dataset: Stored, *, limit_s: float = 60.0) -> Stored:
    """Return a dataset that tries again at once."""
    store = replace(dataset.store, again_s=(0.0, 0.0))
    return replace(dataset, store=store, fetching=Fetching(4, 10**6, limit_s), _of_process={})


def refuses(_: str) -> None:
    raise PermissionError("no key")


def test_what_goes_on_failing_is_refused_with_its_url():
    dataset = quick(samples(6))
    SlowStore.before = refuses
    with pytest.raises(
        StoreError, match=r"root/002 of slow://\d+/root failed 3 times.*no key"
    ) as told:
        dataset[2]
    assert "resumed" in told.value.hint
    with pytest.raises(StoreError, match="root/000"):
        next(ps.batches(dataset, 2, shuffle=False)(0))
    SlowStore.before = None
    assert dataset[2] == 2, "and it may come back"


def test_a_short_object_is_refused():
    dataset = quick(samples(6))
    SlowStore.objects[dataset.objects[3].path] = b"0"
    with pytest.raises(StoreError, match="1 bytes came; the store has told 8"):
        dataset[3]


def test_a_store_that_never_answers_is_refused():
    dataset = quick(samples(6), limit_s=0.01)
    answers = threading.Event()
    SlowStore.before = lambda path: answers.wait(60) and None
    try:
        with pytest.raises(StoreError, match=r"root/001 has not come within 0\.03 s"):
            dataset[1]
    finally:
        answers.set()
    assert dataset[4] == 4


WAITS = """
import sys, threading
sys.path[:0] = {path!r}
import penstock as ps
from tests.stores.slow_store import SlowStore, filled
dataset = ps.stored(filled(dict.fromkeys(map(str, range(50)), b"0")))
SlowStore.before = lambda path: print("asked", flush=True) or threading.Event().wait()
dataset[3]
"""


def test_an_interrupt_ends_it_while_it_waits():
    command = [sys.executable, "-c", WAITS.format(path=sys.path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert b"KeyboardInterrupt" in told


def test_what_is_not_there_is_refused(tmp_path):
    for url, words in (
        ("slow://nowhere", "there is nothing"),
        ("slow://closed", "cannot be listed: PermissionError: no key"),
        (f"file://{tmp_path}", "there is nothing"),
        ("nosuch://bucket", "nosuch"),
    ):
        filled({})
        with pytest.raises(StoreError, match=words):
            ps.stored(url)
    for name in ("ahead", "requests"):
        with pytest.raises(StoreError, match=f"{name} is 0"):
            samples(3, **{name: 0})


def test_patterns_and_folders_of_disks_are_stores(tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(str(number))
    (tmp_path / "other.png").write_bytes(b"")
    dataset = ps.stored(f"file://{tmp_path}/*.txt")
    assert list(map(dataset.__getitem__, range(3))) == [b"0", b"1", b"2"]
    assert len(ps.stored(str(tmp_path))) == 4


def test_a_key_tells_objects_and_parts_apart():
    (one, other) = samples(2).objects
    parts = [
        ObjectPart(one, 0, 3),
        ObjectPart(one, 1, 3),
        ObjectPart(one, 0, 2),
        ObjectPart(other, 0, 3),
        ObjectPart(one._replace(tag="new"), 0, 3),
    ]
    assert len({part.key for part in parts}) == 5


def test_a_copy_by_pickle_fetches_for_itself():
    dataset = samples(10)
    assert dataset[3] == 3
    assert pickle.loads(pickle.dumps(dataset))[4] == 4


def test_it_counts_what_was_taken():
    dataset = samples(10)
    read(ps.batches(dataset, 5)(0), 2)
    counted = dataset.counted
    assert counted.parts == 10
    assert counted.size_bytes == sum(len(content_of(number)) for number in range(10))
    assert counted.waited_s > 0
