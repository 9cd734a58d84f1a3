"""What tracing sees, and what it refuses."""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock.errors import GraphError, JobError
from penstock.graph.cut import cut
from penstock.graph.trace import capture, trace
from penstock.job import Job
from tests.graph.executor import run_cut, run_eager
from tests.graph.zoo import JOBS, Blocks, Checkpointed, D, floats, job_of, vectors

ROOT = Path(__file__).parents[2]


class Model(nn.Module):
    """A linear layer, then whatever a test wants."""

    def __init__(self, forward: Callable[["Model", Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.then = nn.Linear(D, D), forward
        self.register_buffer("state", torch.zeros(D))
        self.plain, self.note = torch.ones(D), None

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self, self.linear(x))


def job_that(forward: Callable[[Model, Tensor], Tensor], **more) -> Job:
    return job_of(lambda: Model(forward), vectors, **more)


def assert_equals_eager(job: Job) -> None:
    captured = capture(job)
    found = run_cut(job, captured, cut(captured.graph), split=False)
    expected = run_eager(job)
    assert [loss.item() for loss in found.losses] == [loss.item() for loss in expected.losses]
    for name, gradient in expected.gradients.items():
        assert torch.equal(found.gradients[name], gradient), name
    for name, buffer in expected.buffers.items():
        assert torch.equal(found.buffers[name], buffer), name


# -- what is refused ----------------------------------------------------------------------------


def branches(model: Model, x: Tensor) -> Tensor:
    if x.sum() > 0:  # the line that the error names
        return x
    return -x


def test_control_flow_on_data_is_refused_with_its_line() -> None:
    line = branches.__code__.co_firstlineno + 1
    with pytest.raises(GraphError) as caught:
        trace(job_that(branches))
    assert f"{__file__}:{line}: if x.sum() > 0:" in caught.value.message


def clamps_its_weights(model: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.linear.weight.clamp_(-1, 1)
    return x


def counts_in_a_plain_tensor(model: Model, x: Tensor) -> Tensor:
    model.plain.add_(1)
    return x * model.plain


def replaces_a_plain_tensor(model: Model, x: Tensor) -> Tensor:
    x = x * model.plain
    model.plain = 0.5 * model.plain
    return x


def reshapes_its_buffer(model: Model, x: Tensor) -> Tensor:
    model.state = x.detach()
    return x


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (clamps_its_weights, "writes with aten.clamp_.default into a parameter"),
        (counts_in_a_plain_tensor, "neither a parameter nor a buffer"),
        (replaces_a_plain_tensor, "reads and replaces plain"),
        (reshapes_its_buffer, r"buffer state is torch.float32\[16\]; the model replaces it by"),
    ],
)
def test_state_that_a_run_would_lose_is_refused(forward, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        trace(job_that(forward))


def hooked() -> nn.Module:
    model = Blocks(2)
    model[0].up.weight.register_post_accumulate_grad_hook(lambda value: None)
    return model


def test_hook_behind_an_accumulated_gradient_is_refused() -> None:
    with pytest.raises(GraphError, match=r"parameter 0\.up\.weight has a gradient hook"):
        trace(job_of(hooked, vectors))


def test_batch_norm_in_a_checkpointed_block_is_refused() -> None:
    model = Checkpointed()
    model.blocks[1].norm = nn.BatchNorm1d(D)
    with pytest.raises(GraphError, match=r"blocks\.1\.norm changes a buffer"):
        trace(job_of(lambda: model, vectors))


def test_sparse_gradients_are_refused() -> None:
    job = job_of(lambda: nn.Embedding(4, D, sparse=True), lambda _: torch.tensor([1, 2]))
    with pytest.raises(GraphError, match="sparse_coo"):
        trace(job)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda model, x: model(x), r"loss is \(6, 16\), not one number"),
        (lambda model, x: None, "loss is NoneType, not one number"),
        (lambda model, x: 1.0, "loss is float, not one number"),
        (lambda model, x: model(x).detach().mean(), "depends on no trainable parameter"),
        (lambda model, x: x.mean(), "depends on no trainable parameter"),
        (lambda model, x: model(x).argmax(), "depends on no trainable parameter"),
    ],
)
def test_loss_that_is_no_number_or_has_no_gradient_is_refused(loss, message: str) -> None:
    with pytest.raises(JobError, match=message):
        trace(job_of(Blocks, vectors, loss))


