"""penstock fleet advise: which machines to take when, for a deadline and a budget."""

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from penstock.cli import face
from penstock.cli.fleet_market import tell
from penstock.cli.fleet_replay import Prices, ReportPage, market_of, prices_of
from penstock.cli.of_flags import of_flags
from penstock.errors import FleetError
from penstock.files import Json
from penstock.units import GB

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.fleet.advise import Advice
    from penstock.fleet.choices import Advised, Aim
    from penstock.fleet.job_work import FleetJob, Speed
    from penstock.fleet.market import Market

_MOST_RANKS = 64
_SAVED, _SAVED_BYTES_PER_S = 3, GB  # times the weights; a disk or a bucket


class AdviseFlags(NamedTuple):
    """What is to be trained by when, on which machines."""

    job: Annotated[str, typer.Argument(metavar="JOB", help="job.toml, or a file.py[:name].")]
    trace: Annotated[list[Path], typer.Option(help="Of machines and prices; may be repeated.")]
    deadline: Annotated[
        str | None, typer.Option(help="Hours until it must be done: 20 or 20h.")
    ] = None
    budget: Annotated[str | None, typer.Option(help="Dollars: 400 or 400usd.")] = None
    cluster: Annotated[
        Path | None, typer.Option(help="Of a file.py: a host of it is a machine.")
    ] = None
    steps: Annotated[int, typer.Option(min=0, help="Of a file.py: steps to train.")] = 0
    measured: Annotated[
        Path | None,
        typer.Option(metavar="DIR|TOML", help="A run of the job: what it took is expected again."),
    ] = None
    prices: Prices = None
    futures: Annotated[int, typer.Option(min=1, help="Futures for each choice.")] = 40
    policy_file: Annotated[Path | None, typer.Option(help="Write the choice to this TOML.")] = None
    report: ReportPage = None
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False


@of_flags
def advise(flags: AdviseFlags) -> None:
    """Say which machines to take when: policies times pools times plans, replayed over futures.

    Shown is the front of dollars and hours, the choice for the deadline and the budget, and why.
    Without a deadline: the soonest that the budget pays for.  The speeds of a file.py are those of
    plans for 1, 2, 4, ... hosts of --cluster.  docs/fleet.md has policies and traces.

    Example: penstock fleet advise job.toml --trace spot.csv --deadline 30h --prices 3.06,0.92
    """
    for place in (flags.policy_file, flags.report):
        if place is not None:
            face.check_place(place)
    asked = _asked(flags.deadline, flags.budget)
    what = _as_measured(_job(flags.job, flags.cluster, flags.steps), flags.measured, flags.cluster)
    there = market_of(flags.trace, (), flags.prices, what)
    tell(there)
    tell_notice(there, what)
    with face.progress("trying choices") as told:
        aim, found = _advised(there, what, asked, flags.futures, told)
    if flags.policy_file is not None:
        _write(found, aim, (flags.trace, flags.prices), flags.policy_file)
        face.say(f"wrote {flags.policy_file}")
    if flags.report is not None:
        _save_page(found, aim, flags.report)
    if flags.as_json:
        face.show_json(document(found))
    else:
        face.show(words(found))


def _asked(deadline: str | None, budget: str | None) -> tuple[float | None, float]:
    """Return the hours that were given, and the dollars: inf for none.

    Raises:   FleetError: neither was given, or one is no number.
    """
    hours = None if deadline is None else _number(deadline, "h", "--deadline")
    usd = math.inf if budget is None else _number(budget, "usd", "--budget")
    if hours is None and budget is None:
        message = "neither a deadline nor a budget is given"
        raise FleetError(message, hint="give --deadline 30h, --budget 400usd or both")
    return hours, usd


