"""Tests on rehearsal GPUs need the library, which needs a compiler once."""

import sys

import pytest

from tests.rehearsal.library import built, why_not


@pytest.fixture(scope="session", autouse=True)
def _device() -> None:
    """Compile the device, or skip."""
    if sys.platform != "linux":
        pytest.skip("the rehearsal device is for Linux")
    if problem := why_not():
        pytest.skip(problem)
    built()