def test_model_without_a_trainable_parameter_is_refused() -> None:
    with pytest.raises(JobError, match="depends on no trainable parameter"):
        trace(job_of(lambda: Blocks().requires_grad_(False), vectors))


def test_data_without_a_micro_batch_is_refused() -> None:
    with pytest.raises(JobError, match="the job's data yields no micro-batch"):
        trace(replace(JOBS["blocks"], data=lambda start: iter(())))


# -- what is not --------------------------------------------------------------------------------


def replaces_its_buffer(model: Model, x: Tensor) -> Tensor:
    model.state = 0.9 * model.state + 0.1 * x.detach().mean(0)
    return x - model.state


def reads_its_buffer_before_it_changes(model: Model, x: Tensor) -> Tensor:
    x = x * model.state.view(1, -1) + x
    model.state = model.state + 1
    return x


def writes_into_a_slice_of_its_buffer(model: Model, x: Tensor) -> Tensor:
    model.state[:4].copy_(x.detach()[0, :4])
    return x * model.state


def keeps_what_it_made(model: Model, x: Tensor) -> Tensor:
    model.note = x
    return x * model.plain


def hooks_an_activation(model: Model, x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: 3 * gradient)
    return x


def detaches(model: Model, x: Tensor) -> Tensor:
    return x * x.detach() + x.clone().detach_()


def draws_in_place(model: Model, x: Tensor) -> Tensor:
    noise = torch.empty(D, 6).t()
    for draw in (noise.normal_, noise.uniform_, noise.exponential_, noise.bernoulli_):
        x = x * draw().add(0.5)
    return x


def draws_into_a_slice(model: Model, x: Tensor) -> Tensor:
    noise = torch.ones(6, 2 * D)
    noise[:, ::2].normal_()
    return x * noise[:, :D]


def drops_whole_channels(model: Model, x: Tensor) -> Tensor:
    x = nn.functional.dropout1d(x.view(2, 3, D).transpose(1, 2), 0.5)
    return nn.functional.alpha_dropout(nn.functional.rrelu(x, training=True), 0.1)


@pytest.mark.parametrize(
    "forward",
    [
        replaces_its_buffer,
        reads_its_buffer_before_it_changes,
        writes_into_a_slice_of_its_buffer,
        keeps_what_it_made,
        hooks_an_activation,
        detaches,
        draws_in_place,
        draws_into_a_slice,
        drops_whole_channels,
    ],
)
def test_step_equals_eager_where_a_model(forward) -> None:
    assert_equals_eager(job_that(forward))


def sums_as_many_columns_as_the_data_says(model: Model, x: Tensor) -> Tensor:
    return x + x[:, : int(x.detach().abs().sum()) % 4 + 1].sum(1, keepdim=True)


def test_arithmetic_on_sizes_that_depend_on_data_is_run() -> None:
    assert_equals_eager(job_that(sums_as_many_columns_as_the_data_says))


def fills_all_that_a_module_has(model: Model, x: Tensor) -> Tensor:
    model.note, model._cache = x, x
    model.seen.append(x)
    model.by_name["x"] = x
    model.register_buffer("mask", torch.ones(D), persistent=False)
    model.eval()
    return x * model.mask


def test_trace_leaves_the_attributes_of_the_model_as_they_were() -> None:
    def model() -> Model:
        made = Model(fills_all_that_a_module_has)
        made.seen, made.by_name = [], {"y": 1}
        return made

    traced = capture(job_of(model, vectors)).model
    assert traced.note is None
    assert not hasattr(traced, "_cache")
    assert (traced.seen, traced.by_name) == ([], {"y": 1})
    assert [name for name, _ in traced.named_buffers()] == ["state"]
    assert traced.training


