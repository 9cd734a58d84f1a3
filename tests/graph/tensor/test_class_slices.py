"""A loss over classes, and an embedding by rows, divided among ranks, are the plain ones."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from penstock.graph.by_rows import LOSS_BACKWARD
from penstock.graph.tensor import class_slices
from penstock.graph.tensor.choose_slices import by_tensor
from penstock.graph.tensor.collect_op import COLLECT
from penstock.graph.trace import capture
from tests.graph.tensor.pretend import run_pretend
from tests.graph.tensor.test_divided import FREE, assert_equal
from tests.graph.zoo import job_of

V = 24


@pytest.fixture(autouse=True)
def _in_64_bits():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Net(nn.Module):
    """An embedding, tied to the head or not; `V` classes."""

    def __init__(self, *, tied: bool, padding: int | None, bias: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, 8, padding_idx=padding)
        self.inner = nn.Linear(8, 8)
        self.head = nn.Linear(8, V, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.inner(torch.tanh(self.embedding(tokens)))))


def classes(*shape, ignored=None):
    def draw(generator):
        tokens = torch.randint(V, shape, generator=generator)
        targets = torch.randint(V, shape, generator=generator)
        if ignored is not None:
            targets[torch.rand(shape, generator=generator) < 0.4] = ignored
        return tokens, targets

    return draw


def collects_of(made):
    return [node for node in made.fx_nodes if node.target is COLLECT]


@settings(max_examples=15)
@given(
    tied=st.booleans(),
    padding=st.sampled_from([None, 0, 13]),
    bias=st.booleans(),
    terms=st.fixed_dictionaries(
        {
            "ignore_index": st.sampled_from([-100, 0, 5, V - 1]),
            "reduction": st.sampled_from(["mean", "sum", "none"]),
            "label_smoothing": st.sampled_from([0.0, 0.1]),
        }
    ),
    ranks=st.sampled_from([2, 4]),
)
def test_losses_by_columns_are_the_plain_ones(tied, padding, bias, terms, ranks):
    def loss(model, batch):
        tokens, targets = batch
        found = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), **terms)
        return found.square().mean() if terms["reduction"] == "none" else found

    def model():
        return Net(tied=tied, padding=padding, bias=bias)

    job = job_of(model, classes(3, 4, ignored=terms["ignore_index"]), loss)
    made = by_tensor(capture(job), ranks, FREE)
    assert_equal(job, made, ranks)


def plain(model, batch):
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def test_the_whole_logits_are_nowhere():
    job = job_of(lambda: Net(tied=False, padding=None, bias=True), classes(3, 4), plain)
    made = by_tensor(capture(job), 2, FREE)
    whole = {12 * V}
    assert not whole & {torch.Size(n.shape).numel() for n in made.graph.nodes if n.kind == "op"}
    forward = [n for n in collects_of(made) if not n.meta["custom"]["backward"]]
    sizes = [(n.args[1], n.args[0].meta["val"].numel()) for n in forward][-2:]
    assert sizes == [("gather", 12), ("sum", 1)], "a number a row, and the loss"
    last = max(at for at, n in enumerate(made.graph.nodes) if n.kind == "op" and n.phase == "F")
    first = min(at for at, n in enumerate(made.graph.nodes) if n.kind == "op" and n.phase == "B")
    assert last < first, "the loss is collected before the backward pass"


def test_a_tied_embedding_is_divided_by_rows_and_has_no_whole_gradient():
    job = job_of(lambda: Net(tied=True, padding=None, bias=False), classes(3, 4), plain)
    made = by_tensor(capture(job), 2, FREE)
    held = [n.name for n in made.graph.nodes if n.kind == "parameter" and "embedding" in n.name]
    assert held == [f"part 0 of {V}x8 by 1x2/embedding.weight"]
    assert not [n for n in made.graph.nodes if n.shape == (V, 8)], "nor is any gradient whole"


def test_a_large_loss_whose_backward_is_one_op_is_divided_too(monkeypatch):
    monkeypatch.setattr("penstock.graph.by_rows._CACHED_BYTES", 64)
    monkeypatch.setattr(class_slices, "_CACHED_BYTES", 256)
    job = job_of(lambda: Net(tied=True, padding=None, bias=False), classes(5, 8), plain)
    captured = capture(job)
    assert LOSS_BACKWARD in [node.target for node in captured.fx_nodes]
    made = by_tensor(captured, 2, FREE)
    assert LOSS_BACKWARD not in [node.target for node in made.fx_nodes]
    assert_equal(job, made, 2)


@pytest.mark.parametrize("wrong", [-3, V, V + 40])
@pytest.mark.parametrize("what", ["token", "target"])
def test_what_is_no_class_at_all_is_refused_as_the_plain_loop_does(wrong, what):
    def draw(generator):
        tokens, targets = classes(2, 3)(generator)
        if generator.initial_seed():
            (tokens if what == "token" else targets)[0, 0] = wrong
        return tokens, targets

    job = job_of(lambda: Net(tied=True, padding=None, bias=False), draw, plain)
    made = by_tensor(capture(job), 2, FREE)
    with pytest.raises(IndexError):
        plain(made.model, next(job.data(1)))
    with pytest.raises(IndexError):
        run_pretend(job, made, 2)


def test_rows_without_any_exponential_are_as_torch_has_them():
    value = torch.full((2, 6), -torch.inf)
    value[1, 2:] = torch.arange(4.0) * 400
    made = class_slices.log_sum_exp(value)
    assert torch.equal(made, torch.logsumexp(value, 1))
