"""Micro-batch k of a dataset is a function of the seed and of k, whoever reads it."""

import itertools
import multiprocessing.process
import random
import tempfile
from collections import Counter
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

import penstock as ps
from penstock.batches import ReadNumbers, read
from penstock.batches.how import Last
from penstock.batches.reads import in_turn
from penstock.errors import JobError


class Drawing(Dataset):
    """Sample i is (i, what each generator draws)."""

    def __init__(self, length: int = 10) -> None:
        self.length, self.asked = length, []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int):
        self.asked.append(index)
        return index, torch.rand(()), np.random.rand(), random.random()


class Counting(IterableDataset):
    """Goes through its numbers, those of its worker if there are some."""

    def __init__(self, length: int = 10) -> None:
        self.length, self.epochs = length, []

    def __iter__(self):
        info = get_worker_info()
        own = slice(0, None) if info is None else slice(info.id, None, info.num_workers)
        for index in range(self.length)[own]:
            yield index, torch.rand(()), np.random.rand(), random.random()


def rows(batch) -> list[tuple[float, ...]]:
    return list(zip(*(part.tolist() for part in batch), strict=True))


def first(iterator, count: int) -> list:
    return [rows(batch) for batch in itertools.islice(iterator, count)]


def numbers(iterator, count: int) -> list[list[float]]:
    return [[row[0] for row in batch] for batch in first(iterator, count)]


def flat(lists) -> list:
    return list(itertools.chain(*lists))


MADE = {
    "drop": lambda **o: ps.batches(Drawing(), 3, seed=5, **o),
    "pad": lambda **o: ps.batches(Drawing(), 3, seed=5, last="pad", **o),
    "wrap": lambda **o: ps.batches(Drawing(), 3, seed=5, last="wrap", **o),
    "short": lambda **o: ps.batches(Drawing(), 3, seed=5, last="short", **o),
    "in order": lambda **o: ps.batches(Drawing(), 3, shuffle=False, **o),
    "stream": lambda **o: ps.batches(Counting(), 3, shuffle=False, **o),
    "stream wraps": lambda **o: ps.batches(Counting(), 3, shuffle=False, last="wrap", **o),
    "loader": lambda **o: ps.from_loader(
        DataLoader(Drawing(), 3, shuffle=True, drop_last=True, num_workers=o.get("workers", 0))
    ),
}


@pytest.mark.parametrize("made", MADE)
def test_micro_batch_is_a_function_of_its_number(made):
    data = MADE[made]()
    whole = first(data(0), 12)
    assert len(set(map(str, whole))) == 12
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    assert [first(data(k), 1)[0] for k in range(12)] == whole
    assert first(MADE[made]()(3), 4) == whole[3:7]


@pytest.mark.parametrize("made", ["drop", "wrap", "loader"])
def test_workers_read_what_one_process_reads(made):
    whole = first(MADE[made]()(2), 6)
    assert first(MADE[made](workers=2)(2), 6) == whole


@pytest.mark.parametrize("made", MADE)
def test_numbers_are_read_in_any_order(made):
    data = MADE[made]()
    whole = first(data(0), 20)
    reads = ReadNumbers(2, (0, 4, 1, 5), 8, at=1)
    wanted = [6, 3, 7, 10, 14, 11, 15]
    assert list(itertools.islice(reads.numbers(), 7)) == wanted
    assert first(read(data, reads), 7) == [whole[number] for number in wanted]


def test_folder_for_temporary_files_may_have_a_long_name(monkeypatch, tmp_path):
    """No socket is in it, whose name would be too long: who reads would wait for ever."""
    data = ps.batches(list(range(8)), 2, workers=1, shuffle=False)
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setitem(multiprocessing.process.current_process()._config, "tempdir", None)
    assert next(iter(data(0))).tolist() == [0, 1]
    assert list(folder.iterdir()) == []


def test_workers_read_numbers_in_any_order():
    reads = ReadNumbers(1, (2, 0), 4)
    assert first(read(MADE["drop"](workers=2), reads), 4) == first(read(MADE["drop"](), reads), 4)


