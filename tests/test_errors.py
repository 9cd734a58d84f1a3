"""Errors: what a user reads of one in a script, and after it went through another process."""

import pickle
import traceback

from penstock.errors import GraphError, PlanError


def printed(error: Exception) -> str:
    return "".join(traceback.format_exception_only(error))


def test_python_prints_the_hint_below_the_message() -> None:
    error = PlanError("5 ranks of 4", hint="ask for 4")
    assert printed(error) == "penstock.errors.PlanError: 5 ranks of 4\nhint: ask for 4\n"
    assert str(error) == "5 ranks of 4"
    assert printed(PlanError("5 ranks of 4")) == "penstock.errors.PlanError: 5 ranks of 4\n"


def test_hint_that_is_said_later_takes_the_place_of_the_first() -> None:
    error = GraphError("it stops", hint="look")
    error.add_note("while tracing")
    error.hint += " here"
    assert printed(error).splitlines()[1:] == ["while tracing", "hint: look here"]
    error.hint = ""
    assert printed(error).splitlines()[1:] == ["while tracing"]


def test_hint_comes_back_from_another_process() -> None:
    error = pickle.loads(pickle.dumps(PlanError("5 ranks of 4", hint="ask for 4")))
    assert (error.message, error.hint) == ("5 ranks of 4", "ask for 4")
    assert printed(error).endswith("\nhint: ask for 4\n")
