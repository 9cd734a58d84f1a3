import doctest
from pathlib import Path

from penstock.program import program
from penstock.program.lower import lower
from penstock.schedule import one_f_one_b

PAGE = Path(__file__).parents[2] / "docs" / "program.md"


def test_examples_of_the_page_are_what_runs():
    result = doctest.testfile(str(PAGE), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert result.attempted > 8
    assert result.failed == 0


def test_picture_in_the_docstring_is_what_prints():
    picture = "\n".join(f"    {line}" for line in str(lower(one_f_one_b(2, 1))).splitlines())
    assert picture in program.__doc__
