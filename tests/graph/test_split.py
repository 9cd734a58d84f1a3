"""Split: slices of parameters against the whole ones, by eager autograd on the uncut model."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.errors import GraphError
from penstock.graph.cut import cut
from penstock.graph.cut_points import block_ends
from penstock.graph.graph import Graph
from penstock.graph.parts import PartName, key_in, part_in, part_key, slice_in, slice_path, word_of
from penstock.graph.slicing import ends_of
from penstock.graph.split import split
from penstock.graph.trace import Capture, capture
from penstock.job import Job
from penstock.state.tensor_parts import sliced, whole
from tests.graph.executor import Step, measure_bytes, run_cut, run_eager
from tests.graph.zoo import JOBS, D, V, job_of, tokens

CLOSE = 1e-5  # relative, of float32: sums over slices are made in another order


@cache
def traced(name: str) -> Capture:
    return capture(JOBS[name])


@cache
def eagerly(name: str) -> Step:
    return run_eager(JOBS[name])


def at_every_end(captured: Capture, **more):
    return cut(captured.graph, range(len(captured.graph.cut_points)), **more)


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the greatest difference of two steps' gradients, relative to the greatest there is."""
    found = whole(found)
    assert found.keys() == expected.keys()
    most = max(float(each.abs().max()) for each in expected.values())
    return max(float((found[n] - expected[n]).abs().max()) for n in found) / most


# One or two parameters of each sort of op that reads them, and what is between them and the loss.
SPLIT = [
    ("tied", {"embedding.weight": 4}),  # an embedding that is the head
    ("dict_inputs", {"embedding.weight": 3}),  # the same, its loss squared
    ("encoder_decoder", {"source.weight": 5, "target.weight": 2, "head.weight": 3}),
    ("embeddings", {"words.weight": 3, "head.weight": 4}),  # with padding
    ("blocks", {"1.up.weight": 3, "2.down.weight": 4}),  # with biases
    (
        "transformer",
        {"layers.layers.0.self_attn.in_proj_weight": 3, "head.weight": 2},
    ),  # a view that mixes rows
    ("recurrent", {"embedding.weight": 2, "head.weight": 2}),
    ("outputs", {"pairs.1.a.weight": 2, "heads.0.weight": 2}),  # a penalty on all weights
    ("checkpoint", {"blocks.1.up.weight": 2}),  # which autograd computes again
    ("twice", {"shared.up.weight": 4}),  # read three times
    ("frozen_unused", {"blocks.0.up.weight": 2, "last.weight": 2, "seen.weight": 2}),
    ("layouts", {"blocks.0.up.weight": 3, "wide": 2}),
    ("penalty", {"layers.0.weight": 2}),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "slices"), SPLIT)
def test_a_step_in_slices_is_the_eager_step(name, slices):
    made, eager = split(traced(name), slices), eagerly(name)
    found = run_cut(JOBS[name], made, at_every_end(made), split=True)
    for loss, expected in zip(found.losses, eager.losses, strict=True):
        torch.testing.assert_close(loss, expected, rtol=CLOSE, atol=0)
    assert apart(found.gradients, eager.gradients) < CLOSE
    assert dict(made.graph.slices).items() >= slices.items()


@pytest.mark.parametrize("name", ["tied", "embeddings", "outputs"])
def test_slices_that_are_one_stage_give_what_stages_give(name):
    slices = dict(next(row for row in SPLIT if row[0] == name)[1])
    made, eager = split(traced(name), slices), run_eager(JOBS[name])
    found = run_cut(JOBS[name], made, cut(made.graph), split=False)
    assert apart(found.gradients, eager.gradients) < CLOSE
    again = [True] * (len(made.graph.cut_points) + 1)
    found = run_cut(JOBS[name], made, at_every_end(made, recompute=again), split=True)
    assert apart(found.gradients, eager.gradients) < CLOSE


def test_bfloat16_is_as_near_as_its_eight_bits():
    made = split(traced("autocast_tied"), {"embedding.weight": 2})
    found = run_cut(JOBS["autocast_tied"], made, at_every_end(made), split=False)
    assert apart(found.gradients, run_eager(JOBS["autocast_tied"]).gradients) < 2e-2


# -- embeddings to the bit, losses to rounding ----------------------------------------------------


