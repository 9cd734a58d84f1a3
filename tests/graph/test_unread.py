"""Values of a batch that a loss does not look at: found by trying, and of any value then."""

import copy
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.errors import BatchMisfitError
from penstock.examine.impurities import impurities
from penstock.graph.merge import merged, parts_of
from penstock.graph.trace import Capture, capture
from penstock.graph.unread import AnyKey, ReadLeaf, UnlikeValues, any_key, stand_in

USES: list[tuple[Any, Callable[[Any], object]]] = [
    ("a/b.png", str),
    ("a/b.png", repr),
    ("a/b.png", bool),
    ("a/b.png", len),
    ("a/b.png", hash),
    ("a/b.png", lambda x: x == "c"),
    ("a/b.png", lambda x: x != "c"),
    ("a/b.png", lambda x: {x: 1}),
    ("a/b.png", lambda x: x.startswith("a")),
    ("a/b.png", lambda x: f"{x}"),
    ("a/b.png", lambda x: x + "c"),
    ("a/b.png", lambda x: x[0]),
    ("a/b.png", lambda x: [*x]),
    ("a/b.png", lambda x: "b" in x),
    ("a/b.png", os.fspath),
    (b"ab", bytes),
    (3, lambda x: x + 1),
    (3, lambda x: 1 + x),
    (3, lambda x: 2.0 * x),
    (3, lambda x: torch.ones(2) * x),
    (3, lambda x: x * torch.ones(2)),
    (3, lambda x: x > 2),
    (3, lambda x: [1, 2, 3, 4][x]),
    (3, range),
    (3, float),
    (3, lambda x: x.real),
    (3, lambda x: x % 2),
    (0.5, int),
    (0.5, math.floor),
    (0.5, lambda x: -x),
    (0.5, lambda x: 1 - x),
    (0.5, abs),
    (True, lambda x: not x),
    (True, lambda x: x or 2),
    (True, lambda x: x & False),
    (1j, abs),
    (np.array(["a"]), lambda x: x[0]),
    (np.array(["a"]), np.asarray),
    (Path("a"), lambda x: x / "b"),
    (Path("a"), os.fspath),
    ({1, 2}, len),
]


@pytest.mark.parametrize(("value", "use"), USES)
def test_whatever_uses_a_stand_in_is_told(value: Any, use: Callable[[Any], object]) -> None:
    with pytest.raises(ReadLeaf) as told:
        use(stand_in(value, 7))
    assert told.value.place == 7


@pytest.mark.parametrize("value", ["a", b"a", 3, 0.5, True, 1j, Path("a"), {1}, np.array(["a"])])
def test_handing_it_on_is_no_use(value: Any) -> None:
    held = stand_in(value, 0)
    assert isinstance(held, type(value))
    assert not isinstance(held, Tensor | dict)
    assert held is not None
    assert copy.copy(held) is held
    assert copy.deepcopy([held])[0] is held
    assert not hasattr(held, "to")
    assert any_key(value) is not None


def test_what_has_no_kind_of_its_own_has_no_stand_in() -> None:
    assert any_key(None) is None
    assert any_key(torch.float32) is None
    assert any_key(torch.ones(1)) is None
    assert any_key(UnlikeValues(["a", "b"])) == AnyKey("str")
    assert any_key(UnlikeValues(["a", 3])) is None
    assert any_key(Path("a")) == AnyKey("pathlib.PosixPath")
    assert any_key(3) == AnyKey("int")


NAMES = AnyKey("numpy.ndarray")

# -- in a step ------------------------------------------------------------------------------------


def batch_of(k: int) -> dict[str, Any]:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(k))
    paths = [f"{k}/{i}.png" for i in range(4)]
    return {"x": x, "paths": paths, "row": k, "scale": 2.0, "names": np.array(paths)}


def data(start: int) -> Iterator[dict[str, Any]]:
    return map(batch_of, count(start))


