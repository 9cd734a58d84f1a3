"""App: the commands, and the one place where every error ends."""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import penstock
from penstock.cli import face
from penstock.cli.check import check
from penstock.cli.configure import configure
from penstock.cli.doctor import doctor
from penstock.cli.explain import diff, explain
from penstock.cli.export import export
from penstock.cli.fleet import app as fleet
from penstock.cli.infer import infer
from penstock.cli.join import join
from penstock.cli.launch import launch
from penstock.cli.of_job import JobCommand
from penstock.cli.plan import plan
from penstock.cli.predict import predict
from penstock.cli.replay import replay
from penstock.cli.report import report
from penstock.cli.schedule import schedule
from penstock.cli.simulate import simulate
from penstock.cli.stop import stop
from penstock.cli.train import train
from penstock.cli.watch import watch

COMMANDS = (
    train, join, watch, stop, launch, infer, plan, explain, diff, simulate, replay, predict,
    configure, report, export, schedule, check, doctor,
)  # fmt: skip
OF_JOBS = train, infer, plan, simulate, export, check  # behind `--` they take the script's

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for command in COMMANDS:
    app.command(cls=JobCommand if command in OF_JOBS else None)(command)
app.add_typer(fleet)


@app.callback(invoke_without_command=True)
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
    try:
        with typer.main.get_command(app).make_context("penstock", [*arguments]) as context:
            context.command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    return face.DONE