class Lookup(nn.Module):
    def __init__(self, rows: int, padding: int | None) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 3, padding_idx=padding)
        self.last = nn.Linear(3, 2)

    def forward(self, index: Tensor) -> Tensor:
        return self.last(self.table(index))


@settings(max_examples=8)  # each is traced
@given(st.integers(2, 40), st.data())
def test_embeddings_and_their_gradients_are_equal_to_the_bit(rows, data):
    count = data.draw(st.integers(2, rows).filter(lambda k: (k - 1) * -(-rows // k) < rows))
    padding = data.draw(st.none() | st.integers(0, rows - 1))
    index = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=9)))
    job = job_of(lambda: Lookup(rows, padding), lambda generator: index.clone())
    made, eager = split(capture(job), {"table.weight": count}), run_eager(job)
    found = run_cut(job, made, at_every_end(made), split=True)
    assert torch.equal(whole(found.gradients)["table.weight"], eager.gradients["table.weight"])
    assert found.losses == eager.losses


class Head(nn.Module):
    def __init__(self, classes: int, spread: float) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 4), nn.Linear(4, classes)
        with torch.no_grad():
            self.head.weight *= spread
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(x)))


REDUCTIONS = st.sampled_from(["mean", "sum", "none"])


@settings(max_examples=10)
@given(st.integers(2, 30), st.floats(0.1, 300), REDUCTIONS, st.data())
def test_losses_over_slices_of_classes_are_those_of_all_classes(classes, spread, reduction, data):
    count = data.draw(
        st.integers(2, classes).filter(lambda k: (k - 1) * -(-classes // k) < classes)
    )
    ignored = data.draw(st.sampled_from([-100, 0, classes - 1]))
    rows = data.draw(st.lists(st.integers(0, classes - 1), min_size=2, max_size=6))
    targets = torch.tensor([*rows, 1 if ignored != 1 else 0])  # one of them counts
    x = torch.linspace(-1, 1, 3 * len(targets), dtype=torch.float64).view(-1, 3)

    def loss(model: nn.Module, batch: object) -> Tensor:
        found = F.cross_entropy(model(x), targets, reduction=reduction, ignore_index=ignored)
        return found.sum() if reduction == "none" else found

    job = job_of(lambda: Head(classes, spread), lambda generator: torch.zeros(1), loss)
    made, eager = split(capture(job), {"head.weight": count}), run_eager(job)
    found = run_cut(job, made, at_every_end(made), split=True)
    for one, expected in zip(found.losses, eager.losses, strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-12, atol=1e-12)
    assert apart(found.gradients, eager.gradients) < 1e-11


def loss_of_masked(model: nn.Module, batch: Tensor) -> Tensor:
    """Classes that do not count have -inf: here all of the first slice."""
    logits = model(batch).masked_fill(torch.arange(8) < 4, -torch.inf)
    return F.cross_entropy(logits, torch.tensor([5, 7]))


def test_a_slice_of_nothing_but_minus_infinity_counts_nothing():
    job = job_of(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 8)), _ones, loss_of_masked)
    made, eager = split(capture(job), {"1.weight": 2}), run_eager(job)
    found = run_cut(job, made, at_every_end(made), split=True)
    assert apart(found.gradients, eager.gradients) < CLOSE


def _ones(generator: torch.Generator) -> Tensor:
    return torch.ones(2, 3)


@pytest.mark.parametrize("wrong", [-1, V, V + 5])
@pytest.mark.parametrize("what", ["ids", "labels"])
def test_what_is_no_row_and_no_class_is_refused_as_in_the_whole(wrong, what):
    def batch(generator: torch.Generator) -> dict[str, Tensor]:
        right = torch.randint(V, (2, 3), generator=generator)
        odd = right.clone()
        odd[1, 2] = wrong
        return {"ids": right, "labels": right.clone(), what: odd}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())

    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(V, D), nn.Linear(D, D), nn.Linear(D, V))

    job = job_of(make, batch, loss)
    made = split(capture(job), {"0.weight": 3, "2.weight": 4})
    with pytest.raises((IndexError, RuntimeError), match=r"range|bounds"):
        run_eager(job)
    with pytest.raises((IndexError, RuntimeError), match=r"range|bounds"):
        run_cut(job, made, at_every_end(made), split=False)


