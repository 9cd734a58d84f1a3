"""Tests on rehearsal GPUs need the library, which needs a compiler once."""

import sys

import pytest
import torch

from tests.rehearsal.library import built, why_not


@pytest.fixture(scope="session", autouse=True)
def _device() -> None:
    """Compile the device, or skip."""
    if sys.platform != "linux":
        pytest.skip("the rehearsal device is for Linux")
    if torch.backends.cuda.is_built():
        pytest.skip(
            f"torch {torch.__version__} has a CUDA of its own, whose place the device takes"
        )
    if problem := why_not():
        pytest.skip(problem)
    built()
