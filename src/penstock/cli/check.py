"""penstock check: the rewritten step against the plain one, gradient by gradient."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from penstock.cli import face
from penstock.errors import GraphError, PlanError
from penstock.files import Json
from penstock.graph.graph import Graph
from penstock.job import Job, load_job
from penstock.plan import Plan, plan_by_hand

TOLERANCE = 1e-6  # relative, where sums are made in another order
LOW_PRECISION_TOLERANCE = 2e-2  # under autocast, bfloat16 has 8 bits


def check(
    job: Annotated[str, typer.Argument(metavar="JOB", help="A file.py[:name] or module[:name].")],
    plan: Annotated[Path | None, typer.Option(help="Check this plan.")] = None,
    stages: Annotated[int, typer.Option(min=1, help="Cut into so many stages.")] = 2,
    schedule: Annotated[str, typer.Option(help="See `penstock schedule`.")] = "one_f_one_b",
    recompute: Annotated[bool, typer.Option(help="Repeat F before B in every stage.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Compare loss, gradients and buffers of the cut, scheduled step with the plain step.

    Exits 1 where they differ.  Example: penstock check examples/gpt.py --stages 4 --schedule zb_h1
    """
    with face.only_results():
        found = _checked(load_job(job), plan, stages, schedule, recompute=recompute)
    if as_json:
        face.show_json(found)
    else:
        _show(found)
    if not found["ok"]:
        raise typer.Exit(1)


def _checked(
    job: Job, path: Path | None, stages: int, schedule: str, *, recompute: bool
) -> dict[str, Json]:
    import torch

    from penstock.graph.trace import capture
    from penstock.runtime.check import check as compare
    from penstock.schedule import find

    torch.set_num_threads(1)
    find(schedule)
    given = None if path is None else Plan.load(path)
    with face.busy("tracing"):
        try:
            captured = capture(job)
        except GraphError as problem:
            return _untraced(given.num_stages if given else stages, schedule, problem)
    chosen = given or by_hand(captured.graph, job, stages, schedule, recompute=recompute)
    with face.busy("running the plain step and the planned one"):
        differences = compare(chosen, captured, job)
    worst = max(differences, key=lambda d: d.value)
    tolerance = TOLERANCE if job.autocast is None else LOW_PRECISION_TOLERANCE
    ok = all(d.value <= tolerance for d in differences)
    parts = ", ".join(f"{d.what} {'equal' if d.bitwise else f'{d.value:.1e}'}" for d in differences)
    why = parts if ok else f"{worst.where} differs by {worst.value:.3g}, more than {tolerance:g}"
    return {
        "ok": ok,
        "traced": True,
        "stages": chosen.num_stages,
        "schedule": chosen.schedule,
        "bitwise": all(d.bitwise for d in differences),
        "max_relative_difference": worst.value,
        "why": why,
    }


def by_hand(graph: Graph, job: Job, stages: int, schedule: str, *, recompute: bool) -> Plan:
    """Return a plan with cuts balanced by FLOP, all of the job's micro-batches in one pipeline."""
    from penstock.program.lower_plan import ranks_of
    from penstock.search.balance import balanced_cuts

    if stages > len(graph.cut_points) + 1:
        raise PlanError(
            f"{stages} stages need {stages - 1} cut points; the model has {len(graph.cut_points)}",
            hint=f"use at most {len(graph.cut_points) + 1} stages",
        )
    cuts = balanced_cuts(graph, [float(node.flop) for node in graph.nodes], stages)
    ranks = ranks_of(schedule, stages, job.micro_batches)
    return plan_by_hand(
        graph,
        cuts,
        schedule,
        num_micro_batches=job.micro_batches,
        num_ranks=ranks,
        recompute=(recompute,) * stages,
    )


def _untraced(stages: int, schedule: str, problem: GraphError) -> dict[str, Json]:
    return {
        "ok": False,
        "traced": False,
        "stages": stages,
        "schedule": schedule,
        "bitwise": False,
        "max_relative_difference": None,
        "why": problem.message,
    }


def _show(found: dict[str, Json]) -> None:
    table = Table(show_header=False, box=None)
    for key, value in found.items():
        text = f"{value:.1e}" if isinstance(value, float) and value else str(value)
        table.add_row(key.replace("_", " "), text)
    face.out.print(table)
