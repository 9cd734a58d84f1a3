"""Samples by length: a step has one key, and all that follows from the seed and the number."""

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.batches import ReadNumbers
from penstock.batches.bucketed import StepKey
from penstock.errors import JobError

LENGTHS = [3, 9, 4, 16, 2, 7, 8, 1, 12, 5, 6, 15, 4, 3, 10, 11, 2, 8]


def samples_of(lengths: list[int]) -> list[dict[str, torch.Tensor]]:
    return [
        {"x": torch.full((n,), number + 1), "labels": torch.full((n,), number + 1)}
        for number, n in enumerate(lengths)
    ]


def data_of(**more):
    return ps.bucketed(samples_of(LENGTHS), (16, 4, 8), 2, **{"last": "pad", **more})


def seen(batch) -> list[int]:
    return batch["x"][:, 0].tolist()


def test_samples_are_padded_to_the_shortest_bucket_that_they_fit():
    data = data_of(shuffle=False)
    for number in range(len(data)):
        batch = data.batch(number)
        (length,) = {batch["x"].shape[1]}
        for row, label, who in zip(batch["x"], batch["labels"], seen(batch), strict=True):
            own = LENGTHS[who - 1]
            assert length == min(each for each in (4, 8, 16) if each >= own)
            assert row.tolist() == [who] * own + [0] * (length - own)
            assert label.tolist() == [who] * own + [-100] * (length - own)


@given(st.integers(1, 3), st.integers(0, 3), st.sampled_from(["drop", "pad", "short"]))
def test_micro_batches_of_a_step_have_the_key_that_is_told(micro_batches, seed, last):
    asked = {"micro_batches": micro_batches, "seed": seed, "last": last}
    data = ps.bucketed(samples_of(LENGTHS * 2), (4, 8, 16), 2, **asked)
    steps = Counter()
    for number in range(len(data)):
        key = data.key_of(number)
        assert list(data.batch(number)["x"].shape) == [key.samples, key.length]
        assert key == data.key_of(number - number % micro_batches)
        steps[key] += number % micro_batches == 0
    assert steps == data.keys


@pytest.mark.parametrize("last", ["drop", "pad", "short"])
def test_an_epoch_holds_the_samples_that_are_asked_for(last):
    data = data_of(last=last)
    for epoch in range(2):
        numbers = range(epoch * len(data), (epoch + 1) * len(data))
        times = Counter(itertools.chain(*(seen(data.batch(number)) for number in numbers)))
        counts = Counter(times.values())
        assert set(counts) <= {1, 2}
        assert counts[2] == (2 if last == "pad" else 0)
        assert len(times) == (len(LENGTHS) - (2 if last == "drop" else 0))


def test_the_same_number_is_the_same_micro_batch_wherever_reading_begins():
    data = data_of(micro_batches=2, seed=3)
    whole = [seen(batch) for batch in itertools.islice(data(0), 30)]
    assert [seen(next(data(start))) for start in range(30)] == whole
    picked = data_of(micro_batches=2, seed=3, workers=2).picked(ReadNumbers(0, (1, 2), 4))
    assert [seen(next(picked)) for _ in range(4)] == [whole[n] for n in (1, 2, 5, 6)]
    assert whole != [seen(batch) for batch in itertools.islice(data_of(micro_batches=2)(0), 30)]


def test_each_bucket_may_have_a_size_of_its_own():
    data = ps.bucketed(samples_of(LENGTHS), (4, 8, 16), (4, 2, 1))
    assert set(data.keys) == {StepKey(4, 4), StepKey(8, 2), StepKey(16, 1)}
    assert [str(key) for key in sorted(data.keys)] == ["4 x 4", "2 x 8", "1 x 16"]


def test_images_of_several_sizes_are_told_apart_by_their_sizes():
    images = [torch.ones(3, 8, 8)] * 4 + [torch.ones(3, 8, 12)] * 2
    data = ps.bucketed(images, ((8, 8), (8, 12)), 2, length=lambda image: image.shape[1:])
    shapes = Counter(tuple(data.batch(number).shape) for number in range(len(data)))
    assert shapes == {(2, 3, 8, 8): 2, (2, 3, 8, 12): 1}


def test_padding_may_be_a_function_or_go_by_names():
    flat = ps.bucketed([[1, 2], [3]], (3,), 2, pad=lambda row, n: (row * n)[:n], shuffle=False)
    assert [row.tolist() for row in flat.batch(0)] == [[1, 3], [2, 3], [1, 3]]
    named = ps.bucketed([{"x": [1, 2], "y": [5, 6]}], (3,), 1, pad={"x": 9})
    assert named.batch(0)["x"].tolist() == [[1, 2, 9]]
    assert [each.tolist() for each in named.batch(0)["y"]] == [[5], [6]]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"lengths": (4, 8)}, "sample 1 is 9 long, the last bucket 8"),
        ({"lengths": (4, 8, 15, 16), "batch_size": 3}, "1 samples fall into the bucket of 16"),
        ({"lengths": (4, 4, 16)}, "lengths is"),
        ({"batch_size": (1, 2)}, "batch_size"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"last": "wrap"}, "last is 'wrap'"),
        ({"micro_batches": 0}, "micro_batches is 0"),
        ({"length": [1, 2]}, "2 lengths are given"),
    ],
)
def test_what_cannot_be_sorted_is_refused_with_its_numbers(asked, words):
    with pytest.raises(JobError, match=words):
        ps.bucketed(samples_of(LENGTHS), **{"lengths": (4, 8, 16), "batch_size": 2, **asked})


def job_of(data, **more) -> ps.Job:
    return ps.Job(
        model=lambda: torch.nn.Linear(1, 1),
        loss=lambda model, batch: model(batch["x"].float()[..., None]).mean(),
        data=data,
        optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1),
        **more,
    )


def test_a_step_of_several_keys_is_refused():
    assert job_of(data_of(micro_batches=4)).micro_batches == 4
    assert job_of(data_of(micro_batches=4), micro_batches=2).micro_batches == 2
    weigh = {"weight": lambda batch: (batch["labels"] != -100).sum()}
    with pytest.raises(JobError, match=r"micro_batches is 3, and the data makes steps of 4"):
        job_of(data_of(micro_batches=4), micro_batches=3)
    with pytest.raises(JobError, match=r"say it there|the data makes steps of 1"):
        job_of(data_of(), micro_batches=3, **weigh)
