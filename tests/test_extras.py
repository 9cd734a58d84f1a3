"""Extras: what is missing is asked for by name; without numba and scipy all else is the same."""

import logging
import pickle
import subprocess
import sys

import numpy as np
import pytest

from penstock import extras
from penstock.errors import ExtraError
from penstock.schedule import as_python
from penstock.schedule.as_python import Interpreted
from penstock.schedule.compiled import random_numbers_kept

WITHOUT = "import sys; sys.modules.update(dict.fromkeys(('numba', 'scipy', 'sklearn')))\n"


def said(program: str, begin: str = "") -> tuple[str, str]:
    """Return what a process prints, and what it writes as errors."""
    command = [sys.executable, "-c", begin + program]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout, done.stderr


def test_what_is_missing_is_asked_for_by_its_extra():
    extras.need("json", "solvers", "a file")
    with pytest.raises(ExtraError, match="a dream needs no_such, which is not installed") as caught:
        extras.need("no_such", "solvers", "a dream")
    assert caught.value.hint == 'pip install "penstock[solvers]"'


def test_what_is_left_out_is_said_once(caplog):
    for _ in range(2):
        assert extras.lacks("no_such", "fast", "dreams")
        assert not extras.lacks("json", "fast", "files")
    assert caplog.messages == [
        'dreams are left out, for no_such is not installed: pip install "penstock[fast]"'
    ]


SEARCH = """
from penstock.search import search
from penstock.simulate import simulate
from tests.search.chains import SIX, SIX_PROFILE, cluster_of
from tests.simulate.strategies import random_seconds
from penstock.plan.of_plan import lower

found = search(SIX, SIX_PROFILE, cluster_of(2), micro_batches=2)
print(found.plan, found.plan.schedule, found.plan.cuts)
print(*simulate(lower(found.plan, SIX), random_seconds(0)).spans, sep="\\n")
"""

REPLAY = """
from penstock.fleet import policies
from penstock.fleet.replay import Ruler, replay
from tests.fleet.markets import plain_job, slotted

market = slotted([3, 0, 2, 2, 1, 4, 0, 3, 3, 3])
print(replay(market, plain_job(40), Ruler("greedy", policies.greedy), deadline_s=9000))
"""


@pytest.mark.parametrize("program", [SEARCH, REPLAY])
def test_what_needs_neither_numba_nor_scipy_says_the_same_without(program):
    out, error = said(program, WITHOUT)
    assert error == ""
    assert len(out) > 100
    assert (out, "") == said(program)


EXACT = """
from penstock.errors import ExtraError
from penstock.schedule.exact import exact
from penstock.schedule.exact_problem import Problem
from penstock.schedule.greedy import Seconds

try:
    Problem(3, 4, Seconds(), 1).model(100.0)
except ExtraError as error:
    print(error, error.hint, sep="|")
print(exact(3, 4, limit=1, time_limit_s=0.0).schedule.num_ranks)
"""


def test_what_needs_scipy_asks_for_it_by_name():
    hint = 'pip install "penstock[solvers]"'
    told = f"an exact schedule needs scipy, which is not installed|{hint}\n3\n"
    assert said(EXACT, WITHOUT) == (told, "")


SHORT = """
import logging
from penstock.errors import PlanError
from penstock.search import search
from tests.search.chains import SIX, SIX_PROFILE, cluster_of

logging.basicConfig(format="%(message)s")
for memory in (150, 230):
    try:
        made = search(SIX, SIX_PROFILE, cluster_of(2, memory_bytes=memory), micro_batches=2)
        print(max(made.plan.predicted.peak_bytes) <= memory)
    except PlanError as error:
        print(error.hint)
"""


def test_a_search_that_lacks_memory_says_once_what_it_leaves_out():
    out, error = said(SHORT, WITHOUT)
    assert sorted(error.splitlines()) == [
        "orders that copy activations to far memory are left out, for numba is not installed: "
        'pip install "penstock[fast]"',
        "plans that repeat parts of a stage are left out, for scipy is not installed: "
        'pip install "penstock[solvers]"',
    ]
    short, fits = out.splitlines()
    assert short.endswith('or pip install "penstock[solvers]": parts of a stage could be repeated')
    assert fits == "True"
    assert said(SHORT)[1] == ""


def test_loops_without_numba_keep_the_random_numbers_of_all_others():
    before = np.random.get_state()[1].copy()
    with random_numbers_kept():
        np.random.seed(7)
    assert (np.random.get_state()[1] == before).all()


def test_a_loop_without_numba_is_pickled_by_its_name(monkeypatch):
    def loop(number):
        return number + 1

    loop.__module__, loop.__qualname__ = __name__, "one_loop"
    made = Interpreted(loop)
    monkeypatch.setattr(sys.modules[__name__], "one_loop", made, raising=False)
    assert pickle.loads(pickle.dumps(made)) is made


@pytest.fixture
def double() -> Interpreted:
    def inverse(number):
        return np.float64(1.0) / number

    return Interpreted(inverse)


def test_a_loop_without_numba_warns_of_nothing_as_machine_code(double):
    assert double(np.float64(0.0)) == np.inf


def test_that_loops_are_slow_is_said_once(double, monkeypatch, caplog):
    monkeypatch.setattr(Interpreted, "spent_s", 0.0)
    as_python._say_that_they_are_slow.cache_clear()
    with caplog.at_level(logging.WARNING):
        double(1.0)
        assert caplog.messages == []
        monkeypatch.setattr(Interpreted, "spent_s", as_python._SLOW_S)
        double(1.0)
        double(1.0)
    (told,) = caplog.messages
    assert 'pip install "penstock[fast]" makes them fast' in told
    as_python._say_that_they_are_slow.cache_clear()
