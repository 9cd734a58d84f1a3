"""Features: whether the names in docs/beside.md are there, ours and those of others.

    python -m bench.features [--peers FOLDER]

A name of Penstock is `ps.x`, a field `Job.x`, a command `penstock x`, or an option of a run
(docs/options.md).  A name of the others is looked for in the text of their packages, which lie in
FOLDER by name: lightning, accelerate, transformers, deepspeed, torchtitan.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import NamedTuple

import penstock as ps
from penstock.cli.app import COMMANDS
from penstock.training.options import OPTIONS

PAGE = Path(__file__).parents[1] / "docs" / "beside.md"
PEERS: Mapping[str, tuple[str, ...]] = {
    "Lightning": ("lightning",),
    "Accelerate, Trainer": ("accelerate", "transformers"),
    "DeepSpeed": ("deepspeed",),
    "torchtitan": ("torchtitan",),
}
OURS = "Penstock"
_FOREIGN = ("peft",)  # a package of others that our cells name
_OF_TRAIN = ("on_step",)  # of Python alone
_TEXT = (".py", ".md", ".pyi")


class Cell(NamedTuple):
    """One cell of the page: of which row, of whom, and its words."""

    row: str
    who: str
    text: str

    def names(self) -> list[str]:
        """Return what stands between backticks."""
        return re.findall(r"`([^`]+)`", self.text)


def cells(page: Path = PAGE) -> Iterator[Cell]:
    """Yield the cells of all tables, row by row."""
    head: Sequence[str] = ()
    for line in page.read_text().splitlines():
        if not line.startswith("|") or set(line) <= set("|- "):
            continue
        row = [cell.strip() for cell in line.strip("|").split("|")]
        if not row[0]:
            head = row
        else:
            yield from (
                Cell(row[0], who, text) for who, text in zip(head[1:], row[1:], strict=True)
            )


def is_ours(name: str) -> bool:
    """Return whether Penstock has a name."""
    first, _, rest = name.partition(".")
    if name.startswith("penstock "):
        return name.split()[1] in COMMANDS
    if first == "Job":
        return rest in {field.name for field in fields(ps.Job)}
    if first == "ps":
        place: object = ps
        for part in rest.split("."):
            place = getattr(place, part, None)
        return place is not None
    return name in {*OPTIONS, *_FOREIGN, *_OF_TRAIN}


def is_theirs(name: str, packages: Sequence[str], folder: Path) -> bool:
    """Return whether a name stands in the text of one of some packages, or is a file of it."""
    return any(name in text for package in packages for text in _texts(folder / package))


@cache
def _texts(package: Path) -> tuple[str, ...]:
    paths = [path for path in package.rglob("*") if path.is_file()]
    names = "\n".join(str(path.relative_to(package.parent)) for path in paths)
    return names, *(p.read_text(errors="replace") for p in paths if p.suffix in _TEXT)


def missing(folder: Path | None = None) -> Iterator[str]:
    """Yield what a cell names and nobody has; an own cell without a name and without a reason.

    folder:  of the others' packages; None: only ours are looked for.
    """
    for cell in cells():
        if cell.who == OURS:
            if not cell.names() and not cell.text.startswith("no: "):
                yield f"{cell.row}: neither a name nor a reason: {cell.text}"
            found = [name for name in cell.names() if not is_ours(name)]
        elif folder is not None:
            found = [n for n in cell.names() if not is_theirs(n, PEERS[cell.who], folder)]
        else:
            found = []
        yield from (f"{cell.row}: {cell.who} has no {name}" for name in found)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", type=Path, help="a folder of the others' packages")
    options = parser.parse_args()
    found = list(missing(options.peers))
    print(*found, sep="\n", end="\n" if found else "")
    rows = {cell.row for cell in cells()}
    refused = [cell for cell in cells() if cell.who == OURS and cell.text.startswith("no: ")]
    print(f"{len(rows)} rows, {len(refused)} not here, {len(found)} names missing")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