class Timed:
    """Data of its numbers; a clock that goes on with each call and each micro-batch read."""

    def __init__(self, start_s: float, skip_s: float = 0.0) -> None:
        self.start_s, self.skip_s, self.now_s, self.starts = start_s, skip_s, 0.0, []

    def __call__(self, start: int):
        self.starts.append(start)
        self.now_s += self.start_s + start * self.skip_s
        for number in itertools.count(start):
            self.now_s += 1.0
            yield number

    def read(self, reads: ReadNumbers, count: int) -> list[int]:
        return list(itertools.islice(in_turn(self, reads, lambda: self.now_s), count))


def test_data_that_begins_quickly_anywhere_is_begun_where_a_number_does_not_follow():
    data = Timed(start_s=0.1)
    assert data.read(ReadNumbers(0, (0, 1), 8), 6) == [0, 1, 8, 9, 16, 17]
    assert data.starts == [0, 8, 16]
    assert data.now_s == pytest.approx(6.3)


def test_data_that_begins_slowly_is_read_on():
    data = Timed(start_s=50.0)
    assert data.read(ReadNumbers(4, (0, 1), 8), 6) == [4, 5, 12, 13, 20, 21]
    assert data.starts == [4]


def test_data_that_is_skipped_by_reading_is_not_read_again_and_again():
    data = Timed(start_s=0.0, skip_s=1.0)
    found = data.read(ReadNumbers(4, (0, 1, 2, 3), 8), 400)
    assert found[-4:] == [796, 797, 798, 799]
    assert data.now_s < 2000


def test_two_places_are_read_in_turn_by_two_iterators():
    data = Timed(start_s=50.0)
    numbers = [0, 4, 1, 5, 2, 6, 3, 7]
    assert data.read(ReadNumbers(0, numbers, 8), 16) == numbers + [8 + number for number in numbers]
    assert len(data.starts) <= 2


@given(
    st.integers(0, 5),
    st.lists(st.integers(0, 9), min_size=1, unique=True),
    st.integers(0, 3),
    st.sampled_from([0.0, 2.0, 100.0]),
    st.sampled_from([0.0, 1.0]),
)
def test_any_numbers_are_read_as_they_are(first, places, at, start_s, skip_s):
    reads = ReadNumbers(first, places, 10, at % len(places))
    found = Timed(start_s, skip_s).read(reads, 25)
    assert found == list(itertools.islice(reads.numbers(), 25))


def test_data_that_ends_ends_what_is_read_of_it():
    assert list(read(lambda start: iter(range(start, 3)), ReadNumbers.all_from(1))) == [1, 2]
    assert list(read(lambda start: iter(range(start, 3)), ReadNumbers(0, (0,), 2))) == [0, 2]


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("workers", [0, 1])
def test_everybodys_generators_are_left_alone(made, workers):
    def drawn():
        return torch.rand(()).item(), random.random(), np.random.rand()

    def seeded():
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)

    seeded()
    expected = drawn(), drawn()
    seeded()
    found = [drawn()]
    list(itertools.islice(MADE[made](workers=workers)(1), 2 if workers else 5))
    assert (*found, drawn()) == expected


def test_a_sample_is_augmented_anew_in_each_epoch_and_by_itself():
    epochs = first(ps.batches(Drawing(), 2)(0), 10)
    drawn = [row[1:] for batch in epochs for row in batch]
    assert len(set(drawn)) == 20
    assert len({x for row in drawn for x in row}) == 60


def test_seeds_give_other_orders_and_other_augmentation():
    one, other = (first(ps.batches(Drawing(), 5, seed=s)(0), 2) for s in (0, 1))
    assert numbers(ps.batches(Drawing(), 5)(0), 2) != numbers(
        ps.batches(Drawing(), 5, seed=1)(0), 2
    )
    assert not {row[1] for b in one for row in b} & {row[1] for b in other for row in b}
    ordered = [first(ps.batches(Drawing(), 5, seed=s, shuffle=False)(0), 1)[0] for s in (0, 1)]
    assert [row[0] for row in ordered[0]] == [row[0] for row in ordered[1]]
    assert ordered[0] != ordered[1]


