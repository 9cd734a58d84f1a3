"""Predicted against measured: step time and peak bytes of plans on two ranks of this machine.

    python -m bench.predict [--json] [--quick] [--models NAME ...] [--rounds N] [--ahead]

Four models (a GPT whose products dominate, a small GPT, a convolutional network, a network of
unequal layers), each under twenty plans or more: schedules, cuts, recompute, replicas, joined
micro-batches, several stages on a rank, and the plan that the search picks.  Then the
convolutional network again, its ranks in two network namespaces with a line of 25 MB/s and 1 ms
between them.  A plan is predicted (every op measured beside a companion, the link measured, the
program simulated) before any is run.

error          predicted / measured - 1, of the median block
low_s, high_s  the fastest and the slowest block
other          cores that other processes had meanwhile, the median: 0 on a machine that is quiet;
               with --ahead they have what the ranks leave while they wait
bytes          of the rank that holds most
agreement      of all pairs of plans of one model whose measured times differ by more than 3 %,
               the share that the prediction puts in the right order
regret         of each model: measured seconds of the plan that the search picks / of the best - 1
"""

import argparse
import itertools
import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from bench.line import LINE, cluster_over, played_over
from bench.machine import machine
from bench.measure import in_ranks
from bench.network import can_throttle, line
from bench.play import Played, Rounds, Traced, ahead, play
from bench.zoo import JOBS
from penstock.choose.choose import on_hosts_of
from penstock.cli import face
from penstock.cluster import Cluster
from penstock.errors import GraphError
from penstock.gauge.links import measure_link
from penstock.graph.joined.joined import joined as joined_step
from penstock.graph.merge import merged
from penstock.graph.trace import capture
from penstock.job import Job
from penstock.plan import Plan, plan_by_hand
from penstock.profile import Profile
from penstock.profile.measure import measure
from penstock.schedule.recipe import name_of
from penstock.search import Fixed, evaluate, search
from penstock.search.balance import balanced_cuts
from penstock.transport.shared_memory import SharedMemoryTransport
from penstock.units import format_bytes, format_seconds

RANKS = 2
ON_LINE = "cnn"  # what it sends is the smaller the later it is cut
SHARED = ("interleaved", "breadth_first", "hanayo", "zb_v", "v_half", "v_min")  # 2 stages a rank
Row = dict[str, float | int | str | bool]


class Case(NamedTuple):
    """A plan, what it is called, and what is predicted of it."""

    name: str
    plan: Plan
    predicted_s: float
    predicted_bytes: tuple[int, ...]
    searched: bool = False


class Model(NamedTuple):
    """One model, by how many of its micro-batches are joined: traced and profiled."""

    traced: dict[int, Traced]
    profiles: dict[int, Profile]


def prepared(job: Job, *, first: bool = False) -> Model:
    """Return the model with its micro-batches as they are, and two of them joined, where it can.

    first:  measure ahead of other programs.
    """
    model, whole = Model({}, {}), capture(job)
    for joined in (1, 2):
        try:
            traced = Traced(merged(job, joined), joined_step(whole, joined))
        except GraphError:
            continue
        model.traced[joined] = traced
        with ahead(first):
            model.profiles[joined] = measure(traced.captured, traced.job, beside=RANKS - 1)
    return model


