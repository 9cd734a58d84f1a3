"""The way in: help, version, bad usage, Ctrl-C, a closed or full stdout, and what is imported."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

import penstock
from penstock import terminal
from penstock.cli import app, face, fleet, main
from penstock.errors import GraphError, JobError, ProgramError, RunError
from tests.cli.conftest import MLP, PENSTOCK, Call, Done

COMMANDS = (
    "train",
    "join",
    "watch",
    "stop",
    "launch",
    "infer",
    "plan",
    "explain",
    "diff",
    "simulate",
    "replay",
    "predict",
    "configure",
    "report",
    "export",
    "schedule",
    "check",
    "doctor",
    "example",
    "fleet",
)
OF_FLEET = tuple(command.__name__ for command in fleet.COMMANDS)
ENDS = (*COMMANDS[:-1], *(f"fleet {name}" for name in OF_FLEET))  # that do something


def test_help_lists_every_command_in_order(call: Call) -> None:
    done = call("--help")
    listed = re.findall(r"^  (\w+)  ", done.out.partition("Commands:")[2], re.MULTILINE)
    assert (done.code, done.err, tuple(listed)) == (0, "", COMMANDS)
    assert done.out == call("-h").out == call().out


def test_help_of_the_fleet_lists_its_commands_in_order(call: Call) -> None:
    done = call("fleet", "--help")
    listed = re.findall(r"^  (\w+)  ", done.out.partition("Commands:")[2], re.MULTILINE)
    assert (done.code, done.err, tuple(listed)) == (0, "", OF_FLEET)
    assert done.out == call("fleet").out


@pytest.mark.parametrize("name", ENDS)
def test_help_of_a_command_is_short_and_has_an_example(call: Call, name: str) -> None:
    done = call(*name.split(), "-h")
    text = " ".join(done.out.split())
    assert done.code == 0
    assert f"Example: penstock {name}" in text
    assert len(done.out.splitlines()) <= 30
    assert done.out.isascii()


@pytest.mark.parametrize("name", ENDS)
def test_command_has_at_most_ten_flags(name: str) -> None:
    """`fleet advise` has one more: what a run of the job has measured; `fleet replay` the past on
    which policies are fitted, `fleet predict` what ranks cost.  `train` and `plan` have ten beside
    `--json`, which each command has.
    """
    command = typer.main.get_command(app.app_of())
    for word in name.split():
        command = command.commands[word]
    helps = "help", "list_all"
    options = [each for each in command.params if each.param_type_name == "option"]
    flags = [each for each in options if each.name not in helps and not each.hidden]
    most = {
        "fleet advise": 11,
        "fleet replay": 11,
        "fleet predict": 11,
        "train": 11,
        "plan": 11,
    }.get(name, 10)
    assert 1 <= len(flags) <= most
    assert "--json" in [opt for flag in flags for opt in flag.opts]


def test_version_is_that_of_the_package(call: Call) -> None:
    assert call("--version") == Done(0, f"penstock {penstock.__version__}\n", "")


@pytest.mark.parametrize("name", ["", "fleet"])
def test_help_cuts_no_description_where_a_terminal_is_narrow(
    call: Call, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = call(*name.split(), "-h").out.splitlines()
    assert max(map(len, lines)) <= 80
    listed = lines[lines.index("Commands:") + 1 :]
    assert len(listed) >= len(OF_FLEET)
    assert not [line for line in listed if "..." in line]


# Bad usage


def test_error_is_one_json_document_too_where_json_is_asked_for(call: Call) -> None:
    done = call("train", "nofile.py", "--json")
    error, hint = done.refusal(2)
    told = {"error": error, "evidence": [], "hint": hint, "code": 2}
    assert json.loads(done.out) == told
    assert call("train", "nofile.py", "--", "--json").out == ""  # that is the script's


@pytest.mark.parametrize("name", ["watch", "stop", "report", "join", "replay", "explain"])
def test_folder_that_is_not_there_is_bad_input(call: Call, name: str, tmp_path: Path) -> None:
    error, _ = call(name, tmp_path / "nowhere").refusal(2)
    assert "nowhere" in error


def test_a_command_loads_no_other_one() -> None:
    program = (
        "import sys\nfrom penstock.cli import main\nmain(['train', 'nofile.py'])\n"
        "heavy = {'numba', 'scipy', 'torch', 'numpy', 'penstock.cli.plan'} & {*sys.modules}\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_unknown_command_is_answered_with_the_nearest_one(call: Call) -> None:
    error, hint = call("schedul").refusal(2)
    assert error == "no such command 'schedul' (penstock schedul)"
    assert hint.startswith("did you mean schedule?")


def test_unknown_flag_is_answered_with_the_nearest_one(call: Call) -> None:
    error, hint = call("schedule", "--stagez", "3").refusal(2)
    assert error == "no such option: --stagez (penstock schedule --stagez 3)"
    assert hint.startswith("did you mean --stages")


@pytest.mark.parametrize("name", ["train", "plan", "simulate", "report", "check"])
def test_missing_argument_is_refused_with_its_name(call: Call, name: str) -> None:
    error, hint = call(name).refusal(2)
    assert error.startswith("missing argument")
    assert hint == f"`penstock {name} --help` shows what it takes"


@pytest.mark.parametrize("arguments", [("schedule", "gpipe", "more"), ("schedule", "--stages")])
def test_usage_that_does_not_fit_is_refused_with_what_was_typed(
    call: Call, arguments: tuple[str, ...]
) -> None:
    error, _ = call(*arguments).refusal(2)
    assert error.endswith(f"(penstock {' '.join(arguments)})")


# Whatever goes wrong


@pytest.mark.parametrize(
    ("problem", "code", "message"),
    [
        (JobError("no job", hint="h"), 2, "no job"),
        (GraphError("no graph"), 2, "no graph"),
        (RunError("rank 1 failed"), 1, "rank 1 failed"),
        (ProgramError("hangs"), 1, "hangs"),
        (OSError(errno.ENOSPC, "No space left on device", "/a/b"), 1, "/a/b: No space left"),
        (OSError(errno.EIO, "Input/output error"), 1, "Input/output error"),
        (OSError("bare"), 1, "bare"),
        (MemoryError(), 1, "MemoryError"),
        (ValueError(""), 1, "ValueError: no message"),
    ],
)
def test_problem_ends_in_its_exit_code_with_error_and_hint(
    capfd: pytest.CaptureFixture[str], problem: Exception, code: int, message: str
) -> None:
    found = Done(face.fail(problem), *capfd.readouterr())
    assert found.refusal(code)[0].startswith(message)


def test_evidence_is_indented_and_of_a_ranks_frames_only_the_last_is_kept(
    capfd: pytest.CaptureFixture[str],
) -> None:
    frames = '  File "a.py", line 1, in f\n    g()\n  File "b.py", line 2, in g\n    h()\n'
    problem = RunError(f"rank 1 failed\nTraceback (most recent call last):\n{frames}KeyError: 3\n")
    face.fail(problem)
    err = capfd.readouterr().err.splitlines()
    assert err[0] == "error: rank 1 failed"
    assert [line.strip() for line in err[1:-1]] == [
        'File "b.py", line 2, in g',
        "h()",
        "KeyError: 3",
    ]


def test_error_of_penstock_itself_names_its_lines(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cli.schedule.schedule_asked", len)  # 5 is no schedule
    done = call("schedule", "gpipe")
    error, hint = done.refusal(1)
    assert error == "AttributeError: 'int' object has no attribute 'units'"
    assert "bug" in hint
    assert "schedule.py:" in done.err


def test_broken_install_is_told_in_two_lines(spawn: Call, tmp_path: Path) -> None:
    (tmp_path / "rich.py").write_text("raise ImportError('rich is broken')\n")
    error, hint = spawn("schedule", env={"PYTHONPATH": str(tmp_path)}).refusal(1)
    assert error == "rich is broken"
    assert "install" in hint


# Ctrl-C, stdout


def test_interrupt_in_the_midst_of_measuring_ends_with_one_line(tmp_path: Path) -> None:
    """As Ctrl-C does, the signal reaches every process of the group, companions too."""
    plan = [*PENSTOCK, "plan", f"{MLP}:interrupted", "--ranks", "2", "--out", tmp_path / "p.json"]
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(plan, capture_output=True, text=True, start_new_session=True, env=env)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.splitlines()[-1] == "interrupted"
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("*.json"))


def test_interrupt_while_the_commands_are_loaded_ends_with_one_line() -> None:
    program = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'penstock.cli.app':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from penstock.cli import main\n"
        "sys.exit(main(['schedule']))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


LONG = ("schedule", "gpipe", "--stages", "50", "--micro-batches", "99", "--json")


@pytest.mark.parametrize("arguments", [("schedule",), LONG, ("-h",)])
@pytest.mark.sampled(2)
def test_reader_that_goes_away_is_no_news(arguments: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([*PENSTOCK, *arguments], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.returncode == 1
    assert all(line.endswith(" ...") for line in done.stderr.splitlines())


@pytest.mark.parametrize("arguments", [("schedule", "--json"), LONG])
@pytest.mark.sampled(2)
def test_stdout_without_room_is_an_error(spawn: Call, arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        error, _ = spawn(*arguments, stdout=full).refusal(1)
    assert error == "stdout: No space left on device"


def test_closed_stderr_does_not_change_how_a_command_ends(spawn: Call) -> None:
    read, write = os.pipe()
    os.close(read)
    assert spawn("schedule", "nothing", stderr=write).code == 2
    os.close(write)


# What is imported


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("schedule",),
        ("schedule", "zb_h1"),
        ("report", "nowhere"),
        ("train", "nofile.py"),
        ("plan", "nofile.py:job", "--", "--rate", "1"),
    ],
)
@pytest.mark.sampled(2)
def test_command_that_needs_no_torch_imports_none(arguments: tuple[str, ...]) -> None:
    program = (
        "import sys\nfrom penstock.cli import main\n"
        f"main({list(arguments)!r})\nsys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 0


def test_hashes_are_alike_in_all_processes_but_where_one_has_chosen() -> None:
    def seen(**more: str) -> list[str]:
        plain = {name: each for name, each in os.environ.items() if name != "PYTHONHASHSEED"}
        program = (
            "import sys; from penstock.cli import main; print(hash('pipe'), file=sys.stderr); "
            "sys.exit(main())"
        )
        command = [sys.executable, "-c", program, "--version"]
        done = subprocess.run(command, capture_output=True, text=True, env={**plain, **more})
        assert done.returncode == 0
        return done.stderr.split()

    (_, first), (_, second) = seen(), seen()
    assert first == second
    assert seen(PYTHONHASHSEED="0") == [first]
    assert seen(PYTHONHASHSEED="7") != [first]


def test_package_runs_as_a_module_too() -> None:
    command = [sys.executable, "-m", "penstock", "schedule", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0
    assert json.loads(done.stdout)["schedules"]


def test_main_takes_the_arguments_of_the_process(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["penstock", "--version"])
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # else it begins anew with one
    assert main() == 0
    assert capfd.readouterr().out.startswith("penstock ")


def test_signal_is_the_one_that_ctrl_c_sends() -> None:
    assert face.INTERRUPTED == 128 + signal.SIGINT


# Face


def test_table_aligns_words_left_and_numbers_right() -> None:
    rows = [("a", 1, "x"), ("bcd", 22, "")]
    assert face.table(("n", "of", ""), rows) == "n    of\na     1  x\nbcd  22"


def test_json_that_is_no_number_becomes_null(capfd: pytest.CaptureFixture[str]) -> None:
    face.show_json({"a": float("nan"), "b": [float("inf"), 1.5]})
    assert json.loads(capfd.readouterr().out) == {"a": None, "b": [None, 1.5]}


def test_place_for_a_file_is_refused_before_time_is_spent(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    face.check_place(tmp_path / "file")
    face.check_place(tmp_path / "new" / "deeper" / "file")
    for wrong in (tmp_path, tmp_path / "file" / "below", Path("/dev/full")):
        with pytest.raises(OSError, match=r"directory|regular file") as caught:
            face.check_place(wrong)
        assert caught.value.filename


def test_what_is_begun_has_a_line_at_once_where_stderr_is_no_terminal(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with face.busy("waiting"):
        assert capfd.readouterr() == ("", "waiting ...\n")
        with face.progress("searching") as tell:
            tell(1, 2)
    assert capfd.readouterr() == ("", "searching ...\n")


def test_how_far_something_is_has_a_line_at_times_where_stderr_is_no_terminal(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 9.9, 10.0, 11.0, 20.1])
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with face.progress("searching") as tell:
        for done, total in ((1, 2000), (2, 2000), (3, 2000), (4, 0)):
            tell(done, total)
    said = "searching ...\nsearching: 2 of 2,000\nsearching: 4\n"
    assert capfd.readouterr() == ("", said)
