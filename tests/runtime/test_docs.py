import doctest
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "run.md"


def test_examples_of_the_page_are_what_runs():
    result = doctest.testfile(str(PAGE), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert result.attempted > 10
    assert result.failed == 0
