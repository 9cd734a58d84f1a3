"""Command line: one command per verb.  `penstock --help` lists them.

Exit codes: 0 done, 1 failed, 2 bad usage or bad input, 130 interrupted.  What goes wrong is told
in one line `error:` and one line `hint:` on stderr; there is never a traceback.
"""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import penstock
from penstock.cli import face
from penstock.cli.check import check
from penstock.cli.doctor import doctor
from penstock.cli.plan import plan
from penstock.cli.report import report
from penstock.cli.schedule import schedule
from penstock.cli.simulate import simulate
from penstock.cli.train import train

COMMANDS = (train, plan, simulate, report, schedule, check, doctor)

app = typer.Typer(
    name="penstock",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for command in COMMANDS:
    app.command()(command)


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that `arguments` (default: the process's) name; return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with typer.main.get_command(app).make_context("penstock", [*given]) as context:
            context.command.invoke(context)
        sys.stdout.flush()
    except typer.Exit as end:
        return end.exit_code
    except BrokenPipeError:  # who read stdout has enough
        face.close_stdout()
        return face.FAILED
    except (Exception, KeyboardInterrupt) as problem:  # noqa: BLE001 - nobody above: say it
        return face.fail(problem, given)
    return face.DONE
