"""penstock simulate: the predicted timeline, memory and step time of a saved plan."""

import shutil
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.choose import device_kinds, prepare
from penstock.choose.choose import for_plan
from penstock.cli import face
from penstock.errors import ClusterError, ProfileError
from penstock.files import Json
from penstock.job import load_job
from penstock.plan.plan import Plan
from penstock.timeline.draw import draw
from penstock.timeline.timeline import Timeline, busy_s, num_steps, step_s
from penstock.training import saved, view
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from penstock.search.candidate import Candidate

_MOST_DRAWN = 64  # ranks
_ROUNDING = 1e-6


def simulate(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="What `penstock plan` wrote.")],
    out: Annotated[Path | None, typer.Option(help="Write the timeline into this folder.")] = None,
    job: Annotated[str | None, typer.Option(help="Trace and measure this job again.")] = None,
    cluster: Annotated[Path | None, typer.Option(help="Simulate on these machines (TOML).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Predict the timeline of a plan, its memory and step time.

    The timeline opens in https://ui.perfetto.dev.  Example: penstock simulate runs/gpt/plan.json
    """
    from penstock.search.search import drained_s, evaluate

    chosen = Plan.load(plan)
    trace = None if out is None else out / "predicted.trace.json"
    if trace is not None:
        face.check_place(trace)
    basis = _basis(plan, chosen, job, cluster)
    if chosen.total_ranks > basis.cluster.num_ranks:
        message = (
            f"the plan is for {chosen.total_ranks} ranks, the cluster has {basis.cluster.num_ranks}"
        )
        raise ClusterError(message, hint="give a larger --cluster, or another plan")
    try:
        with face.busy("simulating"):
            found, timeline = evaluate(*basis, chosen)
            alone_s = drained_s(*basis, chosen)
    except ProfileError as problem:  # of a device that the plan was not made for
        hint = "give --job JOB too: it is traced, and measured or estimated for these machines"
        raise ProfileError(problem.message, hint=hint) from problem
    if trace is not None:
        timeline.save(trace)
    document = {**_document(found, timeline, basis, trace), "drained_s": alone_s}
    if as_json:
        face.show_json(document)
    else:
        _show(found, timeline, basis, document)


def _basis(path: Path, plan: Plan, job: str | None, cluster: Path | None) -> saved.Basis:
    if job is None:
        basis = saved.load_basis(path, plan)
        if cluster is None:
            return basis
        return basis._replace(cluster=prepare.machines(cluster, None, view.TERMINAL))
    with face.loading():
        from penstock.choose.other_machines import traced_for

    with face.only_results():
        there = prepare.machines(cluster, None if cluster else plan.total_ranks, view.TERMINAL)
        loaded, captured = traced_for(load_job(job), there, view.TERMINAL)
        joined, captured = for_plan(loaded, plan, captured, view.TERMINAL)
        profiles = device_kinds.profiled(captured, joined, there, view.TERMINAL)
    return saved.Basis(captured.graph, profiles, there)


def _document(
    found: "Candidate", timeline: Timeline, basis: saved.Basis, trace: Path | None
) -> dict[str, Json]:
    plan, graph = found.plan, basis.graph
    per_step = plan.step_micro_batches
    busy = [busy_s(timeline, r) / num_steps(timeline) for r in range(timeline.num_ranks)]
    return {
        "step_s": found.step_s,
        "samples_per_second": graph.samples * per_step / found.step_s,
        "tokens_per_second": graph.tokens * per_step / found.step_s,
        "usd_per_step": found.usd,
        "bubble_fraction": 1 - fmean(busy) / found.step_s if found.step_s else 0.0,
        "peak_bytes": list(found.peak_bytes),
        "busy_s": [*busy],
        "timeline": None if trace is None else str(trace),
    }


def _show(
    found: "Candidate", timeline: Timeline, basis: saved.Basis, document: dict[str, Json]
) -> None:
    face.show(str(found.plan).splitlines()[0])
    if timeline.num_ranks <= _MOST_DRAWN:
        columns = shutil.get_terminal_size((100, 24)).columns  # of text; a cell takes 5
        unit_s = step_s(timeline) / max(10, (columns - 8) // 5)
        face.show(f"\n{draw(timeline, unit_s=unit_s)}\n\na column is {format_seconds(unit_s)}\n")
    whole_s = found.step_s * num_steps(timeline)
    rows: list[tuple[object, ...]] = []
    for rank, peak in enumerate(found.peak_bytes):
        busy, cap = busy_s(timeline, rank), basis.cluster.memory_of(rank)
        share = f"{100 * busy / whole_s:.1f} %"
        rows.append((rank, format_seconds(busy), share, format_bytes(peak), format_bytes(cap)))
    face.show(face.table(("rank", "busy", "of the time", "peak bytes", "of"), rows[:_MOST_DRAWN]))
    face.show(f"\npredicted: {format_seconds(found.step_s)} per step{_rates(document)}")
    drained_s = document["drained_s"]
    if isinstance(drained_s, float) and drained_s > found.step_s * (1 + _ROUNDING):
        face.show(
            f"a step alone, from its first start to its last end: {format_seconds(drained_s)}"
        )
    if document["timeline"] is not None:
        face.say(f"wrote {document['timeline']}")


def _rates(document: dict[str, Json]) -> str:
    samples, tokens = document["samples_per_second"], document["tokens_per_second"]
    return f", {samples:,.1f} samples/s" + (f", {tokens:,.0f} tokens/s" if tokens else "")