def _advised(
    there: "Market",
    job: "FleetJob",
    asked: "tuple[float | None, float]",
    futures: int,
    told: "Callable[[int, int], None]",
) -> "tuple[Aim, Advice]":
    """Return the aim - the soonest deadline that the dollars pay for, if none is given - and the
    advice for it.
    """
    from penstock.fleet.advise import advise
    from penstock.fleet.budget import advise_for
    from penstock.fleet.choices import Aim

    hours, usd = asked
    if hours is None:
        return advise_for(there, job, usd, futures=futures, told=told)
    aim = Aim(hours, usd)
    return aim, advise(there, job, aim, futures=futures, told=told)


def tell_notice(there: "Market", job: "FleetJob") -> None:
    """Say where machines go without a warning that is long enough for a checkpoint."""
    from penstock.fleet.loss_rate import is_warned

    if not is_warned(there, job):
        least = min(pool.notice_s for pool in there.pools)
        short = f"a notice of {least:g} s is shorter than a checkpoint of {job.checkpoint_s:g} s"
        face.say(f"note: {short if least else 'no notice is known'}: what is lost is lost at once")


def _save_page(found: "Advice", aim: "Aim", path: Path) -> None:
    from penstock.fleet.pictures import page_of_advice

    page_of_advice(found, aim.deadline_h, aim.budget_usd).save(path)
    face.say(f"wrote {path}")


def _number(text: str, unit: str, flag: str) -> float:
    try:
        return float(text.removesuffix(unit).strip())
    except ValueError as problem:
        message = f"{flag} is {text!r}, no number of {unit}"
        raise FleetError(message, hint=f"write {flag} 20{unit}") from problem


# -- speeds from the planner -----------------------------------------------------------------------


def _job(text: str, cluster: Path | None, steps: int) -> "FleetJob":
    """Return the job of a TOML file, or one whose speeds are those of plans for more hosts.

    Raises:   FleetError: a flag that does not fit; whatever tracing and searching raise.
    """
    from penstock.fleet.job_work import FleetJob, read_job

    if text.endswith(".toml"):
        if cluster is not None:
            raise FleetError("a job in TOML has its speeds", hint="leave --cluster out")
        found = read_job(text)
        return replace(found, steps=float(steps)) if steps else found
    if cluster is None or not steps:
        hint = "give --cluster machines.toml and --steps N"
        raise FleetError(f"of {text} neither speeds nor steps are known", hint=hint)
    found = planned(text, cluster)
    return FleetJob(
        float(steps),
        found.speeds,
        has_copies=found.has_copies,
        notice_s=found.notice_s,
        checkpoint_s=found.checkpoint_s,
    )


