"""penstock check: some planned steps against the plain loop: data, gradients, updates, buffers."""

import math
from functools import partial
from typing import TYPE_CHECKING, Annotated, NamedTuple, cast

import typer
from rich.table import Table

from penstock.choose import flag_text, prepare
from penstock.choose.degrees import axis_asked
from penstock.cli import face
from penstock.cli.flags import CHECK
from penstock.cli.options import asked, taking
from penstock.errors import GraphError, PlanError
from penstock.files import Json
from penstock.graph.graph import Graph
from penstock.graph.tensor.cuts import apart_only, collect_points
from penstock.job import Job
from penstock.keyed import kinds_of
from penstock.plan.plan import Plan, Units, divided, plan_by_hand
from penstock.program.passes.offload import Offloaded
from penstock.rules.rewrite import rewritten
from penstock.rules.rule import Rule, load
from penstock.rules.ruled import ruled, slices_asked
from penstock.schedule.grid import InnerAxis, evenly
from penstock.schedule.recipe import AnySchedule, built, name_of
from penstock.schedule.schedule import Schedule
from penstock.training import view
from penstock.training.options import Options

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.prove.proof import Proof

_TAKEN = *CHECK, "context", "units", "offload", "post_validation", "rules", "sums", "topology"
_IN_PLANS = "stages", "tensor", "context", "offload", "post_validation", "topology"


