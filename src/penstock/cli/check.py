"""penstock check: some planned steps against the plain loop: data, gradients, updates, buffers."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.table import Table

from penstock.cli import face, flags
from penstock.errors import GraphError, PlanError
from penstock.files import Json
from penstock.graph.graph import Graph
from penstock.graph.tensor.cuts import apart_only, collect_points
from penstock.job import Job
from penstock.plan.plan import Plan, Units, divided, plan_by_hand
from penstock.program.passes.offload import Offloaded
from penstock.rules.rewrite import rewritten
from penstock.rules.rule import Rule, load
from penstock.rules.ruled import ruled, slices_asked
from penstock.schedule.grid import evenly
from penstock.schedule.recipe import AnySchedule, built, name_of
from penstock.schedule.schedule import Schedule
from penstock.training import ask, prepare, view

if TYPE_CHECKING:
    from penstock.training.proof import Proof


def check(  # noqa: PLR0913 - the flags of the command
    job: Annotated[str, typer.Argument(metavar="JOB", help="A file.py[:name] or module[:name].")],
    plan: Annotated[Path | None, typer.Option(help="Check this plan.")] = None,
    stages: Annotated[
        int | None, typer.Option(min=1, help="Number of stages; default: 2, or the file's.")
    ] = None,
    schedule: Annotated[str, typer.Option(help=flags.SCHEDULE)] = "one_f_one_b",
    units: Annotated[str | None, typer.Option(metavar="block|N", help=flags.UNITS)] = None,
    replicas: Annotated[int | None, typer.Option(min=1, help="Copies of the pipeline.")] = None,
    tensor: Annotated[int, typer.Option(min=1, help=flags.TENSOR)] = 1,
    recompute: Annotated[bool, typer.Option(help="Repeat F before B in every stage.")] = False,
    offload: Annotated[str | None, typer.Option(help=flags.OFFLOAD)] = None,
    post_validation: face.PostValidation = False,
    rules: face.WithRules = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to compare, a few apart.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Compare cut, scheduled steps with the plain loop: data, loss, gradients, buffers, updates.

    Exits 1 where they differ.  Example: penstock check examples/gpt.py --stages 4 --schedule zb_h1
    """
    with face.only_results():
        asked, in_units = ask.schedule_asked(schedule), ask.units_asked(units)
        said = () if rules is None else load(rules)
        author, loaded = prepare.loaded(job, said, view.TERMINAL)
        ask.check_fits(asked, loaded, post_validation=post_validation)
        if plan is not None:
            given_too = {"--stages": stages, "--replicas": replicas, "--offload": offload}
            given_too |= {"--tensor": tensor if tensor > 1 else None}
            given_too |= {"--recompute": recompute, "--post-validation": post_validation}
            ask.check_left_out(given_too)
        given = None if plan is None else Plan.load(plan)
        cuts = _cuts(loaded, asked, stages, replicas, recompute=recompute)
        cuts = cuts._replace(offload=ask.offload_asked(offload) or "none")
        cuts = cuts._replace(post_validation=post_validation, rules=said, tensor=tensor)
        found = _checked(author, loaded, given, cuts, steps, in_units)
    if as_json:
        face.show_json(found)
    else:
        _show(found)
    if not found["ok"]:
        raise typer.Exit(1)


class _Cuts(NamedTuple):
    """What a plan by hand is made of."""

    stages: int
    schedule: AnySchedule
    replicas: int
    recompute: bool
    offload: Offloaded = "none"
    post_validation: bool = False
    rules: tuple[Rule, ...] = ()
    tensor: int = 1


def _cuts(
    job: Job, asked: AnySchedule, stages: int | None, replicas: int | None, *, recompute: bool
) -> _Cuts:
    """Return what is requested; a schedule that stands for itself fills in what is left out."""
    if isinstance(asked, Schedule):
        own = asked.num_stages, job.micro_batches // asked.num_micro_batches
    else:
        own = 2, 1
    return _Cuts(stages or own[0], asked, replicas or own[1], recompute)


