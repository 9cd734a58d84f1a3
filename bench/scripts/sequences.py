"""Sequences of commands on one script and one folder, as a person's days go: run, kill, resume.

Every sequence ends with a state, which is compared with the plain loop's after as many steps; that
of `unbroken`, bit for bit, with the same run never stopped, and that of `export` by what was
exported.  Commands run in processes of their own (bench/scripts/runs.py).
"""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Literal

from safetensors.torch import load_file

from bench.scripts.cases import Script
from bench.scripts.compare import (
    GROWS,
    ROUNDING,
    ROUNDING_BFLOAT16,
    ULP,
    Difference,
    difference,
    differing,
    newest_checkpoint,
    read,
    steps_of,
)
from bench.scripts.oracle import Found
from bench.scripts.runs import (
    WHY,
    Begun,
    Bench,
    Ran,
    is_bfloat16,
    is_refusal,
    is_unclean,
    last_error,
    what_changed,
    what_ran,
)
from penstock.cli import main
from penstock.training.events import EVENTS

Whom = Literal["run", "rank"]

TWO, ONE, THREE = ("--ranks", "2"), ("--ranks", "1"), ("--ranks", "3")
STAGES = ("--schedule", "one_f_one_b", "--set", "stages=2")
EAGER = ("--set", "eager=true", "--ranks", "2")
ON = ("--resume",)
ELASTIC = ("--elastic", "--set", "trial=false")
LONG = 2000  # steps of a run that does not end by itself
EVERY = 3  # steps between the checkpoints of a run that is killed
MISSING = "not exported:"
SHORT = 40  # steps in which rounding does not grow much
GROWTH = 30.0  # times as far as one rounding: a run has many
MORE = 4  # steps done at least after what disturbed a run


@dataclass(frozen=True, slots=True)
class Command:
    """`penstock train` with these options, for a share of the script's steps.

    killed:  who is killed by SIGKILL once there is a checkpoint; an elastic run goes on, and is
             asked to stop a few steps later.
    joined:  whether a process joins an elastic run that lost a rank.
    """

    options: tuple[str, ...]
    share: float = 1.0
    killed: Whom | None = None
    joined: bool = False

    @property
    def is_elastic(self) -> bool:
        return "--elastic" in self.options


SEQUENCES: Mapping[str, tuple[Command, ...]] = {
    "run": (Command(TWO),),
    "resume": (Command(TWO, 0.5), Command(TWO + ON)),
    "kill": (Command(TWO, killed="run"), Command(TWO + ON)),
    "replan": (Command(TWO, 0.5), Command(STAGES + ON)),
    "elastic": (Command(TWO + ELASTIC, killed="rank"),),
    "ranks": (Command(TWO, 0.5), Command(ONE + ON, 0.8), Command(THREE + ON)),
    "kill rank": (Command(TWO, killed="rank"), Command(TWO + ON)),
    "export": (Command(TWO, 0.5), Command(TWO + ON)),
    "join": (Command(TWO + ELASTIC, killed="rank", joined=True),),
    "eager": (Command(TWO, 0.5), Command(EAGER + ON)),
    "unbroken": (Command(ONE, 0.3), Command(ONE + ON, 0.7), Command(ONE + ON)),
}
TURNS = tuple(name for name in SEQUENCES if name != "run")


@dataclass(frozen=True, slots=True)
class Row:
    """What came of one script by one sequence."""

    script: str
    sequence: str
    plan: str
    equal: bool
    difference: float | None
    refused: bool
    why: str
    audited_to: int | None
    is_audited: bool
    seconds: float

    @property
    def silent(self) -> bool:
        """Whether it is unequal, neither refused nor said to be proved to an earlier step only."""
        return not (self.equal or self.refused or self.is_audited)

    @property
    def unclean(self) -> bool:
        return self.refused and is_unclean(self.why)

    def json(self) -> dict[str, object]:
        return {**asdict(self), "silent": self.silent, "unclean": self.unclean}

    def line(self) -> str:
        how = "SILENT" if self.silent else "refused" if self.refused else "audited"
        gap = "" if self.difference is None else f"{self.difference:.0e}"
        audited = "-" if self.audited_to is None else str(self.audited_to)
        words = f"{'equal' if self.equal else how:8}{gap:6} {audited:>5}"
        return f"{self.script:44} {self.sequence:9} {words} {self.plan:24} {self.why}"


def rows_of(bench: Bench, script: Script, names: Sequence[str]) -> Iterator[Row]:
    """Yield a row for each sequence of a script."""
    for name in names:
        yield _row(bench, script, name)