def test_collate_may_draw_too():
    def collate(samples):
        return torch.tensor(samples) + torch.rand(())

    data = ps.batches(list(range(8)), 2, collate=collate)
    batches = [batch.tolist() for batch in itertools.islice(data(0), 8)]
    assert [next(data(k)).tolist() for k in range(8)] == batches
    assert len({x % 1 for x, _ in batches}) == 8


# -- epochs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_epoch_has_every_sample_once(shuffle):
    epochs = numbers(ps.batches(Drawing(12), 3, shuffle=shuffle)(0), 12)
    parts = [flat(epochs[k : k + 4]) for k in (0, 4, 8)]
    assert all(sorted(part) == list(range(12)) for part in parts)
    assert (len(set(map(str, parts))) == 3) == shuffle
    assert (parts[0] == list(range(12))) != shuffle


def test_left_over_samples_are_dropped_padded_or_wrapped():
    def found(last, length=7, size=3):
        return numbers(ps.batches(Drawing(length), size, shuffle=False, last=last)(0), 5)

    assert found("drop") == [[0, 1, 2], [3, 4, 5]] * 2 + [[0, 1, 2]]
    assert found("pad") == [[0, 1, 2], [3, 4, 5], [6, 0, 1], [0, 1, 2], [3, 4, 5]]
    assert found("wrap") == [[0, 1, 2], [3, 4, 5], [6, 0, 1], [2, 3, 4], [5, 6, 0]]
    for last in ("drop", "pad", "wrap"):
        assert found(last, 6) == [[0, 1, 2], [3, 4, 5]] * 2 + [[0, 1, 2]]
        stream = ps.batches(Counting(7), 3, shuffle=False, last=last)
        assert numbers(stream(0), 5) == found(last)
        assert numbers(stream(3), 2) == found(last)[3:]
        even = ps.batches(Counting(6), 3, shuffle=False, last=last)
        assert numbers(even(0), 5) == found(last, 6)


@pytest.mark.parametrize(
    ("last", "length", "count"),
    [
        ("drop", 7, 2),
        ("pad", 7, 3),
        ("wrap", 7, 2),
        ("short", 7, 3),
        *((last, 6, 2) for last in get_args(Last)),
    ],
)
def test_length_is_that_of_an_epoch(last, length, count):
    assert len(ps.batches(Drawing(length), 3, last=last)) == count


def test_dataset_is_not_shown_with_the_data_and_not_compared():
    one, other = (ps.batches(torch.arange(10**6), 3) for _ in range(2))
    assert len(repr(one)) < 200
    assert one != other


def test_wrapped_epochs_have_every_sample_once():
    drawn = flat(numbers(ps.batches(Drawing(7), 3, last="wrap")(0), 14))
    assert [sorted(drawn[k : k + 7]) for k in range(0, 42, 7)] == [list(range(7))] * 6
    padded = numbers(ps.batches(Drawing(7), 3, last="pad")(0), 3)
    counts = Counter(flat(padded))
    assert sorted(counts.values()) == [1] * 5 + [2, 2]
    assert padded[2][1:] == padded[0][:2]


def test_only_what_is_read_is_asked_for():
    dataset = Drawing(10**6)
    next(ps.batches(dataset, 4)(123_456))
    assert len(dataset.asked) == 4


def test_stream_is_told_its_epoch():
    class Epochs(Counting):
        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter([100 * self.epoch + i for i in range(4)])

    data = ps.batches(Epochs(), 2, shuffle=False)
    assert [b.tolist() for b in itertools.islice(data(0), 4)] == [
        [0, 1],
        [2, 3],
        [100, 101],
        [102, 103],
    ]
    assert next(data(3)).tolist() == [102, 103]


def test_workers_share_a_stream_out():
    data = ps.batches(Counting(24), 3, shuffle=False, workers=2)
    expected = [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11], [12, 14, 16], [13, 15, 17]]
    assert numbers(data(0), 6) == expected
    assert first(data(3), 3) == first(data(0), 6)[3:]
    loader = DataLoader(Counting(24), 3, num_workers=2)
    assert numbers(loader, 6) == expected


