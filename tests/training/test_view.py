"""View: what a person reads while a run goes on."""

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.listener import SILENT, Listener, Row, SaysOnly
from penstock.training.train import _heard_by
from penstock.training.view import TERMINAL, step_words

FIGURES = st.one_of(st.none(), st.floats(0, 1e6))


def row(**more: float | None) -> Row:
    rates = {"samples_per_second": None, "tokens_per_second": None}
    return {"step": 3, "loss": 5.5452, "seconds": 0.232, **rates, **more}


def test_train_in_python_prints_as_the_command_does_unless_it_is_told_not_to() -> None:
    assert inspect.signature(ps.train).parameters["listener"].default is TERMINAL
    assert _heard_by(TERMINAL) is TERMINAL
    assert _heard_by(None) is SILENT


@pytest.mark.parametrize(("rank", "kind"), [("0", type(TERMINAL)), ("1", SaysOnly)])
def test_of_ranks_under_torchrun_the_first_tells_of_phases(
    rank: str, kind: type[Listener], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.training.train.under_torchrun", lambda: True)
    monkeypatch.setenv("RANK", rank)
    assert isinstance(_heard_by(TERMINAL), kind)


def test_phases_of_another_rank_are_not_told_and_messages_are(
    capfd: pytest.CaptureFixture[str],
) -> None:
    own = SaysOnly(TERMINAL)
    with own.busy("tracing"), own.progress("searching") as tell, own.steps(0, 2, 1.0) as show:
        tell(1, 2)
        show(row())
        own.say("it fails")
    assert capfd.readouterr() == ("", "it fails\n")


def test_step_is_told_whole_where_there_is_room() -> None:
    words = step_words(row(tokens_per_second=8123.0, val_loss=5.0), 0.25, 100)
    assert words == "loss 5.5452  232 ms (predicted 250 ms)  8,123 tokens/s  val loss 5.0000"
    assert step_words(row(tokens_per_second=8123.0), 0.25, 56).endswith("8,123 tokens/s")
    assert (
        step_words(row(samples_per_second=9.0), None, 100) == "loss 5.5452  232 ms  9.0 samples/s"
    )


@given(st.integers(12, 200), FIGURES, FIGURES, st.integers(0, 6))
def test_step_is_never_told_in_more_columns_than_there_are(
    room: int, tokens: float | None, predicted: float | None, more: int
) -> None:
    figures = {f"figure_{at}": float(at) for at in range(more)}
    assert len(step_words(row(tokens_per_second=tokens, **figures), predicted, room)) <= room