def _as_measured(job: "FleetJob", path: Path | None, cluster: Path | None) -> "FleetJob":
    """Return a job with what a run of it has measured, if one is given; a rank is one of a host's.

    Raises:   FleetError: no such run, or its file is damaged.
    """
    if path is None:
        return job
    from penstock.cluster.cluster import Cluster
    from penstock.fleet.job_work import with_figures
    from penstock.fleet.of_run import figures_in

    found, each = figures_in(path), 1
    if cluster is not None and not path.suffix:
        each = Cluster.load(cluster).hosts[0].num_devices
    rates = {n // each: rate for n, rate in found.rates.items() if n % each == 0}
    face.say(f"note: measured by {path}: {found}")
    seconds = ("reform_s", "start_s", "restart_s", "checkpoint_s")
    return with_figures(job, rates, **{name: getattr(found, name) for name in seconds})


class PlannedOnHosts(NamedTuple):
    """What plans for 1, 2, 4, ... and all hosts of a cluster tell of a job.

    has_copies     whether all state is there when a rank is lost: in replicas, or with a guard
    notice_s       the shortest of the cluster's preemptible devices
    checkpoint_s   to write weights and two moments of each, at 1 GB/s
    """

    speeds: "tuple[Speed, ...]"
    has_copies: bool
    notice_s: float
    checkpoint_s: float


def planned(text: str, path: Path) -> PlannedOnHosts:
    """Return what the best plans on 1, 2, 4, ... and all hosts of a cluster tell of a job."""
    from penstock.choose import device_kinds, prepare
    from penstock.choose.choose import Machines, SearchAim, best
    from penstock.cluster.cluster import Cluster
    from penstock.fleet.job_work import Speed
    from penstock.pilot.losses import survives
    from penstock.search.shapes import Fixed
    from penstock.training import view

    whole = Cluster.load(path)
    counts = {2**k for k in range(7) if 2**k < len(whole.hosts)} | {len(whole.hosts)}
    with face.only_results():
        loaded = prepare.loaded(text, (), view.TERMINAL).job
        captured = prepare.traced(loaded, view.TERMINAL)
        found: list[Speed] = []
        has_copies = True
        for count in sorted(counts):
            part = replace(whole, hosts=whole.hosts[:count])
            if part.num_ranks > _MOST_RANKS:
                break
            machines = Machines(part, device_kinds.profiled, view.TERMINAL)
            searched = best(loaded, Fixed(part.num_ranks), captured, machines, SearchAim("time"))
            plan = searched.choice
            has_copies = has_copies and survives(plan.plan, [o.way for o in searched.options], part)
            step_s = plan.plan.predicted.step_s if plan.plan.predicted else math.inf
            sizes = f"{plan.plan.replicas} x {plan.plan.num_stages} stages"
            found.append(Speed(count, 1 / step_s, sizes))
    notices = [kind.notice_s for kind in whole.devices if kind.preemptible]
    saves_s = _SAVED * captured.graph.parameter_bytes / _SAVED_BYTES_PER_S
    return PlannedOnHosts(tuple(found), has_copies, min(notices, default=0.0), saves_s)


# -- words -----------------------------------------------------------------------------------------


def words(found: "Advice") -> str:
    """Return the front as a table, the choice and the reasons."""
    head = "", "policy", "machines", "pools", "usd", "9 in 10 by", "in time", "useful", "plan"
    shown = [one for one in found.front if one.sure > 0 or one is found.choice]
    rows = [_row(one, "*" if one is found.choice else "") for one in shown]
    if found.choice not in found.front:
        rows.append(_row(found.choice, "*"))
    lines = [face.table(head, rows), ""]
    lines.append(f"of {len(found.tried)} choices none is cheaper and sooner than those above")
    if never := len(found.front) - len(shown):
        lines[-1] += f"; {never} more are cheaper or sooner, and never what was asked for"
    lines.append(f"* {found.choice.policy} on {found.choice.machines} machines:")
    lines += [f"  {reason}" for reason in found.reasons]
    return "\n".join(lines)


def _row(one: "Advised", mark: str) -> tuple[object, ...]:
    return (
        mark,
        one.policy,
        one.machines,
        ", ".join(one.pools),
        f"{one.mean_usd:.2f}",
        f"{one.late_h:.2f} h",
        f"{100 * one.in_time:.0f} %",
        f"{100 * one.useful:.0f} %",
        one.plan or "-",
    )


def document(found: "Advice") -> dict[str, Json]:
    """Return choice, front and reasons as one document."""
    return {
        "choice": found.choice.to_json(),
        "front": [one.to_json() for one in found.front],
        "tried": len(found.tried),
        "reasons": list(found.reasons),
        "omniscient_usd": found.best_usd,
        "promise": dict(found.promise._asdict()),
    }


def _write(found: "Advice", aim: "Aim", told: tuple[list[Path], str | None], path: Path) -> None:
    """Write the choice as a policy file, with the hosts that it begins with.

    told   traces and prices, as they were given
    """
    from penstock.fleet.policy_file import PolicyFile, begun

    one, (traces, prices) = found.choice, told
    PolicyFile(
        policy=one.policy,
        pools=one.pools,
        machines=one.machines,
        plan=one.plan,
        deadline_h=aim.deadline_h,
        budget_usd=0.0 if aim.budget_usd == math.inf else aim.budget_usd,
        expected_usd=one.mean_usd,
        expected_hours=one.late_h,
        chance_in_time=one.in_time,
        reasons=found.reasons,
        hosts=begun(found.first),
        traces=tuple(str(trace.absolute()) for trace in traces),
        prices=() if prices is None else prices_of(prices),
        job=one.job,
    ).save(path)
