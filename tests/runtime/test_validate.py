"""Sets of a validation, metrics as sums and counts, the best by any figure, and patience."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from penstock.best import best_of, out_of_patience
from penstock.checkpoints import checkpoint
from penstock.errors import JobError
from penstock.runtime.means import Means
from penstock.runtime.validate import is_out_of_patience, validated
from tests.cli import mlp

NEAR = [torch.ones(8, 1), torch.zeros(2, 1)]  # the last one is short
FAR = [torch.full((4, 1), 3.0)]


def loss(model, x):
    return x.square().mean() + 0 * model.weight.sum(), {"largest": x.max()}


def metrics(model, x):
    return {"ones": ((x == 1).sum(), x.numel()), "first": x[0, 0]}


def job_of(**more):
    own = replace(mlp.job(), model=lambda: nn.Linear(1, 1), loss=loss)
    sets = {"near": lambda: NEAR, "far": lambda: iter(FAR)}
    return replace(own, **{"validation": sets, "metrics": metrics, **more})


def test_sets_by_name_have_their_figures_and_so_has_all_of_it():
    found = validated(job_of(), nn.Linear(1, 1))
    assert found["val_near_loss"] == pytest.approx(8 / 10)
    assert found["val_far_loss"] == pytest.approx(9.0)
    assert found["val_loss"] == pytest.approx((8 + 36) / 14)
    assert (found["val_near_ones"], found["val_far_ones"]) == pytest.approx((8 / 10, 0))
    assert found["val_ones"] == pytest.approx(8 / 14)
    assert found["val_near_first"] == pytest.approx(8 / 10)
    assert found["val_largest"] == pytest.approx((8 + 12) / 14)
    one = validated(job_of(validation=lambda: NEAR, metrics=None), nn.Linear(1, 1))
    assert one == pytest.approx({"val_loss": 8 / 10, "val_largest": 8 / 10})


answers = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=5)


@given(answers, answers)
def test_a_mean_is_that_of_all_however_it_is_divided(first, second):
    tallies = [Means(), Means()]
    for tally, rows in zip(tallies, (first, second), strict=True):
        for value, count in rows:
            tally.add({"mean": value / count, "pair": (value, count)}, count)
    tallies[0].take(tallies[1])
    rows = first + second
    expected = sum(value for value, _ in rows) / sum(count for _, count in rows)
    assert tallies[0].means() == pytest.approx({"mean": expected, "pair": expected})


def test_no_count_has_no_mean():
    tally = Means()
    tally.add({"recall": (0, 0)}, 8)
    assert tally.means() == {}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"metrics": lambda model, x: 3}, "metrics are a int"),
        ({"metrics": lambda model, x: {"a": (1, 2, 3)}}, "a has 3 numbers"),
        ({"metrics": lambda model, x: {"a": x}}, "metric a is a Tensor"),
        ({"metrics": lambda model, x: {"largest": 1}}, "largest, which its loss gives too"),
        ({"metrics": lambda model, x: x["no"]}, "metrics fail"),
    ],
)
def test_what_metrics_cannot_be_is_refused(wrong, words):
    with pytest.raises(JobError, match=words):
        validated(job_of(**wrong), nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"validation": {}}, "names no sets"),
        ({"validation": {"a b": lambda: NEAR}}, "has the name 'a b'"),
        ({"validation": {"near": NEAR}}, r'validation\["near"\] is the list'),
        ({"metrics": 3}, "Job.metrics is the int 3"),
        ({"best": "val_loss"}, "Job.best is 'val_loss', no figure"),
        ({"best": "highest accuracy"}, "no figure of a validation"),
        ({"patience": 2}, "patience is 2, and Job.validate_every is None"),
        ({"patience": 0, "validate_every": 2}, "patience is 0, not a whole number"),
    ],
)
def test_fields_that_cannot_be_are_refused_when_the_job_is_made(wrong, words):
    with pytest.raises(JobError, match=words):
        job_of(**wrong)


def test_the_best_is_by_any_figure_and_another_one_begins_anew(tmp_path):
    by = "highest val_accuracy"
    for step, value in enumerate([0.5, 0.75, 0.75, 0.25], 1):
        weights = {"weights/head": torch.full((1,), float(step))}
        checkpoint.write_part(tmp_path, step, 0, (weights, {}))
        checkpoint.finish(tmp_path, step)
        checkpoint.keep_best(tmp_path, step, value, by)
    assert checkpoint.best(tmp_path, by) == (2, 0.75)
    assert checkpoint.best(tmp_path, "lowest val_loss") is None
    checkpoint.keep_best(tmp_path, 4, 100.0)
    assert checkpoint.best(tmp_path) == (4, 100.0)


def test_a_figure_that_is_not_there_is_told_with_those_that_are():
    with pytest.raises(JobError, match="by val_accuracy, which") as caught:
        best_of("highest val_accuracy").of({"val_loss": 1.0, "val_f1": 1.0})
    assert caught.value.hint == "there are: val_loss, val_f1"


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 5), st.integers(0, 9))
def test_patience_counts_validations_since_the_best(best, every, patience, since):
    step = best * every + since * every
    out = out_of_patience(best * every, step, every=every, patience=patience)
    assert out == (since >= patience)
    assert not out_of_patience(best * every, step, every=every, patience=None)


def test_a_run_waits_as_long_as_its_job_says(tmp_path):
    checkpoint.write_part(tmp_path, 4, 0, ({"weights/head": torch.ones(1)}, {}))
    checkpoint.finish(tmp_path, 4)
    waits = job_of(validate_every=2, patience=2)
    assert not is_out_of_patience(waits, tmp_path, 8)  # none is the best yet
    checkpoint.keep_best(tmp_path, 4, 1.0)
    assert [is_out_of_patience(waits, tmp_path, step) for step in (4, 6, 8)] == [False, False, True]
    assert not is_out_of_patience(replace(waits, patience=None), tmp_path, 8)


class Phased(nn.Module):
    """It has a train() of its own, which notes more than a flag; a part of it stays in eval."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.still, self.phase = nn.Linear(8, 8), nn.Dropout().eval(), "train"

    def train(self, mode: bool = True) -> "Phased":
        self.phase = "train" if mode else "test"
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.phase == "test"
        return self.body(x)


def test_a_model_that_was_validated_is_as_a_loop_has_it_that_calls_train_again():
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    model, batches = Phased(), [torch.ones(2, 8)]
    validated(replace(mlp.job(), loss=loss, validation=lambda: batches), model)
    modes = model.phase, model.training, model.body.training, model.still.training
    assert modes == ("train", True, True, False)