def scaled(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return model(batch["x"]).square().mean() * batch["scale"]


def swallows(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    try:
        factor = 2.0 if batch["row"] % 2 else 1.0
    except Exception:  # noqa: BLE001 - that is what is tried
        factor = 3.0
    return scaled(model, batch) * factor


def by_type(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    moved = {k: v.to("cpu") if isinstance(v, Tensor) else v for k, v in batch.items()}
    return scaled(model, moved)


def in_c(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return scaled(model, batch) * len("".join(batch["paths"]))


def job_of(loss: Callable[[nn.Module, dict[str, Any]], Tensor]) -> ps.Job:
    optimizer = lambda w: torch.optim.SGD(w, lr=0.1)  # noqa: E731
    return ps.Job(lambda: nn.Linear(3, 2), loss, data, optimizer, micro_batches=4, num_steps=6)


def fits(captured: Capture, **others: Any) -> bool:
    try:
        captured.leaves({**batch_of(0), **others})
    except BatchMisfitError:
        return False
    return True


@pytest.mark.parametrize("loss", [scaled, by_type])
def test_a_step_takes_any_value_of_the_kind_that_it_does_not_look_at(loss) -> None:
    captured = capture(job_of(loss))
    assert captured.batch.leaves[1:] == (*[AnyKey("str")] * 4, AnyKey("int"), "2.0", NAMES)
    assert fits(captured, row=17, paths=["a", "b", "c", "d"])
    assert captured.leaves(batch_of(3))[1:7] == [*batch_of(3)["paths"], 3, 2.0]
    assert not fits(captured, row="17")
    assert not fits(captured, row=True)
    assert not fits(captured, row=None)
    assert not fits(captured, row=torch.ones(()))
    assert not fits(captured, scale=3.0)
    assert not fits(captured, paths=["a", "b", "c"])


def test_the_kind_of_an_unread_value_is_fixed_where_nothing_else_is_read_but_tensors() -> None:
    rows = lambda start: ({"x": batch_of(k)["x"], "row": k} for k in count(start))  # noqa: E731
    loss = lambda model, batch: model(batch["x"]).square().mean()  # noqa: E731
    captured = capture(replace(job_of(scaled), data=rows, loss=loss))
    x = batch_of(5)["x"]
    assert captured.leaves({"x": x, "row": 5})[1] == 5
    for row in ("5", None, 5.0):
        with pytest.raises(BatchMisfitError, match="the step was traced for any int"):
            captured.leaves({"x": x, "row": row})


@pytest.mark.parametrize(("loss", "read"), [(swallows, "row"), (in_c, "paths")])
def test_what_it_looks_at_is_fixed_whatever_it_catches_and_also_where_c_reads(loss, read) -> None:
    captured = capture(job_of(loss))
    assert fits(captured)
    assert not fits(captured, **{read: batch_of(1)[read]})


def test_values_of_joined_micro_batches_are_kept_one_by_one() -> None:
    job = merged(job_of(scaled), 2)
    batch = next(job.data(1))
    assert batch["x"].shape == (8, 3)
    assert [part["row"] for part in parts_of(job, batch)] == [2, 3]
    assert [part["paths"] for part in parts_of(job, batch)] == [
        batch_of(k)["paths"] for k in (2, 3)
    ]


def test_an_examination_lets_unread_values_be() -> None:
    assert impurities(job_of(by_type)) == ()
    (found,) = impurities(job_of(swallows))[:1]
    assert found.batch
    (found,) = impurities(job_of(in_c))[:1]
    assert found.batch


@pytest.mark.parametrize("options", [{"stages": 1, "ranks": 2}, {"ranks": 1, "replicas": 1}])
@pytest.mark.sampled(2)
def test_such_a_job_is_trained_by_a_plan(tmp_path, monkeypatch, options) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    job = job_of(by_type)
    trained = ps.train(job, out=tmp_path / "run", trial=False, **options)
    assert trained is not None
    assert trained.plan is not None
    torch.manual_seed(job.seed)
    model, batches = job.model(), data(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        for _ in range(4):
            (by_type(model, next(batches)) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.named_parameters():
        assert torch.allclose(trained.outcome.weights[f"weights/{name}"], value, atol=1e-6)