# -- what a dataset may be -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "dataset",
    [list(range(6)), np.arange(6), torch.arange(6), range(6)],
    ids=["list", "array", "tensor", "range"],
)
def test_whatever_has_numbered_samples_is_a_dataset(dataset):
    assert next(ps.batches(dataset, 3, shuffle=False)(1)).tolist() == [3, 4, 5]


def test_whatever_can_be_gone_through_again_is_a_stream():
    assert next(ps.batches({1, 2}, 2, shuffle=False)(5)).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("make", "message", "hint"),
    [
        (lambda: ps.batches([], 2), "dataset .list. is empty", "check where"),
        (lambda: ps.batches([1], 2), "has 1 samples; a micro-batch has 2", "batch_size to 1 or"),
        (lambda: ps.batches((torch.ones(9), torch.ones(9)), 4), "has 2 samples", "TensorDataset"),
        (lambda: ps.batches({"train": [1]}, 1), "gives its samples by name: 'train'", "its parts"),
        (lambda: ps.batches([1], 0), "batch_size is 0", "1 or more"),
        (lambda: ps.batches([1], True), "batch_size is True", "1 or more"),
        (lambda: ps.batches([1], 1, workers=-1), "workers is -1", "0 or more"),
        (lambda: ps.batches([1], 1, seed="x"), "seed is 'x'", "0 or more"),
        (
            lambda: ps.batches([1], 1, last="keep"),
            "last is 'keep'",
            '"drop", "pad", "wrap" or "short"',
        ),
        (lambda: ps.batches([1], 1, collate=3), "collate is 3, not a function", "pass a function"),
        (lambda: ps.batches(Counting(), 2), "own order: it cannot be shuffled", "shuffle=False"),
        (lambda: ps.batches(3, 2, shuffle=False), "dataset .int. is not a dataset", "__getitem__"),
        (lambda: ps.batches(iter([1]), 1, shuffle=False), "can be iterated only once", "again"),
        (lambda: next(ps.batches(Counting(2), 3, shuffle=False)(0)), "has 2 samples", "to 2 or"),
        (lambda: next(ps.batches(Counting(0), 3, shuffle=False)(0)), "is empty", "check where"),
        (
            lambda: ps.from_loader([1]),
            r"given the list \[1\], not a torch DataLoader",
            "ps.batches",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_a_hint(make, message, hint):
    with pytest.raises(JobError, match=message) as caught:
        make()
    assert hint in caught.value.hint


def test_dataset_without_a_length_is_refused():
    class Endless(Dataset):
        def __getitem__(self, index):
            return index

    with pytest.raises(JobError, match="has no length"):
        ps.batches(Endless(), 2)


# -- loaders -------------------------------------------------------------------------------------


def test_loader_that_does_not_shuffle_gives_its_own_batches():
    data = TensorDataset(torch.arange(8.0), torch.arange(8.0) * 2)
    loader = DataLoader(
        data, 2, collate_fn=lambda samples: {"x": torch.stack([s[0] for s in samples])}
    )
    found = itertools.islice(ps.from_loader(loader)(0), 8)
    for batch, expected in zip(found, [*loader, *loader], strict=True):
        assert batch.keys() == expected.keys()
        assert torch.equal(batch["x"], expected["x"])


SAMPLERS = {
    "sequential": (lambda d: {"sampler": SequentialSampler(d)}, list(range(6))),
    "list": (lambda d: {"sampler": [4, 1, 3, 0]}, [4, 1, 3, 0]),
    "batch sampler": (
        lambda d: {"batch_sampler": BatchSampler(SequentialSampler(d), 2, drop_last=True)},
        list(range(6)),
    ),
}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_order_of_a_sampler_is_taken_over(sampler):
    options, expected = SAMPLERS[sampler]
    dataset = list(range(6))
    chosen = options(dataset)
    size = {} if "batch_sampler" in chosen else {"batch_size": 2}
    data = ps.from_loader(DataLoader(dataset, **size, **chosen))
    found = [batch.tolist() for batch in itertools.islice(data(0), len(expected) // 2)]
    assert flat(found) == expected


def test_random_subset_stays_that_subset():
    loader = DataLoader(list(range(9)), 2, sampler=SubsetRandomSampler([1, 3, 5, 7]))
    epochs = [b.tolist() for b in itertools.islice(ps.from_loader(loader)(0), 8)]
    assert [sorted(epochs[k] + epochs[k + 1]) for k in (0, 2, 4, 6)] == [[1, 3, 5, 7]] * 4
    assert len(set(map(str, epochs))) > 2


def test_loader_without_batches_gives_its_samples_as_they_are():
    samples = [torch.full((2,), float(i)) for i in range(4)]
    found = ps.from_loader(DataLoader(samples, batch_size=None))(0)
    assert [b.tolist() for b in itertools.islice(found, 5)] == [[i] * 2 for i in (0, 1, 2, 3, 0)]


def test_seed_of_the_loaders_generator_is_taken_over():
    def found(**options):
        generator = torch.Generator().manual_seed(options.pop("loader", 3))
        loader = DataLoader(list(range(64)), 4, shuffle=True, generator=generator)
        return next(ps.from_loader(loader, **options)(0)).tolist()

    assert found() == found() == found(loader=4, seed=3)
    assert found() != found(loader=4)


class ByClass:
    """A batch sampler: one sample of each class, drawn by a generator of its own."""

    def __init__(self, classes: int, length: int) -> None:
        self.classes, self.length, self.epoch = classes, length, 0
        self.source = random.Random(5)

    def __iter__(self):
        self.epoch += 1
        for _ in range(self.length // self.classes - self.epoch % 2):
            own = self.source.sample(range(self.length // self.classes), self.classes)
            yield [place * self.classes + number for number, place in enumerate(own)]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


OWN_ORDERS = {
    "weights": lambda: {"sampler": WeightedRandomSampler([1.0, 4.0] * 6, 8, generator=seeded(1))},
    "replacement": lambda: {"sampler": RandomSampler(range(12), True, generator=seeded(2))},
    "fewer": lambda: {"sampler": RandomSampler(range(12), num_samples=8, generator=seeded(3))},
    "lists": lambda: {"batch_sampler": [[0, 1, 2], [3, 4, 11], [7, 8, 9]]},
    "classes": lambda: {"batch_sampler": ByClass(3, 12)},
}


def with_order(name: str, **options) -> DataLoader:
    size = {} if name in ("lists", "classes") else {"batch_size": 2}
    return DataLoader(list(range(12)), **size, **OWN_ORDERS[name](), **options)


def looped(loader: DataLoader, epochs: int = 4) -> list[list[int]]:
    return [batch.tolist() for _ in range(epochs) for batch in loader]


@pytest.mark.parametrize("name", OWN_ORDERS)
def test_sampler_with_an_order_of_its_own_is_gone_through_as_a_loop_does(name):
    expected = looped(with_order(name))
    assert len(set(map(str, expected))) > 2
    data = ps.from_loader(with_order(name))
    for start in (0, 1, 5, len(expected) - 1):
        found = [b.tolist() for b in itertools.islice(data(start), len(expected) - start)]
        assert found == expected[start:]
    share = read(data, ReadNumbers(4, (3, 1), 4))
    assert [next(share).tolist() for _ in range(4)] == [expected[k] for k in (7, 5, 11, 9)]


@pytest.mark.parametrize("name", ["weights", "classes"])
def test_processes_that_read_ahead_follow_the_sampler(name):
    expected = looped(with_order(name))
    data = ps.from_loader(with_order(name, num_workers=2))
    assert [batch.tolist() for batch in itertools.islice(data(3), 6)] == expected[3:9]


def named(batches, count: int) -> list[list[int]]:
    return [batch.tolist() for batch in itertools.islice(batches, count)]


def test_sampler_that_draws_from_torchs_generator_draws_the_same_again():
    loader = DataLoader(list(range(12)), 2, sampler=WeightedRandomSampler([1.0] * 12, 12))
    torch.manual_seed(0)
    first = named(ps.from_loader(loader)(0), 18)
    torch.manual_seed(1)
    assert named(ps.from_loader(loader)(7), 11) == first[7:]
    assert first[:6] != first[6:12]
    assert named(ps.from_loader(loader, seed=3)(0), 18) != first


def test_last_samples_of_a_sampler_are_dropped_filled_up_or_wrapped():
    def order():
        return RandomSampler(range(12), num_samples=7, generator=seeded(4))

    drawn = [list(epoch) for epoch in itertools.repeat(order(), 2)]
    loader = DataLoader(list(range(12)), 3, sampler=order())
    one, two = drawn
    for last, third in (
        ("drop", two[:3]),
        ("pad", [one[6], *one[:2]]),
        ("wrap", [one[6], *two[:2]]),
    ):
        assert named(ps.from_loader(loader, last=last)(2), 1) == [third]
    with pytest.raises(JobError, match="sampler ends with 1 samples; a micro-batch has 3"):
        named(ps.from_loader(loader)(0), 3)


def test_sampler_that_is_changed_during_training_ends_the_run():
    mined = ByClass(3, 12)
    data = ps.from_loader(DataLoader(list(range(12)), batch_sampler=mined))(0)
    assert len(named(data, 3)) == 3
    mined.source.random()
    with pytest.raises(JobError, match=r"sampler \(ByClass\) was changed during training"):
        named(data, 3)


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"sampler": DistributedSampler(range(6), 2, 0)}, "which gives each rank", "shuffle=True"),
        ({"batch_sampler": iter([[0, 1], [2]])}, "can be gone through only once", "ps.batches"),
        ({"sampler": map(int, "012")}, "can be gone through only once", "ps.batches"),
    ],
)
def test_sampler_whose_order_cannot_be_made_again_is_refused(options, message, hint):
    with pytest.raises(JobError, match=message) as caught:
        ps.from_loader(DataLoader(list(range(6)), **options))
    assert hint in caught.value.hint


def test_sampler_that_holds_what_has_no_copy_is_refused():
    mined = ByClass(3, 12)
    mined.source = (number for number in range(9))
    with pytest.raises(JobError, match=r"ByClass, which cannot begin anew: .*generator") as caught:
        ps.from_loader(DataLoader(list(range(6)), batch_sampler=mined))
    assert "data(start)" in caught.value.hint


def test_sampler_shares_the_dataset_and_is_not_moved_by_reading():
    dataset = [torch.zeros(1)] * 12
    mined = ByClass(3, 12)
    mined.dataset = dataset
    data = ps.from_loader(DataLoader(dataset, batch_sampler=mined))
    assert data.sampler.again().dataset is dataset
    assert next(data(2)).shape == (3, 1)
    assert mined.epoch == 0


def test_smaller_last_micro_batch_is_as_in_a_loop_unless_told_else():
    loader = DataLoader(list(range(7)), 3)
    assert ps.from_loader(DataLoader(list(range(7)), 3, drop_last=True))
    for last, third in (("drop", [0, 1, 2]), ("pad", [6, 0, 1]), ("wrap", [6, 0, 1])):
        found = ps.from_loader(loader, last=last)(2)
        assert next(found).tolist() == third
    for options in ({}, {"last": "short"}):
        short = itertools.islice(ps.from_loader(loader, **options)(0), 4)
        assert [batch.tolist() for batch in short] == [[0, 1, 2], [3, 4, 5], [6], [0, 1, 2]]
    streams = ps.from_loader(DataLoader(Counting(7), 3))
    assert numbers(streams(0), 2) == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(JobError, match="ends with 1 samples; a micro-batch has 3"):
        next(streams(2))
    assert numbers(ps.from_loader(DataLoader(Counting(6), 3))(0), 3)[2] == [0, 1, 2]


def test_worker_init_sees_the_dataset_itself():
    def init(number):
        dataset = get_worker_info().dataset
        dataset.length = dataset.length // 2

    for kind in (Drawing, Counting):
        loader = DataLoader(kind(8), 4, num_workers=1, worker_init_fn=init)
        found = ps.from_loader(loader)(0)
        assert numbers(found, 1) == [[0, 1, 2, 3]]
        if kind is Counting:
            assert numbers(found, 1) == [[0, 1, 2, 3]]


def test_subset_is_a_dataset():
    data = ps.batches(Subset(Drawing(), [2, 4, 6]), 3)
    assert sorted(numbers(data(0), 1)[0]) == [2, 4, 6]
