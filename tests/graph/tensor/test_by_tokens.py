"""A step divided by tokens gives what the plain model gives, whatever looks from token to token."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from penstock.errors import GraphError
from penstock.graph.tensor.by_tokens import by_tokens
from penstock.graph.tensor.collect_op import COLLECT
from penstock.graph.tensor.token_attention import (
    ATTEND_TOKENS,
    attend_tokens,
    attend_tokens_backward,
    by_rank,
    in_order,
    parts_of,
)
from penstock.graph.tensor.value_placement import Slices, fits, local, reshaped
from penstock.graph.trace import capture
from tests.graph.tensor.test_divided import assert_between_stages, assert_equal
from tests.graph.zoo import floats, job_of


@pytest.fixture(autouse=True)
def _in_64_bits():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Words(nn.Module):
    """A small language model; `how` says how it attends."""

    def __init__(self, tokens: int, how: str = "causal", heads: int = 2, dropout: float = 0.0):
        super().__init__()
        self.how, self.heads, self.dropout = how, heads, dropout
        self.table, self.place = nn.Embedding(32, 8 * heads), nn.Embedding(tokens, 8 * heads)
        self.norm, self.qkv = nn.LayerNorm(8 * heads), nn.Linear(8 * heads, 24 * heads)
        self.mix, self.head = nn.Linear(8 * heads, 8 * heads), nn.Linear(8 * heads, 32)
        if how == "tied":
            self.head.weight = self.table.weight

    def forward(self, words):
        x = self.table(words) + self.place(torch.arange(words.shape[1]))
        for _ in range(2):
            x = x + F.dropout(self.mix(self.attention(self.norm(x))), self.dropout)
        return self.head(x)

    def attention(self, x):
        B, T, D = x.shape
        rows = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        return self.attended(rows, T).transpose(1, 2).reshape(B, T, D)

    def attended(self, rows, T):
        q, k, v = rows
        seen = torch.ones(T, T, dtype=torch.bool).tril()
        if self.how == "eager":
            scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
            return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v
        if self.how == "masked":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen.tril(0).triu(-3))
        if self.how == "all":
            return F.scaled_dot_product_attention(q, k, v, scale=0.3)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def words_of(samples, tokens):
    return lambda drawn: torch.randint(32, (samples, tokens + 1), generator=drawn)


def next_word(model, words):
    targets = words[:, 1:].flatten()
    targets = targets.masked_fill(targets == 3, -100)
    return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), targets)


def job(samples=2, tokens=16, how="causal", **more):
    return job_of(lambda: Words(tokens, how, **more), words_of(samples, tokens), next_word)


def hows(made):
    return [node.args[1] for node in made.fx_nodes if node.target is COLLECT]


@pytest.mark.parametrize("how", ["causal", "all", "masked", "eager", "tied"])
@pytest.mark.parametrize(("ranks", "tokens"), [(2, 16), (4, 16), (3, 12)])
@pytest.mark.sampled(3)
def test_ranks_with_tokens_make_the_step_of_the_plain_model(how, ranks, tokens):
    made = by_tokens(capture(job(tokens=tokens, how=how)), ranks)
    assert made.graph.tensor == ranks
    assert made.graph.context
    assert_equal(job(tokens=tokens, how=how), made, ranks)
    assert_between_stages(made.graph)


@pytest.mark.parametrize("how", ["causal", "masked"])
def test_attention_gathers_keys_and_values_twice_and_scatters_their_gradients(how):
    made = by_tokens(capture(job(how=how)), 2)
    assert hows(made) == ["gather", "gather", "sum", *["gather", "scatter"] * 2]
    assert sum(node.target is ATTEND_TOKENS for node in made.fx_nodes) == 2


@settings(max_examples=10)
@given(
    st.integers(1, 3),
    st.sampled_from([2, 3, 4]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from(["causal", "all", "eager"]),
)
def test_sequences_of_any_length_are_divided_or_refused(samples, ranks, blocks, heads, how):
    tokens = 2 * ranks * blocks
    given = job(samples, tokens, how, heads=heads)
    assert_equal(given, by_tokens(capture(given), ranks), ranks)
    odd = job(samples, tokens + 1, how, heads=heads)
    with pytest.raises(GraphError, match=f"{tokens + 2} tokens, .* multiple of {2 * ranks} is nee"):
        by_tokens(capture(odd), ranks)


def test_dropout_draws_what_the_plain_model_draws_and_needs_no_collect():
    given = job(dropout=0.5)
    made = by_tokens(capture(given), 2)
    assert_equal(given, made, 2)
    assert hows(made) == hows(by_tokens(capture(job()), 2))


DRAWS = {
    "in the order of memory": lambda x: x + torch.empty_like(x.transpose(1, 2)).uniform_().mT,
    "normal": lambda x: x + torch.empty_like(x).normal_(1.0, 0.1),
    "exponential": lambda x: x - torch.empty_like(x).exponential_().log(),
    "geometric": lambda x: x * torch.empty_like(x).geometric_(0.7),
    "cauchy": lambda x: x + torch.empty_like(x).cauchy_().atan(),
    "log-normal": lambda x: x * torch.empty_like(x).log_normal_(0.0, 0.1),
    "rand": lambda x: x * torch.rand_like(x),
    "randn": lambda x: x + torch.randn_like(x, dtype=torch.float32),
    "randint": lambda x: x * torch.randint_like(x, 3),
    "randint from": lambda x: x * torch.randint_like(x, 1, 4),
    "dropout of one op": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "its mask": lambda x: x.masked_fill(torch.native_dropout(x, 0.3, True)[1], 0.5),
}


class Noisy(Words):
    """Words of which every value has noise, those of places of the sequence too."""

    def __init__(self, tokens: int, draw):
        super().__init__(tokens)
        self.draw = draw

    def attention(self, x):
        return self.draw(super().attention(self.draw(x)).transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.sampled(2)
def test_whatever_is_drawn_is_what_the_plain_model_draws(draw, ranks):
    given = job_of(lambda: Noisy(16, DRAWS[draw]), words_of(3, 16), next_word)
    made = by_tokens(capture(given), ranks)
    assert_equal(given, made, ranks)
    assert hows(made) == hows(by_tokens(capture(job()), ranks))


def test_attention_that_drops_weights_needs_keys_and_values_alone():
    class Dropped(Words):
        def attended(self, rows, T):
            return F.scaled_dot_product_attention(*rows, is_causal=True, dropout_p=0.4)

    given = job_of(lambda: Dropped(16), words_of(2, 16), next_word)
    made = by_tokens(capture(given), 2)
    assert_equal(given, made, 2)
    sizes = {n.meta["val"].numel() for n in made.fx_nodes if n.target is COLLECT}
    assert max(sizes) == 2 * 16 * 16  # of keys, or values; weights are twice as many


class Vectors(nn.Module):
    """Vectors, a weight of each place, and one that no token reads."""

    def __init__(self, penalty: bool = False):
        super().__init__()
        self.place, self.up = nn.Parameter(torch.randn(8, 4)), nn.Linear(4, 8)
        self.far = nn.Parameter(torch.randn(3))

    def forward(self, x):
        q = self.up(x + self.place).unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q) + self.far.square().sum()


def test_gradients_that_are_whole_or_of_some_places_are_summed_once():
    given = job_of(Vectors, lambda drawn: torch.randn(2, 8, 4, generator=drawn))
    made = by_tokens(capture(given), 2)
    assert "gather" in hows(made)
    assert_equal(given, made, 2)


def test_a_step_in_which_no_token_sees_another_is_refused():
    given = job_of(lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()), floats(2, 8, 4))
    with pytest.raises(GraphError, match="no attention can be divided by tokens among 2 ranks"):
        by_tokens(capture(given), 2)


# -- attention ------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.booleans())
def test_attention_of_all_ranks_is_that_of_one(heads, ranks, size, causal, scaled):
    drawn = torch.Generator().manual_seed(size)
    shape, scale = (2, heads, 2 * ranks * size, 4), 0.7 if scaled else None
    whole = [torch.randn(shape, generator=drawn, requires_grad=True) for _ in range(3)]
    weight = torch.randn(shape, generator=drawn)
    q, k, v = whole
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    expected = torch.autograd.grad((out * weight).sum(), whole)
    query, key, value, grad = (by_rank(each.detach(), ranks) for each in (*whole, weight))
    every = torch.stack([key, value], 1)
    made, parts = [], torch.zeros_like(every)
    for rank in range(ranks):
        how = None, causal, scale, rank
        own, logs = attend_tokens(query[rank], every, *how)
        back, part = attend_tokens_backward(grad[rank], query[rank], every, own, logs, *how)
        made.append((own, back))
        parts += part
    outs, of_query = (in_order(torch.stack(each)) for each in zip(*made, strict=True))
    found = of_query, in_order(parts[:, 0]), in_order(parts[:, 1])
    torch.testing.assert_close(outs, out.detach(), rtol=1e-12, atol=1e-12)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_ranks_attend_to_as_many_pairs(ranks):
    def pairs(rank):
        query, keys = torch.empty(1, 1, 4, 1), torch.empty(1, 1, 4 * ranks, 1)
        rows = [part for row in parts_of(query, keys, rank, causal=True) for part in row]
        seen = [(part.keys.stop - part.keys.start, part.causal) for part in rows]
        return sum(n * (n + 1) // 2 if causal else 2 * n for n, causal in seen)

    assert len({pairs(rank) for rank in range(ranks)}) == 1
    assert pairs(0) * ranks == 4 * ranks * (4 * ranks + 1) // 2


# -- folded slices --------------------------------------------------------------------------------


def places_of(shape, place, ranks, rank):
    """Return the numbers of a value that a rank has, one by one."""
    size = shape[place.dim] // (place.pieces * ranks)
    runs = [
        run * ranks + (ranks - 1 - rank if place.folded and run % 2 else rank)
        for run in range(place.pieces)
    ]
    own = [run * size + at for run in runs for at in range(size)]
    value = torch.arange(torch.Size(shape).numel()).view(shape)
    return value.index_select(place.dim, torch.tensor(own))


@given(
    st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3),
    st.integers(0, 2),
    st.sampled_from([2, 3]),
    st.data(),
)
def test_a_folded_slice_in_another_shape_is_that_of_the_reshaped_value(shape, at, ranks, data):
    dim, place = at % len(shape), Slices(at % len(shape), 2, folded=True)
    shape[dim] *= 2 * ranks
    new = tuple(data.draw(st.permutations([*shape, 1])))
    assert fits(place, tuple(shape), ranks)
    if (found := reshaped(place, tuple(shape), new, ranks)) is not None:
        for rank in range(ranks):
            own = places_of(tuple(shape), place, ranks, rank).reshape(-1)
            other = places_of(new, found, ranks, rank)
            assert tuple(other.shape) == local(found, new, ranks)
            assert torch.equal(own, other.reshape(-1))


def test_of_an_odd_number_of_runs_nothing_is_folded():
    assert not fits(Slices(0, 3, folded=True), (12,), 2)
    assert reshaped(Slices(0, 2, folded=True), (8, 3), (2, 4, 3), 2) is None
