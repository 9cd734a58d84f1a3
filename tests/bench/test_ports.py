"""bench.ports: forty scripts and more, their lines, what trains them, and a row that is right."""

import ast
from pathlib import Path

import pytest
import torch.utils.checkpoint

from bench.ports import OTHERS, PORTS, Ported, port_lines, scripts_of_table, table, trained_by
from bench.scripts.cases import Script
from bench.scripts.oracle import load, plain_loop

ALL = list(scripts_of_table())
PORTED = [script for script in ALL if script.path.parent == PORTS]


def test_there_are_twenty_ports_and_forty_scripts() -> None:
    assert len(PORTED) >= 20
    assert len(ALL) == len(PORTED) + len(OTHERS) >= 40
    for script in PORTED:
        assert 3 <= port_lines(script.path) <= 60
        assert script.odd.endswith(".")


def test_a_port_changes_nothing_above_its_mark() -> None:
    """Nothing of Penstock is named there but its import."""
    for script in PORTED:
        above, _, _ = script.path.read_text().partition("# -- the port --")
        names = {node.id for node in ast.walk(ast.parse(above)) if isinstance(node, ast.Name)}
        assert "ps" not in names


def test_lines_of_a_port_are_those_below_its_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("x = 1\n# -- the port -----\n\ny = 2\n\nz = 3\n")
    assert port_lines(path) == 2
    path.write_text("x = 1\n")
    assert port_lines(path) == 0


@pytest.mark.parametrize(
    ("ran", "processes", "words"),
    [
        ("eager", 1, "one process, no plan"),
        ("eager", 2, "2 replicas, no plan"),
        ("2 x 1 one_f_one_b", 2, "2 replicas"),
        ("1 x 2 gpipe", 2, "2 stages"),
        ("2 x 2 gpipe", 4, "2 replicas of 2 stages"),
        ("1 x 1 gpipe", 1, "one process"),
    ],
)
def test_what_trains_a_script_is_told_in_words(ran: str, processes: int, words: str) -> None:
    assert trained_by(ran, processes) == words


def test_a_row_that_is_unequal_is_silent_and_one_that_is_refused_is_not() -> None:
    row = Ported("a", "odd | it is.", 3, "2 replicas", 0.5, False, "weights/x", "")
    assert row.silent
    assert not Ported("a", "odd.", 3, "", None, False, "no", "").silent
    assert (
        table([row]).splitlines()[2]
        == r"| a | odd \| it is. | 3 | 2 replicas | 5e-01 | weights/x |"
    )


def loss_of(script: Script) -> list[float]:
    return plain_loop(load(script.path, script.name), 2).losses


@pytest.mark.parametrize("name", ["byol", "lora", "timm_train"])
def test_a_port_is_trained_by_the_plain_loop(name: str, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(PORTS))
    checkpoint = torch.utils.checkpoint.checkpoint
    monkeypatch.setattr(
        "torch.utils.checkpoint.checkpoint", checkpoint
    )  # `load` puts another there
    (script,) = [script for script in PORTED if script.about == name]
    losses = loss_of(script)
    assert len(losses) == 2
    assert losses[0] != losses[1]
