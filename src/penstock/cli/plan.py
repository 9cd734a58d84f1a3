"""penstock plan: find the fastest, cheapest or smallest way to train a job, and show why."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import face, prepare, saved
from penstock.cli.choose import best
from penstock.errors import PlanError
from penstock.graph.graph import Graph
from penstock.job import load_job
from penstock.schedule import find
from penstock.search import Objective, Wish


def plan(  # noqa: PLR0913 - the flags of a command
    job: Annotated[str, typer.Argument(metavar="JOB", help="A file.py[:name] or module[:name].")],
    cluster: Annotated[
        Path | None, typer.Option(help="Machines (TOML); default: this machine.")
    ] = None,
    objective: Annotated[str, typer.Option(help="One of time, cost, memory.")] = "time",
    out: Annotated[Path | None, typer.Option(help="Write the plan to this file.")] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks in all.")] = None,
    replicas: Annotated[int | None, typer.Option(min=1, help="Copies of the pipeline.")] = None,
    stages: Annotated[int | None, typer.Option(min=1, help="Stages of a pipeline.")] = None,
    schedule: Annotated[str | None, typer.Option(help="See `penstock schedule`.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Search for the best plan, and show why it is best.

    Example: penstock plan examples/gpt.py --ranks 2 --out plan.json
    """
    aim = _objective(objective)
    if schedule is not None:
        find(schedule)
    if out is not None:
        face.check_place(out)
    wish = Wish(ranks=ranks, replicas=replicas, stages=stages, schedule=schedule)
    with face.only_results():
        loaded = load_job(job)
        captured = prepare.traced(loaded)
        _check_stages(captured.graph, stages)
        there = prepare.machines(cluster, ranks)
        found, profiles = best(loaded, wish, captured, there, objective=aim)
    if out is not None:
        saved.save_plan(out, found.plan, saved.Basis(found.captured.graph, profiles, there))
    if as_json:
        face.show_json(found.plan.to_json())
    else:
        face.show(str(found.plan))
    if out is not None:
        face.say(f"wrote {out}")


def _objective(text: str) -> Objective:
    match text:
        case "time" | "cost" | "memory":
            return text
        case _:
            message = f"there is no objective {text!r}"
            raise PlanError(message, hint="give --objective time, cost or memory")


def _check_stages(graph: Graph, stages: int | None) -> None:
    most = len(graph.cut_points) + 1
    if stages is not None and stages > most:
        message = f"{stages} stages need {stages - 1} cut points; the model has {most - 1}"
        raise PlanError(message, hint=f"use at most {most} stages")
