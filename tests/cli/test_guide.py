"""The guide: every command of docs/guide.md is run on the script that the page ports."""

import json
import re
import shlex
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from penstock.cli import main
from tests.cli.conftest import Call
from tests.runtime.as_torchrun import as_torchrun

PAGE = (Path(__file__).parents[2] / "docs" / "guide.md").read_text()


class Shown(NamedTuple):
    """A command of the page, by the words behind `penstock`, and the lines that it shows."""

    words: list[str]
    lines: list[str]


def shown() -> list[Shown]:
    """Return the blocks of commands in order; of one that is started twice, the first start."""
    blocks = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    rows = [block.splitlines() for block in blocks]
    typed = [
        [line.partition("$ ")[2] for line in block if re.match(r"\w*\$ ", line)] for block in rows
    ]
    for first, *others in typed:  # as another node of the same run
        assert all(re.sub("node-rank .", "node-rank 0", other) == first for other in others)
    words = [shlex.split(first) for first, *_ in typed]
    lines = [[line for line in block if not re.match(r"\w*\$ ", line)] for block in rows]
    return [
        Shown(own[own.index("penstock") + 1 :], told)
        for own, told in zip(words, lines, strict=True)
    ]


def label(line: str) -> str:
    """Return what of a line no machine changes: the words before its first figure."""
    return re.split(r"\d|: |\.\.\.", line.strip())[0].strip()


def losses(folder: Path) -> list[float]:
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(row)["loss"] for row in rows]


def test_every_command_of_the_guide_gives_what_it_shows(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for script in re.findall(r"```python\n(# \w+\.py\n.*?)```", PAGE, re.DOTALL):
        Path(script[2 : script.index("\n")]).write_text(script)
    exec(compile(Path("loop.py").read_text(), "loop.py", "exec"), {})
    *alone, together = shown()
    for words, lines in alone:
        done = call(*words)
        assert done.code == 0, done
        told = done.out + done.err
        assert [line for line in lines if label(line) not in told] == []
    done = as_torchrun(partial(main, together.words), tmp_path, nodes=2)
    assert [code for code, _, _ in done] == [0, 0], done
    told = "".join(text for _, *texts in done for text in texts)
    assert [line for line in together.lines if label(line) not in told] == []
    assert losses(Path("runs/two")) == pytest.approx(losses(Path("runs/first")), rel=1e-5)
    assert Path("model.safetensors").exists()
