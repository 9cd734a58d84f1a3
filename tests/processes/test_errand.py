"""Errands: what calls beside each other return is what they return one after another."""

import os
import signal
import time
from contextlib import ExitStack
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import MemoryShortError
from penstock.processes.errand import Errands
from tests.runtime.test_launch import children, has_ended


@pytest.fixture(autouse=True)
def _nothing_is_left():
    before = children(os.getpid())
    yield
    assert children(os.getpid()) == before


def nothing(done, total):
    pass


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 4), st.lists(st.integers(-9, 9), max_size=6))
def test_results_are_those_of_the_calls_in_any_order(hands, numbers):
    def call(number, move):
        return {number: (os.getpid(), 1.0 / 3 + number)}

    with Errands(hands) as errands:
        begun = [errands.begin(partial(call, number)) for number in numbers]
        found = [each.result(nothing) for each in reversed(begun)][::-1]
    for number, row in zip(numbers, found, strict=True):
        pid, value = row[number]
        assert value == 1.0 / 3 + number
        assert (pid == os.getpid()) == (hands < 2)


def test_parts_that_a_result_has_twice_are_one_still():
    def call(move):
        part = [1]
        return part, part

    with Errands(2) as errands:
        one, other = errands.begin(call).result(nothing)
    assert one is other


def test_no_more_go_on_at_once_than_there_are_hands(tmp_path):
    def call(number, move):
        mine = tmp_path / str(number)
        mine.touch()
        time.sleep(0.02)
        busy = len(list(tmp_path.iterdir()))
        mine.unlink()
        return busy

    with Errands(2) as errands:
        begun = [errands.begin(partial(call, number)) for number in range(7)]
        assert len(children(os.getpid())) >= 2
        assert max(each.result(nothing) for each in begun) <= 2


def test_what_penstock_raises_there_is_raised_here_as_it_is():
    def call(move):
        raise MemoryShortError("too large", hint="allow more")

    with Errands(2) as errands:
        begun = errands.begin(call)
        with pytest.raises(MemoryShortError) as caught:
            begun.result(nothing)
    assert caught.value.hint == "allow more"
    assert caught.value.message == "too large"
    assert caught.value.__notes__ == ["hint: allow more"]


def test_other_errors_are_raised_by_a_call_here():
    pids = []

    def call(move):
        pids.append(os.getpid())
        return 1 // 0

    with Errands(2) as errands, pytest.raises(ZeroDivisionError):
        errands.begin(call).result(nothing)
    assert pids == [os.getpid()]  # what the fork has noted, it alone has


@pytest.mark.parametrize("how", ["killed", "left"])
def test_what_a_process_that_dies_was_to_do_is_done_here(how):
    own = os.getpid()

    def call(move):
        if os.getpid() != own and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if os.getpid() != own:
            os._exit(0)
        return "done"

    with Errands(2) as errands:
        assert errands.begin(call).result(nothing) == "done"


def test_nobody_is_left_behind_by_an_interrupt():
    def interrupted(done, total):
        raise KeyboardInterrupt

    def call(move):
        signal.pause()

    before = set(children(os.getpid()))  # of other tests, which end when they do
    with ExitStack() as stack:
        errands = stack.enter_context(Errands(3))
        begun = [errands.begin(call) for _ in range(4)]
        pids = set(children(os.getpid())) - before
        assert len(pids) == 3
        with pytest.raises(KeyboardInterrupt):
            begun[0].result(interrupted)
        with pytest.raises(KeyboardInterrupt), errands:
            raise KeyboardInterrupt
        assert all(map(has_ended, pids))


def test_one_tells_how_far_all_are():
    def call(number, move):
        move(number, 10)
        return number

    told = []
    with Errands(2) as errands:
        begun = [errands.begin(partial(call, number)) for number in (2, 3)]
        for each in begun:
            each.result(lambda done, total: told.append((done, total)))
        assert errands.far == (5, 20)
        late = errands.begin(lambda move: signal.pause())
        assert late.far == (0, 0)
        assert errands.far == (5, 20)  # of how much there is more, nobody knows yet
    assert told[-1] == (5, 20)