def sequences_of(asked: str, turn: int) -> tuple[str, ...]:
    """Return the sequences that are asked for.

    "": a run and another, by turns; "turns": the other one only; "all"; or names with commas.
    """
    match asked:
        case "":
            return "run", TURNS[turn % len(TURNS)]
        case "turns":
            return (TURNS[turn % len(TURNS)],)
        case "all":
            return tuple(SEQUENCES)
        case _:
            return tuple(name.strip() for name in asked.split(","))


def _row(bench: Bench, script: Script, name: str) -> Row:
    out = bench.folder / f"{script.about}-{script.name}-{name}".replace(" ", "_")
    shutil.rmtree(out, ignore_errors=True)
    start, plans, said = time.perf_counter(), list[str](), ""
    row = Row(f"{script.about}:{script.name}", name, "", False, None, False, "", None, False, 0.0)
    for command in SEQUENCES[name]:
        failed, why = _done(bench, script, command, out)
        if failed is not None:
            row = replace(row, refused=failed == "refused", why=why[:WHY])
            break
        plans.append(what_ran(out))
        said = said or why
    else:
        row = _compared(bench, script, out, row)
        row = replace(row, why=(row.why or said)[:WHY])
    return replace(row, plan=" > ".join(plans), seconds=time.perf_counter() - start)


Failed = Literal["refused", "broken"]


def _done(bench: Bench, script: Script, command: Command, out: Path) -> tuple[Failed | None, str]:
    """Return how a command failed, if it did, and in which words; else what it said of itself."""
    steps = max(1, round(command.share * script.steps))
    if command.killed is None and (out / "checkpoints").exists():
        done = steps_of(newest_checkpoint(out))
        steps = steps if done < steps else done + MORE
    words = ["train", f"{script.path}:{script.name}", "--out", str(out), *command.options]
    if command.killed is not None:
        words += ["--steps", str(LONG), "--set", f"checkpoint_every={EVERY}"]
        begun = bench.start(lambda: main(words))
        was_disturbed = _disturb(bench, begun, command, out)
        ran = begun.wait()
        if was_disturbed:
            went_on = _went_on(ran.code, command)
            if went_on:
                return None, what_changed(ran)
            return _how_it_failed(ran), last_error(ran)
    else:
        ran = bench.run(lambda: main([*words, "--steps", str(steps)]))
    if ran.code == 0:
        return None, what_changed(ran)
    if ran.code is None:
        return "broken", "still running at its limit"
    return _how_it_failed(ran), last_error(ran)


def _how_it_failed(ran: Ran) -> Failed:
    return "refused" if is_refusal(ran) else "broken"


def _went_on(code: int | None, command: Command) -> bool:
    """Return whether a disturbed command ended as it should: an elastic one by our signal."""
    return code is not None and (not command.is_elastic or code in (0, 128 + signal.SIGINT))


# -- what disturbs a run --------------------------------------------------------------------------


def _disturb(bench: Bench, begun: Begun, command: Command, out: Path) -> bool:
    """Kill who is to be killed, and let another join; return whether it came to that."""
    if not _until(begun, lambda: any((out / "checkpoints").glob("step-*"))):
        return False
    if command.killed == "run":
        begun.kill()
        return True
    ranks = children(begun.process)
    if not ranks:
        return False
    os.kill(ranks[min(1, len(ranks) - 1)], signal.SIGKILL)
    if not command.is_elastic:
        return True
    joiner = None
    if _until(begun, lambda: "lost" in _events(out)) and command.joined:
        joiner = bench.start(lambda: main(["join", str(out), "--limit", "120"]))
        _until(begun, lambda: "joined" in _events(out) or joiner.is_over)
    before = _steps_told(out)
    _until(begun, lambda: _steps_told(out) >= before + MORE)
    if not begun.is_over:
        os.kill(begun.process, signal.SIGINT)
    begun.wait()
    if joiner is not None:
        joiner.wait()
    return True


def _until(begun: Begun, is_so: Callable[[], bool]) -> bool:
    """Wait until something is so; return False if the process ended before."""
    while not is_so():
        if begun.is_over:
            return False
        time.sleep(0.001)
    return True


def children(process: int) -> list[int]:
    """Return the processes that one has started and not lost, in the order of their start."""
    path = Path(f"/proc/{process}/task/{process}/children")
    return [int(word) for word in path.read_text().split()] if path.exists() else []


def _events(out: Path) -> list[str]:
    """Return what has happened to the members of an elastic run."""
    path = out / EVENTS
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["what"] for line in lines if line.endswith("}")]


def _steps_told(out: Path) -> int:
    path = out / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


# -- compared -------------------------------------------------------------------------------------


