"""Ports: scripts that others have written, and odd ones, beside the plain loop, as one table.

    python -m bench.ports [--json] [--only NAME ...] [--rows FILE]

Each file of bench/scripts/ports has a public script's own code, made small and with data that it
draws itself, above a line; below it stands what Penstock asks for.  Twenty scripts of the zoo stand
beside them.  Each is trained for ten steps by `penstock train --ranks 2`, and once more without
`--ranks` where that is refused; weights, buffers, state of the optimizer and losses are compared
with those of the plain loop (bench/scripts/oracle.py).

script       of whom, or file and function of the zoo
lines        of the port, without empty ones; of a script of the zoo none: it is a job already
trained      by how many replicas x stages, replicas without a plan, or in one process
difference   from the plain loop: the greatest of any tensor, over its largest element
equal        to rounding
said         why without a plan, in one process, or not at all
two_asked    what `--ranks 2` was refused with, where the script is trained without it
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.machine import machine
from bench.scripts.cases import Script, scripts
from bench.scripts.runs import Bench

PORTS = Path(__file__).parent / "scripts" / "ports"
MARK = "# -- the port --"
OTHERS = (
    "adapters:ensemble_of_functions",
    "batches:augmented",
    "buffers:vector_quantisation",
    "by_turns:critic_with_a_penalty",
    "coupled:decorrelated",
    "followers:dino",
    "kinds:reversible_block",
    "memories:state_that_goes_on_from_step_to_step",
    "optimizers:muon_for_matrices",
    "optimizers:sharpness_aware",
    "ordinary:experts_by_rows",
    "public:physics_informed",
    "public:simple_vit",
    "rollouts:ppo",
    "samplers:items_against_items_that_are_drawn",
    "shapes:packed_sequences",
    "tasks:differential_equation",
    "tasks:preferences_beside_a_reference",
    "visitors:gcn_varying",
    "visitors:qat",
)


@dataclass(frozen=True, slots=True)
class Ported:
    """What came of one script."""

    script: str
    odd: str
    lines: int
    trained: str
    difference: float | None
    equal: bool
    said: str
    two_asked: str

    @property
    def silent(self) -> bool:
        return bool(self.trained) and not self.equal

    def cells(self) -> tuple[str, ...]:
        lines = str(self.lines) if self.lines else ""
        gap = (
            "" if self.difference is None else f"{self.difference:.0e}" if self.difference else "0"
        )
        words = f"`--ranks 2`: {self.two_asked}" if self.two_asked else self.said
        return self.script, self.odd, lines, self.trained or "refused", gap, words


def port_lines(path: Path) -> int:
    """Return the lines of a port below its mark that are not empty; 0: it has no mark."""
    _, _, port = path.read_text().partition(MARK)
    return sum(bool(line.strip()) for line in port.splitlines()[1:])


def scripts_of_table() -> Iterator[Script]:
    """Yield the ports, then those of the zoo."""
    yield from scripts(PORTS)
    zoo = {f"{script.about}:{script.name}": script for script in scripts()}
    yield from (zoo[name] for name in OTHERS)


def ported(bench: Bench, script: Script) -> Ported:
    """Return what comes of a script with two ranks, or, where these are refused, without asking."""
    plan, two_asked = "default", ""
    (row,) = bench.rows_of(script, (plan,))
    if row.refused and "ranks" in row.why:
        plan, two_asked = "free", _short(row.why)
        (row,) = bench.rows_of(script, (plan,))
    out = bench.out_of(script, plan)
    name, lines = f"{script.about}:{script.name}", port_lines(script.path)
    if lines:
        name = script.path.read_text().splitlines()[0].strip('".')
    summary = {} if row.refused else json.loads((out / "summary.json").read_text())
    return Ported(
        script=name,
        odd=script.odd,
        lines=lines,
        trained="" if row.refused else trained_by(row.ran, len(summary["peak_bytes_measured"])),
        difference=row.difference,
        equal=row.equal,
        said=_short(row.why if row.refused or not row.equal else _why(row.ran, summary, out)),
        two_asked=two_asked,
    )


def trained_by(ran: str, processes: int) -> str:
    """Return by what a script was trained, in words."""
    if ran == "eager":
        return f"{processes} replicas, no plan" if processes > 1 else "one process, no plan"
    replicas, _, stages = ran.split()[:3]
    words = [f"{replicas} replicas"] if replicas != "1" else []
    words += [f"{stages} stages"] if stages != "1" else []
    return " of ".join(words) or "one process"


def _why(ran: str, summary: Mapping[str, Any], out: Path) -> str:
    """Return what a run without a plan says of itself; of one by a plan, why not by all ranks."""
    if ran == "eager":
        return str(summary["checked"])
    decisions = json.loads((out / "plan.json").read_text())["decisions"]
    return next((d["why"] for d in decisions if d["what"] == "ranks" and d["by"] != "user"), "")


def _short(words: str) -> str:
    """Return words without the beginning that all have, nor the folder of this machine."""
    words = words.removeprefix("error: ").removeprefix("one process, the plain loop itself: ")
    return re.sub(r"\S*/(\w+\.py)", r"\1", words)


HEADS = ("script", "what is odd", "lines", "trained by", "off", "said")


def table(rows: Sequence[Ported]) -> str:
    """Return rows as a table of Markdown."""
    cells = [row.cells() for row in rows]
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in cells]
    return "\n".join(
        f"| {line} |" for line in (" | ".join(HEADS), " | ".join("---" for _ in HEADS), *lines)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names to run")
    parser.add_argument("--rows", type=Path, help="a file of rows: kept there, and not run again")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept = json.loads(options.rows.read_text()) if options.rows and options.rows.exists() else {}
    rows = list[Ported]()
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(Path(temporary))
        for script in scripts_of_table():
            key = f"{script.about}:{script.name}"
            if options.only and not any(part in key for part in options.only):
                continue
            if key not in kept:
                kept[key] = asdict(ported(bench, script))
                if options.rows:
                    options.rows.write_text(json.dumps(kept, indent=1))
            rows.append(Ported(**kept[key]))
            print(*rows[-1].cells(), sep="  ", file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "machine": machine()}))
    else:
        print(table(rows))
    return 1 if any(row.silent for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
