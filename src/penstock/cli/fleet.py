"""penstock fleet: hours and dollars of training on machines that come and go."""

import typer

from penstock.cli import face
from penstock.cli.fleet_advise import advise
from penstock.cli.fleet_batch import batch
from penstock.cli.fleet_market import market
from penstock.cli.fleet_measured import measured
from penstock.cli.fleet_predict import predict
from penstock.cli.fleet_replay import replay
from penstock.cli.fleet_run import run
from penstock.cli.fleet_volatile import volatile
from penstock.cli.group import WholeGroup
from penstock.cli.of_job import JobCommand

COMMANDS = (predict, measured, batch, market, replay, advise, volatile, run)

app = typer.Typer(
    name="fleet", cls=WholeGroup, add_completion=False, rich_markup_mode=None, no_args_is_help=False
)
for command in COMMANDS:
    app.command(cls=JobCommand if command in (predict, advise) else None)(command)


@app.callback(invoke_without_command=True)
def fleet(context: typer.Context) -> None:
    """Hours and dollars of training on machines that come and go.

    Example: penstock fleet volatile --ranks 8 --survival 0.9
    """
    if context.invoked_subcommand is None:
        face.show(context.get_help())
