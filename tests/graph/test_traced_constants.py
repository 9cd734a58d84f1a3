"""What a step asks of constants has its value while it is traced; what it keeps is real."""

from collections.abc import Callable
from functools import lru_cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from penstock.errors import GraphError
from penstock.graph.trace import capture
from penstock.graph.traced_constants import KnownValues, _Recipes
from penstock.job import Job
from tests.graph.test_trace import assert_equals_eager
from tests.graph.zoo import D, job_of, sequences, vectors


class Net(nn.Module):
    """A linear layer, then what a test wants."""

    def __init__(self, then: Callable[["Net", Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.then = nn.Linear(D, D), then
        self.register_buffer("angles", torch.arange(D) + 1.0, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self, self.linear(x))


def job_that(then: Callable[[Net, Tensor], Tensor]) -> Job:
    return job_of(lambda: Net(then), vectors)


def asks_for_numbers(net: Net, x: Tensor) -> Tensor:
    rates = torch.linspace(0.5, 1.5, 3)
    for rate in rates.tolist():
        x = x * rate
    return x * rates.sum().item() / float(rates.max())


def branches_on_a_mask(net: Net, x: Tensor) -> Tensor:
    mask = torch.ones(3, 3).tril()
    if mask.bool().all() or torch.equal(mask, mask.t()):
        return 2 * x
    return x * int(mask.sum()) + torch.unique(torch.tensor([3, 1, 1])).sum() + mask.nonzero().sum()


def writes_before_it_asks(net: Net, x: Tensor) -> Tensor:
    numbers = torch.zeros(4)
    numbers[1] = 2
    part = numbers[1:3]
    part += 1
    return x * numbers.tolist()[1] + numbers[2].item()


def picks_by_a_mask(net: Net, x: Tensor) -> Tensor:
    alike = F.normalize(x) @ F.normalize(x).t()
    others = alike[~torch.eye(len(x), dtype=torch.bool)].view(len(x), -1)
    above = alike.masked_select(torch.ones_like(alike, dtype=torch.bool).triu(1))
    (even,) = torch.where(torch.arange(D) % 2 == 0)
    return others.logsumexp(-1).sum() + above.mean() + x[:, even]


def draws_the_same_each_time(net: Net, x: Tensor) -> Tensor:
    source = torch.Generator().manual_seed(3)
    order = torch.randperm(D, generator=source)
    noise = torch.empty(D).normal_(generator=source)
    kept = torch.bernoulli(torch.full((D,), 0.5), generator=source)
    return (
        x[:, order]
        + noise.uniform_(-1, 1, generator=source) * kept
        + torch.rand(D, generator=source)
    )


@pytest.mark.parametrize(
    "then",
    [
        asks_for_numbers,
        branches_on_a_mask,
        writes_before_it_asks,
        picks_by_a_mask,
        draws_the_same_each_time,
    ],
)
def test_trace_computes_what_the_model_does_when_it(then) -> None:
    assert_equals_eager(job_that(then))


class Masked(nn.Module):
    """torch's encoder, whose mask is a buffer: nobody knows whether it stays causal."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(D, 1, 8, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(D, 3)
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x, mask=self.mask))


@pytest.mark.parametrize("is_causal", [True, False])
def test_encoder_of_torch_is_traced_with_a_mask_that_is_a_buffer(is_causal: bool) -> None:
    mask = torch.full((5, 5), float("-inf")).triu(1 if is_causal else 2)
    before = nn.modules.transformer._detect_is_causal_mask
    assert_equals_eager(job_of(lambda: Masked(mask), sequences))
    assert nn.modules.transformer._detect_is_causal_mask is before


KEPT: dict[str, tuple[Tensor, Tensor]] = {}


@lru_cache
def table(length: int) -> Tensor:
    return torch.arange(length) / length


def keeps_tables(net: Net, x: Tensor) -> Tensor:
    if "both" not in KEPT:
        KEPT["both"] = (net.angles * 2, torch.ones(D).cumsum(0))
        KEPT["for later"] = (net.angles * 3,)  # no result of the step needs it
    return x * KEPT["both"][0] + KEPT["both"][1] + table(x.shape[1])


def test_what_a_trace_leaves_in_caches_is_what_the_model_would_have_left() -> None:
    KEPT.clear()
    table.cache_clear()
    capture(job_that(keeps_tables))
    left = (*KEPT["both"], table(D), *KEPT["for later"])
    assert [type(one) for one in left] == [Tensor] * 4
    assert torch.equal(left[0], (torch.arange(D) + 1.0) * 2)
    assert torch.equal(left[1], torch.arange(1.0, D + 1))
    assert torch.equal(left[2], torch.arange(D) / D)
    assert torch.equal(left[3], (torch.arange(D) + 1.0) * 3)
    capture(job_that(keeps_tables))  # a second one reads what is real


def draws_from_what_it_keeps(net: Net, x: Tensor) -> Tensor:
    return x + torch.randn(D, generator=net.source)


def test_generator_that_the_model_keeps_is_refused() -> None:
    def model() -> Net:
        net = Net(draws_from_what_it_keeps)
        net.source = torch.Generator().manual_seed(3)
        return net

    with pytest.raises(GraphError, match=r"torch\.Generator of its own"):
        capture(job_of(model, vectors))


def test_generator_is_left_as_it_was() -> None:
    source = torch.Generator().manual_seed(3)
    capture(job_that(lambda net, x: x + torch.randn(D, generator=source)))
    assert torch.equal(source.get_state(), torch.Generator().manual_seed(3).get_state())


def test_number_of_a_buffer_is_asked_for_in_every_step() -> None:
    found = capture(job_that(lambda net, x: x * net.angles.sum().item()))
    assert any("_local_scalar_dense" in str(node.target) for node in found.fx_nodes)


def test_no_op_is_run_again_for_what_nobody_keeps(monkeypatch) -> None:
    alive, ran = [], []
    note, run = KnownValues._note_alive, _Recipes._run

    def notes(self, others):
        note(self, others)
        alive.append(len(self.alive))

    def runs(self, needed, wanted):
        ran.append(len(needed))
        return run(self, needed, wanted)

    monkeypatch.setattr(KnownValues, "_note_alive", notes)
    monkeypatch.setattr(_Recipes, "_run", runs)
    capture(job_that(lambda net, x: x * 2))
    assert alive[0] > 0, "what gradients are views of is alive at the step's end"
    assert not ran
    KEPT.clear()
    table.cache_clear()
    capture(job_that(keeps_tables))
    assert len(ran) == 1, "three tensors are kept: what led to them runs once for all"


def keeps_a_wrong_one(net: Net, x: Tensor) -> Tensor:
    if "both" not in KEPT:
        ids = torch.arange(3) + 7
        KEPT["both"] = (F.embedding(ids, torch.ones(4, 2)), net.angles * 2)
    return x * KEPT["both"][1]


def test_one_kept_tensor_that_cannot_be_computed_leaves_others_theirs() -> None:
    KEPT.clear()
    capture(job_that(keeps_a_wrong_one))
    assert torch.equal(KEPT["both"][1], (torch.arange(D) + 1.0) * 2)


def normal(net: Net, x: Tensor) -> Tensor:
    of = torch.distributions.Normal(x, F.softplus(x) + 0.1)
    return of.log_prob(net.angles.expand_as(x)) + of.entropy()


def categorical(net: Net, x: Tensor) -> Tensor:
    of = torch.distributions.Categorical(logits=x)
    return x * of.log_prob(torch.zeros(x.shape[:-1])).unsqueeze(-1) - of.entropy().unsqueeze(-1)


def divergence(net: Net, x: Tensor) -> Tensor:
    prior = torch.distributions.Normal(torch.zeros(D), torch.ones(D))
    return torch.distributions.kl_divergence(torch.distributions.Normal(x, x.exp()), prior)


@pytest.mark.parametrize("then", [normal, categorical, divergence])
def test_distributions_do_not_look_at_values_while_a_step_is_traced(then) -> None:
    job = job_that(then)
    assert_equals_eager(job)
    with pytest.raises(ValueError, match="Expected parameter scale"):
        torch.distributions.Normal(torch.zeros(2), -torch.ones(2))


def test_distribution_that_asks_to_look_is_not_traced() -> None:
    def then(_: Net, x: Tensor) -> Tensor:
        of = torch.distributions.Normal(x, x.exp(), validate_args=True)
        return of.log_prob(torch.zeros(D))

    with pytest.raises(GraphError, match="cannot be traced"):
        capture(job_that(then))


class Packed(nn.Module):
    """Rows of many lengths, packed for a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gru = nn.Linear(D, D), nn.GRU(1, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = x.detach().argmax(1) + 1
        rows = pack_padded_sequence(self.linear(x)[..., None], lengths, True, False)
        return self.gru(rows)[1][0]


def test_length_that_only_data_knows_is_no_constant() -> None:
    with pytest.raises(GraphError, match="cannot be traced"):
        capture(job_of(Packed, vectors))
