"""Module: any module on rehearsal GPUs, as `python -m tests.rehearsal.module MODULE ...`."""

import runpy
import sys

from tests.rehearsal import launcher  # noqa: F401 - the device, before torch

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
