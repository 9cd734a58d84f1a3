"""penstock fleet replay: hours and dollars of a job under a policy, on a trace or many futures."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from penstock.cli import face
from penstock.cli.fleet_market import PoolNames, Traces, read, tell
from penstock.cli.of_flags import of_flags
from penstock.errors import FleetError

if TYPE_CHECKING:
    from penstock.fleet.futures import Fitted
    from penstock.fleet.job_work import FleetJob
    from penstock.fleet.market import Market
    from penstock.fleet.outcome import Outcomes
    from penstock.fleet.replay import Ruler

_POLICIES = "on_demand", "greedy", "uniform_progress", "look_ahead"
JobFile = Annotated[Path, typer.Option("--job", metavar="TOML", help="Steps, speeds and starts.")]
Deadline = Annotated[float, typer.Option(help="Hours until the job must be done.")]
Futures = Annotated[int, typer.Option(min=0, help="Futures that are sampled; 0: the trace itself.")]
Seed = Annotated[int, typer.Option(min=0, help="Of the futures.")]
ReportPage = Annotated[
    Path | None, typer.Option("--report", metavar="HTML", help="Write a page with pictures.")
]
Prices = Annotated[
    str | None,
    typer.Option(metavar="ON_DEMAND,SPOT", help="Dollars per hour where the trace has none."),
]


class FleetReplayFlags(NamedTuple):
    """Which job, on which traces, by which policies."""

    traces: Traces
    job: JobFile
    deadline: Deadline
    policy: Annotated[
        list[str] | None,
        typer.Option(help="NAME[,NUMBER...], module:function or a policy file; may be repeated."),
    ] = None
    futures: Futures = 0
    seed: Seed = 0
    prices: Prices = None
    history: Annotated[
        list[Path] | None,
        typer.Option(metavar="TRACE", help="Fit policies on this, not on TRACE."),
    ] = None
    fitted: Annotated[bool, typer.Option("--fitted", help="Futures by laws of spells.")] = False
    pool: PoolNames = None
    report: ReportPage = None
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False


@of_flags
def replay(flags: FleetReplayFlags) -> None:
    """Replay a job on machines that come, go and change their price: hours, dollars, work lost.

    On the trace as it is, or on futures that are sampled from it; beside the policies stands the
    cheapest that anyone who knew the future could have done.  Formats, formulas and policies are
    in docs/fleet.md.

    Example: penstock fleet replay spot.csv --job job.toml --deadline 30 --prices 3.06,0.92
    """
    from penstock.fleet.job_work import read_job
    from penstock.fleet.outcome import judged
    from penstock.fleet.replay import check_deadline

    if flags.report is not None:
        face.check_place(flags.report)
    what = read_job(flags.job)
    check_deadline(3600 * flags.deadline)
    there = market_of(flags.traces, flags.pool or (), flags.prices, what)
    fits, hours = flags.history, flags.deadline
    past = market_of(fits, flags.pool or (), flags.prices, what) if fits else None
    sampled = futures_of(there, what, flags.futures, flags.seed, hours, fitted=flags.fitted)
    what = _saving(what, there if sampled[0] is not there else None, past, hours)
    rulers = rulers_of(flags.policy or _POLICIES, there if past is None else past, what, hours)
    _tell_basis(there, rulers, is_own=past is None)
    with face.progress("replaying") as told:
        found = judged(sampled, what, rulers, deadline_s=3600 * flags.deadline, told=told)
    if flags.report is not None:
        _save_page(sampled[0], what, found, flags.report)
    _show(found, as_json=flags.as_json)


def _show(found: "Outcomes", *, as_json: bool) -> None:
    if as_json:
        face.show_json(found.to_json())
    else:
        face.show(words(found))


def _tell_basis(there: "Market", rulers: "Sequence[Ruler]", *, is_own: bool) -> None:
    """Say what a reader should know of the traces, and of what policies are fitted on."""
    tell(there)
    if is_own and any(len(ruler.table) for ruler in rulers):
        face.say("note: look_ahead is fitted on the same trace; --history TRACE has it on another")


def _save_page(market: "Market", job: "FleetJob", found: "Outcomes", path: Path) -> None:
    from penstock.fleet.pictures import page_of_replay

    page_of_replay(market, job, found).save(path)
    face.say(f"wrote {path}")


def _saving(
    job: "FleetJob", there: "Market | None", past: "Market | None", deadline: float
) -> "FleetJob":
    """Return a job that knows the seconds between its checkpoints, from its history.

    there   what futures are sampled from; None: it is replayed itself, and tells how often to save
    """
    from penstock.fleet.loss_rate import saving

    history = past if past is not None else there
    return job if history is None else saving(job, history, 3600 * deadline)


def market_of(
    traces: Sequence[Path], pools: Sequence[str], prices: str | None, job: "FleetJob"
) -> "Market":
    """Return the market of traces, with prices, and the job's notice where the trace has none.

    Raises:   FleetError: a trace that cannot be read, or prices that are missing.
    """
    from penstock.fleet.market import noticed, priced

    sure, spot = prices_of(prices) if prices is not None else (0.0, 0.0)
    return noticed(priced(read(traces, None, pools), sure, spot), job.notice_s)


def prices_of(text: str) -> tuple[float, float]:
    """Return dollars per hour, on demand and preemptible.

    Raises:   FleetError: they are none.
    """
    try:
        sure, spot = map(float, text.split(","))
    except ValueError as problem:
        raise FleetError(f"--prices is {text!r}", hint="write --prices 3.06,0.92") from problem
    if not (0 < sure < math.inf and 0 < spot < math.inf):
        raise FleetError(f"prices of {sure:g} and {spot:g} dollars", hint="give both above 0")
    return sure, spot


def futures_of(
    there: "Market", job: "FleetJob", count: int, seed: int, deadline: float, *, fitted: bool
) -> "Sequence[Market]":
    """Return sampled futures of half again the deadline, or the trace itself for none."""
    from penstock.fleet.futures import resampled

    lasts_s = 1.5 * 3600 * deadline
    if not count and not there.laws:
        return [there]
    count = max(1, count)  # lives are drawn
    if not fitted:
        return [*resampled(there, count, seed=seed, lasts_s=lasts_s)]
    return _by_laws(there, job, count, seed=seed, lasts_s=lasts_s)


def _by_laws(
    there: "Market", job: "FleetJob", count: int, *, seed: int, lasts_s: float
) -> "Sequence[Market]":
    from penstock.fleet.futures import by_laws
    from penstock.fleet.futures import fitted as laws_of

    laws: tuple[Fitted, ...] = laws_of(there, job.size)
    for pool, law in zip(there.pools, laws, strict=True):
        face.say(f"note: {pool.name}: spells with {law.up.name}, without {law.down.name}")
    return [
        *by_laws(there, laws, count, seed=seed, lasts_s=lasts_s, machines=job.size),
    ]


def rulers_of(
    names: Sequence[str], there: "Market", job: "FleetJob", deadline: float
) -> "list[Ruler]":
    """Return the policies that are named, those that look ahead fitted on futures of their own.

    Raises:   FleetError: no such policy, or a file or function that cannot be read.
    """
    from penstock.fleet.policy_file import read_policy
    from penstock.fleet.rulers import PolicyBasis, basis_of, ruler_of

    basis = PolicyBasis((), 3600 * deadline)
    if any(name.startswith(("look_ahead", "liveput")) or _is_file(name) for name in names):
        basis = basis_of(there, 3600 * deadline)
    found: list[Ruler] = []
    for name in names:
        text = read_policy(Path(name)).policy if _is_file(name) else name
        found.append(ruler_of(text, job, basis, _function))
    return found


def _is_file(name: str) -> bool:
    return name.endswith(".toml")


def _function(text: str) -> Callable[..., None]:
    """Return the function that `module:function` names."""
    import importlib
    import sys

    module, _, name = text.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as problem:
        raise FleetError(f"cannot find {text}: {problem}", hint="give module:function") from problem
    finally:
        sys.path.pop(0)
    return found


# -- words -----------------------------------------------------------------------------------------


def words(found: "Outcomes") -> str:
    """Return the policies as a table, beside what was asked for."""
    rows = [
        (
            row.policy,
            f"{row.usd.middle:.2f}",
            f"{row.usd.low:.2f} .. {row.usd.high:.2f}",
            _hours(row.hours.middle),
            f"{_hours(row.hours.low)} .. {_hours(row.hours.high)}",
            f"{100 * row.in_time:.1f} %",
            f"{100 * row.useful:.0f} %",
            f"{row.preemptions:.1f}",
            f"{row.steps_lost:.4g}",
            f"{row.cost_ratio:.3f}",
        )
        for row in found.rows
    ]
    head = (
        *("policy", "usd", "8 in 10", "hours", "8 in 10", "in time", "useful", "preempted"),
        *("steps lost", "of best"),
    )
    lines = [face.table(head, rows), ""]
    lines.append(
        f"{found.futures} futures, deadline {found.deadline_h:g} h; of best: dollars beside the "
        f"omniscient's, {found.best_usd:.2f} on average where it is in time ({found.best_in_time})"
    )
    return "\n".join(lines)


def _hours(value: float) -> str:
    return f"{value:.2f}" if value < math.inf else "never"
