"""The backward of a loss over classes by rows: the bits of torch's two ops, in less memory."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn import functional as F

from penstock import _compat
from penstock.graph import by_rows
from penstock.graph.by_rows import LOSS_BACKWARD, loss_backward, taken_apart
from penstock.graph.code import callable_of, function_of
from penstock.graph.cut import cut
from penstock.graph.fused_runs import fused_function_of
from penstock.graph.segment_memory import MemoryOwner, segment_memory
from penstock.graph.trace import Capture, capture
from penstock.job import Job
from penstock.profile.measure import inputs_of

aten = torch.ops.aten
ROWS, CLASSES = 96, 8192  # 3 MiB of logits
sizes = st.integers(1, 9)


@given(sizes, sizes, st.integers(0, 2), st.integers(0, 7), st.integers(1, 99))
def test_it_has_the_bits_of_both_ops(
    rows: int, classes: int, reduction: int, flags: int, cached: int
) -> None:
    ignored, weighted, double = (bool(flags & 2**bit) for bit in range(3))
    dtype = torch.float64 if double else torch.float32
    torch.manual_seed(rows * classes)
    x, weight = torch.randn(rows, classes, dtype=dtype), torch.rand(classes, dtype=dtype)
    target = torch.randint(0, classes, (rows,))
    given = x.log_softmax(1), target, weight if weighted else None, reduction, 0 if ignored else -1
    out, total = aten.nll_loss_forward(*given)
    arguments = torch.randn_like(out), *given, total
    nll = aten.nll_loss_backward(*arguments)
    expected = aten._log_softmax_backward_data(nll, given[0], 1, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_rows, "_CACHED_BYTES", cached)
        for made in (loss_backward(*arguments), LOSS_BACKWARD(*arguments)):
            assert torch.equal(made, expected) or expected.isnan().any()


def test_it_holds_one_gradient_and_some_rows_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    output, target = torch.randn(64, 1024).log_softmax(1), torch.zeros(64, dtype=torch.long)
    monkeypatch.setattr(by_rows, "_CACHED_BYTES", 8 * 1024 * 4)
    with _compat.memory_profile() as events:
        made = loss_backward(torch.tensor(1.0), output, target, None, 2, -100, torch.tensor(64.0))
    now = peak = 0
    for event in events():
        now += event.size_bytes
        peak = max(peak, now)
    assert now == made.nbytes == 64 * 4096
    assert 0 <= peak - made.nbytes - 8 * 4096 < 64


def job(reduction: str = "mean", labels: tuple[int, ...] = (ROWS,), classes: int = CLASSES) -> Job:
    def data(start: int) -> Iterator[dict[str, Tensor]]:
        while True:
            torch.manual_seed(start)
            start += 1
            yield {"x": torch.randn(*labels, 4), "y": torch.randint(0, classes, labels)}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits, y = model(batch["x"]).movedim(-1, 1), batch["y"]
        return F.cross_entropy(logits, y, reduction=reduction).sum()

    return Job(
        model=lambda: nn.Linear(4, classes),
        loss=loss,
        data=data,
        optimizer=lambda weights: torch.optim.SGD(weights, 0.1),
    )


def joined(captured: Capture) -> list[int]:
    rows = enumerate(captured.fx_nodes)
    return [at for at, node in rows if node.target is LOSS_BACKWARD]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_traced_step_has_it_and_the_gradients_of_eager_autograd(reduction: str) -> None:
    own = job(reduction)
    captured = capture(own)
    assert len(joined(captured)) == 1
    (stage,) = cut(captured.graph).stages
    values = inputs_of(captured, own)
    with torch.no_grad():
        for segment in (stage.forward, stage.backward):
            function = function_of(segment, captured)
            reads = (*function.statics, *function.leaves, *function.values)
            results = function.run([values[node] for node in reads], 0)
            values |= zip(function.outputs, results, strict=True)
    model = captured.model
    own.loss(model, next(own.data(0))).backward()
    for name, parameter in model.named_parameters():
        node = captured.graph.gradients[name]
        assert node is not None
        assert torch.equal(values[node], parameter.grad)


def test_what_is_predicted_to_be_held_is_one_gradient_less() -> None:
    captured = capture(job())
    graph, (at,) = captured.graph, joined(captured)
    (stage,) = cut(graph).stages
    logits = 4 * ROWS * CLASSES
    assert graph.nodes[at].size_bytes == logits
    backward = segment_memory(MemoryOwner(graph, set()), stage.backward)
    assert logits <= backward.peak < 1.5 * logits  # the softmax is there before


@pytest.mark.parametrize(
    "other",
    [job(labels=(3, 32)), job(classes=64)],  # [N, C, L]; so few that both are in a cache
)
def test_other_losses_are_left_as_they_are(other: Job) -> None:
    assert not joined(capture(other))


def test_a_gradient_that_something_else_reads_is_left_as_it_is() -> None:
    graph = fx.Graph()
    output, target, weight, total, grad = map(graph.placeholder, "otwng")
    output.meta["val"] = torch.empty(ROWS, CLASSES, device="meta")
    given = grad, output, target, weight, 1, -100, total
    nll = graph.call_function(aten.nll_loss_backward.default, given)
    rest = nll, output, 1, torch.float32
    last = graph.call_function(aten._log_softmax_backward_data.default, rest)
    graph.output((last, nll))
    by_rows.join_losses(graph)
    assert [node.target for node in graph.nodes][-3:-1] == [nll.target, last.target]
    graph.output_node().args = ((last,),)
    by_rows.join_losses(graph)
    assert [node.target for node in graph.nodes][-2] is LOSS_BACKWARD


def test_a_compiler_is_given_both_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = list[fx.GraphModule]()

    def compiler(module: fx.GraphModule, inputs: object, strides: object) -> str:
        modules.append(module)
        return "not here"

    monkeypatch.setattr(_compat, "compiled_by_inductor", compiler)
    captured = capture(job())
    (stage,) = cut(captured.graph).stages
    fused_function_of(stage.backward, captured, folder=None)
    targets = [node.target for module in modules for node in module.graph.nodes]
    assert aten.nll_loss_backward.default in targets
    assert LOSS_BACKWARD not in targets
    assert callable_of(LOSS_BACKWARD) is loss_backward


def test_both_ops_in_a_graph_have_the_bits_of_the_one() -> None:
    output, target = torch.randn(4, 5).log_softmax(1), torch.tensor([0, 2, 4, 4])
    given = torch.tensor(0.5), output, target, None, 1, -100, torch.tensor(4.0)
    graph = fx.Graph()
    places = [graph.placeholder(f"p{at}") if isinstance(v, Tensor) else v
              for at, v in enumerate(given)]  # fmt: skip
    graph.output(taken_apart(graph, places, torch.float32))
    module = fx.GraphModule({}, graph)
    tensors = [each for each in given if isinstance(each, Tensor)]
    assert torch.equal(module(*tensors), loss_backward(*given))
