"""Experts divided among ranks: each row is computed by the rank that has its expert, and once."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from penstock.graph.flop import flop_of
from penstock.graph.tensor import choose_slices
from penstock.graph.tensor.choose_slices import by_tensor
from penstock.graph.tensor.collect_op import COLLECT
from penstock.graph.tensor.divided import divided
from penstock.graph.tensor.expert_rows import OWN_ROWS_ONLY
from penstock.graph.tensor.expert_slices import (
    GROUPED,
    OWN_EXPERTS_MM,
    OWN_ROWS_MM,
    queued_experts_mm,
    queued_rows_mm,
)
from penstock.graph.tensor.placed import Placing, RankSpeed
from penstock.graph.tensor.value_placement import Partial, Slices
from penstock.graph.trace import capture
from penstock.prove.prove import prove
from penstock.runtime.launch import run_processes, run_threads
from tests.graph.executor import run_eager
from tests.graph.tensor.pretend import run_pretend
from tests.graph.zoo import floats, job_of
from tests.runtime.test_collects import planned_of

D, N = 8, 16
FAST = RankSpeed(flop_per_s=1e6, memory_bytes_per_s=1e12, latency_s=0.0, link_bytes_per_s=1e11)
counts = st.lists(st.integers(0, 5), min_size=1, max_size=3)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sorted_rows(seen: list[int], ranks: int) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Return the expert of each row, rows, and where those of each of `ranks` times these end."""
    experts = [k for k, count in enumerate(seen * ranks) for _ in range(count)]
    ends = torch.tensor(seen * ranks).cumsum(0, dtype=torch.int32)
    return experts, drawn(len(experts), D), ends


