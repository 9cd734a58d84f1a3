"""App: the commands, and the one place where every error ends."""

import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

import penstock
from penstock.cli import face
from penstock.cli.group import WholeGroup
from penstock.cli.of_job import JobCommand
from penstock.garbage import collector_waits

COMMANDS = (
    "train", "join", "watch", "stop", "launch", "infer", "plan", "explain", "diff", "simulate",
    "replay", "predict", "configure", "report", "export", "schedule", "check", "doctor", "example",
    "fleet",
)  # fmt: skip
OF_JOBS = "train", "infer", "plan", "simulate", "export", "check"  # behind `--` is the script's


def app_of(names: Sequence[str] = COMMANDS) -> typer.Typer:
    """Return the command line with these commands: each takes time to load."""
    app = typer.Typer(
        cls=WholeGroup,
        add_completion=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback(invoke_without_command=True)(_penstock)
    for name in names:
        command = _command(name)
        if isinstance(command, typer.Typer):
            app.add_typer(command)
        else:
            app.command(name, cls=JobCommand if name in OF_JOBS else None)(command)
    return app


def _command(name: str) -> Callable[..., None] | typer.Typer:  # long: one for each
    match name:
        case "train":
            from penstock.cli.train import train as command
        case "join":
            from penstock.cli.join import join as command
        case "watch":
            from penstock.cli.watch import watch as command
        case "stop":
            from penstock.cli.stop import stop as command
        case "launch":
            from penstock.cli.launch import launch as command
        case "infer":
            from penstock.cli.infer import infer as command
        case "plan":
            from penstock.cli.plan import plan as command
        case "explain":
            from penstock.cli.explain import explain as command
        case "diff":
            from penstock.cli.explain import diff as command
        case "simulate":
            from penstock.cli.simulate import simulate as command
        case "replay":
            from penstock.cli.replay import replay as command
        case "predict":
            from penstock.cli.predict import predict as command
        case "configure":
            from penstock.cli.configure import configure as command
        case "report":
            from penstock.cli.report import report as command
        case "export":
            from penstock.cli.export import export as command
        case "schedule":
            from penstock.cli.schedule import schedule as command
        case "check":
            from penstock.cli.check import check as command
        case "doctor":
            from penstock.cli.doctor import doctor as command
        case "example":
            from penstock.cli.example import example as command
        case _:
            from penstock.cli.fleet import app as command
    return command


def _penstock(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Plan, predict and run the training of an unmodified PyTorch model.

    The main job: penstock train examples/gpt.py
    """
    if version:
        face.show(f"penstock {penstock.__version__}")
    elif context.invoked_subcommand is None:
        face.show(context.get_help())


def run(arguments: Sequence[str]) -> int:
    """Run the command that `arguments` name and return the exit code; nothing is raised."""
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # who reads stdout has enough
        return face.FAILED
    except (Exception, KeyboardInterrupt) as problem:  # noqa: BLE001 - nobody above: say it
        return face.fail(problem, arguments)
    finally:
        face.let_go()
    return code


def _run(arguments: Sequence[str]) -> int:
    named = next(iter(arguments), "")
    with collector_waits():
        app = app_of([named] if named in COMMANDS else COMMANDS)
    try:
        with typer.main.get_command(app).make_context("penstock", [*arguments]) as context:
            context.command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    return face.DONE
