"""One script by one plan: the command in a process of its own, and the loop in another.

Processes are forked from one that has only imported what both need, so that a run takes two
seconds instead of eight; they are as fresh as a new interpreter in all that a script can see.
Links are measured once for each schedule that is asked for, and then given by --cluster.
"""

import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import penstock.cli.train
import penstock.runtime.worker  # noqa: F401 - what every run needs is imported once
from bench.scripts.cases import DELAY, PLANS, Script
from bench.scripts.compare import (
    GROWS,
    ROUNDING,
    ROUNDING_BFLOAT16,
    SMALL_GAP,
    ULP,
    difference,
    read,
)
from bench.scripts.oracle import DataEndedError, Found, load, plain_loop
from penstock.cli import main

LIMIT_S = 300.0
WHY = 300  # characters of words that are kept
_BROKEN = 99  # the exit code of work that raised
_EAGER_WORDS = ("eager",)
_CHANGED = (
    "would train something else",
    "no plan can be made",
    "training it eagerly",
    "is not what the plain loop makes of it",
    "beginning anew",
)
_ERROR = re.compile(r"^error:", re.MULTILINE)
_UNCLEAN = re.compile(r"(error|failed): ([A-Z]\w*(Error|Exception)\b)")


@dataclass(frozen=True, slots=True)
class Row:
    """What came of one script by one plan."""

    script: str
    plan: str
    odd: str
    equal: bool
    difference: float | None
    refused: bool
    ran: str
    why: str
    seconds: float

    @property
    def silent(self) -> bool:
        return not self.equal and not self.refused

    @property
    def unclean(self) -> bool:
        """Whether the error is that of a line of the product, not words for a person."""
        return self.refused and is_unclean(self.why)

    def json(self) -> dict[str, object]:
        return {**asdict(self), "silent": self.silent, "unclean": self.unclean}

    def line(self) -> str:
        refused = "unclean" if self.unclean else "refused"
        how = "equal" if self.equal else refused if self.refused else "SILENT"
        gap = "" if self.difference is None else f"{self.difference:.0e}"
        return f"{self.script:36} {self.plan:11} {how:8}{gap:6} {self.ran:22} {self.why}"


class Ran(NamedTuple):
    """A command that ended: its exit code (None: it ran past the limit) and what it said."""

    code: int | None
    errors: str


class Bench:
    """The folder in which all runs are, with a cache of its own for what runs keep."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.numbers = itertools.count()
        (self.folder / "cache").mkdir(parents=True, exist_ok=True)

    def rows_of(self, script: Script, plans: Sequence[str] = ()) -> Iterator[Row]:
        """Yield a row for each plan of a script."""
        loops: dict[int, Found | str] = {}
        for plan in plans or script.plans:
            delay = DELAY.get(plan, 0)
            if delay not in loops:
                loops[delay] = self.loop(script, script.steps, delay)
            yield self._row(script, plan, loops[delay])

    def _row(self, script: Script, plan: str, loop: Found | str) -> Row:
        out = self.out_of(script, plan)
        shutil.rmtree(out, ignore_errors=True)
        start = time.perf_counter()
        ran = self._train(script, plan, out)
        seconds = time.perf_counter() - start
        equal, gap, why = False, None, ""
        refused = is_refusal(ran)
        if ran.code is None:
            why = f"still running after {LIMIT_S:.0f} s"
        elif ran.code:
            why = last_error(ran)
        elif isinstance(loop, str):
            why = f"the plain loop fails: {loop}"
        else:
            found = difference(read(out), loop)
            limit = ROUNDING_BFLOAT16 if is_bfloat16(script) else ROUNDING
            equal, gap = found.value <= limit, found.value
            why = _said(ran.errors) if equal else found.where
            if not equal and self.is_rounding(found.value, script, script.steps, loop):
                equal, why = True, f"{GROWS}: {why}"
        name = f"{script.about}:{script.name}"
        return Row(
            name,
            plan,
            script.odd,
            equal,
            gap,
            refused,
            what_ran(out) if ran.code == 0 else "",
            why[:WHY],
            seconds,
        )

    def out_of(self, script: Script, plan: str) -> Path:
        """Return the folder that a script's run by a plan leaves."""
        return self.folder / f"{script.about}-{script.name}-{plan}".replace(" ", "_")

    def _train(self, script: Script, plan: str, out: Path) -> Ran:
        arguments = ["train", f"{script.path}:{script.name}", "--steps", str(script.steps)]
        arguments += ["--out", str(out), *PLANS[plan]]
        machines = self.folder / f"machines-{plan}.toml".replace(" ", "-")
        if "--schedule" in arguments and machines.exists():
            arguments += ["--set", f"cluster={machines}"]
        ran = self.run(lambda: main(arguments))
        if ran.code == 0 and not machines.exists() and (out / "cluster.toml").exists():
            shutil.copy(out / "cluster.toml", machines)
        return ran

    def loop(
        self, script: Script, steps: int, delay: int = 0, *, moved: float = 0.0
    ) -> Found | str:
        """Return what the plain loop gives, or why it fails."""
        path = self.folder / "loop.pt"
        path.unlink(missing_ok=True)

        def work() -> int:
            try:
                found = plain_loop(load(script.path, script.name), steps, delay=delay, moved=moved)
            except DataEndedError:
                print("error: the data ended", flush=True)
                return 1
            torch.save(tuple(found), path)
            return 0

        ran = self.run(work)
        if ran.code == 0:
            return Found(*torch.load(path))
        return (ran.errors.splitlines() or ["no word"])[-1]

    def is_rounding(self, gap: float, script: Script, steps: int, loop: Found) -> bool:
        """Return whether a small difference is less than what moving the loop's first weights by a
        rounding makes of it.
        """
        moved = self.loop(script, steps, moved=ULP) if gap <= SMALL_GAP else "too much"
        return not isinstance(moved, str) and gap <= difference(moved, loop).value

    def run(self, work: Callable[[], int]) -> Ran:
        """Return how `work` ended in a new process."""
        return self.start(work).wait()

    def start(self, work: Callable[[], int]) -> "Begun":
        """Begin `work` in a new process with its own group, output and randomness."""
        said = self.folder / f"said-{next(self.numbers)}.txt"
        process = os.fork()
        if process == 0:
            self._child(work, said)
        return Begun(process, said, time.monotonic() + LIMIT_S)

    def _child(self, work: Callable[[], int], said: Path) -> None:
        os.setsid()
        output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - the process's own, to its end
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        os.environ["XDG_CACHE_HOME"] = str(self.folder / "cache")
        random.seed()
        np.random.seed()
        code = _BROKEN
        try:
            code = work()
        finally:
            if code == _BROKEN:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(code)