@taking(_TAKEN, CHECK)
def check(
    job: Annotated[str, typer.Argument(metavar="JOB", help="A file.py[:name] or module[:name].")],
    *,
    replicas: Annotated[int | None, typer.Option(min=1, help="Copies of the pipeline.")] = None,
    recompute: Annotated[bool, typer.Option(help="Repeat F before B in every stage.")] = False,
    steps: Annotated[int, typer.Option(min=1, help="Steps to compare, a few apart.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    **flags: object,
) -> None:
    """Compare cut, scheduled steps with the plain loop: data, loss, gradients, buffers, updates.

    Two stages by 1F1B, where nothing else is asked for.  Exits 1 where they differ.
    Example: penstock check examples/gpt.py --stages 4 --schedule zb_h1
    """
    with face.only_results():
        options = asked(flags, _TAKEN)
        cuts = _cuts(options, replicas, recompute=recompute)
        author, loaded = prepare.loaded(job, cuts.rules, view.TERMINAL, options.get("sums"))
        flag_text.check_fits(cuts.schedule, loaded, post_validation=cuts.post_validation)
        plan, units = options.get("plan"), options.get("units")
        if plan is not None:
            given_too = {name: options.get(name) for name in _IN_PLANS}
            given_too |= {"replicas": replicas, "recompute": recompute}
            flag_text.check_left_out(given_too)
        given = None if plan is None else Plan.load(str(plan))
        in_units = flag_text.units_asked(None if units is None else str(units))
        found = _of_each_kind(author, loaded, given, partial(_checked, cuts, steps, in_units))
    if as_json:
        face.show_json(found)
    else:
        _show(found)
    if not found["ok"]:
        raise typer.Exit(1)


class _Cuts(NamedTuple):
    """What a plan by hand is made of; what is None follows from a schedule that stands for itself.

    Without one: two stages, and one replica.
    """

    stages: int | None
    schedule: AnySchedule
    replicas: int | None
    recompute: bool
    offload: Offloaded = "none"
    post_validation: bool = False
    rules: tuple[Rule, ...] = ()
    axis: InnerAxis = InnerAxis()
    topology: str | None = None

    def sizes(self, job: Job) -> tuple[int, int]:
        """Return the stages and replicas of a plan for `job`."""
        stages, replicas = 2, 1
        if isinstance(self.schedule, Schedule):
            stages = self.schedule.num_stages
            replicas = job.micro_batches // self.schedule.num_micro_batches
        return self.stages or stages, self.replicas or replicas


def _cuts(options: Options, replicas: int | None, *, recompute: bool) -> _Cuts:
    """Return what a plan by hand is asked to be.

    Raises:   PlanError, ScheduleError: it cannot be.
    """
    rules = options.get("rules")
    ranks, context = axis_asked(options.get("tensor", 1), options.get("context"), {})
    return _Cuts(
        options.get("stages"),
        flag_text.schedule_asked(str(options.get("schedule", "one_f_one_b"))),
        replicas,
        recompute,
        flag_text.offload_asked(options.get("offload")) or "none",
        options.get("post_validation", False),
        () if rules is None else load(str(rules)),
        InnerAxis(ranks or 1, context),
        flag_text.topology_asked(options.get("topology")),
    )


def _of_each_kind(
    author: Job, job: Job, given: Plan | None, check: "Callable[..., dict[str, Json]]"
) -> dict[str, Json]:
    """Return how steps compare; where they have several shapes, or take turns, those of each.

    check:    compares those of one: of the author's job, the loaded one, and a plan.
    Raises:   PlanError: a plan is given, which is for one of several.
    """
    from penstock.batches.one_key import job_of_key, keys_of

    keys, kinds = [*keys_of(job)], kinds_of(job.data)
    if len(keys) < 2:
        return check(author, job, given)
    if given is not None:
        message = f"the plan is for one of the {kinds} of this job's steps"
        raise PlanError(message, hint="`penstock train JOB --plan PLAN` compares the steps of each")
    rows: dict[str, Json] = {}
    for key in keys:
        face.say(f"steps of {key}:")
        rows[str(key)] = check(job_of_key(author, key), job_of_key(job, key), None)
    every = [cast("dict[str, Json]", row) for row in rows.values()]
    return {"ok": all(row["ok"] for row in every), kinds: rows}


def _checked(
    cuts: _Cuts, steps: int, units: Units | None, author: Job, job: Job, given: Plan | None
) -> dict[str, Json]:
    """Return how steps of the plan compare with those of the plain loop of the author's job."""
    with face.loading():
        import torch

        from penstock.choose.choose import for_plan
        from penstock.choose.prepare import divided_step
        from penstock.device import here
        from penstock.graph.split import split
        from penstock.graph.trace import capture
        from penstock.prove.prove import Planned, prove, steps_to_prove
        from penstock.runtime.launch import run_processes, run_threads

    torch.set_num_threads(1)
    with face.busy("tracing"):
        try:
            captured = capture(job)
        except GraphError as problem:
            return _untraced(given.num_stages if given else cuts.sizes(job)[0], cuts, problem)
    if given is None:
        captured = split(captured, slices_asked(cuts.rules, captured.graph))
        captured = divided_step(captured, cuts.axis, view.TERMINAL)
        chosen = by_hand(captured.graph, job, cuts)
    else:  # its micro-batches are joined here too
        chosen, (_, captured) = given, for_plan(job, given, captured, view.TERMINAL)
    chosen = chosen if units is None else chosen.refined(captured.graph, units)
    chosen = rewritten(chosen, captured.graph, cuts.rules) if cuts.rules else chosen
    launcher = run_processes if here().can_fork else run_threads  # of one accelerator
    numbers = steps_to_prove(0, max(job.num_steps, steps), steps, chosen.averages)
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

    stages, replicas = wanted.sizes(job)
    if job.micro_batches < replicas:
        message = f"{job.micro_batches} micro-batches for {replicas} replicas"
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
    shares = evenly(job.micro_batches, replicas)
    divides = wanted.offload in ("weights", "all") and replicas > 1
    made = built(wanted.schedule, stages, max(shares))
    plan = plan_by_hand(
        graph,
        cuts,
        wanted.schedule,
        num_micro_batches=max(shares),
        shares=shares,
        num_ranks=made.num_ranks,
        replicas=replicas,
        recompute=(wanted.recompute,) * stages,
        offload=(wanted.offload,) * stages,
        clip=job.awaits_all,
        post_validation=wanted.post_validation,
        shard=("shard",) * stages if divides else (),
    )
    plan = plan.changed(
        buffers=job.buffers, wire=job.fewest_bits, sums=job.sums, topology=wanted.topology
    )
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
        if isinstance(value, dict):  # of each kind of steps
            for kind, row in cast("dict[str, dict[str, Json]]", value).items():
                face.out.print(f"steps of {kind}:")
                _show(row)
            return
        text = f"{value:.1e}" if isinstance(value, float) and value else str(value)
        table.add_row(key.replace("_", " "), text)
    face.out.print(table)