@pytest.mark.parametrize("product", [OWN_ROWS_MM, queued_rows_mm])
@given(counts, st.sampled_from([1, 2, 4]))
def test_rows_are_multiplied_by_the_matrix_of_their_expert_once(product, seen, ranks):
    """By a loop over rows; experts may see none."""
    (experts, rows, ends), size = sorted_rows(seen, ranks), len(seen)
    weights = drawn(len(ends), D, N, seed=1)
    own = [
        product(rows, weights[rank * size : (rank + 1) * size], ends, rank) for rank in range(ranks)
    ]
    for at, k in enumerate(experts):
        torch.testing.assert_close(own[k // size][at], rows[at] @ weights[k])
        assert not any(own[rank][at].any() for rank in range(ranks) if rank != k // size)


@pytest.mark.parametrize("product", [OWN_EXPERTS_MM, queued_experts_mm])
@given(counts, st.sampled_from([1, 2, 4]))
def test_gradients_of_matrices_are_sums_over_the_rows_of_their_expert(product, seen, ranks):
    experts, rows, ends = sorted_rows(seen, ranks)
    grads = drawn(len(experts), N, seed=1)
    made = torch.cat([product(rows.t(), grads, ends, ranks, r) for r in range(ranks)])
    expected = torch.zeros(len(ends), D, N)
    for at, k in enumerate(experts):
        expected[k] += torch.outer(rows[at], grads[at])
    torch.testing.assert_close(made, expected)


def held_apart(*, spread):
    """Return what lays a step out with experts in slices, between them by tokens or whole."""

    def layouts(placing, groups, picked):
        other = Placing(placing.capture, placing.ranks, FAST, spread=spread)
        names = [name for group in groups for name in group.names]
        held = {n: Slices(0) for n in names if n.endswith((".up", ".down"))}
        assert len(held) == 2
        return [other.layout(held)]

    return layouts


class Experts(nn.Module):
    """Top-k of softmax, rows sorted by expert, gate and up in one, as public models have it."""

    def __init__(self, count: int, top: int, act, last=None) -> None:
        super().__init__()
        self.router = nn.Linear(D, count, bias=False)
        self.up = nn.Parameter(drawn(count, 2 * N, D) / D**0.5)
        self.down = nn.Parameter(drawn(count, D, N) / N**0.5)
        self.count, self.top, self.act, self.last = count, top, act, last

    def forward(self, x):
        chances = self.router(x).softmax(-1)
        weights, experts = chances.topk(self.top, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).reshape(-1)
        order = experts.reshape(-1).argsort()
        sorted_experts = experts.reshape(-1)[order]
        seen = torch.histc(sorted_experts.float(), self.count, 0, self.count - 1)
        ends = seen.cumsum(0, dtype=torch.int32)
        rows = x[order // self.top]
        gate, up = F.grouped_mm(rows, self.up.transpose(1, 2), offs=ends).chunk(2, -1)
        made = F.grouped_mm(self.act(gate) * up, self.down.transpose(1, 2), offs=ends)
        made = (made if self.last is None else self.last(made)) * weights[order, None]
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return made[back].view(len(x), self.top, D).sum(1)


def limited_gate(halves):
    """Return what gpt-oss makes of gate and up, which stand by turns."""
    gate, up = halves[:, ::2].clamp(max=0.4), halves[:, 1::2].clamp(min=-0.4, max=0.4)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.7))


class BiasedExperts(Experts):
    """With a bias for each expert, looked up by the experts of rows, which `told` gives."""

    def __init__(
        self, told=lambda experts, order: experts.sort()[0], gate=limited_gate, of=None, last=None
    ) -> None:
        super().__init__(4, 2, gate, last)
        self.told, self.of = told, of
        self.up_bias, self.down_bias = (
            nn.Parameter(drawn(4, size, seed=size)) for size in (2 * N, D)
        )

    def forward(self, x):
        weights, chosen = self.router(x).topk(self.top, -1)
        experts = (chosen if self.of is None else self.of(chosen)).reshape(-1)
        order = experts.argsort()
        ends = torch.histc(experts.float(), 4, 0, 3).cumsum(0, dtype=torch.int32)
        at = self.told(experts, order)
        up = F.grouped_mm(x[order // self.top], self.up.transpose(1, 2), offs=ends)
        rows = self.act(up + self.up_bias[at])
        made = F.grouped_mm(rows, self.down.transpose(1, 2), offs=ends) + self.down_bias[at]
        made = made if self.last is None else self.last(made)
        made = made * weights.softmax(-1).reshape(-1)[order, None]
        return torch.zeros_like(x).index_add(0, order // self.top, made)


class BiasedNet(nn.Module):
    def __init__(self, **how) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(D, D), BiasedExperts(**how), nn.Linear(D, D)

    def forward(self, x):
        x = self.first(x)
        return self.last(x + self.layer(x))


class Net(nn.Module):
    def __init__(self, count=4, top=2, act=F.silu, layers=2, last=None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts(count, top, act, last) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(layers))
        self.head = nn.Linear(D, D)

    def forward(self, x):
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return self.head(x)


def by_experts(job, ranks: int):
    """Return the step divided by experts alone, and what is held in slices."""
    made = by_tensor(capture(job), ranks, FAST)
    return made, {row.name for row in made.graph.nodes if row.kind == "parameter"}


@settings(max_examples=8)
@given(
    st.sampled_from([(4, 2), (4, 1), (8, 3)]),
    st.sampled_from([F.silu, F.gelu, F.relu, torch.tanh]),
    st.sampled_from([2, 4]),
)
def test_random_experts_are_divided_as_they_are_computed(sizes, act, ranks):
    count, top = sizes
    job = job_of(lambda: Net(count, top, act), floats(12, D))
    made, names = by_experts(job, ranks)
    assert sum("/" in name and (".up" in name or ".down" in name) for name in names) == 4
    targets = [node.target for node in made.fx_nodes]
    assert targets.count(OWN_ROWS_MM) == 8, "two products a layer, and as many backward"
    assert targets.count(OWN_EXPERTS_MM) == 4
    assert GROUPED not in targets
    plain, found = run_eager(job), run_pretend(job, made, ranks)
    pairs = [*zip(plain.losses, found.losses, strict=True)]
    pairs += [(plain.gradients[name], found.gradients[name]) for name in plain.gradients]
    for expected, value in pairs:
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-6)


def test_rows_leave_the_experts_in_one_sum_a_layer_each_way():
    """Activations between two products of experts need no collect."""
    job = job_of(lambda: Net(layers=1), floats(12, D))
    placing = Placing(capture(job), 2, FAST)
    names = [name for name, _ in placing.capture.model.named_parameters() if "up" in name]
    held = dict.fromkeys([*names, *(name.replace("up", "down") for name in names)], Slices(0))
    layout = placing.layout(held)
    shapes = [placing.shapes[node] for node, _ in layout.collects]
    assert shapes.count((12, D)) == 2, "of the rows forward, of their gradients backward"
    rest = [shape for shape in shapes if shape != (12, D)]
    assert all(torch.Size(shape).numel() <= 12 * 4 for shape in rest), "the router's, small"
    products = [node for node in layout.choices if node.target is GROUPED]
    states = [layout.states[node] for node in products]
    assert [isinstance(state, Partial) for state in states].count(True) == 4
    assert states.count(Slices(0)) == 2


def test_what_does_not_keep_zeros_is_collected_before(monkeypatch):
    """A sigmoid of a row of zeros is none: each rank would add its halves."""
    monkeypatch.setattr(choose_slices, "layouts_of", held_apart(spread=False))
    job = job_of(lambda: Net(act=torch.sigmoid, layers=1, last=torch.sigmoid), floats(12, D))
    made, _ = by_experts(job, 2)
    assert OWN_ROWS_MM in {node.target for node in made.fx_nodes}
    plain, found = run_eager(job), run_pretend(job, made, 2)
    for name, expected in plain.gradients.items():
        torch.testing.assert_close(found.gradients[name], expected, rtol=1e-4, atol=1e-6)


def equal_pretend(job, made, ranks: int) -> None:
    plain, found = run_eager(job), run_pretend(job, made, ranks)
    pairs = [*zip(plain.losses, found.losses, strict=True)]
    pairs += [(plain.gradients[name], found.gradients[name]) for name in plain.gradients]
    for expected, value in pairs:
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-6)


def sliced_biases(job, ranks: int = 2):
    """Return the step with experts and their biases in slices."""
    placing = Placing(capture(job), ranks, FAST)
    names = [f"layer.{name}" for name in ("up", "down", "up_bias", "down_bias")]
    layout = placing.layout(dict.fromkeys(names, Slices(0)))
    return divided(placing.capture, layout, layout.held, ranks)


TOLD = {
    "sorted": lambda experts, order: experts.sort()[0],
    "by their order": lambda experts, order: experts[order],
    "stably": lambda experts, order: experts.sort(stable=True)[0],
    "as they were": lambda experts, order: experts[experts.argsort()],
}
UNKNOWN = {
    "not sorted": lambda experts, order: experts,
    "last first": lambda experts, order: experts.sort(descending=True)[0],
    "of another order": lambda experts, order: experts[(-experts).argsort()],
    "changed": lambda experts, order: (experts.sort()[0] + 1) % 4,
    "from the end": lambda experts, order: experts.sort()[0] - 4,
}


def gathered_shapes(made) -> list[tuple[int, ...]]:
    """Return the shapes of values that are collected."""
    return [tuple(n.args[0].meta["val"].shape) for n in made.fx_nodes if n.target is COLLECT]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("how", TOLD)
def test_biases_of_experts_are_those_of_a_ranks_own(how, ranks):
    """No bias is gathered, and no gradient of one is summed."""
    job = job_of(lambda: BiasedNet(told=TOLD[how]), floats(12, D))
    made = sliced_biases(job, ranks)
    assert not [s for s in gathered_shapes(made) if s[0] <= 4 or s == (24, 2 * N)]
    equal_pretend(job, made, ranks)


@pytest.mark.parametrize("how", UNKNOWN)
def test_biases_that_may_be_other_experts_are_gathered(how):
    job = job_of(lambda: BiasedNet(told=UNKNOWN[how]), floats(12, D))
    made = sliced_biases(job)
    assert [s for s in gathered_shapes(made) if s in ((2, 2 * N), (4, 2 * N))]
    equal_pretend(job, made, 2)


def test_biases_of_experts_that_no_router_has_chosen_are_gathered():
    """Their numbers may count from the end."""
    job = job_of(lambda: BiasedNet(of=lambda chosen: (chosen + 1) % 4), floats(12, D))
    made = sliced_biases(job)
    assert (2, 2 * N) in gathered_shapes(made)
    equal_pretend(job, made, 2)


def flags_of(x):
    """Return numbers that a count over all rows has made of flags."""
    flags = x > 0.1
    return x * flags.any(0).to(x.dtype) + flags.cumsum(0).to(x.dtype) * 0.01 * x


GATES = {
    "gpt-oss": limited_gate,
    "halves of rows": lambda x: torch.sigmoid(x[:, :N]) + torch.cumsum(torch.sigmoid(x[:, N:]), 0),
    "chosen": lambda x: torch.where(x > 0.1, x, 0.0)[:, :N] - torch.where(x < 0, 2.0, x)[:, N:],
    "counted": lambda x: flags_of(x)[:, :N],
    "without zeros": lambda x: (x.exp() / (1 + x.exp()))[:, :N],
    "one by one": lambda x: torch.stack(torch.sigmoid(x).chunk(2, -1)).sum(0),
    "over itself": lambda x: ((x + 3) / (x + 3) * x + x.clamp(min=0.2))[:, N:],
    "split by rows": lambda x: torch.cat([(x + 1)[:5, :N], torch.sigmoid(x)[5:, :N]]),
    "unbound": lambda x: torch.stack((x[:, :N] + 1).unbind(0)),
    "to a power": lambda x: ((x + 1) ** 2 - (x * 0) ** 2 + 1 / (x * x + 1))[:, :N],
}


@pytest.mark.parametrize("gate", GATES)
def test_rows_that_an_activation_fills_are_those_of_their_rank(gate):
    """Others' rows, which a sigmoid or a sum fills, never come into a result."""
    job = job_of(lambda: BiasedNet(gate=GATES[gate]), floats(12, D))
    made = sliced_biases(job)
    assert OWN_ROWS_MM in {node.target for node in made.fx_nodes}
    equal_pretend(job, made, 2)


LAST = {
    "a number in place of small ones": lambda x: torch.where(x < 0.5, 2.0, x),
    "not below a number": lambda x: x.clamp(min=0.2),
    "not above a number": lambda x: x.clamp(max=-0.2),
    "a sigmoid": torch.sigmoid,
    "of flags": lambda x: (x < 0.1).to(x.dtype) * 0.5 + x,
    "by itself": lambda x: x / (x + 2),
}


@pytest.mark.parametrize("last", LAST)
def test_rows_that_are_filled_behind_the_experts_are_those_of_their_rank(last):
    """Where all rows are summed next."""
    job = job_of(lambda: BiasedNet(last=LAST[last]), floats(12, D))
    equal_pretend(job, sliced_biases(job), 2)


def test_what_fills_rows_is_not_collected_between_two_products():
    job = job_of(BiasedNet, floats(12, D))
    made = sliced_biases(job)
    wide = [shape for shape in gathered_shapes(made) if shape[0] >= 12 and shape[1] >= D]
    assert wide == [(12, D), (12, D)], "where rows leave the experts, and backward"


@given(st.lists(st.integers(0, 4), min_size=4, max_size=4), st.sampled_from([2, 4]), st.booleans())
def test_rows_of_all_ranks_are_apart_and_all_of_them(seen, ranks, turned):
    """By the expert of each row."""
    experts = [k for k, count in enumerate(seen) for _ in range(count)]
    rows, ends = drawn(len(experts), D), torch.tensor(seen).cumsum(0, dtype=torch.int32)
    given_rows = rows.t() if turned else rows
    for rank in range(ranks):
        own = OWN_ROWS_ONLY(given_rows, ends, int(turned), ranks, rank)
        own = own.t() if turned else own
        for at, expert in enumerate(experts):
            expected = rows[at] if expert * ranks // 4 == rank else torch.zeros(D)
            assert torch.equal(own[at], expected)


@pytest.mark.parametrize("ranks", [2, 4])
def test_steps_of_ranks_with_biased_experts_are_those_of_the_plain_loop(ranks):
    made = planned_of(job_of(BiasedNet, floats(12, D)), ranks, FAST)
    assert OWN_ROWS_ONLY in {node.target for node in made.captured.fx_nodes}
    assert not prove(made, (0, 3), launcher=run_threads).problem


class Switch(nn.Module):
    """Groups of tokens, experts with room for so many of each, dispatched by one-hot masks."""

    def __init__(self, experts: int, room: int) -> None:
        super().__init__()
        self.router, self.experts, self.room = nn.Linear(D, experts, bias=False), experts, room
        self.up = nn.Parameter(drawn(experts, D, N) / D**0.5)
        self.down = nn.Parameter(drawn(experts, N, D, seed=1) / N**0.5)

    def forward(self, x_GSD):
        chance, expert = self.router(x_GSD).softmax(-1).max(-1)
        hot = F.one_hot(expert, self.experts).to(x_GSD.dtype)
        place = ((hot.cumsum(1) - 1) * hot).sum(-1)
        at = F.one_hot(place.long().clamp(max=self.room - 1), self.room).to(x_GSD.dtype)
        mask = hot[..., None] * at[..., None, :] * (place < self.room)[..., None, None]
        rows = torch.einsum("gsec,gsd->egcd", mask, x_GSD).flatten(1, 2)
        made = torch.bmm(torch.bmm(rows, self.up).relu(), self.down)
        made = made.view(self.experts, len(x_GSD), self.room, D)
        return torch.einsum("gsec,egcd->gsd", mask * chance[..., None, None], made)


class SwitchNet(nn.Module):
    def __init__(self, experts: int = 4, room: int = 3) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(D, D), nn.LayerNorm(D)
        self.layer, self.head = Switch(experts, room), nn.Linear(D, D)

    def forward(self, x):
        x = self.first(x)
        return self.head(x + self.layer(self.norm(x)))


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([2, 4]), st.sampled_from([4, 8]), st.integers(1, 4))
def test_rows_go_to_the_ranks_of_their_experts_and_back(monkeypatch, ranks, groups, room):
    """GShard's exchanges: tokens by groups on each rank, experts by experts."""
    monkeypatch.setattr(choose_slices, "layouts_of", held_apart(spread=True))
    job = job_of(lambda: SwitchNet(4, room), floats(groups, 5, D))
    made = by_tensor(capture(job), ranks, FAST)
    hows = [node.args[1] for node in made.fx_nodes if node.target is COLLECT]
    assert "exchange" in hows
    plain, found = run_eager(job), run_pretend(job, made, ranks)
    pairs = [*zip(plain.losses, found.losses, strict=True)]
    pairs += [(plain.gradients[name], found.gradients[name]) for name in plain.gradients]
    for expected, value in pairs:
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("launcher", [run_threads, run_processes])
def test_steps_of_ranks_that_exchange_rows_are_those_of_the_plain_loop(monkeypatch, launcher):
    monkeypatch.setattr(choose_slices, "layouts_of", held_apart(spread=True))
    made = planned_of(job_of(SwitchNet, floats(4, 5, D)), 2, FAST)
    assert not prove(made, (0, 3), launcher=launcher).problem


@pytest.mark.parametrize(
    "options", [{"tensor": 4}, {"stages": 2}, {"replicas": 2, "recompute": True}]
)
@pytest.mark.sampled(2)
def test_steps_of_ranks_that_divide_experts_are_those_of_the_plain_loop(options):
    job = job_of(Net, floats(12, D))
    made = planned_of(job, options.pop("tensor", 2), FAST, **options)
    assert OWN_ROWS_MM in {node.target for node in made.captured.fx_nodes}
    assert not prove(made, (0, 3), launcher=run_threads).problem


def test_products_by_groups_are_counted_as_work():
    job = job_of(lambda: Net(layers=1), floats(12, D))
    products = [node for node in capture(job).fx_nodes if node.target is GROUPED]
    assert len(products) == 6
    assert sum(map(flop_of, products)) == 3 * 2 * 24 * D * (2 * N + N)