def plans(traced: Traced, profile: Profile) -> Iterator[tuple[str, Plan]]:
    """Yield plans of every kind that two ranks allow, most of them for micro-batches as they are.

    Cuts: balanced, and earlier and later by a sixth of the cut points.
    """
    graph, count = traced.captured.graph, traced.job.micro_batches
    clip = traced.job.clip_norm is not None
    (even,) = balanced_cuts(graph, profile.op_s, RANKS)
    by = max(1, len(graph.cut_points) // 6)
    early, late = max(0, even - by), min(len(graph.cut_points) - 1, even + by)

    def by_hand(cuts: Sequence[int], name: str, again: bool = False, copies: int = 1) -> Plan:
        return plan_by_hand(
            graph,
            cuts,
            name,
            num_micro_batches=count // copies,
            num_ranks=RANKS // copies,
            replicas=copies,
            recompute=(again,) * (len(cuts) + 1),
            clip=clip,
        )

    for name in ("gpipe", "one_f_one_b", "zb_h1"):
        yield name, by_hand((even,), name)
        yield f"{name}, early cut", by_hand((early,), name)
        yield f"{name}, late cut", by_hand((late,), name)
        yield f"{name}, recompute", by_hand((even,), name, True)
    yield "two_bp", by_hand((even,), "two_bp")
    yield "2 replicas", by_hand((), "one_f_one_b", copies=2)
    yield "2 replicas, recompute", by_hand((), "one_f_one_b", True, copies=2)
    if len(graph.cut_points) >= 2 * RANKS - 1:
        four = balanced_cuts(graph, profile.op_s, 2 * RANKS)
        for name in SHARED:
            yield name, by_hand(four, name)


def cases(model: Model, cluster: Cluster) -> list[Case]:
    """Return the predictions of all plans of one model; nothing has been run yet."""
    listed = [(name, plan) for name, plan in plans(model.traced[1], model.profiles[1])]
    if 2 in model.traced:
        pairs = plans(model.traced[2], model.profiles[2])
        chosen = ("gpipe", "one_f_one_b", "zb_h1", "2 replicas", "interleaved")
        listed += [(f"{name}, joined", p.changed(joined=2)) for name, p in pairs if name in chosen]
    best = searched(model, cluster)
    found = [_case(name, on_hosts_of(plan, cluster), model, cluster) for name, plan in listed]
    same = [number for number, case in enumerate(found) if _decides(case.plan) == _decides(best)]
    if not same:
        found.append(_case(name_of(best.schedule), best, model, cluster))
    place = same[0] if same else len(found) - 1
    found[place] = found[place]._replace(searched=True)
    return found


def _case(name: str, plan: Plan, model: Model, cluster: Cluster) -> Case:
    graph, profile = (
        model.traced[plan.terms.joined].captured.graph,
        model.profiles[plan.terms.joined],
    )
    candidate, _ = evaluate(graph, profile, cluster, plan)
    return Case(name, plan, candidate.step_s, candidate.peak_bytes)


def _decides(plan: Plan) -> Plan:
    return replace(plan, decisions=(), predicted=None)


def searched(model: Model, cluster: Cluster) -> Plan:
    """Return the plan that the search picks, over all ways of joining."""
    best: list[tuple[float, Plan]] = []
    for joined, traced in model.traced.items():
        plan, everything, *_ = search(
            traced.captured.graph,
            model.profiles[joined],
            cluster,
            micro_batches=traced.job.micro_batches,
            clip=traced.job.clip_norm is not None,
            fixed=Fixed(ranks=RANKS),
        )
        best.append((everything[0].step_s, plan.changed(joined=joined)))
    return min(best, key=lambda each: each[0])[1]


def played_here(model: Model, plans: Sequence[Plan], rounds: Rounds) -> list[Played]:
    """Run plans on two processes that share memory."""

    def work(rank: int, folder: Path) -> list[Any]:
        store = dist.FileStore(str(folder / "store"), RANKS)

        def end_of(number: int) -> SharedMemoryTransport:
            return SharedMemoryTransport(rank, RANKS, dist.PrefixStore(f"plan {number}", store))

        return [tuple(each) for each in play(model.traced, plans, end_of, rounds)]

    return [Played([*blocks], peak) for blocks, peak in in_ranks(work)[0]]


def rows_of(name: str, found: Sequence[Case], played: Sequence[Played]) -> list[Row]:
    """Return one row for each plan of one model."""
    rows: list[Row] = []
    for case, (blocks, measured_bytes) in zip(found, played, strict=True):
        times = sorted(block[0] for block in blocks)
        measured_s = statistics.median(times)
        row: Row = {
            "case": f"{name}: {case.name}",
            "predicted_s": case.predicted_s,
            "measured_s": measured_s,
            "error": case.predicted_s / measured_s - 1,
            "predicted_bytes": max(case.predicted_bytes),
            "measured_bytes": measured_bytes,
            "bytes_error": max(case.predicted_bytes) / measured_bytes - 1,
            "low_s": times[0],
            "high_s": times[-1],
            "other": statistics.median(block[1] for block in blocks),
            "searched": case.searched,
        }
        rows.append(row)
    return rows


def agreement(rows: Sequence[Row]) -> float:
    """Return the share of clearly different pairs that the prediction puts in the right order."""
    right = pairs = 0
    for a, b in itertools.combinations(rows, 2):
        ratio = float(a["measured_s"]) / float(b["measured_s"])
        if _model(a) == _model(b) and not 1 / 1.03 < ratio < 1.03:
            pairs += 1
            right += (float(a["predicted_s"]) > float(b["predicted_s"])) == (ratio > 1)
    return right / pairs if pairs else 1.0


def _model(row: Row) -> str:
    return str(row["case"]).split(":")[0]


def summary_of(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the figures of all rows, and by model."""
    models = {name: [*group] for name, group in itertools.groupby(rows, _model)}
    return {
        **_errors(rows),
        "agreement": agreement(rows),
        "models": {
            name: {"plans": len(group), **_errors(group), "regret": regret(group)}
            for name, group in models.items()
        },
    }


def _errors(rows: Sequence[Row]) -> dict[str, float]:
    return {
        f"median_{key}": statistics.median(abs(float(row[key])) for row in rows)
        for key in ("error", "bytes_error")
    }


def regret(rows: Sequence[Row]) -> float:
    """Return by how much the plan that the search picked is slower than the best one measured."""
    picked = next(float(row["measured_s"]) for row in rows if row["searched"])
    return picked / min(float(row["measured_s"]) for row in rows) - 1


# -- the whole bench ------------------------------------------------------------------------------


def series(names: Sequence[str], rounds: Rounds) -> Iterator[list[Row]]:
    """Yield the rows of each model, and then of one over a slow line."""
    with ahead(rounds.ahead):
        cluster = replace(Cluster.here(RANKS), inside=measure_link())
    models: dict[str, Model] = {}
    for name in names:
        face.say(f"{name}: tracing, measuring, searching")
        models[name] = prepared(JOBS[name], first=rounds.ahead)
        found = cases(models[name], cluster)
        plans = [case.plan for case in found]
        yield rows_of(name, found, played_here(models[name], plans, rounds))
    if ON_LINE not in models:
        return
    works, why = can_throttle()
    if not works:
        face.say(f"no series over a slow line: {why}")
        return
    with line(*LINE) as places, tempfile.TemporaryDirectory() as folder:
        face.say(f"{ON_LINE} over a line: measuring it, searching")
        with ahead(rounds.ahead):
            cluster = cluster_over(places, Path(folder))
        found = cases(models[ON_LINE], cluster)
        plans = [case.plan for case in found]
        played = played_over(places, Path(folder), ON_LINE, plans, rounds)
        yield rows_of(f"{ON_LINE} over a line", found, played)


def table(rows: Sequence[Row]) -> str:
    """Return a line for each row; a star stands at the plan that the search picks."""
    lines: list[str] = []
    for row in rows:
        sizes = (format_bytes(int(row[key])) for key in ("predicted_bytes", "measured_bytes"))
        keys = ("predicted_s", "measured_s", "low_s", "high_s")
        predicted, measured, low, high = (format_seconds(float(row[key])) for key in keys)
        lines.append(
            f"{'*' if row['searched'] else ' '} {row['case']:38} {predicted} / {measured:9} "
            f"({low} to {high})".ljust(80)
            + f"{100 * float(row['error']):+6.1f} %   {' / '.join(sizes):22} "
            f"{100 * float(row['bytes_error']):+6.1f} %   {float(row['other']):.2f}"
        )
    return "\n".join(lines)


def _words(summary: Mapping[str, Any]) -> str:
    lines = [
        f"{name}: {each['plans']} plans, median error {100 * each['median_error']:.1f} % in time, "
        f"{100 * each['median_bytes_error']:.2f} % in bytes, regret {100 * each['regret']:.1f} %"
        for name, each in summary["models"].items()
    ]
    whole = (
        f"all: median error {100 * summary['median_error']:.1f} % in time, "
        f"{100 * summary['median_bytes_error']:.2f} % in bytes, "
        f"{100 * summary['agreement']:.0f} % of pairs in the right order"
    )
    return "\n".join([*lines, whole])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="one model, two short rounds")
    parser.add_argument("--models", nargs="+", choices=[*JOBS], default=[*JOBS])
    parser.add_argument("--rounds", type=int, default=Rounds().turns)
    parser.add_argument(
        "--ahead", action="store_true", help="on a machine in use: blocks run first (as root)"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = [*JOBS][-1:] if options.quick else options.models
    rounds = Rounds(2, 0.2) if options.quick else Rounds(options.rounds)
    rounds = rounds._replace(ahead=options.ahead)
    rows: list[Row] = []
    for group in series(names, rounds):
        rows += group
        if options.json:
            face.say(table(group))
        else:
            print(table(group), flush=True)
    summary = summary_of(rows)
    if options.json:
        print(json.dumps({"rows": rows, **summary, "machine": machine()}))
    else:
        print(_words(summary), machine(), sep="\n")


if __name__ == "__main__":
    main()