def test_generator_of_the_model_itself_is_refused() -> None:
    source = torch.Generator().manual_seed(0)
    torch.rand(1, generator=source)
    draw = lambda model, x: x + torch.rand(D, generator=source)  # noqa: E731
    with pytest.raises(GraphError, match=r"from a torch\.Generator of its own"):
        trace(job_that(draw))


def test_module_hook_that_changes_gradients_is_traced() -> None:
    def model() -> nn.Module:
        blocks = Blocks(2)
        blocks[0].up.register_full_backward_hook(lambda module, gi, go: (2 * gi[0],))
        return blocks

    assert_equals_eager(job_of(model, vectors))


def test_loss_of_one_element_is_a_number() -> None:
    loss = lambda model, x: model(x).mean().reshape(1)  # noqa: E731
    graph = trace(job_of(Blocks, vectors, loss))
    assert graph.nodes[graph.loss].shape == ()
    assert_equals_eager(job_of(Blocks, vectors, loss))


def test_loss_that_is_a_parameter_has_the_scale_as_its_gradient() -> None:
    class Number(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.number = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            return self.number

    assert_equals_eager(job_of(Number, vectors, lambda model, x: model(x)))
    assert_equals_eager(job_of(Number, vectors, lambda model, x: 3 * model(x)))


def clamps_the_batch(model: nn.Module, x: Tensor) -> Tensor:
    mask = x > 0
    return (model(x.clamp_(-1, 1)) * mask).mean()


def test_write_into_the_batch_does_not_outlive_the_step() -> None:
    job = job_of(Blocks, vectors, clamps_the_batch)
    captured = capture(job)
    batch = next(job.data(0))
    before = batch.clone()
    frozen = replace(job, data=lambda start: itertools.repeat(batch))
    found = run_cut(frozen, captured, cut(captured.graph, [1], [True, True]), split=True)
    assert torch.equal(batch, before)
    assert found.losses[0] == found.losses[1]
    assert_equals_eager(job)


def test_sizes_that_depend_on_data_stay_inside_a_stage() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.out = nn.Linear(D, 3), Blocks(2)
            self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            weight, chosen = self.router(x).softmax(-1).max(-1)
            mixed = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                (rows,) = torch.nonzero(chosen == number, as_tuple=True)
                mixed.index_add_(0, rows, expert(x[rows]) * weight[rows, None])
            return self.out(mixed)

    job = job_of(Experts, vectors)
    captured = capture(job)
    points = captured.graph.cut_points
    assert any(point.name.startswith("after out.0") for point in points)
    stages = cut(captured.graph, range(len(points)))
    shapes = [captured.fx_nodes[v].meta["val"].shape for e in stages.edges for v in e.values]
    assert all(type(size) is int for shape in shapes for size in shape)
    found, expected = run_cut(job, captured, stages, split=True), run_eager(job)
    for name, gradient in expected.gradients.items():
        assert torch.equal(found.gradients[name], gradient), name


def test_effects_are_listed_with_their_modules() -> None:
    effects = trace(JOBS["dropout"]).effects()
    assert [(effect, module) for _, effect, module in effects] == [
        ("random", f"{k}.dropout") for k in range(4)
    ]
    effects = trace(JOBS["batch_norm"]).effects()
    assert [e for _, e, _ in effects].count("mutates") == 4
    assert [e for _, e, _ in effects].count("writes") == 4  # num_batches_tracked
    assert trace(JOBS["batch_norm_eval"]).effects() == ()


def test_ops_know_their_module() -> None:
    nodes = trace(JOBS["blocks"]).nodes
    products = [node.module for node in nodes if node.target == "aten.addmm.default"]
    assert products == [f"{k}.{name}" for k in range(4) for name in ("up", "down")]


def test_backward_ops_come_from_the_op_that_they_differentiate() -> None:
    graph = trace(JOBS["blocks"])
    for node in graph.nodes:
        if node.target == "aten.gelu_backward.default":
            assert graph.nodes[node.origin].target == "aten.gelu.default"
        if node.target == "aten.native_layer_norm_backward.default":
            assert graph.nodes[node.origin].target == "aten.native_layer_norm.default"


def test_everything_before_the_loss_is_forward_even_a_gradient() -> None:
    graph = trace(JOBS["penalty"])
    assert all(node.phase == "F" for node in graph.nodes[: graph.loss + 1])
    assert any("backward" in node.target for node in graph.nodes[: graph.loss])


# -- the key ------------------------------------------------------------------------------------


def batch_of(**changed) -> dict[str, object]:
    return {**next(JOBS["dict_inputs"].data(0)), **changed}


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (batch_of(ids=torch.zeros(3, 6, dtype=torch.int64)), r"int64\[3, 6\] as leaf 0"),
        (batch_of(ids=torch.zeros(2, 6, dtype=torch.int32)), r"int32\[2, 6\] as leaf 0"),
        (batch_of(ids=None), "None as leaf 0"),
        (batch_of(power=3), "3 as leaf 3, the step was traced for 2"),
        (batch_of(power=2.0), "2.0 as leaf 3, the step was traced for 2"),
        (batch_of(label="other"), "'other' as leaf 2"),
        (batch_of(more=1), "this batch is TreeSpec"),
        (list(batch_of().values()), "this batch is TreeSpec"),
    ],
)
def test_batch_that_does_not_fit_is_refused(batch: object, message: str) -> None:
    captured = capture(JOBS["dict_inputs"])
    with pytest.raises(GraphError, match=message) as caught:
        captured.leaves(batch)
    assert "the step was traced for" in caught.value.message
    assert caught.value.hint


