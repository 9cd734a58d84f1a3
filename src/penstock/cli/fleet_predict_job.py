"""penstock fleet predict JOB: a job's seconds on devices, its cluster's speed, and its end."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from penstock.cli import face
from penstock.errors import EstimateError
from penstock.files import Json
from penstock.training import view
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from penstock.fleet.learn import Foreseen
    from penstock.fleet.measurement import Measurement, StepWork
    from penstock.fleet.together import CapOf, ClusterSpeed, Detected, Scaling


_OF_JOBS = "step", "transfer", "start"  # layouts of tables


class JobFlags(NamedTuple):
    """The flags that are about a job."""

    ranks: str | None
    cap: tuple[str, ...]
    scales: str | None
    observed: float | None
    steps: int | None
    every: int
    losses: float
    equal_shares: bool
    prices: str | None = None


class _Of(NamedTuple):
    """What is foreseen of a job."""

    work: "StepWork"
    weights_bytes: int
    steps: "dict[str, Foreseen]"
    checkpoints: "dict[str, Foreseen]"
    starts: "dict[str, Foreseen]"


class _OnCluster(NamedTuple):
    """The job on a cluster: its speed, what was observed of it, and seconds to the end.

    usd_h:  what all ranks together cost in an hour, where it is known
    """

    speed: "ClusterSpeed"
    detected: "Detected | None"
    seconds: float | None
    low: float | None
    high: float | None
    usd_h: float | None = None


def of_job(what: str, fit: Sequence[Path], asked: JobFlags, *, as_json: bool) -> None:
    """Print what is foreseen of a job.

    Raises:   EstimateError: a table that cannot be read, or too little in it; no device is known.
              JobError, GraphError: no such job, or one that cannot be traced.
    """
    from penstock.fleet.measurement import read_tables

    learned_from = read_tables(fit)
    clustered = asked.cap or asked.scales or asked.observed or asked.steps or asked.prices
    if clustered and not asked.ranks:
        raise EstimateError(
            "--cap, --scales, --observed, --steps and --prices are about a cluster",
            hint="give --ranks k80=4 too",
        )
    if asked.prices and asked.steps is None:
        raise EstimateError("--prices are of the whole run", hint="give --steps N too")
    ranks = {} if asked.ranks is None else _ranks(asked.ranks)
    found = _foreseen(_work(what), learned_from, ranks)
    run = _run(found, ranks, asked) if ranks else None
    if as_json:
        face.show_json(_document(found, run))
    else:
        _show(found, run)


def _work(what: str) -> "tuple[str, StepWork, int]":
    """Return the name of a job, what a micro-batch of it takes, and the bytes of its weights."""
    from penstock.choose import prepare
    from penstock.fleet.measurement import StepWork
    from penstock.job import load_job
    from penstock.profile.roofline import works_of

    with face.only_results():
        graph = prepare.traced(load_job(what), view.TERMINAL).graph
    parameters = [node for node in graph.nodes if node.kind == "parameter"]
    count = sum(_count(node.shape) for node in parameters)
    moved = sum(work.moved_bytes for work in works_of(graph) if work is not None)
    work = StepWork(float(graph.flop), float(count), float(len(parameters)), float(moved))
    return what, work, graph.parameter_bytes


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _foreseen(
    job: "tuple[str, StepWork, int]",
    tables: "Mapping[str, Sequence[Measurement]]",
    ranks: Mapping[str, int],
) -> _Of:
    from penstock.fleet.learn import learn
    from penstock.fleet.measurement import of_start, of_transfer, steps_on

    name, work, weights = job

    def asked(layout: str, rows: "Sequence[Measurement]") -> "list[Measurement]":
        if layout == "step":
            return steps_on(name, work, rows, ranks)
        if layout == "transfer":
            return [of_transfer(name, weights, work.tensors, to=of) for of in _devices(rows)]
        return [of_start(name, of, work.tensors) for of in _devices(rows)]

    found: dict[str, dict[str, Foreseen]] = {layout: {} for layout in _OF_JOBS}
    with face.busy("learning"):
        for layout in _OF_JOBS:
            if rows := tables.get(layout):
                new = asked(layout, rows)
                told = learn(rows).foresee(new)
                found[layout] = dict(zip((row.device for row in new), told, strict=True))
    return _Of(work, weights, found["step"], found["transfer"], found["start"])


def _devices(rows: "Sequence[Measurement]") -> list[str]:
    return list(dict.fromkeys(row.device for row in rows))


# -- a cluster -------------------------------------------------------------------------------------


def _ranks(text: str) -> dict[str, int]:
    """Return how many ranks there are of each device."""
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, count = part.partition("=")
        if not (name and count.isdecimal() and 0 < int(count) < 10**6):
            raise EstimateError(
                f'--ranks is "{text}", not devices and numbers', hint="write --ranks k80=4,p100=2"
            )
        found[name.strip()] = found.get(name.strip(), 0) + int(count)
    return found


def _caps(texts: Sequence[str]) -> "dict[CapOf, float]":
    from penstock.fleet.together import CAPS

    found: dict[CapOf, float] = {}
    for text in texts:
        name, number = _pair(text)
        if name not in CAPS or not number > 0:
            message = f'--cap is "{text}", not a cap in steps per second'
            raise EstimateError(message, hint=f"write --cap server=44; there are {', '.join(CAPS)}")
        found[name] = number
    return found


def _usd_h(text: str | None, ranks: Mapping[str, int]) -> float | None:
    """Return what all ranks together cost in an hour; None where no price is given."""
    if text is None:
        return None
    prices = dict(map(_pair, text.split(",")))
    if not all(0 < price < math.inf for price in prices.values()) or set(prices) != set(ranks):
        message = f'--prices is "{text}", not dollars an hour of {", ".join(ranks)}'
        hint = f"write --prices {','.join(f'{name}=0.9' for name in ranks)}"
        raise EstimateError(message, hint=hint)
    return sum(prices[name] * count for name, count in ranks.items())


def _pair(text: str) -> tuple[str, float]:
    """Return what stands before and after =; -1 for what is no number."""
    name, _, value = text.partition("=")
    try:
        return name.strip(), float(value)
    except ValueError:
        return name.strip(), -1.0


def _law(text: str | None) -> "Scaling | None":
    from penstock.fleet.together import scaling

    if text is None:
        return None
    points = dict(map(_pair, text.split(",")))
    if not all(count.isdecimal() and speed > 0 for count, speed in points.items()):
        message = f'--scales is "{text}", not ranks and their steps per second'
        raise EstimateError(message, hint="write --scales 1=9.9,2=19.1,4=36")
    return scaling({int(count): speed for count, speed in points.items()})


def _run(found: _Of, ranks: Mapping[str, int], asked: JobFlags) -> _OnCluster:
    from penstock.fleet.together import ClusterMember, Course, detect, together

    if not found.steps:
        hint = "give --fit a table of steps: model, device, flop, parameters, tensors, seconds"
        raise EstimateError("nothing is known of steps on any device", hint=hint)
    steps = found.steps
    members = [
        ClusterMember(of, n, steps[of].seconds, steps[of].low, steps[of].high)
        for of, n in ranks.items()
    ]
    caps, law = _caps(asked.cap), _law(asked.scales)
    speed = together(members, caps, equal_shares=asked.equal_shares, law=law)
    detected = None if asked.observed is None else detect(speed, asked.observed)
    if asked.steps is None:
        return _OnCluster(speed, detected, None, None, None)
    if asked.every and not found.checkpoints:
        hint = "give --fit a table too: model, size_bytes, tensors, seconds"
        raise EstimateError("nothing is known of checkpoints", hint=hint)
    if asked.losses and not found.starts:
        hint = "give --fit a table too: model, kind, tensors, seconds"
        raise EstimateError("nothing is known of starts", hint=hint)
    saving, starting = _worst(found.checkpoints), _worst(found.starts)
    count = sum(ranks.values())
    middle, low, high = (
        Course(asked.steps, saves, asked.every, asked.losses, starts, (count - 1) / count).seconds(
            rate
        )
        for saves, starts, rate in zip(
            saving, starting, (speed.steps_per_s, speed.high, speed.low), strict=True
        )
    )
    return _OnCluster(speed, detected, middle, low, high, _usd_h(asked.prices, ranks))


def _worst(found: "Mapping[str, Foreseen]") -> tuple[float, float, float]:
    """Return seconds, low and high of what takes longest; 0 where there is nothing."""
    if not found:
        return 0.0, 0.0, 0.0
    one = max(found.values(), key=lambda each: each.seconds)
    return one.seconds, one.low, one.high


# -- words -----------------------------------------------------------------------------------------


def _document(found: _Of, run: _OnCluster | None) -> dict[str, Json]:
    work = found.work
    document: dict[str, Json] = {
        "work": {
            "flop": work.flop,
            "parameters": work.parameters,
            "tensors": work.tensors,
            "moved_bytes": work.moved,
            "size_bytes": found.weights_bytes,
        },
        "interval": 80.0,
    }
    for name, told in (
        ("steps", found.steps),
        ("checkpoints", found.checkpoints),
        ("starts", found.starts),
    ):
        document[name] = {
            of: {**each._asdict(), "outside": list(each.outside)} for of, each in told.items()
        }
    if run is not None:
        speed = run.speed
        document["cluster"] = {
            "steps_per_s": speed.steps_per_s,
            "low": speed.low,
            "high": speed.high,
            "held_by": speed.held_by,
            "mend": speed.mend,
            "observed": None if run.detected is None else dict(run.detected._asdict()),
            "seconds": run.seconds,
            "seconds_low": run.low,
            "seconds_high": run.high,
            **_in_dollars(run),
        }
    return document


def _in_dollars(run: _OnCluster) -> "dict[str, Json]":
    """Return the dollars to the end and their interval, where prices are known."""
    if run.usd_h is None:
        return {}
    ends = {"usd": run.seconds, "usd_low": run.low, "usd_high": run.high}
    return {name: run.usd_h * (seconds or 0.0) / 3600 for name, seconds in ends.items()}


def _show(found: _Of, run: _OnCluster | None) -> None:
    work = found.work
    face.show(
        f"a micro-batch: {work.flop:.4g} FLOP, {format_bytes(work.moved)} moved, "
        f"{work.parameters:.0f} parameters in {work.tensors:.0f} tensors"
    )
    rows = [
        (
            what,
            of,
            format_seconds(each.seconds),
            f"{format_seconds(each.low)} .. {format_seconds(each.high)}",
            ", ".join(each.outside),
        )
        for what, told in (
            ("step", found.steps),
            ("checkpoint", found.checkpoints),
            ("start", found.starts),
        )
        for of, each in told.items()
    ]
    if not rows:
        face.say("no seconds are predicted without measurements: --fit CSV (docs/fleet_predict.md)")
        return
    face.show(face.table(("what", "on", "predicted", "8 times in 10", "extrapolates in"), rows))
    if run is not None:
        _show_run(run)


def _show_run(run: _OnCluster) -> None:
    speed = run.speed
    face.show(
        f"together: {speed.steps_per_s:.4g} steps per second "
        f"({speed.low:.4g} .. {speed.high:.4g}), held by the {speed.held_by}: {speed.mend}"
    )
    if (found := run.detected) is not None:
        said = "as predicted" if found.as_predicted else "slower than predicted"
        face.show(f"observed: {said}, {found.ratio:.2f} times; {found.held_by}: {found.mend}")
    if run.seconds is not None and run.low is not None and run.high is not None:
        ends = f"{format_seconds(run.low)} .. {format_seconds(run.high)}"
        face.show(f"to the end: {format_seconds(run.seconds)} ({ends})")
    if usd := _in_dollars(run):
        ends = f"{usd['usd_low']:.2f} .. {usd['usd_high']:.2f}"
        face.show(f"it costs {usd['usd']:.2f} dollars ({ends}), at {run.usd_h:.4g} an hour")
