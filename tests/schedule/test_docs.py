import doctest
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["schedule.md", "weight_rules.md"])
def test_examples_of_the_page_give_what_it_says(page):
    result = doctest.testfile(str(DOCS / page), module_relative=False)
    assert result.attempted > 0
    assert result.failed == 0
