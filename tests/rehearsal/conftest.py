"""Tests on rehearsal GPUs need the library, which needs a compiler once."""

import sys
from collections.abc import Iterator

import pytest
import torch

from tests.rehearsal.command import nursery
from tests.rehearsal.library import built, why_not


@pytest.fixture(scope="session", autouse=True)
def _device() -> Iterator[None]:
    """Compile the device, or skip; end the nursery at last, if there is one."""
    if sys.platform != "linux":
        pytest.skip("the rehearsal device is for Linux")
    if torch.backends.cuda.is_built():
        pytest.skip(
            f"torch {torch.__version__} has a CUDA of its own, whose place the device takes"
        )
    if problem := why_not():
        pytest.skip(problem)
    built()
    yield
    if nursery.cache_info().currsize:
        nursery().end()
