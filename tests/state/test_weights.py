"""A stage's weights: flat, with the layout, the names and the bytes that they say."""

from functools import partial
from threading import Thread

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

from penstock.errors import CheckpointError, JobError
from penstock.graph.cut import cut
from penstock.graph.trace import capture
from penstock.job import Job
from penstock.state.optimizer.optimizer_trial import TRYING
from penstock.state.weights import StageWeights, fitting, load_model
from tests.parity.models import captured, job_of


class Mixed(nn.Module):
    """Parameters of two dtypes and odd sizes, a frozen one and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(7, 5)
        self.exact = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.still = nn.Linear(5, 3).requires_grad_(False)
        self.register_buffer("shift", torch.full((3,), 0.5))

    def forward(self, x):
        return (self.still(self.wide(x) * self.exact.float()) + self.shift).square().mean()


def mixed(
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), **options
):
    def data(start):
        while True:
            yield torch.ones(2, 7)

    job = Job(Mixed, lambda model, x: model(x), data, optimizer, **options)
    made = capture(job)
    return StageWeights(cut(made.graph).stages[0], made, job), made


def test_parameters_of_a_dtype_lie_in_one_tensor_each_on_a_cache_line():
    weights, _ = mixed()
    assert sorted(flat.dtype.itemsize for flat in weights.flats) == [4, 8]
    starts = {flat.data_ptr() for flat in weights.flats}
    for node, parameter in weights.live.items():
        assert isinstance(parameter, nn.Parameter)
        assert parameter.is_contiguous()
        offset = min(parameter.data_ptr() - s for s in starts if parameter.data_ptr() >= s)
        assert offset % 64 == 0
        assert weights.gradients[node].shape == parameter.shape


def test_first_weights_are_those_of_the_model():
    weights, made = mixed()
    model = dict(made.model.named_parameters())
    found = {weights.names[node]: value for node, value in weights.tensors(0).items()}
    assert found.keys() == model.keys()
    assert all(torch.equal(found[name], model[name]) for name in model)


def test_an_update_changes_weights_here_and_not_in_the_model():
    weights, made = mixed()
    before = {name: value.clone() for name, value in made.model.named_parameters()}
    weights.give(weights.gradients_of(weights.with_gradient))
    for flat in weights.flat_gradients:
        flat.fill_(1.0)
    weights.step(0, 0.5)
    for node, parameter in weights.live.items():
        assert torch.equal(parameter, before[weights.names[node]] - 0.05)
    for node, value in weights.frozen.items():
        assert torch.equal(value, before[weights.names[node]])
    for name, value in made.model.named_parameters():
        assert torch.equal(value, before[name])


def test_rate_is_a_factor_on_the_first_rate_and_not_on_the_last():
    factors = (0.5, 0.25, 1.0)
    weights, _ = mixed(learning_rate=lambda step: factors[step])
    weights.give(weights.gradients_of(weights.with_gradient))
    for step, factor in enumerate(factors):
        weights.step(step)
        assert weights.optimizer is not None
        assert weights.optimizer.param_groups[0]["lr"] == 0.1 * factor


@pytest.mark.parametrize(
    ("options", "fades"),
    [
        ({}, 1.0),
        ({"learning_rate": lambda step: 0.5**step}, 0.5),
        ({"scheduler": lambda optimizer: ExponentialLR(optimizer, 0.5)}, 0.5),
    ],
)
def test_factor_of_an_update_is_on_whatever_rate_its_step_has(options, fades):
    weights, _ = mixed(lambda parameters: torch.optim.SGD(parameters, lr=0.1), **options)
    weights.give(weights.gradients_of(weights.with_gradient))
    for step, factor in enumerate((1.0, 0.25, 1.0, 0.5)):
        before = [flat.clone() for flat in weights.flats]
        for flat in weights.flat_gradients:
            flat.fill_(1.0)
        weights.step(step, factor)
        for old, parameter in zip(before, weights.flats, strict=True):
            moved = (old - parameter).max().item()
            assert moved == pytest.approx(0.1 * fades**step * factor, rel=1e-4)


def test_a_stash_keeps_what_was_live():
    weights, _ = mixed()
    weights.reserve(2)
    first = {node: value.clone() for node, value in weights.tensors(0).items()}
    weights.give(weights.gradients_of(weights.with_gradient))
    weights.flat_gradients[0].fill_(1.0)
    weights.keep(1)
    weights.step(0)
    assert all(torch.equal(weights.tensors(1)[node], value) for node, value in first.items())
    assert any(not torch.equal(weights.tensors(0)[node], value) for node, value in first.items())
    weights.reserve(1)
    assert len(weights.stash) == 2


def test_size_is_that_of_every_tensor_held():
    weights, _ = mixed()
    padded = 4 * (48 + 16) + 8 * 8  # 7 x 5 and 5 numbers in float32, 5 in float64
    others = 4 * (5 * 3 + 3) + 4 * 3  # frozen, and the buffer
    assert weights.size_bytes() == 2 * padded + others
    weights.reserve(1)
    assert weights.size_bytes() == 3 * padded + others
    weights.give(weights.gradients_of(weights.with_gradient))
    weights.step(0)
    momentum = 4 * (7 * 5 + 5) + 8 * 5
    assert weights.size_bytes() == 3 * padded + others + momentum


def test_norms_are_those_of_the_gradients():
    weights, _ = mixed()
    for flat in weights.flat_gradients:
        flat.fill_(1e-3)
    nodes = list(weights.live)
    expected = [torch.linalg.vector_norm(weights.gradients[node]) for node in nodes]
    found = weights.norms(nodes)
    assert [norm.dtype for norm in found] == [weights.live[node].dtype for node in nodes]
    assert all(map(torch.equal, found, expected))
    assert weights.norms([]) == []


def test_a_stage_without_trainable_parameters_has_no_optimizer():
    made, job = captured("frozen_start", torch.float32), job_of("frozen_start", torch.float32)
    called = []
    job = Job(job.model, job.loss, job.data, lambda parameters: called.append(parameters))
    second = cut(made.graph, [0, 1]).stages[1]
    weights = StageWeights(second, made, job)
    assert second.parameters
    assert called == []
    assert weights.optimizer is None
    weights.step(0)
    assert weights.state()[0].keys() == {f"weights/{name}" for name in weights.names.values()}


def test_an_optimizer_that_is_none_is_refused():
    with pytest.raises(JobError, match="the job's optimizer is a NoneType"):
        mixed(lambda parameters: None)


def test_state_is_loaded_by_name():
    weights, _ = mixed()
    weights.give(weights.gradients_of(weights.with_gradient))
    weights.flat_gradients[0].fill_(1.0)
    weights.step(0)
    tensors, plain = weights.state()
    copied = {key: value.clone() for key, value in tensors.items()}
    other, _ = mixed()
    other.load(copied, plain)
    found, again = other.state()
    assert again == plain
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[key], value) for key, value in tensors.items())


@pytest.mark.parametrize(
    ("tensors", "message"),
    [({}, "the checkpoint holds no a"), ({"a": torch.ones(2)}, r"a is \[2\] in the checkpoint")],
)
def test_a_tensor_that_does_not_fit_is_refused(tensors, message):
    with pytest.raises(CheckpointError, match=message):
        fitting(tensors, "a", torch.ones(3))


class Rotary(nn.Module):
    """Keeps a table that it makes in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("table", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.register_buffer("table", torch.arange(2.0), persistent=False)
        return x * self.scale + self.table


def test_buffer_that_forward_made_since_and_nobody_saves_is_left() -> None:
    model = Rotary()
    model(torch.ones(2))
    load_model(model, {"buffers/scale": torch.full((2,), 3.0)})
    assert model.scale.tolist() == [3.0, 3.0]
    assert model.table.tolist() == [0.0, 1.0]
    with pytest.raises(CheckpointError, match=r"no buffers/scale"):
        load_model(model, {"buffers/table": torch.ones(2)})


def test_first_values_are_not_those_that_a_trial_lends_a_module_that_ranks_share():
    _, made = mixed()
    first = {name: p.detach().clone() for name, p in made.parameters.items()}
    sgd = partial(torch.optim.SGD, lr=0.1)
    job = Job(Mixed, lambda model, x: model(x), lambda start: iter(()), sgd)
    own, found = (cut(made.graph).stages[0], made, job), list[StageWeights]()
    building = Thread(target=lambda: found.append(StageWeights(*own)))
    with TRYING:
        kept = {name: p.data for name, p in made.parameters.items()}
        for parameter in made.parameters.values():
            parameter.data = torch.zeros_like(parameter.data)
        building.start()
        building.join(0.5)
        for name, parameter in made.parameters.items():
            parameter.data = kept[name]
    building.join()
    values = {found[0].names[node]: value for node, value in found[0].live.items()}
    for name, value in values.items():
        assert torch.equal(value, first[name])
