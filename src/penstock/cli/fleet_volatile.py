"""penstock fleet volatile: what it costs that ranks come and go, and which bids to make."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, cast

import typer

from penstock.cli import face
from penstock.cli.of_flags import of_flags
from penstock.errors import FleetError
from penstock.files import Json
from penstock.units import format_seconds

if TYPE_CHECKING:
    from penstock.fleet.volatile import Bids, Descent, Growth

_MOST_STEPS = 10_000
_LONGER = 2  # than with a fixed number of ranks: a growth that is searched
_VARIANCES = 1.1, 1.5, 2.0  # E[1/y] of two groups, beside that of all ranks


class _StepsToError(NamedTuple):
    """Steps to an error, steps if no rank left, and the cheapest growth that comes down to it."""

    steps: int
    steps_if_all_stay: int
    growth: "Growth | None"


class _Volatility(NamedTuple):
    """What is said of ranks of which each is there with chance `survival`."""

    ranks: int
    survival: float
    descent: _StepsToError | None = None
    bids: "dict[str, Bids | None]" = {}  # noqa: RUF012 - a NamedTuple's default is never changed

    @property
    def inverse(self) -> float:
        """Return E[1/y]."""
        from penstock.fleet.volatile import expected_inverse

        return expected_inverse(self.ranks, self.survival)

    @property
    def penalty(self) -> float:
        """Return E[1/y] * E[y]: the variance beside that of as many ranks that stay."""
        return self.ranks * self.survival * self.inverse

    @property
    def tries(self) -> float:
        """Return how often a step is tried until there is a rank."""
        from penstock.fleet.volatile import idle_factor

        return idle_factor(self.ranks, self.survival)

    def to_json(self) -> dict[str, Json]:
        """Return all of it as one document."""
        found: dict[str, Json] = {
            "ranks": self.ranks,
            "survival": self.survival,
            "inverse": self.inverse,
            "penalty": self.penalty,
            "tries_per_step": self.tries,
        }
        if self.descent is not None:
            found["descent"] = {**self.descent._asdict(), "growth": _plain(self.descent.growth)}
        if self.bids:
            found["bids"] = {name: _plain(bid) for name, bid in self.bids.items()}
        return found


class VolatileFlags(NamedTuple):
    """Of which ranks, and what is asked of them."""

    ranks: Annotated[int, typer.Option(help="How many ranks are asked for.")]
    survival: Annotated[float, typer.Option(help="The chance that a rank is there.")] = 1.0
    descent: Annotated[
        str | None, typer.Option(metavar="START,BETA,NOISE", help="Of the bound of the error.")
    ] = None
    target: Annotated[float | None, typer.Option(help="The error to come down to.")] = None
    prices: Annotated[
        Path | None, typer.Option(metavar="CSV", help="Columns usd_per_hour and seconds.")
    ] = None
    busy: Annotated[float | None, typer.Option(help="Hours of all steps without waits.")] = None
    deadline: Annotated[float | None, typer.Option(help="Hours until the end.")] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False


@of_flags
def volatile(flags: VolatileFlags) -> None:
    """Say what it costs that ranks come and go: variance, steps, and which bids are cheapest.

    --descent and --target: the steps to an error, and the cheapest growth to at most --ranks.
    --prices, --busy and --deadline: the best bid, and the best two.  docs/volatile.md has the
    formulas.

    Example: penstock fleet volatile --ranks 8 --survival 0.9
    """
    _check_together(descent=flags.descent, target=flags.target)
    _check_together(prices=flags.prices, busy=flags.busy, deadline=flags.deadline)
    ranks, busy, deadline = flags.ranks, flags.busy, flags.deadline
    found = _Volatility(ranks, flags.survival)
    if flags.descent is not None and flags.target is not None:
        steps = _steps(_descent(flags.descent), flags.target, ranks, flags.survival)
        found = found._replace(descent=steps)
    if flags.prices is not None and busy is not None and deadline is not None:
        bids = _bids(flags.prices, ranks, busy_s=3600 * busy, deadline_s=3600 * deadline)
        found = found._replace(bids=bids)
    if flags.as_json:
        face.show_json(found.to_json())
    else:
        face.show(_words(found))


def _check_together(**flags: object) -> None:
    missing = [f"--{name}" for name, value in flags.items() if value is None]
    if missing and len(missing) < len(flags):
        names = ", ".join(f"--{name}" for name in flags)
        raise FleetError(f"{' and '.join(missing)} is missing", hint=f"{names} go together")


def _descent(text: str) -> "Descent":
    from penstock.fleet.volatile import Descent

    try:
        start, beta, noise = map(float, text.split(","))
    except ValueError as problem:
        message = f'--descent is "{text}", not three numbers'
        raise FleetError(message, hint="write --descent 1,0.99,0.001") from problem
    return Descent(start, beta, noise)


def _steps(descent: "Descent", target: float, ranks: int, survival: float) -> _StepsToError:
    from penstock.fleet.volatile import cheapest_growth, expected_inverse

    steps = descent.steps(target, expected_inverse(ranks, survival))
    with face.busy("searching the growth"):
        growth = cheapest_growth(
            descent,
            target,
            survival=survival,
            most_steps=min(_MOST_STEPS, _LONGER * max(1, steps)),
            most_ranks=ranks,
        )
    return _StepsToError(steps, descent.steps(target, 1.0 / ranks), growth)


def _bids(path: Path, ranks: int, *, busy_s: float, deadline_s: float) -> "dict[str, Bids | None]":
    from penstock.estimate.table import read_lines
    from penstock.fleet.volatile import Prices, single_bid, two_bids

    head, rows = read_lines(path)
    if not {"usd_per_hour", "seconds"} <= set(head):
        message = f"{path} has the columns {', '.join(head)}"
        raise FleetError(message, hint="it needs usd_per_hour and seconds")
    prices = Prices.of((row.number("usd_per_hour"), row.number("seconds")) for row in rows)
    found = {"one": single_bid(prices, ranks, busy_s=busy_s, deadline_s=deadline_s)}
    for more in _VARIANCES:
        two = two_bids(prices, ranks, more / ranks, busy_s=busy_s, deadline_s=deadline_s)
        found[f"two, E[1/y] <= {more:g}/n"] = two
    return found


def _plain(one: "Bids | Growth | None") -> Json:
    return None if one is None else cast("Json", asdict(one))


# -- words -----------------------------------------------------------------------------------------


def _words(found: _Volatility) -> str:
    """Return what was found as sentences and a table of bids."""
    lines = [
        f"{found.ranks} ranks, each there with chance {found.survival:g}: "
        f"{found.ranks * found.survival:.4g} expected",
        f"E[1/y] is {found.inverse:.5g}, {found.penalty:.4f} times 1 / E[y]",
        f"a step with a rank takes {found.tries:.4g} tries",
    ]
    if found.descent is not None:
        lines += _of_descent(found.descent, found.ranks)
    if found.bids:
        head = "bids", "ranks", "dollars/h", "time", "cost", "E[1/y]"
        rows = [_row(name, bid) for name, bid in found.bids.items()]
        lines += ["", face.table(head, rows)]
    return "\n".join(lines)


def _of_descent(one: _StepsToError, ranks: int) -> list[str]:
    said = f"{one.steps} steps to the error; {one.steps_if_all_stay} if all ranks stay"
    if one.growth is None:
        return [said, f"no growth to {ranks} ranks reaches it in {_LONGER} times the steps"]
    return [
        said,
        f"cheapest: begin with {one.growth.first} ranks, times {one.growth.factor:.5g} a step: "
        f"{one.growth.steps} steps, {one.growth.rank_steps} rank-steps",
    ]


def _row(name: str, bid: "Bids | None") -> tuple[str, ...]:
    if bid is None:
        return name, "not in time", "", "", "", ""
    return (
        name,
        f"{bid.first} + {bid.ranks - bid.first}",
        f"{bid.high_usd:g}, {bid.low_usd:g}",
        format_seconds(bid.seconds),
        f"{bid.usd:.2f} usd",
        f"{bid.inverse:.4g}",
    )