def test_batch_that_fits_is_returned_as_its_leaves() -> None:
    captured, batch = capture(JOBS["dict_inputs"]), batch_of()
    for found, given in zip(captured.leaves(batch), batch.values(), strict=True):
        assert found is given


def test_batch_of_another_layout_is_copied_into_that_of_the_trace() -> None:
    captured = capture(JOBS["blocks"])
    batch = torch.randn(D, 6).t()
    (leaf,) = captured.leaves(batch)
    assert leaf.stride() == (D, 1)
    assert torch.equal(leaf, batch)


@pytest.mark.parametrize(
    "leaf", [np.array(["a", "b"]), object(), {1, 2}], ids=["array", "object", "set"]
)
def test_leaf_that_is_read_and_cannot_be_compared_is_refused(leaf: object) -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, object]) -> Tensor:
        return model(batch[0]).mean() * len(repr(batch[1]))

    job = job_of(Blocks, lambda g: (vectors(g), leaf), loss)
    with pytest.raises(GraphError, match="which is no tensor, number or text"):
        trace(job)


def test_one_tensor_under_two_keys_may_be_two_in_a_later_batch() -> None:
    shared = torch.randn(6, D)
    first = {"x": shared, "y": shared}
    later = {"x": torch.randn(6, D), "y": torch.randn(6, D)}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (model(batch["x"]) - batch["y"]).square().mean()

    job = replace(job_of(Blocks, vectors, loss), data=lambda start: iter([first, later][start:]))
    assert_equals_eager(job)


def test_key_holds_what_the_trace_took_for_granted() -> None:
    key = trace(JOBS["dict_inputs"]).key
    assert "batch: int64[2, 6], int64[2, 6]" in key
    assert "other leaves: [\"'words'\", '2', 'None']" in key
    assert "autocast: bfloat16" in trace(JOBS["autocast"]).key
    training = [trace(JOBS[name]).key[3] for name in ("batch_norm", "batch_norm_eval")]
    assert training == ["modules in training mode: 19 of 19", "modules in training mode: 1 of 20"]


def test_samples_and_tokens_of_a_micro_batch_are_counted() -> None:
    assert [(g.samples, g.tokens) for g in map(trace, (JOBS["blocks"], JOBS["tied"]))] == [
        (6, 0),
        (2, 12),
    ]


