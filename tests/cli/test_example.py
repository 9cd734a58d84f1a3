"""penstock example: what is in the wheel is what stands in examples/, and is never written over."""

import json
import tomllib
from pathlib import Path

import pytest

import penstock
from penstock.cli.example import EXAMPLES
from tests.cli.conftest import Call

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("file", EXAMPLES)
def test_an_example_is_the_file_of_that_name(file: str, call: Call, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = call("example", file.partition(".")[0])
    assert done.code == 0, done.err
    assert f"wrote {file}" in done.out
    assert (tmp_path / file).read_text() == (ROOT / "examples" / file).read_text()


def test_all_of_them_are_data_of_the_package() -> None:
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "examples/*.txt" in told["tool"]["setuptools"]["package-data"]["penstock"]
    found = {path.stem for path in (Path(penstock.__file__).parent / "examples").glob("*.txt")}
    assert found == {file.partition(".")[0] for file in EXAMPLES}


def test_what_is_there_stays_and_what_is_not_is_told(call: Call, tmp_path) -> None:
    (tmp_path / "mine.py").write_text("mine")
    done = call("example", "gpt", "--to", tmp_path / "mine.py")
    assert (done.code, (tmp_path / "mine.py").read_text()) == (2, "mine")
    assert "is there already" in done.err
    done = call("example", "gpt", "--to", tmp_path / "other.py", "--json")
    assert json.loads(done.out) == {"written": str(tmp_path / "other.py")}
    done = call("example", "gtp")
    assert done.code == 2
    assert "there is no example gtp" in done.err
    assert (
        "gpt, hf, fluid, experts, labels, disruptions, neighbours, meta, tasks, texts, mixed"
        in done.err
    )
