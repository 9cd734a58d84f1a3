"""A goal is reached by a validation, or by the mean of newest steps, and asks for the end once."""

import pytest

from penstock.pilot.goal import Goal, GoalWatch
from penstock.training.results import _changes


def watch_of(loss, *, is_validated=False, own=2):
    watch, asked = GoalWatch(Goal(loss), is_validated=is_validated, own=own), []
    watch.asks = lambda: asked.append(watch.value)
    return watch, asked


def test_mean_of_the_newest_micro_batches_counts_whatever_the_batch():
    """The window is of 32 micro-batches here; of a step that is half in it, all counts."""
    watch, asked = watch_of(1.0)
    for loss in (4.0, 4.0, 4.0):
        watch.hear({"loss": loss}, 8)
    assert watch.value is None
    watch.hear({"loss": 0.0}, 8)
    assert watch.value == pytest.approx(3.0)
    watch.hear({"loss": 0.0}, 16)
    assert watch.value == pytest.approx(4.0 * 8 / 32)
    assert (watch.is_reached, asked) == (True, [1.0])
    watch.hear({"loss": 9.0}, 8)  # steps that were under way
    assert (watch.value, asked) == (1.0, [1.0])


def test_large_steps_are_not_cut_in_two():
    watch, _ = watch_of(0.0)
    watch.hear({"loss": 3.0}, 30)
    watch.hear({"loss": 1.0}, 30)
    assert watch.value == pytest.approx(2.0)


def test_validation_counts_alone_where_there_is_one():
    watch, asked = watch_of(1.0, is_validated=True)
    for _ in range(40):
        watch.hear({"loss": 0.1}, 8)
    assert watch.value is None
    watch.hear({"loss": 0.1, "val_loss": 1.5, "val_seconds": 0.25}, 8)
    assert (watch.value, watch.val_s, watch.is_reached) == (1.5, 0.25, False)
    watch.hear({"loss": 0.1, "val_loss": 1.0}, 8)
    assert asked == [1.0]


def test_loss_that_a_summary_tells_is_the_one_that_has_reached_the_goal(tmp_path):
    watch, _ = watch_of(1.0)
    watch.hear({"loss": 0.9}, 32)
    watch.hear({"loss": 1.4}, 32)
    assert _changes(tmp_path, watch)["train_loss"] == 0.9
    validated, _ = watch_of(1.0, is_validated=True)
    validated.hear({"loss": 1.4, "val_loss": 0.9}, 8)
    assert "train_loss" not in _changes(tmp_path, validated)
