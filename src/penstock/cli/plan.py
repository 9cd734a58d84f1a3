"""penstock plan: find the fastest, cheapest or smallest way to train a job, and show why."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from penstock import taken
from penstock.choose import device_kinds, flag_text, prepare
from penstock.choose.choose import (
    Machines,
    SearchAim,
    Searched,
    best,
    decided,
    found_in_units,
)
from penstock.choose.contradictions import check_asked
from penstock.choose.degrees import axis_asked
from penstock.choose.settle import CheckOptions
from penstock.cli import face
from penstock.cli.flags import PLAN
from penstock.cli.options import asked, taking
from penstock.cluster.cluster import Cluster
from penstock.errors import PlanError
from penstock.files import Json
from penstock.graph.graph import Graph
from penstock.plan.fits import divided_what
from penstock.plan.plan import Plan, Prediction, repeats_all
from penstock.rules.rule import load
from penstock.schedule.recipe import name_of
from penstock.search.candidate import Candidate, Objective
from penstock.search.reasons import wire_words
from penstock.search.shapes import Fixed, RankExchange
from penstock.search.whole import whole_stages
from penstock.training import saved, view
from penstock.training.options import Options
from penstock.units import format_bytes, format_seconds

_MOST_SHOWN = 10  # plans of the front, unless they differ by more than
_MOST_SLACK = 10.0
_UNDIVIDED = "units", "offload", "post_validation", "rules", "sums"
_TAKEN = *PLAN, "tensor", "context", *_UNDIVIDED, "topology", "check"


@taking(_TAKEN, PLAN)
def plan(
    job: Annotated[str, typer.Argument(metavar="JOB", help="A file.py[:name] or module[:name].")],
    *,
    objective: Annotated[str, typer.Option(help="One of time, cost, memory.")] = "time",
    out: Annotated[Path | None, typer.Option(help="Write the plan to this file.")] = None,
    limit: Annotated[
        float | None,
        typer.Option(min=0.0, help="Seconds to search, after tracing; then the best so far."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print plan, front and tally as JSON.")
    ] = False,
    **flags: object,
) -> None:
    """Search for the best plan, and show why it is best.

    Example: penstock plan examples/gpt.py --ranks 2 --out plan.json
    """
    options = asked(flags, _TAKEN)
    aim = SearchAim(_objective(objective), limit, with_front=True)
    if out is not None:
        face.check_place(out)
    fixed = _fixed(options)
    with face.only_results():
        chosen, found, basis = _planned(job, options, fixed, aim)
    if out is not None:
        saved.save_plan(out, chosen, basis)
    _show(chosen, found, out, as_json=as_json)


def _planned(
    job: str, options: Options, fixed: Fixed, aim: SearchAim
) -> tuple[Plan, Searched, saved.Basis]:
    """Return the plan, all that was found, and what the plan rests on."""
    with face.loading():
        from penstock.choose.keys import cut_alike, traced_keys, with_keys
        from penstock.choose.other_machines import Looking, hands, planning

    room, units = flag_text.memory_asked(options.get("memory")), options.get("units")
    cut = flag_text.units_asked(None if units is None else str(units))
    file = None if options.get("cluster") is None else Path(str(options.get("cluster")))
    loaded = prepare.loaded(job, fixed.rules, view.TERMINAL, fixed.exchange.sums).job
    flag_text.check_fits(fixed.schedule, loaded, post_validation=fixed.exchange.post_validation)
    ranks = fixed.ranks or (Cluster.here() if file is None else Cluster.load(file)).num_ranks
    check_asked(loaded, fixed, ranks)
    if file is None:
        from penstock.choose.size_limits import check_soon

        check_soon(loaded, fixed, view.TERMINAL)
    there = prepare.machines(file, fixed.ranks, view.TERMINAL)
    care = CheckOptions(check=options.get("check", True), strict=True)
    looking = Looking(job, care, view.TERMINAL)
    steps = traced_keys(loaded, view.TERMINAL, fixed.rules)
    first = steps[0].job if steps else loaded
    if steps:  # the ops of all of them stay whole
        fixed = replace(fixed, tensor=fixed.tensor or 1)
    made = planning(first, None if file is None else there, fixed, looking)
    _check_stages(made.captured.graph, fixed.stages)
    there, tight = there.within(room), there.within(flag_text.to_fill(room))
    machines = Machines(tight, device_kinds.profiled, view.TERMINAL, hands(tight))

    def found_by(fixed: Fixed) -> tuple[Plan, Searched]:
        found = best(made.job, fixed, made.captured, machines, aim)
        choice = found.choice._replace(plan=decided(found.choice.plan, made.decisions))
        choice = found_in_units(choice, cut, fixed, profiles=found.profiles, cluster=tight)
        choice = with_keys(choice, loaded, steps, machines, tight) if steps else choice
        return choice.plan, found

    chosen, found = cut_alike(found_by, made.fixed, view.TERMINAL)
    return chosen, found, saved.Basis(found.choice.captured.graph, found.profiles, there)


def _fixed(options: Options) -> Fixed:
    """Return what of a plan is decided beforehand.

    Raises:   PlanError, ScheduleError: it cannot be.
    """
    schedule, rules = options.get("schedule"), options.get("rules")
    asks: dict[str, object] = {name: options.get(name) for name in _UNDIVIDED}
    asks["units"] = options.get("units") not in (None, "woven")  # which are of divided ops
    tensor, context = axis_asked(options.get("tensor"), options.get("context"), asks)
    return Fixed(
        options.get("ranks"),
        options.get("replicas"),
        options.get("stages"),
        None if schedule is None else flag_text.schedule_asked(str(schedule)),
        offload=flag_text.offload_asked(options.get("offload")),
        rules=() if rules is None else load(str(rules)),
        tensor=tensor,
        context=context,
        exchange=RankExchange(
            options.get("post_validation", False),
            sums=options.get("sums"),
            topology=flag_text.topology_asked(options.get("topology")),
            woven=options.get("units") == "woven",
        ),
    )


def _show(plan: Plan, found: Searched, out: Path | None, *, as_json: bool) -> None:
    if as_json:
        front: list[Json] = [_row(each) for each in found.front]
        tally: dict[str, Json] = dict(found.tally._asdict())
        face.show_json({**plan.to_json(), "front": front, "tally": tally})
    else:
        face.show("\n".join([str(plan), "", *_others(found)]))
    if out is not None:
        face.say(f"wrote {out}")


def _others(found: Searched) -> list[str]:
    """Return the front as a table, and what became of the plans."""
    shown, slack = spread(found.front)
    priced = any(each.usd for each in found.front)
    rows = [
        (
            format_seconds(each.step_s),
            format_bytes(max(each.peak_bytes)),
            *([f"{each.usd:.3g}"] if priced else []),
            _name(each.plan),
        )
        for each in shown
    ]
    head = "step", "peak", *(["usd"] if priced else []), "plan"
    tried = "No plan tried beats" if found.tally.late else "No plan beats"
    what = f"{tried} these in {'seconds, bytes and dollars' if priced else 'seconds and bytes'}"
    if more := len(found.front) - len(shown):
        what += f"; {more} more are within {100 * slack - 100:.0f} % of one of them"
    return [f"{what}:", face.table(head, rows), str(found.tally)]


def spread(front: Sequence[Candidate]) -> tuple[list[Candidate], float]:
    """Return a few of a front, and the factor within which all others are of one of them.

    The fastest, the smallest and the cheapest are among them.
    """
    figures = {each: (each.step_s, max(each.peak_bytes), each.usd) for each in front}
    ends = [min(front, key=lambda each: figures[each][k]) for k in range(3)]
    shown, slack = list(front), 1.0
    while len(shown) > _MOST_SHOWN and slack < _MOST_SLACK:
        slack, shown = slack + 0.05, list(dict.fromkeys(ends))
        for each in front:
            near = (zip(figures[each], figures[other], strict=True) for other in shown)
            if not any(all(b <= slack * a for a, b in pair) for pair in near):
                shown.append(each)
    return sorted(shown, key=lambda each: figures[each]), slack


def _name(plan: Plan) -> str:
    sizes = f"{plan.replicas} x {whole_stages(plan)} stages on {plan.total_ranks} ranks"
    words = [f"{name_of(plan.schedule)}: {sizes}"]
    words += [f"{divided_what(plan)} divided among {plan.tensor}"] if plan.tensor > 1 else []
    words += [f"{plan.terms.joined} micro-batches joined"] if plan.terms.joined > 1 else []
    words += [f"micro-batches {taken.words(plan.terms.joined)}"] if plan.terms.joined < 1 else []
    rows = enumerate(plan.recompute)
    again = [str(k) if does is True else f"{k} (in part)" for k, does in rows if does]
    words += [f"recompute {'all' if repeats_all(plan) else ' '.join(again)}"] if again else []
    words += [f"packed ({wire_words(plan.terms.wire)})"] if plan.terms.rounds else []
    words += [f"hosts {' '.join(plan.place.hosts)}"] if plan.place.hosts else []
    return ", ".join(words)


def _row(candidate: Candidate) -> dict[str, Json]:
    predicted = Prediction(candidate.step_s, candidate.peak_bytes, candidate.usd)
    return {
        "name": _name(candidate.plan),
        "plan": replace(candidate.plan, predicted=predicted).to_json(),
        "step_s": candidate.step_s,
        "peak_bytes": max(candidate.peak_bytes),
        "usd": candidate.usd,
    }


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