def _checked(
    author: Job, job: Job, given: Plan | None, cuts: _Cuts, steps: int, units: Units | None
) -> dict[str, Json]:
    """Return how steps of the plan compare with those of the plain loop of the author's job."""
    import torch

    from penstock.device import here
    from penstock.graph.split import split
    from penstock.graph.tensor.choose import by_tensor
    from penstock.graph.trace import capture
    from penstock.runtime.launch import run_processes, run_threads
    from penstock.training.choose import for_plan
    from penstock.training.prove import Planned, prove, steps_to_prove

    torch.set_num_threads(1)
    with face.busy("tracing"):
        try:
            captured = capture(job)
        except GraphError as problem:
            return _untraced(given.num_stages if given else cuts.stages, cuts, problem)
    if given is None:
        captured = split(captured, slices_asked(cuts.rules, captured.graph))
        captured = by_tensor(captured, cuts.tensor)
        chosen = by_hand(captured.graph, job, cuts)
    else:  # its micro-batches are joined here too
        chosen, (_, captured) = given, for_plan(job, given, captured, view.TERMINAL)
    chosen = chosen if units is None else chosen.refined(captured.graph, units)
    chosen = rewritten(chosen, captured.graph, cuts.rules) if cuts.rules else chosen
    launcher = run_processes if here().can_fork else run_threads  # of one accelerator
    numbers = steps_to_prove(0, max(job.num_steps, steps), steps)
    with face.busy("running the plain and the planned steps"):
        planned = Planned(author, captured, chosen)
        proof = prove(planned, numbers, launcher=launcher)
    return _told(chosen, proof)


def _told(plan: Plan, proof: "Proof") -> dict[str, Json]:
    worst = max(row.value for row in proof.differences if row.what != "rounding")
    return {
        "ok": not proof.problem,
        "traced": True,
        "stages": plan.num_stages,
        "schedule": name_of(plan.schedule),
        "replicas": plan.replicas,
        "steps": [step + 1 for step in proof.steps],
        "bitwise": all(row.bitwise for row in proof.differences if row.what != "rounding"),
        "max_relative_difference": worst if math.isfinite(worst) else None,
        "why": proof.problem or ", ".join(map(str, proof.differences)),
        "not compared": "; ".join(proof.left_out) or "nothing was left out",
    }


def by_hand(graph: Graph, job: Job, wanted: _Cuts) -> Plan:
    """Return a plan with cuts balanced by FLOP, each replica with its part of the micro-batches."""
    from penstock.search.balance import StageEnds, balanced_cuts

    stages = wanted.stages
    if job.micro_batches < wanted.replicas:
        message = f"{job.micro_batches} micro-batches for {wanted.replicas} replicas"
        raise PlanError(message, hint=f"take at most {job.micro_batches} replicas")
    if stages > len(graph.cut_points) + 1:
        raise PlanError(
            f"{stages} stages need {stages - 1} cut points; the model has {len(graph.cut_points)}",
            hint=f"use at most {len(graph.cut_points) + 1} stages",
        )
    rules = ruled(wanted.rules, graph)
    required = rules.required if len(rules.required) < stages else frozenset[int]()
    ends = StageEnds(required, rules.forbidden | apart_only(graph))
    cuts = balanced_cuts(graph, [float(node.flop) for node in graph.nodes], stages, ends)
    shares = evenly(job.micro_batches, wanted.replicas)
    divides = wanted.offload in ("weights", "all") and wanted.replicas > 1
    made = built(wanted.schedule, stages, max(shares))
    plan = plan_by_hand(
        graph,
        cuts,
        wanted.schedule,
        num_micro_batches=max(shares),
        shares=shares,
        num_ranks=made.num_ranks,
        replicas=wanted.replicas,
        recompute=(wanted.recompute,) * stages,
        offload=(wanted.offload,) * stages,
        clip=job.awaits_all,
        post_validation=wanted.post_validation,
        shard=("shard",) * stages if divides else (),
    )
    plan = plan.changed(buffers=job.buffers, wire=job.fewest_bits, sums=job.sums)
    return divided(plan, graph, collect_points(graph))


def _untraced(stages: int, cuts: _Cuts, problem: GraphError) -> dict[str, Json]:
    return {
        "ok": False,
        "traced": False,
        "stages": stages,
        "schedule": name_of(cuts.schedule),
        "bitwise": False,
        "max_relative_difference": None,
        "why": problem.message,
        "not compared": "anything: the step cannot be traced",
    }


def _show(found: dict[str, Json]) -> None:
    table = Table(show_header=False, box=None)
    for key, value in found.items():
        text = f"{value:.1e}" if isinstance(value, float) and value else str(value)
        table.add_row(key.replace("_", " "), text)
    face.out.print(table)
