"""Functions of segments, and the random numbers that they draw."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from penstock.graph.code import SeededRandom, callable_of, function_of, micro_batch_seed, reseed
from penstock.graph.cut import cut
from penstock.graph.stages import SegmentKind
from penstock.graph.trace import capture
from tests.graph.zoo import JOBS

aten = torch.ops.aten
numbers = st.integers(0, 2**31)


@given(numbers, numbers, numbers, numbers)
def test_seeds_of_micro_batches_differ_and_fit_into_63_bits(a: int, b: int, m: int, n: int) -> None:
    seeds = {micro_batch_seed(seed, index) for seed in (a, b) for index in (m, n)}
    assert len(seeds) == len({a, b}) * len({m, n})
    assert all(0 <= seed < 2**63 for seed in seeds)


def draw(seed: int, ordinal: int) -> list[float]:
    reseed(seed, ordinal)
    return torch.rand(4).tolist()


def test_reseed_decides_what_is_drawn() -> None:
    assert draw(1, 0) == draw(1, 0)
    assert len({tuple(draw(seed, k)) for seed in (1, 2) for k in range(3)}) == 6


def test_seeded_eager_code_draws_by_seed_and_number_of_the_op() -> None:
    def masks(seed: int) -> list[Tensor]:
        with SeededRandom(seed):
            return [F.dropout(torch.ones(50), 0.5) for _ in range(2)]

    one, two, other = masks(1), masks(1), masks(2)
    assert all(map(torch.equal, one, two))
    assert not torch.equal(one[0], one[1])
    assert not torch.equal(one[0], other[0])


def test_seeded_eager_code_draws_the_same_whatever_was_drawn_before() -> None:
    torch.manual_seed(0)
    torch.rand(7)
    with SeededRandom(3):
        first = torch.rand(5)
    with SeededRandom(3):
        assert torch.equal(torch.rand(5), first)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_computes_again_draws_the_same_again(reentrant: bool) -> None:
    def gradients(again: bool) -> list[Tensor]:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(20, 20), nn.Dropout()) for _ in range(3)]
        y = torch.ones(4, 20, requires_grad=True)
        with SeededRandom(5):
            for layer in layers:
                y = checkpoint(layer, y, use_reentrant=reentrant) if again else layer(y)
            F.dropout(y).sum().backward()
        return [layer[0].weight.grad for layer in layers]

    assert all(map(torch.equal, gradients(again=True), gradients(again=False)))


def test_seeding_torch_in_forward_changes_nothing_of_the_numbers() -> None:
    def masks(seeds: bool) -> list[Tensor]:
        found = []
        with SeededRandom(5):
            for _ in range(2):
                if seeds:
                    torch.manual_seed(0)
                found.append(F.dropout(torch.ones(50)))
        return found

    assert all(map(torch.equal, masks(seeds=True), masks(seeds=False)))


@pytest.mark.parametrize(
    "name", ["bernoulli_", "normal_", "uniform_", "exponential_", "geometric_"]
)
def test_drawing_in_place_does_not_depend_on_the_layout(name: str) -> None:
    arguments = [0.3] if name in ("bernoulli_", "geometric_") else []
    contiguous, transposed = torch.empty(6, 20), torch.empty(20, 6).t()
    with SeededRandom(1):
        getattr(contiguous, name)(*arguments)
    with SeededRandom(1):
        returned = getattr(transposed, name)(*arguments)
    assert returned is transposed
    if name == "bernoulli_":  # the others draw in the order of memory, traced as well
        assert torch.equal(contiguous, transposed)
    functional = {"bernoulli_": aten.bernoulli.p, "normal_": aten.normal_functional.default}
    if name in functional:
        reseed(1, 0)
        assert torch.equal(functional[name](torch.empty(20, 6).t(), *arguments), transposed)


def source(name: str, kind: SegmentKind) -> str:
    captured = capture(JOBS[name])
    return function_of(cut(captured.graph).stages[0].segment(kind), captured).source


def test_every_random_op_is_seeded_by_its_own_number() -> None:
    lines = [line for line in source("dropout", "F").splitlines() if "_reseed" in line]
    assert [line.split("_reseed(seed, ")[1][0] for line in lines] == ["0", "1", "2", "3"]
    assert "_reseed" not in source("dropout", "B")


def test_values_are_deleted_after_their_last_use() -> None:
    lines = source("blocks", "F").splitlines()
    assert lines[2].strip() == "inputs.clear()"
    assert sum(line.strip().startswith("del ") for line in lines) > 5


def test_running_statistics_are_left_alone_when_batch_norm_is_repeated() -> None:
    captured = capture(JOBS["batch_norm"])
    stage = cut(captured.graph, [], [True]).stages[0]
    forward, backward = (function_of(s, captured).source for s in (stage.forward, stage.backward))
    call = "op_aten_native_batch_norm_default("
    assert forward.count(call) == backward.count(call) == 4
    assert forward.count("None, None, True") == 0
    assert backward.count("None, None, True") == 4
    assert "copy_" not in backward


def test_fused_lstm_keeps_what_its_backward_needs_though_grad_mode_is_off() -> None:
    op = callable_of(aten.mkldnn_rnn_layer.default)
    weights = [torch.ones(16, 4), torch.ones(16, 4), torch.ones(16), torch.ones(16)]
    state = torch.zeros(2, 4)
    with torch.no_grad():
        *_, workspace = op(
            torch.ones(3, 2, 4),
            *weights,
            state,
            state,
            False,
            [],
            2,
            4,
            1,
            True,
            False,
            False,
            True,
        )
        assert not torch.is_grad_enabled()
    assert workspace.numel() > 0
