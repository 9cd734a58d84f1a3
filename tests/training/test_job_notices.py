"""What is said of a job, or refused, before its first step."""

import builtins
import itertools
import logging
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import penstock as ps
from penstock.cli.train import _check_validated
from penstock.errors import JobError
from penstock.graph.summed_loss import sums_over_batch
from penstock.graph.trace import capture
from penstock.listener import SILENT
from penstock.runtime.validate import EndlessError, most_of, validated
from penstock.training.examination import tell_of_step
from penstock.training.job_notices import (
    check_validation,
    noticing,
    words_before,
    words_of_step,
    words_of_sum,
)
from penstock.training.results import NOT_VALIDATED, _validated

LIMIT_S = 300.0
HELD = TensorDataset(torch.arange(24.0).reshape(12, 2))


def data(start: int) -> Iterator[list[Tensor]]:
    return ([torch.full((4, 2), float(k))] for k in itertools.count(start))


def job(validation) -> ps.Job:
    return ps.Job(
        model=lambda: nn.Linear(2, 1),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        data=data,
        optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1),
        micro_batches=2,
        num_steps=3,
        validation=validation,
    )


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


ENDLESS = {
    "by number": lambda: ps.batches(HELD, 4)(0),
    "by workers": lambda: ps.batches(HELD, 4, workers=1)(0),
    "of a loader": lambda: ps.from_loader(DataLoader(HELD, 4, shuffle=True))(3),
    "of a stream": lambda: ps.batches(Stream(), 4, shuffle=False)(0),
    "the job's own data": lambda: data(1000),
    "a cycle": lambda: itertools.cycle(DataLoader(HELD, 4)),
}


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a validation be read for as long as it takes here."""
    for name in ("_READ_S", "_MADE_S", "_TRIED_S"):
        monkeypatch.setattr(f"penstock.training.job_notices.{name}", LIMIT_S)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("name", ENDLESS)
def test_validation_without_end_is_refused_before_a_step(name: str) -> None:
    with pytest.raises(JobError, match=r"without end|does not end") as caught:
        check_validation(job(ENDLESS[name]), "", SILENT)
    assert "itertools.islice(" in caught.value.hint


@pytest.mark.usefixtures("patient")
def test_length_of_an_epoch_is_in_the_hint() -> None:
    with pytest.raises(JobError) as caught:
        check_validation(job(ENDLESS["by number"]), "", SILENT)
    assert caught.value.hint == "end it: validation=lambda: itertools.islice(..., 3)"


ENDS = {
    "a list": lambda: [next(data(k)) for k in range(3)],
    "a loader": lambda: DataLoader(HELD, 4),
    "an epoch": lambda: itertools.islice(ps.batches(HELD, 4)(0), 3),
    "a long one with a length": lambda: [next(data(0))] * 20_000,
    "none": None,
}
FAILS = {"batches": lambda: iter([1 / 0]), "a later set": lambda: [[torch.ones(4, 3)]]}


@pytest.mark.parametrize("name", ENDS)
def test_validation_that_ends_is_not_refused(name: str) -> None:
    check_validation(job(ENDS[name]), "", SILENT)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("what", ["batches", "a later set", "metrics", "loss", "best"])
def test_validation_that_fails_is_refused_before_a_step(what: str) -> None:
    own = job({"near": ENDS["a list"], "far": FAILS.get(what, ENDS["a loader"])})
    changed = {
        "metrics": {"metrics": refused},
        "loss": {"loss": refused},
        "best": {"best": "highest val_accuracy", "validate_every": 2},
    }
    own = replace(own, **changed.get(what, {}))
    with pytest.raises(JobError) as caught:
        check_validation(own, "", SILENT)
    words = {
        "batches": "division by zero",
        "a later set": "cannot be multiplied",
        "best": "by val_accuracy, which the validation does not give",
    }
    assert words.get(what, "no such figure") in caught.value.message
    assert caught.value.hint
    check_validation(own, "", SILENT, tries=False)


@pytest.mark.usefixtures("patient")
def test_trying_a_validation_leaves_nothing_behind() -> None:
    asked = list[int]()

    def held() -> Iterator[list[Tensor]]:
        asked.append(1)
        yield [torch.ones(4, 2)]

    check_validation(job(held), "", SILENT)
    assert not asked


def test_validation_is_read_one_by_one_and_told_how_far() -> None:
    held, told = list[int](), list[tuple[int, int]]()

    def one_by_one() -> Iterator[list[Tensor]]:
        for number in range(3):
            held.append(number)
            assert len(told) == number, "the one before is done"
            yield [torch.ones(4, 2)]

    found = validated(job(one_by_one), nn.Linear(2, 1), lambda *done: told.append(done))
    assert told == [(1, 0), (2, 0), (3, 0)]
    assert set(found) == {"val_loss"}
    told.clear()
    validated(job(ENDS["a list"]), nn.Linear(2, 1), lambda *done: told.append(done))
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_validation_that_does_not_end_ends_with_an_error_that_counts(monkeypatch) -> None:
    monkeypatch.setattr("penstock.runtime.validate._FEW", 10)
    own = job(lambda: data(0))
    assert most_of(own) == 120
    with pytest.raises(EndlessError, match="120 micro-batches"):
        validated(own, nn.Linear(2, 1))


def test_validation_that_is_found_endless_after_the_run_ends_the_command(monkeypatch) -> None:
    monkeypatch.setattr("penstock.runtime.validate._FEW", 10)
    own = job(lambda: data(0))
    weights = {f"weights/{name}": p for name, p in own.model().named_parameters()}
    found = _validated(own, SimpleNamespace(weights=weights), None, SILENT)
    assert "val_loss" not in found
    _check_validated({"val_loss": 1.0})
    with pytest.raises(JobError, match="does not end: there is no val_loss; the run is whole") as e:
        _check_validated(found)
    assert "islice" in e.value.hint


def refused(model: nn.Module, batch: object) -> dict[str, float]:
    raise ValueError("no such figure")


@pytest.mark.parametrize("what", ["metrics", "loss", "batches"])
def test_validation_that_fails_after_the_run_ends_the_command_once_the_report_is_made(what) -> None:
    own = job(FAILS["batches"] if what == "batches" else ENDS["a list"])
    weights = {f"weights/{name}": p for name, p in own.model().named_parameters()}
    if what != "batches":
        own = replace(own, **{what: refused})
    found = _validated(own, SimpleNamespace(weights=weights), None, SILENT)
    assert list(found) == [NOT_VALIDATED]
    with pytest.raises(JobError, match="there is no val_loss; the run is whole") as caught:
        _check_validated(found)
    words = "ZeroDivisionError" if what == "batches" else "ValueError: no such figure"
    assert words in caught.value.message
    assert "test_job_notices.py" in caught.value.message
    assert caught.value.hint


def test_short_last_micro_batch_counts_by_its_samples() -> None:
    model = nn.Linear(2, 1)
    whole = job(lambda: DataLoader(HELD, 12))
    for size in (5, 7, 11):
        found = validated(job(lambda size=size: DataLoader(HELD, size)), model)
        assert found["val_loss"] == pytest.approx(validated(whole, model)["val_loss"], rel=1e-6)


# -- what a step is --------------------------------------------------------------------------------


def of_data(own, **fields) -> ps.Job:
    return replace(job(None), data=own, **fields)


def made(own, **fields) -> ps.Job:
    given = {name: getattr(job(None), name) for name in ("model", "loss", "optimizer")}
    return ps.Job(data=own, **given, **fields)


def test_step_of_a_loader_is_one_micro_batch_unless_the_job_says_another_number() -> None:
    by_loader = ps.from_loader(DataLoader(HELD, 4, shuffle=True))
    assert made(by_loader).micro_batches == 1
    assert made(ps.batches(HELD, 4)).micro_batches == 1
    assert made(ps.batches(Stream(), 4, shuffle=False)).micro_batches == 1
    assert made(by_loader, micro_batches=8).micro_batches == 8
    assert made(data).micro_batches == 8
    assert replace(made(by_loader), num_steps=3).micro_batches == 1


def test_step_is_told_in_samples_and_epochs() -> None:
    own = of_data(ps.batches(HELD, 4), micro_batches=8)
    assert [*words_of_step(own, 0, 110, None)] == [
        "a step: 8 x 4 = 32 samples; 110 steps = 293 epochs"
    ]
    assert [*words_of_step(own, 0, None, None)] == ["a step: 8 x 4 = 32 samples"]
    assert [*words_of_step(job(None), 64, 5, 2)] == ["a step: 2 x 64 = 128 samples"]
    assert not [*words_of_step(job(None), 0, 5, 2)]


@pytest.mark.parametrize(("ranks", "told"), [(2, "batches of 2 and micro_batches=2"), (3, "small")])
def test_step_of_one_micro_batch_says_how_ranks_share_it(ranks: int, told: str) -> None:
    first, second, _ = words_of_step(made(ps.batches(HELD, 4)), 0, 3, ranks)
    assert first == "a step: 1 x 4 = 4 samples; 3 steps = 1 epochs"
    assert told in second


@pytest.mark.parametrize(("alone", "lines"), [(False, 3), (True, 1)])
def test_how_ranks_share_a_step_is_not_said_where_one_process_alone_trains(alone, lines) -> None:
    said: list[str] = []
    own = SimpleNamespace(
        job=made(ps.batches(HELD, 4)),
        fixed=SimpleNamespace(ranks=2),
        num_steps=3,
        goal=None,
        listener=SimpleNamespace(say=said.append),
    )
    tell_of_step(own, None, alone=alone)
    assert len(said) == lines


SUMS = {
    "sum": lambda m, b: (m(b[0]) - 1).square().sum(),
    "mse": lambda m, b: F.mse_loss(m(b[0]), b[0][:, :1], reduction="sum"),
    "vae": lambda m, b: (
        F.l1_loss(m(b[0]), b[0][:, :1], reduction="sum") - 0.5 * m(b[0]).exp().sum()
    ),
    "mean of features, sum of samples": lambda m, b: m(b[0]).square().mean(1).sum(),
    "scaled": lambda m, b: 0.5 * m(b[0]).square().sum() / 2,
    "classes": lambda m, b: F.cross_entropy(
        torch.cat([m(b[0]), -m(b[0])], 1), torch.zeros(len(b[0]), dtype=int), reduction="sum"
    ),
}
MEANS = {
    "mean": lambda m, b: (m(b[0]) - 1).square().mean(),
    "mse": lambda m, b: F.mse_loss(m(b[0]), b[0][:, :1]),
    "sum by samples": lambda m, b: m(b[0]).square().sum() / len(b[0]),
    "divided before": lambda m, b: (m(b[0]).square() / len(b[0])).sum(),
    "times a part": lambda m, b: m(b[0]).square().sum() * (1 / len(b[0])),
    "weighted": lambda m, b: (b[0] * m(b[0])).sum() / b[0].sum(),
    "sum of features, mean of samples": lambda m, b: (m(b[0]) * b[0]).sum(1).mean(),
    "mean of samples, sum of features": lambda m, b: (m(b[0]) * b[0]).mean(0).sum(),
}


def uneven(start: int) -> Iterator[list[Tensor]]:
    draw = torch.Generator().manual_seed(start)
    return ([torch.rand(4, 2, generator=draw)] for _ in itertools.count(start))


@pytest.mark.parametrize("name", SUMS)
def test_loss_that_is_a_sum_over_the_batch_is_told(name: str) -> None:
    own = of_data(uneven, loss=SUMS[name])
    first, *_ = words_of_sum(own, capture(own))
    assert "the mean of 2 sums" in first
    assert not [*words_of_sum(replace(own, micro_batches=1), capture(own))]


@pytest.mark.parametrize("name", SUMS)
def test_sum_is_seen_in_the_graph(name: str) -> None:
    own = of_data(uneven, loss=SUMS[name])
    assert sums_over_batch(capture(own))


@pytest.mark.parametrize("name", [name for name in MEANS if not name.endswith("features")])
def test_mean_is_no_sum_in_the_graph(name: str) -> None:
    assert not sums_over_batch(capture(of_data(uneven, loss=MEANS[name])))


@pytest.mark.parametrize("name", MEANS)
def test_loss_that_is_a_mean_is_no_sum(name: str) -> None:
    own = of_data(uneven, loss=MEANS[name])
    assert not [*words_of_sum(own, capture(own))]


# -- what a loss does besides ----------------------------------------------------------------------

SEEN: list[Tensor] = []
LOG = logging.getLogger("of a script")


class Board:
    """Keeps the newest loss."""

    newest: object = None

    def show(self, loss: Tensor) -> None:
        self.newest = loss


BOARD = Board()


def prints(model: nn.Module, batch: list[Tensor]) -> Tensor:
    loss = model(batch[0]).square().mean()
    print(f"shape {loss.shape}")
    return loss


def logs(model: nn.Module, batch: list[Tensor]) -> Tensor:
    LOG.warning("one more")
    return model(batch[0]).square().mean()


def keeps(model: nn.Module, batch: list[Tensor]) -> Tensor:
    loss = model(batch[0]).square().mean()
    SEEN.append(loss.detach())
    return loss


def shows(model: nn.Module, batch: list[Tensor]) -> Tensor:
    loss = model(batch[0]).square().mean()
    BOARD.show(loss.detach())
    return loss


class Printing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        print("forward")
        return super().forward(x)


def told_of(own: ps.Job) -> list[str]:
    SEEN.clear()
    BOARD.newest = None
    with noticing() as lines:
        captured = capture(own)
    words = words_before(own, captured, lines, 3)
    return [line for line in words if "while the step is traced" in line]


@pytest.mark.parametrize(
    ("loss", "what"),
    [(prints, "print"), (logs, "a log"), (keeps, "SEEN:"), (shows, "BOARD:")],
)
def test_what_a_traced_loss_does_not_go_on_doing_is_told(loss, what: str) -> None:
    (line,) = told_of(replace(job(None), loss=loss))
    assert what in line


def test_print_of_a_module_is_told_with_its_line_once() -> None:
    (line,) = told_of(replace(job(None), model=lambda: Printing(2, 1)))
    assert line.startswith(f"{__file__}:")
    assert ": print in the loss" in line


def test_print_of_data_or_of_a_builder_is_not_the_losss() -> None:
    def says(start: int) -> Iterator[list[Tensor]]:
        print("data")
        return data(start)

    def builds() -> nn.Module:
        print("model")
        return nn.Linear(2, 1)

    assert not told_of(replace(job(None), data=says, model=builds))
    assert print is vars(builtins)["print"]
    assert vars(builtins)["print"].__name__ == "print"
