"""A step divided among ranks gives what the plain model gives, and is cut at its collects."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import dropout, scaled_dot_product_attention

from penstock.errors import GraphError
from penstock.graph.code import callable_of
from penstock.graph.cut import cut, demands_of
from penstock.graph.parts import in_order, out_of_order, part_in, part_key, word_of
from penstock.graph.tensor.choose_slices import by_tensor
from penstock.graph.tensor.collect_op import COLLECT
from penstock.graph.tensor.cuts import apart_only, collect_points, collects_in, how_of
from penstock.graph.tensor.of_rank import of_rank
from penstock.graph.tensor.placed import RankSpeed
from penstock.graph.tensor.value_placement import Slices, local, reshaped
from penstock.graph.trace import capture
from penstock.graph.traced_graph import capture_of, captured_as
from penstock.state.tensor_parts import sliced, whole
from tests.graph.executor import run_eager
from tests.graph.tensor.pretend import run_pretend
from tests.graph.zoo import JOBS, floats, job_of

FREE = RankSpeed(latency_s=0.0, link_bytes_per_s=1e11)  # so that all is divided that can be
MODELS = (
    "blocks",
    "tied",
    "dropout",
    "transformer",
    "batch_norm",
    "group_norm",
    "autocast_tied",
    "embeddings",
    "crossing",
    "rotary",
)


@pytest.fixture(autouse=True)
def _in_64_bits():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def assert_equal(job, made, ranks):
    plain, found = run_eager(job), run_pretend(job, made, ranks)
    assert found.gradients.keys() == plain.gradients.keys()
    pairs = [*zip(plain.losses, found.losses, strict=True)]
    pairs += [(plain.gradients[name], found.gradients[name]) for name in plain.gradients]
    pairs += [(plain.buffers[name], found.buffers[name]) for name in plain.buffers]
    for expected, value in pairs:
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(3)
def test_ranks_together_make_the_step_of_the_plain_model(name):
    job = JOBS[name]
    made = by_tensor(capture(job), 2, FREE)
    assert made.graph.tensor == 2
    assert_equal(job, made, 2)
    assert_between_stages(made.graph)


def assert_between_stages(graph):
    owners, _, edges = demands_of(graph, collect_points(graph))
    stage_of, nodes = owners.stage_of, graph.nodes
    for at in collects_in(nodes):
        (value,) = nodes[at].inputs
        assert graph.users[value] == (at,), "others would find it collected"
        ends = stage_of[value], stage_of[at]
        assert any(value in edge.values and edge[1:3] == ends for edge in edges), nodes[at]


class Net(nn.Module):
    def __init__(self, widths: list[int], *, adds: bool, runs: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, width * runs) for width in widths)
        self.back = nn.ModuleList(nn.Linear(width, 8, bias=adds) for width in widths)
        self.norm, self.adds, self.runs = nn.LayerNorm(8), adds, runs

    def forward(self, x):
        for up, down in zip(self.layers, self.back, strict=True):
            first, *rest = up(self.norm(x)).chunk(self.runs, -1)
            for other in rest:
                first = torch.tanh(first) * other
            x = down(torch.relu(first)) + (x if self.adds else 0)
        return x


@settings(max_examples=10)
@given(
    st.lists(st.sampled_from([4, 8, 12]), min_size=1, max_size=3),
    st.booleans(),
    st.integers(1, 3),
    st.sampled_from([2, 4]),
)
def test_random_nets_are_divided_as_they_are_computed(widths, adds, runs, ranks):
    job = job_of(lambda: Net(widths, adds=adds, runs=runs), floats(3, 8))
    assert_equal(job, by_tensor(capture(job), ranks, FREE), ranks)


class SharedKeys(nn.Module):
    """Attention in which two heads share one of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.mix = nn.Linear(16, 16), nn.Linear(16, 16)
        self.key, self.value = nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x):
        parts = self.query(x), self.key(x), self.value(x)
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in parts)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.mix(mixed.transpose(1, 2).flatten(2))


def test_heads_that_share_keys_are_divided_with_them():
    job = job_of(SharedKeys, floats(2, 6, 16))
    made = by_tensor(capture(job), 2, FREE)
    assert_equal(job, made, 2)
    attended = next(n for n in made.fx_nodes if "attention" in str(n.target))
    assert [part.meta["val"].shape[1] for part in attended.args[:3]] == [2, 1, 1]


