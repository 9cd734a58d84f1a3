"""Pictures: the page of a replay and of an advice, of the same pieces as a run's report."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from penstock.fleet.advise import Advice
from penstock.fleet.choices import Advised
from penstock.fleet.job_work import FleetJob
from penstock.fleet.market import HOUR_S, Market
from penstock.fleet.one_future import Floats
from penstock.fleet.outcome import Outcomes, PolicyRow
from penstock.fleet.replay import Replayed
from penstock.report.charts import Axis, Curve, Level, chart
from penstock.report.figure_words import count_text
from penstock.report.headline import card
from penstock.report.markup import Markup, figure_cell, number_head, section, table, tag
from penstock.report.page import document
from penstock.report.report import Report
from penstock.report.scale import PLAIN
from penstock.report.sections import key

_COLOURS = 8
_MOST_RUNS = 8  # whose machines are drawn


def page_of_replay(market: Market, job: FleetJob, found: Outcomes) -> Report:
    """Return the page of policies over futures: machines, price, progress, dollars.

    market   the first future, whose replays are drawn
    """
    named = [(row.policy, run) for row, run in zip(found.rows, found.first, strict=True)]
    cheapest = min(found.rows, key=lambda row: (row.in_time < 1, row.mean_usd))
    said = (
        f"{count_text(found.futures, 'future')} of {job.steps:g} steps on {job.size} machines,"
        f" deadline {found.deadline_h:g} h.  Cheapest, and in time in"
        f" {100 * cheapest.in_time:.0f} % of them: {cheapest.policy},"
        f" {cheapest.mean_usd:.2f} dollars on average."
    )
    usd = [(row.policy, usd) for row, usd in zip(found.rows, found.all_usd, strict=True)]
    parts = (
        tag("dl", *(_card_of(row) for row in found.rows), class_="cards"),
        _charts("Dollars and progress", "", _dollars(usd), _progress(named, job, found.deadline_h)),
        _machines(named, market, found.deadline_h),
        _policies(found),
    )
    return Report(document("A fleet replayed", said, parts), said)


def page_of_advice(found: Advice, deadline_h: float, budget_usd: float) -> Report:
    """Return the page of an advice: the choice and why, the front, and its first future."""
    one = found.choice
    said = f"{one.policy} on {one.machines} machines of {', '.join(one.pools)}: {found.reasons[0]}."
    sure = f"{100 * one.in_time:.0f} %"
    cards = (
        card("Dollars, on average", f"{one.mean_usd:.2f}", _ends(found)),
        card("Hours, 9 in 10 within", f"{one.late_h:.2f}", f"deadline {deadline_h:g}"),
        card("In time", sure, "of the futures"),
        card("Useful", f"{100 * one.useful:.0f} %", "of the machine time paid"),
    )
    spread = [(f"{each.policy} on {each.machines}", each.usd) for each in found.front[:_COLOURS]]
    run = [(one.policy, found.first)]
    budget = f"  The budget is {budget_usd:g} dollars." if budget_usd < math.inf else ""
    parts = (
        tag("dl", *cards, class_="cards"),
        section("Why", tag("ul", *(tag("li", reason) for reason in found.reasons))),
        _charts(
            "The front",
            f"No choice is cheaper and sooner than one of the front.{budget}",
            _front(found, deadline_h),
            _dollars(spread),
            _progress(run, one.job, deadline_h),
        ),
        _machines(run, one.market, deadline_h),
        _choices(found),
    )
    return Report(document("Which machines to take when", said, parts), said)


def _ends(found: Advice) -> str:
    """Return between which dollars it is; the reasons say what hindsight would save."""
    return f"8 times in 10 {found.promise.low_usd:.2f} .. {found.promise.high_usd:.2f}"


def _card_of(row: PolicyRow) -> Markup:
    under = f"dollars on average, {row.hours.middle:.1f} h"
    return card(row.policy, f"{row.mean_usd:.2f}", under, f"in time in {100 * row.in_time:.0f} %")


def _figure(title: str, curves: Sequence[Curve], levels: Sequence[Level], *axes: Axis) -> Markup:
    picture = chart(title, curves, levels, x=axes[0], y=axes[1])
    return tag("figure", tag("figcaption", title, *key(curves)), picture)


def _charts(title: str, intro: str, *pictures: Markup) -> Markup:
    told = (tag("p", intro),) if intro else ()
    return section(title, *told, tag("div", *pictures, class_="charts"))


def _dollars(named: Sequence[tuple[str, Floats]]) -> Markup:
    """Return the share of futures that cost at most so much, one curve for each."""
    curves: list[Curve] = []
    for at, (name, usd) in enumerate(named[:_COLOURS]):
        ordered = np.sort(usd)
        share = 100 * np.arange(1, len(usd) + 1) / len(usd)
        xs = np.concatenate([ordered[:1], ordered])
        curves.append(Curve(name, f"k{at}", xs, np.concatenate([[0.0], share]), stepped=True))
    x, y = Axis("dollars", PLAIN, unit="usd"), Axis("", PLAIN, 0.0, 105.0, "%")
    return _figure("Share of futures, in %, that cost at most so many dollars", curves, (), x, y)


def _progress(named: Sequence[tuple[str, Replayed]], job: FleetJob, deadline_h: float) -> Markup:
    """Return the steps done over time beside the steady pace that ends at the deadline."""
    curves = [
        Curve(
            name,
            f"k{at}",
            np.append(run.timeline[:, 0] / HOUR_S, _end_h(run, deadline_h)),
            100 * np.append(run.timeline[:, 4], run.steps) / job.steps,
        )
        for at, (name, run) in enumerate(named[:_COLOURS])
    ]
    pace = Curve("steady pace", "predicted", np.array([0.0, deadline_h]), np.array([0.0, 100.0]))
    x, y = Axis("hours", PLAIN, 0.0, unit="h"), Axis("", PLAIN, 0.0, 105.0, "%")
    title = "Steps done, in %, over hours, of the first future"
    return _figure(title, [*curves, pace], (), x, y)


def _end_h(run: Replayed, deadline_h: float) -> float:
    return run.hours if run.is_done else max(deadline_h, float(run.timeline[-1, 0]) / HOUR_S)


def _machines(named: Sequence[tuple[str, Replayed]], market: Market, deadline_h: float) -> Markup:
    """Return the machines that each held over time, those that were offered, and the price."""
    end_h = max(_end_h(run, deadline_h) for _, run in named)
    pictures = [_held(name, run, market, end_h) for name, run in named[:_MOST_RUNS]]
    shown = market.times_s <= end_h * HOUR_S
    times = np.append(market.times_s[shown] / HOUR_S, min(end_h, market.until_s / HOUR_S))
    prices = [
        Curve(
            pool.name,
            f"k{at}",
            times,
            np.append(market.usd_h[shown, at], market.usd_h[shown, at][-1]),
            stepped=True,
        )
        for at, pool in enumerate(market.pools[:_COLOURS])
    ]
    sure = Level("on demand", "cap", min(pool.usd_h for pool in market.pools))
    x, y = Axis("hours", PLAIN, 0.0, unit="h"), Axis("", PLAIN, 0.0, unit="usd/h")
    title = "Dollars per hour of a preemptible machine, over hours"
    pictures.append(_figure(title, prices, [sure], x, y))
    return _charts("Machines and price", "", *pictures)


def _held(name: str, run: Replayed, market: Market, end_h: float) -> Markup:
    hours = np.append(run.timeline[:, 0] / HOUR_S, _end_h(run, end_h))
    most = float(run.timeline[:, 1:3].sum(axis=1).max(initial=1.0))
    shown = market.times_s <= end_h * HOUR_S
    offered = np.minimum(market.machines[shown].sum(axis=1), 2 * most)
    curves = [
        Curve("offered", "offered", market.times_s[shown] / HOUR_S, offered, stepped=True),
        Curve("preemptible", "k0", hours, _last_twice(run.timeline[:, 1]), stepped=True),
        Curve("on demand", "k1", hours, _last_twice(run.timeline[:, 2]), stepped=True),
    ]
    x, y = Axis("hours", PLAIN, 0.0, end_h, "h"), Axis("", PLAIN, 0.0)
    return _figure(f"{name}: machines over hours", curves, (), x, y)


def _last_twice(values: Floats) -> Floats:
    return np.append(values, values[-1])


def _front(found: Advice, deadline_h: float) -> Markup:
    """Return all choices as dots of hours over dollars, the front as a line through its own."""
    ended = [one for one in found.tried if one.late_h < math.inf]
    curves = [
        Curve("a choice", "dots", *_dots(ended)),
        Curve("front", "k0", *_line(found.front)),
        Curve("chosen", "dots chosen", *_dots([found.choice])),
    ]
    levels = [Level("deadline", "cap", deadline_h)]
    x, y = Axis("dollars", PLAIN, 0.0, unit="usd"), Axis("", PLAIN, 0.0, unit="h")
    title = "Hours of 9 in 10 futures, over mean dollars"
    return _figure(title, curves, levels, x, y)


def _dots(ones: Sequence[Advised]) -> tuple[Floats, Floats]:
    """Return points with gaps between them, so that each is drawn alone."""
    ordered = sorted(ones, key=lambda one: one.mean_usd)
    xs = np.repeat([one.mean_usd for one in ordered], 2)
    ys = np.repeat([one.late_h for one in ordered], 2)
    ys[1::2] = math.nan
    return xs, ys


def _line(ones: Sequence[Advised]) -> tuple[Floats, Floats]:
    return np.array([one.mean_usd for one in ones]), np.array([one.late_h for one in ones])


def _policies(found: Outcomes) -> Markup:
    heads = (
        "Median dollars",
        "8 in 10",
        "Median hours",
        "In time",
        "Useful",
        "Preempted",
        "Of the best",
    )
    rows = (
        tag(
            "tr",
            tag("th", row.policy, scope="row"),
            figure_cell(f"{row.usd.middle:.2f}"),
            figure_cell(f"{row.usd.low:.2f} .. {row.usd.high:.2f}"),
            figure_cell(f"{row.hours.middle:.2f}" if row.hours.middle < math.inf else "never"),
            figure_cell(f"{100 * row.in_time:.1f} %"),
            figure_cell(f"{100 * row.useful:.1f} %"),
            figure_cell(f"{row.preemptions:.1f}"),
            figure_cell(f"{row.cost_ratio:.3f}" if math.isfinite(row.cost_ratio) else "-"),
        )
        for row in found.rows
    )
    return section("Policies", table("Policies", ("Policy", *map(number_head, heads)), rows))


def _choices(found: Advice) -> Markup:
    heads = ("Machines", "Dollars", "Hours, 9 in 10", "In time", "Useful")
    return section(
        "Choices",
        table(
            "Choices",
            ("Policy", *map(number_head, heads), "Pools", "Plan"),
            _choice_rows(found),
            long=True,
        ),
    )


def _choice_rows(found: Advice) -> Iterator[Markup]:
    for one in sorted(found.tried, key=lambda one: one.mean_usd):
        late = f"{one.late_h:.2f}" if one.late_h < math.inf else "never"
        yield tag(
            "tr",
            tag("th", one.policy, scope="row"),
            figure_cell(str(one.machines)),
            figure_cell(f"{one.mean_usd:.2f}"),
            figure_cell(late),
            figure_cell(f"{100 * one.in_time:.0f} %"),
            figure_cell(f"{100 * one.useful:.0f} %"),
            tag("td", ", ".join(one.pools)),
            tag("td", one.plan or "-"),
            class_="whole" if one is found.choice else None,
        )
