"""bench.agree --learned gives what its docstring says."""

import pytest
import torch
from torch.nn import functional as F

from bench import learned
from penstock.runtime.launch import run_threads


def test_rows_have_losses_of_each_way_and_those_of_sums_are_of_a_plain_loop():
    ways = (None, None), ("local:8", None), ("ssp:1", "server:2")
    rows = list(learned.rows(2, 2, 48, ways, run_threads))
    assert [(row["way"], row["topology"]) for row in rows] == [
        ("None", ""),
        ("local:8", ""),
        ("ssp:1", "server:2"),
    ]
    for row in rows:
        assert row["samples"] == 48 * 64
        assert row["accuracy"] > 0.5  # of ten kinds
        assert row["accuracy_spread"] >= 0
        assert row["step_ms"] > 0
        assert row["predicted_step_ms"] > 0
    size = 4 * (64 * 128 + 128 + 128 * 10 + 10)
    assert [row["sent_bytes"] for row in rows] == [2 * size, 2 * size // 8, 2 * size]
    assert rows[0]["loss"] == pytest.approx(sum(map(plain, (0, 1))) / 2, rel=1e-4)


def plain(seed):
    """Return the loss of the held-out digits behind a loop that is written by hand."""
    torch.manual_seed(seed)
    model, source, own = learned.network(), learned.batches(seed, 0), learned.digits()
    for _ in range(48):
        pair = [next(source), next(source)]
        x, y = (torch.cat([batch[key] for batch in pair]) for key in "xy")
        held = [*model.parameters()]
        found = torch.autograd.grad(F.cross_entropy(model(x), y), held)
        with torch.no_grad():
            for weight, gradient in zip(held, found, strict=True):
                weight -= 0.2 * gradient
    return F.cross_entropy(model(own.held_x), own.held_y).item()


def test_a_pass_has_each_digit_once_and_none_that_is_held_out():
    own = learned.digits()
    assert (len(own.y), len(own.held_y)) == (1437, 360)
    source = learned.batches(3, 0)
    rows = torch.cat([next(source)["x"] for _ in range(1437 // 32)])
    assert len(torch.unique(rows, dim=0)) >= len(rows) - 1