def test_digest_is_the_same_in_every_process() -> None:
    program = (
        "from tests.graph.zoo import JOBS\n"
        "from penstock.graph.trace import trace\n"
        "print(*(trace(JOBS[n]).digest for n in ('tied', 'dict_inputs', 'dropout')))\n"
    )
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    there = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    here = [trace(JOBS[name]).digest for name in ("tied", "dict_inputs", "dropout")]
    assert there == " ".join(here) + "\n"


def test_digest_differs_between_models_and_between_batches() -> None:
    wide = job_of(Blocks, floats(7, D))
    jobs = [JOBS["blocks"], JOBS["dropout"], wide, replace(JOBS["blocks"], autocast="bfloat16")]
    assert len({trace(job).digest for job in jobs}) == 4


def test_tracing_leaves_the_model_as_it_was() -> None:
    captured = capture(JOBS["average"])
    assert all(float(value.sum()) == 0 for value in captured.model.buffers())
    assert not any(module._forward_hooks for module in captured.model.modules())
    model = capture(job_that(keeps_what_it_made)).model
    assert type(model.plain) is torch.Tensor


# -- the second way -----------------------------------------------------------------------------


class Item(nn.Module):
    """make_fx cannot give `.item()` to `math`; Dynamo leaves it out."""

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.blocks, self.replaces = Blocks(3), replaces
        self.register_buffer("mean", torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(x)
        self.log = f"{x.sum().item():.3f}"
        if self.replaces:
            self.mean = 0.5 * self.mean + x.detach().mean(0)
        else:
            self.mean.mul_(0.5).add_(x.detach().mean(0))
        return x - self.mean


def test_model_that_logs_an_item_is_traced_by_dynamo() -> None:
    job = job_of(lambda: Item(replaces=False), vectors)
    assert {p.name for p in trace(job).cut_points} >= {"after blocks.1"}
    assert_equals_eager(job)


def test_buffer_replaced_where_only_dynamo_sees_it_is_refused() -> None:
    with pytest.raises(GraphError):
        trace(job_of(lambda: Item(replaces=True), vectors))


class Counted(nn.Module):
    """What it computes follows a count that it keeps, which Python asks for."""

    def __init__(self, asks: str) -> None:
        super().__init__()
        self.blocks, self.asks = Blocks(2), asks
        self.register_buffer("count", torch.tensor(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(x)
        match self.asks:
            case "branch":
                x = x if int(self.count) < 48 else 2 * x
            case "size":
                x = x.repeat(int(self.count), 1)
            case "loop":
                for _ in range(self.count.item()):
                    x = x + 1
            case _:
                x = x + [0.0, 1.0, 2.0, 3.0][self.count]
        self.count += 1
        return x


@pytest.mark.parametrize("asks", ["branch", "size", "loop", "index"])
@pytest.mark.sampled(2)
def test_what_follows_the_value_of_a_count_is_refused(asks: str) -> None:
    """Dynamo goes on as the first micro-batch says, and gives a step that keeps it."""
    with pytest.raises(GraphError, match=r"test_trace\.py:\d+: .*self\.count"):
        trace(job_of(lambda: Counted(asks), vectors))


def test_mode_that_looks_for_anomalies_does_not_keep_a_model_from_being_traced():
    with torch.autograd.set_detect_anomaly(mode=True):
        assert trace(JOBS["blocks"]).gradients
        assert torch.is_anomaly_enabled()


def test_the_module_that_a_job_hands_over_has_its_buffers_as_they_were():
    """What no way of tracing takes is computed once as it is, be it of the module in hand."""
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}

    def loss(model, batch):
        out = model(batch).square().mean()
        return out, {"share": out.detach().item()}

    rows = lambda start: iter([torch.randn(6, 4)] * 9)  # noqa: E731
    job = Job(lambda: module, loss, rows, lambda ps: torch.optim.SGD(ps, lr=0.1))
    assert capture(job).graph
    for name, buffer in module.named_buffers():
        assert torch.equal(buffer, before[name]), name
