"""Goes on: a run that is resumed whole and divided again ends as one that nobody interrupts."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from penstock.plan import Plan
from tests.cli.conftest import Call

ALL = "--set", "trial=false", "--set", "audit=0"


def check_goes_on(call: Call, job: str, divided: str, folder: Path) -> None:
    """Train by two ranks with the option `divided`, by one, and divided again; compare weights."""
    out, option = folder / "run", divided.partition("=")[0]
    both, whole = ("--ranks", 2, "--set", divided), ("--ranks", 1)
    for steps, ways in ((2, both), (4, whole), (6, both)):
        done = call("train", job, "--steps", steps, *ways, *ALL, "--out", out, "--resume")
        assert done.code == 0, done.err
        place, is_both = Plan.load(out / "plan.json").place, ways is both
        assert place.tensor == (2 if is_both else 1)
        assert place.context == (is_both and option == "context")
    assert call("train", job, "--steps", 6, *whole, *ALL, "--out", folder / "alone").code == 0
    for there in (out, folder / "alone"):
        assert call("export", there, "--to", f"{there}.safetensors", "--yes").code == 0
    made, alone = (load_file(f"{there}.safetensors") for there in (out, folder / "alone"))
    assert made.keys() == alone.keys()
    for name, weight in alone.items():
        torch.testing.assert_close(made[name], weight, rtol=1e-5, atol=1e-6)
