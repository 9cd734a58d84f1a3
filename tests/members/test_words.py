"""Words: what is written comes back as it was, and nothing else is ever taken."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import AloneError, BatchMisfitError, GraphError, RankMisfitError, RunError
from penstock.members.failing import failed_by
from penstock.members.launch_members import as_job_fails
from penstock.members.words import (
    Ask,
    Beat,
    Failed,
    Halt,
    HeldTensor,
    Put,
    Told,
    View,
    Where,
    WireError,
    Word,
    word_in,
    written,
)

WORDS = (
    Beat(3),
    Put(2, "edge 1", "text"),
    Ask(Where("host", 5, "key"), "graph", (1, 2)),
    Halt(
        4, 9, (HeldTensor("weights/a", "float32", (2, 3)),), {}, Told(8, None, 0.1, 4, {"x": 1.0})
    ),
    View(5, 9, "{}", (1, 2), gone={0: "died"}, where={1: Where("a", 1, "k")}, why="why"),
)


@pytest.mark.parametrize("word", WORDS)
def test_words_come_back(word: Word) -> None:
    assert word_in(written(word)) == word


@given(st.binary(max_size=200), st.sampled_from(WORDS), st.integers(0, 300), st.integers(0, 255))
def test_garbage_is_refused_with_one_error(garbage: bytes, word, place: int, value: int) -> None:
    changed = bytearray(written(word))
    changed[place % len(changed)] = value
    for data in (garbage, bytes(changed), b"[" * 10**6):
        with suppress(WireError):
            word_in(data)


@pytest.mark.parametrize(
    ("kind", "told_as"),
    [(BatchMisfitError, RankMisfitError), (AloneError, AloneError), (GraphError, RunError)],
)
def test_every_member_knows_whether_a_run_may_go_on_without_a_plan(kind, told_as) -> None:
    told = word_in(written(failed_by(kind("this batch", hint="pad it"))))
    assert isinstance(told, Failed)
    assert type(told.error) is told_as
    assert (told.error.message, told.error.hint) == ("this batch", "pad it")
    assert type(as_job_fails(told.error)) is told_as
