"""Commands of a job: what stands behind `--` is the script's."""

import json
import sys
from pathlib import Path

import pytest
import typer

import penstock as ps
from penstock.cli.app import OF_JOBS, app_of
from penstock.cli.of_job import JobCommand, divided
from penstock.errors import JobError
from penstock.script import script_of
from penstock.training.saved import keep_job, kept_job, text_in
from penstock.training.train import train
from tests.cli.conftest import MLP, Call

SCRIPT = """
import argparse, sys
from tests.cli import mlp
from dataclasses import replace

parser = argparse.ArgumentParser()
parser.add_argument("--rate", type=float, required=True)
given = parser.parse_args()
assert parser.prog == "script.py"

def data(start):  # in the process that examines, the one that checks, and every rank
    assert sys.argv[1:] == ["--rate", "0.5"], sys.argv
    return mlp.data(start)

def job():
    return replace(mlp.job(), data=data, facts=lambda: {"rate": given.rate})
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_script_sees_its_arguments_in_every_process_and_when_it_goes_on(
    call: Call, script: Path, tmp_path: Path
) -> None:
    own, out = [*sys.argv], tmp_path / "run"
    shared = "--out", out, "--ranks", "2", "--json"
    first = call("train", script, "--steps", "2", *shared, "--", "--rate", "0.5")
    assert first.code == 0, first
    assert json.loads(first.out)["rate"] == 0.5
    assert script_of(kept_job(out)).arguments == ("--rate", "0.5")
    again = call("train", script, "--steps", "4", *shared, "--resume")  # with the same ones
    assert again.code == 0, again
    assert "arguments of the script as before: --rate 0.5" in again.err
    assert sys.argv == own
    assert call("export", out, "--to", tmp_path / "a.safetensors").code == 0


def test_arguments_that_a_script_does_not_take_are_a_refusal(call: Call, script: Path) -> None:
    error, hint = call("train", script, "--", "--rat", "x").refusal(2)
    assert "invalid float value: 'x'" in error  # argparse completes a name
    assert "behind ` -- `" in hint
    error, _ = call("plan", script).refusal(2)
    assert "the following arguments are required: --rate" in error


def test_unknown_flag_of_a_job_hints_at_the_place_for_arguments(call: Call, script: Path) -> None:
    error, hint = call("train", script, "--zzz", "0.5").refusal(2)
    assert "no such option: --zzz" in error
    assert "penstock train JOB -- --name value" in hint


def test_help_of_a_script_is_shown(call: Call, script: Path) -> None:
    done = call("check", script, "--", "--help")
    assert done.code == 0
    assert "usage: script.py" in done.err


def test_arguments_of_no_job_are_refused(call: Call) -> None:
    error, _ = call("export", "run", "--to", "a.safetensors", "--", "--rate", "1").refusal(2)
    assert "belongs to the script of --job" in error


def test_every_command_that_loads_a_job_takes_arguments() -> None:
    whole = typer.main.get_command(app_of())
    for name in OF_JOBS:
        made = whole.commands[name]
        assert isinstance(made, JobCommand)
        assert {"job"} & {parameter.name for parameter in made.params}


def test_only_the_first_two_dashes_divide() -> None:
    assert divided(["a", "--", "b", "--", "c"]) == (["a"], ["b", "--", "c"])
    assert divided(["a"]) == (["a"], [])


def test_arguments_from_python_belong_to_a_script() -> None:
    with pytest.raises(JobError, match="is a record"):
        train(ps.load_job(str(MLP)), arguments=["--rate", "1"])


def test_kept_job_is_found_from_elsewhere_with_its_arguments(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert text_in(tmp_path) == ""
    keep_job(tmp_path, "script.py:job -- --rate 0.5", 4)
    assert text_in(tmp_path) == "script.py:job -- --rate 0.5"
    assert kept_job(tmp_path) == f"{tmp_path}/script.py:job -- --rate 0.5"
