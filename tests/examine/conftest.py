"""What tests of what a job is found to be share."""

import pytest

from penstock.examine.name_reads import tree_of


@pytest.fixture(scope="module")
def parsed(request: pytest.FixtureRequest) -> None:
    """Let the forks that look for impurities find the sources of a module's jobs parsed."""
    tree_of(str(request.path))