class DroppedWeights(nn.Module):
    """Attention that drops weights, and what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value, self.mix = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        parts = self.query_key_value(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in parts)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.4)
        return x + dropout(self.mix(mixed.transpose(1, 2).flatten(2)), 0.3)


def test_attention_that_drops_weights_is_divided_by_heads():
    job = job_of(DroppedWeights, floats(2, 6, 16))
    made = by_tensor(capture(job), 2, FREE)
    assert_equal(job, made, 2)
    weights = [n.meta["val"] for n in made.fx_nodes if "softmax" in str(n.target)]
    assert {tuple(each.shape) for each in weights} == {(2, 2, 6, 6)}


def test_the_parts_of_all_ranks_are_the_whole_parameter():
    job = JOBS["transformer"]
    made = by_tensor(capture(job), 2, FREE)
    parts = {}
    for rank in range(2):
        own = of_rank(made, rank)
        parts |= {name: value.detach() for name, value in own.parameters.items()}
        tensors = sliced(dict(made.model.named_parameters()), own.graph)
        assert all(torch.equal(tensors[name], p) for name, p in own.parameters.items())
    for name, value in whole(parts).items():
        assert torch.equal(value, dict(made.model.named_parameters())[name])
    names = [name for name in parts if part_in(name)]
    assert names
    assert len({word_of(name) for name in names}) == len(names) // 2


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(0, 5))
def test_numbers_in_order_go_back_to_their_places(a, b, c, start):
    value = torch.arange(a * b * c).view(a, b * c)
    numbers = in_order(value, (a, b))
    assert torch.equal(out_of_order(numbers, value.shape, (a, b)), value)
    assert torch.equal(numbers[:c], value[0, :c]), "the first rank's run of the first row"
    name = part_key("w/of", start, (a, b * c), (a, b))
    assert part_in(name)[:] == ("w/of", start, (a, b * c), (a, b))


shapes = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4)


@given(shapes, st.integers(0, 3), st.sampled_from([1, 2, 3]), st.data())
def test_a_slice_in_another_shape_is_a_slice_of_the_reshaped_value(shape, at, pieces, data):
    dim, ranks = at % len(shape), 2
    shape[dim] *= pieces * ranks
    count = torch.Size(shape).numel()
    new = data.draw(st.permutations(shape))
    value = torch.arange(count).view(shape)

    def part(of, place):
        outer = torch.Size(of.shape[: place.dim]).numel() * place.pieces
        own = in_order(of, (outer, ranks))[count // ranks :]  # of rank 1
        return own.view(local(place, tuple(of.shape), ranks))

    place = Slices(dim, pieces)
    if (found := reshaped(place, tuple(shape), tuple(new), ranks)) is not None:
        expected = part(value, place).reshape(local(found, tuple(new), ranks))
        assert torch.equal(part(value.view(new), found), expected)


def test_weights_that_no_rule_slices_are_refused_in_words():
    with pytest.raises(GraphError, match="no weight of the model can be divided among 2 ranks"):
        by_tensor(capture(JOBS["normed"]), 2, FREE)
    with pytest.raises(GraphError, match=r"buffer .* is updated, and used by stages"):
        by_tensor(capture(JOBS["average"]), 2, FREE)


def test_a_graph_alone_finds_its_divided_step_again():
    job = JOBS["blocks"]
    made = by_tensor(capture(job), 2)
    assert by_tensor(made, 1) is made
    again, _ = capture_of(replace(made.graph), job)
    assert again.graph.digest == made.graph.digest
    assert capture_of(captured_as(made, job), job)[0] is made


def test_no_pipeline_is_cut_between_a_value_and_its_collect():
    graph = by_tensor(capture(JOBS["blocks"]), 2, FREE).graph
    free = [k for k in range(len(graph.cut_points)) if k not in apart_only(graph)]
    assert set(collect_points(graph)) <= apart_only(graph)
    for point in free:
        stages = cut(graph, sorted({*collect_points(graph), point}))
        before = sum(
            graph.cut_points[c].at < graph.cut_points[point].at for c in collect_points(graph)
        )
        for edge in stages.edges:
            crosses = (edge.source <= before) != (edge.target <= before)
            read = {graph.nodes[at].inputs[0] for at in collects_in(graph.nodes)}
            assert not (crosses and read & set(edge.values))


def test_a_collect_says_how_it_collects():
    made = by_tensor(capture(JOBS["crossing"]), 2, FREE)
    pairs = zip(made.fx_nodes, range(len(made.fx_nodes)), strict=True)
    hows = {
        (node.args[1], how_of(made.graph.nodes, at)) for node, at in pairs if node.target is COLLECT
    }
    assert hows
    assert all(one == other for one, other in hows)
    node = next(node for node in made.fx_nodes if node.target is COLLECT)
    assert callable_of(node.target)(torch.ones(2), "gather", 2).shape == (2, 2)


class Sounds(nn.Module):
    """A convolution of what has no gradient, by samples of which ranks have some."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(3, 4, 3, padding=1)
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(torch.relu(self.first(x)))))


@pytest.mark.parametrize("samples", [2, 3])
def test_an_op_of_which_a_gradient_is_not_wanted_is_divided_too(samples):
    job = job_of(Sounds, floats(samples, 3, 8))
    assert_equal(job, by_tensor(capture(job), 2, FREE), 2)
