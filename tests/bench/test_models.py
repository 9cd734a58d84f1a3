"""The models of the benches can be cut as the benches cut them."""

import pytest
import torch

from bench.models import GPT, SIZES, TINY, Pieces, Size, loss, micro_batches
from penstock.graph.trace import build

MINI = Size("mini", width=8, window=4, micro_batch=2, blocks=4, heads=2, vocabulary=16)


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("size", [*SIZES, MINI], ids=lambda size: size.name)
def test_stages_hold_every_piece_once_and_equally_many_blocks(size, num_stages):
    stages = size.pieces_of(num_stages)
    assert [piece for stage in stages for piece in stage] == list(range(size.blocks + 2))
    ends = {0, size.blocks + 1}
    assert {len(set(stage) - ends) for stage in stages} == {size.blocks // num_stages}


def test_blocks_that_cannot_be_divided_are_refused():
    with pytest.raises(ValueError, match="4 blocks cannot be divided among 3 stages"):
        MINI.pieces_of(3)


def test_stages_one_after_another_are_the_whole_model():
    whole, (tokens, _) = build(MINI.job())
    x = tokens
    for numbers in MINI.pieces_of(2):
        stage = Pieces(MINI, numbers)
        stage.load_state_dict({name: whole.state_dict()[name] for name in stage.state_dict()})
        x = stage(x)
    assert torch.equal(x, whole(tokens))


def test_data_from_an_index_on_is_the_same_data():
    made = micro_batches(MINI)
    for start in (0, 3, len(made), len(made) + 3):
        batch = next(MINI.data(start))
        assert all(map(torch.equal, batch, made[start % len(made)]))
    assert not torch.equal(made[0][0], made[1][0])


def test_labels_are_the_next_tokens():
    tokens, labels = micro_batches(MINI)[0]
    assert torch.equal(tokens[:, 1:], labels[:, :-1])


def test_sizes_are_those_that_the_documents_name():
    assert Size("gpt", width=256, window=128, micro_batch=2, blocks=8, vocabulary=1024) == GPT
    assert Size("tiny", width=64, window=64, micro_batch=1, blocks=8, vocabulary=1024) == TINY
    model, batch = build(MINI.job())
    assert loss(model, batch).dim() == 0
