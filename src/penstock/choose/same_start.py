"""Same start: ranks that torchrun started compare what they are about to run with what rank 0 is.

Before anything is done together that is what they were started with: Penstock itself, versions, the
command, the job's numbers; then the graph that each has traced; then plan and program.  Where a
rank has something else, all end with its error: ranks that run different programs wait for each
other for ever.
Ignores:  functions of the job of which the traced step does not tell, like its optimizer.
"""

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from penstock.choose.choose import Choice
from penstock.errors import PlanError
from penstock.job import Job
from penstock.program.codes import COLUMNS
from penstock.program.program import Program
from penstock.typed import typed

if TYPE_CHECKING:
    from penstock.runtime.windows import Windows
    from penstock.training.rendezvous import Rendezvous

_HINT = "start the same command on all hosts, with the same files and packages"
_PLAIN = (str, int, float, bool, tuple, type(None))


def agree(rendezvous: "Rendezvous", about: str, own: Mapping[str, str]) -> None:
    """Return once all ranks have found that rank 0 has what they have; every rank calls it.

    about:    a name for it, of its own.
    Raises:   PlanError: this rank has something else.  RunError: another one has, or failed.
    """
    key = f"penstock/agree on {about}"
    if rendezvous.rank == 0:
        rendezvous.put(key, json.dumps(dict(own)))
    else:
        told = typed(dict[str, str], json.loads(rendezvous.take(key)))
        for what in {**told, **own}:
            theirs, ours = told.get(what, "nothing"), own.get(what, "nothing")
            if theirs != ours:
                message = f"rank {rendezvous.rank} has {what} {ours}; rank 0 has {theirs}"
                raise PlanError(message, hint=_HINT)
    rendezvous.meet(about)


def start_facts(job: Job, asked: Mapping[str, object]) -> dict[str, str]:
    """Return what a rank was started with.

    asked:    what the command says, by name.
    """
    return {
        "Penstock": _source(),
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__.partition("+")[0],
        **{name: _short(value) for name, value in asked.items()},
        **{
            f"Job.{each.name}": _short(getattr(job, each.name))
            for each in fields(job)
            if isinstance(getattr(job, each.name), _PLAIN)
        },
    }


def run_facts(choice: Choice, windows: "Windows") -> dict[str, str]:
    """Return digests of what a rank is about to run."""
    every = (choice, *choice.others)
    plans = (replace(each.plan, decisions=(), predicted=None).to_json() for each in every)
    return {
        "graph": " ".join(each.captured.graph.digest for each in every),  # of joined micro-batches
        "plan": " ".join(_digest(json.dumps(plan)) for plan in plans),
        "program": " ".join(program_digest(program) for program in windows.programs),
    }


def program_digest(program: Program) -> str:
    """Return a short hash of all that a program says; what a runtime adds does not count."""
    digest = hashlib.sha256()
    for name in (*COLUMNS, "offsets"):
        digest.update(getattr(program.code, name).tobytes())
    rest = {each.name: getattr(program, each.name) for each in fields(program) if each.compare}
    rest |= {"code": program.code.reductions, "weight_rule": program.weight_rule.name}
    digest.update(repr(rest).encode())
    return digest.hexdigest()[:16]


@cache
def _source() -> str:
    """Return a digest of the source of Penstock."""
    root = Path(__file__).parent.parent
    rows = [(str(path.relative_to(root)), path.read_bytes()) for path in sorted(root.rglob("*.py"))]
    return _digest(repr(rows))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:30]}... ({_digest(text)})"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
