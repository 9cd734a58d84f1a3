"""Rows of whole documents: each document once an epoch, and computed as if it stood alone."""

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import penstock as ps
from penstock.batches import ReadNumbers
from penstock.batches.packed import fitted
from penstock.errors import JobError

lengths_of_documents = st.lists(st.integers(1, 12), min_size=1, max_size=60)


def documents_of(lengths: list[int]) -> list[torch.Tensor]:
    """Return documents whose tokens say which they are, and none of which is 0."""
    return [torch.arange(n) + 100 * number + 1 for number, n in enumerate(lengths)]


@given(lengths_of_documents, st.integers(12, 20))
def test_rows_hold_each_length_once_and_no_two_rows_fit_into_one(lengths, room):
    rows = fitted(lengths, room)
    assert Counter(itertools.chain(*rows)) == Counter(lengths)
    assert all(0 < sum(row) <= room for row in rows)
    sums = sorted(map(sum, rows))
    assert len(sums) < 2 or sums[0] + sums[1] > room


@given(lengths_of_documents, st.integers(1, 4), st.integers(0, 3), st.booleans())
def test_an_epoch_holds_each_document_once(lengths, rows, seed, shuffle):
    data = ps.packed(documents_of(lengths), 12, rows, seed=seed, shuffle=shuffle, last="pad")
    for epoch in range(2):
        numbers = range(epoch * len(data), (epoch + 1) * len(data))
        read = [data.batch(number)["input_ids"] for number in numbers]
        tokens = torch.cat([batch.flatten() for batch in read])
        assert sorted(tokens[tokens > 0].tolist()) == torch.cat(documents_of(lengths)).tolist()


def test_the_same_number_is_the_same_micro_batch_wherever_reading_begins():
    documents = documents_of([3, 5, 2, 7, 4, 4, 6, 1] * 3)
    data = ps.packed(documents, 8, 2, seed=4)
    whole = list(itertools.islice(data(0), 12))
    for start in (1, 5, 11):
        assert equal(next(data(start)), whole[start])
    again = ps.packed(documents, 8, 2, seed=4, workers=2)
    picked = again.picked(ReadNumbers(0, (1, 3), 4))
    assert all(equal(next(picked), whole[number]) for number in (1, 3, 5, 7))


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_epochs_put_other_documents_together():
    data = ps.packed(documents_of([4] * 12), 8, 1, seed=1)
    epochs = [
        {frozenset(rows[0]) for rows in map(data.documents, range(at, at + len(data)))}
        for at in (0, len(data))
    ]
    assert epochs[0] != epochs[1]


def test_fields_say_where_documents_begin_and_what_follows():
    data = ps.packed([torch.tensor([5, 6, 7]), torch.tensor([8, 9])], 6, shuffle=False)
    assert {name: row.tolist() for name, row in data.batch(0).items()} == {
        "input_ids": [[5, 6, 7, 8, 9, 0]],
        "targets": [[6, 7, -100, 9, -100, -100]],
        "document_ids": [[1, 1, 1, 2, 2, 0]],
        "position_ids": [[0, 1, 2, 0, 1, 0]],
    }
    assert data.filled == 5 / 6


def test_labels_that_a_model_moves_itself_are_ignored_at_the_first_place_of_a_document():
    samples = [{"input_ids": [5, 6], "labels": [5, 6]}, {"input_ids": [7, 8], "labels": [7, 8]}]
    data = ps.packed(samples, 5, shuffle=False, first={"labels": -100}, pad={"input_ids": 1})
    batch = data.batch(0)
    assert batch["labels"].tolist() == [[-100, 6, -100, 8, -100]]
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 1]]


class Attending(nn.Module):
    """One causal layer whose positions are told."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(40, 16), nn.Embedding(12, 16)
        self.within, self.out = nn.Linear(16, 48), nn.Linear(16, 40)

    def forward(self, ids, positions, mask):
        x = self.tokens(ids) + self.places(positions)
        q, k, v = (
            part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.within(x).chunk(3, -1)
        )
        made = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(made.transpose(1, 2).flatten(-2))


def summed(model: Attending, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    mask = ps.document_mask(batch["document_ids"])
    logits = model(batch["input_ids"], batch["position_ids"], mask)
    return cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum")


def test_documents_of_a_row_are_computed_as_if_each_stood_alone():
    torch.manual_seed(0)
    documents = [torch.randint(1, 40, (n,)) for n in (5, 3, 7, 2, 6, 1, 4)]
    model = Attending().double()
    data = ps.packed(documents, 12, 2, last="pad")
    sum(summed(model, data.batch(number)) for number in range(len(data))).backward()
    together = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for document in documents:
        alone = ps.packed([document], len(document)).batch(0)
        mask = torch.ones(len(document), len(document)).tril().bool()
        logits = model(alone["input_ids"], alone["position_ids"], mask)
        cross_entropy(logits.flatten(0, 1), alone["targets"].flatten(), reduction="sum").backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(together[name], p.grad, rtol=1e-12, atol=1e-12)


def test_a_mask_that_is_not_causal_lets_a_document_see_itself_only():
    ids = torch.tensor([[1, 1, 2, 0]])
    assert ps.document_mask(ids, causal=False)[0, 0].int().tolist() == [
        [1, 1, 0, 0],
        [1, 1, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 0, 1],
    ]


@pytest.mark.parametrize(
    ("samples", "asked", "words"),
    [
        ([[1, 2, 3]], {"length": 2}, "sample 0 has 3 tokens, a row 2"),
        ([[1, 2], []], {"length": 2}, "sample 1 has 0 tokens, a row 2"),
        ([], {"length": 2}, "is empty"),
        ([[1, 2]], {"length": 4, "rows": 2}, "fills 1 rows; a micro-batch has 2"),
        ([[1, 2]], {"length": 4, "last": "wrap"}, "last is 'wrap'"),
        ([[1, 2]], {"length": 4, "lengths": [2, 2]}, "2 lengths are given"),
        ([7], {"length": 4}, "a sample begins with the int 7, which has no length"),
    ],
)
def test_what_cannot_be_packed_is_refused_with_its_numbers(samples, asked, words):
    with pytest.raises(JobError, match=words):
        ps.packed(samples, **asked)


def test_a_field_that_is_not_as_long_as_its_document_is_refused():
    data = ps.packed([{"input_ids": [1, 2], "label": [1]}], 4)
    with pytest.raises(JobError, match=r"label of sample 0 has the shape \[1\], the sample 2"):
        data.batch(0)
