"""bench.check gives what its docstring says."""

from collections.abc import Iterator

import torch

from bench.architectures import JOBS
from bench.check import MODELS, rows_of
from penstock.job import Job


def test_models_are_those_of_the_docstring() -> None:
    assert len(MODELS) == len(set(MODELS)) == 39


def test_model_with_one_cut_point_is_checked_in_two_stages_and_told_not_to_be_cut_in_four() -> None:
    rows = list(rows_of("lstm"))
    assert [(row["stages"], row["ok"]) for row in rows] == [
        (2, True), (2, True), (4, False), (4, False)
    ]  # fmt: skip
    assert "1" in str(rows[2]["why"])


def test_model_that_cannot_be_traced_has_one_row_with_the_reason(monkeypatch) -> None:
    def data(start: int) -> Iterator[torch.Tensor]:
        while True:
            yield torch.ones(2)

    job = Job(
        model=lambda: torch.nn.Linear(2, 2),
        loss=lambda model, x: model(x).sum() if model(x).sum() > 0 else model(-x).sum(),
        data=data,
        optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1),
    )
    monkeypatch.setitem(JOBS, "lstm", job)  # type: ignore[arg-type]
    (row,) = rows_of("lstm")
    assert (row["traced"], row["ok"]) == (False, False)
    assert "test_check.py" in str(row["why"])