class Begun:
    """A process that was started, and is ended at its limit."""

    def __init__(self, process: int, said: Path, until: float) -> None:
        self.process, self.said, self.until = process, said, until
        self._status: int | None = None

    @property
    def is_over(self) -> bool:
        """Whether it has ended; past its limit it is ended here."""
        if self._status is None:
            ended, status = os.waitpid(self.process, os.WNOHANG)
            self._status = status if ended else None
        return self._status is not None or time.monotonic() > self.until

    def wait(self) -> Ran:
        """Return how it ended; past its limit without a code."""
        while not self.is_over:
            time.sleep(0.02)
        code = None if self._status is None else os.waitstatus_to_exitcode(self._status)
        if code is None:
            self.kill()
        return Ran(code, self.said.read_text(errors="replace"))

    def kill(self) -> None:
        """Kill it and all that it has started."""
        os.killpg(self.process, signal.SIGKILL)
        if self._status is None:
            _, self._status = os.waitpid(self.process, 0)


def is_unclean(why: str) -> bool:
    """Return whether an error is that of a line of the product, not words for a person."""
    return _UNCLEAN.search(why) is not None


def last_error(ran: Ran) -> str:
    """Return the last line that names an error, with what follows it; else the last line."""
    lines = ran.errors.splitlines() or ["no word"]
    named = [number for number, line in enumerate(lines) if "error:" in line]
    return with_details(lines, named[-1]) if named else lines[-1]


def what_changed(ran: Ran) -> str:
    """Return why a command that ended well has not done what it had planned; "": it has."""
    lines = ran.errors.splitlines()
    said = (n for n, line in enumerate(lines) if any(words in line for words in _CHANGED))
    return next((with_details(lines, number) for number in said), "")


def with_details(lines: Sequence[str], number: int) -> str:
    """Return a line and those below it that are set in, as one."""
    below = itertools.takewhile(lambda line: line.startswith(" "), lines[number + 1 :])
    return "; ".join([lines[number], *map(str.strip, below)])


def is_refusal(ran: Ran) -> bool:
    """Return whether a command ended with an error in words: what torch logs before is none."""
    last = ran.errors.rpartition("Traceback")[2]
    return ran.code not in (0, None) and _ERROR.search(last) is not None


def is_bfloat16(script: Script) -> bool:
    return "bfloat16" in script.name


def what_ran(out: Path) -> str:
    """Return the plan of a run's folder in a few words; "eager" where there was none."""
    if not (out / "plan.json").exists():
        return "eager"
    plan = json.loads((out / "plan.json").read_text())
    schedule = plan["schedule"]
    name = schedule if isinstance(schedule, str) else schedule["builder"]
    return f"{plan['place']['replicas']} x {len(plan['stages'])} {name}"


def _said(errors: str) -> str:
    """Return the line in which a run says that it does something else than was planned."""
    lines = [line for line in errors.splitlines() if any(word in line for word in _EAGER_WORDS)]
    return " ".join(lines[:1])
