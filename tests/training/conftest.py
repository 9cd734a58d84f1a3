"""What tests of training share."""

import pytest

from penstock.training.reads import functions_in


@pytest.fixture(scope="module")
def parsed(request: pytest.FixtureRequest) -> None:
    """Let the forks that look for impurities find the sources of a module's jobs parsed."""
    functions_in(str(request.path))
