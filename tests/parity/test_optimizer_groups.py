"""Groups of an optimizer are those of the whole model, however it is cut."""

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from tests.parity.optimizing import (
    assert_as_plain,
    expected_state,
    job_of,
    plain_loop,
    run_of,
    windows_from,
)
from tests.parity.training import differing, train


def by_name(weights) -> Optimizer:
    decayed = [p for n, p in weights.named() if "weight" in n]
    others = [p for n, p in weights.named() if "weight" not in n]
    return AdamW(
        [{"params": decayed, "weight_decay": 0.3}, {"params": others, "lr": 5e-3}], lr=1e-2
    )


def by_index(weights) -> Optimizer:
    """Groups by place in the list, of which the last is another one in every stage."""
    weights = list(weights)
    return SGD([{"params": weights[:3], "lr": 0.02}, {"params": weights[3:]}], lr=0.1, momentum=0.9)


def by_dimensions(weights) -> Optimizer:
    groups = [
        {"params": [p for p in weights if p.dim() == d], "lr": 0.01 * (d + 1)} for d in (1, 2)
    ]
    return Adam(groups)


def named(weights) -> Optimizer:
    return AdamW(weights.named(), lr=1e-2)


def some(weights) -> Optimizer:
    """The others are left as they are, on purpose."""
    return SGD([p for n, p in weights.named() if n.startswith("layers")], lr=0.1)


def a_group_each(weights) -> Optimizer:
    return SGD([{"params": [p], "lr": 0.01 * (i + 1)} for i, p in enumerate(weights)], momentum=0.5)


GROUPS = [by_name, by_index, by_dimensions, named, some, a_group_each]


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("optimizer", GROUPS)
def test_groups_are_those_of_the_whole_model(optimizer, stages, tmp_path):
    assert_as_plain(job_of(optimizer, clip_norm=0.5), tmp_path, stages)


TORCH = {
    "sgd": lambda w: SGD(w, lr=0.05),
    "nesterov": lambda w: SGD(w, lr=0.05, momentum=0.9, nesterov=True, foreach=True),
    "adam": lambda w: Adam(w, lr=1e-2, amsgrad=True),
    "adamw": lambda w: AdamW(w, lr=1e-2, fused=True),
    "adamax": lambda w: torch.optim.Adamax(w, lr=1e-2),
    "nadam": lambda w: torch.optim.NAdam(w, lr=1e-2),
    "radam": lambda w: torch.optim.RAdam(w, lr=1e-2, foreach=True),
    "adagrad": lambda w: torch.optim.Adagrad(
        w, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1
    ),
    "adadelta": lambda w: torch.optim.Adadelta(w),
    "adafactor": lambda w: torch.optim.Adafactor(w, lr=1e-2),
    "rmsprop": lambda w: torch.optim.RMSprop(w, lr=1e-3, centered=True, momentum=0.9),
    "rprop": lambda w: torch.optim.Rprop(w, lr=1e-3),
    "asgd": lambda w: torch.optim.ASGD(w, lr=1e-2, t0=2),
    "muon": lambda w: torch.optim.Muon([p for p in w if p.dim() == 2], lr=1e-2),
}


@pytest.mark.parametrize("name", TORCH)
def test_torchs_own_are_divided_and_resumed_to_the_bit(name, tmp_path):
    job = job_of(TORCH[name])
    run = run_of(job, 2)
    plain = plain_loop(job)
    train(run, tmp_path / "part", (1, 1))
    rest = windows_from(run, 2)
    done = tmp_path / "part" / "step-000002"
    found = train(run, tmp_path / "rest", windows=rest, resume=done).weights
    assert differing(found, plain.weights) == []
    assert differing(found, expected_state(plain)) == []
