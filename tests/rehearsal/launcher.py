"""Launcher: `penstock` on rehearsal GPUs, as `python -m tests.rehearsal.launcher train JOB ...`.

A process that is spawned for a rank imports this file first, too, and so has the same devices.
What each window of a rank and each process has cost is written to the folder REHEARSAL_SEEN.
REHEARSAL_WRONG is the window before which a weight goes wrong, if any does.
"""

import atexit
import json
import os
import sys
import weakref
from pathlib import Path
from typing import Any

from tests.rehearsal import cuda, nccl  # noqa: F401 - before torch
from tests.rehearsal.library import KIND

# isort: split
import torch

from penstock import device
from penstock.far import FarMemory
from penstock.gauge import benchmark, links
from penstock.profile import measure
from penstock.runtime.audited import StepKeeper
from penstock.runtime.rank import Rank
from penstock.training import audited_run

_run_of_rank, _starter = Rank.run, os.getpid()
_far_memories = weakref.WeakSet[FarMemory]()
_init_of_far = FarMemory.__init__
_windows = weakref.WeakKeyDictionary[Rank, int]()  # that a rank has run


def _far(memory: FarMemory, device: Any) -> None:
    _init_of_far(memory, device)
    _far_memories.add(memory)


def _counts() -> dict[str, Any]:
    ours = cuda.library
    counts = {"ops": ours.rehearsal_ops(), "syncs": ours.rehearsal_syncs()}
    return {**counts, "pageable": ours.rehearsal_pageable(), "beside": ours.rehearsal_beside()}


def _note(kind: str, **content: Any) -> None:
    folder = os.environ.get("REHEARSAL_SEEN")
    if folder:
        races = range(cuda.library.rehearsal_races())
        row = {"kind": kind, "pid": os.getpid(), "device": cuda.library.rehearsal_device()}
        row |= {"races": [cuda.library.rehearsal_race(number).decode() for number in races]}
        with (Path(folder) / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps({**row, **content}) + "\n")


def _wrong(rank: Rank) -> None:
    """Let a weight of rank 0 be another one before the window of the run that is to be wrong."""
    _windows[rank] = _windows.get(rank, 0) + 1
    if rank.rank == 0 and str(_windows[rank]) == os.environ.get("REHEARSAL_WRONG"):
        weight = next(iter(next(iter(rank.weights.values())).kept().values()))
        weight.add_(torch.ones_like(weight), alpha=0.1)


def _run(rank: Rank, calls: Any, first_step: int) -> Any:
    _wrong(rank)
    before = _counts()
    result = _run_of_rank(rank, calls, first_step)
    counts = {name: count - before[name] for name, count in _counts().items()}
    live = cuda.library.rehearsal_live(cuda.index_of(rank.device))
    about = {"rank": rank.rank, "first": first_step, "live": live, "held": rank.held_bytes()}
    pinned, far = cuda.library.rehearsal_pinned(), sum(each.size_bytes for each in _far_memories)
    _note("window", **about, **counts, pinned=pinned, far=far)
    return result


def _noted(kind: str, call: Any) -> Any:
    """Return a method that notes what a call of it has cost."""

    def noted(*given: Any) -> Any:
        before = _counts()
        found = call(*given)
        _note(kind, **{name: count - before[name] for name, count in _counts().items()})
        return found

    return noted


def _end() -> None:
    if os.getpid() == _starter:
        _note("process", **_counts())


if KIND != "idle":
    device.KINDS = (*device.KINDS, KIND)  # type: ignore[assignment] - all that a kind asks for
FarMemory.__init__ = _far  # type: ignore[method-assign]
Rank.run = _run  # type: ignore[method-assign]
for _name in ("before", "after"):
    setattr(StepKeeper, _name, _noted("kept", getattr(StepKeeper, _name)))
atexit.register(_end)
measure._BUDGET_S = links._BUDGET_S = 0.02  # as in the suite: what becomes of seconds is tested
links.QUEUED_SIZES, links.QUEUED_PAYLOADS = links.SIZES[:3], links.PAYLOADS
links._QUEUED_WIDTH = links._WIDTH
audited_run._begun = lambda session, basis: basis  # beginning anew takes longer than such runs
benchmark._QUEUED_WIDTH = benchmark._WIDTH

if __name__ == "__main__":
    from penstock.cli import main

    sys.exit(main(sys.argv[1:]))