class Classified(nn.Module):
    """Words, two products and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.middle, self.head = nn.Embedding(V, D), nn.Linear(D, D), nn.Linear(D, V)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.words(ids))))


def two_losses(model: Classified, ids: Tensor):
    """Only one is differentiated; the other leaves out another class."""
    given, targets = F.log_softmax(model(ids).flatten(0, 1), -1), ids.flatten()
    return F.nll_loss(given, targets, ignore_index=1), {"all": F.nll_loss(given.detach(), targets)}


def transposed(model: Classified, ids: Tensor) -> Tensor:
    """Return the loss of logits [batch, classes, time], as images have them."""
    return F.cross_entropy(model(ids).transpose(1, 2), ids)


def with_penalties(model: Classified, ids: Tensor) -> Tensor:
    """Return a loss with ops on a weight and itself, and with a number before it."""
    weight = model.head.weight
    logits = model(ids).flatten(0, 1)
    more = (weight * weight).sum() + (1 / (weight + 3)).sum() + torch.pow(2.0, weight).sum()
    return F.cross_entropy(logits, ids.flatten()) + 0.01 * more


@pytest.mark.parametrize("loss", [two_losses, transposed, with_penalties])
def test_losses_that_people_write_are_those_of_the_whole(loss):
    job = job_of(Classified, tokens(3, 8), loss)
    made, eager = split(capture(job), {"head.weight": 3}), run_eager(job)
    found = run_cut(job, made, at_every_end(made), split=False)
    torch.testing.assert_close(found.losses, eager.losses, rtol=CLOSE, atol=0)
    assert apart(found.gradients, eager.gradients) < CLOSE


def test_random_ops_that_would_change_places_are_refused():
    """The second one is read by a slice, and would come before the first."""

    def loss(model: Classified, ids: Tensor) -> Tensor:
        logits = model(ids).flatten(0, 1)
        first, second = (F.dropout(torch.ones(len(logits), 1), 0.5) for _ in range(2))
        penalty = (first * model.middle.weight.mean()).square().mean()
        return F.cross_entropy(logits * second, ids.flatten()) + penalty

    with pytest.raises(GraphError, match="would draw other random numbers"):
        split(capture(job_of(Classified, tokens(3, 8), loss)), {"head.weight": 3})


# -- what it is for -------------------------------------------------------------------------------


def most(graph: Graph, kind: str) -> int:
    return max(node.size_bytes for node in graph.nodes if node.kind == kind)


@pytest.mark.parametrize(("count", "rows"), [(2, 32), (4, 32), (8, 32), (4, 128)])
def test_the_largest_parameter_and_the_logits_held_fall_by_the_number_of_slices(count, rows):
    """A vocabulary beside which all else is small; logits are made again in the backward.

    Of more than 1 MiB of logits the backward of the loss is one op, by rows (by_rows.py).
    """
    size = 4096

    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(size, 8), nn.Linear(8, 8), nn.Linear(8, size, bias=False))

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    job = job_of(make, lambda generator: torch.randint(size, (1, rows), generator=generator), loss)
    before = capture(job)
    made = split(before, {"0.weight": count, "2.weight": count})
    assert most(made.graph, "parameter") * count == most(before.graph, "parameter")
    logits = rows * size * 4
    assert most(before.graph, "op") == most(made.graph, "op") * count == logits
    again = [True] * (len(made.graph.cut_points) + 1)
    stages = at_every_end(made, recompute=again)
    held = [peak for *_, peak in measure_bytes(job, made, stages, split=False)]
    assert max(held) < 3.1 * logits / count  # two, and the last slice's logits, made again
    predicted = [stage.backward.peak_bytes for stage in stages.stages]
    assert max(predicted) == pytest.approx(max(held), rel=0.01)


def test_there_is_a_cut_point_behind_each_slice_and_each_is_a_block():
    graph = split(traced("tied"), {"embedding.weight": 3}).graph
    names = [point.name for point in graph.cut_points]
    ends = [*(f"after embedding.slice {k} of 3" for k in (1, 2)), "after embedding"]
    assert names[:3] == ends
    assert names[-2:] == ["after head.slice 1 of 3", "after head.slice 2 of 3"]
    assert {names[at] for at in block_ends(graph)} >= {*ends, *names[-2:]}


def test_slices_are_parameters_by_their_parts_and_survive_a_file(tmp_path):
    graph = split(traced("embeddings"), {"head.weight": 3}).graph
    assert graph.slices == (("head.bias", 3), ("head.weight", 3))
    parts = [part_in(n.name) for n in graph.nodes if "head.weight" in n.name]
    assert parts == [PartName("head.weight", 11 * D * k, (V, D)) for k in range(3)]
    graph.save(tmp_path / "graph.json")
    assert Graph.load(tmp_path / "graph.json").slices == graph.slices
    assert graph.digest == split(traced("embeddings"), {"head.weight": 3}).graph.digest
    assert graph.digest != traced("embeddings").graph.digest
    assert graph.parameter_bytes == traced("embeddings").graph.parameter_bytes


def test_nothing_to_split_is_the_step_itself():
    assert split(traced("tied"), {}) is traced("tied")


# -- what is refused ------------------------------------------------------------------------------


def scaled() -> Job:
    def make() -> nn.Module:
        embedding = nn.Embedding(V, D, scale_grad_by_freq=True)
        return nn.Sequential(embedding, nn.Linear(D, D))

    return job_of(make, tokens(2, 3))


@pytest.mark.parametrize(
    ("job", "slices", "message"),
    [
        ("tied", {"embedding.weight": V + 1}, "32 rows cannot be cut into 33 slices"),
        ("tied", {"embedding.weight": 31}, "32 rows cannot be cut into 31 slices"),
        ("tied", {"embedding.weight": 1}, "embedding.weight in 1 slices"),
        ("tied", {"nowhere": 2}, "there is no parameter nowhere with rows"),
        ("layouts", {"number": 2}, "there is no parameter number with rows"),
        ("batch_norm", {"layers.1.0.weight": 2}, "layers.1.0.weight .*convolution.* reads all of"),
        ("recurrent", {"rnns.1.weight_hh_l0": 2}, "rnns.1.weight_hh_l0 cannot .*reads all of it"),
        ("blocks", {"1.norm.weight": 2}, "1.norm.weight cannot .*native_layer_norm"),
        ("embeddings", {"bag.weight": 2}, "bag.weight cannot .*_embedding_bag.* reads all"),
        (scaled(), {"0.weight": 2}, "0.weight cannot .*: its gradient is scaled by how often"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(job, slices, message):
    made = traced(job) if isinstance(job, str) else capture(job)
    with pytest.raises(GraphError, match=message):
        split(made, slices)


def test_a_step_is_split_once():
    made = split(traced("tied"), {"embedding.weight": 2})
    with pytest.raises(GraphError, match="cut into slices already"):
        split(made, {"blocks.0.up.weight": 2})


# -- names ----------------------------------------------------------------------------------------


@given(st.text(min_size=1).filter(lambda name: part_in(name) is None), st.data())
def test_names_of_parts_are_read_back(name, data):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    start = data.draw(st.integers(0, 99))
    key = part_key(name, start, shape)
    assert part_in(key) == PartName(name, start, shape)
    assert (key_in(key), key_in(name)) == (name, name)


@given(st.integers(1, 60), st.integers(2, 60))
def test_slices_are_as_large_as_each_other_but_for_the_last(rows, count):
    try:
        ends = ends_of(rows, count)
    except GraphError:
        assert -(-rows // count) * (count - 1) >= rows
        return
    sizes = [end - start for start, end in zip((0, *ends), ends, strict=False)]
    assert (len(ends), ends[-1], len({*sizes[:-1]})) == (count, rows, 1)
    assert 0 < sizes[-1] <= sizes[0]


def test_tensors_are_taken_apart_as_the_graph_has_them_and_put_together_again():
    graph = split(traced("embeddings"), {"head.weight": 3, "words.weight": 2}).graph
    tensors = dict(traced("embeddings").model.named_parameters())
    parts = sliced(tensors, graph)
    assert {n.name for n in graph.nodes if n.kind == "parameter"} == parts.keys()
    again = whole(parts)
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)


def test_paths_of_slices_and_words_for_sums():
    assert slice_path("head", 1, 4) == "head.slice 2 of 4"
    assert slice_path("", 0, 2) == "slice 1 of 2"
    assert [slice_in(p) for p in ("head.slice 2 of 4", "slice 1 of 2", "slice", "head.1")] == [
        *(True, True),
        *(False, False),
    ]
    assert word_of(part_key("head.weight", 64, (8, 16))) == "head.weight@64"
    assert word_of("head.weight") == "head.weight"