def _compared(bench: Bench, script: Script, out: Path, row: Row) -> Row:
    """Return the row with what the folder's newest state is beside what it should be."""
    steps = steps_of(newest_checkpoint(out))
    if row.sequence == "unbroken":
        return _beside_unbroken(bench, script, steps, out, row)
    loop = bench.loop(script, steps)
    if isinstance(loop, str):
        return replace(row, why=f"the plain loop fails: {loop}"[:WHY])
    found = read(out)
    if row.sequence == "export":
        exported, words = _exported(bench, out, loop)
        if exported is None:
            return replace(row, refused=not words.startswith(MISSING), why=words[:WHY])
        found = exported._replace(losses=found.losses)
        loop = loop._replace(tensors={k: v for k, v in loop.tensors.items() if k in found.tensors})
        loop = loop._replace(plain={})
    most = difference(found, loop)
    limit = ROUNDING_BFLOAT16 if is_bfloat16(script) else ROUNDING
    equal, why = most.value <= limit * max(1.0, steps / 10), ""
    if not equal:
        why = f"{most.where} after {steps} steps"
        moved = bench.loop(script, steps, moved=ULP) if steps > SHORT else "few steps"
        parts = not isinstance(moved, str) and parts_as(found.losses, loop.losses, moved.losses)
        if parts or bench.is_rounding(most.value, script, steps, loop):
            equal, why = True, f"{GROWS}: {why}"
    audited_to = audited(out)
    return replace(
        row,
        equal=equal,
        difference=most.value,
        why=why,
        audited_to=audited_to,
        is_audited=_is_right_up_to(audited_to, found, loop, limit),
    )


def parts_as(found: Sequence[float], loop: Sequence[float], moved: Sequence[float]) -> bool:
    """Return whether losses part from the loop's no faster than those of a loop whose first weights
    were moved by a rounding: where that grows in a script, no order of sums gives the same.
    """
    far = list(accumulate((abs(a - b) for a, b in zip(moved, loop, strict=True)), max))
    rows = zip(found, loop, far, strict=True)
    return all(abs(a - b) <= GROWTH * max(d, ROUNDING * abs(b)) for a, b, d in rows)


def _is_right_up_to(step: int | None, found: Found, loop: Found, limit: float) -> bool:
    """Return whether the run says to be proved up to an earlier step, and is right up to there."""
    if step is None or not 0 < step < len(loop.losses):
        return False
    empty = Found({}, {}, loop.losses[:step])
    return difference(Found({}, {}, found.losses[:step]), empty).value <= limit * max(1, step / 10)


def _beside_unbroken(bench: Bench, script: Script, steps: int, out: Path, row: Row) -> Row:
    """Return the row compared with the same command for all steps at once, bit for bit.

    By the same plan: a search may find another one, by times that it measures again.
    """
    whole, plan = out.with_name(f"{out.name}-whole"), out / "plan.json"
    shutil.rmtree(whole, ignore_errors=True)
    command = Command(("--plan", str(plan)) if plan.exists() else ONE)
    failed, why = _done(bench, replace_steps(script, steps), command, whole)
    if failed is not None:
        return replace(row, refused=failed == "refused", why=f"unbroken: {why}"[:WHY])
    found, expected = read(out), read(whole)
    lines = list(differing(found, expected))
    most = difference(found, expected) if lines else Difference(0.0, "")
    equal = not lines and found.losses == expected.losses
    return replace(
        row,
        equal=equal,
        difference=most.value,
        why="" if equal else (lines or ["losses"])[0],
        audited_to=audited(out),
    )


def replace_steps(script: Script, steps: int) -> Script:
    """Return the script, to be run for so many steps."""
    return script._replace(steps=steps)


def _exported(bench: Bench, out: Path, loop: Found) -> tuple[Found | None, str]:
    """Return what `penstock export` gives, by the loop's keys, or the words of its error."""
    path = out / "exported.safetensors"
    ran = bench.run(lambda: main(["export", str(out), "--to", str(path)]))
    if ran.code != 0:
        return None, last_error(ran)
    values = load_file(path)
    both = {f"{kind}/{name}": x for kind in ("weights", "buffers") for name, x in values.items()}
    kept = {key: both[key] for key in loop.tensors if key in both}
    missing = [key for key in loop.tensors if key.startswith("weights/") and key not in kept]
    if missing:
        return None, f"{MISSING} {missing[0]}"
    return Found(kept, {}, []), ""


def audited(out: Path) -> int | None:
    """Return the step up to which audits have proved a run; None where it does not say."""
    path = out / "summary.json"
    found = json.loads(path.read_text()).get("audited_to") if path.exists() else None
    return found if isinstance(found, int) else None
